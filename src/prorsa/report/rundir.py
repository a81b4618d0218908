"""The run directory: which files it has, how a record is a line, and how a run is read back, complete or cut off.

    config.yaml          the resolved configuration
    trace                every lifecycle event (see `prorsa.lifecycle.trace`)
    decisions.jsonl      every decision with its inputs; `after_events` says how many events of the trace came before it
    turns.jsonl          every finished model turn: `arrivals` in seconds after `ready`, `versions` as [version, how many]
    flips.jsonl          every role switch
    instances.jsonl      every change of an instance's role or state
    steps.jsonl          every training or rollout step
    trajectories.jsonl   the trajectories themselves, token by token, where the controller hands them over
    status.json          what is going on, replaced as a whole a few times a second
    report.html          see `prorsa.report.html`

All times are seconds on the clock of the event loop that ran the rollout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import yaml

from prorsa.allocation import Allocation, Demand
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, Flip, TurnRecord
from prorsa.engines.protocol import FinishReason, Role
from prorsa.forecast import Forecast
from prorsa.lifecycle import Event, State, TraceError, read_trace
from prorsa.rollout.records import TrajectoryRecord

CONFIG = "config.yaml"
TRACE = "trace"
DECISIONS = "decisions.jsonl"
TURNS = "turns.jsonl"
FLIPS = "flips.jsonl"
INSTANCES = "instances.jsonl"
STEPS = "steps.jsonl"
TRAJECTORIES = "trajectories.jsonl"
STATUS = "status.json"

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training or rollout step."""

    step: int
    time: float
    """When it ended, seconds."""
    seconds: float
    """How long it took."""
    reward: float
    """Mean over the step's trajectories."""
    trajectories: int
    dropped: int = 0
    split: str = "train"
    """`test` is an evaluation on held-out questions."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Whatever else the trainer reports."""


@dataclass(frozen=True, slots=True)
class Status:
    """What is going on right now."""

    seconds: float
    """Since the first record."""
    states: dict[str, int]
    """Live trajectories by the name of their state."""
    instances: dict[str, tuple[str, str]]
    """Instance -> (role, state)."""
    totals: dict[str, int]
    """done, dropped, decisions, flips, failed_flips, turns, resends, prompt_tokens, cached_tokens, output_tokens."""
    tokens_per_s: float
    """Output tokens of the turns that ended lately."""
    reward: float | None
    """Mean of the latest trajectories."""
    ended: bool


@dataclass(frozen=True, slots=True)
class InstanceChange:
    time: float
    name: str
    role: Role
    state: InstanceState


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision and its place among the events."""

    after_events: int
    decision: Decision


@dataclass(slots=True)
class Run:
    """A run directory in memory."""

    directory: Path
    config: Json
    events: list[Event]
    decided: list[Decided]
    turns: list[TurnRecord]
    flips: list[Flip]
    instances: list[InstanceChange]
    steps: list[StepRecord]
    problems: list[str]
    """What could not be read, such as the last line of a killed run; everything before it is here."""


def dump_decision(decision: Decision, after_events: int) -> Json:
    target = decision.target
    return {
        "time": decision.time,
        "after_events": after_events,
        "states": {state.name: count for state, count in decision.states.items()},
        "forecast": asdict(decision.forecast),
        "demand": asdict(decision.demand),
        "current": [decision.current.prefill, decision.current.decode],
        "live": decision.live,
        "target": None if target is None else [target.prefill, target.decode],
    }


def load_decision(line: Json) -> Decided:
    decision = Decision(
        time=line["time"],
        states={State[name]: count for name, count in line["states"].items()},
        forecast=Forecast(**line["forecast"]),
        demand=Demand(**line["demand"]),
        current=Allocation(*line["current"]),
        live=line["live"],
        target=None if line["target"] is None else Allocation(*line["target"]),
    )
    return Decided(line["after_events"], decision)


def dump_turn(turn: TurnRecord) -> Json:
    return asdict(turn) | {
        "arrivals": [round(arrival - turn.ready, 6) for arrival in turn.arrivals],
        "versions": [[version, len(list(run))] for version, run in groupby(turn.versions)],
    }


def load_turn(line: Json) -> TurnRecord:
    return TurnRecord(
        **line
        | {
            "instances": tuple((prefill, decode) for prefill, decode in line["instances"]),
            "arrivals": tuple(line["ready"] + arrival for arrival in line["arrivals"]),
            "versions": tuple(version for version, count in line["versions"] for _ in range(count)),
            "finish": FinishReason(line["finish"]),
        }
    )


def load_flip(line: Json) -> Flip:
    return Flip(**line | {"before": Role(line["before"]), "after": Role(line["after"])})


def load_instance(line: Json) -> InstanceChange:
    return InstanceChange(line["time"], line["name"], Role(line["role"]), InstanceState(line["state"]))


def load_step(line: Json) -> StepRecord:
    return StepRecord(**line)


def load_trajectory(line: Json) -> TrajectoryRecord:
    columns = ("prompt_ids", "response_ids", "response_mask", "logprobs", "versions")
    return TrajectoryRecord(**line | {name: tuple(line[name]) for name in columns})


def append_line(path: Path, record: Json) -> None:
    """Append in a single write, so that lines of several processes never mix."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")


def record_step(directory: str | Path, step: StepRecord) -> None:
    """Add a step to a run directory. Works from any process, such as a trainer that is not the one of the recorder."""
    append_line(Path(directory) / STEPS, asdict(step))


def read_steps(directory: Path) -> list[StepRecord]:
    return list(_lines(directory / STEPS, load_step, []))


def read_trajectories(directory: Path) -> list[TrajectoryRecord]:
    return list(_lines(directory / TRAJECTORIES, load_trajectory, []))


def read_status(directory: Path) -> Status | None:
    """None before the first was written."""
    try:
        return Status(**json.loads((directory / STATUS).read_text()))
    except FileNotFoundError:
        return None


def read_run(directory: str | Path) -> Run:
    """Everything that can be read. Raises FileNotFoundError where `directory` is no run directory."""
    directory = Path(directory)
    if not (directory / TRACE).is_file():
        raise FileNotFoundError(f"{directory}: no run directory, it has no {TRACE!r}; give one that a run has written")
    problems: list[str] = []
    return Run(
        directory=directory,
        config=_read_config(directory / CONFIG),
        events=list(_events(directory / TRACE, problems)),
        decided=list(_lines(directory / DECISIONS, load_decision, problems)),
        turns=list(_lines(directory / TURNS, load_turn, problems)),
        flips=list(_lines(directory / FLIPS, load_flip, problems)),
        instances=list(_lines(directory / INSTANCES, load_instance, problems)),
        steps=list(_lines(directory / STEPS, load_step, problems)),
        problems=problems,
    )


def _read_config(path: Path) -> Json:
    if not path.is_file():
        return {}
    config = yaml.safe_load(path.read_text())
    return config if isinstance(config, dict) else {}


def _events(path: Path, problems: list[str]) -> Iterator[Event]:
    try:
        yield from read_trace(path)
    except TraceError as error:
        problems.append(str(error))


def _lines(path: Path, load: Callable[[Json], T], problems: list[str]) -> Iterator[T]:
    """The records up to the first line that is none; a file that was never begun has none."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("the file ends within this line")
                yield load(json.loads(line))
            except (ValueError, LookupError, TypeError) as error:
                problems.append(f"{path}, line {number}: {error}; the lines before it are whole")
                return
