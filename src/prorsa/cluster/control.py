"""The control plane: tracker, forecaster, policy, router, switcher and manager put together, and weight updates.

Invariants. Every event of the run goes through `apply`, once and in order: the tracker checks it, then whatever learns and
whoever observes gets the transition. After a weight update every instance in service has the new weights, and every turn
that was in flight goes on with the tokens that it had.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from prorsa.allocation import Policy, PrefillSpeed
from prorsa.cluster.flips import serves
from prorsa.cluster.instances import Fleet, Instance, InstanceState
from prorsa.cluster.manager import GlobalManager, HealthLimits
from prorsa.cluster.observers import Decision, Flip, Keeper, Observer, TurnRecord
from prorsa.cluster.router import Limits, Router
from prorsa.cluster.switcher import Relaunches, Restarter, RoleSwitcher, SwitchLimits, Weights
from prorsa.cluster.turns import Listener, TurnRequest, TurnResult
from prorsa.engines.protocol import Engine, EngineError, EngineGone, Role
from prorsa.engines.weights import MemoryCheckpoints, NamedTensors
from prorsa.forecast.forecast import Forecaster
from prorsa.lifecycle import State, Tracker, Transition
from prorsa.lifecycle.events import DecodeStarted, Event, PrefillStarted

logger = logging.getLogger(__name__)
T = TypeVar("T")

KEPT = 1000
"""Decisions, and flips, that can be looked at afterwards; up to twice as many are in memory."""
UPDATE_TIMEOUT = 600.0
"""Seconds that one instance may take for a weight update."""


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    name: str
    role: Role
    state: InstanceState
    prefills: int
    decodes: int
    kv_tokens: int
    """Reserved for its decodes."""
    capacity: int
    problem: str | None
    """Why it is dead, and how its restart fares."""


@dataclass(frozen=True, slots=True)
class Status:
    """The cluster at one moment, for the live progress."""

    time: float
    version: int
    states: dict[State, int]
    instances: tuple[InstanceStatus, ...]
    waiting: int
    """Turns in the ready queue."""
    turns: int
    """Finished so far; so are the rest, but for the errors."""
    resends: int
    output_tokens: int
    decisions: int
    flips: int
    failed_flips: int
    errors: tuple[str, ...]
    """Of observers, and of the manager; `stop` raises them."""


class ControlPlane:
    """Runs the turns of a rollout on `engines` and keeps their roles fit for it.

    The engines run already, in the roles that they report. `start` before the first turn; `stop` at the end closes no engine.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        forecaster: Forecaster,
        policy: Policy,
        speed: PrefillSpeed,
        horizon: float,
        restarter: Restarter | None = None,
        relaunches: Relaunches | None = None,
        observers: Sequence[Observer] = (),
        limits: Limits | None = None,
        switch_limits: SwitchLimits | None = None,
        health_limits: HealthLimits | None = None,
    ) -> None:
        """`horizon` is S in seconds. Without a restarter a dead instance stays dead. With `relaunches` instances that cannot
        flip get their role by a new process."""
        self.tracker = Tracker()
        self.decisions: list[Decision] = []
        """The last ones; so with `flips`."""
        self.flips: list[Flip] = []
        self._decisions = self._flips = self._failed_flips = 0
        self._engines = list(engines)
        self._forecaster = forecaster
        self._speed = speed
        self._observers = tuple(observers)
        self._errors: dict[str, Exception] = {}
        self._weights = Weights(0)
        self._memory = MemoryCheckpoints()
        self._model = ""
        """The checkpoint that the engines started with."""
        self._held = False
        """Between `pause` and `resume`."""
        self._fresh = False
        """Whether the instances have got new weights since generation was halted."""
        self._updating = asyncio.Lock()
        self._updates: set[asyncio.Task[None]] = set()
        self._turns = self._resends = self._output_tokens = 0
        self.fleet = Fleet()
        self.router = Router(self.fleet, self.apply, self._decoded, self._turn_finished, limits or Limits())
        self.switcher = RoleSwitcher(
            self.fleet,
            self.router,
            restarter,
            lambda: self._weights,
            self._flipped,
            switch_limits or SwitchLimits(),
            relaunches,
        )
        self.manager = GlobalManager(
            self.tracker,
            forecaster,
            policy,
            speed,
            self.fleet,
            self.router,
            self.switcher,
            horizon,
            health_limits or HealthLimits(),
            self._decided,
            self._failed,
        )

    @property
    def version(self) -> int:
        """The weights version that turns are generated with."""
        return self._weights.version

    @property
    def trouble(self) -> list[str]:
        """What the observers that keep something cannot keep, a line each."""
        kept = (observer.trouble for observer in self._observers if isinstance(observer, Keeper))
        return [trouble for trouble in kept if trouble is not None]

    def learn(self, past: Iterable[Event]) -> None:
        """Before `start`: what the run, which goes on, has seen before. It learns from it and tells no observer. All its
        trajectories have ended. Raises `IllegalTransition`."""
        for event in past:
            self._learn(self.tracker.apply(event))
        self._forecaster.caches_lost()

    async def start(self) -> None:
        """Ask every engine for its role, capacity and weights, and start to manage them. Raises `EngineError`."""
        self.fleet.watchers.append(self._instance_changed)
        infos = await asyncio.gather(*(engine.info() for engine in self._engines))
        loads = await asyncio.gather(*(engine.load() for engine in self._engines))
        versions = {info.weights_version for info in infos}
        if len(versions) != 1:
            raise EngineError(f"the engines start with different weights versions {sorted(versions)}; start them alike")
        self._weights = Weights(versions.pop())
        self._model = infos[0].model_path
        for engine, info, load in zip(self._engines, infos, loads, strict=True):
            self.fleet.add(Instance(engine, info.role, load.max_tokens))
        self.manager.start()

    async def stop(self) -> None:
        """End every turn and every task. Raises `ExceptionGroup` with what failed during the run and was not an engine."""
        await self.manager.stop()
        for update in self._updates:
            update.cancel()
        await asyncio.gather(*self._updates, return_exceptions=True)
        await self.router.close()
        await self._memory.close()
        if self._errors:
            raise ExceptionGroup("the run ended, but these failed during it", list(self._errors.values()))

    async def record(self, event: Event) -> None:
        """Take in an event of an episode. Raises `IllegalTransition`."""
        self.apply(event)

    def apply(self, event: Event) -> None:
        transition = self.tracker.apply(event)
        self._learn(transition)
        if self._observers:
            self._tell(lambda observer: observer.transition(transition))
        if transition.before is None and len(self.tracker) == 1:
            self.manager.begun()

    async def generate(self, request: TurnRequest, listener: Listener | None = None) -> TurnResult:
        """Serve one model turn; `listener` hears its output as it comes. Raises `TurnFailed`."""
        return await self.router.generate(request, listener)

    async def pause(self) -> None:
        """Cancel every live attempt, keeping its tokens, and let nothing start until `resume`. Waits for flips to end, but
        not for instances that were given time before theirs."""
        await self._halt()
        self._held = True

    def resume(self) -> None:
        if not self._held:
            raise RuntimeError("resume without pause")
        self._held = False
        self._go_on()

    async def update_weights(self, weights: str | NamedTensors, version: int) -> None:
        """Give every instance new weights as `version`; turns in flight go on with them.

        `weights` is the path of a checkpoint, or all tensors of the model, which the engines of this machine then read from
        memory; they must not change before this returns. An instance that fails is taken out and restarted with the new
        weights. Where all fail, the old weights stay and EngineError is raised. May be called between `pause` and `resume`.
        """
        # Half an update would leave instances with different weights, so it goes on when the caller is cancelled.
        update = asyncio.create_task(self._update_in_turn(weights, version), name=f"weight update {version}")
        self._updates.add(update)
        update.add_done_callback(self._updates.discard)
        await asyncio.shield(update)

    def status(self) -> Status:
        return Status(
            time=asyncio.get_running_loop().time(),
            version=self.version,
            states=self.tracker.counts(),
            instances=tuple(
                InstanceStatus(i.name, i.role, i.state, i.prefills, i.decodes, i.kv_tokens, i.capacity, i.problem)
                for i in self.fleet
            ),
            waiting=self.router.waiting,
            turns=self._turns,
            resends=self._resends,
            output_tokens=self._output_tokens,
            decisions=self._decisions,
            flips=self._flips,
            failed_flips=self._failed_flips,
            errors=tuple(f"{what}: {error}" for what, error in self._errors.items()),
        )

    @property
    def can_serve(self) -> bool:
        """Whether a turn can be placed: on a mixed instance, or on a prefill and a decode instance."""
        return serves(self.fleet.in_service)

    def health(self) -> dict[str, Any]:
        """Facts for a health check, at no cost: whether turns can be served, how many instances of each role serve, and what
        is wrong with those that do not."""
        return {
            "can_serve": self.can_serve,
            "serving": {role.value: len(self.fleet.pool(role)) for role in Role},
            "problems": {i.name: i.problem or i.state.value for i in self.fleet if i.state is InstanceState.DEAD},
        }

    # Weight updates.

    async def _update_in_turn(self, given: str | NamedTensors, version: int) -> None:
        async with self._updating:
            # While tensors are written, generation goes on.
            path = given if isinstance(given, str) else await self._memory.write(given, self._model, version)
            try:
                await self._update_halted(Weights(version, path))
            finally:
                await self._memory.keep(self._weights.path)

    async def _update_halted(self, weights: Weights) -> None:
        if self._held:
            await self._update_all(weights)
            return
        await self._halt()
        try:
            await self._update_all(weights)
        finally:
            self._go_on()

    async def _halt(self) -> None:
        await self.switcher.acquire()
        self.manager.paused = True
        self.router.pause()
        try:
            await self.router.cancel_all("generation is paused")
        except asyncio.CancelledError:
            self._go_on()
            raise

    def _go_on(self) -> None:
        """The roles for the new weights are decided before anything is served: flips disturb nobody now."""
        self.manager.paused = False
        fresh, self._fresh = self._fresh, False
        if not (fresh and self.manager.weights_updated()):
            self.switcher.lock.release()
        self.router.resume()

    async def _update_all(self, weights: Weights) -> None:
        instances = [instance for instance in self.fleet if instance.state is InstanceState.ROUTED]
        errors = await asyncio.gather(*(self._update(instance, weights) for instance in instances))
        failed = [(instance, error) for instance, error in zip(instances, errors, strict=True) if error is not None]
        if instances and len(failed) == len(instances):
            self._bury_gone(failed)
            raise EngineError(f"weights {weights.version} at {weights.path} reached no instance: {failed[0][1]}")
        self._weights = weights
        self._fresh = True
        self._forecaster.caches_lost()
        for instance, error in failed:
            self.router.bury(instance, f"weight update failed: {error}")

    async def _update(self, instance: Instance, weights: Weights) -> Exception | None:
        assert weights.path is not None
        instance.lose_cache()
        try:
            async with asyncio.timeout(UPDATE_TIMEOUT):
                await instance.engine.update_weights(weights.path, weights.version)
                reported = (await instance.engine.info()).weights_version
        except (EngineError, TimeoutError) as error:
            return error
        if reported != weights.version:
            return EngineError(f"instance {instance.name}: updated to weights {weights.version}, it reports {reported}")
        return None

    def _bury_gone(self, failed: list[tuple[Instance, Exception]]) -> None:
        """A checkpoint that no engine accepts is at fault itself; only those that do not even answer are dead."""
        for instance, error in failed:
            if isinstance(error, EngineGone | TimeoutError):
                self.router.bury(instance, f"weight update failed: {error}")

    # What the parts report.

    def _learn(self, transition: Transition) -> None:
        self._forecaster.observe(transition)
        event = transition.event
        if isinstance(event, PrefillStarted):
            self._speed.started(event.instance, event.trajectory, transition.tokens, event.time)
        elif transition.before is State.PREFILL and transition.instance is not None:
            ended = self._speed.finished if isinstance(event, DecodeStarted) else self._speed.cancelled
            ended(transition.instance, event.trajectory, event.time)

    def _decoded(self, trajectory: str, tokens: int) -> None:
        self.tracker.decoded(trajectory, tokens)
        self._output_tokens += tokens

    def _turn_finished(self, turn: TurnRecord) -> None:
        self._turns += 1
        self._resends += turn.attempts - 1
        self._tell(lambda observer: observer.turn(turn))

    def _decided(self, decision: Decision) -> None:
        self._decisions += 1
        _keep(self.decisions, decision)
        self._tell(lambda observer: observer.decision(decision))

    def _flipped(self, flip: Flip) -> None:
        if flip.failure is None:
            self._flips += 1
        else:
            self._failed_flips += 1
        _keep(self.flips, flip)
        self._tell(lambda observer: observer.flip(flip))

    def _instance_changed(self, instance: Instance) -> None:
        now = asyncio.get_running_loop().time()
        self._tell(lambda observer: observer.instance(now, instance.name, instance.role, instance.state))

    def _tell(self, call: Callable[[Observer], None]) -> None:
        """An observer that fails costs that observation, neither its others nor the run."""
        for observer in self._observers:
            try:
                call(observer)
            except Exception as error:
                what = f"observer {type(observer).__name__}"
                if what not in self._errors:  # it may fail with every event
                    self._failed(what, error)

    def _failed(self, what: str, error: Exception) -> None:
        logger.error("%s failed; the run goes on", what, exc_info=error)
        if what not in self._errors:
            error.add_note(f"(the first failure of: {what})")
            self._errors[what] = error


def _keep(latest: list[T], one: T) -> None:
    """Add one, and forget the oldest when there are too many."""
    latest.append(one)
    if len(latest) >= 2 * KEPT:
        del latest[:-KEPT]
