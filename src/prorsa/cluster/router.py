"""The router: one ready queue in front of the routing pools, and cancel-and-resend behind every turn (paper, Appendix C).

Invariants. The queue is served strictly in the order in which requests became READY. A turn has one live attempt at most;
each leg of an attempt runs in a task of its own, and the turn goes on only when both are closed and the attempt's books are
cleared. A turn ends with its whole output, with `TurnFailed`, or with the cancellation of its caller, and never because an
instance was drained.

The caller of a turn sleeps from the queue until the end: what happens between is done by the tasks of the legs.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from prorsa.cluster.attempts import Attempt, End, Turn, Verdict
from prorsa.cluster.instances import Fleet, Instance, InstanceState
from prorsa.cluster.observers import TurnRecord
from prorsa.cluster.placement import Affinity, Resident, choose_decode, choose_moves, choose_prefill, choose_way
from prorsa.cluster.turns import Listener, TurnFailed, TurnRequest, TurnResult
from prorsa.engines.protocol import (
    Bootstrap,
    Chunk,
    EngineBusy,
    EngineError,
    EngineGone,
    FinishReason,
    Role,
    Shortage,
)
from prorsa.lifecycle.events import DecodeStarted, Event, PrefillStarted, Ready, Requeued

logger = logging.getLogger(__name__)

ABORT_RETRY = 0.25
"""Seconds until an abort is sent again: one that overtakes its own request finds nothing to abort."""
MAX_BACKOFF = 2.0
"""Seconds; an instance's backoff doubles up to here while it keeps failing."""
PROBE_TIMEOUT = 10.0
"""Seconds that an instance whose connection broke has to prove that it lives."""
MAX_STALLS = 2
"""Attempts in a row that may fall silent on an instance before it counts as dead, whatever its health check says."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the router. Times in seconds."""

    prefill_slots: int = 4
    """Outstanding prefills an instance. Small, so that the backlog is in our queue, where the forecast sees it."""
    decode_slots: int = 256
    """Decodes an instance; what its engine runs at once is a good value."""
    decode_headroom: int = 512
    """KV-cache tokens that a decode must find beyond its prompt (less where its budget is less)."""
    cancel_timeout: float = 5.0
    """How long the tokens of a cancelled attempt are waited for."""
    stall_timeout: float = 300.0
    """An attempt that gives nothing for so long has failed, unless it waits in the queue of an engine that serves others; so
    has a queue of which nothing can be placed."""
    backoff: float = 0.05
    """How long nothing is sent to an instance that refused or failed a request, the first time."""
    max_failures: int = 5
    """Attempts of one turn that may fail in a row without giving a token. Cancelled ones do not count."""


