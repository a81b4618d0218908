"""What each forecaster would have said during a recorded run: WAPE at several horizons.

    python benchmarks/forecast.py RUN [--horizons 0.5 1 2]

RUN is a run directory. Its lifecycle events are applied again, and every horizon each forecaster makes its forecast from the
same snapshot; what the events then say is what it is held against.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Iterator

from prorsa.engines.protocol import Role
from prorsa.forecast import Forecast, Forecaster, Kalman, LifecycleForecaster, Measured, Persistence, WindowMeter, wape
from prorsa.lifecycle import Tracker
from prorsa.report.rundir import Run, read_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="run directory")
    parser.add_argument("--horizons", type=float, nargs="+", default=[0.5, 1.0, 2.0], metavar="SECONDS")
    arguments = parser.parse_args()
    run = read_run(arguments.run)
    speed = run.config["policy"]["prefill_tokens_per_s"]
    print("| horizon, s | windows | forecaster | WAPE prefill | WAPE admissions |")
    print("|---|---|---|---|---|")
    for horizon in arguments.horizons:
        forecasters: dict[str, Forecaster] = {
            "paper": LifecycleForecaster(None, speed),
            "with returns from decode": LifecycleForecaster(None, speed, decode_returns=True),
            "persistence": Persistence(),
            "Kalman": Kalman(),
        }
        for name, forecaster in forecasters.items():
            windows = list(replay(run, forecaster, horizon))
            forecasts, measured = zip(*windows, strict=True)
            prefill = wape([f.prefill_tokens for f in forecasts], [m.prefill_tokens for m in measured])
            admitted = wape([f.admitted_tokens for f in forecasts], [m.admitted_tokens for m in measured])
            print(f"| {horizon:g} | {len(windows)} | {name} | {prefill:.1%} | {admitted:.1%} |")


def replay(run: Run, forecaster: Forecaster, horizon: float) -> Iterator[tuple[Forecast, Measured]]:
    """Each forecast of a synchronous run with its measured window."""
    tracker, meter = Tracker(), WindowMeter()
    now = run.events[0].time
    for event in run.events:
        while now + horizon <= event.time:
            now += horizon
            yield from meter.finished(now)
            forecast = forecaster.forecast(tracker.snapshot(now), horizon, prefill_instances(run, now))
            meter.open(forecast)
        transition = tracker.apply(event)
        forecaster.observe(transition)
        meter.observe(transition)


def prefill_instances(run: Run, time: float) -> list[str]:
    """The instances that were routed for prefill."""
    last = bisect_right([change.time for change in run.instances], time)
    state = {change.name: change for change in run.instances[:last]}
    return [name for name, change in state.items() if change.state == "routed" and change.role is not Role.DECODE]


if __name__ == "__main__":
    main()
