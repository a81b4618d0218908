"""The role switcher: unroute, cancel, wait idle, flip, verify the reported role, reroute (paper, Appendix C).

An instance may be given some time to finish what it serves before that is cancelled. Where a canary is asked for, the
flipped instance serves one request before it is routed.

Invariants. Flips and weight updates exclude each other by one lock. A flip that does nothing, fails half-way, lies or takes
too long takes its instance out of service; a restart brings it back with the role that is wanted and the weights that are
current. While requests are served, no flip takes an instance without which the routed ones could not serve.

Roles with parallelism of their own take a new process each (`Relaunches`). Where they take different numbers of GPUs, a
change of roles first stops the instances that are too many, then launches others in new roles on GPUs that are free by now,
then starts those that are missing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from prorsa.allocation import Allocation
from prorsa.cluster.canary import Canary
from prorsa.cluster.flips import Change, added, can_flip, changes_in_place, missing, next_wave, serves, surplus
from prorsa.cluster.instances import Fleet, Instance, InstanceState
from prorsa.cluster.observers import Flip
from prorsa.cluster.router import Router
from prorsa.engines.protocol import Engine, EngineBusy, EngineError, Load, Role, Shortage

logger = logging.getLogger(__name__)


class FlipRefused(Exception):
    """The flip would do harm or makes no sense now; nothing was changed. The message names the instance and why."""


class Restarter(Protocol):
    """Who owns the engine processes."""

    async def restart(self, name: str, role: Role) -> Engine:
        """End whatever is left of the instance, at once, and start it anew. Raises `EngineError` or `OSError`."""
        ...


class Launcher(Restarter, Protocol):
    """Who can also start and end them."""

    async def start(self, name: str, role: Role) -> Engine:
        """Raises `EngineError`."""
        ...

    async def stop(self, name: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Relaunches:
    """How an instance gets a role that its engine cannot have."""

    launcher: Launcher
    seconds: float
    """What a launch takes, until one has been measured."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that every instance must have. `path` is None for those that the engines started with."""

    version: int
    path: str | None = None


@dataclass(frozen=True, slots=True)
class SwitchLimits:
    """Bounds of a flip and of a restart, seconds."""

    idle_timeout: float = 30.0
    """From the end of the cancelling until the engine reports that it is idle."""
    idle_poll: float = 0.02
    """How often the engine is asked: it gives no signal."""
    flip_timeout: float = 120.0
    canary_timeout: float | None = None
    """Of the request that a flipped instance has to serve before it is routed; None sends none."""
    restart_timeout: float = 600.0


