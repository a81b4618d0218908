"""Simulated engines behind the engine protocol, and the world that they share: network, KV store, books, faults.

Everything happens on the event loop's time (`prorsa.simulation.clock`). Each engine has one timer, for whatever its core
has to do next; its streams wait for what the core reports.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from math import prod
from typing import Protocol

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
    in_place,
)
from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import Profile
from prorsa.simulation.engines.core import NEVER, Core, SlowStepTimes, StepTimes
from prorsa.simulation.engines.ranks import Job
from prorsa.simulation.engines.statistics import ConservationError, Ledger, Statistics
from prorsa.simulation.engines.transfer import Handover, KvStore, Links
from prorsa.simulation.workloads.pseudo_model import Segment, Stream

__all__ = ["ConservationError", "SimulatedCluster", "SimulatedEngine", "Statistics"]


class Model(Protocol):
    """What the engines ask of `prorsa.simulation.workloads.pseudo_model.PseudoModel`."""

    def stream(self, request: GenerateRequest) -> Stream: ...
    def segment(self, request: GenerateRequest) -> Segment: ...


class SimulatedCluster:
    """The world of the engines, and the `Restarter` of those that die.

    `prefill` is the profile of prefill and mixed instances. Where `decode` is another one, roles cannot be switched between
    them. `prefill_every` is that of `PolicySection`; a decode reports what it has every `stream_s` seconds.
    """

    def __init__(
        self,
        prefill: Profile,
        decode: Profile,
        model: Model,
        *,
        prefill_every: int = 0,
        stream_s: float = 10.0,
        kv_store: bool = True,
    ) -> None:
        """Raises `ConfigError` where a profile's grid cannot be used."""
        self.prefill = prefill
        self.decode = decode
        self.model = model
        self.prefill_every = prefill_every
        self.stream_s = stream_s
        self.statistics = Statistics()
        self.ledger = Ledger()
        self.store = KvStore(prefill.store_bytes_per_s) if kv_store else None
        self.links = Links()
        self.restarts = 0
        """Engines that were started anew so far."""
        self.engines: dict[str, SimulatedEngine] = {}
        """By name; those that have died until they are restarted."""
        self._times = {Role.PREFILL: StepTimes(StepCosts(prefill))}
        self._times[Role.MIXED] = self._times[Role.PREFILL]
        self._times[Role.DECODE] = self._times[Role.PREFILL] if self.alike else StepTimes(StepCosts(decode))
        self._handovers: dict[Bootstrap, Handover] = {}
        """Of requests of which one leg is here."""
        self._first_prompts: dict[int, int] = {}
        self._segments: dict[str, int] = {}
        """Of trajectories that have begun another one, its number."""

    @property
    def alike(self) -> bool:
        """Whether an engine can have any role."""
        return self.prefill == self.decode

    def start(self, name: str, role: Role) -> SimulatedEngine:
        """A running engine with the weights of version 0."""
        if name in self.engines and self.engines[name].alive:
            raise ValueError(f"engine {name} runs already")
        engine = self.engines[name] = SimulatedEngine(name, role, self)
        return engine

    async def restart(self, name: str, role: Role) -> SimulatedEngine:
        """Kills what is left of the engine, and starts it anew; that takes the profile's `restart_s`."""
        self.kill(name)
        await asyncio.sleep(self.profile(role).restart_s)
        self.links.mend(name)
        self.restarts += 1
        return self.start(name, role)

    def kill(self, name: str) -> None:
        """The engine dies: its streams break with `EngineGone`."""
        self.engines[name].die()

    def check(self) -> None:
        """Raises `ConservationError` where a token was lost or made twice, or an idle engine still holds something."""
        now = asyncio.get_running_loop().time()
        live = [(engine, job) for engine in self.engines.values() for job in engine.core.jobs]
        for engine in self.engines.values():
            engine.core.settle(now)
            engine.core.check()
        handovers = {id(job.handover): job.handover for _, job in live if job.handover is not None}
        self.ledger.check(
            self.statistics,
            prefilling=sum(job.computed for _, job in live),
            moving=sum(handover.moved for handover in handovers.values()),
            untold=sum(engine.core.generated(job) - job.told for engine, job in live),
        )
        if not live and self._handovers:
            raise ConservationError(f"all engines are idle, but {len(self._handovers)} handovers wait for a leg")

    # What the engines ask.

    def roles(self, profile: Profile) -> frozenset[Role]:
        """Those of instances with this profile."""
        return frozenset(role for role in ALL_ROLES if self.profile(role) == profile)

    def profile(self, role: Role) -> Profile:
        return self.decode if role is Role.DECODE else self.prefill

    def times(self, role: Role, slowdown: float) -> StepTimes:
        """Of an instance whose steps take `slowdown` times as long as its profile says."""
        return self._times[role] if slowdown == 1 else SlowStepTimes(StepCosts(self.profile(role)), slowdown)

    def core(self, engine: SimulatedEngine, role: Role, version: int) -> Core:
        return Core(
            self.profile(role),
            self.times(role, engine.slowdown),
            role,
            version=version,
            store=self.store,
            statistics=self.statistics,
            ledger=self.ledger,
            changed=engine.rearm,
            prefill_every=self.prefill_every,
            stream_s=self.stream_s,
            name=engine.name,
        )

    def handover(self, bootstrap: Bootstrap) -> Handover:
        """Both legs of a request get the same one."""
        known = self._handovers.pop(bootstrap, None)
        if known is None:
            known = self._handovers[bootstrap] = Handover(self.links)
        return known

    def forget(self, bootstrap: Bootstrap) -> None:
        """A leg is over: should the other one never have come, nothing of them stays."""
        self._handovers.pop(bootstrap, None)

    def enter(self, trajectory: str, segment: Segment) -> None:
        """A request of the segment has come. When it is the first, what the context has lost is of no more use to anybody."""
        if segment.number <= self._segments.get(trajectory, 0):
            return
        self._segments[trajectory] = segment.number
        for engine in self.engines.values():
            engine.core.cut(trajectory, segment.group, segment.kept)
        if self.store is not None:
            self.store.cut(trajectory, segment.kept)

    def first_prompt(self, question: int, prompt: int) -> int:
        """How much of its prompt a request shares with its group: the shortest that was ever asked for the question."""
        known = self._first_prompts.get(question, prompt)
        if prompt <= known:
            self._first_prompts[question] = known = prompt
        return known


