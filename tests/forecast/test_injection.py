import pytest
from story import Story, trajectory

from prorsa.forecast.injection import FixedRate, GroupReplenishment, ReplaceOnReward
from prorsa.lifecycle import events as e
from prorsa.lifecycle.states import State


def test_equation_4_replace_on_reward():
    assert ReplaceOnReward().launches(passed=1.44, horizon=8.0) == 1.44


def test_equation_4_fixed_rate():
    assert FixedRate(rate=0.5).launches(passed=100.0, horizon=8.0) == 4.0


def in_state(state, *names, group):
    return [trajectory(name, 0.0, state, group=group) for name in names]


def test_equation_4_group_replenishment():
    rule = GroupReplenishment(group_size=4)
    Story(rule).tell_all(
        *in_state(State.DONE, "a1", "a2", "a3", group="a"),
        *in_state(State.REWARD, "a4", group="a"),  # one left, in REWARD
        *in_state(State.DONE, "b1", "b2", group="b"),
        *in_state(State.REWARD, "b3", "b4", group="b"),  # two left, both in REWARD
        *in_state(State.REWARD, "c1", "c2", "c3", group="c"),
        *in_state(State.DECODE, "c4", group="c"),  # one decodes: cannot end within the horizon
        *in_state(State.REWARD, "d1", group="d"),  # the other three are not sampled yet
    )
    # 7 are in REWARD and 3.5 are expected to pass: each with chance 0.5. Groups: 0.5 (a) + 0.25 (b), of 4 each.
    assert rule.launches(passed=3.5, horizon=10.0) == pytest.approx(4 * 0.75)
    assert rule.launches(passed=0.0, horizon=10.0) == 0.0
    assert rule.launches(passed=7.0, horizon=10.0) == 8.0


def test_a_group_goes_on_whose_first_member_ended_before_the_next_was_sampled():
    rule = GroupReplenishment(group_size=2)
    Story(rule).tell(
        *trajectory("a1", 0.0, State.DONE, group="a"),
        *trajectory("a2", 50.0, State.REWARD, group="a"),
    )
    assert rule.launches(1.0, 10.0) == 2.0


def test_group_replenishment_follows_every_way_to_end():
    rule = GroupReplenishment(group_size=2)
    story = Story(rule)
    story.tell_all(
        trajectory("a1", 0.0, State.REWARD, group="a"),
        trajectory("a2", 0.0, State.TOOL, group="a", tools=(("python", 1.0, 10),)),
    )
    assert rule.launches(1.0, 10.0) == 0.0
    story.tell(e.Dropped(50.0, "a2", "too stale"))
    assert rule.live("a") == 1
    assert rule.launches(1.0, 10.0) == 2.0
    story.tell(e.Dropped(51.0, "a1", "too stale"))
    assert rule.live("a") == 0
    assert rule.launches(1.0, 10.0) == 0.0
