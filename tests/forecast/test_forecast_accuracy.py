"""The lifecycle forecast against looking at past windows only, on a synthetic rollout of two agentic tasks."""

import pytest
from synthetic_rollout import INSTANCES, Kind, SyntheticRollout

from prorsa.forecast import Kalman, LifecycleForecaster, Persistence, ReplaceOnReward, WindowMeter, wape

HORIZON = 10.0
WARM_UP = 4
WINDOWS = 80


def candidates(injection):
    return {
        "lifecycle": LifecycleForecaster(injection, 30_000.0),
        "persistence": Persistence(),
        "kalman": Kalman(),
    }


def judge(rollout, forecasters):
    """Name of the forecaster -> (WAPE of the prefill demand, WAPE of the decode admissions)."""
    meters = {name: WindowMeter() for name in forecasters}
    rollout.listeners += [listener.observe for listener in (*forecasters.values(), *meters.values())]
    outcomes = {name: [] for name in forecasters}
    for window in range(WINDOWS + 1):
        rollout.run_until(window * HORIZON)
        snapshot = rollout.tracker.snapshot(rollout.time)
        for name, forecaster in forecasters.items():
            outcomes[name] += meters[name].finished(rollout.time)
            meters[name].open(forecaster.forecast(snapshot, HORIZON, INSTANCES))
    return {name: errors(pairs[WARM_UP:]) for name, pairs in outcomes.items()}


def errors(pairs):
    return (
        wape([made.prefill_tokens for made, _ in pairs], [real.prefill_tokens for _, real in pairs]),
        wape([made.admitted_tokens for made, _ in pairs], [real.admitted_tokens for _, real in pairs]),
    )


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_beats_persistence_and_kalman(seed, synchronous):
    found = judge(SyntheticRollout(seed, synchronous), candidates(None if synchronous else ReplaceOnReward()))
    for demand in (0, 1):
        best = min(found["persistence"][demand], found["kalman"][demand])
        assert found["lifecycle"][demand] < 0.9 * best, found
        assert found["lifecycle"][demand] < (0.20 if synchronous else 0.08), found


def test_returns_from_decode_help_where_turns_are_shorter_than_the_horizon():
    quick = Kind("quick", 2000, 8, 60, {"python": (0.5, 300)}, 1.0)
    found = judge(
        SyntheticRollout(0, synchronous=True, kinds=(quick,)),
        candidates(None) | {"beyond the paper": LifecycleForecaster(None, 30_000.0, decode_returns=True)},
    )
    beyond, paper = found["beyond the paper"], found["lifecycle"]
    assert beyond[0] < 0.5 * paper[0], found
    assert beyond[1] < 0.95 * paper[1], found
