"""The figures of a run, computed from its run directory alone. Times are seconds on the run's clock."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prorsa.cluster.observers import Decision, TurnRecord
from prorsa.forecast import Forecast, Measured, Persistence, WindowMeter, wape
from prorsa.lifecycle import (
    Done,
    Dropped,
    Event,
    IllegalTransition,
    Requeued,
    RewardStarted,
    State,
    ToolStarted,
    Tracker,
    Transition,
)
from prorsa.report.rundir import Run
from prorsa.report.runs import compact
from prorsa.report.volumes import Floats

Counts = NDArray[np.int32]

TOGETHER = 0.001
"""Tokens of a turn that arrive less than this many seconds apart came in one piece."""
_NONE: Floats = np.empty(0)


@dataclass(frozen=True, slots=True)
class Window:
    """What was forecast for [forecast.time, forecast.time + forecast.horizon), and what happened."""

    forecast: Forecast
    persistence: Forecast
    """What "the next window is like the last" would have said at the same moment."""
    measured: Measured


@dataclass(frozen=True, slots=True)
class Stay:
    """A trajectory in one state."""

    state: State
    start: float
    end: float


@dataclass(slots=True)
class Replay:
    """What the events say when they are applied again."""

    windows: list[Window] = field(default_factory=list)
    stays: dict[str, list[Stay]] = field(default_factory=dict)
    """Trajectory -> where it was when, in the order of sampling."""
    ends: dict[str, Event] = field(default_factory=dict)
    """Trajectory -> its Done or Dropped."""
    contexts: dict[tuple[str, int], int] = field(default_factory=dict)
    """(trajectory, turn) -> context length that the episode had after the turn."""
    requeued: int = 0
    live_seconds: float = 0.0
    """Time during which any trajectory was live."""
    start: float = 0.0
    end: float = 0.0


def replay(run: Run) -> Replay:
    """Apply the trace again, each decision at its place. An event that cannot be ends it and joins `run.problems`."""
    replayer = _Replayer(run.events[0].time if run.events else 0.0)
    decided = deque(run.decided)
    for count, event in enumerate(run.events):
        while decided and decided[0].after_events <= count:
            replayer.decide(decided.popleft().decision)
        try:
            replayer.apply(event)
        except IllegalTransition as error:
            run.problems.append(f"{run.directory}, event {count + 1}: {error}; the report ends before it")
            break
    return replayer.end()


class _Replayer:
    def __init__(self, start: float) -> None:
        self._result = Replay(start=start, end=start)
        self._tracker = Tracker()
        self._meter = WindowMeter()
        self._persistence = Persistence()
        self._open: deque[Forecast] = deque()
        """What persistence said for the windows that are not over, oldest first."""

    def decide(self, decision: Decision) -> None:
        self._close_windows(decision.time)
        self._meter.open(decision.forecast)
        snapshot = self._tracker.snapshot(decision.time)
        self._open.append(self._persistence.forecast(snapshot, decision.forecast.horizon, ()))

    def apply(self, event: Event) -> None:
        result, was_live = self._result, len(self._tracker) > 0
        transition = self._tracker.apply(event)
        self._meter.observe(transition)
        self._persistence.observe(transition)
        self._follow(transition)
        if isinstance(event, ToolStarted | RewardStarted):
            result.contexts[event.trajectory, transition.turn] = transition.tokens
        result.requeued += isinstance(event, Requeued)
        if was_live:
            result.live_seconds += max(0.0, event.time - result.end)
        result.end = max(result.end, event.time)

    def end(self) -> Replay:
        result = self._result
        self._close_windows(result.end)
        for name, stays in result.stays.items():
            if name not in result.ends:
                stays[-1] = replace(stays[-1], end=result.end)
        return result

    def _follow(self, transition: Transition) -> None:
        event = transition.event
        stays = self._result.stays.setdefault(event.trajectory, [])
        if stays:
            stays[-1] = replace(stays[-1], end=event.time)
        if transition.after.live:
            stays.append(Stay(transition.after, event.time, event.time))
        else:
            self._result.ends[event.trajectory] = event

    def _close_windows(self, time: float) -> None:
        for forecast, measured in self._meter.finished(time):
            self._result.windows.append(Window(forecast, self._open.popleft(), measured))


@dataclass(frozen=True, slots=True)
class Errors:
    """WAPE as fractions: the sum of absolute errors over the sum of measured tokens (paper, Fig. 8)."""

    windows: int
    prefill: float
    admitted: float
    persistence_prefill: float
    persistence_admitted: float


def forecast_errors(windows: Sequence[Window]) -> Errors:
    prefill = [window.measured.prefill_tokens for window in windows]
    admitted = [window.measured.admitted_tokens for window in windows]
    return Errors(
        windows=len(windows),
        prefill=wape([window.forecast.prefill_tokens for window in windows], prefill),
        admitted=wape([window.forecast.admitted_tokens for window in windows], admitted),
        persistence_prefill=wape([window.persistence.prefill_tokens for window in windows], prefill),
        persistence_admitted=wape([window.persistence.admitted_tokens for window in windows], admitted),
    )


@dataclass(frozen=True, slots=True)
class Integrity:
    """Whether what the engines streamed is what the episodes have."""

    turns: int
    """Turns that both sides recorded."""
    tokens: int
    """Output tokens of those turns."""
    lost: int
    """Tokens that one side has and the other has not; 0 is right."""


def integrity(run: Run, contexts: dict[tuple[str, int], int]) -> Integrity:
    """Compare what was streamed with what the episodes made of it.

    Each turn's prompt and output with the context that the episode reported after the turn; where the trajectories are
    recorded, the outputs of all turns of a finished one with the tokens that its mask says were generated.
    """
    both = [turn for turn in run.turns if (turn.trajectory, turn.turn) in contexts]
    lost = sum(
        abs(turn.prompt_tokens + turn.output_tokens - contexts[turn.trajectory, turn.turn])
        + abs(turn.output_tokens - len(turn.versions))
        for turn in both
    )
    streamed: Counter[str] = Counter()
    for turn in run.turns:
        streamed[turn.trajectory] += turn.output_tokens
    lost += sum(abs(tokens - streamed[trajectory]) for trajectory, tokens in run.generated.items())
    return Integrity(len(both), sum(turn.output_tokens for turn in both), lost)


@dataclass(frozen=True, slots=True)
class Cumulative:
    """Tokens until each time: (time, running total), one point for each moment at which the total grew."""

    prompt: tuple[Floats, Floats]
    """Full prompt lengths, when the turn's first token arrived."""
    computed: tuple[Floats, Floats]
    """The same without what a cache had already."""
    decoded: tuple[Floats, Floats]


