"""What a rollout asks of its engines (paper, section 3: Fig. 1, 3, 10 and 11), from its lifecycle events: pure.

How tokens are placed in time: a prefill counts as a whole when it completes (`DecodeStarted`), also one that repeats a
cancelled attempt; the tokens of a decode are spread evenly over it. What a trajectory that was dropped in the middle of a
decode had generated of that turn is not in the events and does not count.

Which prefill tokens are uncached: with a `Cache` those that the engine computed; a repeated prefill is wholly uncached where
the weights changed at that token, else not at all. Without one (`IDEAL`) those that an infinite cache of the trajectory's
own former context lacks: what `Ready.kept` says, or else what was appended since, or everything where the context became
shorter; never a repeated prefill.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prorsa.lifecycle import (
    DecodeStarted,
    Done,
    Dropped,
    Event,
    Ready,
    Requeued,
    RewardStarted,
    Sampled,
    State,
    ToolStarted,
)
from prorsa.lifecycle.states import TRANSITIONS
from prorsa.report.volumes import Distribution, Floats, Volume, distribution, ratio_spread

MEASURED, IDEAL = "measured", "ideal"
CURVE_POINTS = 101
"""Of the cumulative curves of a step."""
MOST_WINDOWS = 10_000
"""Of a step."""
AT_ONCE = 0.001
"""Seconds. A shorter decode counts as a whole when it ends: its rate would drown the others in rounding errors."""

PARTS = {
    "sandbox": (State.SAMPLED, State.SANDBOX_STARTING),
    "ready queue": (State.READY,),
    "prefill": (State.PREFILL,),
    "decode": (State.DECODE,),
    "tool": (State.TOOL,),
    "reward": (State.REWARD,),
}
"""What a trajectory's time is spent on, and the states that belong to it."""


class BadEvents(Exception):
    """Events that cannot have happened; the message names the event and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TurnCache:
    """What the engine said of one model turn."""

    cached_tokens: int
    """Prompt tokens of the first attempt that were not computed."""
    changes: tuple[int, ...] = ()
    """Before which output tokens the weights changed, counted from 0."""


Cache = Mapping[tuple[str, int], TurnCache]
"""(trajectory, turn) -> what is known of it. A turn that is missing counts as `IDEAL`."""


@dataclass(frozen=True, slots=True)
class StepSpan:
    step: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Tokens so far within a step, at `CURVE_POINTS` equally spaced moments."""

    seconds: tuple[float, ...]
    """Since the step's start."""
    prompt_tokens: tuple[float, ...]
    uncached_tokens: tuple[float, ...]
    decoded_tokens: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Step:
    step: int
    volume: Volume
    curve: Curve
    windows: tuple[Volume, ...]
    """Equal windows from the step's start; the last one may be shorter."""


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Over the trajectories that are done."""

    turns: Distribution
    seconds: Distribution
    """From sampled until done."""
    first_prompt_tokens: Distribution
    context_tokens: Distribution
    """At the end."""
    prompt_tokens: Distribution
    """Full prompts of all turns, each once."""
    appended_tokens: Distribution
    """First prompt and everything that tools appended."""
    output_tokens: Distribution


@dataclass(frozen=True, slots=True)
class Turns:
    """Over all finished model turns."""

    prompt_tokens: Distribution
    appended_tokens: Distribution
    """Since the former context; the first turns are left out."""
    output_tokens: Distribution


@dataclass(frozen=True, slots=True)
class GroupEffect:
    """Intra-class correlations within groups, of the logarithms; None where they are not defined."""

    groups: int
    """With two or more members that are done."""
    turns: float | None
    seconds: float | None
    output_tokens: float | None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the trajectories' time."""

    mean_s: float
    """Of a trajectory that is done."""
    share: float


