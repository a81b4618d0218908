"""The survival forecaster: by hand, by property, and against rollouts of the same distributions."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_rollout import INSTANCES, SyntheticRollout

from prorsa.forecast import ReplaceOnReward, SurvivalForecaster
from prorsa.forecast.work import AHEAD, SLICES
from prorsa.lifecycle.states import State

HORIZON = 10.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.booleans(), st.floats(1.0, 200.0), st.floats(0.5, 60.0))
def test_the_parts_add_up_and_nothing_is_negative(seed, synchronous, time, horizon):
    rollout = SyntheticRollout(seed, synchronous, batch=40)
    forecaster = SurvivalForecaster(None if synchronous else ReplaceOnReward(), 30_000.0)
    rollout.listeners.append(forecaster.observe)
    rollout.run_until(time)
    snapshot = rollout.tracker.snapshot(time)
    made = forecaster.forecast(snapshot, horizon, INSTANCES)
    of = {state: int(snapshot.tokens[snapshot.state == state].sum()) for state in State}
    assert (made.ready, made.inflight, made.decode_kv) == (of[State.READY], of[State.PREFILL], of[State.DECODE])
    assert made.prefill_tokens == pytest.approx(made.ready + made.inflight + made.bias * made.predicted)
    values = [value for name, value in dataclasses.asdict(made).items() if name != "work"]
    assert all(np.isfinite(value) and value >= 0 for value in values)
    assert made.admitted_backlog <= made.admitted_tokens * (1 + 1e-9) <= made.prefill_tokens * (1 + 1e-6) + 1e-6
    assert made.uncached_tokens <= made.prefill_tokens * (1 + 1e-9) + made.completed_turns + 1e-6
    work = made.work
    assert work.ahead == AHEAD * horizon
    assert len(work.returns) == SLICES
    counts = rollout.tracker.counts()
    assert work.queued == counts[State.READY] + counts[State.PREFILL]
    assert work.decoding == counts[State.DECODE]
    flat = [value for value in dataclasses.astuple(work) if not isinstance(value, tuple)]
    assert all(np.isfinite(value) and value >= 0 for value in [*flat, *work.returns])
    assert work.again <= 1.0
    assert work.away <= work.ahead


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.booleans(), st.floats(20.0, 200.0))
def test_more_comes_in_a_longer_horizon(seed, synchronous, time):
    rollout = SyntheticRollout(seed, synchronous, batch=40)
    forecaster = SurvivalForecaster(None if synchronous else ReplaceOnReward(), 30_000.0)
    rollout.listeners.append(forecaster.observe)
    rollout.run_until(time)
    snapshot = rollout.tracker.snapshot(time)
    made = [forecaster.forecast(snapshot, horizon, INSTANCES) for horizon in (10.0, 20.0, 60.0)]
    for part in ("startup", "tool", "sampler", "from_decode", "prefill_tokens", "admitted_tokens", "completed_turns"):
        values = [getattr(forecast, part) for forecast in made]
        # A coarser grid moves a little across the end of the horizon.
        assert values[1] >= 0.9 * values[0] - 1.0
        assert values[2] >= 0.9 * values[1] - 1.0
