"""The forecast beyond the paper's: every trajectory's chain of stages, with what is left of each given how far it has got.

From one snapshot, the numbers that are expected to pass through every stage are worked out on a grid of time: turns that end,
tools that return, requests that queue, prefill and decode, and come back, as often as fits. Learnt online are the survival
curves of the turns' lengths, the tools, the starts of sandboxes and the rewards, the chance that a turn is a trajectory's
last, and the speeds of decode and prefill. Task, tool, turn and group condition them as far as there are samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.admissions import PrefillTime
from prorsa.forecast.backoff import Ema, Key, load_bucket, load_buckets
from prorsa.forecast.cells import Cells
from prorsa.forecast.contexts import Contexts
from prorsa.forecast.durations import Floats
from prorsa.forecast.flow import REQUESTS, TOKENS, Grid, Passed, Stages, Turns, convolved, decoding, pass_through
from prorsa.forecast.forecast import Forecast
from prorsa.forecast.groups import Endings, GroupLengths
from prorsa.forecast.hazards import Hazards, bins_of
from prorsa.forecast.injection import Injection
from prorsa.forecast.launches import Launches, elapsed
from prorsa.forecast.lengths import PromptLengths
from prorsa.forecast.measure import WindowMeter
from prorsa.forecast.work import AHEAD, SLICES, Work
from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import MODES, Snapshot, Transition
from prorsa.lifecycle.states import State

BINS = 12
"""Bins of the grid in a horizon; it reaches `AHEAD` horizons."""
LAUNCH_TIMES = 8
"""The sampler's launches are worked out at so many moments of a horizon."""
SPEEDS = 8
"""Classes of decode speed in which it doubles."""


class DecodeSpeed:
    """Tokens/s of a decode by instance: the tokens of the last turns over the time that they took."""

    FORGET = 1 / 64

    def __init__(self) -> None:
        self._sums: dict[str | None, tuple[float, float]] = {}

    def add(self, instance: str, tokens: int, seconds: float) -> None:
        for key in (instance, None):
            before = self._sums.get(key, (0.0, 0.0))
            kept = 1.0 - self.FORGET
            self._sums[key] = (kept * before[0] + tokens, kept * before[1] + seconds)

    def of(self, instance: str | None = None) -> float:
        """Of all instances where nothing is known of this one; 0 where no turn has ended."""
        tokens, seconds = self._sums.get(instance) or self._sums.get(None, (0.0, 0.0))
        return tokens / seconds if seconds > 0.0 else 0.0


@dataclass(frozen=True, slots=True)
class _Coming:
    """First requests of the trajectories of one state, [task, bin] each."""

    volume: Floats
    """[2, task, bin]."""
    new: Floats
    """[bin]: tokens that have to be computed."""

    def tokens(self, bins: int) -> float:
        return float(self.volume[TOKENS, :, :bins].sum())


