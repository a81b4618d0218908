"""The global manager: every S seconds it takes a snapshot, forecasts, allocates and switches (paper, 4.1.2 and 4.2).

Beside that grid it does so when all instances have new weights and when trajectories are sampled where none was live, for
policies that ask for it. It also watches the health of instances and has dead ones restarted.

Invariants. No decision is made while instances flip, so that none is made from roles that do not hold: a time of the grid
that comes meanwhile is made up for when they have flipped, once, and so is the start of a step. Neither a failing flip nor a
failing restart ends the loop; a restart is tried again, whatever it met, until it succeeds or its time is up. Nothing is
decided while engines' weights are updated; the end of the update is a moment itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from prorsa.allocation import Allocation, Demand, Moment, Policy, PrefillSpeed, Situation
from prorsa.cluster.flips import added
from prorsa.cluster.instances import Fleet, Instance, InstanceState
from prorsa.cluster.observers import Decision
from prorsa.cluster.progress import ProgressWatch
from prorsa.cluster.router import Router
from prorsa.cluster.switcher import RoleSwitcher
from prorsa.engines.protocol import Engine, EngineError, EngineGone, Load, Role, Shortage
from prorsa.forecast.forecast import Forecaster
from prorsa.lifecycle import Tracker

logger = logging.getLogger(__name__)

MAX_RESTART_BACKOFF = 60.0
"""Seconds."""
DECISION = "decision"
"""What has failed where a decision has."""
ROUNDING = 1e-9
"""Of a time, in horizons."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Bounds of the health watch, seconds."""

    interval: float = 5.0
    timeout: float = 10.0
    """An instance that does not answer for so long has failed one check."""
    checks: int = 2
    """Failed checks in a row that make an instance dead."""
    hang_timeout: float = 30.0
    """An instance of which nothing moves for so long is dead, also where it answers."""
    restart_backoff: float = 1.0
    """Pause after the first failed restart; it doubles up to `MAX_RESTART_BACKOFF`."""
    restart_within: float = math.inf
    """After so long a dead instance is given up."""

    @classmethod
    def within(cls, hang_timeout: float, restart_within: float) -> HealthLimits:
        """Those by which an engine that stands still is found in `hang_timeout` and a third of it, answering or not."""
        default = cls()
        third = hang_timeout / 3
        return cls(
            interval=min(default.interval, third),
            timeout=min(default.timeout, third),
            hang_timeout=hang_timeout,
            restart_within=restart_within,
        )