def cumulative_tokens(turns: Sequence[TurnRecord]) -> Cumulative:
    begun = [turn for turn in turns if turn.arrivals]
    first = np.array([turn.arrivals[0] for turn in begun])
    prompts = np.array([turn.prompt_tokens for turn in begun])
    cached = np.array([turn.cached_tokens for turn in begun])
    pieces = _pieces(begun)
    return Cumulative(
        _running(first, prompts), _running(first, prompts - cached), _running(pieces.times, pieces.tokens)
    )


def _running(times: Floats, amounts: NDArray[Any]) -> tuple[Floats, Floats]:
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(amounts[order], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Inter-token latency: seconds from one token of a turn to the next, a resend in between included.

    Tokens that arrive together share the time since those before them, as it took the engine that long to make them.
    """

    times: Floats
    """Middle of each bin that has a value."""
    p50: Floats
    p99: Floats
    overall_p50: float
    overall_p99: float


def inter_token_latencies(turns: Sequence[TurnRecord], bins: int = 60) -> Latencies:
    """In `bins` equal bins of time; a gap belongs to the bin in which its later token arrived. NaN overall without gaps."""
    later, gaps, tokens = _gaps(_pieces(turns))
    if not len(gaps):
        return Latencies(_NONE, _NONE, _NONE, np.nan, np.nan)
    start = later.min()
    width = (later.max() - start) / bins or 1.0
    which = np.minimum((later - start) / width, bins - 1).astype(np.int16)
    filled, sizes = np.unique(which, return_counts=True)
    parts = np.split(np.argsort(which, kind="stable"), np.cumsum(sizes)[:-1])
    p50, p99 = np.array([percentiles(gaps[part], tokens[part], (50, 99)) for part in parts]).T
    overall = percentiles(gaps, tokens, (50, 99))
    return Latencies(start + (filled + 0.5) * width, p50, p99, float(overall[0]), float(overall[1]))


def percentiles(values: Floats, counts: Counts, percents: Sequence[float]) -> Floats:
    """Of values of which there are `counts` each, interpolated as `numpy.percentile` does."""
    order = np.argsort(values)
    ends = np.cumsum(counts[order])
    places = np.asarray(percents) / 100 * (ends[-1] - 1)
    below = np.floor(places)
    above = np.minimum(below + 1, ends[-1] - 1)
    low, high = (values[order[np.searchsorted(ends, place, side="right")]] for place in (below, above))
    found: Floats = low + (places - below) * (high - low)
    return found


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Tokens that arrived at the same time, of all turns one after another."""

    times: Floats
    tokens: Counts
    first: NDArray[np.bool_]
    """Whether it is the first one of its turn."""


def _pieces(turns: Sequence[TurnRecord]) -> _Pieces:
    times, tokens, begins = array("d"), array("i"), array("q")
    for turn in turns:
        if turn.arrivals:
            begins.append(len(times))
        pieces = compact(turn.arrivals)
        times.extend(pieces.values)
        tokens.extend(pieces.counts)
    first = np.zeros(len(times), dtype=np.bool_)
    first[np.array(begins, dtype=np.int64)] = True
    return _Pieces(np.asarray(times), np.asarray(tokens), first)


def _gaps(pieces: _Pieces) -> tuple[Floats, Floats, Counts]:
    """(arrival, seconds since the token before, tokens) of all but what came together with the first of its turn."""
    apart = pieces.first | (np.diff(pieces.times, prepend=-np.inf) >= TOGETHER)
    start = np.flatnonzero(apart)
    if not len(start):
        return _NONE, _NONE, np.empty(0, dtype=np.int32)
    times, tokens = pieces.times[start], np.add.reduceat(pieces.tokens, start)
    after = ~pieces.first[start]
    return times[after], (np.diff(times, prepend=0.0) / tokens)[after], tokens[after]


@dataclass(frozen=True, slots=True)
class RoleSpan:
    instance: str
    what: str
    """A role, or `flipping` (leaving its pool until it serves again) or `dead` (also one that was stopped)."""
    start: float
    end: float


def role_spans(run: Run, end: float) -> list[RoleSpan]:
    """What every instance was when, in the order in which the instances appeared."""
    changes: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for change in run.instances:
        known = {"routed": change.role.value, "dead": "dead", "stopped": "dead"}
        what = known.get(change.state.value, "flipping")
        if not changes[change.name] or changes[change.name][-1][1] != what:
            changes[change.name].append((change.time, what))
    spans: list[RoleSpan] = []
    for name, points in changes.items():
        ends = [time for time, _ in points[1:]] + [max(end, points[-1][0])]
        spans += [RoleSpan(name, what, start, stop) for (start, what), stop in zip(points, ends, strict=True)]
    return spans


@dataclass(frozen=True, slots=True)
class Totals:
    sampled: int
    done: int
    dropped: int
    reasons: dict[str, int]
    """Why trajectories were dropped."""
    turns: int
    resends: int
    flips: int
    failed_flips: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    live_seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second while any trajectory was live."""
        return self.output_tokens / self.live_seconds if self.live_seconds > 0 else 0.0

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def totals(run: Run, replayed: Replay) -> Totals:
    ends = list(replayed.ends.values())
    return Totals(
        sampled=len(replayed.stays),
        done=sum(isinstance(end, Done) for end in ends),
        dropped=sum(isinstance(end, Dropped) for end in ends),
        reasons=dict(Counter(end.reason for end in ends if isinstance(end, Dropped)).most_common()),
        turns=len(run.turns),
        resends=replayed.requeued,
        flips=sum(flip.failure is None for flip in run.flips),
        failed_flips=sum(flip.failure is not None for flip in run.flips),
        prompt_tokens=sum(turn.prompt_tokens for turn in run.turns),
        cached_tokens=sum(turn.cached_tokens for turn in run.turns),
        output_tokens=sum(turn.output_tokens for turn in run.turns),
        seconds=replayed.end - replayed.start,
        live_seconds=replayed.live_seconds,
    )


def rewards_by_order(replayed: Replay, buckets: int = 10) -> tuple[Floats, Floats]:
    """(time, mean reward) of consecutive, equally large shares of the finished trajectories: for a run without steps."""
    done = [end for end in replayed.ends.values() if isinstance(end, Done)]
    if not done:
        return np.empty(0), np.empty(0)
    shares = np.array_split(np.array([(end.time, end.reward) for end in done]), min(buckets, len(done)))
    return np.array([share[-1, 0] for share in shares]), np.array([share[:, 1].mean() for share in shares])
