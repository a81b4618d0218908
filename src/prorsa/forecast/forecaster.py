"""The paper's workload predictor (section 4.1.2, Appendix B): every trajectory's lifecycle, one step ahead.

Each trajectory contributes at most one request a horizon. Predicted requests carry a weight: the probability, or the
expected number, with which they arrive. The same weighted arrivals make the parts of W and enter the recurrence of the
decode admissions, so that the two never disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.admissions import PrefillTime, finish_inflight, finish_queued
from prorsa.forecast.backoff import Backoff, Ema, load_bucket, load_buckets, resolve
from prorsa.forecast.correction import BiasCorrection
from prorsa.forecast.durations import MOST_CLASSES, Durations, Floats, Running
from prorsa.forecast.forecast import Forecast
from prorsa.forecast.injection import Injection
from prorsa.forecast.launches import Launches, elapsed
from prorsa.forecast.lengths import PromptLengths
from prorsa.forecast.measure import Measured, WindowMeter
from prorsa.forecast.returns import DecodeReturns, never
from prorsa.forecast.tools import ToolDurations
from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import MODES, Snapshot, Transition
from prorsa.lifecycle.states import State

SLICES = 8
"""The sampler's launches are placed in time by evaluating Eq. 2-4 at so many horizons up to H."""


class Arrivals(NamedTuple):
    """Predicted requests as columns."""

    time: Floats
    """u_j, seconds."""
    weight: Floats
    """Probability or expected number."""
    tokens: Floats
    """Full prompt length."""

    def volume(self) -> float:
        return float(self.weight @ self.tokens)


class Admitted(NamedTuple):
    tokens: float
    kv: float