class SurvivalForecaster:
    """`Forecaster`. Learns from `observe`, and reads a snapshot without changing it."""

    def __init__(
        self,
        injection: Injection | None,
        prefill_tokens_per_s: float,
        kv_footprint: Callable[[Floats], Floats] = lambda tokens: tokens,
    ) -> None:
        """As `LifecycleForecaster` takes them."""
        self.launches = Launches(injection)
        self._kv_footprint = kv_footprint
        self._contexts = Contexts()
        self._outputs = Hazards()
        self._groups = GroupLengths()
        self._endings = Endings()
        self._tools = Hazards()
        self._starts = Hazards()
        self._lengths = PromptLengths()
        self._speed = DecodeSpeed()
        self._prefill_time = PrefillTime(prefill_tokens_per_s)
        self._latency = Ema(1 / 64)
        self._first_new = Ema(1 / 256)
        self._joining: dict[str, int] = {}
        """Tokens to compute of the requests in PREFILL."""
        self._meter = WindowMeter()

    # Learning.

    def observe(self, transition: Transition) -> None:
        self._meter.observe(transition)
        self.launches.observe(transition)
        event = transition.event
        name = event.trajectory
        if isinstance(event, e.PrefillStarted):
            new = self._contexts.uncached(name, transition.group, transition.tokens)
            self._joining[name] = new
            if not self._contexts.cached(name) and transition.turn == 0:
                self._first_new.add(new)
        elif isinstance(event, e.DecodeStarted):
            self._prefilled(transition)
        elif isinstance(event, e.Ready):
            self._returned(transition)
        elif transition.before is State.DECODE and isinstance(event, e.ToolStarted | e.RewardStarted):
            self._turn_ended(transition, event.tokens)
        elif transition.before is State.TOOL and isinstance(event, e.RewardStarted):
            self._tools.add((transition.task, transition.tool or ""), math.inf)
        if transition.before is State.PREFILL:
            self._joining.pop(name, None)
        if self._contexts.observe(transition):
            self._groups.forget(transition.group)
            self._endings.forget(transition.group)

    def caches_lost(self) -> None:
        self._contexts.caches_lost()

    def _prefilled(self, transition: Transition) -> None:
        instance = transition.instance or ""
        time = transition.event.time
        joined = time - transition.elapsed
        if joined >= self._prefill_time.free_since(instance):
            self._latency.add(transition.elapsed)
        self._prefill_time.finished(instance, self._joining.get(transition.event.trajectory, 1), joined, time)

    def _returned(self, transition: Transition) -> None:
        if transition.before is State.TOOL:
            tool = transition.tool or ""
            self._tools.add((transition.task, tool), transition.elapsed)
            self._lengths.add_appended(transition.task, tool, transition.tokens - transition.tokens_before)
            return
        self._lengths.add_first(transition.task, transition.tokens)
        self.launches.started(transition)
        # One that skips a stage is of a class of its own.
        key = (transition.mode or "", transition.image or "")
        self._starts.add(key, transition.elapsed)

    def _turn_ended(self, transition: Transition, tokens: int) -> None:
        name, task, group = transition.event.trajectory, transition.task, transition.group
        output = max(tokens - self._contexts.start(name), 1)
        usual = self._groups.add(task, group, output)
        self._outputs.add((task, load_bucket(transition.turn + 1)), output / usual)
        self._endings.add(task, group, transition.turn, transition.after is State.REWARD)
        made = tokens - self._contexts.cached(name)
        self._speed.add(transition.instance or "", max(made, 0), transition.elapsed)

    # Forecasting.

    def forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        for _before, _measured in self._meter.finished(snapshot.time):
            pass
        made = _Outlook(self, snapshot, horizon, len(prefill_instances)).forecast()
        self._meter.open(made)
        return made


