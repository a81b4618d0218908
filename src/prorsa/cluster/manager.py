"""The global manager: every S seconds it takes a snapshot, forecasts, allocates and switches (paper, 4.1.2 and 4.2).

It also watches the health of instances and has dead ones restarted. Invariants: decisions keep to a fixed grid of times;
neither a failing flip nor a failing restart ends the loop; it does nothing while engines' weights are being updated.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from prorsa.allocation import Allocation, Demand, Policy, PrefillSpeed, Situation
from prorsa.cluster.instances import Fleet, Instance, InstanceState
from prorsa.cluster.observers import Decision
from prorsa.cluster.router import Router
from prorsa.cluster.switcher import RoleSwitcher
from prorsa.engines.protocol import Engine, EngineError, Role
from prorsa.forecast.forecast import Forecaster
from prorsa.lifecycle import Tracker

logger = logging.getLogger(__name__)

MAX_RESTART_BACKOFF = 60.0
"""Seconds."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Bounds of the health watch, seconds."""

    interval: float = 5.0
    timeout: float = 10.0
    """An instance that does not answer for so long has failed one check."""
    checks: int = 2
    """Failed checks in a row that make an instance dead."""
    restart_backoff: float = 1.0
    """Pause after the first failed restart; it doubles up to `MAX_RESTART_BACKOFF`."""


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
        self.paused = False
        """Whether engines are being updated: nothing is decided and nothing is checked."""

    def start(self) -> None:
        self._spawn("manager", self._every(self._horizon, self._decide_and_switch, "decision"))
        self._spawn("health watch", self._every(self._health.interval, self._check_health, "health check"))
        self._fleet.watchers.append(self._instance_changed)

    async def stop(self) -> None:
        """Ends at once, flips and restarts in progress included. May be called again."""
        if self._instance_changed in self._fleet.watchers:
            self._fleet.watchers.remove(self._instance_changed)
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)

    def decide(self) -> Decision:
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
        target = self._policy.decide(Situation(demand, current, live, forecast.work))
        self._last = Decision(now, self._tracker.counts(), forecast, demand, current, live, target)
        self._decided(self._last)
        return self._last

    async def _decide_and_switch(self) -> None:
        if self.paused:
            return
        target = self.decide().target
        if target is not None:
            await self._switcher.apply(target)

    async def _every(self, seconds: float, act: Callable[[], Awaitable[None]], name: str) -> None:
        """Act at start + k * seconds, k = 1, 2, ...; a time that passed while it acted is skipped."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        while True:
            passed = math.floor((loop.time() - start) / seconds + 1e-9)
            await asyncio.sleep(start + (passed + 1) * seconds - loop.time())
            try:
                await act()
            except Exception as error:
                self._failed(name, error)

    # Health.

    async def _check_health(self) -> None:
        if self.paused:
            return  # an engine that loads weights may not answer
        routed = [instance for instance in self._fleet if instance.state is InstanceState.ROUTED]
        await asyncio.gather(*(self._check(instance) for instance in routed))

    async def _check(self, instance: Instance) -> None:
        engine = instance.engine
        try:
            async with asyncio.timeout(self._health.timeout):
                healthy = await engine.healthy()
        except (TimeoutError, EngineError):
            healthy = False
        if self.paused:
            return
        failed = 0 if healthy else self._failed_checks.get(engine, 0) + 1
        self._failed_checks[engine] = failed
        if failed >= self._health.checks and instance.state is InstanceState.ROUTED and instance.engine is engine:
            del self._failed_checks[engine]
            self._router.bury(instance, f"{failed} health checks in a row failed")

    def _instance_changed(self, instance: Instance) -> None:
        if instance.state is InstanceState.DEAD and self._switcher.can_restart:
            self._spawn(f"restart of {instance.name}", self._revive(instance))

    async def _revive(self, instance: Instance) -> None:
        """Restart a dead instance until it is back in service."""
        backoff = self._health.restart_backoff
        while True:
            try:
                await self._switcher.restart(instance, self.wanted_role(instance))
                return
            except (EngineError, TimeoutError) as error:
                logger.warning("instance %s: restart failed, again in %.1f s: %r", instance.name, backoff, error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_RESTART_BACKOFF)

    def wanted_role(self, instance: Instance) -> Role:
        """The role that the policy, asked for one instance more, has too few of; else the one it had."""
        if instance.role is Role.MIXED:
            return Role.MIXED
        now = self._fleet.in_service
        extra = (1, 0) if instance.role is Role.PREFILL else (0, 1)
        with_it = Allocation(now.prefill + extra[0], now.decode + extra[1])
        target = with_it if self._last is None else self._policy.decide(replace(self._last.situation, current=with_it))
        if target is None:
            return instance.role
        return Role.PREFILL if target.prefill > now.prefill else Role.DECODE

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(task.get_name(), error)
