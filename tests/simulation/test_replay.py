from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pseudo_control import MAX_CONTEXT, Scripts, of, play

from prorsa.config import ConfigError
from prorsa.lifecycle import SandboxMode, TraceWriter, Tracker, read_trace
from prorsa.lifecycle import events as e
from prorsa.rollout.sampler import derive_seed
from prorsa.simulation.scenario import WorkloadSection
from prorsa.simulation.workloads.models import build_workload
from prorsa.simulation.workloads.replay import (
    PREFILL_TOKENS_PER_S,
    REWARD_S,
    TOKEN_S,
    TOOL_S,
    Replay,
    convert,
    convert_file,
    read_workload,
)
from prorsa.simulation.workloads.scripts import Script, TurnScript, Workload

SEED = 4
REAL = Path(__file__).parents[3] / "shared" / "data" / "traces"
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the recordings of real agents are not part of Prorsa: no {REAL}")


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
        ({"ready2": e.Ready(11.0, "t", 109)}, "turn 1: it begins with 109 tokens, but the turn before ended with 110"),
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


# Foreign recordings as traces.


def turn(prompt: int, new: int, output: int, **fields: Any) -> dict[str, Any]:
    lengths = {"prompt_tokens": prompt, "prompt_tokens_new": new, "cached_prefix_tokens": prompt - new}
    return lengths | {"output_tokens": output, "tool": {"name": "bash", "duration_s": None}} | fields


def recording(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "t", "domain": "coding", "group": "g", "success": True, "turns": list(turns)} | fields


def lines(path: Path, *records: dict[str, Any]) -> Path:
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    return path


def converted(tmp_path: Path, *records: dict[str, Any]) -> list[e.Event]:
    return list(convert(lines(tmp_path / "recording.jsonl.gz", *records)))


def test_a_recording_becomes_a_trace(tmp_path: Path) -> None:
    events = converted(
        tmp_path,
        recording(
            turn(1000, 1000, 50, llm_time_s=6.0, ttft_s=2.0, tool={"name": "bash", "duration_s": 1.5}),
            turn(1080, 30, 20, step_interval_s=9.0),
            turn(1100, 0, 10),
            sandbox={"mode": "prewarmed", "duration_s": 0.5},
            reward_duration_s=7.0,
        ),
    )
    # Second turn: 20 tokens at TOKEN_S and 30 new ones; the tool takes what is left of the 9 s.
    second = 20 * TOKEN_S + 30 / PREFILL_TOKENS_PER_S
    assert [replace(event, time=round(event.time, 6)) for event in events] == [
        e.Sampled(0.0, "t", "g", "coding-agent", 0, 1000),
        e.SandboxStarting(0.0, "t", SandboxMode.PREWARMED, "recorded", "recorded"),
        e.Ready(0.5, "t", 1000),
        e.PrefillStarted(0.5, "t", "recorded"),
        e.DecodeStarted(2.5, "t", "recorded"),
        e.ToolStarted(6.5, "t", "bash", 1050),
        e.Ready(8.0, "t", 1080),
        e.PrefillStarted(8.0, "t", "recorded"),
        e.DecodeStarted(8.003, "t", "recorded"),
        e.ToolStarted(8.0 + second, "t", "bash", 1100),
        e.Ready(17.0, "t", 1100),
        e.PrefillStarted(17.0, "t", "recorded"),
        e.DecodeStarted(17.0, "t", "recorded"),
        e.RewardStarted(17.3, "t", 1110),
        e.Done(24.3, "t", 1.0, admitted=True),
    ]


def test_durations_that_are_not_known_are_assumed(tmp_path: Path) -> None:
    human = {"name": "tool_or_approval", "duration_s": 900.0}
    events = converted(tmp_path, recording(turn(100, 100, 50), turn(160, 10, 50, tool=human), turn(220, 10, 50)))
    llm = [50 * TOKEN_S + new / PREFILL_TOKENS_PER_S for new in (100, 10, 10)]
    assert [event.time for event in of(e.ToolStarted, events)] == pytest.approx([llm[0], llm[0] + llm[1] + TOOL_S])
    [done] = of(e.Done, events)
    assert done.time == pytest.approx(sum(llm) + 2 * TOOL_S + REWARD_S)


