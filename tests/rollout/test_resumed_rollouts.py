"""A rollout that was cut off at any event goes on: every member once, every group ended once, no id used twice."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollouts import QUESTION, ScriptedControl, ScriptedSandboxes, environment

from prorsa.cluster.turns import TurnFailed, TurnRequest
from prorsa.forecast.injection import FixedRate, GroupReplenishment, Injection, ReplaceOnReward
from prorsa.lifecycle import events as e
from prorsa.rollout.controller import Controller, Plan
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.resume import CUT_OFF, left, member_name, parse_member
from prorsa.rollout.sampler import Sampler
from prorsa.rollout.tasks.base import Question
from prorsa.simulation import clock

QUESTIONS = [Question(f"q{i}", QUESTION.messages, "1776") for i in range(5)]
SIZE, GROUPS, STEPS = 3, 2, 3


class Kept:
    """What a run directory holds: it outlives the processes of the run."""

    def __init__(self) -> None:
        self.events: list[e.Event] = []
        self.records: list[TrajectoryRecord] = []
        self.steps: list[list[str]] = []
        self.room: int | None = None
        """After so many further events the process is dead and keeps nothing more."""

    @property
    def dead(self) -> bool:
        return self.room is not None and self.room <= 0

    def event(self, event: e.Event) -> None:
        if not self.dead:
            self.events.append(event)
            if self.room is not None:
                self.room -= 1

    def record(self, record: TrajectoryRecord) -> None:
        if not self.dead:
            self.records.append(record)

    def step(self, groups: list[str]) -> None:
        if not self.dead:
            self.steps.append(groups)

    def cut_off(self, steps_lost: int) -> None:
        """What opening the directory does: what was live has ended. Steps that waited for a full disk were not written."""
        del self.steps[len(self.steps) - min(steps_lost, len(self.steps)) :]
        live = dict.fromkeys(event.trajectory for event in self.events)
        for event in self.events:
            if isinstance(event, e.Done | e.Dropped):
                del live[event.trajectory]
        done = {record.trajectory: record.reward for record in self.records}
        last = self.events[-1].time if self.events else 0.0
        for name in live:
            reward = done.get(name)
            self.events.append(
                e.Dropped(last, name, CUT_OFF) if reward is None else e.Done(last, name, reward, admitted=True)
            )


class Keeping(ScriptedControl):
    def __init__(self, script: Any, kept: Kept) -> None:
        super().__init__(script)
        self._kept = kept

    async def record(self, event: e.Event) -> None:
        await super().record(event)
        self._kept.event(event)


async def answer(request: TurnRequest) -> str:
    """Members of a group take turns of different length, and the first start of g1.1 fails."""
    await asyncio.sleep(1.0 + parse_member(request.trajectory)[0])
    if request.trajectory == "g1.1":
        raise TurnFailed("no instance answered")
    return "The answer is 1776."


def process(kept: Kept, plan: Plan) -> None:
    """One process of the run, until it has all steps or is dead."""

    async def main() -> None:
        handed_over = [group for step in kept.steps for group in step]
        unfinished = left(kept.events, kept.records, handed_over, SIZE)
        sampler = Sampler(QUESTIONS, SIZE, seed=0)
        control = Keeping(answer, kept)
        async with Controller(control, environment(ScriptedSandboxes()), sampler, plan, kept.record) as controller:
            controller.resume(unfinished)
            while len(kept.steps) < STEPS and not kept.dead:
                batch = asyncio.ensure_future(controller.batch())
                while not batch.done() and not kept.dead:  # noqa: ASYNC110 - in virtual time
                    await asyncio.sleep(0.5)
                if batch.done():
                    kept.step([group.id for group in batch.result()])
                else:
                    batch.cancel()
            kept.room = 0

    clock.run(main())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), max_size=4),
    st.sampled_from([None, GroupReplenishment(SIZE), ReplaceOnReward(), FixedRate(2.0)]),
)
def test_a_rollout_cut_off_at_any_event_does_the_rest_once(
    cuts: list[tuple[int, int]], injection: Injection | None
) -> None:
    kept, plan = Kept(), Plan(GROUPS, injection, max_staleness=3)
    for room, steps_lost in [*cuts, (None, 0)]:
        kept.room = room
        process(kept, plan)
        kept.cut_off(steps_lost)
    assert len(kept.steps) == STEPS
    groups = [group for step in kept.steps for group in step]
    assert len(set(groups)) == len(groups) == STEPS * GROUPS
    members = Counter((r.group, parse_member(r.trajectory)[0]) for r in kept.records if r.dropped is None)
    assert set(members.values()) == {1}
    assert {(group, member) for group in groups for member in range(SIZE)} <= members.keys()
    sampled = [event.trajectory for event in kept.events if isinstance(event, e.Sampled)]
    assert len(set(sampled)) == len(sampled), "an id was used twice"
    by_member = {(r.group, parse_member(r.trajectory)[0]): r.seed for r in kept.records}
    whole = Sampler(QUESTIONS, SIZE, seed=0)
    for _ in range(SIZE * (1 + max(int(group[1:]) for group in groups))):
        group, launch = whole.deal(0)
        member = (group.id, parse_member(launch.trajectory)[0])
        assert by_member.get(member, launch.seed) == launch.seed, "a member has the seed that it would have had"


def test_names_of_members() -> None:
    assert [member_name("g3", 2), member_name("g3", 2, 1)] == ["g3.2", "g3.2.1"]
    assert [parse_member("g3.2"), parse_member("g3.2.1")] == [(2, 0), (2, 1)]


def record(trajectory: str, dropped: str | None = None) -> TrajectoryRecord:
    reward = None if dropped else 1.0
    return TrajectoryRecord(
        trajectory, trajectory.split(".")[0], "q", 0, 7, (1,), (2,), (1,), (-0.5,), (0,), reward, 1, dropped
    )


def sampled(*trajectories: str) -> list[e.Event]:
    return [e.Sampled(0.0, name, name.split(".")[0], "x") for name in trajectories]


def test_what_is_left() -> None:
    events = [
        *sampled("g0.0", "g0.1", "g1.0", "g1.1", "g2.0", "g2.1", "g3.0", "g3.1", "g4.0"),
        e.Dropped(1.0, "g2.1", "no instance answered"),
        e.Dropped(1.0, "g3.1", CUT_OFF),
    ]
    records = [record(name) for name in ("g0.0", "g0.1", "g3.0", "g1.1", "g1.0", "g2.0")]
    found = left(events, records, handed_over=["g0"], group_size=2)
    assert found.dealt == 5
    assert [(one.number, [r.trajectory for r in one.records], one.restarts) for one in found.groups] == [
        (1, ["g1.1", "g1.0"], {}),
        (3, ["g3.0"], {1: 1}),
        (4, [], {0: 1}),
    ]


def test_a_record_whose_events_were_lost_counts() -> None:
    found = left([], [record("g0.1")], [], group_size=2)
    assert (found.dealt, [r.trajectory for r in found.groups[0].records]) == (1, ["g0.1"])


@pytest.mark.parametrize("rewards", [float("nan"), float("inf"), None, "1", "one", 10**400])
def test_a_reward_that_is_no_finite_number_drops_its_trajectory_and_says_so(rewards: Any) -> None:
    from dataclasses import replace

    class Rewarding:
        async def score(self, question: Question, final_text: str) -> float:
            return rewards  # type: ignore[no-any-return]

    async def main() -> TrajectoryRecord:
        from prorsa.rollout.episode import Episode

        sampler = Sampler(QUESTIONS, 1, seed=0)
        _, launch = sampler.deal(0)
        parts = replace(environment(ScriptedSandboxes()), reward=Rewarding())
        return await Episode(launch, parts, ScriptedControl(answer)).run()

    ended = clock.run(main())
    if rewards == "1":
        assert ended.reward == 1.0
    else:
        assert ended.reward is None
        assert ended.dropped == f"task arithmetic, question q0: the reward is {rewards!r}; it must be a finite number"
