"""The run directory: what was recorded is what is read, whole or cut off."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace as replace_
from pathlib import Path

import pytest

from prorsa.allocation import Adaptive, Allocation, Demand
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, Flip, TurnRecord, replay
from prorsa.engines.protocol import FinishReason, Role
from prorsa.forecast import Forecast
from prorsa.lifecycle import (
    DecodeStarted,
    Done,
    Dropped,
    Event,
    PrefillStarted,
    Ready,
    RewardStarted,
    Sampled,
    State,
    Tracker,
)
from prorsa.report.opening import CannotContinue
from prorsa.report.recorder import RunRecorder, overwrite
from prorsa.report.rundir import InstanceChange, StepRecord, read_run, read_status, record_step
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.resume import CUT_OFF

EVENTS: list[Event] = [
    Sampled(1.0, "t", "g", "x", 0, 5),
    Ready(1.5, "t", 5),
    PrefillStarted(2.0, "t", "p"),
    DecodeStarted(2.5, "t", "d"),
    RewardStarted(3.0, "t", 8),
    Done(3.5, "t", 1.0, True),
]
DECISION = Decision(
    time=1.75,
    states={state: int(state is State.READY) for state in State if state.live},
    forecast=Forecast(1.75, 2.0, 0.5, 0.25, 5.0, 0.125, 0.0, 1.5, 6.3125, 5.0, 5.0, 0.0),
    demand=Demand(6.3125, 100.0, 2.0, 5.0, 64.0),
    current=Allocation(1, 1),
    live=True,
    target=Allocation(1, 1),
)
MIXED = Decision(3.25, DECISION.states, DECISION.forecast, DECISION.demand, Allocation(0, 0), False, None)
TURN = TurnRecord("t", 0, 5, 2, (("p", "d"), ("p", "e")), 1.5, (2.5, 2.75, 3.0), (0, 0, 1), FinishReason.STOP)
FLIP = Flip(3.0, "p", Role.PREFILL, Role.DECODE, 1, 0.25, 0.5, None)
BROKEN = Flip(4.0, "p", Role.DECODE, Role.PREFILL, 0, 0.25, 9.5, "reports role decode")
RECORDS = [
    TrajectoryRecord("t", "g", "q", 0, 7, (1, 2), (3, 4, 5), (1, 0, 1), (-0.5, 0.0, -1.0), (0, -1, 1), 1.0, 2, None),
    TrajectoryRecord("u", "g", "q", 0, 8, (1, 2), (3,), (1,), (-0.5,), (0,), None, 1, "stale"),
]
STEP = StepRecord(1, 3.5, 2.5, 0.75, 8, "train", {"loss": 0.5})


def record_all(directory: Path) -> None:
    tracker = Tracker()
    with RunRecorder(directory, "name: small\n") as recorder:
        recorder.instance(0.5, "p", Role.PREFILL, InstanceState.ROUTED)
        for event in EVENTS[:2]:
            recorder.transition(tracker.apply(event))
        recorder.decision(DECISION)
        for event in EVENTS[2:]:
            recorder.transition(tracker.apply(event))
        recorder.decision(MIXED)
        recorder.turn(TURN)
        recorder.flip(FLIP)
        recorder.flip(BROKEN)
        recorder.step(STEP)
        for record in RECORDS:
            recorder.trajectory(record)


def test_everything_recorded_comes_back_equal(tmp_path: Path) -> None:
    record_all(tmp_path / "run")
    record_step(tmp_path / "run", StepRecord(2, 9.0, 5.5, 0.875, 8))
    run = read_run(tmp_path / "run")
    assert run.config == {"name": "small"}
    assert run.events == EVENTS
    assert [(one.after_events, one.decision) for one in run.decided] == [(2, DECISION), (6, MIXED)]
    assert run.turns == [TURN]
    assert run.flips == [FLIP, BROKEN]
    assert run.instances == [InstanceChange(0.5, "p", Role.PREFILL, InstanceState.ROUTED)]
    assert run.steps == [STEP, StepRecord(2, 9.0, 5.5, 0.875, 8)]
    assert run.generated == {"t": 2}, "u was dropped"
    assert run.problems == []


def test_the_status_at_the_end(tmp_path: Path) -> None:
    record_all(tmp_path / "run")
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.ended
    assert status.seconds == 3.0
    assert set(status.states.values()) == {0}
    assert status.instances == {"p": ["prefill", "routed"]}
    expected = {"done": 1, "decisions": 2, "turns": 1, "resends": 1, "flips": 1, "failed_flips": 1}
    assert status.totals == expected | {"prompt_tokens": 5, "cached_tokens": 2, "output_tokens": 3}
    assert status.reward == 1.0
    assert status.tokens_per_s == 1.0, "3 tokens in 3 s"


def test_a_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    record_all(tmp_path / "run")
    with pytest.raises(FileExistsError, match="it holds a run already"):
        RunRecorder(tmp_path / "run", "name: second\n")
    assert read_run(tmp_path / "run").config == {"name": "small"}


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run directory, it has no 'trace'"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    "name", ["decisions.jsonl", "turns.jsonl", "flips.jsonl", "instances.jsonl", "steps.jsonl", "trajectories.jsonl"]
)
@pytest.mark.parametrize("damage", ['{"time": 1.0, "na', "{}\n", "[]\n", "\x00\n"])
def test_a_damaged_file_is_read_up_to_the_damage_which_is_named(tmp_path: Path, name: str, damage: str) -> None:
    record_all(tmp_path / "run")
    whole = read_run(tmp_path / "run")
    path = tmp_path / "run" / name
    lines = path.read_text().count("\n")
    path.write_text(path.read_text() + damage)
    run = read_run(tmp_path / "run")
    assert (run.decided, run.turns, run.flips) == (whole.decided, whole.turns, whole.flips)
    assert (run.instances, run.steps, run.generated) == (whole.instances, whole.steps, whole.generated)
    (problem,) = run.problems
    assert problem.startswith(f"{path}, line {lines + 1}: ")


def test_recorded_decisions_can_be_made_again(synthetic: Callable[..., Path]) -> None:
    run = read_run(synthetic())
    policy = Adaptive(1, 1, 4)
    assert len(run.decided) > 10
    assert [replay(one.decision, policy) for one in run.decided] == [one.decision.target for one in run.decided]


def test_a_killed_run_is_readable_up_to_its_last_record(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from conftest import CONFIG, RunRecorder, Synthetic\n"
        "Synthetic(RunRecorder(sys.argv[2], CONFIG), 0, 4, 2).run(until=103.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    here = str(Path(__file__).parent)
    ended = subprocess.run([sys.executable, "-c", script, here, str(tmp_path / "run")], check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    run = read_run(tmp_path / "run")
    assert run.problems == []
    assert 102.9 < run.events[-1].time <= 103.0
    tracker = Tracker()
    for event in run.events:
        tracker.apply(event)
    assert len(tracker) > 0
    status = read_status(tmp_path / "run")
    assert status is not None
    assert not status.ended


def test_where_no_second_status_can_be_written_the_first_is_overwritten(tmp_path: Path) -> None:
    record_all(tmp_path / "run")
    before = read_status(tmp_path / "run")
    assert before is not None
    (tmp_path / "run" / "status.json.new").mkdir()
    overwrite(tmp_path / "run" / "status.json", replace_(before, recording="the disk is full"))
    status = read_status(tmp_path / "run")
    assert status is not None
    assert (status.recording, status.totals) == ("the disk is full", before.totals)


def test_a_run_that_goes_on_is_one_run(tmp_path: Path) -> None:
    tracker = Tracker()
    first = RunRecorder(tmp_path / "run", "name: small\n", command="rollout")
    for event in [*EVENTS, Sampled(3.5, "u", "g", "x"), Sampled(3.5, "v", "g", "x"), Ready(4.0, "v", 5)]:
        first.transition(tracker.apply(event))
    first.turn(TURN)
    first.trajectory(RECORDS[0])
    with pytest.raises(CannotContinue, match="a process writes this run"):
        RunRecorder(tmp_path / "run", command="rollout", now=0.0)
    first.close()
    with open(tmp_path / "run" / "trace", "ab") as trace, open(tmp_path / "run" / "turns.jsonl", "ab") as turns:
        trace.write(b'["R",4.5,')  # what a killed process leaves
        turns.write(b'{"trajectory":"v","tu')
    with pytest.raises(CannotContinue, match="a run of `prorsa rollout`; `prorsa train` cannot go on with it"):
        RunRecorder(tmp_path / "run", command="train", now=0.0)
    with RunRecorder(tmp_path / "run", command="rollout", now=100.0) as second:
        assert second.offset == -96.0
        assert second.past_events()[-1] == Dropped(100.0, "v", CUT_OFF)
        tracker = Tracker()
        for event in [*second.past_events(), Sampled(101.0, "v.1", "g", "x")]:
            transition = tracker.apply(event)
        second.transition(transition)
        second.turn(replace_(TURN, trajectory="v.1", ready=102.0, arrivals=(103.0,), versions=(0,)))
        second.decision(replace_(DECISION, time=101.0))
        second.instance(101.0, "p", Role.PREFILL, InstanceState.ROUTED)
        second.flip(replace_(FLIP, time=102.0))
        second.step(StepRecord(1, 103.0, 2.0, 1.0, 8))
    run = read_run(tmp_path / "run")
    assert run.problems == []
    cut_off = [Dropped(4.0, "u", CUT_OFF), Dropped(4.0, "v", CUT_OFF)]
    assert run.events[-3:] == [*cut_off, Sampled(5.0, "v.1", "g", "x")]
    assert (run.turns[1].ready, list(run.turns[1].arrivals)) == (6.0, [7.0])
    assert (run.decided[0].after_events, run.decided[0].decision.time) == (12, 5.0)
    assert (run.instances[0].time, run.flips[0].time, run.steps[0].time) == (5.0, 6.0, 7.0)
    status = read_status(tmp_path / "run")
    assert status is not None
    assert (status.totals["done"], status.totals["dropped"], status.totals["turns"]) == (1, 2, 2)
    assert status.states["SAMPLED"] == 1


def test_a_trajectory_whose_record_is_there_has_ended(tmp_path: Path) -> None:
    """It was killed between the record and the event."""
    tracker = Tracker()
    first = RunRecorder(tmp_path / "run", command="rollout")
    for event in EVENTS[:-1]:
        first.transition(tracker.apply(event))
    first.trajectory(RECORDS[0])
    first.close()
    RunRecorder(tmp_path / "run", command="rollout", now=9.0).close()
    assert read_run(tmp_path / "run").events[-1] == Done(3.0, "t", 1.0, True)