@pytest.mark.parametrize("after", [turn(1050, 0, 5, reset=True), turn(1060, 161, 5), turn(300, 300, 5)])
def test_a_compacted_context_goes_on_as_a_new_trajectory(tmp_path: Path, after: dict[str, Any]) -> None:
    events = converted(tmp_path, recording(turn(1000, 1000, 50), after))
    prompt = after["prompt_tokens"]
    assert [(event.trajectory, event.group, event.prompt_tokens) for event in of(e.Sampled, events)] == [
        ("t", "g", 1000),
        ("t/2", "g/2", prompt),
    ]
    first, second = of(e.RewardStarted, events)
    assert (first.tokens, second.tokens) == (1050, prompt + 5)
    # The tool of the last turn before it still takes its time.
    assert of(e.Sampled, events)[1].time == pytest.approx(first.time + TOOL_S)
    assert [event.reward for event in of(e.Done, events)] == [0.0, 1.0]


def test_a_context_stays_where_an_agent_drops_part_of_an_output(tmp_path: Path) -> None:
    # 100 + 50 = 150, of which the next prompt keeps 120; then 160 = 120 + 20 + 20, which is less than the 170 that stayed.
    events = converted(tmp_path, recording(turn(100, 100, 50), turn(120, 5, 20), turn(160, 20, 20), turn(250, 70, 5)))
    assert [event.tokens for event in of(e.Ready, events)] == [100, 150, 170, 250]


def test_a_broken_off_turn_costs_its_prefill(tmp_path: Path) -> None:
    events = converted(tmp_path, recording(turn(100, 100, 0), turn(120, 20, 5)))
    assert [event.tokens for event in of(e.ToolStarted, events)] == [101]


def test_trajectories_start_together_and_requests_when_they_came(tmp_path: Path) -> None:
    two = converted(tmp_path, recording(turn(10, 10, 5)), recording(turn(9, 9, 90), id="u", group=None))
    assert [(event.time, event.trajectory, event.group) for event in of(e.Sampled, two)] == [
        (0.0, "t", "g"),
        (0.0, "u", "u"),
    ]
    assert [event.time for event in two] == sorted(event.time for event in two)
    requests = converted(
        tmp_path,
        {"timestamp": 500, "input_length": 40, "output_length": 3, "hash_ids": [0]},
        {"timestamp": 2500, "input_length": 20, "output_length": 2, "hash_ids": [1]},
    )
    assert [(event.time, event.prompt_tokens) for event in of(e.Sampled, requests)] == [(0.0, 40), (2.0, 20)]
    dated = converted(
        tmp_path,
        {"ts": "2023-11-16 23:59:59.9000000", "in": 7, "out": 2},
        {"ts": "2023-11-17 00:00:01.1500000", "in": 8, "out": 2},
    )
    assert [event.time for event in of(e.Sampled, dated)] == pytest.approx([0.0, 1.25], abs=1e-5)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            recording(turn(10, 10, 5), turn(20, 5, 5, cached_prefix_tokens=14)),
            "line 2: trajectory t, turn 1: prompt_tokens=20 must be prompt_tokens_new + cached_prefix_tokens = 5 + 14",
        ),
        (recording(turn(10, 10, -1)), "line 2: trajectory t, turn 0: a turn of prompt_tokens=10 and output_tokens=-1"),
        (recording(turn(10, 10, 5, llm_time_s=-2)), "line 2: trajectory t, turn 0: llm_time_s=-2 must be 0 or more"),
        (
            recording(turn(10, 10, 5, tool={"name": "a", "duration_s": -1}), turn(20, 5, 5)),
            "line 2: trajectory t, turn 0: tool.duration_s=-1 must be 0 or more",
        ),
        (recording(turn(10, 10, 5), reward_duration_s=-1), "line 2: reward_duration_s=-1 must be 0 or more"),
        (recording({"prompt_tokens": 1}), "line 2: 'prompt_tokens_new' is missing"),
        ({"id": "t", "turns": [3]}, "line 2: "),
        ({"id": "t", "turns": 24, "wall_s": 3.0}, "line 2: has neither turns nor the lengths of a request"),
        ({"timestamp": 0, "input_length": 0, "output_length": 1}, "line 2: a request "),
        ({"ts": "noon", "in": 1, "out": 1}, "line 2: "),
    ],
)
def test_a_recording_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    good = recording(turn(10, 10, 5), id="good")
    path = lines(tmp_path / "recording.jsonl", good, record)
    with pytest.raises(ConfigError) as caught:
        list(convert(path))
    assert f"{path}, {message}" in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("{}\nhello\n")
    (tmp_path / "list").write_text("[1]\n")
    (tmp_path / "zip.gz").write_text("not zipped")
    with pytest.raises(ConfigError, match="line 1: has neither"):
        list(convert(tmp_path / "text"))
    with pytest.raises(ConfigError, match="line 1: no JSON object"):
        list(convert(tmp_path / "list"))
    for name in ("zip.gz", "absent"):
        with pytest.raises(ConfigError, match="cannot be read"):
            list(convert(tmp_path / name))


