"""Writes the run directory while the run goes on (its files are described in `prorsa.report.rundir`).

Every record is one line and is with the operating system when the call returns, so a run that is killed leaves all that it
had recorded. What a full disk or the like keeps from that waits in memory (`prorsa.report.journal`), and the run notices
nothing. `status.json` is replaced as a whole, or overwritten in place where there is no space for a second one: whoever reads
it sees one moment.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, Flip, TurnRecord
from prorsa.config import Config
from prorsa.engines.protocol import Role
from prorsa.lifecycle import ENDS, Done, Dropped, Event, Sampled, State, TraceCoder, Tracker, Transition
from prorsa.lifecycle.trace import HEADER
from prorsa.report import rundir
from prorsa.report.journal import Journal, RecordingFailed, Waiting
from prorsa.report.opening import History, locked, moved, read_history
from prorsa.report.rundir import Json, Start, StepRecord
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.resume import NOT_RECORDED

logger = logging.getLogger(__name__)

STATUS_EVERY = 0.25
"""Seconds of wall time between two writings of the status."""
STATUS_BLOCK = 4096
"""The status is filled up to a multiple of so many bytes, so that the next one has room in its place."""
RATE_WINDOW = 10.0
"""Seconds of the run's own time over which tokens/s is averaged."""
LATEST = 256
"""Trajectories over which the reward is averaged."""
MEMORY = 256 << 20
"""Bytes of records that wait to be written, where the configuration does not say."""
EVENT_BYTES = 512
"""What an event that waits takes in memory, roughly."""