@dataclass(frozen=True, slots=True)
class Tool:
    seconds: Distribution
    share: float
    """Of the time of all tools."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prefill over the whole run, tokens."""

    prompt_tokens: int
    uncached_tokens: int
    ideal_tokens: int
    """Uncached with an infinite cache of each trajectory's own context. A real cache may do better: prompts are shared within
    a group."""
    repeated_tokens: int
    """Of `prompt_tokens`, prefills that repeat a cancelled attempt."""

    @property
    def share(self) -> float:
        """Of the prompt tokens that a cache had."""
        return 1 - self.uncached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def ideal_share(self) -> float:
        return 1 - self.ideal_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Characterisation:
    window_s: float
    """Width of the windows: as asked for, or wider where they would be more than `MOST_WINDOWS`."""
    cache: str
    """`measured` or `ideal`: what the uncached tokens are."""
    tasks: dict[str, int]
    """Trajectories sampled, by task."""
    sampled: int
    done: int
    dropped: int
    live_mean: float
    """Trajectories that were live, over the time from the first event to the last."""
    live_peak: int
    total: Volume
    trajectories: Trajectories
    turns: Turns
    group_effect: GroupEffect
    time: dict[str, Part]
    """By the names of `PARTS`."""
    tools: dict[str, Tool]
    """By name, the one that took the most time first."""
    reuse: Reuse
    steps: tuple[Step, ...]

    @property
    def step_ratio_spread(self) -> float | None:
        """Over the steps, the largest prefill:decode ratio over the smallest, by full prompts."""
        return ratio_spread(step.volume.ratio for step in self.steps)

    @property
    def step_uncached_ratio_spread(self) -> float | None:
        """The same by uncached tokens."""
        return ratio_spread(step.volume.uncached_ratio for step in self.steps)


def characterise(
    events: Iterable[Event], *, cache: Cache | None = None, steps: Sequence[StepSpan] = (), window_s: float = 10.0
) -> Characterisation:
    """Describe the events. Without `steps` all of them are one step. Raises `BadEvents`."""
    ledger = _Ledger(cache)
    for count, event in enumerate(events, start=1):
        try:
            ledger.apply(event)
        except BadEvents as error:
            raise BadEvents(f"event {count}, {event}: {error}") from None
    if not ledger.lives:
        raise BadEvents("there is no event to describe")
    return _Description(ledger, steps, window_s).characterisation()


@dataclass(slots=True)
class _Life:
    """A trajectory while its events go by."""

    group: str
    sampled: float
    since: float
    state: State = State.SAMPLED
    spent: list[float] = field(default_factory=lambda: [0.0] * len(State))
    turn: int = 0
    tool: str = ""
    turn_prompt: int = 0
    """Prompt of the present turn."""
    prompt: int = 0
    """The same of the present attempt: with what it retains of former ones."""
    context: int = 0
    """After the last turn."""
    appended: int = 0
    """New in the present turn's prompt."""
    prefilled: bool = False
    """Whether a prefill of the present turn was completed."""
    first_prompt: int = 0
    prompts: int = 0
    appendeds: int = 0
    outputs: int = 0


