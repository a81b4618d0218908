"""One forecast from one snapshot: who comes from where, what the stages make of it, and the work ahead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.backoff import load_buckets
from prorsa.forecast.durations import Floats
from prorsa.forecast.forecast import Forecast
from prorsa.forecast.launches import elapsed
from prorsa.forecast.survival.cells import Cells
from prorsa.forecast.survival.flow import REQUESTS, TOKENS, Grid, Queue, Stages, Turns, convolved, pass_through
from prorsa.forecast.survival.hazards import Curves, Level, bins_of
from prorsa.forecast.survival.learnt import Learnt
from prorsa.forecast.work import AHEAD, SLICES, Work
from prorsa.lifecycle.snapshot import MODES, Snapshot
from prorsa.lifecycle.states import State

BINS = 20
"""Bins of the grid in a horizon."""
PART = int(AHEAD * BINS) // SLICES
"""Bins in one of the `SLICES` of the time ahead; a horizon is some of these."""
AT: Floats = np.append(np.arange(BINS + 1.0), np.arange(BINS + PART, AHEAD * BINS + 1.0, PART))
"""Where bins and slices end, in bins."""
LAUNCH_TIMES: Floats = np.append((0.0, 0.5), np.arange(1.0, AHEAD + 0.1, AHEAD / SLICES))
"""When the sampler's launches are worked out, in horizons: now, in its middle, and from its end on where slices end."""
SPEEDS = 8
"""Classes of decode speed in which it doubles."""
COMMON = 0.1
"""Standard deviation of the errors that requests have in common which come from the queue, or from others yet to come, as a
part of their tokens: the speeds are not known any better."""
ALL = slice(None)
"""All rows of a snapshot."""
UNREPORTED = 2.0
"""Times the mean seconds of a turn that nobody has told of when it ends: the most that may be missing of one that goes on."""
SEED = 1.0
"""Tokens to compute where everything before them is cached: the last one that was generated."""


@dataclass(frozen=True, slots=True)
class Coming:
    """The next requests of the trajectories that are in some state now."""

    volume: Floats
    """[2, task, bin]."""
    new: Floats
    """[bin]: tokens that have to be computed."""
    slices: Floats
    """[slice]: requests in each of the `SLICES` parts of the time ahead."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The turns of the trajectories that decode now, and of those that are queued."""

    context: float
    """Tokens that those in DECODE have, together, those that have not been reported yet included."""
    kv: float
    """Their KV-cache footprint."""
    left: float
    """Tokens that a turn of those in DECODE has still to make."""
    output: Floats
    """[task]: tokens of a turn that is to come."""
    ends: Floats
    """[2, task, bin]: turns that end, of those in DECODE."""
    goes_on: Floats
    """[2, task, bin]: of these, the ones that a tool follows."""
    stays: Floats
    """[2, bin]: what still decodes at the end of each bin."""
    spread: float
    """Variance of the tokens that still decode at the end of the horizon."""
    queued: Turns
    later: Turns


