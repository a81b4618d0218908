"""Files that only grow: what cannot be written waits, in order; what is lost is known; no line is torn."""

from __future__ import annotations

import json
import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorsa.lifecycle import Done, Dropped, Event, Ready, RewardStarted, Sampled, Tracker
from prorsa.lifecycle.events import DecodeStarted, PrefillStarted
from prorsa.report.journal import LOST, Journal, Lines, RecordingFailed
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import read_run
from prorsa.rollout.resume import NOT_RECORDED

NAME = "records.jsonl"


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes: a write that reaches it is cut there, the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["n"] for line in path.read_text().splitlines()]


def add(journal: Journal, first: int, last: int) -> None:
    for n in range(first, last):
        journal.add_record(NAME, {"n": n}, f"record {n}")


def test_what_a_full_disk_refuses_is_written_in_order_when_there_is_room(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1 << 20)
    add(journal, 0, 5)  # 8 bytes each
    with files_end_at(43):
        add(journal, 5, 10)
        assert numbers(tmp_path / NAME) == [0, 1, 2, 3, 4], "3 bytes of the sixth had room; they are cut off"
        assert journal.trouble is not None
        assert journal.trouble.startswith(f"{tmp_path / NAME}: File too large; raise the limit of a file's size")
        assert "5 records wait in memory" in journal.trouble
    wait_for(lambda: journal.trouble is None)
    add(journal, 10, 12)
    journal.close()
    assert numbers(tmp_path / NAME) == list(range(12))
    assert not (tmp_path / LOST).exists()


def test_one_file_that_cannot_be_written_keeps_no_other_waiting(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    journal = Journal(tmp_path, 1 << 20)
    add(journal, 0, 2)
    journal.add_record("others.jsonl", {"n": 7}, "another")
    assert numbers(tmp_path / "others.jsonl") == [7]
    (tmp_path / NAME).rmdir()
    wait_for(lambda: journal.trouble is None)
    assert numbers(tmp_path / NAME) == [0, 1]
    journal.close()


def test_what_memory_has_no_room_for_is_lost_by_name_and_number(tmp_path: Path) -> None:
    journal = Journal(tmp_path, memory=3 * 8)
    with files_end_at(0):
        add(journal, 0, 5)
        assert journal.lost == {NAME: 2}
        assert journal.gave_up is None, "nobody said after how long"
    with pytest.raises(RecordingFailed, match=r"lost: 2 of records\.jsonl \(record 3, record 4\)"):
        journal.close()
    assert numbers(tmp_path / NAME) == [0, 1, 2]
    assert json.loads((tmp_path / LOST).read_text()) == {"file": NAME, "lost": 2, "records": ["record 3", "record 4"]}


def test_it_gives_up_after_its_time(tmp_path: Path) -> None:
    journal, told = Journal(tmp_path, 1 << 20, give_up_after=0.2), []
    journal.on_give_up = lambda: told.append(journal.gave_up)
    with files_end_at(0):
        add(journal, 0, 1)
        wait_for(lambda: bool(told))
    assert told == [
        f"{tmp_path / NAME}: File too large; raise the limit of a file's size (ulimit -f) (it has failed for 0.2 s)"
    ]
    journal.close()
    assert numbers(tmp_path / NAME) == [0], "the last try succeeded"


def test_what_a_killed_process_left_of_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(b'{"n":1}\n{"n":' + b"2" * 100_000)
    lines = Lines(path, shared=True)
    lines.append(b'{"n":3}\n')
    lines.close()
    assert numbers(path) == [1, 3]


def trajectory(name: str, reward: float = 1.0) -> list[Event]:
    return [
        Sampled(1.0, name, "g", "x"),
        Ready(1.0, name, 5),
        PrefillStarted(2.0, name, "p"),
        DecodeStarted(3.0, name, "d"),
        RewardStarted(4.0, name, 8),
        Done(5.0, name, reward, True),
    ]


def tracked(events: list[Event]) -> Tracker:
    tracker = Tracker()
    for event in events:
        tracker.apply(event)
    return tracker


def test_a_record_that_is_none_costs_itself_alone(tmp_path: Path) -> None:
    recorder, tracker = RunRecorder(tmp_path), Tracker()
    for event in [*trajectory("a"), *trajectory("b", math.nan), *trajectory("c\ud83d")]:
        recorder.transition(tracker.apply(event))
    assert recorder.trouble == "lost: 1 of trace (Done of b)"
    with pytest.raises(RecordingFailed, match="Done of b"):
        recorder.close()
    run = read_run(tmp_path)
    ends = {event.trajectory: event for event in run.events if isinstance(event, Done | Dropped)}
    assert ends == {
        "a": Done(5.0, "a", 1.0, True),
        "b": Dropped(5.0, "b", NOT_RECORDED),
        "c\ud83d": Done(5.0, "c\ud83d", 1.0, True),
    }
    assert len(tracked(run.events)) == 0
    assert run.problems == [f"{tmp_path / 'trace'}: 1 records are missing, for they could not be written: Done of b"]


def test_events_that_were_lost_leave_a_trace_that_can_be_read(tmp_path: Path) -> None:
    recorder, tracker = RunRecorder(tmp_path, memory=4 * 512), Tracker()
    first, *rest = trajectory("a")
    recorder.transition(tracker.apply(first))
    with files_end_at((tmp_path / "trace").stat().st_size):
        for event in [*trajectory("b"), *rest, *trajectory("c")]:
            recorder.transition(tracker.apply(event))
    wait_for(lambda: "wait" not in (recorder.trouble or ""))
    for event in trajectory("d"):
        recorder.transition(tracker.apply(event))
    with pytest.raises(RecordingFailed, match="lost: 13 of trace"):
        recorder.close()
    run = read_run(tmp_path)
    assert len(tracked(run.events)) == 0
    ends = {event.trajectory: event for event in run.events if isinstance(event, Done | Dropped)}
    assert ends["d"] == Done(5.0, "d", 1.0, True)
    assert [type(ends["a"]), type(ends["b"])] == [Dropped, Dropped]
    assert "c" not in ends, "it was not even begun"
