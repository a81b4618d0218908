from itertools import pairwise

import numpy as np
import pytest
from story import Story, trajectory

from prorsa.forecast import Kalman, Persistence
from prorsa.forecast.baselines import LocalTrend
from prorsa.lifecycle.states import State


def test_persistence_says_what_the_last_window_was():
    persistence = Persistence()
    story = Story(persistence)
    story.tell_all(trajectory("queued", 0.0, State.READY, first=100))
    first = persistence.forecast(story.snapshot(10.0), 10.0, ["p0"])
    assert (first.prefill_tokens, first.admitted_tokens) == (100, 100)  # nothing measured yet: the backlog
    story.tell_all(trajectory("a", 12.0, State.DECODE, first=30), trajectory("b", 15.0, State.READY, first=50))
    second = persistence.forecast(story.snapshot(20.0), 10.0, ["p0"])
    assert second.prefill_tokens == 100 + 30 + 50
    assert second.admitted_tokens == 30
    assert (second.ready, second.inflight, second.decode_kv) == (150, 0, 30)
    third = persistence.forecast(story.snapshot(25.0), 10.0, ["p0"])
    assert third.prefill_tokens == second.prefill_tokens  # the window from 20 on is not over


def test_kalman_learns_each_finished_window_once():
    kalman = Kalman()
    story = Story(kalman)
    for window in range(12):
        made = kalman.forecast(story.snapshot(10.0 * window), 10.0, ["p0"])
        story.tell_all(trajectory(f"t{window}", 10.0 * window + 1, startup=1.0, first=1000))
    assert made.prefill_tokens == pytest.approx(1000, rel=0.05)
    assert made.admitted_tokens == pytest.approx(1000, rel=0.05)


def test_the_filter_by_hand():
    trend = LocalTrend()
    assert trend.next() is None
    trend.update(10.0)
    assert trend.next() == 10.0
    trend.update(20.0)
    # Level variance 1, level noise 10, no slope: gain (1 + 10) / (1 + 10 + 1), in the filter of that noise.
    fast = list(zip(trend._level_noise, trend._slope_noise, strict=True)).index((10.0, 0.0))
    assert trend._level[fast] == pytest.approx(10 + 10 * 11 / 12)


def test_the_filter_follows_a_ramp_where_the_last_value_lags():
    trend, ramp = LocalTrend(), [100.0 * n for n in range(60)]
    errors = []
    for value in ramp:
        foretold = trend.next()
        errors.append(abs(value - foretold) if foretold is not None else 100.0)
        trend.update(value)
    assert max(errors[-10:]) < 5.0


def test_the_filter_smooths_noise_around_a_constant():
    trend, random = LocalTrend(), np.random.default_rng(0)
    errors, last = [], []
    values = (1000 + 100 * random.standard_normal(300)).tolist()
    for before, value in pairwise(values):
        trend.update(before)
        errors.append(abs(value - trend.next()))
        last.append(abs(value - before))
    assert sum(errors[50:]) < 0.85 * sum(last[50:])
