"""Writes the run directory while the run goes on (its files are described in `prorsa.report.rundir`).

Every record is one line and is with the operating system when the call returns, so a run that is killed leaves all that it
had recorded. `status.json` is replaced as a whole: whoever reads it sees one moment.
"""

from __future__ import annotations

import json
import os
from collections import Counter, deque
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self, TextIO

from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, Flip, TurnRecord
from prorsa.engines.protocol import Role
from prorsa.lifecycle import Done, Dropped, State, TraceWriter, Transition
from prorsa.report import rundir
from prorsa.report.rundir import Json, StepRecord
from prorsa.rollout.records import TrajectoryRecord

STATUS_EVERY = 0.25
"""Seconds of wall time between two writings of the status."""
RATE_WINDOW = 10.0
"""Seconds of the run's own time over which tokens/s is averaged."""
LATEST = 256
"""Trajectories over which the reward is averaged."""


class RunRecorder:
    """An `Observer` that keeps the run directory. It creates the directory; one that has a trace already is refused."""

    def __init__(self, directory: str | Path, config: str | None = None) -> None:
        """`config` is the resolved configuration as YAML; None leaves the file to somebody else.

        Raises FileExistsError where the directory holds a run.
        """
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._trace = TraceWriter(self.directory / rundir.TRACE)
        if config is not None:
            (self.directory / rundir.CONFIG).write_text(config)
        self._files: dict[str, TextIO] = {}
        self._events = 0
        self._started: float | None = None
        self._now = 0.0
        self._states: Counter[State] = Counter()
        self._instances: dict[str, tuple[Role, InstanceState]] = {}
        self._totals: Counter[str] = Counter()
        self._recent: deque[tuple[float, int]] = deque()
        self._rewards: deque[float] = deque(maxlen=LATEST)
        self._status_due = 0.0

    def transition(self, transition: Transition) -> None:
        event = transition.event
        self._trace.write(event)
        self._events += 1
        self._at(event.time)
        if transition.before is not None:
            self._states[transition.before] -= 1
        self._states[transition.after] += 1
        if isinstance(event, Done):
            self._totals["done"] += 1
            self._rewards.append(event.reward)
        elif isinstance(event, Dropped):
            self._totals["dropped"] += 1
        self._write_status()

    def decision(self, decision: Decision) -> None:
        self._write(rundir.DECISIONS, rundir.dump_decision(decision, self._events))
        self._totals["decisions"] += 1
        self._at(decision.time)
        self._write_status()

    def flip(self, flip: Flip) -> None:
        self._write(rundir.FLIPS, asdict(flip))
        self._totals["flips" if flip.failure is None else "failed_flips"] += 1
        self._write_status(now=True)

    def turn(self, turn: TurnRecord) -> None:
        self._write(rundir.TURNS, rundir.dump_turn(turn))
        self._totals["turns"] += 1
        self._totals["resends"] += turn.attempts - 1
        self._totals["prompt_tokens"] += turn.prompt_tokens
        self._totals["cached_tokens"] += turn.cached_tokens
        self._totals["output_tokens"] += turn.output_tokens
        if turn.arrivals:
            self._at(turn.arrivals[-1])
        self._recent.append((self._now, turn.output_tokens))
        self._write_status()

    def instance(self, time: float, name: str, role: Role, state: InstanceState) -> None:
        self._write(rundir.INSTANCES, {"time": time, "name": name, "role": role, "state": state})
        self._instances[name] = (role, state)
        self._at(time)
        self._write_status(now=True)

    def step(self, step: StepRecord) -> None:
        """The end of a training or rollout step; `rundir.record_step` does the same from another process."""
        rundir.record_step(self.directory, step)
        self._write_status(now=True)

    def trajectory(self, record: TrajectoryRecord) -> None:
        """A trajectory token by token, where the controller keeps them."""
        self._write(rundir.TRAJECTORIES, asdict(record))

    def close(self) -> None:
        """Write the last status, which says that the run has ended, and close the files."""
        self._write_status(now=True, ended=True)
        self._trace.close()
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _at(self, time: float) -> None:
        self._started = time if self._started is None else min(self._started, time)
        self._now = max(self._now, time)

    def _write(self, name: str, record: Json) -> None:
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = open(self.directory / name, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def _write_status(self, now: bool = False, ended: bool = False) -> None:
        clock = monotonic()
        if clock < self._status_due and not now:
            return
        self._status_due = clock + STATUS_EVERY
        path = self.directory / rundir.STATUS
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self._status(ended))))
        os.replace(new, path)

    def _status(self, ended: bool) -> rundir.Status:
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
