import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from story import Story, trajectory
from synthetic_rollout import INSTANCES, SyntheticRollout

from prorsa.forecast import FixedRate, GroupReplenishment, LifecycleForecaster, ReplaceOnReward
from prorsa.lifecycle import events as e
from prorsa.lifecycle.events import SandboxMode
from prorsa.lifecycle.states import State


def teller(injection=None, tokens_per_s=100.0, **others):
    forecaster = LifecycleForecaster(injection, tokens_per_s, **others)
    return forecaster, Story(forecaster)


def finished(rewards, admitted=None, **how):
    """One ended trajectory for each reward duration, a second apart."""
    admitted = admitted or [True] * len(rewards)
    return [
        trajectory(f"past{n}", float(n), reward=float(seconds), admitted=passes, **how)
        for n, (seconds, passes) in enumerate(zip(rewards, admitted, strict=True))
    ]


def rewarding(name, elapsed, at=100.0, **how):
    """A trajectory that at `at` has been in REWARD for `elapsed` seconds (3.1 s lie before it)."""
    return trajectory(name, at - elapsed - 3.1, State.REWARD, **how)


def sampler_story(injection, **how):
    forecaster, story = teller(injection)
    story.tell_all(
        *finished(range(1, 11), admitted=[True] * 8 + [False] * 2, **how),
        rewarding("x", 0.5, group="pair", **how),
        rewarding("y", 4.5, group="pair", **how),
    )
    return forecaster, story


# d_hat = 2, so H = 8. x: all ten durations exceed 0.5 and eight end before 8.5, q = 0.8. y: six exceed 4.5, all six end
# before 12.5, q = 1. N_pass = p_hat * sum q = 0.8 * 1.8 = 1.44, and a first prompt has 100 tokens.
@pytest.mark.parametrize(
    ("injection", "launches"),
    [
        (ReplaceOnReward(), 1.44),
        (FixedRate(0.5), 0.5 * 8),
        (GroupReplenishment(2), 2 * (1.44 / 2) ** 2),
    ],
)
def test_equations_2_to_5(injection, launches):
    forecaster, story = sampler_story(injection)
    assert forecaster.launches.admission_rate == pytest.approx(0.8)
    assert forecaster.launches.dispatch_delay == pytest.approx(2.0)
    made = forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"])
    assert made.sampler == pytest.approx(launches * 100)
    assert made.prefill_tokens == pytest.approx(launches * 100)


def test_the_rule_is_evaluated_with_n_pass_at_the_effective_horizon():
    class Recorder(ReplaceOnReward):
        points = []

        def launches(self, passed, horizon):
            self.points.append((horizon, passed))
            return passed

    forecaster, story = sampler_story(Recorder())
    forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"])
    assert max(Recorder.points) == pytest.approx((8.0, 1.44))


def test_no_launch_can_arrive_before_the_dispatch_delay():
    forecaster, story = sampler_story(FixedRate(100.0))
    assert forecaster.forecast(story.snapshot(100.0), 2.0, ["p0"]).sampler == 0.0


def test_the_dispatch_delay_assumes_a_prewarm_hit_where_there_ever_was_one():
    forecaster, story = teller(FixedRate(1.0))
    story.tell(*trajectory("cold", 0.0, dispatch=0.5, startup=20.0, mode=SandboxMode.COLD))
    assert forecaster.launches.dispatch_delay == pytest.approx(20.5)
    story.tell(*trajectory("warm", 0.0, dispatch=0.5, startup=1.0))
    assert forecaster.launches.dispatch_delay == pytest.approx(1.5)


def test_synchronous_rollout_has_no_sampler():
    forecaster, story = sampler_story(None)
    assert forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"]).sampler == 0.0


def test_reward_durations_are_those_of_the_task():
    forecaster, story = teller(ReplaceOnReward())
    story.tell_all(
        *finished([1.0] * 8, task="math"),
        *(trajectory(f"long{n}", float(n), reward=60.0, task="coding") for n in range(8)),
        rewarding("x", 0.0, task="math"),
        rewarding("y", 0.0, task="coding"),
        rewarding("z", 0.0, task="unknown"),  # half of all tasks' durations are short
    )
    assert forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"]).sampler == pytest.approx(100 * 1.5)