def test_a_conversion_never_overwrites(tmp_path: Path) -> None:
    source = lines(tmp_path / "recording.jsonl", recording(turn(10, 10, 5)))
    assert convert_file(source, tmp_path / "trace") == 6 == len(list(read_trace(tmp_path / "trace")))
    with pytest.raises(ConfigError, match="File exists; give the path"):
        convert_file(source, tmp_path / "trace")


@real
@pytest.mark.parametrize(
    ("name", "trajectories", "turns", "lost"),
    [
        # `lost`: the part of the new tokens that the recorded agents had sent before, such as outputs that they changed.
        ("mini_swe_gemini3pro", 375, 15396, 0.04),
        ("tau_bench_airline_gpt4o", 148, 1851, 0.0),
        ("weka_claude_code", 516, 33268, 0.05),
    ],
)
def test_real_agents_are_replayed(tmp_path: Path, name: str, trajectories: int, turns: int, lost: float) -> None:
    source = REAL / f"{name}.jsonl.gz"
    convert_file(source, tmp_path / "trace")
    tracker = Tracker()
    for event in read_trace(tmp_path / "trace"):
        tracker.apply(event)
    replay = read_workload(tmp_path / "trace", SEED, 10 * MAX_CONTEXT)
    with gzip.open(source, "rt") as file:
        recorded = [turn for line in file for turn in json.loads(line)["turns"]]
    scripts = [script for group in replay._groups for script in group]
    played = [turn for script in scripts for turn in script.turns]
    assert len(scripts) >= trajectories
    assert len(played) == len(recorded) == turns
    output = sum(turn["output_tokens"] for turn in recorded)
    assert sum(turn.output_tokens for turn in played) == pytest.approx(output, rel=1e-4)
    new = sum(turn["prompt_tokens_new"] for turn in recorded)
    prefilled = sum(script.total_tokens for script in scripts) - sum(turn.output_tokens for turn in played)
    # The members of a group get the prompt of the first: a thousandth.
    assert (1 - lost) * new <= prefilled <= 1.001 * new


@real
@pytest.mark.parametrize("name", ["azure_code_2023", "mooncake_synthetic"])
def test_real_requests_are_replayed(tmp_path: Path, name: str) -> None:
    source = REAL / f"{name}.requests.jsonl.gz"
    convert_file(source, tmp_path / "trace")
    replay = read_workload(tmp_path / "trace", SEED, 10 * MAX_CONTEXT)
    with gzip.open(source, "rt") as file:
        records = [json.loads(line) for line in file]
    lengths = sorted((record.get("in", record.get("input_length"))) for record in records)
    scripts = [replay.script(question, 0) for question in range(len(records))]
    assert sorted(script.prompt_tokens for script in scripts) == lengths


@real
@pytest.mark.parametrize("name", ["swebench_pro_eval", "swebench_pro_explore_runs"])
def test_real_summaries_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a summary cannot be played"):
        list(convert(REAL / f"{name}.summary.jsonl.gz"))
