"""The survival forecaster: by hand, by property, and against rollouts of the same distributions."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import Story, trajectory
from synthetic_rollout import INSTANCES, SyntheticRollout

from prorsa.forecast import ReplaceOnReward, SurvivalForecaster, WindowMeter, wape
from prorsa.forecast.survival.learnt import Prefills
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


def taught(*more, past=None):
    """A story after 400 trajectories alike: 100 tokens of prompt, a turn of 200 tokens in 2 s, a tool of 4 s, such a turn."""
    forecaster = SurvivalForecaster(None, 1e6)
    story = Story(forecaster)
    how = {"startup": 1.0, "first": 100, "prefill": 0.05, "decode": 2.0, "output": 200, "reward": 1.0}
    before = {"tools": (("python", 4.0, 50),)} | how | (past or {})
    story.tell_all(*(trajectory(f"past{n}", n / 10, group=f"p{n}", **before) for n in range(400)))
    story.tell_all(*(trajectory(**how | one) for one in more))
    return forecaster, story


def test_two_trajectories_by_hand():
    """One has been in its tool for 3 of 4 s, one decodes its first turn for 1 of 2 s."""
    now = 100.0
    in_tool = {"name": "a", "at": now - 6.05, "until": State.TOOL, "tools": (("python", 4.0, 50),)}
    decoding = {"name": "b", "at": now - 2.05, "until": State.DECODE}
    forecaster, story = taught(in_tool, decoding)
    made = forecaster.forecast(story.snapshot(now), HORIZON, ["p0"])
    # The tool returns in 1 s with 100 + 200 + 50 tokens; the decode ends in 1 s, and its tool returns 4 s later.
    assert made.tool == pytest.approx(350, rel=0.05)
    assert made.from_decode == pytest.approx(350, rel=0.1)
    assert made.admitted_tokens == pytest.approx(700, rel=0.1)
    # Of 350 tokens, the 300 of the context are cached.
    assert made.uncached_tokens == pytest.approx(100, rel=0.1)
    # Turns: that of b, and the last ones of both.
    assert made.completed_turns == pytest.approx(3, rel=0.1)
    work = made.work
    assert (work.queued, work.decoding) == (0, 1)
    assert work.decoding_context == pytest.approx(200, rel=0.05)
    assert sum(work.returns) == pytest.approx(1, rel=0.05)
    assert work.returns[0] == pytest.approx(1, rel=0.05)
    assert work.away == pytest.approx(4.0, rel=0.15)
    assert work.turn_new == pytest.approx(51, rel=0.1)
    assert work.token_s == pytest.approx(0.01, rel=0.05)
    # Half of the prefills are first prompts of 100 tokens, half have 350, of which 51 have to be computed.
    assert work.prefilled_s == pytest.approx(0.05)
    assert work.prefilled_new == pytest.approx((100 + 51) / 2, rel=0.1)
    assert work.prefilled_new + work.prefilled_prefix == pytest.approx((100 + 350) / 2, rel=0.1)


def test_means_over_the_last_prefills():
    prefills = Prefills()
    assert prefills.rate == 0.0
    for time, seconds, new, tokens in ((10.0, 1.0, 10, 100), (12.0, 2.0, 20, 200), (16.0, 6.0, 60, 300)):
        prefills.add(time, seconds, new, tokens)
    # Two in the 6 s after the first one.
    assert prefills.rate == pytest.approx(2 / 6)
    assert (prefills.seconds, prefills.new, prefills.tokens) == pytest.approx((3.0, 30.0, 200.0))
    for number in range(2000):
        prefills.add(16.0 + 0.1 * (number + 1), 0.5, 5, 50)
    assert (1 / prefills.rate, prefills.seconds, prefills.new) == pytest.approx((0.1, 0.5, 5.0), rel=0.02)


def test_a_lost_cache_is_computed_anew():
    now = 100.0
    in_tool = {"name": "a", "at": now - 6.05, "until": State.TOOL, "tools": (("python", 4.0, 50),)}
    forecaster, story = taught(in_tool)
    before = forecaster.forecast(story.snapshot(now), HORIZON, ["p0"])
    forecaster.caches_lost()
    after = forecaster.forecast(story.snapshot(now), HORIZON, ["p0"])
    assert before.uncached_tokens < 0.2 * before.prefill_tokens
    assert after.uncached_tokens == pytest.approx(after.prefill_tokens, rel=0.05)


def test_a_decode_waits_for_the_prompts_of_its_instance():
    """Turns of 200 tokens took 2 s each. One has said nothing for 40 s, and a prompt of some seconds is queued."""
    now, mixed = 100.0, {"instance": "d0"}
    decoding = {"name": "a", "at": now - 41.05, "until": State.DECODE, **mixed}
    expected = {5e6: 0.02, 8e6: 0.05}
    for tokens, token_s in expected.items():
        queued = {"name": "b", "at": now - 2.0, "until": State.READY, "group": "other", "first": int(tokens)}
        forecaster, story = taught(decoding, queued | mixed, past=mixed)
        # The line is the profile of 10^6 tokens/s: decodes have half, or a fifth, of the 10 s.
        made = forecaster.forecast(story.snapshot(now), HORIZON, ["d0"])
        assert made.work.token_s == pytest.approx(token_s, rel=0.01)
        # Where another instance prefills, nothing waits.
        made = forecaster.forecast(story.snapshot(now), HORIZON, ["p0"])
        assert made.work.token_s == pytest.approx(0.01, rel=0.01)


# The sampler's rule looks one step ahead: of trajectories that end and are replaced within a minute it says nothing.
@pytest.mark.parametrize(("horizon", "bias"), [(10.0, 0.05), (30.0, 0.1), (60.0, 0.2)])
def test_arrivals_are_right_on_average_and_better_than_those_of_the_last_window(horizon, bias):
    """Against rollouts drawn from the same distributions: an independent simulation of what the forecast works out."""
    rollout = SyntheticRollout(0, synchronous=False)
    forecaster, meter = SurvivalForecaster(ReplaceOnReward(), 30_000.0), WindowMeter()
    rollout.listeners += [forecaster.observe, meter.observe]
    pairs = []
    for window in range(int(900 / horizon)):
        rollout.run_until(window * horizon)
        pairs += meter.finished(rollout.time)
        meter.open(forecaster.forecast(rollout.tracker.snapshot(rollout.time), horizon, INSTANCES))
    pairs = pairs[int(120 / horizon) :]
    said = [made.prefill_tokens - made.backlog for made, _ in pairs]
    came = [real.arrived_tokens for _, real in pairs]
    assert sum(said) == pytest.approx(sum(came), rel=bias)
    if horizon == 10.0:
        near = [abs(a - b) <= 2 * made.prefill_sd for a, b, (made, _) in zip(said, came, pairs, strict=True)]
        assert np.mean(near) > 0.85
        assert wape(said[1:], came[1:]) < 0.7 * wape(came[:-1], came[1:])
