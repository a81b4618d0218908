"""An in-memory cluster of engines for tests: a deterministic model, prefill-decode semantics, and faults on request.

The next token is a function of the context alone, so any run can be compared with `reference`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prorsa.engines.protocol import (
    ALL_ROLES,
    Bootstrap,
    Chunk,
    EngineBusy,
    EngineError,
    EngineGone,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Load,
    Role,
    SamplingParams,
    Shortage,
    in_place,
)

VOCABULARY = 97
STOP = 0
GARBAGE = 9999
"""A token that the model never gives."""


class Model:
    """next token = hash of the context."""

    def __init__(self, context: Sequence[int]) -> None:
        self._hash = 17
        for token in context:
            self._push(token)

    def _push(self, token: int) -> None:
        self._hash = (self._hash * 1_000_003 + token + 1) % (1 << 61)

    def step(self) -> tuple[int, float]:
        token = (self._hash >> 20) % VOCABULARY
        self._push(token)
        return token, -(token + 1) / VOCABULARY


def reference(input_ids: Sequence[int], sampling: SamplingParams) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(tokens, log-probabilities) of a run that nothing disturbs."""
    model = Model(input_ids)
    tokens: list[int] = []
    logprobs: list[float] = []
    while len(tokens) < sampling.max_new_tokens:
        token, logprob = model.step()
        tokens.append(token)
        logprobs.append(logprob)
        if token in sampling.stop_token_ids:
            break
    return tuple(tokens), tuple(logprobs)


class Broken(Exception):
    """Interrupts the legs of an engine that dies or whose connections break."""


