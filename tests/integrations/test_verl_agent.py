"""What the agent loop makes of a row of data and of a finished episode, and its ports to the router actor."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason, SamplingParams
from prorsa.integrations.verl.agent import RouterPorts, TrajectoryDropped, plan_launch, to_output
from prorsa.lifecycle.events import RewardStarted
from prorsa.rollout.episode import Launch
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.tasks.base import Question

RECORD = TrajectoryRecord(
    trajectory="u.1",
    group="u",
    question="q",
    version=3,
    seed=1,
    prompt_ids=(1, 2),
    response_ids=(10, 11, 20, 21, 12),
    response_mask=(1, 1, 0, 0, 1),
    logprobs=(-0.5, -0.25, 0.0, 0.0, -1.0),
    versions=(3, 3, -1, -1, 4),
    reward=1.0,
    turns=2,
    dropped=None,
)
LAUNCH = Launch("u.1", "u", Question("q", (), "42"), version=3, seed=1)


def test_what_is_trained_on_is_what_was_generated() -> None:
    output = to_output(RECORD)
    fields = output.as_dict()
    assert fields["prompts"].tolist() == [1, 2]
    assert fields["responses"].tolist() == [10, 11, 20, 21, 12]
    assert fields["response_mask"].tolist() == [1, 1, 0, 0, 1]
    assert fields["rollout_log_probs"].tolist() == [-0.5, -0.25, 0.0, 0.0, -1.0]
    assert fields["rm_scores"].tolist() == [0, 0, 0, 0, 1.0]
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 4)


def test_a_reward_of_zero_is_a_reward() -> None:
    """verl computes a score itself where there is none."""
    assert to_output(replace(RECORD, reward=0.0)).reward_score == 0.0


def test_a_dropped_trajectory_fails_its_group() -> None:
    with pytest.raises(TrajectoryDropped, match=r"trajectory u\.1: no engine is left"):
        to_output(replace(RECORD, reward=None, dropped="no engine is left"))


def row(**changes: Any) -> dict[str, Any]:
    return {
        "uid": "u",
        "session_id": 1,
        "global_steps": 2,
        "raw_prompt": [{"role": "user", "content": "?"}],
        "reward_model": {"ground_truth": "42"},
        "extra_info": {"id": "q", "split": "train", "index": 0},
        **changes,
    }


def test_a_row_becomes_a_launch() -> None:
    launch = plan_launch(row(), version=7, seed=0)
    assert (launch.trajectory, launch.group, launch.version) == ("u.1", "u", 7)
    assert launch.question == Question("q", ({"role": "user", "content": "?"},), "42")


def test_members_and_steps_have_seeds_of_their_own() -> None:
    seeds = {plan_launch(row(session_id=m, global_steps=s), 0, 0).seed for m in range(4) for s in range(3)}
    assert len(seeds) == 12


def test_held_out_questions_have_the_same_seeds_before_and_after_training() -> None:
    held_out = {"id": "q", "split": "test", "index": 0}
    before, after = (plan_launch(row(extra_info=held_out, global_steps=step), 0, 0) for step in (0, 12))
    assert before.seed == after.seed


class FakeRouter:
    """The calls of a Ray actor handle, answered at once."""

    def __init__(self, versions: tuple[int, ...]) -> None:
        self.calls: list[Any] = []
        self.record = SimpleNamespace(remote=self._record)
        self.turn = SimpleNamespace(remote=self._turn)
        self._versions = versions

    async def _record(self, event: Any) -> None:
        self.calls.append(event)

    async def _turn(self, request: TurnRequest) -> TurnResult:
        self.calls.append(request)
        n = len(self._versions)
        return TurnResult((5,) * n, (0.0,) * n, self._versions, FinishReason.STOP, 1, 0)


class FakeEpisode:
    def __init__(self) -> None:
        self.dropped: list[str] = []

    def drop(self, reason: str) -> None:
        self.dropped.append(reason)


REQUEST = TurnRequest("u.1", 0, (1, 2), SamplingParams(4))


def test_calls_reach_the_router_in_order() -> None:
    router = FakeRouter((3,))
    ports = RouterPorts(router, LAUNCH, max_staleness=0)
    event = RewardStarted(1.0, "u.1", 3)

    async def main() -> None:
        assert (await ports.generate(REQUEST)).token_ids == (5,)
        await ports.record(event)

    asyncio.run(main())
    assert router.calls == [REQUEST, event]


def test_a_cancelled_turn_is_cancelled_in_the_router_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled: list[object] = []
    monkeypatch.setattr("prorsa.integrations.verl.agent.ray.cancel", cancelled.append)

    async def main() -> None:
        turn: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        router = SimpleNamespace(turn=SimpleNamespace(remote=lambda request: turn))
        waiting = asyncio.create_task(RouterPorts(router, LAUNCH, max_staleness=0).generate(REQUEST))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert cancelled == [turn]

    asyncio.run(main())


@pytest.mark.parametrize(("newest", "dropped"), [(3, False), (4, False), (5, True)])
def test_a_trajectory_too_far_behind_is_dropped(newest: int, dropped: bool) -> None:
    ports = RouterPorts(FakeRouter((3, newest)), LAUNCH, max_staleness=1)
    episode = FakeEpisode()
    ports.episode = episode  # type: ignore[assignment]
    asyncio.run(ports.generate(REQUEST))
    assert bool(episode.dropped) == dropped
    if dropped:
        assert episode.dropped == ["stale: 2 weights versions behind, rollout.max_staleness=1"]
