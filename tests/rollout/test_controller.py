"""The controller: every group ends exactly once (promise 10), batches are complete, rules launch what they say."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import QUESTION, ScriptedControl, ScriptedSandboxes, call, environment

from prorsa.cluster.turns import TurnFailed, TurnRequest
from prorsa.forecast.injection import FixedRate, GroupReplenishment, Injection, ReplaceOnReward
from prorsa.lifecycle import IllegalTransition
from prorsa.lifecycle import events as e
from prorsa.rollout.controller import ENDED, Controller, Plan, RolloutFailed
from prorsa.rollout.episode import Launch
from prorsa.rollout.sampler import Group, Outcome, Sampler, derive_seed
from prorsa.rollout.tasks.base import Question
from prorsa.simulation import clock

T = TypeVar("T")
QUESTIONS = [Question(f"q{i}", QUESTION.messages, "1776") for i in range(5)]


class WatchedSampler(Sampler):
    """Remembers every group that it dealt from."""

    def __init__(self, group_size: int) -> None:
        super().__init__(QUESTIONS, group_size, seed=0)
        self.groups: dict[str, Group] = {}
        self.launches: list[Launch] = []

    def deal(self, version: int) -> tuple[Group, Launch]:
        group, launch = super().deal(version)
        self.groups[group.id] = group
        self.launches.append(launch)
        return group, launch


class Rollout:
    """A controller on scripted parts."""

    def __init__(self, script: Any, plan: Plan, group_size: int = 2, **sandboxes: Any) -> None:
        self.control = ScriptedControl(script)
        self.sandboxes = ScriptedSandboxes(**sandboxes)
        self.sampler = WatchedSampler(group_size)
        self.controller = Controller(self.control, environment(self.sandboxes), self.sampler, plan)

    def outcomes(self) -> Counter[Outcome | None]:
        return Counter(group.outcome for group in self.sampler.groups.values())

    def assert_nothing_is_left(self) -> None:
        assert len(self.control.tracker) == 0
        assert self.sandboxes.used == 0
        assert None not in self.outcomes()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert tasks == set()


def takes(seconds: float) -> Any:
    async def script(request: TurnRequest) -> str:
        await asyncio.sleep(seconds)
        return "The answer is 1776."

    return script


async def by_member(request: TurnRequest) -> str:
    """Member m of a group takes m + 1 seconds."""
    await asyncio.sleep(1.0 + int(request.trajectory.split(".")[1]))
    return "The answer is 1776."


def run(main: Coroutine[Any, Any, T]) -> T:
    return clock.run(main)


# Synchronous.


def test_a_synchronous_batch_is_complete_and_nothing_runs_after_it() -> None:
    async def main() -> None:
        rollout = Rollout(by_member, Plan(groups=3), group_size=4)
        async with rollout.controller as controller:
            for step in (1, 2):
                groups = await controller.batch()
                assert [group.outcome for group in groups] == [Outcome.TRAINED] * 3
                assert all([record.reward for record in group.records] == [1.0] * 4 for group in groups)
                assert asyncio.get_running_loop().time() == 4.0 * step
                assert len(rollout.control.tracker) == 0
                assert len(rollout.sampler.launches) == 12 * step
        rollout.assert_nothing_is_left()

    run(main())


def test_a_group_that_loses_a_member_is_replaced_and_its_others_are_dropped() -> None:
    async def script(request: TurnRequest) -> str:
        if request.trajectory == "g1.0":
            raise TurnFailed("no instance answered")
        return await takes(5.0)(request)  # type: ignore[no-any-return]

    async def main() -> None:
        rollout = Rollout(script, Plan(groups=2), group_size=3)
        async with rollout.controller as controller:
            groups = await controller.batch()
        assert sorted(group.id for group in groups) == ["g0", "g2"]
        lost = rollout.sampler.groups["g1"]
        assert (lost.outcome, lost.reason) == (Outcome.REPLACED, "no instance answered")
        assert [record.dropped for record in lost.records] == ["no instance answered"] * 3
        # Its members are dropped at once, and the replacement starts then.
        assert {event.time for event in rollout.control.of(e.Dropped)} == {0.0}
        assert asyncio.get_running_loop().time() == 5.0
        rollout.assert_nothing_is_left()

    run(main())


def test_a_rollout_that_only_loses_ends_with_the_reason() -> None:
    async def main() -> None:
        rollout = Rollout(takes(1.0), Plan(groups=2), broken=True)
        async with rollout.controller as controller:
            with pytest.raises(RolloutFailed, match="no space"):
                await controller.batch()
        rollout.assert_nothing_is_left()

    run(main())


def test_what_the_control_plane_refuses_ends_the_rollout() -> None:
    class Strict(ScriptedControl):
        async def record(self, event: e.Event) -> None:
            if isinstance(event, e.Done):
                raise IllegalTransition(event.trajectory, None, event, "a test")
            await super().record(event)

    async def main() -> None:
        rollout = Rollout(takes(1.0), Plan(groups=1))
        rollout.controller = Controller(
            Strict(takes(1.0)), environment(ScriptedSandboxes()), rollout.sampler, Plan(groups=1)
        )
        async with rollout.controller as controller:
            with pytest.raises(IllegalTransition):
                await controller.batch()
        assert set(rollout.outcomes()) == {Outcome.DROPPED}

    run(main())


# Asynchronous.


def test_replace_on_reward_keeps_the_number_of_live_trajectories() -> None:
    async def main() -> None:
        rollout = Rollout(by_member, Plan(3, ReplaceOnReward(), max_staleness=9), group_size=2)
        async with rollout.controller as controller:
            for _ in range(8):
                await controller.batch()
                assert sum(not task.done() for task in controller._tasks) == 6
        done = len(rollout.control.of(e.Done))
        assert len(rollout.sampler.launches) == 6 + done
        rollout.assert_nothing_is_left()

    run(main())


def test_group_replenishment_launches_a_group_when_the_last_member_of_one_ends() -> None:
    async def main() -> None:
        rollout = Rollout(by_member, Plan(2, GroupReplenishment(3), max_staleness=9), group_size=3)
        async with rollout.controller as controller:
            for _ in range(3):
                await controller.batch()
        sampled = Counter(event.time for event in rollout.control.of(e.Sampled) if event.time < 9.0)
        assert sampled == {0.0: 6, 3.0: 6, 6.0: 6}
        rollout.assert_nothing_is_left()

    run(main())


def test_fixed_rate_launches_by_the_clock() -> None:
    async def main() -> None:
        rollout = Rollout(takes(10.0), Plan(2, FixedRate(4.0), max_staleness=99), group_size=2)
        async with rollout.controller as controller:
            await controller.batch()
            assert asyncio.get_running_loop().time() == 10.0
            assert len(rollout.sampler.launches) - 4 == pytest.approx(40, abs=1)
        rollout.assert_nothing_is_left()

    run(main())


@pytest.mark.parametrize("rule", [ReplaceOnReward(), FixedRate(10.0), GroupReplenishment(2)])
def test_nothing_is_generated_further_ahead_than_staleness_allows(rule: Injection) -> None:
    async def main() -> None:
        rollout = Rollout(takes(1.0), Plan(2, rule, max_staleness=2), group_size=2)
        async with rollout.controller as controller:
            await controller.batch()
            await asyncio.sleep(1000.0)
            # One batch is with the trainer; (2 + 1) batches of 4 are ready for it.
            assert len(rollout.sampler.launches) == 4 + 12
            for _ in range(3):
                began = asyncio.get_running_loop().time()
                await controller.batch()
                assert asyncio.get_running_loop().time() == began
        rollout.assert_nothing_is_left()

    run(main())


def test_batches_come_out_in_completion_order() -> None:
    async def script(request: TurnRequest) -> str:
        return await takes(50.0 if request.trajectory.startswith("g0.") else 1.0)(request)  # type: ignore[no-any-return]

    async def main() -> None:
        rollout = Rollout(script, Plan(2, GroupReplenishment(2), max_staleness=9))
        async with rollout.controller as controller:
            groups = [group.id for _ in range(3) for group in await controller.batch()]
            assert "g0" not in groups
            assert groups == sorted(groups, key=lambda name: int(name[1:]))
            assert asyncio.get_running_loop().time() == 6.0
        assert rollout.sampler.groups["g0"].reason == ENDED
        rollout.assert_nothing_is_left()

    run(main())


def test_a_straggler_is_dropped_once_it_is_too_stale() -> None:
    async def script(request: TurnRequest) -> str:
        return await takes(1e6 if request.trajectory == "g0.0" else 1.0)(request)  # type: ignore[no-any-return]

    async def main() -> None:
        rollout = Rollout(script, Plan(2, ReplaceOnReward(), max_staleness=1))
        async with rollout.controller as controller:
            for version in (1, 2, 3):
                await controller.batch()
                assert rollout.sampler.groups["g0"].outcome is (Outcome.REPLACED if version == 3 else None)
                rollout.control.version = version
        assert rollout.sampler.groups["g0"].reason == ("stale: sampled with weights 0, now 2, max_staleness 1")
        dropped = [event for event in rollout.control.of(e.Dropped) if event.trajectory == "g0.0"]
        assert [event.reason for event in dropped] == [rollout.sampler.groups["g0"].reason]  # type: ignore[attr-defined]
        rollout.assert_nothing_is_left()

    run(main())


def test_a_complete_group_that_grew_stale_while_it_waited_is_not_trained() -> None:
    async def main() -> None:
        rollout = Rollout(takes(1.0), Plan(1, GroupReplenishment(2), max_staleness=1))
        async with rollout.controller as controller:
            await controller.batch()
            await asyncio.sleep(10.0)
            rollout.control.version = 2
            groups = await controller.batch()
            assert [group.version for group in groups] == [2]
        assert rollout.outcomes()[Outcome.REPLACED] == 2
        rollout.assert_nothing_is_left()

    run(main())


# Whatever happens.


def rules() -> st.SearchStrategy[Injection | None]:
    return st.sampled_from([None, ReplaceOnReward(), GroupReplenishment(2), FixedRate(3.0)])


@given(rules(), st.integers(0, 2), st.integers(0, 2**32), st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.3]))
@settings(deadline=None, max_examples=100)
def test_every_group_ends_once_whatever_fails(
    rule: Injection | None, staleness: int, seed: int, batches: int, failing: float
) -> None:
    rng = random.Random(seed)

    async def script(request: TurnRequest) -> str:
        await asyncio.sleep(rng.choice([0.0, rng.expovariate(1.0)]))
        if rng.random() < failing:
            raise rng.choice([TurnFailed("no instance"), ValueError("a bug")])
        if rng.random() < 0.1:
            rollout.control.version += 1
        return call("1") if rng.random() < 0.5 else "The answer is 1776."

    async def main() -> None:
        plan = Plan(rng.randint(1, 3), rule, staleness)
        nonlocal rollout
        rollout = Rollout(script, plan, group_size=2, start_s=rng.random(), run_s=rng.random())
        async with rollout.controller as controller:
            for _ in range(batches):
                # Now and then the caller loses patience, as on Ctrl-C. Nothing takes an hour unless it is stuck.
                patience = rng.choice([2.0, 3600.0])
                try:
                    async with asyncio.timeout(patience):
                        groups = await controller.batch()
                except TimeoutError:
                    assert patience == 2.0
                    continue
                except RolloutFailed:
                    break
                assert len(groups) == plan.groups
                for group in groups:
                    assert group.outcome is Outcome.TRAINED
                    assert len(group.records) == 2
                    assert all(record.reward is not None for record in group.records)
                    assert rollout.control.version - group.version <= staleness
        rollout.assert_nothing_is_left()
        ended = len(rollout.control.of(e.Done)) + len(rollout.control.of(e.Dropped))
        assert ended == len(rollout.control.of(e.Sampled))
        for group in rollout.sampler.groups.values():
            with pytest.raises(RuntimeError, match="cannot end again"):
                group.end(Outcome.DROPPED)

    rollout: Rollout
    run(main())


@pytest.mark.parametrize("rounds", range(0, 40, 3))
def test_a_cancelled_rollout_leaves_nothing(rounds: int) -> None:
    async def main() -> None:
        rollout = Rollout(takes(0.0), Plan(2, ReplaceOnReward(), max_staleness=1))

        async def use() -> None:
            async with rollout.controller as controller:
                while True:
                    await controller.batch()

        task = asyncio.create_task(use())
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        rollout.assert_nothing_is_left()

    run(main())


# The sampler.


def test_the_sampler_deals_groups_in_order_with_reproducible_seeds() -> None:
    sampler = Sampler(QUESTIONS[:2], 2, seed=5)
    dealt = [sampler.deal(version=3)[1] for _ in range(6)]
    assert [launch.trajectory for launch in dealt] == ["g0.0", "g0.1", "g1.0", "g1.1", "g2.0", "g2.1"]
    assert [launch.question.id for launch in dealt] == ["q0", "q0", "q1", "q1", "q0", "q0"]
    assert {launch.version for launch in dealt} == {3}
    again = Sampler(QUESTIONS[:2], 2, seed=5)
    assert [again.deal(version=0)[1].seed for _ in range(6)] == [launch.seed for launch in dealt]
    assert len({launch.seed for launch in dealt}) == 6
    assert dealt[4].seed == derive_seed(5, "q0", epoch=1, member=0)
    assert all(0 <= launch.seed < 2**31 for launch in dealt)