class GlobalManager:
    """`decided` gets each decision; `failed` each error that is not an engine's, with what failed: it must not be lost."""

    def __init__(
        self,
        tracker: Tracker,
        forecaster: Forecaster,
        policy: Policy,
        speed: PrefillSpeed,
        fleet: Fleet,
        router: Router,
        switcher: RoleSwitcher,
        horizon: float,
        health: HealthLimits,
        decided: Callable[[Decision], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._tracker = tracker
        self._forecaster = forecaster
        self._policy = policy
        self._speed = speed
        self._fleet = fleet
        self._router = router
        self._switcher = switcher
        self._horizon = horizon
        self._health = health
        self._decided = decided
        self._failed = failed
        self._last: Decision | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_checks: dict[Engine, int] = {}
        self._progress = ProgressWatch(health.interval + health.timeout)
        self.paused = False
        """Whether engines are being updated: nothing is decided and nothing is checked."""

    def start(self) -> None:
        self._spawn("manager", self._keep_to_grid())
        self._spawn("health watch", self._watch_health())
        self._fleet.watchers.append(self._instance_changed)

    async def stop(self) -> None:
        """Ends at once, flips and restarts in progress included. May be called again."""
        if self._instance_changed in self._fleet.watchers:
            self._fleet.watchers.remove(self._instance_changed)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def decide(self, moment: Moment = Moment.GRID) -> Decision:
        """One decision from the present state; it changes no instance."""
        now = asyncio.get_running_loop().time()
        current = self._fleet.in_service
        snapshot = self._tracker.snapshot(now)
        prefilling = [i.name for role in (Role.PREFILL, Role.MIXED) for i in self._fleet.pool(role)]
        forecast = self._forecaster.forecast(snapshot, self._horizon, prefilling)
        demand = Demand(
            prefill_tokens=forecast.prefill_tokens,
            prefill_speed=self._speed.theta(),
            horizon=self._horizon,
            decode_tokens=forecast.decode_kv + forecast.admitted_kv,
            decode_capacity=min(instance.capacity for instance in self._fleet),
        )
        live = len(self._tracker) > 0
        relaunch_s = self._switcher.relaunch_s
        target = self._policy.decide(Situation(demand, current, live, forecast.work, moment, relaunch_s))
        self._last = Decision(now, self._tracker.counts(), forecast, demand, current, live, target, moment, relaunch_s)
        self._decided(self._last)
        return self._last

    def weights_updated(self) -> bool:
        """Decide at a sync, while the switcher's lock is held and no request runs. Whether flips have begun: their instances
        have left the pools, and the lock is released when they are made."""
        if Moment.SYNC not in self._policy.moments:
            return False
        try:
            target, _ = self._decide(Moment.SYNC)
        except Exception as error:
            self._failed(DECISION, error)
            return False
        flips = None if target is None else self._switcher.reach_at_rest(target)
        if flips is not None:
            self._spawn("flips at a sync", flips)
        return flips is not None

    def begun(self) -> None:
        """A trajectory was sampled where none was live: decide when all that are launched with it are sampled."""
        if Moment.START in self._policy.moments:
            asyncio.get_running_loop().call_soon(self._start_when_all_are_in, 0)

    def _start_when_all_are_in(self, seen: int) -> None:
        """They are when a turn of the event loop has brought no other one."""
        live = len(self._tracker)
        if live > seen:
            asyncio.get_running_loop().call_soon(self._start_when_all_are_in, live)
        elif live and self._tasks:
            self._spawn(DECISION, self._decide_and_switch(Moment.START))

    async def _decide_and_switch(self, moment: Moment) -> None:
        if self.paused:
            return
        async with self._switcher.lock:
            target, patience = self._decide(moment)
            if target is not None:
                await self._switcher.reach(target, patience)

    def _decide(self, moment: Moment) -> tuple[Allocation | None, float]:
        """The roles to have next, and the patience with which instances change to them."""
        decision = self.decide(moment)
        if decision.target is None:
            return None, 0.0
        handling = self._policy.handling(decision.situation, decision.target)
        self._router.even_out(handling.even_out)
        return decision.target, handling.patience

    async def _keep_to_grid(self) -> None:
        """Decide at start + k S, k = 1, 2, ..., or as soon as the flips are made that such a time falls into."""
        now = asyncio.get_running_loop().time
        start, done = now(), 0
        while True:
            await asyncio.sleep(max(0.0, start + (done + 1) * self._horizon - now()))
            done = math.floor((now() - start) / self._horizon + ROUNDING)
            try:
                await self._decide_and_switch(Moment.GRID)
            except Exception as error:
                self._failed(DECISION, error)

    # Health.

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._health.interval)
            try:
                await self._check_health()
            except Exception as error:
                self._failed("health check", error)

    async def _check_health(self) -> None:
        if self.paused:
            self._progress.keep(set())
            return  # an engine that loads weights may not answer
        routed = [instance for instance in self._fleet if instance.state is InstanceState.ROUTED]
        self._progress.keep({instance.engine for instance in routed})
        await asyncio.gather(*(self._check(instance) for instance in routed))

    async def _check(self, instance: Instance) -> None:
        engine = instance.engine
        try:
            async with asyncio.timeout(self._health.timeout):
                healthy = await engine.healthy()
                load = await self._load(engine) if healthy else None
        except Shortage as error:
            logger.warning("instance %s: not checked: %s", instance.name, error)
            return
        except (TimeoutError, EngineError):
            healthy, load = False, None
        if self.paused:
            return
        mark = None if load is None else load.mark
        instance.queued = 0 if load is None else load.waiting
        silence = self._progress.silence(engine, mark, instance.gave_at, asyncio.get_running_loop().time())
        if silence >= self._health.hang_timeout and instance.state is InstanceState.ROUTED:
            self._router.bury(instance, f"it hangs: nothing has moved for {silence:.0f} s, though it answers")
            return
        failed = 0 if healthy else self._failed_checks.get(engine, 0) + 1
        self._failed_checks[engine] = failed
        if failed >= self._health.checks and instance.state is InstanceState.ROUTED and instance.engine is engine:
            del self._failed_checks[engine]
            self._router.bury(instance, f"{failed} health checks in a row failed")

    async def _load(self, engine: Engine) -> Load | None:
        if not engine.tells_progress:
            return None
        try:
            return await engine.load()
        except (EngineGone, Shortage):
            raise
        except EngineError:
            return None  # it tells no load, but it has answered

    def _instance_changed(self, instance: Instance) -> None:
        if instance.state is InstanceState.DEAD and self._switcher.can_restart:
            self._spawn(f"restart of {instance.name}", self._revive(instance))

    async def _revive(self, instance: Instance) -> None:
        """Restart a dead instance until it is back in service, or given up."""
        now = asyncio.get_running_loop().time
        backoff, give_up_at = self._health.restart_backoff, now() + self._health.restart_within
        while True:
            try:
                await self._switcher.restart(instance, self.wanted_role(instance))
                return
            except Exception as error:  # whatever it was: the next try may find it gone
                if now() + backoff > give_up_at:
                    instance.problem = f"given up after {self._health.restart_within:g} s of restarts: {error!r}"
                    raise
                instance.problem = f"restart failed and is tried again: {error!r}"
                logger.warning("instance %s: restart failed, again in %.1f s: %r", instance.name, backoff, error)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_RESTART_BACKOFF)

    def wanted_role(self, instance: Instance) -> Role:
        """The role that the policy, asked for one instance more, has too few of: the one it had where that is among them,
        else the one that lacks most. Where roles take new processes it has its GPUs for the one it had."""
        if self._last is None or self._switcher.relaunch_s is not None:
            return instance.role
        now = self._fleet.in_service
        asked = replace(self._last.situation, current=added(now, instance.role, 1), moment=Moment.GRID)
        target = self._policy.decide(asked) or asked.current
        lack = {role: getattr(target, role) - getattr(now, role) for role in Role}
        most = max(lack, key=lambda role: lack[role])
        return instance.role if lack[instance.role] > 0 or lack[most] <= 0 else most

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(task.get_name(), error)