class _Leg:
    """A stream between an engine's core and whoever reads it."""

    __slots__ = ("chunks", "closed", "error", "job", "loop", "stream", "version", "waiter")

    def __init__(self, stream: Stream | None, version: int, loop: asyncio.AbstractEventLoop) -> None:
        """`stream` is what a decode gives; None on a prefill instance."""
        self.stream = stream
        self.version = version
        self.loop = loop
        self.job: Job
        self.chunks: deque[Chunk] = deque()
        self.error: EngineGone | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.closed = False

    async def next(self) -> Chunk:
        """Raises `EngineGone` when it breaks."""
        while not self.chunks:
            if self.error is not None:
                raise self.error
            self.waiter = self.loop.create_future()
            await self.waiter
        return self.chunks.popleft()

    def tell(self, count: int, finish: FinishReason | None) -> None:
        """Stream the next `count` tokens."""
        tokens: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        if self.stream is not None:
            tokens, logprobs = self.stream.take(count)
            if finish is FinishReason.STOP and self.stream.length:
                finish = FinishReason.LENGTH
        cached = self.job.cached_prompt
        self.chunks.append(Chunk(tokens, logprobs, self.version, cached, finish))
        self._wake()

    def snap(self, error: EngineGone) -> None:
        self.error = error
        self._wake()

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class SimulatedEngine:
    """An `Engine`, and the faults that a schedule or a test lets happen to it.

    One that hangs, or that is cut off from the control plane, answers no call and streams nothing until that is over or it
    dies. Cut off it goes on with what it has; hung it stands still.
    """

    bootstrap_port = 1

    tells_progress = False

    def __init__(self, name: str, role: Role, cluster: SimulatedCluster) -> None:
        self.name = name
        self.bootstrap_host = name
        self.roles = cluster.roles(cluster.profile(role))
        self.alive = True
        self.refuse = 0
        """How many more requests are refused as busy."""
        self.flip_fault: str | None = None
        """What every role switch fails with."""
        self.lose_replies = 0
        """How many more pieces of streams are lost, with their connections."""
        self.slowdown = 1.0
        """How many times as long as usual its steps take."""
        self._slowdowns: list[float] = []
        """Factors, of the faults that last."""
        self._hangs = 0
        """Faults that let it stand still."""
        self._hung_since = 0.0
        self._held = 0
        """Faults that let no call, answer or token through."""
        self._reachable = asyncio.Event()
        self._reachable.set()
        self._cluster = cluster
        self._legs: dict[str, _Leg] = {}
        self._occupied: str | None = None
        """What it is doing that lets it serve nothing."""
        self._emptied: asyncio.Event = asyncio.Event()
        """Whether the core was seen without requests since it was last asked to end all."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._advancing = False
        self.core = cluster.core(self, role, 0)

    # The stream.

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if self._held:
            await self._reached()
        core = self.core
        way_s = core.profile.request_s
        if core.role is not Role.DECODE:
            way_s += core.profile.request_steps * core.step_s
        if way_s:
            await asyncio.sleep(way_s)
            if self._held:
                await self._reached()
        leg = self._open(request)
        pending: Chunk | None = None
        late_steps = core.profile.late_steps if core.role is Role.MIXED else 0.0
        try:
            while True:
                pending = chunk = await leg.next()
                if late_steps and core.step_s:
                    await asyncio.sleep(late_steps * core.step_s)
                if self._held:
                    await self._reached()
                if self.lose_replies:
                    self.lose_replies -= 1
                    raise EngineGone(f"engine {self.name}: asked {request.rid}; the stream broke off")
                pending = None
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._book_unread(leg, pending)
            self._close(request, leg)

    def _book_unread(self, leg: _Leg, pending: Chunk | None) -> None:
        """What was streamed and reached nobody."""
        chunks = [*leg.chunks, pending] if pending else leg.chunks
        count = sum(len(chunk.token_ids) for chunk in chunks)
        self._cluster.ledger.streamed -= count
        self._cluster.ledger.unread += count

    def _open(self, request: GenerateRequest) -> _Leg:
        self._answer()
        self._refuse(request)
        core = self.core
        stream = None if core.role is Role.PREFILL else self._cluster.model.stream(request)
        leg = _Leg(stream, core.version, self._loop)
        leg.job = self._job(request, leg)
        self._legs[request.rid] = leg
        if core.role is not Role.PREFILL and leg.job.handover is not None:
            core.decode(leg.job, self._loop.time())
        else:
            core.prefill(leg.job, self._loop.time())
        return leg

    def _refuse(self, request: GenerateRequest) -> None:
        """Raises `EngineBusy` or `EngineError` where it cannot serve the request."""
        if self._occupied is not None:
            raise EngineBusy(f"engine {self.name}: asked {request.rid}; it is busy with {self._occupied}")
        if self.refuse > 0:
            self.refuse -= 1
            raise EngineBusy(f"engine {self.name}: asked {request.rid}; its queue is full")
        if request.rid in self._legs:
            raise EngineError(f"engine {self.name}: asked {request.rid}; it serves that already")
        bootstrap, role = request.bootstrap, self.core.role
        here = bootstrap is not None and bootstrap.host == self.bootstrap_host
        fits = role is Role.MIXED if bootstrap is None else here is (role is Role.PREFILL)
        if not fits:
            raise EngineError(f"engine {self.name}: asked {request.rid} with {bootstrap}; it is a {role} instance")

    def _job(self, request: GenerateRequest, leg: _Leg) -> Job:
        prompt = len(request.input_ids)
        target = 0 if leg.stream is None else min(leg.stream.length, request.sampling.max_new_tokens)
        capacity = self.core.profile.kv_tokens
        if prompt + max(target, 1) > capacity:
            raise EngineError(
                f"engine {self.name}: asked {request.rid}; {prompt} prompt and {target} output tokens can never fit into the "
                f"{capacity} tokens of a rank's KV cache: raise kv_tokens or lower max_context"
            )
        trajectory = request.rid.rsplit(".", 2)[0]
        segment = self._cluster.model.segment(request)
        self._cluster.enter(trajectory, segment)
        return Job(
            trajectory=trajectory,
            question=segment.group,
            prompt=prompt,
            target=target,
            first_prompt=self._cluster.first_prompt(segment.group, prompt) if segment.group > 0 else 0,
            report=lambda job, finish: self._report(leg, job, finish),
            handover=None if request.bootstrap is None else self._cluster.handover(request.bootstrap),
            resent=not request.rid.endswith(".0"),
        )

    def _report(self, leg: _Leg, job: Job, finish: FinishReason | None) -> None:
        """Stream what the job has generated since the last time."""
        count = self.core.generated(job) - job.told
        job.told += count
        if leg.closed:
            self._cluster.ledger.unread += count
        else:
            self._cluster.ledger.streamed += count
            if count or finish is not None:
                leg.tell(count, finish)
        if finish is not None and not self.core.jobs:
            self._emptied.set()

    def _close(self, request: GenerateRequest, leg: _Leg) -> None:
        leg.closed = True
        del self._legs[request.rid]
        if self.alive:
            self.core.abort(leg.job, self._loop.time())
        # The job knows the leg that it reports to: a cycle would be left for the garbage collector.
        del leg.job
        if request.bootstrap is not None:
            self._cluster.forget(request.bootstrap)

    # Control.

    async def abort(self, rid: str | None = None) -> None:
        await self._reached()
        for leg in list(self._legs.values()) if rid is None else filter(None, [self._legs.get(rid)]):
            self.core.abort(leg.job, self._loop.time())

    async def load(self) -> Load:
        await self._reached()
        core = self.core
        core.settle(self._loop.time())
        running = core.running
        return Load(running, len(core.jobs) - running, core.live_tokens, core.profile.instance_kv_tokens)

    async def info(self) -> EngineInfo:
        await self._reached()
        return EngineInfo(self.core.role, self.core.version, self.core.profile.model)

    async def switch_role(self, role: Role) -> None:
        """In place, or else it takes the profile's `flip_s`, and the prefixes that it has cached are lost."""
        await self._reached()
        changes_in_place = in_place(self.core.role, role)
        if self._occupied is not None or (self.core.jobs and not changes_in_place):
            raise EngineBusy(f"engine {self.name}: asked to become {role}; it is not idle")
        if role not in self.roles:
            raise EngineError(
                f"engine {self.name}: asked to become {role}; its ranks are grouped as profile {self.core.profile.name} has "
                f"them, not as {self._cluster.profile(role).name} of that role: it would have to be restarted"
            )
        if not changes_in_place:
            await self._pass("a role switch", self.core.profile.flip_s)
        if self.flip_fault is not None:
            raise EngineError(f"engine {self.name}: asked to become {role}; {self.flip_fault}")
        if changes_in_place:
            self.core.become(role)
        else:
            self.core = self._cluster.core(self, role, self.core.version)

    async def update_weights(self, path: str, version: int) -> None:
        """Takes the profile's `update_s` from when its last request has ended; nothing of the old version is read again."""
        await self._reached()
        if self._occupied is not None:
            raise EngineBusy(f"engine {self.name}: asked to load {path}; it is busy with {self._occupied}")
        await self.abort()
        await self._pass("a weight update", self.core.profile.update_s)
        self.core = self._cluster.core(self, self.core.role, version)

    async def healthy(self) -> bool:
        if self._held:
            await self._reachable.wait()
        return self.alive

    async def close(self) -> None:
        """There is nothing to release."""

    def die(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._emptied.set()
        self._reachable.set()
        jobs = list(self.core.jobs)
        self.core.vanish(self._loop.time())
        self._cluster.ledger.unread += sum(job.generated - job.told for job in jobs)
        self.break_streams()

    def hang(self) -> None:
        """Stand still, until `go_on`."""
        self.cut_off()
        if self._hangs == 0 and self.alive:
            self._hung_since = self._loop.time()
            self.core.freeze(self._hung_since)
        self._hangs += 1

    def go_on(self) -> None:
        self._hangs -= 1
        if self._hangs == 0 and self.alive:
            self.core.thaw(self._loop.time(), self._hung_since)
        self.connect()

    def cut_off(self) -> None:
        """Let no call, answer or token through, until `connect`."""
        self._held += 1
        if self.alive:
            self._reachable.clear()

    def connect(self) -> None:
        self._held -= 1
        if not self._held:
            self._reachable.set()

    def slow_down(self, factor: float) -> None:
        """Make steps take `factor` times as long, until `speed_up` with the same factor; factors multiply."""
        self._slowdowns.append(factor)
        self._pace()

    def speed_up(self, factor: float) -> None:
        self._slowdowns.remove(factor)
        self._pace()

    def _pace(self) -> None:
        self.slowdown = prod(self._slowdowns, start=1.0)
        if self.alive:
            self.core.pace(self._cluster.times(self.core.role, self.slowdown), self._loop.time())

    def break_streams(self) -> None:
        """Every connection breaks; the engine ends the requests that nobody reads any more."""
        for leg in self._legs.values():
            leg.snap(EngineGone(f"engine {self.name}: the stream broke off"))

    async def _pass(self, occupied: str, seconds: float) -> None:
        """Serve nothing until all requests have ended and `seconds` have gone by."""
        self._occupied = occupied
        try:
            if self.core.jobs:
                self._emptied.clear()
                await self._emptied.wait()
            await asyncio.sleep(seconds)
        finally:
            self._occupied = None
        await self._reached()

    async def _reached(self) -> None:
        """Wait until a call, or an answer, gets through. Raises `EngineGone`."""
        if self._held:
            await self._reachable.wait()
        self._answer()

    def _answer(self) -> None:
        if not self.alive:
            raise EngineGone(f"engine {self.name}: no answer")

    # Time.

    def rearm(self) -> None:
        """Ring when the core has something to do. A timer that is early rings for nothing and is set anew."""
        if self._advancing or self._hangs or not self.alive:
            return
        due = self.core.due
        if due == NEVER:
            return
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._hangs or not self.alive:
            return
        self._advancing = True
        self.core.advance(self._loop.time())
        self._advancing = False
        self.rearm()