class _Outlook:
    """One forecast."""

    def __init__(self, learnt: SurvivalForecaster, snapshot: Snapshot, horizon: float, instances: int) -> None:
        self._learnt = learnt
        self._snapshot = snapshot
        self._horizon = horizon
        self._instances = instances
        self._grid = Grid(int(BINS * AHEAD), horizon / BINS)
        self._tasks = snapshot.names.tasks or ("",)
        state = snapshot.state
        self._rows = {one: np.flatnonzero(state == one) for one in State if one.live}
        self._queued = np.concatenate((self._rows[State.PREFILL], self._rows[State.READY]))
        self._goes_on = 1.0 - learnt._endings.chances(
            self._tasks, snapshot.names.groups or ("",), snapshot.task, snapshot.group, snapshot.turn
        )
        self._factors = learnt._groups.factors(snapshot.names.groups or ("",))
        self._line = learnt._prefill_time.line()
        self._every = np.arange(len(self._tasks))
        self._later_goes_on = self._by_task(snapshot.task, self._goes_on, 1.0)
        self._appended = np.array([learnt._lengths.appended_by_any(task) for task in self._tasks])

    def forecast(self) -> Forecast:
        snapshot, grid, learnt = self._snapshot, self._grid, self._learnt
        decode = self._rows[State.DECODE]
        in_tools = self._in_tools()
        starting = self._starting()
        launched = self._launched()
        self._decode()
        back = self._back_from_decode()
        sources = (in_tools, starting, launched, back)
        volume = np.sum([source.volume for source in sources], axis=0)
        new = np.sum([source.new for source in sources], axis=0)
        queued_new = self._queued_new()
        fixed, slope = self._line
        stages = Stages(
            grid=grid,
            coming=volume,
            coming_work=fixed * volume[REQUESTS].sum(axis=0) + slope * new,
            queued=self._volume(self._queued),
            queued_work=fixed * len(self._queued) + slope * queued_new,
            queued_turns=self._queued_turns(),
            turns=Turns(self._fresh_ends, self._later_goes_on, self._speed),
            tools=self._tool_kernel,
            appended=self._appended,
            later_work=fixed + slope * (self._appended + 1.0),
            instances=float(self._instances),
            latency=learnt._latency.value,
        )
        passed = pass_through(stages)
        tokens = snapshot.tokens
        ready, inflight = (float(tokens[self._rows[state]].sum()) for state in (State.READY, State.PREFILL))
        parts = [source.tokens(BINS) for source in sources]
        parts[3] += float(passed.later[TOKENS, :, :BINS].sum())
        admitted_old = passed.admitted_queued[:, :, :BINS].sum(axis=(1, 2))
        admitted_new = passed.admitted_new[:, :, :BINS].sum(axis=(1, 2))
        admitted = admitted_old + admitted_new
        kv = self._kv(passed, stages)
        later_new = float(passed.later[REQUESTS, :, :BINS].sum(axis=1) @ (self._appended + 1.0))
        ends = (
            self._ends[REQUESTS, :, :BINS].sum()
            + convolved(passed.admitted_queued[REQUESTS], stages.queued_turns.ends)[:, :BINS].sum()
            + convolved(passed.admitted_new[REQUESTS], stages.turns.ends)[:, :BINS].sum()
        )
        return Forecast(
            time=snapshot.time,
            horizon=self._horizon,
            sampler=parts[2],
            startup=parts[1],
            ready=ready,
            tool=parts[0],
            inflight=inflight,
            bias=1.0,
            prefill_tokens=ready + inflight + sum(parts),
            admitted_tokens=float(admitted[TOKENS]),
            admitted_kv=self._footprint(admitted[REQUESTS], admitted[TOKENS]),
            decode_kv=float(learnt._kv_footprint(tokens[decode].astype(np.float64)).sum()),
            from_decode=parts[3],
            admitted_backlog=float(admitted_old[TOKENS]),
            uncached_tokens=queued_new + float(new[:BINS].sum()) + later_new,
            completed_turns=float(ends),
            kv_end=float(kv[BINS - 1]),
            kv_peak=float(max(kv[:BINS].max(), learnt._kv_footprint(self._context).sum())),
            work=self._work(sources, queued_new),
        )

    # The stages now.

    def _in_tools(self) -> _Coming:
        rows, snapshot, learnt = self._rows[State.TOOL], self._snapshot, self._learnt
        tools = snapshot.names.tools or ("",)
        seconds = elapsed(snapshot, rows)
        cells = Cells([snapshot.task[rows], snapshot.tool[rows], bins_of(seconds)])
        count = cells.sums()
        reached = cells.sums(seconds) / np.maximum(count, 1.0)
        keys, which = _classes(cells, lambda task, tool: (self._tasks[task], tools[tool]))
        self._tool_curves(cells, count, reached)
        context = snapshot.tokens[rows].astype(np.float64)
        lost = snapshot.since[rows] <= learnt._contexts.lost_at
        uncached = cells.sums(np.where(lost, context, 1.0))
        if not keys:
            return self._nothing()
        appended = np.array([self._result(str(task), str(tool)) for task, tool in keys])[which]
        curves = learnt._tools.curves(keys, which, reached, count)
        ends = curves.ends(which, reached, np.full(len(cells), self._grid.step), self._grid.bins)
        weights = np.array([count, cells.sums(context) + count * appended])
        return _Coming(self._through(cells.columns[0], weights, ends), (uncached + count * appended) @ ends)

    def _result(self, task: str, tool: str) -> float:
        found = self._learnt._lengths.appended(task, tool)
        return found.value if found else 0.0

    def _tool_curves(self, cells: Cells, count: Floats, reached: Floats) -> None:
        """The kernel of whatever tool comes next, by task."""
        keys: list[Key] = [(task,) for task in self._tasks]
        curves = self._learnt._tools.curves(keys, cells.columns[0].astype(np.intp), reached, count)
        none = np.zeros(len(keys))
        step = np.full(len(keys), self._grid.step)
        self._tool_kernel = curves.kernel(self._every, none, step, self._grid.bins)
        self._away = curves.within(self._every, AHEAD * self._horizon)

    def _starting(self) -> _Coming:
        rows = np.concatenate((self._rows[State.SAMPLED], self._rows[State.SANDBOX_STARTING]))
        snapshot, learnt = self._snapshot, self._learnt
        if not len(rows):
            return self._nothing()
        images = snapshot.names.images
        seconds = elapsed(snapshot, rows)
        cells = Cells([snapshot.mode[rows], snapshot.image[rows], bins_of(seconds), snapshot.task[rows]])
        count = cells.sums()
        reached = cells.sums(seconds) / count
        keys, which = _classes(
            cells, lambda mode, image: (MODES[mode] if mode >= 0 else "", images[image] if image >= 0 else "")
        )
        curves = learnt._starts.curves(keys, which, reached, count)
        ends = curves.ends(which, reached, np.full(len(cells), self._grid.step), self._grid.bins)
        known = snapshot.tokens[rows].astype(np.float64)
        expected = np.array([learnt._lengths.first(task) for task in self._tasks])
        prompts = np.where(known > 0, known, expected[snapshot.task[rows]])
        groups = snapshot.group[rows]
        cached = np.array([learnt._contexts.has_prompt(group) for group in snapshot.names.groups])[groups]
        # Of a group whose prompt nobody has computed yet, one member does.
        siblings = np.bincount(groups)[groups]
        new = cells.sums(np.where(cached, 1.0, prompts / siblings))
        weights = np.array([count, cells.sums(prompts)])
        return _Coming(self._through(cells.columns[3], weights, ends), new @ ends)

    def _launched(self) -> _Coming:
        learnt, grid = self._learnt, self._grid
        if learnt.launches.injection is None:
            return self._nothing()
        delay = learnt.launches.dispatch_delay
        times = np.linspace(0.0, AHEAD * self._horizon, int(AHEAD * LAUNCH_TIMES) + 1)[1:]
        launches = learnt.launches.within(self._snapshot, self._rows[State.REWARD], times)
        edges = np.maximum(np.arange(grid.bins + 1) * grid.step - delay, 0.0)
        requests = np.diff(np.interp(edges, np.concatenate(([0.0], times)), np.concatenate(([0.0], launches))))
        volume = np.zeros((2, len(self._tasks), grid.bins))
        # Of whichever task: the most frequent one stands for all.
        task = int(np.argmax(np.bincount(self._snapshot.task, minlength=len(self._tasks))))
        volume[REQUESTS, task] = requests
        volume[TOKENS, task] = requests * learnt._lengths.first()
        return _Coming(volume, requests * learnt._first_new.value)

    def _decode(self) -> None:
        """Turns that end of the trajectories that decode now."""
        rows, snapshot, learnt, grid = self._rows[State.DECODE], self._snapshot, self._learnt, self._grid
        names = snapshot.names.instances or ("",)
        speeds = np.array([learnt._speed.of(name) for name in names])[snapshot.instance[rows]]
        seconds = elapsed(snapshot, rows)
        starts = learnt._contexts.starts([snapshot.ids[row] for row in rows.tolist()])
        reported = snapshot.tokens[rows].astype(np.float64)
        before = learnt._contexts.cached
        attempt = np.array([before(snapshot.ids[row]) for row in rows.tolist()], dtype=np.float64)
        # Tokens may be reported late; what has been made since follows from the speed.
        context = np.maximum(reported, attempt + speeds * seconds)
        self._context = context
        self._speed = float(speeds.mean()) if len(rows) else learnt._speed.of()
        factors = self._factors[snapshot.group[rows]]
        made = np.maximum(context - starts, 0.0) / factors
        pace = speeds / factors
        cells = self._turn_cells(rows, made, pace)
        count = cells.sums()
        full = np.maximum(count, 1.0)
        reached, step = cells.sums(made) / full, cells.sums(pace) / full * grid.step
        self._fresh(cells, count, reached)
        shape = (2, len(self._tasks), grid.bins)
        self._ends, self._going, self._stays = np.zeros(shape), np.zeros(shape), np.zeros((2, grid.bins))
        self._left = 0.0
        if not len(rows):
            return
        keys, which = _classes(cells, lambda task, bucket: (self._tasks[task], bucket))
        curves = learnt._outputs.curves(keys, which, reached, count)
        ends = curves.ends(which, reached, step, grid.bins)
        goes_on = self._goes_on[rows]
        task = cells.columns[0]
        for into, weight in ((self._ends, np.ones(len(rows))), (self._going, goes_on)):
            weights = np.array([cells.sums(weight), cells.sums(weight * context), cells.sums(weight * speeds)])
            through = self._through(task, weights, ends)
            into[:] = through[:2]
            into[TOKENS] += through[2] * grid.middles
        after = 1.0 - np.cumsum(ends, axis=1)
        self._stays[REQUESTS] = count @ after
        self._stays[TOKENS] = cells.sums(context) @ after + (cells.sums(speeds) @ after) * grid.middles
        usual = cells.sums(factors) / count
        self._left = float(count @ (curves.left(which, reached) * usual) / count.sum())

    def _turn_cells(self, rows: NDArray[np.intp], made: Floats, pace: Floats) -> Cells:
        buckets = load_buckets(self._snapshot.turn[rows] + 1)
        paces = np.rint(SPEEDS * np.log2(np.maximum(pace, 2.0**-10))).astype(np.int64)
        return Cells([self._snapshot.task[rows], buckets, bins_of(made), paces])

    def _fresh(self, cells: Cells, count: Floats, reached: Floats) -> None:
        """Turns that are to come, by task."""
        keys: list[Key] = [(task,) for task in self._tasks]
        curves = self._learnt._outputs.curves(keys, cells.columns[0].astype(np.intp), reached, count)
        none = np.zeros(len(keys))
        step = np.full(len(keys), self._speed * self._grid.step)
        self._fresh_ends = curves.kernel(self._every, none, step, self._grid.bins)
        self._outputs = curves.left(self._every, none)

    def _back_from_decode(self) -> _Coming:
        ending = self._going.copy()
        ending[TOKENS] += self._appended[:, None] * ending[REQUESTS]
        volume = convolved(ending, self._tool_kernel)
        return _Coming(volume, (self._appended + 1.0) @ volume[REQUESTS])

    def _queued_turns(self) -> Turns:
        rows, snapshot, learnt = self._queued, self._snapshot, self._learnt
        if not len(rows):
            return Turns(self._fresh_ends, self._later_goes_on, self._speed)
        starts = learnt._contexts.starts([snapshot.ids[row] for row in rows.tolist()])
        factors = self._factors[snapshot.group[rows]]
        made = np.maximum(snapshot.tokens[rows] - starts, 0.0) / factors
        pace = self._speed / factors
        cells = self._turn_cells(rows, made, pace)
        count = cells.sums()
        reached, step = cells.sums(made) / count, cells.sums(pace) / count * self._grid.step
        keys, which = _classes(cells, lambda task, bucket: (self._tasks[task], bucket))
        curves = learnt._outputs.curves(keys, which, reached, count)
        ends = curves.kernel(which, reached, step, self._grid.bins)
        number = np.bincount(snapshot.task[rows], minlength=len(self._tasks))
        kernel = self._through(cells.columns[0], count[None], ends)[0] / np.maximum(number, 1)[:, None]
        goes_on = self._by_task(snapshot.task[rows], self._goes_on[rows], 0.0)
        return Turns(kernel, goes_on, self._speed)

    def _queued_new(self) -> float:
        snapshot, contexts = self._snapshot, self._learnt._contexts
        groups, ids = snapshot.names.groups, snapshot.ids
        rows = self._queued
        columns = (rows, snapshot.group[rows], snapshot.tokens[rows])
        return float(
            sum(
                contexts.uncached(ids[row], groups[group], tokens)
                for row, group, tokens in zip(*(column.tolist() for column in columns), strict=True)
            )
        )

    # What comes of it.

    def _kv(self, passed: Passed, stages: Stages) -> Floats:
        """KV-cache footprint in decode at the end of each bin."""
        requests, tokens = self._stays + decoding(passed, stages)
        return np.array([self._footprint(*point) for point in zip(requests.tolist(), tokens.tolist(), strict=True)])

    def _work(self, sources: Sequence[_Coming], queued_new: float) -> Work:
        queued, decoding = len(self._queued), len(self._rows[State.DECODE])
        volume = np.sum([source.volume for source in sources], axis=0)
        requests = volume[REQUESTS].sum()
        new = float(np.sum([source.new for source in sources])) / max(requests, 1e-9)
        others = np.sum([source.volume[REQUESTS] for source in sources[:3]], axis=(0, 1))
        queued_tokens = float(self._snapshot.tokens[self._queued].sum())
        mix = self._mix()
        chance, away = self._away
        again = mix * self._later_goes_on * chance
        return Work(
            queued=queued,
            queued_new=queued_new / max(queued, 1),
            queued_prefix=(queued_tokens - queued_new) / max(queued, 1),
            decoding=decoding,
            decoding_left=self._memoryless_left(decoding),
            decoding_context=float(self._context.mean()) if decoding else 0.0,
            returns=tuple(others.reshape(SLICES, -1).sum(axis=1).tolist()),
            ahead=AHEAD * self._horizon,
            turn_new=new,
            turn_prefix=max(float(volume[TOKENS].sum()) / max(requests, 1e-9) - new, 0.0),
            turn_output=float(mix @ self._outputs),
            again=float(again.sum()),
            away=float(again @ away / max(again.sum(), 1e-9)),
            token_s=1.0 / self._speed if self._speed > 0.0 else 0.0,
            prefill_s=self._line[0] + self._line[1] * new if self._learnt._latency.count else 0.0,
        )

    def _memoryless_left(self, decoding: int) -> float:
        stay = float(self._stays[REQUESTS, BINS - 1]) / max(decoding, 1)
        if not 0.0 < stay < 1.0:
            return 0.0 if not decoding else self._left
        return min(self._speed * self._horizon / -math.log(stay), self._left)

    def _mix(self) -> Floats:
        """Share of each task in the live trajectories."""
        counts = np.bincount(self._snapshot.task, minlength=len(self._tasks)).astype(np.float64)
        mix: Floats = counts / max(float(counts.sum()), 1.0)
        return mix

    def _footprint(self, requests: float, tokens: float) -> float:
        if requests <= 0.0:
            return 0.0
        return requests * float(self._learnt._kv_footprint(np.array([tokens / requests]))[0])

    # Helpers.

    def _volume(self, rows: NDArray[np.intp]) -> Floats:
        task = self._snapshot.task[rows]
        tokens = self._snapshot.tokens[rows].astype(np.float64)
        size = len(self._tasks)
        return np.array([np.bincount(task, minlength=size), np.bincount(task, tokens, size)], dtype=np.float64)

    def _by_task(self, task: NDArray[np.int32], values: Floats, otherwise: float) -> Floats:
        """Mean of the values of each task."""
        size = len(self._tasks)
        count = np.bincount(task, minlength=size)
        means: Floats = np.where(count > 0, np.bincount(task, values, size) / np.maximum(count, 1), otherwise)
        return means

    def _through(self, task: NDArray[np.int64], weights: Floats, ends: Floats) -> Floats:
        """[weight, task, bin]: the weighted sum of the rows of `ends` that belong to each task."""
        matrix = np.zeros((len(weights), len(self._tasks), len(task)))
        matrix[:, task, np.arange(len(task))] = weights
        through: Floats = matrix @ ends
        return through

    def _nothing(self) -> _Coming:
        return _Coming(np.zeros((2, len(self._tasks), self._grid.bins)), np.zeros(self._grid.bins))


def _classes(cells: Cells, key: Callable[[int, int], Key]) -> tuple[list[Key], NDArray[np.intp]]:
    """(the classes that the first two columns of the cells name, which of them each cell is of)."""
    classes = Cells(cells.columns[:2])
    keys = [key(*codes) for codes in zip(*(column.tolist() for column in classes.columns), strict=True)]
    return keys, classes.cell