class Outlook:
    def __init__(
        self,
        learnt: Learnt,
        snapshot: Snapshot,
        horizon: float,
        instances: Sequence[str],
        kv_footprint: Callable[[Floats], Floats],
    ) -> None:
        self._learnt = learnt
        self._snapshot = snapshot
        self._horizon = horizon
        self._kv_footprint = kv_footprint
        self._grid = Grid(BINS, horizon / BINS)
        self._rows = _by_state(snapshot.state)
        self._queued = np.concatenate((self._rows[State.PREFILL], self._rows[State.READY]))
        # An empty snapshot has no names.
        self._tasks = snapshot.names.tasks or ("",)
        self._task = snapshot.task.astype(np.intp)
        self._live = self._by_task(ALL)
        self._group = snapshot.group.astype(np.intp)
        learnt.live_groups.cover(len(snapshot.names.groups))
        self._appended = np.array([learnt.lengths.appended_by_any(task) for task in self._tasks])
        self._instances = snapshot.names.instances or ("",)
        decodes = np.bincount(snapshot.instance[self._rows[State.DECODE]], minlength=len(self._instances)) > 0
        prefilling = set(instances)
        self._mixed = decodes & np.array([name in prefilling for name in self._instances])
        """[instance]: whether it decodes and prefills."""
        self._free = np.array([learnt.speed.of(name) for name in self._instances])
        """[instance]: tokens/s of a decode that waits for no prompts."""
        mixed = int(self._mixed.sum())
        self._server = learnt.server(len(instances) - mixed, mixed, snapshot.time)
        self._queued_tokens, self._queued_new = learnt.contexts.queue()
        self._queued_work = self._work_of(1.0, self._queued_new)
        # Those that have a turn to end first.
        self._busy = np.concatenate((self._rows[State.DECODE], self._queued))
        self._goes_on, self._then_goes_on = self._going_on()
        """Chances that a tool follows: the present turn of `_busy`, and every trajectory's next one."""

    def forecast(self) -> Forecast:
        tools, tool_kernel, away = self._in_tools()
        starting, launched = self._starting(), self._launched()
        decoding = self._decoding()
        returning = self._returning(decoding, tool_kernel)
        sources = (launched, starting, tools, returning)
        coming = Coming(
            np.add.reduce([source.volume for source in sources]),
            np.add.reduce([source.new for source in sources]),
            np.add.reduce([source.slices for source in sources]),
        )
        queued_new = float(self._queued_new.sum())
        stages = self._stages(coming, decoding, tool_kernel)
        passed = pass_through(stages)
        tokens = self._snapshot.tokens
        ready, inflight = (float(tokens[self._rows[state]].sum()) for state in (State.READY, State.PREFILL))
        parts = [float(source.volume[TOKENS].sum()) for source in sources]
        parts[3] += float(passed.later[TOKENS].sum())
        admitted = np.array([volume.sum(axis=(1, 2)) for volume in (passed.admitted_queued, passed.admitted_new)]).T
        kv = self._footprint(decoding.stays + passed.decoding)
        later_new = passed.later[REQUESTS].sum(axis=1) @ (self._appended + SEED)
        squares = self._mean_square()
        return Forecast(
            time=self._snapshot.time,
            horizon=self._horizon,
            sampler=parts[0],
            startup=parts[1],
            ready=ready,
            tool=parts[2],
            inflight=inflight,
            bias=1.0,
            prefill_tokens=ready + inflight + sum(parts),
            admitted_tokens=float(admitted[TOKENS].sum()),
            admitted_kv=float(self._footprint(admitted).sum()),
            decode_kv=float(self._kv_footprint(tokens[self._rows[State.DECODE]].astype(np.float64)).sum()),
            from_decode=parts[3],
            admitted_backlog=float(admitted[TOKENS, 0]),
            uncached_tokens=queued_new + float(coming.new.sum() + later_new),
            prefill_sd=float(np.sqrt(squares * sum(parts) + (COMMON * passed.later[TOKENS].sum()) ** 2)),
            completed_turns=float(decoding.ends[REQUESTS].sum() + passed.ended[REQUESTS].sum()),
            kv_now=decoding.kv,
            kv_end=float(kv[-1]),
            kv_peak=max(decoding.kv, float(kv.max())),
            kv_sd=float(np.sqrt(decoding.spread + squares * passed.decoding[TOKENS, -1])),
            work=self._work(coming, queued_new, decoding, away),
        )

    def _going_on(self) -> tuple[Floats, Floats]:
        turn, busy = self._snapshot.turn, self._busy
        by_turn, inclination = self._learnt.endings.going_on(self._tasks, int(turn.max(initial=0)) + 2)
        inclined = inclination.take(self._group)
        place = self._task * by_turn.shape[1] + turn
        present = place.take(busy)
        place[busy] = present + 1
        return np.exp(by_turn.take(present) * inclined.take(busy)), np.exp(by_turn.take(place) * inclined)

    def _stages(self, coming: Coming, decoding: Decoding, tools: Floats) -> Stages:
        rows = self._queued
        return Stages(
            grid=self._grid,
            coming=coming.volume,
            coming_work=self._work_of(coming.volume[REQUESTS].sum(axis=0), coming.new),
            queued=Queue(
                np.array([self._by_task(rows), self._by_task(rows, self._snapshot.tokens[rows])]),
                self._queued_tokens,
                self._queued_work,
            ),
            queued_turns=decoding.queued,
            turns=decoding.later,
            tools=tools,
            appended=self._appended,
            later_work=self._work_of(1.0, self._appended + SEED),
            instances=self._server.instances,
            latency=self._server.latency,
        )

    def _work_of(self, requests: Floats | float, new: Floats) -> Floats:
        """Seconds of an instance for the prefill of so many requests with `new` tokens to compute, together."""
        return self._server.fixed * requests + self._server.slope * new

    # Trajectories that neither queue nor decode.

    def _in_tools(self) -> tuple[Coming, Floats, tuple[Floats, Floats]]:
        """(those in TOOL, the kernel of a tool that is called later, its chance and time to return within the time ahead)."""
        rows, snapshot, learnt = self._rows[State.TOOL], self._snapshot, self._learnt
        names = snapshot.names.tools
        seconds = elapsed(snapshot, rows)
        cells = Cells((self._task[rows], snapshot.tool[rows], bins_of(seconds)))
        reached = cells.means(seconds)
        weight = cells.sums(learnt.tools.weights(snapshot.since[rows], snapshot.time))
        classes = Cells(cells.columns[:2])
        codes = zip(*classes.columns.tolist(), strict=True)
        pairs, which = [(self._tasks[task], names[tool]) for task, tool in codes], classes.cell
        levels = self._task_level(cells.columns[0]), Level([tool for _, tool in pairs], classes.columns[0], which)
        any_tool, curves = learnt.tools.curves(levels, reached, weight, snapshot.time)
        every = np.arange(len(self._tasks))
        kernel = any_tool.kernel(every, np.zeros(len(every)), np.full(len(every), self._grid.step), BINS)
        away = any_tool.within(every, AHEAD * self._horizon)
        if not len(rows):
            return self._nobody(), kernel, away
        results = [learnt.lengths.appended(*pair) for pair in pairs]
        appended = np.array([0.0 if result is None else result.value for result in results])[which]
        count, context = cells.count, snapshot.tokens[rows].astype(np.float64)
        lost = snapshot.since[rows] <= learnt.contexts.lost_at
        new = cells.sums(np.where(lost, context, SEED)) + count * appended
        weights = np.array([count, cells.sums(context) + count * appended, new])
        return self._coming(cells.columns[0], curves, which, reached, weights), kernel, away

    def _starting(self) -> Coming:
        rows = np.concatenate((self._rows[State.SAMPLED], self._rows[State.SANDBOX_STARTING]))
        snapshot, learnt = self._snapshot, self._learnt
        if not len(rows):
            return self._nobody()
        seconds = elapsed(snapshot, rows)
        # Without a sandbox, the mode is the first one and the image the last.
        cells = Cells((self._task[rows], snapshot.mode[rows] + 1, snapshot.image[rows], bins_of(seconds)))
        reached = cells.means(seconds)
        classes = Cells(cells.columns[1:3])
        modes, images, which = ("", *MODES), (*snapshot.names.images, ""), classes.cell
        levels = (
            Level(modes, np.zeros(len(modes), dtype=np.intp), cells.columns[1]),
            Level([images[image] for image in classes.columns[1].tolist()], classes.columns[0], which),
        )
        weight = cells.sums(learnt.starts.weights(snapshot.since[rows], snapshot.time))
        upto = float(reached.max()) + AHEAD * self._horizon
        _, curves = learnt.starts.curves(levels, reached, weight, snapshot.time, upto)
        known = snapshot.tokens[rows].astype(np.float64)
        expected = np.array([learnt.lengths.first(task) for task in self._tasks])
        prompts = np.where(known > 0, known, expected[self._task[rows]])
        group = snapshot.group[rows]
        cached = learnt.contexts.have_prompts()[self._group[rows]]
        # Of a group whose prompt nobody has computed yet, one member does.
        new = np.where(cached, SEED, prompts / np.bincount(group)[group])
        weights = np.array([cells.count, cells.sums(prompts), cells.sums(new)])
        return self._coming(cells.columns[0], curves, which, reached, weights)

    def _launched(self) -> Coming:
        launches = self._learnt.launches
        if launches.injection is None:
            return self._nobody()
        times, total = self._horizon * LAUNCH_TIMES, np.zeros(len(LAUNCH_TIMES))
        total[1:] = launches.within(self._snapshot, self._rows[State.REWARD], times[1:])
        arrive = np.maximum(self._grid.step * AT - launches.dispatch_delay, 0.0)
        arrived = np.interp(arrive, times, total)
        each = arrived[1:] - arrived[:-1]
        requests = each[:BINS]
        volume = np.zeros((2, len(self._tasks), BINS))
        # Of which task is not known: the most frequent one stands for all.
        volume[:, self._live.argmax()] = requests, requests * self._learnt.lengths.first()
        return Coming(volume, requests * self._learnt.first_new.value, _slices(each))

    def _coming(
        self, task: NDArray[np.intp], curves: Curves, which: NDArray[np.intp], reached: Floats, weights: Floats
    ) -> Coming:
        """Of cells in the order of their tasks, which go on as `curves` say.

        `weights` [3, cell] are their requests and tokens, and how many of these have to be computed.
        """
        course, alive = curves.course(which, reached, self._grid.step * AT[None])
        through = _falls(self._through(task, weights / alive, course))
        volume = through[:2, :, :BINS]
        return Coming(volume, through[2, :, :BINS].sum(axis=0), _slices(through[REQUESTS].sum(axis=0)))

    def _nobody(self) -> Coming:
        return Coming(np.zeros((2, len(self._tasks), BINS)), np.zeros(BINS), np.zeros(SLICES))

    # Trajectories that decode, or will when their prefill is over.

    def _decoding(self) -> Decoding:
        snapshot, learnt, grid = self._snapshot, self._learnt, self._grid
        decode = self._rows[State.DECODE]
        rows = self._busy
        context, speeds, mean_speed = self._contexts(decode, rows)
        usual = learnt.groups.factors()[self._group]
        # See `Learnt` for why not of a first turn.
        factors = np.where(snapshot.turn[rows] > 0, usual[rows], 1.0)
        made, pace = np.maximum(context - snapshot.start[rows], 0.0) / factors, speeds / factors
        waits = np.arange(len(rows)) >= len(decode)
        buckets = load_buckets(snapshot.turn[rows] + 1)
        paces = np.rint(SPEEDS * np.log2(np.maximum(pace, 2.0**-10))).astype(np.intp)
        cells = Cells((self._task[rows], buckets, bins_of(made), paces, waits))
        reached, step = cells.means(made), cells.means(pace) * grid.step
        weight = cells.sums(learnt.outputs.weights(snapshot.since[rows], snapshot.time))
        classes = Cells(cells.columns[:2])
        which = classes.cell
        levels = self._task_level(cells.columns[0]), Level(classes.columns[1].tolist(), classes.columns[0], which)
        fresh, curves = learnt.outputs.curves(levels, reached, weight, snapshot.time)
        every, none = np.arange(len(self._tasks)), np.zeros(len(self._tasks))
        lengths = self._by_task(ALL, usual) / np.maximum(self._live, 1.0)
        kernel = fresh.kernel(every, none, mean_speed * grid.step / np.maximum(lengths, _TINY), BINS)
        comes = np.ones(len(snapshot))
        comes[rows] = self._goes_on
        again = self._by_task(ALL, comes * self._then_goes_on) / np.maximum(self._by_task(ALL, comes), _TINY)
        later = Turns(kernel, again, mean_speed)
        output = fresh.left(every, none) * lengths
        shape = (2, len(self._tasks), BINS)
        if not len(rows):
            return Decoding(
                0.0, 0.0, 0.0, output, np.zeros(shape), np.zeros(shape), np.zeros((2, BINS)), 0.0, later, later
            )
        now, wait = np.flatnonzero(cells.columns[4] == 0), np.flatnonzero(cells.columns[4] == 1)
        course, alive = curves.course(which[now], reached[now], step[now, None] * AT[: BINS + 1])
        count = cells.count
        # Of everyone, and of those that go on.
        goes_on = self._goes_on
        sums = [cells.sums(part) for part in (context, speeds, goes_on, goes_on * context, goes_on * speeds)]
        through = self._through(cells.columns[0, now], np.array([count, *sums]).take(now, axis=1) / alive, course)
        still = through[:3, :, 1:].sum(axis=1)
        still[TOKENS] += still[2] * grid.middles
        ends = _falls(through).reshape(2, 3, len(self._tasks), BINS)
        ends[:, TOKENS] += ends[:, 2] * grid.middles
        last = course[:, -1] / alive
        left = curves.left(which, reached) * cells.means(factors)
        waiting = curves.kernel(which[wait], reached[wait], step[wait], BINS)
        numbers = np.maximum(self._by_task(self._queued), 1.0)[:, None]
        return Decoding(
            context=float(context[: len(decode)].sum()),
            kv=float(self._kv_footprint(context[: len(decode)]).sum()),
            left=float(count[now] @ left[now]) / max(len(decode), 1),
            output=output,
            ends=ends[0, :2],
            goes_on=ends[1, :2],
            stays=still[:2],
            spread=float(cells.sums(context**2)[now] @ (last * (1.0 - last))),
            queued=Turns(
                self._through(cells.columns[0][wait], count[None, wait], waiting)[0] / numbers,
                self._mean_by_task(self._queued, self._goes_on[len(decode) :]),
                mean_speed,
            ),
            later=later,
        )

    def _contexts(self, decode: NDArray[np.intp], rows: NDArray[np.intp]) -> tuple[Floats, Floats, float]:
        """(tokens of context, decode speed) of each row, those of `decode` first, and the mean speed."""
        snapshot, learnt = self._snapshot, self._learnt
        speeds = self._speeds(decode)[snapshot.instance[decode]]
        mean_speed = float(speeds.mean()) if len(decode) else learnt.speed.of()
        context = snapshot.tokens[rows].astype(np.float64)
        # Tokens may be reported late; what has been made since follows from the speed.
        context[: len(decode)] = np.maximum(
            context[: len(decode)], snapshot.prompt[decode] + speeds * elapsed(snapshot, decode)
        )
        return context, np.concatenate((speeds, np.full(len(rows) - len(decode), mean_speed))), mean_speed

    def _returning(self, decoding: Decoding, tools: Floats) -> Coming:
        """The next requests of those that decode now."""
        ending = decoding.goes_on.copy()
        ending[TOKENS] += self._appended[:, None] * ending[REQUESTS]
        volume = convolved(ending, tools)
        return Coming(volume, (self._appended + SEED) @ volume[REQUESTS], np.zeros(SLICES))

    # What comes of it.

    def _footprint(self, volume: Floats) -> Floats:
        """KV-cache footprint of each column of [2, ...]."""
        requests = np.maximum(volume[REQUESTS], _TINY)
        footprint: Floats = requests * self._kv_footprint(volume[TOKENS] / requests)
        return footprint

    def _mean_square(self) -> float:
        """Of a token, the length of the context that it is in: the variance of a random number of them, over its mean."""
        tokens = self._snapshot.tokens.astype(np.float64)
        return float(tokens @ tokens / max(tokens.sum(), 1.0))

    def _work(self, coming: Coming, queued_new: float, decoding: Decoding, away: tuple[Floats, Floats]) -> Work:
        prefills, decode = self._learnt.prefills, self._rows[State.DECODE]
        queued, number = len(self._queued), len(decode)
        free = float(self._free[self._snapshot.instance[decode]].mean()) if number else self._learnt.speed.of()
        queued_tokens = float(self._snapshot.tokens[self._queued].sum())
        requests, tokens = coming.volume.sum(axis=(1, 2)).tolist()
        new = float(coming.new.sum()) / requests if requests > 0.0 else 0.0
        mix = self._live / max(len(self._snapshot), 1)
        chance, seconds = away
        again = mix * decoding.later.goes_on * chance
        speed = decoding.later.speed
        made = speed * self._horizon
        ends = _ends(made, float(decoding.stays[REQUESTS, -1]) / max(number, 1))
        return Work(
            queued=queued,
            queued_new=queued_new / max(queued, 1),
            queued_prefix=(queued_tokens - queued_new) / max(queued, 1),
            decoding=number,
            decoding_left=_left(ends, decoding.left),
            decoding_ends=ends,
            decoding_context=decoding.context / max(number, 1),
            returns=tuple(coming.slices.tolist()),
            ahead=AHEAD * self._horizon,
            turn_new=new,
            turn_prefix=max(tokens / requests - new, 0.0) if requests > 0.0 else 0.0,
            turn_output=_left(
                _ends(made, float(mix @ (1.0 - decoding.later.ends.sum(axis=1)))), float(mix @ decoding.output)
            ),
            again=float(again.sum()),
            away=float(again @ seconds / again.sum()) if again.sum() > 0.0 else 0.0,
            token_s=1.0 / free if free > 0.0 else 0.0,
            prefilled_s=prefills.seconds,
            prefilled_rate=prefills.rate,
            prefilled_new=prefills.new,
            prefilled_prefix=prefills.tokens - prefills.new,
        )

    def _speeds(self, decode: NDArray[np.intp]) -> Floats:
        """[instance]: tokens/s of a decode in the horizon, of which those on mixed instances wait while there are prompts."""
        learnt = self._learnt
        if not self._mixed.any():
            return self._free
        waiting = np.array([learnt.speed.of(name, busy=True) for name in self._instances])
        # What the turns that go on have reported tells of a change before any of them ends.
        rows = decode[self._mixed[self._snapshot.instance[decode]]]
        reported = float((self._snapshot.tokens[rows] - self._snapshot.prompt[rows]).sum())
        told = elapsed(self._snapshot, rows) - UNREPORTED * learnt.unreported.value
        seconds = float(np.maximum(told, 0.0).sum())
        if seconds > 0.0:
            waiting = np.minimum(waiting, reported / seconds)
        share = self._busy_share()
        return np.where(self._mixed, share * waiting + (1.0 - share) * self._free, self._free)

    def _busy_share(self) -> float:
        """Part of the horizon in which there are prompts: those that wait now, then as many as came of late."""
        able = max(self._server.instances * self._horizon, _TINY)
        queue = min(float(self._queued_work.sum()) / able, 1.0)
        new = np.array(self._learnt.prefills.new)
        coming = self._learnt.arrivals.at(self._snapshot.time) * self._horizon * float(self._work_of(1.0, new))
        return queue + (1.0 - queue) * min(coming / able, 1.0)

    # Helpers.

    def _task_level(self, task: NDArray[np.intp]) -> Level:
        """The classes of all tasks, with operations of tasks `task`."""
        return Level(self._tasks, np.zeros(len(self._tasks), dtype=np.intp), task)

    def _by_task(self, rows: NDArray[np.intp] | slice, values: NDArray[np.number] | None = None) -> Floats:
        """[task]: the sum of the rows' values, or their number."""
        sums: Floats = np.bincount(self._task[rows], values, len(self._tasks)).astype(np.float64)
        return sums

    def _mean_by_task(self, rows: NDArray[np.intp], values: Floats) -> Floats:
        means: Floats = self._by_task(rows, values) / np.maximum(self._by_task(rows), 1.0)
        return means

    def _through(self, task: NDArray[np.intp], weights: Floats, parts: Floats) -> Floats:
        """[weight, task, bin]: the weighted sum of the rows of `parts` that belong to each task; `task` ascends."""
        bounds = np.searchsorted(task, np.arange(len(self._tasks) + 1)).tolist()
        through = np.empty((len(weights), len(self._tasks), parts.shape[1]))
        for code, (first, last) in enumerate(pairwise(bounds)):
            np.matmul(weights[:, first:last], parts[first:last], out=through[:, code])
        return through


def _falls(values: Floats) -> Floats:
    """By how much they fall from one column to the next."""
    falls: Floats = values[..., :-1] - values[..., 1:]
    return falls


def _slices(requests: Floats) -> Floats:
    """[slice] of what is between two of `AT`."""
    return np.append(requests[:BINS].reshape(-1, PART).sum(axis=1), requests[BINS:])


def _ends(made: float, stay: float) -> float:
    """The part of memoryless turns that ends with a token, where the part `stay` has not ended after `made` tokens."""
    return -math.log(min(max(stay, _TINY), 1.0)) / made if made > 0.0 else 0.0


def _left(ends: float, mean: float) -> float:
    """Tokens left of memoryless turns, of which the part `ends` is over with each one; `mean` at most."""
    return min(1.0 / max(ends, _TINY), mean)


def _by_state(state: NDArray[np.int8]) -> dict[State, NDArray[np.intp]]:
    """The rows in each live state, in order."""
    order = np.argsort(state, kind="stable")
    ends = np.searchsorted(state[order], np.arange(len(State) + 1, dtype=np.int8)).tolist()
    return {one: order[ends[one] : ends[one + 1]] for one in State if one.live}


_TINY = 1e-9