@dataclass(eq=False)
class Leg:
    rid: str
    interrupt: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Resolved by an abort, failed by death."""


class World:
    """Where prefill and decode sides meet: one future a room, resolved when the KV cache has been handed over."""

    def __init__(self) -> None:
        self._rooms: dict[Bootstrap, asyncio.Future[None]] = {}
        self.aborts: list[tuple[str, str | None]] = []
        """(engine, rid) of every abort that arrived."""
        self._attempts: dict[str, list[str]] = {}
        """trajectory.turn -> rid of each of its live legs."""
        self._firsts: dict[str, GenerateRequest] = {}
        """trajectory.turn -> the first request that was made for it."""
        self._cancelled: dict[str, float] = {}
        """rid -> when an engine was first told to abort it."""
        self.wrong: list[str] = []
        """What no engine may see, in words."""
        self.given_up: Callable[[str], bool] = lambda engine: False
        """Whether an engine counts as dead: it gets no aborts then, its connections are closed."""

    def leg_starts(self, request: GenerateRequest) -> None:
        """A turn may have no two attempts alive, anywhere; each asks for what is left of the turn, and for no more."""
        turn = request.rid.rpartition(".")[0]
        legs = self._attempts.setdefault(turn, [])
        if set(legs) - {request.rid}:
            self.wrong.append(f"{request.rid} starts while {legs} live")
        legs.append(request.rid)
        first = self._firsts.setdefault(turn, request)
        prompt, context = tuple(first.input_ids), tuple(request.input_ids)
        left = first.sampling.max_new_tokens - (len(context) - len(prompt))
        if context[: len(prompt)] != prompt or request.sampling.max_new_tokens != left:
            self.wrong.append(f"{request.rid} asks for {request.sampling.max_new_tokens} tokens; {left} are left")

    def aborted(self, engine: str, rid: str | None) -> None:
        self.aborts.append((engine, rid))
        if rid is not None:
            self._cancelled.setdefault(rid, asyncio.get_running_loop().time())

    def leg_ends(self, engine: str, rid: str, closed: bool) -> None:
        """A cancel reaches both sides: where an attempt was aborted on one, no leg on the other may go on without an abort,
        or be `closed` without one by who reads it."""
        self._attempts[rid.rpartition(".")[0]].remove(rid)
        cancelled = self._cancelled.get(rid, math.inf)
        late = cancelled < asyncio.get_running_loop().time()
        missed = (late or (closed and cancelled < math.inf)) and not self.given_up(engine)
        if missed and not {(engine, rid), (engine, None)} & set(self.aborts):
            self.wrong.append(f"{rid} was aborted at {cancelled} s, but not on {engine}")

    def live(self, turn: str) -> list[str]:
        """rid of each live leg of `trajectory.turn`, on any engine."""
        return self._attempts.get(turn, [])

    def room(self, bootstrap: Bootstrap) -> asyncio.Future[None]:
        return self._rooms.setdefault(bootstrap, asyncio.get_running_loop().create_future())


class FakeEngine:
    """Times in seconds of loop time. Faults are attributes that a test sets."""

    tells_progress = True

    def __init__(
        self,
        name: str,
        world: World,
        role: Role,
        *,
        version: int = 0,
        capacity: int = 100_000,
        prefill_s: float = 0.1,
        token_s: float = 0.01,
        flip_s: float = 0.5,
        update_s: float = 1.0,
    ) -> None:
        self.name = name
        self.bootstrap_host = name
        self.bootstrap_port = 1
        self.roles = ALL_ROLES
        self.world = world
        self.role = role
        self.version = version
        self.capacity = capacity
        self.prefill_s = prefill_s
        self.token_s = token_s
        self.flip_s = flip_s
        self.update_s = update_s
        self.legs: dict[str, Leg] = {}
        self.served: list[GenerateRequest] = []
        """The request of every leg it accepted."""
        self.flips = 0
        self.dead = False
        self.hung = False
        """Accepts everything and gives nothing; answers health checks."""
        self.refuse = 0
        """How many more requests are refused as busy."""
        self.handover_s = 0.0
        """From the handover of the KV cache until the prefill leg says so."""
        self.refuse_flips = 0
        """How many more times it claims not to be idle."""
        self.flip_fault: str | None = None
        """noop, fail, hang or die."""
        self.update_fault: str | None = None
        """fail, lie or die."""
        self.late_tokens = 0
        """Tokens that are still given after an abort."""
        self.deaf = False
        """Ignores aborts."""
        self.spoils_aborted_prefills = False
        """Gives garbage from a decode that is aborted before its KV cache arrived."""
        self.finish_apart = False
        """Gives the last token and the finish in separate chunks, `token_s` apart."""
        self.healthy_s = 0.0
        self.tells = False
        """Whether its load has a mark, which moves with time until it is hung."""
        self.room: asyncio.Event | None = None
        """What decodes of the trajectory "waiting" wait for."""
        self.shortages = 0
        """How many more questions our own process cannot ask it."""
        self.closed = False

    # The stream.

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._answer()
        if self.refuse > 0:
            self.refuse -= 1
            raise EngineBusy(f"engine {self.name}: asked {request.rid}; answered 503: queue full")
        assert request.rid not in self.legs, f"{request.rid} is live on {self.name} already"
        self.world.leg_starts(request)
        leg = self.legs[request.rid] = Leg(request.rid)
        self.served.append(request)
        closed = True
        try:
            stream = self._prefill if self.role is Role.PREFILL else self._decode
            async for chunk in stream(request, leg):
                closed = chunk.finish is None
                yield chunk
        except Broken:
            closed = False
            raise EngineGone(f"engine {self.name}: asked {request.rid}; the stream broke off") from None
        finally:
            leg.interrupt.cancel()
            self.legs.pop(request.rid, None)
            self.world.leg_ends(self.name, request.rid, closed)

    async def _prefill(self, request: GenerateRequest, leg: Leg) -> AsyncIterator[Chunk]:
        assert request.bootstrap is not None
        assert request.bootstrap.host == self.name, "a prefill leg has to meet its decode at its own bootstrap server"
        if await self._interrupted(leg, self.prefill_s):
            yield self._abort_chunk()
            return
        room = self.world.room(request.bootstrap)
        if not room.done():
            room.set_result(None)
        if self.handover_s and await self._interrupted(leg, self.handover_s):
            yield self._abort_chunk()
            return
        yield Chunk((), (), self.version, len(request.input_ids) // 2, FinishReason.LENGTH)

    async def _decode(self, request: GenerateRequest, leg: Leg) -> AsyncIterator[Chunk]:
        if request.bootstrap is not None:
            arrived: asyncio.Future[None] = asyncio.shield(self.world.room(request.bootstrap))
            await asyncio.wait({arrived, leg.interrupt}, return_when=asyncio.FIRST_COMPLETED)
            if not arrived.done():
                if not leg.interrupt.cancelled():
                    leg.interrupt.result()
                if self.spoils_aborted_prefills:
                    yield Chunk((GARBAGE,), (0.0,), self.version)
                yield self._abort_chunk()
                return
        elif await self._interrupted(leg, self.prefill_s):
            yield self._abort_chunk()
            return
        if self.room is not None and request.rid.startswith("waiting"):
            await self.room.wait()
        model, late = Model(request.input_ids), self.late_tokens
        for index in range(request.sampling.max_new_tokens):
            if (index > 0 or self.hung) and await self._interrupted(leg, self.token_s):
                if late == 0:
                    yield self._abort_chunk()
                    return
                late -= 1
                await asyncio.sleep(self.token_s)
            token, logprob = model.step()
            finish = None
            if token in request.sampling.stop_token_ids:
                finish = FinishReason.STOP
            elif index + 1 == request.sampling.max_new_tokens:
                finish = FinishReason.LENGTH
            if finish is not None and self.finish_apart:
                yield Chunk((token,), (logprob,), self.version)
                aborted = await self._interrupted(leg, self.token_s)
                yield self._abort_chunk() if aborted else Chunk((), (), self.version, 0, finish)
                return
            yield Chunk((token,), (logprob,), self.version, 0, finish)
            if finish is not None:
                return

    async def _interrupted(self, leg: Leg, seconds: float) -> bool:
        await asyncio.wait({leg.interrupt}, timeout=None if self.hung else seconds)
        if leg.interrupt.done():
            leg.interrupt.result()
            return True
        return False

    def _abort_chunk(self) -> Chunk:
        return Chunk((), (), self.version, 0, FinishReason.ABORT)

    # Control.

    async def abort(self, rid: str | None = None) -> None:
        self._answer()
        self.world.aborted(self.name, rid)
        if self.deaf:
            return
        for leg in self.legs.values():
            if (rid is None or leg.rid == rid) and not leg.interrupt.done():
                leg.interrupt.set_result(None)

    async def load(self) -> Load:
        self._answer()
        mark = (0.0 if self.hung else asyncio.get_running_loop().time()) if self.tells else None
        waiting = sum(rid.startswith("waiting") for rid in self.legs) if self.room is not None else 0
        return Load(len(self.legs) - waiting, waiting, 0, self.capacity, mark)

    async def info(self) -> EngineInfo:
        self._answer()
        return EngineInfo(self.role, self.version, "model")

    async def switch_role(self, role: Role) -> None:
        self._answer()
        if (self.legs and not in_place(self.role, role)) or self.refuse_flips > 0:
            self.refuse_flips -= 1
            raise EngineBusy(f"engine {self.name}: not idle: {list(self.legs)}")
        if self.flip_fault == "hang":
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep(self.flip_s)
        self._answer()
        match self.flip_fault:
            case "noop":
                return
            case "fail":
                raise EngineError(f"engine {self.name}: rebuild failed")
            case "die":
                self.die()
                self._answer()
        self.flips += 1
        self.role = role

    async def update_weights(self, path: str, version: int) -> None:
        self._answer()
        await self.abort()
        await asyncio.sleep(self.update_s)
        match self.update_fault:
            case "lie":
                return
            case "fail":
                raise EngineError(f"engine {self.name}: cannot read {path}")
            case "die":
                self.die()
        self._answer()
        self.version = version

    async def healthy(self) -> bool:
        self._ask()
        await asyncio.sleep(self.healthy_s)
        return not self.dead

    async def close(self) -> None:
        self.closed = True

    def die(self) -> None:
        self.dead = True
        self.break_streams()

    def break_streams(self) -> None:
        for leg in self.legs.values():
            if not leg.interrupt.done():
                leg.interrupt.set_exception(Broken())

    def _ask(self) -> None:
        if self.shortages > 0:
            self.shortages -= 1
            raise Shortage(f"engine {self.name}: this process cannot connect now")

    def _answer(self) -> None:
        self._ask()
        if self.dead:
            raise EngineGone(f"engine {self.name}: no answer")


class FakeRestarter:
    """Starts engines like those that died; `failures` restarts fail first."""

    def __init__(self, world: World, **engine: Any) -> None:
        self.world = world
        self.engine = engine
        self.seconds = 2.0
        self.failures = 0
        self.errors: list[Exception] = []
        """What the next restarts meet."""
        self.restarted: list[tuple[str, Role]] = []
        self.engines: dict[str, FakeEngine] = {}

    async def restart(self, name: str, role: Role) -> FakeEngine:
        await asyncio.sleep(self.seconds)
        if self.errors:
            raise self.errors.pop(0)
        if self.failures > 0:
            self.failures -= 1
            raise EngineError(f"engine {name}: did not come up")
        self.restarted.append((name, role))
        self.engines[name] = FakeEngine(name, self.world, role, **self.engine)
        return self.engines[name]