class _Ledger:
    """The columns that everything is worked out from; 8 bytes a number, however long the run."""

    def __init__(self, cache: Cache | None) -> None:
        self.cache = cache
        self.lives: dict[str, _Life] = {}
        self.tasks: Counter[str] = Counter()
        self.prefills = _Columns(3)
        """Completion time, full prompt, uncached."""
        self.decodes = _Columns(3)
        """Start, end, tokens."""
        self.turns = _Columns(4)
        """Index, prompt, appended, output."""
        self.done = _Columns(7)
        """As the fields of `Trajectories`."""
        self.groups: list[str] = []
        """Of each trajectory in `done`."""
        self.spent: list[float] = [0.0] * len(State)
        """By state, of the trajectories in `done`."""
        self.tools: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self.stays = _Columns(2)
        """Sampled and ended, of those that ended."""
        self.dropped = 0
        self.ideal_tokens = 0
        self.repeated_tokens = 0
        self.start, self.end = math.inf, -math.inf
        """Of all events."""

    def apply(self, event: Event) -> None:
        if type(event) is Sampled:
            self._sample(event)
            return
        life = self.lives.get(event.trajectory)
        if life is None:
            raise BadEvents("no such trajectory was sampled")
        sources, after = TRANSITIONS[type(event)]
        if life.state not in sources:
            allowed = ", ".join(state.name for state in sorted(sources))
            raise BadEvents(f"the trajectory is in {life.state.name}, and this may only come from {allowed}")
        elapsed = event.time - life.since
        if not elapsed >= 0:
            raise BadEvents(f"its time is before the trajectory's last event, {life.since}")
        life.spent[life.state] += elapsed
        self._account(event, life, elapsed)
        life.state, life.since = after, event.time
        self.end = max(self.end, event.time)

    def _sample(self, event: Sampled) -> None:
        if event.trajectory in self.lives:
            raise BadEvents("a trajectory is sampled once")
        self.lives[event.trajectory] = _Life(event.group, event.time, event.time)
        self.tasks[event.task] += 1
        self.start, self.end = min(self.start, event.time), max(self.end, event.time)

    def _account(self, event: Event, life: _Life, elapsed: float) -> None:
        match event:
            case Ready():
                self._ready(event, life, elapsed)
            case DecodeStarted():
                self._prefilled(event, life)
            case Requeued():
                self._decoded(event.time, event.tokens, life)
                life.prompt = event.tokens
            case ToolStarted():
                self._end_turn(event.time, event.tokens, life)
                life.tool = event.tool
            case RewardStarted() if life.state is State.DECODE:
                self._end_turn(event.time, event.tokens, life)
            case Done():
                self._finish(event.time, life)
            case Dropped():
                self.dropped += 1
                self.stays.add(life.sampled, event.time)

    def _ready(self, event: Ready, life: _Life, elapsed: float) -> None:
        if event.tokens <= 0:
            raise BadEvents("a prompt has at least one token")
        if life.state is State.TOOL:
            self.tools[life.tool].append(elapsed)
        else:
            life.first_prompt = event.tokens
        try:
            life.appended = event.tokens - event.extends(life.context)
        except ValueError as error:
            raise BadEvents(str(error)) from None
        life.turn_prompt = life.prompt = event.tokens
        life.prefilled = False

    def _prefilled(self, event: DecodeStarted, life: _Life) -> None:
        ideal = 0 if life.prefilled else life.appended
        self.ideal_tokens += ideal
        self.repeated_tokens += life.prompt if life.prefilled else 0
        self.prefills.add(event.time, life.prompt, self._uncached(event.trajectory, life, ideal))
        life.prefilled = True

    def _uncached(self, trajectory: str, life: _Life, ideal: int) -> int:
        known = self.cache.get((trajectory, life.turn)) if self.cache is not None else None
        if known is None:
            return ideal
        if life.prefilled:
            return life.prompt if life.prompt - life.turn_prompt in known.changes else 0
        if not 0 <= known.cached_tokens <= life.prompt:
            raise BadEvents(f"turn {life.turn} has {known.cached_tokens} cached of {life.prompt} prompt tokens")
        return life.prompt - known.cached_tokens

    def _decoded(self, time: float, tokens: int, life: _Life) -> None:
        """The attempt's prefill or decode ends at `time` with a context of `tokens`."""
        made = tokens - life.prompt
        if made < 0 or (made and life.state is State.PREFILL):
            raise BadEvents(f"its context cannot be {tokens} tokens, the prompt had {life.prompt}")
        if made:
            self.decodes.add(life.since, time, made)

    def _end_turn(self, time: float, tokens: int, life: _Life) -> None:
        self._decoded(time, tokens, life)
        output = tokens - life.turn_prompt
        self.turns.add(life.turn, life.turn_prompt, life.appended, output)
        life.prompts += life.turn_prompt
        life.appendeds += life.appended
        life.outputs += output
        life.context = tokens
        life.turn += 1

    def _finish(self, time: float, life: _Life) -> None:
        self.done.add(
            life.turn,
            time - life.sampled,
            life.first_prompt,
            life.context,
            life.prompts,
            life.appendeds,
            life.outputs,
        )
        self.groups.append(life.group)
        self.stays.add(life.sampled, time)
        for state, seconds in enumerate(life.spent):
            self.spent[state] += seconds