def test_equations_6_and_7():
    forecaster, story = teller()
    story.tell_all(
        *(trajectory(f"warm{n}", float(n), startup=0.5 + n) for n in range(10)),  # 0.5 .. 9.5
        *(trajectory(f"cold{n}", float(n), startup=10.5 + n, mode=SandboxMode.COLD) for n in range(10)),  # 10.5 .. 19.5
        trajectory("w", 98.0, State.SANDBOX_STARTING, prompt_known=70),
        trajectory("c", 94.0, State.SANDBOX_STARTING, mode=SandboxMode.COLD),
    )
    made = forecaster.forecast(story.snapshot(100.0), 5.0, ["p0"])
    # w: e = 2; of 2.5 .. 9.5 (8) end before 7: 2.5 .. 6.5 (5); its prompt is known to have 70 tokens.
    # c: e = 6; of 10.5 .. 19.5 (10) ends before 11: 10.5 (1); the mean first prompt has 100.
    assert made.startup == pytest.approx(5 / 8 * 70 + 1 / 10 * 100)


def test_startups_back_off_to_their_mode_but_never_to_the_other():
    forecaster, story = teller()
    story.tell_all(
        *(trajectory(f"a{n}", 10.0 * n, startup=1.0, image="small") for n in range(8)),
        *(trajectory(f"b{n}", 10.0 * n, startup=30.0, image="large") for n in range(8)),
        trajectory("small", 200.0, State.SANDBOX_STARTING, image="small"),
        trajectory("large", 200.0, State.SANDBOX_STARTING, image="large"),
        trajectory("other", 200.0, State.SANDBOX_STARTING, image="other"),
    )
    assert forecaster.forecast(story.snapshot(200.0), 5.0, ["p0"]).startup == pytest.approx(100 * (1 + 0 + 0.5))
    story.tell_all(trajectory("cold", 195.0, State.SANDBOX_STARTING, mode=SandboxMode.COLD))
    # No cold start was ever seen: 5 s old, it ends within 5 s with a chance of one half.
    assert forecaster.forecast(story.snapshot(200.0), 5.0, ["p0"]).startup == pytest.approx(100 * (1.5 + 0.5))


def test_a_trajectory_without_a_sandbox_yet_is_starting_too():
    forecaster, story = teller()
    story.tell_all(
        *(
            trajectory(f"past{n}", float(n), dispatch=1.0, startup=0.5 + n) for n in range(10)
        ),  # in READY after 1.5 .. 10.5
        trajectory("x", 97.0, State.SAMPLED),
    )
    # e = 3: of 3.5 .. 10.5 (8) end before 8: 3.5 .. 7.5 (5).
    assert forecaster.forecast(story.snapshot(100.0), 5.0, ["p0"]).startup == pytest.approx(5 / 8 * 100)


def test_equations_8_and_12_are_exact():
    forecaster, story = teller()
    story.tell_all(
        trajectory("a", 0.0, State.READY, first=123),
        trajectory("b", 0.0, State.READY, first=1000),
        trajectory("c", 0.0, State.PREFILL, first=4567),
        trajectory("d", 0.0, State.DECODE, first=300),
    )
    story.tracker.decoded("d", 11)
    made = forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"])
    assert (made.ready, made.inflight, made.decode_kv) == (1123, 4567, 311)
    assert made.prefill_tokens == 1123 + 4567


def in_tool(name, elapsed, tool, at=100.0, first=100):
    """A trajectory that at `at` has been in the tool for `elapsed` seconds (3.1 s lie before it)."""
    return trajectory(name, at - elapsed - 3.1, State.TOOL, first=first, tools=((tool, 0.0, 0),))


def test_equations_10_and_11():
    forecaster, story = teller()
    story.tell_all(
        *(
            trajectory(f"past{n}", 100.0 * n, tools=(("fast", 4.0, 50), ("slow", 30.0, 200)), output=7)
            for n in range(8)
        ),
        in_tool("a", 1.0, "fast", at=1000.0),  # r = 3
        in_tool("b", 9.0, "fast", at=1000.0),  # overdue: r = 0
        in_tool("c", 25.0, "slow", at=1000.0),  # r = 5, not < 5
        in_tool("d", 25.1, "slow", at=1000.0, first=1000),  # r = 4.9
    )
    made = forecaster.forecast(story.snapshot(1000.0), 5.0, ["p0"])
    assert made.tool == pytest.approx((100 + 50) + (100 + 50) + (1000 + 200))