class RunRecorder:
    """An `Observer` that keeps the run directory. It creates the directory; one that has a trace already is refused, or gone
    on with. Use it as `with RunRecorder(...) as recorder`, or call `close` at the end."""

    def __init__(
        self,
        directory: str | Path,
        config: str | None = None,
        *,
        command: str = "",
        now: float | None = None,
        memory: int = MEMORY,
        give_up_after: float | None = None,
    ) -> None:
        """`config` is the resolved configuration as YAML; None leaves the file to somebody else. `command` is which one runs.
        `now` is the time of the event loop where a run that is found in the directory shall be gone on with. `memory` bytes
        are for records that cannot be written; `gave_up` is said when they are used up, or nothing could be written for
        `give_up_after` seconds (None: never).

        Raises OSError where the directory cannot be written, `CannotContinue` where another process writes it or the run in
        it cannot go on, FileExistsError where it holds a run that `now` does not ask for.
        """
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = locked(self.directory)
        self._journal = Journal(self.directory, memory, give_up_after=give_up_after, also=self._write_last_status)
        self._events = 0
        self._started: float | None = None
        self._now = 0.0
        self._states: Counter[State] = Counter()
        self._instances: dict[str, tuple[Role, InstanceState]] = {}
        self._totals: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()
        self._rewards: deque[float] = deque(maxlen=LATEST)
        self._status_due = 0.0
        self._status: rundir.Status | None = None
        """The last one."""
        self._holes: set[str] = set()
        """Live trajectories of which an event is missing in the trace: what follows of them is left out."""
        try:
            self.history, self.offset = self._open(config, command, now)
        except BaseException:
            os.close(self._lock)
            raise

    def _open(self, config: str | None, command: str, now: float | None) -> tuple[History, float]:
        trace = self.directory / rundir.TRACE
        history, offset = History(), 0.0
        if trace.exists():
            if now is None:
                raise FileExistsError(17, "it holds a run already; give another directory", str(self.directory))
            history = read_history(self.directory, command)
            offset = history.last - now if history.events else 0.0
        if config is not None:
            rundir.replace_file(self.directory / rundir.CONFIG, config)
        self._coder = TraceCoder(history.names)
        # All at once: later there may be no descriptors left.
        for name in (rundir.TRACE, rundir.DECISIONS, rundir.TURNS, rundir.FLIPS, rundir.INSTANCES, rundir.STARTS):
            self._journal.file(name)
        for name in (rundir.STEPS, rundir.TRAJECTORIES):
            self._journal.file(name, shared=True)
        self._journal.add_record(rundir.STARTS, asdict(Start(command, time.time(), offset)), "start")
        if not trace.stat().st_size:
            self._journal.add(rundir.TRACE, Waiting(lambda: HEADER, len(HEADER), "header"))
        self._recount(history)
        return history, offset

    @property
    def trouble(self) -> str | None:
        """What is wrong with the recording in one line, or None."""
        return self._journal.trouble

    @property
    def gave_up(self) -> str | None:
        """Why the run should stop: what it does cannot be recorded."""
        return self._journal.gave_up

    @property
    def patient(self) -> bool:
        """Whether it is a matter of time until it either has written everything or gives up."""
        return self._journal.patient

    @property
    def failing(self) -> bool:
        """Whether records wait, or could not be written just now."""
        return self._journal.failing

    def watch(self, gave_up: Callable[[], object], recovered: Callable[[], object]) -> None:
        """`gave_up` is called once, from any thread, when it is said; `recovered` whenever all that waited is written."""
        self._journal.on_give_up, self._journal.on_recovery = gave_up, recovered

    def past_events(self) -> list[Event]:
        """What earlier processes of the run have recorded, on the clock of this one's event loop."""
        return [moved(event, -self.offset) for event in self.history.all_events]

    def step_began(self, now: float) -> float:
        """When the step that runs began, on the clock of this process's event loop: it goes on where the run was cut off."""
        if not self.history.events:
            return now
        ends = [step.time for step in self.history.steps]
        return max([self.history.events[0].time, *ends]) - self.offset

    def transition(self, transition: Transition) -> None:
        event = moved(transition.event, self.offset) if self.offset else transition.event
        if event.trajectory in self._holes:
            self._journal.lose(rundir.TRACE, _called(event))
            if isinstance(event, ENDS):
                self._holes.discard(event.trajectory)
        else:
            self._write_event(event)
        self._count(event, transition)
        self._write_status()

    def decision(self, decision: Decision) -> None:
        if self.offset:
            time = decision.time + self.offset
            forecast = replace(decision.forecast, time=decision.forecast.time + self.offset)
            decision = replace(decision, time=time, forecast=forecast)
        self._journal.add_record(
            rundir.DECISIONS, rundir.dump_decision(decision, self._events), f"at {decision.time:.3f} s"
        )
        self._totals["decisions"] += 1
        self._at(decision.time)
        self._write_status()

    def flip(self, flip: Flip) -> None:
        flip = replace(flip, time=flip.time + self.offset)
        self._journal.add_record(rundir.FLIPS, asdict(flip), flip.instance)
        self._totals["flips" if flip.failure is None else "failed_flips"] += 1
        self._write_status(now=True)

    def turn(self, turn: TurnRecord) -> None:
        line = rundir.dump_turn(turn)
        line["ready"] += self.offset
        self._journal.add_record(rundir.TURNS, line, f"{turn.trajectory}, turn {turn.turn}")
        self._count_turn(line)
        if turn.arrivals:
            self._at(turn.arrivals[-1] + self.offset)
        self._recent.append((self._now, turn.output_tokens))
        self._write_status()

    def instance(self, time: float, name: str, role: Role, state: InstanceState) -> None:
        self._journal.add_record(
            rundir.INSTANCES, {"time": time + self.offset, "name": name, "role": role, "state": state}, name
        )
        self._instances[name] = (role, state)
        self._at(time + self.offset)
        self._write_status(now=True)

    def step(self, step: StepRecord) -> None:
        """The end of a training or rollout step; `rundir.record_step` does the same from another process."""
        line = asdict(replace(step, time=step.time + self.offset))
        # A step that is recorded is done, so its trajectories come first.
        self._journal.add_record(rundir.STEPS, line, f"step {step.step}", after=rundir.TRAJECTORIES)
        self._write_status(now=True)

    def trajectory(self, record: TrajectoryRecord) -> None:
        """A trajectory token by token, where the controller keeps them."""
        self._journal.add_record(rundir.TRAJECTORIES, asdict(record), record.trajectory)

    def close(self) -> None:
        """Write the last status, which says that the run has ended, and close the files. Raises `RecordingFailed` as
        `Journal.close`."""
        try:
            self._journal.close()
        finally:
            self._write_status(now=True, ended=True)
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except RecordingFailed as failure:
            if error is None:
                raise
            logger.error("%s", failure)

    # Records.

    def _write_event(self, event: Event) -> None:
        waiting = Waiting(
            partial(self._coder.line, event),
            EVENT_BYTES,
            _called(event),
            self._coder.wrote,
            lambda why: self._close_hole(event),
        )
        self._events += 1
        self._journal.add(rundir.TRACE, waiting)

    def _close_hole(self, event: Event) -> Waiting | None:
        """A trajectory of which an event is missing ends there, or the events after it would contradict those before."""
        if not isinstance(event, ENDS):
            self._holes.add(event.trajectory)
        if isinstance(event, Sampled):
            self._events -= 1
            return None
        end = Dropped(event.time, event.trajectory, NOT_RECORDED)
        return Waiting(partial(self._coder.line, end), EVENT_BYTES, f"the end of {event.trajectory}", self._coder.wrote)

    # What is going on.

    def _recount(self, history: History) -> None:
        """What happened before, and that what was live has ended."""
        tracker = Tracker()
        for event in history.events:
            self._count(event, tracker.apply(event))
        self._events = len(history.events)
        for event in history.ends:
            self._count(event, tracker.apply(event))
            self._write_event(event)
        if history.events:
            self._recount_lines()

    def _recount_lines(self) -> None:
        for line in rundir.read_lines(self.directory / rundir.TURNS, dict, []):
            self._count_turn(line)
        for name in (rundir.DECISIONS, rundir.FLIPS):
            for line in rundir.read_lines(self.directory / name, dict, []):
                self._totals["failed_flips" if line.get("failure") else name.removesuffix(".jsonl")] += 1

    def _count(self, event: Event, transition: Transition) -> None:
        self._at(event.time)
        if transition.before is not None:
            self._states[transition.before] -= 1
        self._states[transition.after] += 1
        if isinstance(event, Done):
            self._totals["done"] += 1
            self._rewards.append(event.reward)
        elif isinstance(event, Dropped):
            self._totals["dropped"] += 1

    def _count_turn(self, line: Json) -> None:
        self._totals["turns"] += 1
        self._totals["resends"] += len(line["instances"]) - 1
        self._totals["prompt_tokens"] += line["prompt_tokens"]
        self._totals["cached_tokens"] += line["cached_tokens"]
        self._totals["output_tokens"] += sum(count for _, count in line["versions"])

    def _at(self, time: float) -> None:
        self._started = time if self._started is None else min(self._started, time)
        self._now = max(self._now, time)

    def _write_status(self, now: bool = False, ended: bool = False) -> None:
        clock = time.monotonic()
        if clock < self._status_due and not now:
            return
        self._status_due = clock + STATUS_EVERY
        self._status = self._present(ended)
        try:
            self._write_last_status()
        except OSError as error:
            self._journal.failed(self.directory / rundir.STATUS, error)

    def _write_last_status(self) -> None:
        with self._journal.lock:
            if self._status is not None:
                overwrite(self.directory / rundir.STATUS, replace(self._status, recording=self.trouble))

    def _present(self, ended: bool) -> rundir.Status:
        seconds = self._now - (self._started or 0.0)
        while self._recent and self._recent[0][0] < self._now - RATE_WINDOW:
            self._recent.popleft()
        span = min(RATE_WINDOW, seconds)
        return rundir.Status(
            seconds=seconds,
            states={state.name: self._states[state] for state in State if state.live},
            instances={name: (role.value, state.value) for name, (role, state) in self._instances.items()},
            totals=dict(self._totals),
            tokens_per_s=sum(tokens for _, tokens in self._recent) / span if span > 0 else 0.0,
            reward=sum(self._rewards) / len(self._rewards) if self._rewards else None,
            ended=ended,
        )


def recorder_of(
    config: Config, directory: str | Path, command: str, now: float, text: str | None = None
) -> RunRecorder:
    """Of a run that stops when it cannot be recorded, with the bounds of its configuration; the rest as `RunRecorder`."""
    memory, patience = config.recording.memory_mb << 20, config.recording.give_up_after
    return RunRecorder(directory, text, command=command, now=now, memory=memory, give_up_after=patience)


def _called(event: Event) -> str:
    return f"{type(event).__name__} of {event.trajectory}"


def overwrite(path: Path, status: rundir.Status) -> None:
    """Replace the status, or overwrite it where the disk has no space for a second one. Raises OSError."""
    text = json.dumps(asdict(status))
    text += " " * (-len(text) % STATUS_BLOCK)
    try:
        rundir.replace_file(path, text)
    except OSError:
        if not path.is_file() or path.stat().st_size < len(text):
            raise
        with open(path, "r+b") as file:
            file.write(text.encode())
            file.truncate()