class _Columns:
    """Rows of numbers, kept by column."""

    def __init__(self, count: int) -> None:
        self._columns = tuple(array("d") for _ in range(count))

    def add(self, *values: float) -> None:
        for column, value in zip(self._columns, values, strict=True):
            column.append(value)

    def __getitem__(self, index: int) -> Floats:
        return np.array(self._columns[index], dtype=np.float64)


class _Flows:
    """How many tokens there were until any moment."""

    def __init__(self, ledger: _Ledger) -> None:
        self._start = ledger.start
        times = ledger.prefills[0]
        self._prompts = _Lumps(times, ledger.prefills[1])
        self._uncached = _Lumps(times, ledger.prefills[2])
        starts, ends, tokens = (ledger.decodes[index] for index in range(3))
        at_once = ends - starts < AT_ONCE
        self._instant = _Lumps(ends[at_once], tokens[at_once])
        self._spread = _Ramps(starts[~at_once], ends[~at_once], tokens[~at_once])

    def until(self, times: Floats) -> tuple[Floats, Floats, Floats]:
        """(full prompts, uncached, decoded) at or before each time. The run's first moment comes before it."""
        times = np.where(times > self._start, times, -np.inf)
        return self._prompts(times), self._uncached(times), self._instant(times) + self._spread(times)

    def volume(self, start: float, end: float) -> Volume:
        return self.volumes(np.array([start, end]))[0]

    def volumes(self, bounds: Floats) -> list[Volume]:
        """Between each bound and the next one."""
        parts = [np.round(np.diff(column), 3) for column in self.until(bounds)]
        return [Volume(*(float(value) for value in row)) for row in zip(bounds, bounds[1:], *parts, strict=False)]


class _Lumps:
    def __init__(self, times: Floats, amounts: Floats) -> None:
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        self._totals = np.concatenate([[0.0], np.cumsum(amounts[order])])

    def __call__(self, times: Floats) -> Floats:
        totals: Floats = self._totals[np.searchsorted(self._times, times, side="right")]
        return totals


class _Ramps:
    """Amounts that each come in evenly between a start and an end. n log n in their number."""

    def __init__(self, starts: Floats, ends: Floats, amounts: Floats) -> None:
        rates = amounts / (ends - starts)
        times = np.concatenate([starts, ends])
        order = np.argsort(times, kind="stable")
        self._times = times[order]
        rate = np.cumsum(np.concatenate([rates, -rates])[order])
        self._totals = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(self._times))]) if len(times) else times

    def __call__(self, times: Floats) -> Floats:
        if not len(self._times):
            return np.zeros(len(times))
        totals: Floats = np.interp(times, self._times, self._totals)
        return totals