class RoleSwitcher:
    """`lock` is held by whoever changes engines: one allocation's flips, a weight update, the joining of a restarted one."""

    def __init__(
        self,
        fleet: Fleet,
        router: Router,
        restarter: Restarter | None,
        weights: Callable[[], Weights],
        flipped: Callable[[Flip], None],
        limits: SwitchLimits,
        relaunches: Relaunches | None = None,
    ) -> None:
        self.relaunch_s = relaunches.seconds if relaunches else None
        """Where a change of role takes a new process: seconds out of service the last time."""
        self._launcher = relaunches.launcher if relaunches else None
        self.lock = asyncio.Lock()
        self._fleet = fleet
        self._router = router
        self._restarter = restarter
        self._weights = weights
        self._flipped = flipped
        self._limits = limits
        self._canary = Canary(fleet, router.rooms, limits.canary_timeout) if limits.canary_timeout else None
        self._in_hand: set[str] = set()
        self._hurry = asyncio.Event()
        """Set while somebody waits for the lock who should not wait long."""

    async def apply(self, target: Allocation, patience: float = 0.0) -> list[Flip]:
        """Flip as few instances as bring the roles in service to `target`, in two waves where one would stop all service.

        An instance may go on for `patience` seconds with what it serves before that is cancelled.
        """
        async with self.lock:
            return await self.reach(target, patience)

    async def reach(self, target: Allocation, patience: float = 0.0) -> list[Flip]:
        """`apply` for who holds the lock."""
        flips: list[Flip] = []
        if self._launcher is not None:
            if any(instance.state is not InstanceState.ROUTED for instance in self._fleet):
                # It will need its GPUs.
                return flips
            await asyncio.gather(*(self._stop(self._launcher, i, patience) for i in surplus(self._fleet, target)))
        # Whoever is in a hurry does not wait for a second wave.
        while (changes := next_wave(self._fleet, target, can=self._can_become)) and not (
            flips and self._hurry.is_set()
        ):
            flips += await self._make(self._take(changes), patience)
        if self._launcher is not None and not self._hurry.is_set():
            await asyncio.gather(*(self._start(self._launcher, role) for role in missing(self._fleet, target)))
        return flips

    def reach_at_rest(self, target: Allocation) -> Coroutine[Any, Any, None] | None:
        """With the lock held, while nothing is served: take what has to flip out of the pools, now, all at once. What is
        returned flips it and then releases the lock; None where there is nothing to flip."""
        changes = self._take(next_wave(self._fleet, target, at_rest=True))
        return self._make_and_release(changes) if changes else None

    async def acquire(self) -> None:
        """Take the lock in a hurry: instances that may finish what they serve are not waited for any longer."""
        self._hurry.set()
        try:
            await self.lock.acquire()
        finally:
            self._hurry.clear()

    async def flip(self, name: str, role: Role) -> Flip:
        """Flip one instance. Raises `FlipRefused`."""
        instance = self._fleet[name]
        self._check_alone(instance, role)
        self._check_sensible(instance, role)
        self._in_hand.add(name)
        try:
            async with self.lock:
                self._check_sensible(instance, role)
                (flip,) = await self._make(self._take([(instance, role)]))
                return flip
        finally:
            self._in_hand.discard(name)

    async def take_out(self, name: str) -> int:
        """Take an instance out of service until `put_back`; what it serves is resent. Returns how many requests that were.

        Raises `FlipRefused`.
        """
        instance = self._fleet[name]
        async with self.lock:
            if instance.state is not InstanceState.ROUTED:
                raise FlipRefused(f"instance {name}: it is {instance.state}, so it cannot be taken out")
            self._check_spare(instance)
            self._fleet.move(instance, InstanceState.DRAINING)
            return await self._router.drain(instance, f"instance {name} is taken out of service")

    async def put_back(self, name: str) -> None:
        """Bring an instance that was taken out back into service.

        Raises `FlipRefused`, or `EngineError` where it is not fit for that any more; then it counts as dead.
        """
        instance = self._fleet[name]
        if instance.state is not InstanceState.DRAINING or self.lock.locked():
            raise FlipRefused(f"instance {name}: it is {instance.state}, and was not taken out or is being changed")
        async with self.lock:
            try:
                await self._join(instance, instance.role)
            except EngineError as error:
                self._router.bury(instance, str(error))
                raise

    @property
    def can_restart(self) -> bool:
        return self._restarter is not None

    async def restart(self, instance: Instance, role: Role) -> None:
        """Bring a dead instance back into service. Raises `EngineError`, `TimeoutError`, or whatever starting a process met;
        it stays dead then."""
        assert self._restarter is not None
        async with asyncio.timeout(self._limits.restart_timeout):
            await self._replace(self._restarter, instance, role)
        async with self.lock, asyncio.timeout(self._limits.restart_timeout):
            await self._join(instance, role)

    async def _replace(self, restarter: Restarter, instance: Instance, role: Role) -> None:
        engine = await restarter.restart(instance.name, role)
        former, instance.engine = instance.engine, engine
        if former is not engine:
            await former.close()

    async def _join(self, instance: Instance, role: Role) -> None:
        """Check a restarted instance, give it the current weights and route it."""
        await self._fit(instance, role)
        if self._canary is not None:
            await self._canary.send(instance, role)
        instance.lose_cache()
        self._fleet.move(instance, InstanceState.ROUTED, role)

    async def _fit(self, instance: Instance, role: Role) -> None:
        """Give a new process the current weights, check it, and ask what it holds."""
        engine, weights = instance.engine, self._weights()
        info = await engine.info()
        if weights.path is not None and info.weights_version != weights.version:
            await engine.update_weights(weights.path, weights.version)
            info = await engine.info()
        if info.role is not role or info.weights_version != weights.version:
            raise EngineError(
                f"instance {instance.name}: restarted as {role} with weights {weights.version}, but it reports "
                f"{info.role} with weights {info.weights_version}"
            )
        instance.capacity = (await engine.load()).max_tokens

    async def _stop(self, launcher: Launcher, instance: Instance, patience: float) -> None:
        self._fleet.move(instance, InstanceState.DRAINING)
        try:
            await self._let_finish(instance, patience)
            await self._router.drain(instance, f"instance {instance.name} is stopped")
        except asyncio.CancelledError:
            self._router.bury(instance, "its stop was cancelled half-way")
            raise
        if instance.state is not InstanceState.DRAINING:
            return  # it died, and is being restarted
        self._fleet.remove(instance)
        await launcher.stop(instance.name)

    async def _start(self, launcher: Launcher, role: Role) -> None:
        """One instance more. Where that fails the next decision will see that it is missing."""
        names = {instance.name for instance in self._fleet} | self._in_hand
        name = next(name for number in count() if (name := f"engine-{number}") not in names)
        self._in_hand.add(name)
        try:
            async with asyncio.timeout(self._limits.restart_timeout):
                instance = Instance(await launcher.start(name, role), role, 0)
                try:
                    await self._fit(instance, role)
                    if self._canary is not None:
                        await self._canary.send(instance, role)
                except BaseException:
                    await launcher.stop(name)
                    raise
            self._fleet.add(instance)
        except (EngineError, TimeoutError, OSError) as error:
            logger.warning("no instance more of role %s: %r", role, error)
        finally:
            self._in_hand.discard(name)

    def _check_alone(self, instance: Instance, role: Role) -> None:
        if instance.name in self._in_hand or instance.state in (InstanceState.DRAINING, InstanceState.FLIPPING):
            raise FlipRefused(f"instance {instance.name}: a flip to {role} was asked while another is going on")

    def _check_sensible(self, instance: Instance, role: Role) -> None:
        if instance.state is not InstanceState.ROUTED:
            raise FlipRefused(f"instance {instance.name}: it is {instance.state}, so it cannot become {role}")
        if instance.role is role:
            raise FlipRefused(f"instance {instance.name}: it is {role} already")
        if not self._can_become(instance, role):
            raise FlipRefused(f"instance {instance.name}: its engine cannot become {role} without a restart")
        self._check_spare(instance)

    def _can_become(self, instance: Instance, role: Role) -> bool:
        relaunch = self._launcher is not None and Role.MIXED not in (instance.role, role)
        return relaunch or can_flip(instance, role)

    def _check_spare(self, instance: Instance) -> None:
        """The others have to serve without it, unless not even all of them do."""
        now = self._fleet.in_service
        if serves(now) and not serves(added(now, instance.role, -1)):
            raise FlipRefused(f"instance {instance.name}: it is the last {instance.role} instance in service")

    def _take(self, changes: list[Change]) -> list[Change]:
        """Nothing new is sent to what will flip."""
        for instance, _ in changes:
            self._fleet.move(instance, InstanceState.DRAINING)
        return changes

    async def _make(self, changes: list[Change], patience: float = 0.0) -> list[Flip]:
        return list(await asyncio.gather(*(self._flip(instance, role, patience) for instance, role in changes)))

    async def _make_and_release(self, changes: list[Change]) -> None:
        try:
            await self._make(changes)
        finally:
            self.lock.release()

    async def _flip(self, instance: Instance, role: Role, patience: float) -> Flip:
        """One flip of an instance that drains, with the lock held. It never raises for what an engine does: the record says
        how it ended."""
        now = asyncio.get_running_loop().time
        before, start = instance.role, now()
        idle_at: float | None = None
        cancelled, failure = 0, None
        relaunched = not can_flip(instance, role)
        try:
            if not changes_in_place(instance, role):
                await self._let_finish(instance, patience)
                cancelled = await self._router.drain(instance, f"instance {instance.name} becomes {role}")
                await self._wait_idle(instance)
            idle_at = now()
            self._step(instance, InstanceState.DRAINING, InstanceState.FLIPPING)
            await (self._relaunch if relaunched else self._become)(instance, role)
            if self._canary is not None:
                await self._canary.send(instance, role)
            self._step(instance, InstanceState.FLIPPING, InstanceState.ROUTED, role)
        except (EngineError, TimeoutError, OSError) as error:
            failure = str(error)
            self._router.bury(instance, failure)
        except asyncio.CancelledError:
            self._router.bury(instance, "its flip was cancelled half-way")
            raise
        end = now()
        drained = end if idle_at is None else idle_at
        flip = Flip(
            time=start,
            instance=instance.name,
            before=before,
            after=role,
            cancelled=cancelled,
            drain_s=drained - start,
            flip_s=end - drained,
            failure=failure,
            relaunched=relaunched,
        )
        if relaunched and failure is None:
            self.relaunch_s = end - start
        self._flipped(flip)
        return flip

    def _step(self, instance: Instance, before: InstanceState, after: InstanceState, role: Role | None = None) -> None:
        if instance.state is not before:
            raise EngineError(f"instance {instance.name}: it was found {instance.state} while it was {before}")
        if role is not None and not changes_in_place(instance, role):
            instance.lose_cache()
        self._fleet.move(instance, after, role)

    async def _let_finish(self, instance: Instance, seconds: float) -> None:
        """Wait until nobody uses the instance, for `seconds` at most, and while nobody is in a hurry."""
        if seconds <= 0 or self._hurry.is_set():
            return
        ends = [asyncio.create_task(event.wait()) for event in (instance.unused, self._hurry)]
        try:
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def _wait_idle(self, instance: Instance) -> None:
        try:
            async with asyncio.timeout(self._limits.idle_timeout):
                while (load := await self._load(instance)) is None or not load.idle:  # noqa: ASYNC110
                    await asyncio.sleep(self._limits.idle_poll)
        except TimeoutError:
            raise TimeoutError(f"instance {instance.name} was not idle after {self._limits.idle_timeout} s") from None

    async def _load(self, instance: Instance) -> Load | None:
        """None while this process cannot ask."""
        try:
            return await instance.engine.load()
        except Shortage:
            return None

    async def _become(self, instance: Instance, role: Role) -> None:
        try:
            async with asyncio.timeout(self._limits.flip_timeout):
                await self._switch(instance, role)
                reported = (await instance.engine.info()).role
        except TimeoutError:
            raise TimeoutError(f"instance {instance.name} was not {role} after {self._limits.flip_timeout} s") from None
        if reported is not role:
            raise EngineError(f"instance {instance.name}: asked to become {role}; it still reports {reported}")

    async def _relaunch(self, instance: Instance, role: Role) -> None:
        assert self._launcher is not None
        try:
            async with asyncio.timeout(self._limits.restart_timeout):
                await self._replace(self._launcher, instance, role)
                await self._fit(instance, role)
        except TimeoutError:
            raise TimeoutError(
                f"instance {instance.name} was not launched as {role} after {self._limits.restart_timeout} s"
            ) from None

    async def _switch(self, instance: Instance, role: Role) -> None:
        """An engine may report idle a moment before it agrees to flip."""
        while True:
            try:
                return await instance.engine.switch_role(role)
            except EngineBusy:
                await asyncio.sleep(self._limits.idle_poll)
