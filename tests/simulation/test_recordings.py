"""Foreign recordings as traces: what is assumed, what is refused and where, and that whatever is accepted can be used."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudo_control import MAX_CONTEXT, of, play

from prorsa.cli import main
from prorsa.config import ConfigError
from prorsa.lifecycle import UNKNOWN, SandboxMode, Tracker, read_trace
from prorsa.lifecycle import events as e
from prorsa.report.analysis import analyse, render, to_json
from prorsa.simulation.workloads.recordings import FORMATS, convert, convert_files, read_recordings
from prorsa.simulation.workloads.recordings.events import PREFILL_TOKENS_PER_S, REWARD_S, TOKEN_S, TOOL_S
from prorsa.simulation.workloads.replay import read_workload

SEED = 4
REAL = Path(__file__).parents[3] / "shared" / "data" / "traces"
real = pytest.mark.skipif(not REAL.is_dir(), reason=f"the recordings of real agents are not part of Prorsa: no {REAL}")


def turn(prompt: int, new: int, output: int, **fields: Any) -> dict[str, Any]:
    lengths = {"prompt_tokens": prompt, "prompt_tokens_new": new, "cached_prefix_tokens": prompt - new}
    return lengths | {"output_tokens": output, "tool": {"name": "bash", "duration_s": None}} | fields


def recording(*turns: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": "t", "domain": "coding", "group": "g", "success": True, "turns": list(turns)} | fields


GOOD = recording(turn(10, 10, 5), id="good")


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def converted(tmp_path: Path, *records: dict[str, Any]) -> list[e.Event]:
    found, _, _ = read_recordings([lines(tmp_path / "recording.jsonl", *records)])
    return list(convert(found))


def refusal(path: Path, **options: Any) -> str:
    """Of a conversion, which leaves nothing behind."""
    target = path.parent / "refused"
    before = set(path.parent.iterdir())
    with pytest.raises(ConfigError) as caught:
        convert_files([path], target, **options)
    assert set(path.parent.iterdir()) == before
    message = str(caught.value)
    assert "\n" not in message
    assert message.isprintable()
    return message


# What becomes of a recording.


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


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        (turn(1050, 0, 5), UNKNOWN),
        (turn(1060, 161, 5), 899),
        (turn(1040, 300, 5), 740),
        (turn(300, 300, 5), 0),
        # Without the two parts of its length: longer, cut within the output, shorter than the prompt before.
        ({"prompt_tokens": 1050, "output_tokens": 5}, UNKNOWN),
        ({"prompt_tokens": 1049, "output_tokens": 5}, 1000),
        ({"prompt_tokens": 999, "output_tokens": 5}, UNKNOWN),
        ({"prompt_tokens": 2000, "output_tokens": 5, "reset": True}, 0),
    ],
)
def test_a_context_that_is_not_extended_is_another_segment(tmp_path: Path, after: dict[str, Any], kept: int) -> None:
    events = converted(tmp_path, recording(turn(1000, 1000, 50), after))
    assert [(event.trajectory, event.group) for event in of(e.Sampled, events)] == [("t", "g")]
    assert [(event.tokens, event.kept) for event in of(e.Ready, events)] == [
        (1000, UNKNOWN),
        (after["prompt_tokens"], kept),
    ]


def test_a_broken_off_turn_costs_its_prefill(tmp_path: Path) -> None:
    events = converted(tmp_path, recording(turn(100, 100, 0), turn(120, 20, 5)))
    assert [event.tokens for event in of(e.ToolStarted, events)] == [101]


def test_attempts_of_one_name_are_a_group_and_get_names_of_their_own(tmp_path: Path) -> None:
    ids = ["a", "a", 7, "7", 7.0, "a#2", "a", None, None]
    events = converted(tmp_path, *(recording(turn(10, 10, 5), id=one, group=None) for one in ids))
    path = tmp_path / "recording.jsonl"
    assert [(event.trajectory, event.group) for event in of(e.Sampled, events)] == [
        ("a", "a"),
        ("a#3", "a"),
        ("7", "7"),
        ("7#2", "7"),
        ("7#3", "7"),
        ("a#2", "a#2"),
        ("a#4", "a"),
        (f"{path.name}, line 8", f"{path.name}, line 8"),
        (f"{path.name}, line 9", f"{path.name}, line 9"),
    ]


def test_trajectories_start_together_and_requests_when_they_came(tmp_path: Path) -> None:
    two = converted(tmp_path, recording(turn(10, 10, 5)), recording(turn(9, 9, 90), id="u", group=None))
    assert [(event.time, event.trajectory, event.group) for event in of(e.Sampled, two)] == [
        (0.0, "t", "g"),
        (0.0, "u", "u"),
    ]
    assert [event.time for event in two] == sorted(event.time for event in two)
    # In whatever order they stand.
    requests = converted(
        tmp_path,
        {"timestamp": 2500, "input_length": 20, "output_length": 2, "hash_ids": [1]},
        {"timestamp": 500, "input_length": 40, "output_length": 3, "hash_ids": [0]},
    )
    assert [(event.time, event.prompt_tokens) for event in of(e.Sampled, requests)] == [(0.0, 40), (2.0, 20)]


# What is read over, and what is refused.


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
@pytest.mark.parametrize("name", ["recording.jsonl", "recording.jsonl.gz"])
def test_a_file_may_be_compressed_and_end_as_it_likes(tmp_path: Path, pack: Any, name: str) -> None:
    text = "\ufeff\r\n" + json.dumps(GOOD) + "\r\n  \n" + json.dumps(GOOD) + "\n\n\n"
    (tmp_path / name).write_bytes(pack(text.encode()))
    assert convert_files([tmp_path / name], tmp_path / "trace").trajectories == 2


def test_several_files_are_one_trace(tmp_path: Path) -> None:
    one, other = lines(tmp_path / "a", GOOD), lines(tmp_path / "b", GOOD)
    done = convert_files([one, other], tmp_path / "trace")
    assert (done.trajectories, done.formats) == (2, ("turns",))
    assert len(list(read_trace(tmp_path / "trace"))) == done.events == 12


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            recording(turn(10, 10, 5), turn(20, 5, 5, cached_prefix_tokens=14)),
            "turn 1: prompt_tokens=20: it must be prompt_tokens_new + cached_prefix_tokens, which are 5 + 14",
        ),
        (recording(turn(10, 10, -1)), "turn 0: output_tokens=-1: not a number of tokens; write a whole number from 0"),
        (recording(turn(0, 0, 1)), "turn 0: prompt_tokens=0: not a number of tokens; write a whole number from 1"),
        (recording(turn(10**18, 10**18, 1)), "turn 0: prompt_tokens=1000000000000000000: not a number of tokens"),
        (recording(turn(10, 10, 5, output_tokens=True)), "turn 0: output_tokens=True: not a number of tokens"),
        (recording(turn(10, 10, 5, output_tokens=5.5)), "turn 0: output_tokens=5.5: not a number of tokens"),
        (recording(turn(10, 10, 5, output_tokens=float("nan"))), "turn 0: output_tokens=nan: not a number of tokens"),
        (recording(turn(10, 10, 5, output_tokens=[5])), "turn 0: output_tokens=[5]: not a number of tokens"),
        (recording(turn(10, 10, 5, llm_time_s=-2)), "turn 0: llm_time_s=-2: not a duration; write a number from 0 to"),
        (recording(turn(10, 10, 5, step_interval_s=float("inf"))), "turn 0: step_interval_s=inf: not a duration"),
        (recording(turn(10, 10, 5, ttft_s="\x1b[31mred")), r"turn 0: ttft_s='\x1b[31mred': not a duration"),
        (recording(turn(10, 10, 5, tool={"name": "a", "duration_s": 1e300})), "turn 0: tool.duration_s=1e+300: not a"),
        (recording(turn(10, 10, 5, tool={"name": [1]})), "turn 0: tool.name=[1]: not a name"),
        (recording(turn(10, 10, 5), reward_duration_s=-1), "reward_duration_s=-1: not a duration"),
        (recording(turn(10, 10, 5), success="perhaps"), "success='perhaps': not a number"),
        (recording(turn(10, 10, 5), id=True), "id=True: not a name; write text or a whole number"),
        (recording(turn(10, 10, 5), id=["a"]), "id=['a']: not a name"),
        (recording(turn(10, 10, 5), id=float("nan")), "id=nan: not a name"),
        (recording(turn(10, 10, 5), group="g" * 5000), "group='ggg"),
        (recording(turn(10, 10, 5), sandbox={"mode": "cold"}), "sandbox={'mode': 'cold'}: sandbox.duration_s is miss"),
        (recording({"prompt_tokens": 1}), "turn 0: output_tokens is missing; give the number of tokens"),
        ({"id": "t", "turns": [3]}, "turns[0]=3: not an object"),
        ({"id": "t", "turns": 24, "wall_s": 3.0}, "turns is missing; a summary cannot be played"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_line(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    path = lines(tmp_path / "recording.jsonl", GOOD, record)
    assert f"{path}, line 2: {message}" in refusal(path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"timestamp": 0, "input_length": 0, "output_length": 1}, "input_length=0: not a number of tokens"),
        ({"timestamp": 0, "input_length": 4, "output_length": 0}, "output_length=0: not a number of tokens"),
        ({"timestamp": float("nan"), "input_length": 4, "output_length": 1}, "timestamp=nan: not a time"),
        ({"timestamp": True, "input_length": 4, "output_length": 1}, "timestamp=True: not a time"),
        ({"timestamp": 1e300, "input_length": 4, "output_length": 1}, "timestamp=1e+300: not a time"),
        ({"delay": 5, "input_length": 4, "output_length": 1}, "timestamp is missing"),
        ({"timestamp": 1, "input_length": 4, "output_length": 1, "hash_ids": 3}, "hash_ids=3: not a list of hashes"),
        ({"timestamp": 1, "input_length": 4, "output_length": 1, "session_id": {}}, "session_id={}: not a name"),
    ],
)
def test_a_request_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    good = {"timestamp": 0, "input_length": 4, "output_length": 1}
    path = lines(tmp_path / "requests.jsonl", good, record)
    assert f"{path}, line 2: {message}" in refusal(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": is empty; give a recording"),
        (b"\n\r\n  \n", ": is empty"),
        (b'{"id": "t", "turns": []}\n', ": no turn of a model is recorded there"),
        (b"{}\nhello\n", ", line 2: no JSON (Expecting value at column 1); mend the file"),
        (b'{"a": 1}\n[1]\n', ", line 2, entry 1: 1 is no JSON object"),
        (b"[1]\n", ", line 1, entry 1: 1 is no JSON object"),
        (b'{"a":\n', ", line 2: no JSON (Expecting value at column 1)"),
        (b"[" * 100_000 + b"\n", ": no JSON (maximum recursion depth exceeded"),
        (b'{"a": ' + b"9" * 5000 + b"}\n", ": no JSON (Exceeds the limit"),
        (b"hello\n", ", line 1: 'hello' is neither JSON nor a CSV header"),
        (b"a,b\n1\n", ", line 2: 1 values under a header of 2"),
        (b'a,b\n1,"x\n', ", line 2: no CSV (unexpected end of data)"),
        (b"\xff\xfe{\x00}\x00", ": cannot be read ('utf-8' codec"),
        (b'{"a": "\xff"}\n', ": cannot be read ('utf-8' codec"),
        (b"\x28\xb5\x2f\xfd0000", ": a zstd file; unpack it first (zstd -d)"),
        (b"PK\x03\x040000", ": a zip file; unpack it first (unzip)"),
        (b"\x1f\x8bnot gzip", ": cannot be read ("),
        (gzip.compress(b"{}\n" * 1000)[:-20], ": cannot be read ("),
        (gzip.compress(json.dumps(GOOD).encode())[:20] + b"\0" * 40, ": cannot be read ("),
        (b'{"prompt": "x"}\n', ": a record with 'prompt' is of no format that can be read; give one of turns, moon"),
        (b"a,b\n1,2\n", ": a record with 'a, b' is of no format that can be read"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "recording"
    path.write_bytes(content)
    assert f"{path}{message}" in refusal(path)


def test_what_is_nested_too_deeply_and_a_name_of_several_lines_are_refused_in_one(tmp_path: Path) -> None:
    path = tmp_path / "a\nb\x1b"
    deep = "[" * 900 + "]" * 900
    said = f'[{{"from": "human", "value": {deep}}}, {{"from": "gpt", "value": "x"}}]'
    path.write_text(f'{{"conversations": {said}}}\n')
    assert "nested too deeply" in refusal(path)


def test_formats_are_asked_for_by_name(tmp_path: Path) -> None:
    path = lines(tmp_path / "recording.jsonl", GOOD)
    message = refusal(path, format_name="nonsense")
    assert message.startswith("--format=nonsense: there is no such format; give one of ")
    assert all(name in message for name in FORMATS)
    assert f"{path}, line 1: input_length is missing" in refusal(path, format_name="mooncake")
    assert convert_files([path], tmp_path / "trace", "turns").trajectories == 1


def test_an_absent_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "absent", "No such file or directory"), (tmp_path, "Is a directory")):
        assert f"{path}: cannot be read ({reason})" in refusal(path)


def test_a_trajectory_of_too_many_turns_is_refused(tmp_path: Path) -> None:
    path = lines(tmp_path / "r", recording(*[{"prompt_tokens": 1, "output_tokens": 1}] * 65536))
    assert f"{path}, line 1: a trajectory of 65536 turns; split it, 65535 are the most" in refusal(path)


def test_a_conversion_never_overwrites_and_leaves_no_stump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = lines(tmp_path / "recording.jsonl", GOOD), tmp_path / "trace"
    assert main(["trace", str(source), str(target)]) == 0
    assert capsys.readouterr().out == f"6 events in {target}: 1 trajectories, read as turns\n"
    whole = target.read_bytes()
    assert main(["trace", str(source), str(target)]) == 2
    assert capsys.readouterr().err == (
        f"prorsa: {target}: exists already and is never overwritten; give the path of a new file, or remove it\n"
    )
    assert target.read_bytes() == whole
    assert main(["trace", str(source), str(tmp_path / "no" / "trace")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    bad = lines(tmp_path / "bad", GOOD, recording(turn(10, 10, 5, llm_time_s=1e999)))
    assert main(["trace", str(bad), str(tmp_path / "second")]) == 2
    assert main(["trace", str(source), str(tmp_path / "second")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"recording.jsonl", "trace", "bad", "second"}


# Whatever is accepted can be used.

NAMES = st.text(max_size=8) | st.sampled_from(["[/bash]", "a/2", "\ud83d", "\x1b[2J", "a\nb"])
LENGTHS = st.integers(-1, 40) | st.sampled_from([2.0, 3.5, True, None, "7", float("nan"), 10**8, 10**18])
TIMES = st.none() | st.floats(0, 100) | st.sampled_from([-1, float("inf"), True, "x", 86_400])
TURNS = st.fixed_dictionaries(
    {"prompt_tokens": LENGTHS, "output_tokens": LENGTHS},
    optional={
        "cached_prefix_tokens": LENGTHS,
        "reset": st.booleans(),
        "tool": st.none() | st.fixed_dictionaries({"name": st.none() | NAMES, "duration_s": TIMES}),
        "llm_time_s": TIMES,
        "ttft_s": TIMES,
        "step_interval_s": TIMES,
    },
)
GOOD_TURNS = st.fixed_dictionaries(
    {"prompt_tokens": st.integers(1, 60), "output_tokens": st.integers(0, 20)},
    optional={
        "cached_prefix_tokens": st.just(0),
        "reset": st.booleans(),
        "tool": st.fixed_dictionaries({"name": NAMES}),
    },
)
RECORDINGS = st.fixed_dictionaries(
    {"turns": st.lists(GOOD_TURNS, min_size=1, max_size=5)},
    optional={"id": st.none() | NAMES | st.integers(0, 3), "group": st.none() | NAMES, "success": st.booleans()},
)
BAD_RECORDINGS = st.fixed_dictionaries(
    {"turns": st.lists(TURNS, min_size=1, max_size=3)},
    optional={"id": st.none() | NAMES | LENGTHS, "reward_duration_s": TIMES, "sandbox": st.none() | st.booleans()},
)
ROWS = st.fixed_dictionaries(
    {"input_length": st.integers(1, 2000), "output_length": st.integers(1, 50)},
    optional={
        "timestamp": st.integers(-1000, 10**13) | st.floats(0, 1e6),
        "delay": st.integers(0, 5000),
        "session_id": NAMES | st.integers(0, 2),
        "hash_ids": st.lists(st.integers(0, 4), max_size=4),
    },
)


@settings(max_examples=120, deadline=None)
@given(st.lists(RECORDINGS, min_size=1, max_size=6) | st.lists(ROWS, min_size=1, max_size=8) | st.lists(BAD_RECORDINGS))
def test_what_is_accepted_can_be_described_and_played(
    tmp_path_factory: pytest.TempPathFactory, records: Sequence[dict[str, Any]]
) -> None:
    directory = tmp_path_factory.mktemp("recordings")
    source, target = lines(directory / "recording", *records), directory / "trace"
    problem = None
    try:
        done = convert_files([source], target)
    except ConfigError as error:
        problem = str(error)
    if problem is not None:
        assert "\n" not in problem
        assert list(directory.iterdir()) == [source]
        return
    events = list(read_trace(target))
    tracker = Tracker()
    for event in events:
        tracker.apply(event)
    assert len(tracker) == 0
    assert len(events) == done.events
    analysis = analyse(target)
    assert analysis.described.done == done.trajectories
    json.dumps(to_json(analysis), allow_nan=False)
    render(analysis).encode()
    replay = read_workload(target, SEED, 10**9)
    assert sum(map(len, replay._groups)) == done.trajectories
    for group in replay._groups:
        for script in group:
            prompts = list(script.prompts())
            assert min(prompts) >= 1
    if max(script.longest_context for group in replay._groups for script in group) < MAX_CONTEXT:
        play(replay, replay.questions, 1, seed=SEED)


def test_a_trace_of_years_is_described_in_windows_that_can_be_counted(tmp_path: Path) -> None:
    row = {"input_length": 4, "output_length": 1}
    path = lines(tmp_path / "r", row | {"timestamp": 0}, row | {"timestamp": 1e13})
    convert_files([path], tmp_path / "trace")
    described = analyse(tmp_path / "trace").described
    assert len(described.steps[0].windows) == 10_000
    assert described.window_s == pytest.approx(1e6)


# Real agents.


@real
@pytest.mark.parametrize(
    ("name", "trajectories", "turns"),
    [
        ("mini_swe_gemini3pro", 375, 15396),
        ("tau_bench_airline_gpt4o", 148, 1851),
        ("weka_claude_code", 516, 33268),
    ],
)
def test_real_agents_are_replayed(tmp_path: Path, name: str, trajectories: int, turns: int) -> None:
    source = REAL / f"{name}.jsonl.gz"
    convert_files([source], tmp_path / "trace")
    replay = read_workload(tmp_path / "trace", SEED, 10 * MAX_CONTEXT)
    with gzip.open(source, "rt") as file:
        recorded = [turn for line in file for turn in json.loads(line)["turns"]]
    scripts = [script for group in replay._groups for script in group]
    played = [turn for script in scripts for turn in script.turns]
    assert len(scripts) == trajectories
    assert len(played) == len(recorded) == turns
    output = sum(turn["output_tokens"] for turn in recorded)
    assert sum(turn.output_tokens for turn in played) == pytest.approx(output, rel=1e-4)
    # The members of a group get the prompt of the first.
    prompts = sum(turn["prompt_tokens"] for turn in recorded)
    assert sum(sum(script.prompts()) for script in scripts) == pytest.approx(prompts, rel=1e-3)
    # What is cached before a first turn is not the trajectory's own.
    new = sum(turn["prompt_tokens_new"] for turn in recorded)
    assert analyse(tmp_path / "trace").described.reuse.ideal_tokens == pytest.approx(new, rel=0.003)


@real
@pytest.mark.parametrize("name", ["azure_code_2023", "mooncake_synthetic"])
def test_real_requests_are_replayed(tmp_path: Path, name: str) -> None:
    source = REAL / f"{name}.requests.jsonl.gz"
    convert_files([source], tmp_path / "trace")
    replay = read_workload(tmp_path / "trace", SEED, 10 * MAX_CONTEXT)
    with gzip.open(source, "rt") as file:
        records = [json.loads(line) for line in file]
    lengths = sorted((record.get("in", record.get("input_length"))) for record in records)
    scripts = [replay.script(question, 0) for question in range(len(records))]
    assert sorted(script.prompt_tokens for script in scripts) == lengths


@real
@pytest.mark.parametrize("name", ["swebench_pro_eval", "swebench_pro_explore_runs"])
def test_real_summaries_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is of no format that can be read"):
        read_recordings([REAL / f"{name}.summary.jsonl.gz"])
