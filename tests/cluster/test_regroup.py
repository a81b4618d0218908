"""Roles with parallelism of their own: instances get them by new processes, and give their GPUs to each other."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster_bench import Bench, in_virtual_time, until
from fake_engine import FakeEngine, FakeRestarter
from hypothesis import given, settings
from hypothesis import strategies as st

from prorsa.allocation import Adaptive, Allocation, Policy, PrefillSpeed
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.flips import missing, serves
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.manager import HealthLimits
from prorsa.cluster.router import Limits
from prorsa.cluster.switcher import Relaunches, SwitchLimits
from prorsa.engines.protocol import EngineError, Role
from prorsa.simulation.clock import run

GUESS = 7.0
"""What a launch is said to take; it takes 2 s."""


class FakeLauncher(FakeRestarter):
    """Engines that cannot flip, on `gpus` GPUs."""

    def __init__(self, bench: Bench, each: dict[Role, int], gpus: int, **engine: Any) -> None:
        super().__init__(bench.world, **engine)
        self.each, self.gpus = each, gpus
        self.taken = {name: each[engine.role] for name, engine in bench.engines.items()}
        assert self.free >= 0

    @property
    def free(self) -> int:
        return self.gpus - sum(self.taken.values())

    async def stop(self, name: str) -> None:
        await asyncio.sleep(0.5)
        del self.taken[name]

    async def start(self, name: str, role: Role) -> FakeEngine:
        if self.each[role] > self.free:
            raise EngineError(f"engine {name}: as {role} it takes {self.each[role]} GPUs, and {self.free} are free")
        self.taken[name] = self.each[role]
        try:
            engine = await super().restart(name, role)
        except EngineError:
            del self.taken[name]
            raise
        engine.roles = frozenset({role})
        return engine

    async def restart(self, name: str, role: Role) -> FakeEngine:
        if name in self.taken:
            await self.stop(name)
        return await self.start(name, role)


class Regrouping(Bench):
    """A bench whose prefill and decode instances have `each` GPUs, `gpus` together."""

    def __init__(self, start: Allocation, each: tuple[int, int], gpus: int, policy: Policy | None = None) -> None:
        super().__init__("P" * start.prefill + "D" * start.decode)
        for engine in self.engines.values():
            engine.roles = frozenset({engine.role})
        self.launcher = FakeLauncher(self, dict(zip((Role.PREFILL, Role.DECODE), each, strict=True)), gpus)
        self.restarter = self.launcher
        self.control = ControlPlane(
            list(self.engines.values()),
            forecaster=self.forecaster,
            policy=policy or self.policy,
            speed=PrefillSpeed(100.0),
            horizon=5.0,
            restarter=self.launcher,
            relaunches=Relaunches(self.launcher, GUESS),
            observers=[self.notes],
            limits=Limits(cancel_timeout=1.0, stall_timeout=20.0),
            switch_limits=SwitchLimits(idle_timeout=3.0, restart_timeout=10.0),
            health_limits=HealthLimits(interval=1.0, timeout=2.0),
        )

    def engine(self, name: str) -> FakeEngine:
        return self.launcher.engines[name] if name in self.launcher.engines else self.engines[name]


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[Allocation, Allocation, tuple[int, int], int]:
    m_p, m_d = draw(st.sampled_from([(2, 1), (1, 2), (4, 1), (3, 2), (1, 1)]))
    gpus = draw(st.integers(m_p + m_d, 10))
    fitting = [Allocation(p, d) for p in range(1, gpus) for d in range(1, gpus) if m_p * p + m_d * d <= gpus]
    return draw(st.sampled_from(fitting)), draw(st.sampled_from(fitting)), (m_p, m_d), gpus


@given(regroupings())
@settings(max_examples=60, deadline=None)
def test_any_roles_that_the_gpus_hold_are_reached_while_the_others_serve(
    drawn: tuple[Allocation, Allocation, tuple[int, int], int],
) -> None:
    start, target, each, gpus = drawn

    async def main() -> None:
        async with Regrouping(start, each, gpus) as bench:
            served: list[bool] = []
            bench.control.fleet.watchers.append(lambda _: served.append(serves(bench.control.fleet.in_service)))
            turns = bench.trajectories(6)
            await asyncio.sleep(0.3)
            # One of each role cannot change without a moment in which nothing is served.
            before = bench.control.fleet.in_service
            flips = await bench.control.switcher.apply(target)
            assert bench.control.fleet.in_service == target
            assert all(served)
            changed = (start.prefill - target.prefill) * (start.decode - target.decode) < 0
            pairs = min(abs(start.prefill - target.prefill), abs(start.decode - target.decode))
            assert len(flips) == (pairs if changed else 0)
            assert all(flip.relaunched and flip.failure is None for flip in flips)
            assert before == start
            await asyncio.gather(*turns)

    run(main())


@in_virtual_time
async def test_one_prefill_gives_place_to_two_decodes_and_back() -> None:
    async with Regrouping(Allocation(2, 2), (2, 1), 6) as bench:
        turns = bench.trajectories(30)
        await asyncio.sleep(0.3)
        assert bench.control.switcher.relaunch_s == GUESS
        (flip,) = await bench.control.switcher.apply(Allocation(1, 4))
        assert bench.launcher.free == 0
        # 0.5 s to stop and 2 s to start, after the drain.
        assert (flip.flip_s, flip.relaunched) == (pytest.approx(2.5), True)
        assert bench.control.switcher.relaunch_s == pytest.approx(flip.drain_s + 2.5)
        assert [instance.name for instance in bench.control.fleet] == ["e0", "e1", "e2", "e3", "engine-0"]
        (flip,) = await bench.control.switcher.apply(Allocation(2, 2))
        assert bench.launcher.free == 0
        stopped = [name for _, name, _, state in bench.notes.instances if state is InstanceState.STOPPED]
        assert len(stopped) == 1
        assert stopped[0] not in [instance.name for instance in bench.control.fleet]
        await asyncio.gather(*turns)


@in_virtual_time
async def test_started_and_relaunched_instances_have_the_current_weights() -> None:
    async with Regrouping(Allocation(2, 2), (2, 1), 6) as bench:
        await bench.control.update_weights("/weights/3", 3)
        await bench.control.switcher.apply(Allocation(1, 4))
        assert {bench.engine(instance.name).version for instance in bench.control.fleet} == {3}


@in_virtual_time
async def test_a_launch_that_fails_brings_the_instance_back_in_its_role() -> None:
    async with Regrouping(Allocation(2, 2), (1, 1), 4) as bench:
        bench.launcher.failures = 1
        (flip,) = await bench.control.switcher.apply(Allocation(1, 3))
        assert flip.failure is not None
        assert "did not come up" in flip.failure
        assert bench.control.switcher.relaunch_s == GUESS
        await until(lambda: bench.control.fleet.in_service == Allocation(2, 2))


@in_virtual_time
async def test_an_instance_more_that_does_not_start_is_started_by_the_next_decision() -> None:
    async with Regrouping(Allocation(1, 2), (1, 1), 4) as bench:
        bench.launcher.failures = 1
        await bench.control.switcher.apply(Allocation(1, 3))
        assert bench.control.fleet.in_service == Allocation(1, 2)
        assert bench.launcher.free == 1
        await bench.control.switcher.apply(Allocation(1, 3))
        assert bench.control.fleet.in_service == Allocation(1, 3)


@in_virtual_time
async def test_a_dead_instance_keeps_its_gpus_and_comes_back_in_its_role() -> None:
    async with Regrouping(Allocation(1, 4), (2, 1), 6) as bench:
        bench.engine("e4").die()
        await until(lambda: bench.control.fleet["e4"].state is InstanceState.DEAD)
        assert missing(bench.control.fleet, Allocation(1, 4)) == []
        assert await bench.control.switcher.apply(Allocation(2, 2)) == []
        assert bench.control.fleet.in_service == Allocation(1, 3)
        await until(lambda: bench.control.fleet.in_service == Allocation(1, 4))


@in_virtual_time
async def test_the_manager_regroups_for_a_demand_that_launches_can_meet_within_the_horizon() -> None:
    """Prompts are nearly all the work, so prefill is wanted; and a recorded decision replays."""
    policy = Adaptive(2, 1, 6)
    async with Regrouping(Allocation(1, 4), (2, 1), 6, policy) as bench:
        bench.control.switcher.relaunch_s = 4.9
        turns = [asyncio.create_task(bench.trajectory(f"t{i}", tuple(range(1, 60)), 3)) for i in range(300)]
        await until(lambda: bench.control.fleet.in_service == Allocation(2, 2))
        decision = next(one for one in bench.control.decisions if one.target == Allocation(2, 2))
        assert decision.relaunch_s == 4.9
        assert policy.decide(decision.situation) == Allocation(2, 2)
        await asyncio.gather(*turns)


@in_virtual_time
async def test_launches_longer_than_the_horizon_leave_the_roles() -> None:
    async with Regrouping(Allocation(1, 4), (2, 1), 6, Adaptive(2, 1, 6)) as bench:
        turns = [asyncio.create_task(bench.trajectory(f"t{i}", tuple(range(1, 60)), 3)) for i in range(300)]
        await asyncio.gather(*turns)
        assert bench.control.decisions
        assert bench.control.flips == []


@pytest.mark.parametrize("how", ["dies", "is cancelled"])
@in_virtual_time
async def test_an_instance_that_does_not_get_to_its_stop_is_restarted(how: str) -> None:
    async with Regrouping(Allocation(1, 4), (2, 1), 6) as bench:
        turns = bench.trajectories(12)
        await asyncio.sleep(0.3)
        victim = min(bench.control.fleet.pool(Role.DECODE), key=lambda instance: instance.load)
        bench.engine(victim.name).deaf = True
        change = asyncio.create_task(bench.control.switcher.apply(Allocation(1, 3)))
        await asyncio.sleep(0.1)
        assert victim.state is InstanceState.DRAINING
        if how == "dies":
            bench.engine(victim.name).die()
        else:
            change.cancel()
        await asyncio.gather(change, *turns, return_exceptions=how == "is cancelled")
        await until(lambda: bench.control.fleet.in_service == Allocation(1, 4))