def test_tool_durations_are_conditioned_on_turn_and_load():
    forecaster, story = teller()
    tools = (("python", 2.0, 0), ("python", 50.0, 0))
    story.tell_all(
        *(trajectory(f"past{n}", 100.0 * n, tools=tools) for n in range(8)),
        # 2 s in turn 0, 50 s in turn 1.
        trajectory("first", 996.9, State.TOOL, tools=(("python", 0.0, 0),)),
        trajectory("second", 993.8, State.TOOL, tools=(("python", 2.0, 0), ("python", 0.0, 0))),
    )
    assert forecaster.forecast(story.snapshot(1000.0), 10.0, ["p0"]).tool == pytest.approx(100)


def test_an_unknown_tool_is_taken_to_run_as_long_again():
    forecaster, story = teller()
    story.tell_all(in_tool("a", 4.9, "new"), in_tool("b", 5.1, "new"))
    assert forecaster.forecast(story.snapshot(100.0), 5.0, ["p0"]).tool == 100


def test_returns_from_decode_by_hand():
    forecaster, story = teller(decode_returns=True)
    story.tell_all(
        # In turn 0, eight of ten call a tool and are back 2 s after they began to decode, one after 6 s, one never.
        *(trajectory(f"past{n}", 100.0 * n, decode=1.5, output=20, tools=(("python", 0.5, 50),)) for n in range(8)),
        trajectory("slow", 800.0, decode=1.5, output=20, tools=(("python", 4.5, 50),)),
        trajectory("direct", 900.0),
        trajectory("x", 995.9, State.DECODE, first=300),  # began at 998
        trajectory("y", 993.9, State.DECODE, first=700),  # began at 996
    )
    made = forecaster.forecast(story.snapshot(1000.0), 3.0, ["p0"])
    # x: 2 s old. Of the two longer ones none ends before 5 s. y: 4 s old, of two one ends (at 6 s) before 7 s.
    assert made.from_decode == pytest.approx(0.5 * (700 + 50))
    assert made.prefill_tokens == pytest.approx(made.from_decode)
    assert teller()[0].forecast(story.snapshot(1000.0), 3.0, ["p0"]).from_decode == 0.0


def test_nothing_returns_from_decode_before_any_turn_was_seen():
    forecaster, story = teller(decode_returns=True)
    story.tell_all(trajectory("x", 90.0, State.DECODE))
    assert forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"]).from_decode == 0.0


def test_a_drop_in_a_tool_teaches_nothing_about_returns():
    forecaster, story = teller(decode_returns=True)
    story.tell_all(in_tool("a", 1.0, "python"))
    story.tell(e.Dropped(101.0, "a", "too stale"))
    story.tell_all(trajectory("x", 90.0, State.DECODE))
    assert forecaster.forecast(story.snapshot(101.0), 1000.0, ["p0"]).from_decode == 0.0


def test_an_end_in_a_tool_counts_as_a_turn_that_nothing_followed():
    """Of three turns one was followed, after 2 s; after a reward and after a tool that never returned came nothing."""
    forecaster, story = teller(decode_returns=True)
    story.tell_all(
        trajectory("past", 0.0, decode=1.5, output=20, tools=(("python", 0.5, 0),)), in_tool("a", 1.0, "python")
    )
    story.tell(e.RewardStarted(101.0, "a", 100))
    story.tell_all(trajectory("x", 98.9, State.DECODE, first=300))
    made = forecaster.forecast(story.snapshot(101.0), 5.0, ["p0"])
    assert made.from_decode == pytest.approx(300 / 3)


