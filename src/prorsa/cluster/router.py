"""The router: one ready queue in front of the routing pools, and cancel-and-resend behind every turn (paper, Appendix C).

Invariants. The queue is served strictly in the order in which requests became READY. A turn has one live attempt at most;
each attempt runs in a task of its own, which ends only when both its legs are closed and its books are cleared. A turn ends
with its whole output, with `TurnFailed`, or with the cancellation of its caller, and never because an instance was drained.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from prorsa.cluster.attempts import Attempt, End, Turn, Verdict
from prorsa.cluster.instances import Fleet, Instance, InstanceState
from prorsa.cluster.observers import TurnRecord
from prorsa.cluster.placement import Affinity, choose_decode, choose_prefill, fitting
from prorsa.cluster.turns import Listener, TurnFailed, TurnRequest, TurnResult
from prorsa.engines.protocol import (
    Bootstrap,
    Chunk,
    EngineBusy,
    EngineError,
    EngineGone,
    FinishReason,
    Role,
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
    """An attempt that gives nothing for so long has failed; so has a queue of which nothing can be placed."""
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
        self._ready: OrderedDict[Turn, asyncio.Future[Attempt]] = OrderedDict()
        self._live: dict[str, Attempt] = {}
        self._rooms = itertools.count(1)
        self._paused = False
        self._closed = False
        self._moved_at = 0.0
        self._stall_check: asyncio.TimerHandle | None = None
        self._probes: dict[str, asyncio.Task[None]] = {}
        fleet.watchers.append(self._instance_changed)

    # What the rollout uses.

    async def generate(self, request: TurnRequest, listener: Listener | None = None) -> TurnResult:
        """Serve one model turn. Raises `TurnFailed`."""
        if request.sampling.max_new_tokens < 1:
            raise ValueError(f"turn {request.trajectory}.{request.turn}: max_new_tokens must be 1 or more")
        turn = Turn(request, self._now, listener)
        self._refuse_when_closed(turn)
        self._record(Ready(self._now, request.trajectory, turn.prompt_tokens))
        while True:
            attempt = await self._placed(turn)
            verdict = await self._outcome(attempt)
            turn.keep(attempt, verdict)
            if turn.finish is not None:
                return self._finish(turn, turn.finish)
            self._refuse_when_closed(turn)
            self._refuse_when_hopeless(turn)
            self._record(Requeued(self._now, request.trajectory, turn.prompt_tokens))

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
        self._fleet.move(instance, InstanceState.DEAD)
        for rid in rids:
            self._live[rid].end(End.FAILED, f"instance {instance.name} died: {reason}")

    async def close(self) -> None:
        """Fail every turn and leave nothing behind on any instance."""
        self._closed = True
        for turn, place in self._ready.items():
            if not place.done():
                place.set_exception(self._failure(turn, "the cluster is stopping"))
        self._ready.clear()
        await self.cancel_all("the cluster is stopping")
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        if self._stall_check is not None:
            self._stall_check.cancel()
            self._stall_check = None

    # The ready queue.

    async def _placed(self, turn: Turn) -> Attempt:
        """Wait in the queue until the turn has been given its instances."""
        place = asyncio.get_running_loop().create_future()
        self._ready[turn] = place
        if len(self._ready) == 1:
            self._moved_at = self._now
        self._dispatch()
        try:
            return cast(Attempt, await place)
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                await self._abandon(place.result())
            raise
        finally:
            self._ready.pop(turn, None)

    def _dispatch(self) -> None:
        """Start the turns at the head of the queue for as long as there is room."""
        while self._ready and not self._paused:
            turn, place = next(iter(self._ready.items()))
            pair = self._choose(turn)
            if pair is None:
                break
            del self._ready[turn]
            if not place.done():
                place.set_result(self._launch(turn, *pair))
        self._watch_queue()

    def _choose(self, turn: Turn) -> tuple[Instance, Instance] | None:
        """(prefill, decode) instances with room for the turn, or a mixed one for both."""
        limits, now = self._limits, self._now
        tokens = turn.prompt_tokens
        need = tokens + min(turn.budget, limits.decode_headroom)
        favourite, former = self._affinity.prefill(turn.request), self._affinity.decode(turn.request)

        def open_to_prefill(role: Role) -> list[Instance]:
            pool = self._fleet.pool(role)
            return [i for i in pool if i.prefills < limits.prefill_slots and i.refuses_until <= now]

        def open_to_decode(instances: list[Instance]) -> list[Instance]:
            free = [i for i in instances if i.decodes < limits.decode_slots and i.refuses_until <= now]
            return fitting(free, need)

        mixed = choose_prefill(open_to_decode(open_to_prefill(Role.MIXED)), tokens, favourite)
        if mixed is not None:
            return mixed, mixed
        prefill = choose_prefill(open_to_prefill(Role.PREFILL), tokens, favourite)
        decode = choose_decode(open_to_decode(self._fleet.pool(Role.DECODE)), need, former)
        return None if prefill is None or decode is None else (prefill, decode)

    def _launch(self, turn: Turn, prefill: Instance, decode: Instance) -> Attempt:
        bootstrap = None
        if prefill is not decode:
            engine = prefill.engine
            bootstrap = Bootstrap(engine.bootstrap_host, engine.bootstrap_port, next(self._rooms))
        attempt = Attempt(turn.next_request(bootstrap), prefill, decode, turn.deliver, progressed_at=self._now)
        turn.instances.append((prefill.name, decode.name))
        prefill.begin_prefill(attempt.rid, turn.prompt_tokens)
        decode.begin_decode(attempt.rid, turn.prompt_tokens + min(turn.budget, self._limits.decode_headroom))
        self._affinity.remember(turn.request, prefill, decode)
        self._moved_at = self._now
        self._live[attempt.rid] = attempt
        attempt.task = asyncio.create_task(self._serve(turn.request.trajectory, attempt), name=f"attempt {attempt.rid}")
        return attempt

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
            for turn, place in self._ready.items():
                if not place.done():
                    place.set_exception(self._failure(turn, f"no instances to place it on ({states})"))
            self._ready.clear()
        self._watch_queue()

    # One attempt.

    async def _outcome(self, attempt: Attempt) -> Verdict:
        try:
            return await asyncio.shield(attempt.task)
        except asyncio.CancelledError:
            await self._abandon(attempt)
            raise

    async def _abandon(self, attempt: Attempt) -> None:
        """The caller is gone. Were this wait cancelled too, the attempt's own task would still close both legs."""
        attempt.abandoned = True
        attempt.end(End.CANCELLED, "its caller was cancelled")
        await asyncio.wait({attempt.task})

    async def _serve(self, trajectory: str, attempt: Attempt) -> Verdict:
        legs: dict[asyncio.Task[None], Instance] = {}
        try:
            if not attempt.abandoned:
                self._record(PrefillStarted(self._now, trajectory, attempt.prefill.name))
            if not attempt.verdict.done():
                legs = self._start_legs(trajectory, attempt)
                await self._until_verdict(attempt)
                await self._close_legs(attempt, legs)
            if attempt.error is not None:
                raise attempt.error
            return attempt.verdict.result()
        finally:
            for leg in legs:
                leg.cancel()
            if legs:
                await asyncio.wait(legs)
            self._release(attempt)

    def _start_legs(self, trajectory: str, attempt: Attempt) -> dict[asyncio.Task[None], Instance]:
        def decode(chunk: Chunk) -> None:
            self._take_decoded(trajectory, attempt, chunk)

        def prefill(chunk: Chunk) -> None:
            self._take_prefilled(trajectory, attempt, chunk)

        consumers = {attempt.decode: decode}
        if not attempt.mixed:
            consumers[attempt.prefill] = prefill
        return {
            asyncio.create_task(self._run_leg(attempt, instance, consume), name=f"{attempt.rid} on {instance.name}"): (
                instance
            )
            for instance, consume in consumers.items()
        }

    async def _run_leg(self, attempt: Attempt, instance: Instance, consume: Callable[[Chunk], None]) -> None:
        """Read one leg's stream to its end. An engine's error becomes the attempt's verdict."""
        # A prefill leg that breaks after decode has started has already done what the attempt needed.
        needed = instance is attempt.decode
        try:
            # Engines implement `generate` as an async generator: closing it is how a leg is cancelled.
            stream = cast(AsyncGenerator[Chunk, None], instance.engine.generate(attempt.request))
            async with aclosing(stream):
                async for chunk in stream:
                    if chunk.finish is not FinishReason.ABORT:
                        attempt.progressed_at = self._moved_at = self._now
                        instance.failures = instance.stalls = 0
                    consume(chunk)
                    if chunk.finish is not None:
                        return
            raise EngineGone(f"engine {instance.name}: asked {attempt.rid}; the stream ended without a finish")
        except EngineBusy as error:
            self._back_off(instance)
            attempt.end(End.REFUSED, str(error))
        except EngineError as error:
            if needed or not attempt.started:
                attempt.end(End.FAILED, str(error))
            self._back_off(instance)
            if isinstance(error, EngineGone):
                self._probe(instance, str(error))
        except Exception as error:
            attempt.crash(error)

    def _take_prefilled(self, trajectory: str, attempt: Attempt, chunk: Chunk) -> None:
        attempt.cached_tokens = max(attempt.cached_tokens, chunk.cached_tokens)
        if chunk.finish is FinishReason.ABORT:
            if not attempt.started:
                attempt.end(End.FAILED, f"engine {attempt.prefill.name} aborted the prefill by itself")
        elif chunk.finish is not None:
            self._start_decode(trajectory, attempt)

    def _take_decoded(self, trajectory: str, attempt: Attempt, chunk: Chunk) -> None:
        if not attempt.accepts:
            return
        attempt.cached_tokens = max(attempt.cached_tokens, chunk.cached_tokens)
        if chunk.token_ids:
            self._start_decode(trajectory, attempt)
            attempt.collect(chunk, self._now)
            attempt.decode.grow_decode(attempt.rid, len(attempt.request.input_ids) + len(attempt.tokens))
            self._decoded(trajectory, len(chunk.token_ids))
        if chunk.finish is FinishReason.ABORT:
            attempt.end(End.FAILED, f"engine {attempt.decode.name} aborted the request by itself")
        elif chunk.finish is not None:
            self._start_decode(trajectory, attempt)
            attempt.finish = chunk.finish
            attempt.end(End.FINISHED, chunk.finish.value)

    def _start_decode(self, trajectory: str, attempt: Attempt) -> None:
        """The decode admission: the prefill instance has done its part and has room for the next."""
        if attempt.started or not attempt.accepts:
            return
        attempt.started = True
        attempt.prefill.end_prefill(attempt.rid)
        self._record(DecodeStarted(self._now, trajectory, attempt.decode.name))
        self._dispatch()

    async def _until_verdict(self, attempt: Attempt) -> None:
        while not attempt.verdict.done():
            # By its deadline, not by how long it was silent: the rest of a silence can be too short to move the clock.
            deadline = attempt.progressed_at + self._limits.stall_timeout
            if self._now >= deadline:
                attempt.end(End.FAILED, f"nothing came for {self._limits.stall_timeout} s")
                self._blame(attempt)
            await asyncio.wait({attempt.verdict}, timeout=deadline - self._now)

    async def _close_legs(self, attempt: Attempt, legs: dict[asyncio.Task[None], Instance]) -> None:
        """Let a finished attempt's prefill leg end; abort the legs of any other and take its last tokens, within a bound."""
        deadline = self._now + self._limits.cancel_timeout
        open_legs = {leg for leg in legs if not leg.done()}
        if open_legs and attempt.finish is not None:
            _, open_legs = await asyncio.wait(open_legs, timeout=self._limits.cancel_timeout)
        while True:
            open_legs = {leg for leg in open_legs if legs[leg].state is not InstanceState.DEAD}
            remaining = deadline - self._now
            if not open_legs or remaining <= 0:
                return
            await asyncio.gather(*(self._abort(legs[leg], attempt.rid, deadline) for leg in open_legs))
            _, open_legs = await asyncio.wait(open_legs, timeout=min(ABORT_RETRY, max(0.0, deadline - self._now)))

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

    def _release(self, attempt: Attempt) -> None:
        attempt.prefill.end_prefill(attempt.rid)
        attempt.decode.end_decode(attempt.rid)
        del self._live[attempt.rid]
        self._dispatch()

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

    async def _cancel(self, rids: list[str], reason: str) -> int:
        live = [self._live[rid] for rid in rids]
        for attempt in live:
            attempt.end(End.CANCELLED, reason)
        if live:
            await asyncio.wait({attempt.task for attempt in live})
        return len(live)

    # The end of a turn.

    def _finish(self, turn: Turn, finish: FinishReason) -> TurnResult:
        self._finished(
            TurnRecord(
                trajectory=turn.request.trajectory,
                turn=turn.request.turn,
                prompt_tokens=len(turn.request.input_ids),
                cached_tokens=turn.cached_tokens,
                instances=tuple(turn.instances),
                ready=turn.ready,
                arrivals=tuple(turn.arrivals),
                versions=tuple(turn.versions),
                finish=finish,
            )
        )
        return TurnResult(
            token_ids=tuple(turn.tokens),
            logprobs=tuple(turn.logprobs),
            versions=tuple(turn.versions),
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
