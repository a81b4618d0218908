"""What each forecaster would have said during a recorded run: WAPE at several horizons.

    python benchmarks/forecast.py RUN ... [--horizons 10 30 60] [--warm SECONDS] [--group-size 32]

RUN is a run directory, of a rollout or of `prorsa simulate --record`. Its lifecycle events are applied again, with the tokens
as they were reported. Every horizon each forecaster makes its forecast from the same snapshot; what the events then say is
what it is held against, from `--warm` seconds on: until then it only learns. One survival forecaster answers for all.
`scripts known` is one that knows what every trajectory will do, but not what the engines will take (`known_scripts.py`); the
rows after it are also told how long decodes take in the run, or prefills, or both.

Columns: prefill demand (the paper's: full prompts, backlog included), arrivals alone, decode admissions, KV cache in decode
at the end of the window. `noise`: what WAPE of the arrivals the mere counting noise makes where independent requests of the
live lengths come at a known rate (Poisson). `within 2 sd`: how often the arrivals are, by the forecast's standard deviation.
Windows in which weights were updated are left out with `--no-syncs`: nobody announces an update. So are those in which a
role switch began with `--no-flips`.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from known_scripts import KnownScripts, read_scripts

from prorsa.engines.protocol import Role
from prorsa.forecast import (
    Forecast,
    Forecaster,
    GroupReplenishment,
    Kalman,
    LifecycleForecaster,
    Measured,
    Persistence,
    SurvivalForecaster,
    WindowMeter,
    wape,
)
from prorsa.forecast.baselines import LocalTrend
from prorsa.lifecycle import Event, State, Tracker
from prorsa.lifecycle import events as e
from prorsa.report.rundir import Run, read_run
from prorsa.report.runs import runs

SYNC = 0.8
"""The part of all requests in service that a weight update cancels at least; a flip cancels those of one instance."""


@dataclass(slots=True)
class Windows:
    """Of one horizon, in order."""

    horizon: float
    starts: list[float] = field(default_factory=list)
    forecasts: list[dict[str, Forecast]] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    """The length of the context that a token of the live trajectories is in, on average: variance over mean of arrivals."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory")
    parser.add_argument("--horizons", type=float, nargs="+", default=[10.0, 30.0, 60.0], metavar="SECONDS")
    parser.add_argument("--warm", type=float, default=60.0, metavar="SECONDS", help="of the run that only teach")
    parser.add_argument("--group-size", type=int, metavar="N", help="an asynchronous run that replaces whole groups")
    parser.add_argument("--prefill-tokens-per-s", type=float, default=8000.0, help="profiled speed of an instance")
    parser.add_argument("--no-syncs", action="store_true", help="leave out windows in which weights were updated")
    parser.add_argument("--no-flips", action="store_true", help="leave out windows in which a role switch began")
    given = parser.parse_args()
    print("| run | horizon, s | windows | forecaster | prefill | arrivals | noise | within 2 sd | admissions | KV |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for path in given.runs:
        run = read_run(path)
        syncs = weight_updates(run.events)

        def injection() -> GroupReplenishment | None:
            return None if given.group_size is None else GroupReplenishment(given.group_size)

        begin = run.events[0].time + given.warm
        unrest = [run.events[index].time for index in syncs] if given.no_syncs else []
        unrest += [flip.time for flip in run.flips] if given.no_flips else []
        for windows in replay(run, syncs, given.horizons, injection, given.prefill_tokens_per_s):
            kept = [i for i, start in enumerate(windows.starts) if start >= begin and quiet(windows, start, unrest)]
            report(path, windows, kept, context_in_decode(run.events))


def quiet(windows: Windows, start: float, unrest: Sequence[float]) -> bool:
    return not any(start <= time < start + windows.horizon for time in unrest)


def replay(
    run: Run,
    syncs: set[int],
    horizons: Sequence[float],
    injection: Callable[[], GroupReplenishment | None],
    tokens_per_s: float,
) -> list[Windows]:
    survival = SurvivalForecaster(injection(), tokens_per_s)
    scripts, replaces = read_scripts(run.events), injection() is not None
    known: dict[str, Forecaster] = {
        "scripts known": KnownScripts(scripts, survival, replaces),
        "and decode times": KnownScripts(scripts, survival, replaces, decodes=True),
        "and prefill times": KnownScripts(scripts, survival, replaces, prefills=True),
        "and both": KnownScripts(scripts, survival, replaces, decodes=True, prefills=True),
    }
    asked: dict[float, dict[str, Forecaster]] = {
        horizon: {
            "paper": LifecycleForecaster(injection(), tokens_per_s),
            "decode-returns": LifecycleForecaster(injection(), tokens_per_s, decode_returns=True),
            "survival": survival,
            "persistence": Persistence(),
            "Kalman": Kalman(),
            **known,
        }
        for horizon in horizons
    }
    listeners = list({id(one): one for names in asked.values() for one in names.values()}.values())
    tracker, meters = Tracker(), {horizon: WindowMeter() for horizon in horizons}
    learners: list[Forecaster | WindowMeter] = [*listeners, *meters.values()]
    done = {horizon: Windows(horizon) for horizon in horizons}
    due = {horizon: run.events[0].time + horizon for horizon in horizons}
    reports = Reports(run, tracker)
    for index, event in enumerate(run.events):
        while (now := min(due.values())) <= event.time:
            reports.until(now)
            snapshot, instances = tracker.snapshot(now), prefill_instances(run, now)
            for horizon in (horizon for horizon in horizons if due[horizon] == now):
                due[horizon] = now + horizon
                windows = done[horizon]
                windows.measured += [measured for _, measured in meters[horizon].finished(now)]
                made = {name: one.forecast(snapshot, horizon, instances) for name, one in asked[horizon].items()}
                windows.starts.append(now)
                windows.forecasts.append(made)
                windows.sizes.append(float(np.square(snapshot.tokens).sum() / max(snapshot.tokens.sum(), 1)))
                meters[horizon].open(made["survival"])
        reports.until(event.time)
        transition = tracker.apply(event)
        for learner in learners:
            learner.observe(transition)
        if index in syncs:
            for one in listeners:
                one.caches_lost()
    for windows in done.values():
        # The last window is cut off by the end of the run.
        del windows.starts[len(windows.measured) :], windows.forecasts[len(windows.measured) :]
    return list(done.values())


class Reports:
    """Tells the tracker of the tokens that were streamed, when they were."""

    def __init__(self, run: Run, tracker: Tracker) -> None:
        pieces = ((turn.trajectory, runs(turn.arrivals)) for turn in run.turns)
        self._pieces = sorted((time, name, count) for name, arrivals in pieces for time, count in arrivals)
        self._tracker = tracker
        self._next = 0

    def until(self, time: float) -> None:
        while self._next < len(self._pieces) and self._pieces[self._next][0] <= time:
            _, name, count = self._pieces[self._next]
            self._next += 1
            if name in self._tracker and self._tracker.state(name) is State.DECODE:
                self._tracker.decoded(name, count)


def weight_updates(events: Sequence[Event]) -> set[int]:
    """The indices of the last events before an update: of a burst of cancellations that spares hardly anything."""
    found, serving, index = set(), 0, 0
    while index < len(events):
        end = index
        while end < len(events) and isinstance(events[end], e.Requeued) and events[end].time < events[index].time + 0.5:
            end += 1
        if end - index >= max(SYNC * serving, 2):
            found.add(end - 1)
        end = max(end, index + 1)
        for event in events[index:end]:
            serving += isinstance(event, e.PrefillStarted)
            serving -= isinstance(event, e.Requeued | e.ToolStarted | e.RewardStarted)
        index = end
    return found


def prefill_instances(run: Run, time: float) -> list[str]:
    """The instances that were routed for prefill."""
    last = bisect_right([change.time for change in run.instances], time)
    state = {change.name: change for change in run.instances[:last]}
    return [name for name, change in state.items() if change.state == "routed" and change.role is not Role.DECODE]


def context_in_decode(events: Sequence[Event]) -> Callable[[Sequence[float]], list[float]]:
    """Tokens of context in DECODE at given times, those of each attempt taken to come evenly."""
    attempts = np.array(list(_attempts(events)), dtype=np.float64).reshape(-1, 4)
    start, end, first, last = attempts.T
    slope = (last - first) / np.maximum(end - start, 1e-9)

    def at(times: Sequence[float]) -> list[float]:
        going = [(start <= time) & (time < end) for time in times]
        return [float((first + slope * (time - start))[on].sum()) for time, on in zip(times, going, strict=True)]

    return at


def _attempts(events: Sequence[Event]) -> Iterator[tuple[float, float, int, int]]:
    tokens: dict[str, int] = {}
    began: dict[str, float] = {}
    for event in events:
        name = event.trajectory
        if isinstance(event, e.DecodeStarted):
            began[name] = event.time
        elif isinstance(event, e.Requeued | e.ToolStarted | e.RewardStarted | e.Dropped) and name in began:
            yield began.pop(name), event.time, tokens[name], getattr(event, "tokens", tokens[name])
        tokens[name] = getattr(event, "tokens", tokens.get(name, 0))


def report(path: str, windows: Windows, kept: Sequence[int], context: Callable[[Sequence[float]], list[float]]) -> None:
    if not kept:
        return
    measured = [windows.measured[i] for i in kept]
    arrived = [one.arrived_tokens for one in measured]
    before = context([windows.starts[i] for i in kept])
    after = context([windows.starts[i] + windows.horizon for i in kept])
    for name in windows.forecasts[0]:
        made = [windows.forecasts[i][name] for i in kept]
        arrivals = _arrivals(name, windows, kept)
        kv = before if name == "persistence" else [one.kv_end or one.decode_kv + one.admitted_kv for one in made]
        cells: list[float | None] = [
            wape([one.prefill_tokens for one in made], [one.prefill_tokens for one in measured]),
            wape(arrivals, arrived),
            None,
            None,
            wape([one.admitted_tokens for one in made], [one.admitted_tokens for one in measured]),
            None if name == "Kalman" else wape(kv, after),
        ]
        if name == "survival":
            variances = [windows.sizes[i] * real for i, real in zip(kept, arrived, strict=True)]
            cells[2] = math.sqrt(2 / math.pi) * sum(map(math.sqrt, variances)) / max(sum(arrived), 1.0)
            near = [abs(a - b) <= 2 * one.prefill_sd for a, b, one in zip(arrivals, arrived, made, strict=True)]
            cells[3] = sum(near) / len(near)
        text = " | ".join("" if cell is None else f"{cell:.1%}" for cell in cells)
        print(f"| {path} | {windows.horizon:g} | {len(kept)} | {name} | {text} |", flush=True)


def _arrivals(name: str, windows: Windows, kept: Sequence[int]) -> list[float]:
    """The arrivals alone that a forecaster expects; the baselines from the arrivals of past windows."""
    real = [one.arrived_tokens for one in windows.measured]
    if name == "persistence":
        return [real[i - 1] if i else 0.0 for i in kept]
    if name == "Kalman":
        trend, said = LocalTrend(), []
        for value in real:
            said.append(max(trend.next() or 0.0, 0.0))
            trend.update(value)
        return [said[i] for i in kept]
    return [windows.forecasts[i][name].prefill_tokens - windows.forecasts[i][name].backlog for i in kept]


if __name__ == "__main__":
    main()
