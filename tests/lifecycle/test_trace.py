"""The trace: what was written is what is read, and every kind of damage is named."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.lifecycle import (
    DecodeStarted,
    Done,
    Dropped,
    Event,
    PrefillStarted,
    Ready,
    Requeued,
    RewardStarted,
    Sampled,
    SandboxMode,
    SandboxStarting,
    ToolStarted,
    TraceError,
    TraceWriter,
    codes,
    read_trace,
)

RUN: list[Event] = [
    Sampled(0.5, "t-1", "g-1", "arithmetic", 3, 0),
    SandboxStarting(0.5, "t-1", SandboxMode.PREWARMED, "python", "small"),
    Ready(0.75, "t-1", 57),
    PrefillStarted(0.875, "t-1", "engine-0"),
    DecodeStarted(1.0, "t-1", "engine-1"),
    Requeued(1.25, "t-1", 60),
    PrefillStarted(1.5, "t-1", "engine-0"),
    DecodeStarted(1.75, "t-1", "engine-1"),
    ToolStarted(2.0, "t-1", "python", 70),
    Ready(2.25, "t-1", 75),
    PrefillStarted(2.5, "t-1", "engine-0"),
    DecodeStarted(2.75, "t-1", "engine-1"),
    RewardStarted(3.0, "t-1", 80),
    Done(3.25, "t-1", 1.0, True),
    Sampled(3.5, "t-2", "g-1", "arithmetic"),
    Dropped(4.0, "t-2", "staleness bound 1 exceeded"),
]


def write(path: Path, events: list[Event]) -> Path:
    with TraceWriter(path) as writer:
        for event in events:
            writer.write(event)
    return path


def read_until_damage(path: Path) -> tuple[list[Event], TraceError]:
    events: list[Event] = []
    with pytest.raises(TraceError) as caught:
        events.extend(read_trace(path))
    return events, caught.value


def test_every_kind_of_event_comes_back_equal(tmp_path: Path) -> None:
    assert list(read_trace(write(tmp_path / "trace", RUN))) == RUN


names = st.text(max_size=6)
times = st.floats(allow_nan=False, allow_infinity=False)
tokens = st.integers(0, 10**12)


@given(
    st.lists(
        st.one_of(
            st.builds(Sampled, times, names, names, names, tokens, tokens),
            st.builds(SandboxStarting, times, names, st.sampled_from(SandboxMode), names, names),
            st.builds(Ready, times, names, tokens),
            st.builds(Done, times, names, times, st.booleans()),
            st.builds(Dropped, times, names, names),
        )
    )
)
def test_any_names_and_exact_times_come_back(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    assert list(read_trace(write(tmp_path_factory.mktemp("t") / "trace", events))) == events


def test_the_format_is_the_documented_one(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", [RUN[0], RUN[2], RUN[14]])
    assert path.read_text() == (
        'prorsa-trace 1\n["S",0.5,"t-1","g-1","arithmetic",3,0]\n["R",0.75,0,57]\n["S",3.5,"t-2",1,2,0,0]\n'
    )


def test_cut_at_any_byte_gives_what_was_whole_and_then_names_the_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", RUN).read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    cut = tmp_path / "cut"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        lines = sum(end <= length for end in ends)
        if length in ends:
            assert list(read_trace(cut)) == RUN[: lines - 1]
            continue
        events, error = read_until_damage(cut)
        assert events == RUN[: max(0, lines - 1)]
        assert error.line == lines + 1
        assert str(cut) in str(error)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ('["R",0.75,0,', "not a version-1 event"),
        ('["?",0.75,0,57]', "not a version-1 event"),
        ('["R",0.75,0]', "2 fields for Ready, which has 4"),
        ('["R",0.75,0,"57"]', "tokens is '57', not int"),
        ('["R",0.75,0,57.5]', "tokens is 57.5, not int"),
        ('["R",0.75,9,57]', "name code 9 of 3"),
        ('["R",0.75,0,57,5,5]', "5 fields for Ready, which has 4"),
        ('["R",0.75,0,57,true]', "kept is True, not int"),
        ('["R",0.75,0,1000000000000000000]', "tokens is 1000000000000000000: no such number"),
        ('["R",NaN,0,57]', "time is nan: no such number"),
        ('["R",-1e999,0,57]', "time is -inf: no such number"),
        ('["R","x",0,57]', "time is 'x', not float"),
        ('["B",1,0,"lukewarm","i","n"]', "lukewarm"),
        ('{"R":1}', "not a version-1 event"),
        ("7", "not a version-1 event"),
        ("", "not a version-1 event"),
        ("\x00\x00", "not a version-1 event"),
    ],
)
def test_a_damaged_line_is_named_after_the_whole_ones(tmp_path: Path, damage: str, problem: str) -> None:
    path = write(tmp_path / "trace", RUN[:1])
    path.write_text(path.read_text() + damage + "\n" + '["R",1.0,0,57]\n')
    events, error = read_until_damage(path)
    assert events == RUN[:1]
    assert error.line == 3
    assert str(error).startswith(f"{path}, line 3: ")
    assert problem in str(error)
    assert "events before it are whole" in str(error)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"\x89PNG\r\n\x1a\n" * 100, b"step,reward\n1,0.5\n"])
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    events, error = read_until_damage(path)
    assert events == []
    assert "other, line 1: not a trace" in str(error)
    assert "`trace` file of a run" in str(error)


def test_another_version_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text('prorsa-trace 2\n["R",0.75,"t",57]\n')
    events, error = read_until_damage(path)
    assert events == []
    assert "trace version '2', this Prorsa reads 1" in str(error)


def test_an_existing_trace_is_never_overwritten(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", RUN)
    with pytest.raises(FileExistsError):
        TraceWriter(path)
    assert list(read_trace(path)) == RUN


def test_a_killed_run_leaves_every_event_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    script = (
        "import os, signal, sys\n"
        "from prorsa.lifecycle import Ready, TraceWriter\n"
        "writer = TraceWriter(sys.argv[1])\n"
        "for i in range(100): writer.write(Ready(float(i), 't', i))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(path)], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert list(read_trace(path)) == [Ready(float(i), "t", i) for i in range(100)]


def test_what_a_prompt_keeps_is_written_where_it_is_known(tmp_path: Path) -> None:
    events: list[Event] = [*RUN[:2], Ready(0.75, "t-1", 57), Ready(0.75, "t-1", 57, 0), Ready(0.75, "t-1", 57, 9)]
    path = write(tmp_path / "trace", events)
    assert path.read_text().splitlines()[-3:] == ['["R",0.75,0,57]', '["R",0.75,0,57,0]', '["R",0.75,0,57,9]']
    assert list(read_trace(path)) == events


def test_names_that_are_forgotten_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is what was written, and the writer remembers twice the bound at most."""
    monkeypatch.setattr(codes, "REMEMBERED", 10)
    events: list[Event] = [Sampled(0.0, "old", "g", "task", 1, 0)]
    for number in range(200):
        events += [
            Sampled(1.0, f"t{number}", f"g{number}", "task", 1, 0),
            Dropped(1.0, f"t{number}", "of no use"),
        ]
    events.append(Ready(2.0, "old", 5))
    path = tmp_path / "trace"
    with TraceWriter(path) as writer:
        for event in events:
            writer.write(event)
        assert len(writer._coder._codes._latest) + len(writer._coder._codes._before) <= 20
    assert list(read_trace(path)) == events
    written = path.read_text()
    assert written.count('"old"') == 2
    assert written.count('"task"') == 1, "a name that goes on occurring keeps its code"