class _Description:
    def __init__(self, ledger: _Ledger, steps: Sequence[StepSpan], window_s: float) -> None:
        self._ledger = ledger
        self._flows = _Flows(ledger)
        self._spans = steps or [StepSpan(1, ledger.start, ledger.end)]
        longest = max(span.end - span.start for span in self._spans)
        self._window_s = max(window_s, longest / MOST_WINDOWS)

    def characterisation(self) -> Characterisation:
        ledger = self._ledger
        live_mean, live_peak = self._live()
        return Characterisation(
            window_s=self._window_s,
            cache=IDEAL if ledger.cache is None else MEASURED,
            tasks=dict(ledger.tasks),
            sampled=len(ledger.lives),
            done=len(ledger.groups),
            dropped=ledger.dropped,
            live_mean=live_mean,
            live_peak=live_peak,
            total=self._flows.volume(ledger.start, ledger.end),
            trajectories=Trajectories(*(distribution(ledger.done[index]) for index in range(7))),
            turns=self._turns(),
            group_effect=self._group_effect(),
            time=self._time(),
            tools=self._tools(),
            reuse=self._reuse(),
            steps=tuple(self._step(span) for span in self._spans),
        )

    def _live(self) -> tuple[float, int]:
        ledger = self._ledger
        open_ends = [life.sampled for life in ledger.lives.values() if life.state.live]
        starts = np.concatenate([ledger.stays[0], open_ends])
        ends = np.concatenate([ledger.stays[1], np.full(len(open_ends), ledger.end)])
        seconds = ledger.end - ledger.start
        # Who ends at a moment makes room for who starts then.
        changes = np.concatenate([-np.ones(len(ends)), np.ones(len(starts))])
        order = np.argsort(np.concatenate([ends, starts]), kind="stable")
        peak = int(np.cumsum(changes[order]).max())
        return (float((ends - starts).sum()) / seconds if seconds > 0 else float(len(starts))), max(peak, 1)

    def _turns(self) -> Turns:
        turns = self._ledger.turns
        return Turns(
            prompt_tokens=distribution(turns[1]),
            appended_tokens=distribution(turns[2][turns[0] > 0]),
            output_tokens=distribution(turns[3]),
        )

    def _group_effect(self) -> GroupEffect:
        groups, done = self._ledger.groups, self._ledger.done
        with np.errstate(divide="ignore"):
            turns, seconds, outputs = (intra_class_correlation(np.log(done[index]), groups) for index in (0, 1, 6))
        several = sum(count > 1 for count in Counter(groups).values())
        return GroupEffect(several, turns, seconds, outputs)

    def _time(self) -> dict[str, Part]:
        spent, done = self._ledger.spent, len(self._ledger.groups)
        total = sum(spent)
        seconds = {name: sum(spent[state] for state in states) for name, states in PARTS.items()}
        return {
            name: Part(value / done if done else 0.0, value / total if total else 0.0)
            for name, value in seconds.items()
        }

    def _tools(self) -> dict[str, Tool]:
        sums = {name: sum(times) for name, times in self._ledger.tools.items()}
        total = sum(sums.values())
        return {
            name: Tool(distribution(np.array(self._ledger.tools[name])), sums[name] / total if total else 0.0)
            for name in sorted(sums, key=lambda name: (-sums[name], name))
        }

    def _reuse(self) -> Reuse:
        ledger = self._ledger
        full, uncached = (int(ledger.prefills[index].sum()) for index in (1, 2))
        return Reuse(full, uncached, ledger.ideal_tokens, ledger.repeated_tokens)

    def _step(self, span: StepSpan) -> Step:
        count = max(1, int(np.ceil((span.end - span.start) / self._window_s - 1e-9)))
        bounds = np.append(span.start + self._window_s * np.arange(count), span.end)
        return Step(
            step=span.step,
            volume=self._flows.volume(span.start, span.end),
            curve=self._curve(span),
            windows=tuple(self._flows.volumes(bounds)),
        )

    def _curve(self, span: StepSpan) -> Curve:
        times = np.linspace(span.start, span.end, CURVE_POINTS)
        columns = (times, *self._flows.until(times))
        return Curve(*(tuple(np.round(column - column[0], 3).tolist()) for column in columns))


def intra_class_correlation(values: Floats, groups: Sequence[str]) -> float | None:
    """ICC(1) of a one-way analysis of variance: the share of the variance that is between groups; below 0 is possible.

    Groups may differ in size (Donner, 1986). None where it is not defined: no two groups, no group with two members, values
    that are all the same or not finite.
    """
    names, which = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    sizes = np.bincount(which, minlength=len(names)).astype(float)
    count, within = len(values), len(values) - len(names)
    if len(names) < 2 or within < 1 or not np.isfinite(values).all() or np.ptp(values) == 0:
        return None
    means = np.bincount(which, weights=values) / sizes
    between_ms = float((sizes * (means - values.mean()) ** 2).sum()) / (len(names) - 1)
    within_ms = float(((values - means[which]) ** 2).sum()) / within
    size = (count - float((sizes**2).sum()) / count) / (len(names) - 1)
    return (between_ms - within_ms) / (between_ms + (size - 1) * within_ms)
