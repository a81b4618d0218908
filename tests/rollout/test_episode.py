"""One episode: legal events, the tokens trained on are the tokens generated (promises 2 and 12), a clean end (10, 11)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts import CHAT, QUESTION, TASK, ScriptedControl, ScriptedSandboxes, call, environment, scripted

from prorsa.cluster.turns import TurnFailed, TurnRequest, TurnResult
from prorsa.lifecycle import State
from prorsa.lifecycle import events as e
from prorsa.rollout.episode import CUT, MALFORMED, NO_TOOL, Episode, Launch, fit_tool_turn
from prorsa.rollout.records import TrajectoryRecord
from prorsa.simulation import clock

ANSWER = "The answer is 1776."
LAUNCH = Launch("t0", "g0", QUESTION, version=0, seed=7)


def play(control: ScriptedControl, sandboxes: ScriptedSandboxes | None = None, **bounds: int) -> TrajectoryRecord:
    async def main() -> TrajectoryRecord:
        return await Episode(LAUNCH, environment(sandboxes or ScriptedSandboxes(), **bounds), control).run()

    record = clock.run(main())
    assert len(control.tracker) == 0
    return record


def names(control: ScriptedControl) -> list[str]:
    return [type(event).__name__ for event in control.events]


def generated(record: TrajectoryRecord) -> list[int]:
    return [i for i, mask in zip(record.response_ids, record.response_mask, strict=True) if mask]


def test_a_conversation_goes_through_every_state_and_is_rewarded() -> None:
    control = ScriptedControl(scripted(call("37*48"), ANSWER))
    record = play(control, ScriptedSandboxes(start_s=2.0, run_s=3.0))
    turn = ["Ready", "PrefillStarted", "DecodeStarted"]
    assert names(control) == ["Sampled", "SandboxStarting", *turn, "ToolStarted", *turn, "RewardStarted", "Done"]
    assert [event.time for event in control.of(e.Ready)] == [2.0, 5.0]
    assert (record.reward, record.turns, record.dropped) == (1.0, 2, None)
    assert control.tracker.state("t0") is State.DONE


def test_the_tokens_trained_on_are_the_conversation_rendered_at_once() -> None:
    texts = [call("37*48"), call("x"), ANSWER]
    record = play(ScriptedControl(scripted(*texts)))
    messages: list[dict[str, Any]] = list(QUESTION.messages)
    for text, code in zip(texts, ["37*48", "x", None], strict=True):
        messages.append({"role": "assistant", "content": text})
        if code is not None:
            messages.append({"role": "tool", "content": f"ran {code}"})
    whole = CHAT.render(messages, TASK.tools, add_generation_prompt=False)
    ours = [*record.prompt_ids, *record.response_ids]
    assert ours == whole[: len(ours)]
    assert CHAT.decode(whole[len(ours) :]).strip() == ""


def test_every_response_token_has_its_mask_logprob_and_version() -> None:
    control = ScriptedControl(scripted(call("37*48"), ANSWER))
    control.version = 3
    record = play(control)
    expected = [i for text in (call("37*48"), ANSWER) for i in (*CHAT.encode(text), CHAT.eos_ids[0])]
    assert generated(record) == expected
    n = len(record.response_ids)
    assert n == len(record.response_mask) == len(record.logprobs) == len(record.versions)
    for mask, logprob, version in zip(record.response_mask, record.logprobs, record.versions, strict=True):
        assert (logprob < 0.0, version) == ((True, 3) if mask else (False, -1))


def test_each_turn_gets_the_whole_context_and_the_events_say_its_length() -> None:
    control = ScriptedControl(scripted(call("37*48"), ANSWER))
    record = play(control)
    first, second = control.requests
    assert first.input_ids == record.prompt_ids
    context = [*record.prompt_ids, *record.response_ids]
    answer = len(CHAT.encode(ANSWER)) + 1
    assert list(second.input_ids) == context[:-answer]
    tool_turn = len(CHAT.tool_turn("ran 37*48"))
    assert control.of(e.ToolStarted)[0].tokens == len(context) - answer - tool_turn  # type: ignore[attr-defined]
    assert control.of(e.RewardStarted)[0].tokens == len(context)  # type: ignore[attr-defined]
    assert [request.turn for request in control.requests] == [0, 1]
    assert {request.sampling.seed for request in control.requests} == {7}
    assert {request.sampling.stop_token_ids for request in control.requests} == {CHAT.eos_ids}


@pytest.mark.parametrize(
    ("text", "tool", "answer"),
    [
        ("<tool_call>\n{nonsense</tool_call>", NO_TOOL, MALFORMED),
        ('<tool_call>{"name": "search", "arguments": {}}</tool_call>', NO_TOOL, "there is no tool 'search'"),
        ('<tool_call>{"name": "python", "arguments": {}}</tool_call>', "python", '"code"'),
    ],
)
def test_a_wrong_call_is_answered_to_the_model(text: str, tool: str, answer: str) -> None:
    control = ScriptedControl(scripted(text, ANSWER))
    record = play(control)
    assert record.reward == 1.0
    assert control.of(e.ToolStarted)[0].tool == tool  # type: ignore[attr-defined]
    assert answer in CHAT.decode(control.requests[1].input_ids)


def test_a_call_in_the_last_turn_is_not_made() -> None:
    control = ScriptedControl(scripted(*[call("1")] * 3))
    record = play(control, max_turns=2)
    assert (record.turns, record.reward, len(control.of(e.ToolStarted))) == (2, 0.0, 1)


def test_a_turn_that_was_cut_off_is_the_last() -> None:
    control = ScriptedControl(scripted(call("1") + " and so on", ANSWER))
    record = play(control, max_new_tokens=len(CHAT.encode(call("1"))) + 1)
    assert (record.turns, record.reward, record.dropped) == (1, 0.0, None)


@given(st.integers(min_value=1, max_value=400), st.integers(min_value=0, max_value=3000))
def test_the_context_never_exceeds_its_bound(room: int, output: int) -> None:
    prompt = len(CHAT.render(QUESTION.messages, TASK.tools))
    control = ScriptedControl(scripted(*[call("1")] * 4))
    record = play(control, ScriptedSandboxes(output="7" * output), max_context=prompt + room)
    assert len(record.prompt_ids) + len(record.response_ids) <= prompt + room
    assert record.dropped is None
    for request in control.requests:
        assert 1 <= request.sampling.max_new_tokens <= prompt + room - len(request.input_ids)


@given(st.text(max_size=300), st.integers(min_value=0, max_value=200))
def test_a_tool_turn_is_cut_to_its_room_and_stays_a_tool_turn(text: str, more: int) -> None:
    room = len(CHAT.tool_turn("")) + more
    ids = fit_tool_turn(CHAT, text, room)
    assert len(ids) <= room
    whole = CHAT.tool_turn(text)
    if len(whole) <= room:
        assert ids == whole
    else:
        assert ids == CHAT.tool_turn("") or CUT in CHAT.decode(ids)


def test_a_prompt_without_room_is_dropped() -> None:
    control = ScriptedControl(scripted(ANSWER))
    record = play(control, max_context=10)
    assert record.dropped is not None
    assert "max_context is 10" in record.dropped
    assert control.tracker.state("t0") is State.DROPPED


async def refuse(request: TurnRequest) -> str:
    raise TurnFailed("no instance answered")


async def break_down(request: TurnRequest) -> str:
    raise KeyError("oops")


@pytest.mark.parametrize(
    ("control", "sandboxes", "reason"),
    [
        (ScriptedControl(refuse), ScriptedSandboxes(), "no instance answered"),
        (ScriptedControl(break_down), ScriptedSandboxes(), "KeyError: 'oops'"),
        (ScriptedControl(scripted(ANSWER)), ScriptedSandboxes(broken=True), "no space"),
    ],
)
def test_a_failure_drops_the_trajectory_with_its_reason(
    control: ScriptedControl, sandboxes: ScriptedSandboxes, reason: str
) -> None:
    record = play(control, sandboxes)
    assert record.dropped is not None
    assert reason in record.dropped
    assert control.events[-1] == e.Dropped(control.events[-1].time, "t0", record.dropped)
    assert (record.reward, sandboxes.used) == (None, 0)


def test_unequal_lengths_from_the_cluster_are_refused() -> None:
    class Careless(ScriptedControl):
        async def generate(self, request: TurnRequest) -> TurnResult:
            result = await super().generate(request)
            return TurnResult(result.token_ids, result.logprobs[1:], result.versions, result.finish, 1, 0)

    record = play(Careless(scripted(ANSWER)))
    assert record.dropped is not None
    assert "logprobs" in record.dropped
    assert record.response_ids == ()


STEPS = 12
"""More event-loop rounds than the episode below takes."""


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("rounds", range(STEPS))
def test_a_cancellation_at_any_await_leaves_nothing(rounds: int, times: int) -> None:
    control, sandboxes = ScriptedControl(scripted(call("1"), ANSWER)), ScriptedSandboxes()

    async def main() -> None:
        task = asyncio.create_task(Episode(LAUNCH, environment(sandboxes), control).run())
        for _ in range(rounds):
            await asyncio.sleep(0)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([task])
        assert task.cancelled() is not (control.of(e.Done) != [])

    clock.run(main())
    assert len(control.tracker) == 0
    assert sandboxes.used == 0
    assert len(control.of(e.Done)) + len(control.of(e.Dropped)) == len(control.of(e.Sampled))


def test_the_cancellations_above_meet_every_await() -> None:
    control = ScriptedControl(scripted(call("1"), ANSWER))

    async def main() -> int:
        task = asyncio.create_task(Episode(LAUNCH, environment(ScriptedSandboxes()), control).run())
        rounds = 0
        while not task.done():
            await asyncio.sleep(0)
            rounds += 1
        return rounds

    assert clock.run(main()) <= STEPS


@pytest.mark.parametrize("rounds", range(STEPS))
def test_a_drop_at_any_await_ends_in_a_record(rounds: int) -> None:
    control, sandboxes = ScriptedControl(scripted(call("1"), ANSWER)), ScriptedSandboxes()

    async def main() -> TrajectoryRecord:
        episode = Episode(LAUNCH, environment(sandboxes), control)
        task = asyncio.create_task(episode.run())
        for _ in range(rounds):
            await asyncio.sleep(0)
        episode.drop("stale")
        return await task

    record = clock.run(main())
    assert (record.reward, record.dropped) in [(1.0, None), (None, "stale")]
    assert (record.dropped is None) == (control.of(e.Done) != [])
    assert len(control.tracker) == 0
    assert sandboxes.used == 0


def test_a_cancellation_that_meets_a_drop_is_not_lost() -> None:
    control = ScriptedControl(scripted(call("1"), ANSWER))

    async def main() -> None:
        episode = Episode(LAUNCH, environment(ScriptedSandboxes(run_s=9.0)), control)
        task = asyncio.create_task(episode.run())
        await asyncio.sleep(1.0)
        episode.drop("stale")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    clock.run(main())
    assert [event.reason for event in control.of(e.Dropped)] == ["stale"]  # type: ignore[attr-defined]