def admission_story(**others):
    """100 tokens/s. p0 is at work until 102, p1 is idle; three requests wait and a tool returns at 103."""
    forecaster, story = teller(**others)
    story.tell_all(
        *(trajectory(f"past{n}", 10.0 * n, tools=(("python", 4.0, 50),)) for n in range(2)),
        trajectory("inflight", 97.0, State.PREFILL, first=300, startup=2.0),  # joined at 99
        trajectory("b", 90.0, State.READY, first=500),
        trajectory("c", 91.0, State.READY, first=400),
        trajectory("d", 92.0, State.READY, first=900),
        in_tool("e", 1.0, "python"),  # returns at 103 with 150 tokens
    )
    return forecaster, story


def test_equations_13_and_14():
    forecaster, story = admission_story()
    made = forecaster.forecast(story.snapshot(100.0), 10.0, ["p0", "p1"])
    # inflight ends at 102, b on p1 at 105, c on p0 at 106, d on p1 at 114 (too late), e on p0 at 107.5.
    assert made.admitted_tokens == pytest.approx(300 + 500 + 400 + 150)
    assert made.admitted_backlog == pytest.approx(300 + 500 + 400)
    assert made.admitted_kv == made.admitted_tokens
    shorter = forecaster.forecast(story.snapshot(100.0), 6.5, ["p0", "p1"])
    assert shorter.admitted_tokens == pytest.approx(300 + 500 + 400)


def test_equation_14_takes_the_footprint_of_the_decode_configuration():
    forecaster, story = admission_story(kv_footprint=lambda tokens: 2 * tokens + 1)
    story.tell_all(trajectory("f", 90.0, State.DECODE, first=40))
    made = forecaster.forecast(story.snapshot(100.0), 10.0, ["p0", "p1"])
    assert made.admitted_kv == pytest.approx(2 * (300 + 500 + 400 + 150) + 4)
    assert made.decode_kv == 81


def test_the_queue_is_served_in_order_of_entry_not_of_rows():
    forecaster, story = teller()
    story.tell_all(
        trajectory("first", 0.0, State.PREFILL, first=500), trajectory("second", 1.0, State.READY, first=1100)
    )
    story.tell(e.Requeued(50.0, "first", 500))
    # 11 s for the second come before the 5 s of the first, which was resent.
    assert forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"]).admitted_tokens == 0
    assert forecaster.forecast(story.snapshot(100.0), 12.0, ["p0"]).admitted_tokens == 1100


def test_prefill_times_are_learnt_from_the_instance_that_prefilled():
    forecaster, story = teller(tokens_per_s=1.0)
    # Pairs share p0: the second joins with the first and waits for it, so each takes 2 s. All decode on one instance.
    story.tell_all(
        *(trajectory(f"a{n}", 10.0 * n, instance="p0", prefill=2.0) for n in range(8)),
        *(trajectory(f"b{n}", 10.0 * n, instance="p0", prefill=4.0) for n in range(8)),
        *(trajectory(f"c{n}", 10.0 * n, instance="p1", prefill=2.0) for n in range(8)),
        *(trajectory(f"q{n}", 100.0, State.READY) for n in range(9)),
    )
    # Two instances finish three each within 6.5 s, and a fourth each within 8.5 s.
    assert forecaster.forecast(story.snapshot(200.0), 6.5, ["p0", "p1"]).admitted_tokens == 600
    assert forecaster.forecast(story.snapshot(200.0), 8.5, ["p0", "p1"]).admitted_tokens == 800
    # p1 has worked on r for 0.5 s: 1.5 s are left, then two more fit into 6 s, beside three on p0.
    story.tell_all(trajectory("r", 197.5, State.PREFILL, instance="p1"))
    assert forecaster.forecast(story.snapshot(200.0), 6.0, ["p0", "p1"]).admitted_tokens == 100 + 200 + 200
    assert forecaster.forecast(story.snapshot(200.0), 6.5, ["p0", "p1"]).admitted_tokens == 100 + 200 + 300


def test_launches_spread_over_the_instances():
    forecaster, story = teller(FixedRate(8.0), tokens_per_s=1000.0)
    story.tell(*trajectory("past", 0.0, startup=2.0, first=1000))
    # 64 launches within 8 s, each a second of prefill: 16 instances keep up but for the last second, one admits 7.
    many = forecaster.forecast(story.snapshot(100.0), 10.0, [f"p{n}" for n in range(16)])
    one = forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"])
    assert many.sampler == one.sampler == pytest.approx(64_000)
    assert 48_000 <= many.admitted_tokens <= 58_000
    assert 6000 <= one.admitted_tokens <= 8000


