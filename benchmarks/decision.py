"""How long one decision takes: snapshot, forecast and allocation, at 10,000 and 100,000 live trajectories on one core.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/decision.py [--forecast paper decode-returns survival]

The trajectories are in a realistic mix of states (four tasks, twelve tools, 200 images, 64 instances, up to 4 turns), and
the forecaster has learnt its statistics from the events that brought them there. Between two decisions sixty more
trajectories come and go. With `survival` the policy is the one that plans, else the paper's. A second table has the plan
alone, by instances.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from itertools import count, pairwise
from time import perf_counter, process_time
from typing import get_args

import numpy as np

from prorsa.allocation import Adaptive, Planned
from prorsa.allocation.policies import Demand, Policy, Situation
from prorsa.allocation.solver import Allocation
from prorsa.assembly import build_forecaster
from prorsa.config import ForecastKind
from prorsa.forecast import GroupReplenishment
from prorsa.lifecycle import events as e
from prorsa.lifecycle.states import State
from prorsa.lifecycle.tracker import Tracker
from prorsa.profiles import load_profile
from prorsa.profiles.instance import ProfileCosts

HORIZON = 10.0
LIMITS = {10_000: 10.0, 100_000: 100.0}
"""Live trajectories -> milliseconds that the decision may take."""

PREFILL = tuple(f"prefill-{n}" for n in range(32))
DECODE = tuple(f"decode-{n}" for n in range(32))
TASKS = tuple(f"task-{n}" for n in range(4))
TOOLS = tuple(f"tool-{n}" for n in range(12))
IMAGES = tuple(f"image-{n}" for n in range(200))
PLANNED = Planned(ProfileCosts(load_profile("mimo-v2.5-pro-h200-ep16")))
GROUP = 8
TOKENS_PER_S = 8000.0
CHUNK = 10_000
"""Events applied in one go while the clock runs."""

MIX = {
    State.SAMPLED: 0.01,
    State.SANDBOX_STARTING: 0.05,
    State.READY: 0.08,
    State.PREFILL: 0.01,
    State.DECODE: 0.45,
    State.TOOL: 0.35,
    State.REWARD: 0.05,
}


class History:
    """Brings `live` trajectories into the states of `MIX`, through legal events timed in order for each trajectory."""

    def __init__(self, live: int, forecast: ForecastKind, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.tracker = Tracker()
        self.forecaster = build_forecaster(forecast, GroupReplenishment(GROUP), TOKENS_PER_S)
        self.events = 0
        self.seconds = {"tracker": 0.0, "learning": 0.0}
        states = self.random.choice([int(state) for state in MIX], size=live, p=list(MIX.values()))
        self._ended = count()
        self._tell([event for n, state in enumerate(states.tolist()) for event in self._run(f"live-{n}", State(state))])
        self.go_on(live // 8)

    def go_on(self, trajectories: int) -> None:
        """Whole trajectories from sampling to reward: new samples for the statistics, nothing new that is live."""
        self._tell([event for _ in range(trajectories) for event in self._run(f"past-{next(self._ended)}", None)])

    def _tell(self, events: list[e.Event]) -> None:
        events.sort(key=lambda event: event.time)
        for start in range(0, len(events), CHUNK):
            chunk = events[start : start + CHUNK]
            begin = process_time()
            transitions = [self.tracker.apply(event) for event in chunk]
            applied = process_time()
            for transition in transitions:
                self.forecaster.observe(transition)
            self.seconds["learning"] += process_time() - applied
            self.seconds["tracker"] += applied - begin
            self.events += len(chunk)

    def _run(self, name: str, stop: State | None) -> Iterator[e.Event]:
        """One trajectory from its sampling to `stop`, or to its end; it gets there just before time 0."""
        turns = 1 + int(self.random.integers(0, 4 if stop is not State.REWARD else 3))
        way = self._way(name, stop, turns)
        total = sum(pause for pause, _ in way)
        time = -total - float(self.random.exponential(2.0))
        for pause, make in way:
            time += pause
            yield make(time)

    def _way(self, name: str, stop: State | None, turns: int) -> list[tuple[float, Callable[[float], e.Event]]]:
        random = self.random
        task = TASKS[int(random.integers(len(TASKS)))]
        image = IMAGES[int(random.integers(len(IMAGES)))]
        group = name.split("-")[0] + str(int(name.split("-")[1]) // GROUP)
        mode = e.SandboxMode.COLD if random.random() < 0.3 else e.SandboxMode.PREWARMED
        tokens = int(random.integers(1000, 8000))
        way: list[tuple[float, Callable[[float], e.Event]]] = [(0.0, lambda t: e.Sampled(t, name, group, task))]
        if stop is State.SAMPLED:
            return way
        way.append((0.1, lambda t: e.SandboxStarting(t, name, mode, image, "cpu")))
        if stop is State.SANDBOX_STARTING:
            return way
        pause = float(random.lognormal(2.5 if mode is e.SandboxMode.COLD else 0.5, 0.4))
        for turn in range(turns):
            last, length = turn == turns - 1, tokens
            prefill = PREFILL[int(random.integers(len(PREFILL)))]
            decode = DECODE[int(random.integers(len(DECODE)))]
            way.append((pause, lambda t, length=length: e.Ready(t, name, length)))
            if last and stop is State.READY:
                return way
            way.append((float(random.exponential(0.5)), lambda t, on=prefill: e.PrefillStarted(t, name, on)))
            if last and stop is State.PREFILL:
                return way
            way.append((0.01 + length / TOKENS_PER_S, lambda t, on=decode: e.DecodeStarted(t, name, on)))
            if last and stop is State.DECODE:
                return way
            tokens += int(random.integers(50, 800))
            length = tokens
            if last and stop is not State.TOOL:
                break
            tool = TOOLS[int(random.integers(len(TOOLS)))]
            way.append((float(random.exponential(8.0)), lambda t, n=length, use=tool: e.ToolStarted(t, name, use, n)))
            if last:
                return way
            tokens += int(random.integers(100, 3000))
            pause = float(random.lognormal(1.5, 0.6))
        way.append((float(random.exponential(8.0)), lambda t, n=tokens: e.RewardStarted(t, name, n)))
        if stop is None:
            way.append((float(random.lognormal(1.5, 0.4)), lambda t: e.Done(t, name, 1.0, admitted=bool(turns % 5))))
        return way


def decide(history: History, policy: Policy, current: Allocation) -> list[float]:
    """Milliseconds: CPU time of the snapshot, the forecast, the allocation and all three, and their wall time."""
    started, times = perf_counter(), [process_time()]
    snapshot = history.tracker.snapshot(0.0)
    times.append(process_time())
    forecast = history.forecaster.forecast(snapshot, HORIZON, PREFILL)
    times.append(process_time())
    demand = Demand(
        prefill_tokens=forecast.prefill_tokens,
        prefill_speed=TOKENS_PER_S,
        horizon=HORIZON,
        decode_tokens=forecast.decode_kv + forecast.admitted_kv,
        decode_capacity=4e6,
    )
    policy.decide(Situation(demand, current, live=True, work=forecast.work))
    times.append(process_time())
    parts = [after - before for before, after in pairwise(times)]
    return [1e3 * seconds for seconds in (*parts, sum(parts), perf_counter() - started)]


def measure(live: int, forecast: ForecastKind, repeats: int) -> bool:
    """Print one row of the table; whether the decision is within its limit."""
    history = History(live, forecast)
    policy = PLANNED if forecast == "survival" else Adaptive(m_p=1, m_d=1, gpus=64)
    current = Allocation(len(PREFILL), len(DECODE))
    decide(history, policy, current)
    gc.collect()
    rows = []
    for _ in range(repeats):
        history.go_on(60)
        rows.append(decide(history, policy, current))
    *parts, decision, wall = (statistics.median(column) for column in zip(*rows, strict=True))
    worst = sorted(row[3] for row in rows)[round(0.95 * (repeats - 1))]
    rates = [history.events / seconds for seconds in history.seconds.values()]
    cells = [
        f"{live:,}",
        forecast,
        *(f"{value:.2f}" for value in (*parts, decision, worst, wall)),
        f"{LIMITS[live]:.0f}",
    ]
    print(f"| {' | '.join(cells)} | {rates[0]:,.0f} | {rates[1]:,.0f} |", flush=True)
    return decision < LIMITS[live]


def plan(instances: int, repeats: int) -> None:
    """Print one row of the table of plans."""
    history = History(16 * instances, "survival")
    current = Allocation(instances // 2, instances - instances // 2)
    demand = Demand(1.0, TOKENS_PER_S, HORIZON, 1.0, 4e6)
    seconds = []
    for _ in range(repeats):
        history.go_on(60)
        work = history.forecaster.forecast(history.tracker.snapshot(0.0), HORIZON, PREFILL).work
        start = process_time()
        PLANNED.decide(Situation(demand, current, live=True, work=work))
        seconds.append(process_time() - start)
    print(f"| {instances} | {1e3 * statistics.median(seconds):.1f} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--forecast", nargs="+", choices=get_args(ForecastKind), default=["decode-returns", "survival"])
    arguments = parser.parse_args()
    print(f"Machine: {processor()}, one core; Python {platform.python_version()}, numpy {np.__version__}")
    print(f"Command: {' '.join(['python', *sys.argv])} (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')})")
    print("Milliseconds of CPU time, medians; events/s of the tracker alone and of the forecaster's learning alone.\n")
    columns = ["live", "forecaster", "snapshot", "forecast", "allocation", "decision", "its 95th %", "wall", "limit"]
    print(f"| {' | '.join([*columns, 'tracker events/s', 'learning events/s'])} |")
    print("|" + "---:|" * (len(columns) + 2), flush=True)
    passed = [measure(live, forecast, arguments.repeats) for live in LIMITS for forecast in arguments.forecast]
    print("\n| instances | plan, ms of CPU time |\n|---:|---:|")
    for instances in (8, 32, 128):
        plan(instances, arguments.repeats)
    return 0 if all(passed) else 1


def processor() -> str:
    """The CPU's model name where the system tells it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
