"""Opening a run directory to write it: alone, and where a run that was cut off is to go on, with what that has left.

A directory is written by one process at a time: the lock on it goes when its holder does, however that ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from prorsa.lifecycle import Done, Dropped, Event, IllegalTransition, Sampled, State, TraceError, Tracker, read_trace
from prorsa.lifecycle.trace import HEADER
from prorsa.report import rundir
from prorsa.report.journal import cut_torn_line
from prorsa.report.rundir import Json, StepRecord
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.resume import CUT_OFF

LINES = (
    rundir.DECISIONS,
    rundir.TURNS,
    rundir.FLIPS,
    rundir.INSTANCES,
    rundir.STEPS,
    rundir.TRAJECTORIES,
    rundir.STARTS,
)


class CannotContinue(Exception):
    """A run directory that cannot be written or gone on with; the message names it, the cause and the remedy."""


@dataclass(slots=True)
class History:
    """What the earlier processes of a run have recorded, on its own clock."""

    events: list[Event] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Of the trace, by their codes."""
    ends: list[Event] = field(default_factory=list)
    """Those that the trace lacks: of the trajectories that were live when the run was cut off."""
    records: list[TrajectoryRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    last: float = 0.0
    """When the last thing happened that was recorded."""

    @property
    def all_events(self) -> list[Event]:
        return [*self.events, *self.ends]


def locked(directory: Path) -> int:
    """The lock of a run directory, a file descriptor; closing it lets go. Raises `CannotContinue`."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise CannotContinue(f"{directory}: a process writes this run; wait for its end, or end it") from None
    except OSError:
        # A file system without locks is no reason not to run.
        pass
    return lock


def refuse(directory: Path, command: str) -> None:
    """Before anything is begun: raises `CannotContinue` where another process writes the run or it is another command's."""
    os.close(locked(directory))
    _refuse_other(directory, command)


def read_history(directory: Path, command: str) -> History:
    """Mend what a killed process has left half written, and read it. Raises `CannotContinue`."""
    for name in (rundir.TRACE, *LINES):
        _mend(directory / name)
    _refuse_other(directory, command)
    problems: list[str] = []
    history = History(
        records=[*rundir.read_lines(directory / rundir.TRAJECTORIES, rundir.load_trajectory, problems)],
        steps=rundir.read_steps(directory),
    )
    for name in LINES:
        for line in rundir.read_lines(directory / name, _itself, problems):
            history.last = max(history.last, line.get("time", 0.0))
    try:
        history.events += read_trace(directory / rundir.TRACE, history.names)
    except TraceError as error:
        problems.append(str(error))
    if problems:
        raise CannotContinue("\n".join(f"{problem}; a run that lacks others cannot go on" for problem in problems))
    history.last = max([history.last, *(event.time for event in history.events[-1:])])
    history.ends += _missing_ends(history)
    return history


def _itself(line: Json) -> Json:
    return {"time": line.get("time", 0.0)}


def _mend(path: Path) -> None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        cut_torn_line(file)
        if path.name == rundir.TRACE and os.fstat(file).st_size == 0:
            os.write(file, HEADER)
    finally:
        os.close(file)


def _refuse_other(directory: Path, command: str) -> None:
    for start in rundir.read_starts(directory):
        if start.command != command:
            raise CannotContinue(
                f"{directory}: a run of `prorsa {start.command}`; `prorsa {command}` cannot go on with it"
            )


def _missing_ends(history: History) -> Iterator[Event]:
    """A trajectory whose record is there has ended, though its process was killed before the trace said so."""
    tracker = Tracker()
    for event in history.events:
        try:
            tracker.apply(event)
        except IllegalTransition as error:
            raise CannotContinue(f"the trace contradicts itself: {error}; this run cannot go on") from None
    ended = {record.trajectory: record for record in history.records}
    live = {event.trajectory for event in history.events if isinstance(event, Sampled) and event.trajectory in tracker}
    for name in sorted(live):
        record = ended.get(name)
        if record is not None and record.reward is not None and tracker.state(name) is State.REWARD:
            yield Done(history.last, name, record.reward, admitted=True)
        else:
            reason = record.dropped if record is not None and record.dropped is not None else CUT_OFF
            yield Dropped(history.last, name, reason)


def moved(event: Event, seconds: float) -> Event:
    return replace(event, time=event.time + seconds)