def test_equation_15_and_the_correction_of_the_predicted_parts():
    forecaster, story = teller()
    story.tell_all(
        *(trajectory(f"past{n}", 10.0 * n, tools=(("python", 4.0, 50),)) for n in range(3)),
        in_tool("e", 1.0, "python", first=350),
    )
    assert forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"]).prefill_tokens == pytest.approx(400)
    story.tell(e.Ready(103.0, "e", 600))
    made = forecaster.forecast(story.snapshot(110.0), 10.0, ["p0"])
    assert made.bias == pytest.approx((0.95 * 400 + 600) / (0.95 * 400 + 400))
    assert made.prefill_tokens == made.ready == 600  # the observed parts are not scaled
    story.tell_all(in_tool("f", 1.0, "python", at=115.0, first=450))
    made = forecaster.forecast(story.snapshot(115.0), 10.0, ["p0"])
    appended = (3 * 50 + 250) / 4
    assert made.tool == pytest.approx(450 + appended)
    assert made.prefill_tokens == pytest.approx(600 + made.bias * (450 + appended))


def test_in_synchronous_rollout_a_new_batch_is_no_residual():
    forecaster, story = teller()
    story.tell_all(trajectory("x", 98.0, State.SANDBOX_STARTING, prompt_known=100))
    forecaster.forecast(story.snapshot(100.0), 10.0, ["p0"])
    story.tell(e.Ready(101.0, "x", 100))
    story.tell_all(*(trajectory(f"new{n}", 102.0, State.READY, first=1000) for n in range(50)))
    assert forecaster.forecast(story.snapshot(110.0), 10.0, ["p0"]).bias < 1.3


def test_a_forecast_changes_neither_the_snapshot_nor_the_next_forecast():
    forecaster, story = admission_story()
    first = forecaster.forecast(story.snapshot(100.0), 10.0, ["p0", "p1"])
    again = forecaster.forecast(story.snapshot(100.0), 10.0, ["p0", "p1"])
    assert first == again


def test_nothing_live_needs_nothing():
    forecaster, story = teller(ReplaceOnReward())
    made = forecaster.forecast(story.snapshot(0.0), 10.0, [])
    assert made.prefill_tokens == made.admitted_tokens == made.decode_kv == 0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.booleans(), st.booleans(), st.floats(1.0, 200.0), st.floats(0.5, 20.0))
def test_the_parts_add_up_and_the_observed_ones_are_exact(seed, synchronous, decode_returns, time, horizon):
    rollout = SyntheticRollout(seed, synchronous, batch=40)
    injection = None if synchronous else ReplaceOnReward()
    forecaster = LifecycleForecaster(injection, 30_000.0, decode_returns=decode_returns)
    rollout.listeners.append(forecaster.observe)
    for tick in np.arange(0.0, time, horizon):
        rollout.run_until(tick)
        forecaster.forecast(rollout.tracker.snapshot(tick), horizon, INSTANCES)
    rollout.run_until(time)
    snapshot = rollout.tracker.snapshot(time)
    made = forecaster.forecast(snapshot, horizon, INSTANCES)
    of = {state: int(snapshot.tokens[snapshot.state == state].sum()) for state in State}
    assert (made.ready, made.inflight, made.decode_kv) == (of[State.READY], of[State.PREFILL], of[State.DECODE])
    assert made.prefill_tokens == pytest.approx(made.ready + made.inflight + made.bias * made.predicted)
    assert all(value >= 0 for name, value in dataclasses.asdict(made).items() if name != "work")
    assert made.admitted_backlog <= made.ready + made.inflight
    assert (
        made.admitted_tokens <= (made.ready + made.inflight + made.admission_bias * made.bias * made.predicted) * 1.0001
    )
    longer = forecaster.forecast(snapshot, 2 * horizon, INSTANCES)
    assert longer.startup >= made.startup - 1e-6
    assert longer.tool >= made.tool
    assert longer.sampler >= made.sampler - 1e-6
    assert longer.from_decode >= made.from_decode - 1e-6
