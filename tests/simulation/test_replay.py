from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pseudo_control import MAX_CONTEXT, Scripts, play

from prorsa.config import ConfigError
from prorsa.lifecycle import SandboxMode, TraceWriter
from prorsa.lifecycle import events as e
from prorsa.rollout.sampler import derive_seed
from prorsa.simulation.scenario import WorkloadSection
from prorsa.simulation.workloads.models import build_workload
from prorsa.simulation.workloads.replay import Replay, read_workload
from prorsa.simulation.workloads.scripts import Script, TurnScript, Workload

SEED = 4


def write(path: Path, events: Iterable[e.Event]) -> Path:
    with TraceWriter(path) as writer:
        for event in events:
            writer.write(event)
    return path


def rounded(script: Script) -> Script:
    """Durations in a trace are differences of times."""
    turns = tuple(replace(turn, tool_s=round(turn.tool_s, 6)) for turn in script.turns)
    return replace(
        script,
        turns=turns,
        sandbox_cold_s=round(script.sandbox_cold_s, 6),
        sandbox_prewarmed_s=round(script.sandbox_prewarmed_s, 6),
        reward_s=round(script.reward_s, 6),
    )


def seeds(workload: Workload, question: int, size: int) -> list[int]:
    return [derive_seed(SEED, f"{workload.name}-{question}", 0, member) for member in range(size)]


# A trace as a workload.


@pytest.mark.parametrize("resends", [0, 1])
@pytest.mark.parametrize("name", ["math", "coding-agent", "general-agent", "requests"])
def test_what_was_played_is_replayed(tmp_path: Path, name: str, resends: int) -> None:
    groups, size = 3, 4
    workload = build_workload(WorkloadSection.model_validate({"name": name}), 2)
    control, _ = play(workload, groups, size, seed=SEED, resends=resends)
    replay = read_workload(write(tmp_path / "trace", control.events), SEED, MAX_CONTEXT)
    assert (replay.name, replay.questions, replay.left_out) == (name, groups, 0)
    for question in range(groups):
        for member, seed in enumerate(seeds(workload, question, size)):
            # A sandbox is not told whose it is: the n-th of a question has the start of the script with seed n.
            cold = workload.script(question, member).sandbox_cold_s
            again = replay.script(question, seed)
            expected = replace(
                workload.script(question, seed), sandbox_cold_s=cold, sandbox_prewarmed_s=again.sandbox_prewarmed_s
            )
            assert rounded(again) == rounded(expected)


def test_a_replay_is_replayed_the_same(tmp_path: Path) -> None:
    workload = build_workload(WorkloadSection(name="general-agent"), 2)
    first, _ = play(workload, 2, 3, seed=SEED, prewarmed=3)
    replay = read_workload(write(tmp_path / "first", first.events), SEED, MAX_CONTEXT)
    second, _ = play(replay, 2, 3, seed=SEED, prewarmed=3)
    # Now every sandbox has its own times, prewarmed or cold, so even the moments are the same.
    assert [replace(event, time=round(event.time, 6)) for event in second.events] == [
        replace(event, time=round(event.time, 6)) for event in first.events
    ]


def test_a_scenario_replays_a_run_directory(tmp_path: Path) -> None:
    control, _ = play(Scripts(Script(10, (TurnScript(5, "shell", 1.5, 7), TurnScript(3)), reward=1.0)))
    write(tmp_path / "trace", control.events)
    workload = build_workload(WorkloadSection(name="trace", path=str(tmp_path)), SEED)
    assert workload.script(0, 99) == Script(10, (TurnScript(5, "shell", 1.5, 7), TurnScript(3)), reward=1.0)


def test_any_seed_plays_a_member() -> None:
    members = [Script(10, (TurnScript(output),)) for output in (2, 3, 4)]
    replay = Replay("math", [members], 0, SEED)
    assert [replay.script(0, seed) for seed in seeds(replay, 0, 3)] == members
    assert {replay.script(0, seed).turns[0].output_tokens for seed in seeds(replay, 0, 40)} == {2, 3, 4}


def episode(name: str, group: str = "g0", **changes: Any) -> list[e.Event]:
    """A trajectory of two turns; `changes` replace an event by the name of its place, and None leaves it out."""
    events = {
        "sampled": e.Sampled(0.0, name, group, "math", 0, 100),
        "sandbox": e.SandboxStarting(0.0, name, SandboxMode.COLD, "image", "node"),
        "ready": e.Ready(4.0, name, 100),
        "prefill": e.PrefillStarted(4.0, name, "p0"),
        "decode": e.DecodeStarted(5.0, name, "d0"),
        "requeued": e.Requeued(6.0, name, 103),
        "prefill2": e.PrefillStarted(6.0, name, "p0"),
        "decode2": e.DecodeStarted(7.0, name, "d0"),
        "tool": e.ToolStarted(8.0, name, "shell", 110),
        "ready2": e.Ready(11.0, name, 130),
        "prefill3": e.PrefillStarted(11.0, name, "p0"),
        "decode3": e.DecodeStarted(12.0, name, "d0"),
        "reward": e.RewardStarted(20.0, name, 150),
        "done": e.Done(22.0, name, 1.0, True),
    } | changes
    return [event for event in events.values() if event is not None]