class Router:
    """Serves turns on the instances of a fleet.

    `record` takes the events Ready, PrefillStarted, DecodeStarted and Requeued; `decoded` is told of each piece of output
    while a trajectory is in DECODE; `finished` gets the record of each finished turn.
    """

    def __init__(
        self,
        fleet: Fleet,
        record: Callable[[Event], None],
        decoded: Callable[[str, int], None],
        finished: Callable[[TurnRecord], None],
        limits: Limits,
    ) -> None:
        self._fleet = fleet
        self._record = record
        self._decoded = decoded
        self._finished = finished
        self._limits = limits
        self._affinity = Affinity()
        self._ready: deque[Turn] = deque()
        self._live: dict[str, Attempt] = {}
        self.rooms = itertools.count(1)
        """Each attempt takes the next one."""
        self._paused = False
        self._closed = False
        self._moved_at = 0.0
        self._stall_check: asyncio.TimerHandle | None = None
        self._silence_check: asyncio.TimerHandle | None = None
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._evens_out = False
        self._moving: list[Turn] = []
        """Turns on their way to an emptier instance that have no new attempt yet."""
        fleet.watchers.append(self._instance_changed)

    # What the rollout uses.

    async def generate(self, request: TurnRequest, listener: Listener | None = None) -> TurnResult:
        """Serve one model turn. Raises `TurnFailed`."""
        if request.sampling.max_new_tokens < 1:
            raise ValueError(f"turn {request.trajectory}.{request.turn}: max_new_tokens must be 1 or more")
        turn = Turn(request, self._now, listener)
        self._refuse_when_closed(turn)
        self._record(Ready(turn.ready, request.trajectory, turn.prompt_tokens, request.kept))
        self._queue(turn)
        self._dispatch()
        try:
            return await turn.outcome
        except asyncio.CancelledError:
            await self._abandon(turn)
            raise

    # What the switcher and the control plane use.

    @property
    def waiting(self) -> int:
        return len(self._ready)

    @property
    def live(self) -> int:
        """Attempts in service."""
        return len(self._live)

    async def drain(self, instance: Instance, reason: str) -> int:
        """Cancel whatever uses the instance; returns how many requests, when the last of them is closed."""
        return await self._cancel(instance.rids, reason)

    def even_out(self, wanted: bool) -> None:
        """Whether, from now on, decodes of fuller instances move to emptier ones, such as those that have just joined:
        cancelled and sent again, no more at a time than prefill has slots for, and only while nothing waits."""
        self._evens_out = wanted
        self._move_decodes()

    async def cancel_all(self, reason: str) -> int:
        return await self._cancel(list(self._live), reason)

    def pause(self) -> None:
        """Dispatch nothing until `resume`; turns may join the queue."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._moved_at = self._now
        self._dispatch()

    def bury(self, instance: Instance, reason: str) -> None:
        """The instance is dead: take it out and resend everything that it served."""
        if instance.state is InstanceState.DEAD:
            return
        logger.warning("instance %s is dead: %s", instance.name, reason)
        rids = instance.rids
        instance.problem = reason
        self._fleet.move(instance, InstanceState.DEAD)
        for rid in rids:
            self._end(self._live[rid], End.FAILED, f"instance {instance.name} died: {reason}")

    async def close(self) -> None:
        """Fail every turn and leave nothing behind on any instance."""
        self._closed = True
        self._fail_queue("the cluster is stopping")
        await self.cancel_all("the cluster is stopping")
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for check in (self._stall_check, self._silence_check):
            if check is not None:
                check.cancel()
        self._stall_check = self._silence_check = None

    # The ready queue.

    def _queue(self, turn: Turn) -> None:
        if not self._ready:
            self._moved_at = self._now
        self._ready.append(turn)

    def _dispatch(self) -> None:
        """Start the turns at the head of the queue for as long as there is room."""
        while self._ready and not self._paused:
            turn = self._ready[0]
            pair = self._choose(turn)
            if pair is None:
                break
            self._ready.popleft()
            if not turn.outcome.done():
                self._launch(turn, *pair)
        self._move_decodes()
        self._watch_queue()

    def _move_decodes(self) -> None:
        """Take the next few decodes off fuller instances, when those before have been placed."""
        if not self._evens_out or self._ready or self._paused:
            return
        self._moving = [turn for turn in self._moving if not (turn.outcome.done() or turn.in_service)]
        if self._moving:
            return
        pool, slots = self._fleet.pool, self._limits.prefill_slots
        free = sum(max(0, slots - i.prefills) for role in (Role.PREFILL, Role.MIXED) for i in pool(role))
        if not free:
            return
        decoding = [*pool(Role.DECODE), *pool(Role.MIXED)]
        # A decode instance that nobody prefills for can be left, but not reached.
        targets = decoding if pool(Role.PREFILL) else pool(Role.MIXED)
        residents = (
            Resident(rid, a.decode, len(a.request.input_ids) + len(a.tokens), a.decode.reserved(rid))
            for rid, a in self._live.items()
            if a.started and a.verdict is None and a.decode.state is InstanceState.ROUTED
        )
        for rid, target in choose_moves(decoding, targets, residents, free):
            attempt = self._live[rid]
            attempt.turn.moves_to = target
            self._moving.append(attempt.turn)
            self._end(attempt, End.MOVED, f"{target.name} is emptier than {attempt.decode.name}")

    def _choose(self, turn: Turn) -> tuple[Instance, Instance] | None:
        """(prefill, decode) instances with room for the turn, or a mixed one for both."""
        now, pool = self._now, self._fleet.pool
        slots, decode_slots = self._limits.prefill_slots, self._limits.decode_slots
        tokens, need = turn.prompt_tokens, self._reservation(turn)
        favourite, former = self._affinity.find(turn.prefixes)
        decoding = {
            role: [i for i in pool(role) if i.has_decode_slot(decode_slots, need, now)]
            for role in (Role.DECODE, Role.MIXED)
        }
        if not pool(Role.PREFILL):
            decoding[Role.DECODE] = []
        if turn.moves_to is not None and any(turn.moves_to in instances for instances in decoding.values()):
            decoding = {role: [i for i in instances if i is turn.moves_to] for role, instances in decoding.items()}
        both = [i for i in decoding[Role.MIXED] if i.has_prefill_slot(slots, now)]
        mixed = choose_prefill(both, tokens, favourite)
        together = None if mixed is None else (mixed, mixed)
        prefill = choose_prefill([i for i in pool(Role.PREFILL) if i.has_prefill_slot(slots, now)], tokens, favourite)
        if prefill is None:
            return together
        decode = choose_decode(decoding[Role.DECODE], need, former)
        if decode is None:
            return together
        apart = prefill, decode
        return apart if together is None else choose_way([apart, together], tokens, need, favourite)

    def _reservation(self, turn: Turn) -> int:
        """KV-cache tokens that a decode of the turn is promised."""
        return turn.prompt_tokens + min(turn.budget, self._limits.decode_headroom)

    def _launch(self, turn: Turn, prefill: Instance, decode: Instance) -> None:
        now = self._now
        try:
            self._record(PrefillStarted(now, turn.request.trajectory, prefill.name))
        except Exception as error:
            turn.outcome.set_exception(error)
            return
        bootstrap = None
        if prefill is not decode:
            engine = prefill.engine
            bootstrap = Bootstrap(engine.bootstrap_host, engine.bootstrap_port, next(self.rooms))
        attempt = Attempt(turn.next_request(bootstrap), prefill, decode, turn.deliver, progressed_at=now)
        attempt.turn, turn.attempt, turn.moves_to = turn, attempt, None
        turn.instances.append((prefill.name, decode.name))
        prefill.begin_prefill(attempt.rid, turn.prompt_tokens)
        decode.begin_decode(attempt.rid, self._reservation(turn))
        self._affinity.remember(turn.prefixes, prefill, decode)
        self._moved_at = now
        self._live[attempt.rid] = attempt
        self._start_leg(attempt, decode, self._take_decoded)
        if not attempt.mixed:
            self._start_leg(attempt, prefill, self._take_prefilled)
        self._watch_silence()

    def _watch_queue(self) -> None:
        if self._ready and self._stall_check is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._stall_check = loop.call_later(self._limits.stall_timeout, self._check_stall)

    def _check_stall(self) -> None:
        """Nothing is in service and nothing could be placed for too long: the queue fails rather than hang."""
        self._stall_check = None
        stalled = self._now >= self._moved_at + self._limits.stall_timeout
        if stalled and not self._live and not self._paused:
            states = ", ".join(f"{i.name} {i.role} {i.state}" for i in self._fleet)
            self._fail_queue(f"no instances to place it on ({states})")
        self._watch_queue()

    def _fail_queue(self, reason: str) -> None:
        for turn in self._ready:
            if not turn.outcome.done():
                turn.outcome.set_exception(self._failure(turn, reason))
        self._ready.clear()

    # One attempt.

    def _start_leg(self, attempt: Attempt, instance: Instance, take: Callable[[Attempt, Chunk], None]) -> None:
        name = f"{attempt.rid} on {instance.name}"
        leg = asyncio.create_task(self._run_leg(attempt, instance, take), name=name)
        attempt.legs[leg] = instance
        leg.add_done_callback(partial(self._leg_closed, attempt))

    async def _run_leg(self, attempt: Attempt, instance: Instance, take: Callable[[Attempt, Chunk], None]) -> None:
        """Read one leg's stream to its end. An engine's error becomes the attempt's verdict."""
        if attempt.verdict is not None:
            return
        # A prefill leg that breaks after decode has started has already done what the attempt needed.
        needed = instance is attempt.decode
        try:
            # Engines implement `generate` as an async generator: closing it is how a leg is cancelled.
            stream = cast(AsyncGenerator[Chunk, None], instance.engine.generate(attempt.request))
            try:
                async for chunk in stream:
                    if chunk.finish is not FinishReason.ABORT:
                        attempt.progressed_at = self._moved_at = self._now
                        instance.failures = instance.stalls = 0
                        instance.gave_at = self._now
                    take(attempt, chunk)
                    if chunk.finish is not None:
                        return
            finally:
                await stream.aclose()
            raise EngineGone(f"engine {instance.name}: asked {attempt.rid}; the stream ended without a finish")
        except EngineBusy as error:
            self._back_off(instance)
            self._end(attempt, End.REFUSED, str(error))
        except EngineError as error:
            if needed or not attempt.started:
                self._end(attempt, End.FAILED, str(error))
            self._back_off(instance)
            if isinstance(error, EngineGone):
                self._probe(instance, str(error))
        except Exception as error:
            self._crash(attempt, error)

    def _take_prefilled(self, attempt: Attempt, chunk: Chunk) -> None:
        attempt.cached_tokens = max(attempt.cached_tokens, chunk.cached_tokens)
        if chunk.finish is FinishReason.ABORT:
            if not attempt.started:
                self._end(attempt, End.FAILED, f"engine {attempt.prefill.name} aborted the prefill by itself")
        elif chunk.finish is not None:
            self._start_decode(attempt)

    def _take_decoded(self, attempt: Attempt, chunk: Chunk) -> None:
        if not attempt.accepts:
            return
        attempt.cached_tokens = max(attempt.cached_tokens, chunk.cached_tokens)
        if chunk.token_ids:
            self._start_decode(attempt)
            if attempt.collect(chunk, self._now):
                self._end(attempt, End.CANCELLED, "its caller has enough")
            attempt.decode.grow_decode(attempt.rid, len(attempt.request.input_ids) + len(attempt.tokens))
            self._decoded(attempt.trajectory, len(chunk.token_ids))
        if chunk.finish is FinishReason.ABORT:
            self._end(attempt, End.FAILED, f"engine {attempt.decode.name} aborted the request by itself")
        elif chunk.finish is not None:
            self._start_decode(attempt)
            attempt.finish = chunk.finish
            self._end(attempt, End.FINISHED, chunk.finish.value)

    def _start_decode(self, attempt: Attempt) -> None:
        """The decode admission: the prefill instance has done its part and has room for the next."""
        if attempt.started or not attempt.accepts:
            return
        attempt.started = True
        attempt.prefill.end_prefill(attempt.rid)
        self._record(DecodeStarted(self._now, attempt.trajectory, attempt.decode.name))
        self._dispatch()

    # The end of an attempt.

    def _end(self, attempt: Attempt, end: End, reason: str) -> None:
        """The first verdict stands. Legs that do not end by themselves are closed."""
        if attempt.verdict is None:
            attempt.verdict = Verdict(end, reason)
            if end is not End.FINISHED:
                self._start_closing(attempt)

    def _crash(self, attempt: Attempt, error: Exception) -> None:
        attempt.error = attempt.error or error
        self._end(attempt, End.FAILED, repr(error))

    async def _abandon(self, turn: Turn) -> None:
        """The caller is gone. Were this wait cancelled too, the attempt would still be closed."""
        attempt = turn.attempt
        if attempt is not None:
            attempt.abandoned = True
            self._end(attempt, End.CANCELLED, "its caller was cancelled")
            await asyncio.wait({attempt.closed})
        elif turn in self._ready:
            self._ready.remove(turn)
            self._dispatch()

    async def _cancel(self, rids: list[str], reason: str) -> int:
        live = [self._live[rid] for rid in rids]
        for attempt in live:
            self._end(attempt, End.CANCELLED, reason)
        if live:
            await asyncio.wait({attempt.closed for attempt in live})
        return len(live)

    def _start_closing(self, attempt: Attempt) -> None:
        attempt.closing = asyncio.create_task(self._close_legs(attempt), name=f"closing {attempt.rid}")
        attempt.closing.add_done_callback(lambda _: self._close_if_ended(attempt))

    async def _close_legs(self, attempt: Attempt) -> None:
        """Let a finished attempt's prefill leg end; abort the legs of any other and take its last tokens, within a bound."""
        deadline = self._now + self._limits.cancel_timeout
        try:
            if attempt.legs and attempt.finish is not None:
                await asyncio.wait(attempt.legs, timeout=self._limits.cancel_timeout)
            while self._now < deadline:
                legs = {
                    leg: i for leg, i in attempt.legs.items() if not leg.done() and i.state is not InstanceState.DEAD
                }
                if not legs:
                    break
                await asyncio.gather(*(self._abort(instance, attempt.rid, deadline) for instance in legs.values()))
                await asyncio.wait(legs, timeout=min(ABORT_RETRY, max(0.0, deadline - self._now)))
        except Exception as error:
            self._crash(attempt, error)
        finally:
            for leg in attempt.legs:
                leg.cancel()

    async def _abort(self, instance: Instance, rid: str, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await instance.engine.abort(rid)
        except TimeoutError:
            logger.warning("instance %s did not answer the abort of %s in time", instance.name, rid)
        except EngineGone as error:
            self._probe(instance, str(error))
        except EngineError as error:
            logger.warning("abort of %s failed, its connection is closed instead: %s", rid, error)

    def _leg_closed(self, attempt: Attempt, leg: asyncio.Task[None]) -> None:
        del attempt.legs[leg]
        if attempt.legs and attempt.finish is not None and attempt.closing is None:
            self._start_closing(attempt)
        self._close_if_ended(attempt)

    def _close_if_ended(self, attempt: Attempt) -> None:
        closing = attempt.closing is not None and not attempt.closing.done()
        if attempt.legs or closing or attempt.closed.done():
            return
        attempt.prefill.end_prefill(attempt.rid)
        attempt.decode.end_decode(attempt.rid)
        del self._live[attempt.rid]
        attempt.turn.attempt = None
        attempt.closed.set_result(None)
        if not attempt.turn.outcome.done():
            self._go_on(attempt.turn, attempt)
        self._dispatch()

    def _go_on(self, turn: Turn, attempt: Attempt) -> None:
        """The turn ends, or queues for what is left of it."""
        # Nobody but the router should cancel legs; a turn survives that too.
        verdict = attempt.verdict or Verdict(End.FAILED, "its legs were cancelled")
        try:
            if attempt.error is not None:
                raise attempt.error
            turn.keep(attempt, verdict)
            if turn.finish is not None:
                turn.outcome.set_result(self._finish(turn, turn.finish))
                return
            self._refuse_when_closed(turn)
            self._refuse_when_hopeless(turn)
            self._record(Requeued(self._now, turn.request.trajectory, turn.prompt_tokens))
            self._queue(turn)
        except Exception as error:
            turn.outcome.set_exception(error)

    # Attempts that fall silent.

    def _watch_silence(self) -> None:
        if self._silence_check is None:
            loop = asyncio.get_running_loop()
            self._silence_check = loop.call_later(self._limits.stall_timeout, self._check_silence)

    def _check_silence(self) -> None:
        """End the attempts that gave nothing for too long, and look again when the next one will have.

        By its deadline, not by how long it was silent: the rest of a silence can be too short to move the clock.
        """
        self._silence_check = None
        timeout = self._limits.stall_timeout
        for attempt in list(self._live.values()):
            if attempt.verdict is None and self._now >= attempt.progressed_at + timeout:
                if self._queues(attempt):
                    attempt.progressed_at = self._now
                    continue
                self._end(attempt, End.FAILED, f"nothing came for {timeout} s")
                self._blame(attempt)
        deadlines = [attempt.progressed_at + timeout for attempt in self._live.values() if attempt.verdict is None]
        if deadlines:
            self._silence_check = asyncio.get_running_loop().call_at(min(deadlines), self._check_silence)

    def _queues(self, attempt: Attempt) -> bool:
        """Whether its silence may be a wait, for KV room or behind others: one of its instances has requests in its queue and
        has served others meanwhile."""
        return any(i.queued and i.gave_at > attempt.progressed_at for i in (attempt.prefill, attempt.decode))

    # Instances that fail.

    def _back_off(self, instance: Instance) -> None:
        """Leave it alone for a while: it gives no signal when it can be used again."""
        seconds = min(self._limits.backoff * 2 ** min(instance.failures, 16), MAX_BACKOFF)
        instance.failures += 1
        instance.refuses_until = self._now + seconds
        asyncio.get_running_loop().call_later(seconds, self._dispatch)

    def _probe(self, instance: Instance, reason: str) -> None:
        """A connection broke: either the connection alone, or the engine is dead."""
        if instance.name not in self._probes:
            task = asyncio.create_task(self._bury_unless_healthy(instance, reason), name=f"probe of {instance.name}")
            self._probes[instance.name] = task
            task.add_done_callback(lambda _: self._probes.pop(instance.name))

    async def _bury_unless_healthy(self, instance: Instance, reason: str) -> None:
        engine = instance.engine
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                healthy = await engine.healthy()
        except Shortage:
            return  # the health watch will see
        except (EngineError, TimeoutError):
            healthy = False
        if not healthy and instance.engine is engine:
            self.bury(instance, reason)

    def _blame(self, attempt: Attempt) -> None:
        """It fell silent: by the fault of its decode, or of either side where decode had not started."""
        for instance in {attempt.decode} if attempt.started else {attempt.prefill, attempt.decode}:
            self._back_off(instance)
            instance.stalls += 1
            if instance.stalls >= MAX_STALLS:
                self.bury(instance, f"{instance.stalls} requests in a row fell silent on it")

    # The end of a turn.

    def _finish(self, turn: Turn, finish: FinishReason) -> TurnResult:
        versions = tuple(turn.versions)
        self._finished(
            TurnRecord(
                trajectory=turn.request.trajectory,
                turn=turn.request.turn,
                prompt_tokens=len(turn.request.input_ids),
                cached_tokens=turn.cached_tokens,
                instances=tuple(turn.instances),
                ready=turn.ready,
                arrivals=tuple(turn.arrivals),
                versions=versions,
                finish=finish,
                moves=turn.moves,
            )
        )
        return TurnResult(
            token_ids=tuple(turn.tokens),
            logprobs=tuple(turn.logprobs),
            versions=versions,
            finish=finish,
            attempts=len(turn.instances),
            cached_tokens=turn.cached_tokens,
        )

    def _refuse_when_closed(self, turn: Turn) -> None:
        if self._closed:
            raise self._failure(turn, "the cluster is stopping")

    def _refuse_when_hopeless(self, turn: Turn) -> None:
        if turn.failures > self._limits.max_failures:
            raise self._failure(turn, f"{turn.failures} attempts in a row failed without a token")

    def _failure(self, turn: Turn, reason: str) -> TurnFailed:
        tried = "; ".join(turn.tried[-self._limits.max_failures - 1 :]) or "nothing"
        return TurnFailed(f"turn {turn.name} after {len(turn.tokens)} tokens: {reason}; tried: {tried}")

    # Small things.

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _instance_changed(self, instance: Instance) -> None:
        if instance.state is InstanceState.ROUTED:
            self._dispatch()