class LifecycleForecaster:
    """`Forecaster` of the paper. Learns from `observe`, and reads a snapshot without changing it."""

    def __init__(
        self,
        injection: Injection | None,
        prefill_tokens_per_s: float,
        kv_footprint: Callable[[Floats], Floats] = lambda tokens: tokens,
        decode_returns: bool = False,
    ) -> None:
        """`injection` is the sampler's rule f; None in synchronous rollout, which launches nothing during a step.

        `prefill_tokens_per_s` is the profiled speed of one prefill instance, in full-prompt tokens/s; it stands until
        prefills were observed. `kv_footprint` is kappa: prompt lengths -> KV-cache footprints, in the unit of the decode
        capacity (default: tokens). `decode_returns` adds a source that the paper leaves out, see `forecast/returns.py`;
        it pays where a turn and its tool call are short beside the horizon.
        """
        self.launches = Launches(injection)
        self._kv_footprint = kv_footprint
        self._startups: Backoff[Durations] = Backoff(Durations, widest=1, most=MOST_CLASSES)
        self._delays = Durations()
        self._tools = ToolDurations()
        self._returns = DecodeReturns() if decode_returns else None
        self._lengths = PromptLengths()
        self._prefill_time = PrefillTime(prefill_tokens_per_s)
        self._correction = BiasCorrection()
        self._admission_correction = BiasCorrection()
        self._meter = WindowMeter()

    def observe(self, transition: Transition) -> None:
        self._meter.observe(transition)
        self.launches.observe(transition)
        if self._returns is not None:
            self._returns.observe(transition)
        event = transition.event
        if isinstance(event, e.Ready):
            if transition.before is State.TOOL:
                self._learn_tool(transition)
            else:
                self._learn_start(transition)
        elif isinstance(event, e.DecodeStarted) and transition.instance is not None:
            # The transition names the instance that prefilled, the event the one that decodes.
            joined = event.time - transition.elapsed
            self._prefill_time.finished(transition.instance, transition.tokens, joined, event.time)

    def caches_lost(self) -> None:
        """Of no consequence: all volumes are full prompt lengths."""

    def forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        for before, measured in self._meter.finished(snapshot.time):
            self._correct(before, measured)
        made = self._forecast(snapshot, horizon, prefill_instances)
        self._meter.open(made)
        return made

    def _correct(self, before: Forecast, measured: Measured) -> None:
        arrived, admitted = measured.arrived_tokens, measured.admitted_tokens
        if self.launches.injection is None:
            # Without a rule nothing is said of trajectories yet to be sampled, so what they bring is no residual.
            arrived -= measured.new_arrived_tokens
            admitted -= measured.new_admitted_tokens
        self._correction.update(before.predicted, arrived)
        foretold = (before.admitted_tokens - before.admitted_backlog) / before.admission_bias
        self._admission_correction.update(foretold, admitted - before.admitted_backlog)

    def _learn_start(self, transition: Transition) -> None:
        self._lengths.add_first(transition.task, transition.tokens)
        self.launches.started(transition)
        self._delays.add(transition.event.time - transition.sampled_at)
        if transition.mode is not None:
            load = load_bucket(transition.concurrency)
            self._startups.add((transition.mode, transition.image, transition.node_class, load), transition.elapsed)

    def _learn_tool(self, transition: Transition) -> None:
        tool = transition.tool or ""
        load = load_bucket(transition.concurrency)
        self._tools.add(transition.task, tool, transition.turn, load, transition.elapsed)
        self._lengths.add_appended(transition.task, tool, transition.tokens - transition.tokens_before)

    def _forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        rows = {state: np.flatnonzero(snapshot.state == state) for state in State if state.live}
        tokens = snapshot.tokens
        sampler = self._sampler(snapshot, rows[State.REWARD], horizon)
        startup = self._startup(snapshot, rows[State.SAMPLED], rows[State.SANDBOX_STARTING], horizon)
        tool = self._tool(snapshot, rows[State.TOOL], horizon)
        from_decode = self._from_decode(snapshot, rows[State.DECODE], horizon)
        sources = sampler, startup, tool, from_decode
        predicted = Arrivals(*(np.concatenate(columns) for columns in zip(*sources, strict=True)))
        ready, inflight = rows[State.READY], rows[State.PREFILL]
        bias = self._correction.bias
        observed, foretold = self._admissions(
            snapshot, ready, inflight, predicted._replace(weight=bias * predicted.weight), horizon, prefill_instances
        )
        parts = [source.volume() for source in sources]
        backlog = float(tokens[ready].sum()), float(tokens[inflight].sum())
        admission_bias = self._admission_correction.bias
        return Forecast(
            time=snapshot.time,
            horizon=horizon,
            sampler=parts[0],
            startup=parts[1],
            ready=backlog[0],
            tool=parts[2],
            inflight=backlog[1],
            bias=bias,
            prefill_tokens=sum(backlog) + bias * sum(parts),
            admitted_tokens=observed.tokens + admission_bias * foretold.tokens,
            admitted_kv=observed.kv + admission_bias * foretold.kv,
            decode_kv=float(self._kv_footprint(tokens[rows[State.DECODE]].astype(np.float64)).sum()),
            from_decode=parts[3],
            admission_bias=admission_bias,
            admitted_backlog=observed.tokens,
        )

    def _sampler(self, snapshot: Snapshot, rows: NDArray[np.intp], horizon: float) -> Arrivals:
        """Eq. 2-5. The rule f is evaluated at `SLICES` horizons up to H; what each adds arrives amid its slice."""
        delay = self.launches.dispatch_delay
        effective = max(0.0, horizon - delay)
        if self.launches.injection is None or effective == 0.0:
            return _NOTHING
        horizons = effective * np.arange(1, SLICES + 1) / SLICES
        added = np.diff(self.launches.within(snapshot, rows, horizons), prepend=0.0)
        # Many launches in one slice are many requests, not one long one: they spread over the instances.
        requests = np.maximum(np.ceil(added), 1).astype(np.intp)
        middle = snapshot.time + delay + horizons - effective / (2 * SLICES)
        weight = np.repeat(added / requests, requests)
        return Arrivals(np.repeat(middle, requests), weight, np.full(len(weight), self._lengths.first()))

    def _startup(
        self, snapshot: Snapshot, sampled: NDArray[np.intp], starting: NDArray[np.intp], horizon: float
    ) -> Arrivals:
        """Eq. 6, 7. A trajectory whose sandbox does not start yet is among them, by the delay from injection to READY."""
        rows = np.concatenate((sampled, starting))
        mode = snapshot.mode[rows].astype(np.int32)
        mode[: len(sampled)] = _SAMPLED
        load = load_buckets(snapshot.concurrency[rows])
        images, node_classes = snapshot.names.images, snapshot.names.node_classes

        def find(mode: int, image: int, node_class: int, load: int) -> Durations | None:
            if mode == _SAMPLED:
                return self._delays
            return self._startups.find((MODES[mode], images[image], node_classes[node_class], load))

        columns = [mode, snapshot.image[rows], snapshot.node_class[rows], load]
        running = Running(*resolve(columns, find, unknown=Durations()), elapsed(snapshot, rows))
        probability, residual = running.arrivals_within(horizon)
        return Arrivals(snapshot.time + residual, probability, self._first_prompts(snapshot, rows))

    def _first_prompts(self, snapshot: Snapshot, rows: NDArray[np.intp]) -> Floats:
        """x_k: the first prompt's length where it is known, else what its task leads to expect."""
        tokens = snapshot.tokens[rows].astype(np.float64)
        expected = np.array([self._lengths.first(task) for task in snapshot.names.tasks] or [0.0])
        return np.where(tokens > 0, tokens, expected[snapshot.task[rows]])

    def _tool(self, snapshot: Snapshot, rows: NDArray[np.intp], horizon: float) -> Arrivals:
        """Eq. 10, 11. Until any tool has returned, a running one is taken to run for as long again as it has."""
        tasks, tools = snapshot.names.tasks, snapshot.names.tools
        task, tool = snapshot.task[rows], snapshot.tool[rows]
        classes, which = resolve(
            [task, tool, snapshot.turn[rows], load_buckets(snapshot.concurrency[rows])],
            lambda task, tool, turn, load: self._tools.find(tasks[task], tools[tool], turn, load),
            unknown=Ema(1.0, value=np.nan),
        )
        expected = np.array([durations.value for durations in classes])[which]
        taken = elapsed(snapshot, rows)
        residual = np.where(np.isnan(expected), taken, np.maximum(expected - taken, 0.0))
        results, result = resolve(
            [task, tool], lambda task, tool: self._lengths.appended(tasks[task], tools[tool]), unknown=Ema(1.0)
        )
        tokens = snapshot.tokens[rows] + np.array([appended.value for appended in results])[result]
        returning = residual < horizon
        return Arrivals(snapshot.time + residual[returning], np.ones(np.count_nonzero(returning)), tokens[returning])

    def _from_decode(self, snapshot: Snapshot, rows: NDArray[np.intp], horizon: float) -> Arrivals:
        """The next requests of trajectories in DECODE. What those still decode is left out of the length, as in B.7."""
        if self._returns is None:
            return _NOTHING
        tasks, task, find = snapshot.names.tasks, snapshot.task[rows], self._returns.find
        classes, which = resolve(
            [task, snapshot.turn[rows]], lambda task, turn: find(tasks[task], turn), unknown=never()
        )
        running = Running(classes, which, elapsed(snapshot, rows))
        appended = np.array([self._lengths.appended_by_any(name) for name in tasks] or [0.0])
        probability, residual = running.arrivals_within(horizon)
        return Arrivals(snapshot.time + residual, probability, snapshot.tokens[rows] + appended[task])

    def _admissions(
        self,
        snapshot: Snapshot,
        ready: NDArray[np.intp],
        inflight: NDArray[np.intp],
        predicted: Arrivals,
        horizon: float,
        prefill_instances: Sequence[str],
    ) -> tuple[Admitted, Admitted]:
        """Eq. 13, 14: what the observed requests and what the predicted ones add to the decode admissions.

        The queue is served in order, then the predicted requests as they arrive, each by the instance that is free first.
        """
        end = snapshot.time + horizon
        finish, free = self._inflight(snapshot, inflight, prefill_instances)
        queue = ready[np.argsort(snapshot.order[ready])]
        ones = np.ones(len(queue))
        waiting = Arrivals(snapshot.time * ones, ones, snapshot.tokens[queue].astype(np.float64))
        coming = np.argsort(predicted.time, kind="stable")
        arrival, weight, tokens = (np.concatenate((a, b[coming])) for a, b in zip(waiting, predicted, strict=True))
        admitted = finish_queued(arrival, weight * self._prefill_time(tokens), free, end) < end
        waited = np.arange(len(tokens)) < len(queue)
        held = snapshot.tokens[inflight[finish < end]].astype(np.float64)
        seen = np.concatenate((held, tokens[admitted & waited]))
        new = admitted & ~waited
        return self._admitted(seen, np.ones(len(seen))), self._admitted(tokens[new], weight[new])

    def _inflight(
        self, snapshot: Snapshot, rows: NDArray[np.intp], prefill_instances: Sequence[str]
    ) -> tuple[Floats, list[float]]:
        """(finish time of each row in PREFILL, v_m: when each of `prefill_instances` is next free)."""
        names, on = snapshot.names.instances, snapshot.instance[rows]
        service = self._prefill_time(snapshot.tokens[rows].astype(np.float64))
        free_since = np.array([self._prefill_time.free_since(name) for name in names])
        finish = finish_inflight(snapshot.time, on, snapshot.since[rows], service, free_since)
        busy_until = np.full(len(names), snapshot.time)
        np.maximum.at(busy_until, on, finish)
        until = dict(zip(names, busy_until.tolist(), strict=True))
        return finish, [until.get(name, snapshot.time) for name in prefill_instances]

    def _admitted(self, tokens: Floats, weight: Floats) -> Admitted:
        return Admitted(float(weight @ tokens), float(weight @ self._kv_footprint(tokens)))


_NOTHING = Arrivals(np.zeros(0), np.zeros(0), np.zeros(0))

_SAMPLED = -2
"""Stands in the mode column for a trajectory whose sandbox does not start yet; no `Snapshot.mode` has this value."""