def test_a_script_is_worked_out_from_the_events_of_its_trajectory(tmp_path: Path) -> None:
    replay = read_workload(write(tmp_path / "trace", episode("t")), SEED, MAX_CONTEXT)
    turns = (TurnScript(10, "shell", 3.0, 20), TurnScript(20))
    # It was started cold; no sandbox of the trace was prewarmed, so that takes as long.
    assert replay.script(0, 0) == Script(100, turns, 4.0, 4.0, 2.0, 1.0)


def test_a_task_without_a_sandbox_has_none_in_a_replay(tmp_path: Path) -> None:
    replay = read_workload(write(tmp_path / "t", [*episode("a"), *episode("b", sandbox=None)]), SEED, MAX_CONTEXT)
    scripts = [replay.script(0, seed) for seed in seeds(replay, 0, 2)]
    assert [script.sandbox_cold_s for script in scripts] == [4.0, 0.0]


def test_a_turn_of_one_token_gets_its_stop_token(tmp_path: Path) -> None:
    events = episode("t", requeued=None, prefill2=None, decode2=None, tool=e.ToolStarted(8.0, "t", "shell", 101))
    replay = read_workload(write(tmp_path / "trace", events), SEED, MAX_CONTEXT)
    assert replay.script(0, 0).turns[0] == TurnScript(2, "shell", 3.0, 29)


def test_trajectories_that_did_not_end_are_left_out_and_counted(tmp_path: Path) -> None:
    dropped = [*episode("b", done=None), e.Dropped(21.0, "b", "stale")]
    events = [*episode("a"), *dropped, *episode("c", "g1", done=None), *episode("d", "g2")]
    replay = read_workload(write(tmp_path / "trace", events), SEED, MAX_CONTEXT)
    assert (replay.questions, replay.left_out) == (2, 2)


def test_a_killed_run_is_replayed_up_to_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "trace", [*episode("a"), *episode("b", "g1")])
    path.write_bytes(path.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING):
        replay = read_workload(path, SEED, MAX_CONTEXT)
    assert (replay.questions, replay.left_out) == (1, 1)
    assert "the file ends within this line" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ready": e.Ready(4.0, "t", 99)}, "turn 0: it begins with 99 tokens, but the first prompt has 100"),
        ({"requeued": e.Requeued(6.0, "t", 99)}, "turn 0: it was resent with 99 tokens and had 100"),
        (
            {"tool": e.ToolStarted(8.0, "t", "x", 100)},
            "turn 0: it ends with 100 tokens, but began with 100 and had 103",
        ),
        (
            {"tool": e.ToolStarted(8.0, "t", "x", 102)},
            "turn 0: it ends with 102 tokens, but began with 100 and had 103",
        ),
        ({"ready2": e.Ready(11.0, "t", 130, 111)}, "turn 1: it keeps 111 tokens of 110 in a prompt of 130"),
        ({"ready2": e.Ready(11.0, "t", 50, 51)}, "turn 1: it keeps 51 tokens of 110 in a prompt of 50"),
        ({"ready2": e.Ready(11.0, "t", 130, -2)}, "turn 1: it keeps -2 tokens of 110 in a prompt of 130"),
        ({"reward": e.RewardStarted(20.0, "t", 130)}, "turn 1: it ends with 130 tokens, but began with 130"),
        ({"ready2": e.Ready(7.5, "t", 130)}, "turn 0: TOOL ended at 7.5 s, before it began at 8.0 s"),
        ({"decode": None}, "turn 0: ToolStarted cannot follow PREFILL"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    if "decode" in changes:
        changes |= {"requeued": None, "prefill2": None, "decode2": None}
    path = write(tmp_path / "trace", episode("t", **changes))
    with pytest.raises(ConfigError) as caught:
        read_workload(path, SEED, MAX_CONTEXT)
    assert f"{path}: trajectory t, {message}" in str(caught.value)
    assert str(caught.value).endswith("record it again")


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "none of its 0 trajectories ended"),
        (episode("t", done=None), "none of its 1 trajectories ended"),
        (episode("t", sampled=None), "trajectory t was never sampled"),
        ([*episode("t"), *episode("t")], "trajectory t was sampled twice"),
    ],
)
def test_a_trace_without_whole_trajectories_is_refused(tmp_path: Path, events: list[e.Event], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_workload(write(tmp_path / "trace", events), SEED, MAX_CONTEXT)


def test_a_trajectory_is_bounded_by_the_context_and_its_prompt_must_fit(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", episode("t"))
    assert read_workload(path, SEED, 149).script(0, 0).turns == (TurnScript(10),)
    with pytest.raises(ConfigError, match=r"workload.max_context=101: .*trajectory t: .*; set it to 150 or more"):
        read_workload(path, SEED, 101)


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no trace\n")
    with pytest.raises(ConfigError, match=r"workload\.path=.*text: .*not a trace"):
        read_workload(tmp_path / "text", SEED, MAX_CONTEXT)
    with pytest.raises(ConfigError, match=r"workload\.path=.*: No such file or directory"):
        read_workload(tmp_path, SEED, MAX_CONTEXT)
