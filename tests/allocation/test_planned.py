"""The flow by values worked out by hand and by properties; the policy on situations whose answer is plain."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorsa.allocation import Allocation, Demand, Moment, Planned, Situation
from prorsa.allocation.outlook import CROWDED, FLIP_COST, Bounds, yields
from prorsa.forecast import Work

DEMAND = Demand(prefill_tokens=0, prefill_speed=1000, horizon=10.0, decode_tokens=0, decode_capacity=1e9)
ROOMY = Bounds(kv_tokens=1e9)
NOTHING = Work(
    queued=0,
    queued_new=0,
    queued_prefix=0,
    decoding=0,
    decoding_left=0,
    decoding_ends=0,
    decoding_context=0,
    returns=(0.0,) * 6,
    ahead=30.0,
    turn_new=1000,
    turn_prefix=0,
    turn_output=100,
    again=0,
    away=1.0,
    token_s=0.1,
)


@dataclass(frozen=True)
class Plain:
    """1,000 prompt tokens a second; a decode step of 0.1 s, and 1 ms more for each request in it."""

    ranks: int = 1
    chunk: int = 1000
    flip_s: float = 5.0
    per_request: float = 0.001

    def prefill_s(self, new: float, prefix: float) -> float:
        return new / 1000

    def prefill_step_s(self, tokens: float, prefix: float, share: float) -> float:
        return tokens / 1000

    def decode_step_s(self, decodes: float, context: float) -> float:
        return 0.1 + self.per_request * decodes


FLAT = Plain(per_request=0.0)


def test_a_decode_instance_at_work_yields_its_seconds() -> None:
    work = replace(NOTHING, decoding=10, decoding_left=1e12, decoding_context=100)
    now = Allocation(1, 1)
    # 300 steps of 0.1 s make 3,000 tokens; each is worth the tenth part of a step.
    assert yields(work, now, [now], FLAT, ROOMY) == pytest.approx([30.0])


def test_what_is_observed_corrects_the_profile() -> None:
    work = replace(NOTHING, decoding=10, decoding_left=1e12, decoding_context=100, token_s=0.15)
    now = Allocation(1, 1)
    # A third less tokens than the profile's steps of 0.1 s would make, each worth what it was.
    assert yields(work, now, [now], FLAT, ROOMY) == pytest.approx([20.0])
    # Mixed instances prefill between their tokens: that is no error of the profile's.
    mixed = Allocation(0, 0, 2)
    assert yields(work, mixed, [mixed], FLAT, ROOMY) == pytest.approx([60.0])


def test_a_flip_costs_what_the_instance_does_not_do_meanwhile() -> None:
    work = replace(NOTHING, decoding=20, decoding_left=1e12, decoding_context=100)
    found = yields(work, Allocation(1, 2), [Allocation(1, 2), Allocation(2, 1)], FLAT, ROOMY)
    # 2 x 30 instance-seconds. The instance that leaves takes its 10 decodes with it: they wait for a prefill, which the other
    # instances, one for 5 s and two then, do at less than one a second each and without any value of their own to wait for.
    assert found[0] == pytest.approx(60.0)
    lost = 30.0 + FLIP_COST * 5.0
    assert 60.0 - lost < found[1] < 60.0


def test_a_change_in_place_costs_nothing() -> None:
    work = replace(NOTHING, decoding=20, decoding_left=1e12, decoding_context=100)
    becomes_mixed = yields(work, Allocation(1, 2), [Allocation(1, 2), Allocation(0, 0, 3)], FLAT, ROOMY)
    assert becomes_mixed == pytest.approx([60.0, 60.0])
    back = yields(work, Allocation(0, 0, 3), [Allocation(0, 0, 3), Allocation(0, 1, 2)], FLAT, ROOMY)
    assert back == pytest.approx([90.0, 90.0])


def test_turns_end_at_the_rate_that_is_forecast() -> None:
    work = replace(NOTHING, decoding=10, decoding_left=1000, decoding_ends=0.01, decoding_context=100)
    now = Allocation(1, 1)
    # A tenth of them a second: 10 e^(-t/10) decode, which is 10 (1 - e^-3) of the 30 instance-seconds. What goes on beyond,
    # 70 s at the rate of the last 10 s, counts for as much.
    last = 10 * (np.exp(-2) - np.exp(-3))
    expected = (10 * (1 - np.exp(-3)) + 7 / 3 * 3 * last) / (1 + 7 / 3)
    assert yields(work, now, [now], FLAT, ROOMY) == pytest.approx([expected], rel=0.03)


def test_turns_that_outlast_the_time_ahead_count_as_they_go_on_at_its_end() -> None:
    """A prefill instance becomes a decode instance and takes half of the decodes: steps of 0.11 s, not 0.12 s."""
    short, long = (replace(NOTHING, decoding=20, decoding_left=left, decoding_context=100) for left in (300, 1e12))
    now, more = Allocation(2, 1), Allocation(1, 2)
    bounds = Bounds(kv_tokens=1e9, even_out=True)
    gains = [np.divide(*reversed(yields(work, now, [now, more], Plain(), bounds))) for work in (short, long)]
    # For 5 s nothing changes; then half of the decodes has to be prefilled again, 10 s of an instance, 5 s on average.
    assert gains[0] < 1.0
    # Ten times as long it goes on at the end; once all have moved, 20 decodes make 12 / 11 of the tokens.
    assert 1.0 + 0.5 / 11 < gains[1] < 12 / 11


def test_what_prefills_took_beyond_the_model_slows_those_that_come() -> None:
    work = replace(NOTHING, queued=1e9, queued_new=1000, turn_output=1e12)
    now, slots = Allocation(1, 1), Bounds(1e9, prefill_slots=0.5 * (1 + CROWDED / 2 + 2.0))
    seen = {"prefilled_rate": 0.5, "prefilled_new": 1000.0}
    # At half of full speed a prefill should take 1 + CROWDED / 2 s; it took 2 s longer.
    slow = replace(work, prefilled_s=1 + CROWDED / 2 + 2.0, **seen)
    (found,) = yields(slow, now, [now], FLAT, slots)
    assert found == pytest.approx(15 + 15 * 30 / 2, rel=0.03)
    # What takes as long as it should is no correction: as many slots then hold more.
    (found_too,) = yields(replace(work, prefilled_s=1 + CROWDED / 2, **seen), now, [now], FLAT, slots)
    assert found_too == yields(work, now, [now], FLAT, slots)[0] > 1.1 * found


def test_a_queue_without_end_keeps_every_prefill_instance_busy() -> None:
    work = replace(NOTHING, queued=1e9, queued_new=1000, turn_output=1e12, turn_new=1000)
    one, two = yields(work, Allocation(2, 1), [Allocation(1, 1), Allocation(2, 1)], Plain(flip_s=0.0), ROOMY)
    # One prefill a second and instance; what they decode afterwards comes on top.
    assert one > 30.0
    assert two - one > 30.0


def test_slots_bound_how_busy_a_prefill_instance_gets() -> None:
    work = replace(NOTHING, queued=1e9, queued_new=1000, turn_output=1e12)
    now = Allocation(1, 1)
    free, bound = (
        yields(work, now, [now], FLAT, Bounds(1e9, prefill_slots=slots))[0] for slots in (np.inf, 0.5 + CROWDED / 4)
    )
    # 30 prefills of 1 s; 1 decode more a second, each with 10 tokens a second of 0.1 s.
    assert free == pytest.approx(30 + 30**2 / 2, rel=0.03)
    # At u = 1/2 a request takes (1 + CROWDED / 2) s, and half of one comes in a second: so many slots give half the speed.
    assert bound == pytest.approx(15 + 15 * 30 / 2, rel=0.03)


def test_mixed_ranks_that_always_prefill_do_not_decode() -> None:
    work = replace(
        NOTHING, queued=1e9, queued_new=1000, decoding=1, decoding_left=300, decoding_ends=1 / 300, decoding_context=1
    )
    (found,) = yields(work, Allocation(0, 0, 1), [Allocation(0, 0, 1)], FLAT, ROOMY)
    assert found == pytest.approx(30.0, rel=0.02)


@pytest.mark.parametrize("even_out", [False, True])
@pytest.mark.parametrize("every", [1, 4])
def test_candidates_flow_side_by_side_as_each_does_alone(every: int, even_out: bool) -> None:
    work = replace(
        NOTHING,
        queued=40,
        queued_new=2500,
        decoding=30,
        decoding_left=300,
        decoding_ends=1 / 300,
        decoding_context=1000,
    )
    work = replace(work, again=0.9, returns=(20.0, 0.0, 5.0), turn_new=700)
    bounds = Bounds(kv_tokens=50_000, prefill_slots=6, prefill_every=every, even_out=even_out)
    now = Allocation(2, 2)
    candidates = [now, Allocation(1, 3), Allocation(3, 1), Allocation(1, 2, 1), Allocation(0, 0, 4), Allocation(4, 0)]
    alone = [yields(work, now, [candidate], Plain(ranks=4), bounds)[0] for candidate in candidates]
    assert yields(work, now, candidates, Plain(ranks=4), bounds) == pytest.approx(alone, rel=1e-12)


amounts = st.floats(0, 500)


@settings(deadline=None)
@given(
    queued=amounts,
    decoding=st.floats(1, 500),
    coming=amounts,
    new=st.floats(1, 5000),
    output=st.floats(1, 5000),
    again=st.floats(0, 1),
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    mixed=st.integers(0, 4),
)
def test_twice_the_work_on_twice_the_instances_yields_twice_as_much(
    queued: float,
    decoding: float,
    coming: float,
    new: float,
    output: float,
    again: float,
    prefill: int,
    decode: int,
    mixed: int,
) -> None:
    work = replace(
        NOTHING,
        queued=queued,
        queued_new=new,
        decoding=decoding,
        decoding_left=output,
        decoding_ends=1 / output,
        decoding_context=1000,
        returns=(coming,) * 6,
        turn_new=new,
        turn_output=output,
        again=again,
    )
    double = replace(work, queued=2 * queued, decoding=2 * decoding, returns=(2 * coming,) * 6)
    costs = Plain(ranks=4)
    bounds = Bounds(kv_tokens=50_000, prefill_every=4, even_out=True)
    now, other = Allocation(2, 2, 1), Allocation(prefill, decode, mixed)
    one = yields(work, now, [other], costs, bounds)
    two = yields(double, Allocation(4, 4, 2), [Allocation(2 * prefill, 2 * decode, 2 * mixed)], costs, bounds)
    # An instance with less than one decode takes a step as for one; elsewhere the flow knows no scale.
    if decoding / 10 >= 1:
        assert two == pytest.approx(2 * one, rel=1e-6, abs=1e-6)
    assert np.isfinite(one).all()


def decide(policy: Planned, work: Work | None, current: Allocation, live: bool = True) -> Allocation | None:
    return policy.decide(Situation(DEMAND, current, live, work))


def test_a_backlog_takes_prefill_instances_and_long_decodes_give_them_back() -> None:
    policy = Planned(Plain(), mixed=False)
    backlog = decide(policy, replace(NOTHING, queued=2000, queued_new=1000, turn_output=50), Allocation(4, 4))
    assert backlog is not None
    assert backlog.prefill > 4
    decodes = replace(NOTHING, turn_new=10, decoding=4000, decoding_left=10_000, decoding_context=100)
    assert decide(policy, decodes, Allocation(4, 4)) == Allocation(1, 7)


def test_where_nothing_is_in_service_and_prompts_are_rare_all_become_mixed() -> None:
    work = replace(NOTHING, queued=64, queued_new=10, turn_new=10, turn_output=1e6)
    policy = Planned(Plain(flip_s=0.0), mixed_gain=0.0)
    assert decide(policy, work, Allocation(4, 4)) == Allocation(0, 0, 8)
    # More mixed instances have to promise more; those that there are need not.
    surer = replace(policy, mixed_gain=1.0)
    assert decide(surer, work, Allocation(4, 4)) == Allocation(1, 7)
    assert decide(surer, work, Allocation(0, 0, 8)) == Allocation(0, 0, 8)


@pytest.mark.parametrize(
    ("work", "live"),
    [
        pytest.param(NOTHING, True, id="nothing to do"),
        pytest.param(replace(NOTHING, queued=500, queued_new=1000), False, id="nobody live"),
        pytest.param(replace(NOTHING, queued=500, queued_new=1000, token_s=0), True, id="nothing known of turns"),
    ],
)
def test_the_roles_stay_where_there_is_nothing_to_plan(work: Work, live: bool) -> None:
    assert decide(Planned(Plain()), work, Allocation(3, 5), live) == Allocation(3, 5)


def test_a_gain_below_the_bound_flips_nothing() -> None:
    work = replace(NOTHING, queued=2000, queued_new=1000, turn_output=50)
    assert decide(Planned(Plain(), gain=10.0, mixed_gain=10.0), work, Allocation(1, 7)) == Allocation(1, 7)
    assert decide(Planned(Plain(), gain=0.0), work, Allocation(1, 7)) != Allocation(1, 7)


def test_what_was_launched_mixed_stays_so_where_roles_cannot_become_mixed() -> None:
    policy = Planned(Plain(), mixed=False)
    work = replace(NOTHING, queued=2000, queued_new=1000, turn_output=50)
    assert decide(policy, work, Allocation(0, 0, 8)) == Allocation(0, 0, 8)
    found = decide(policy, work, Allocation(2, 4, 2))
    assert found is not None
    assert (found.mixed, found.total) == (2, 8)


@pytest.mark.parametrize(("left", "moves"), [(100, False), (1000, True)])
def test_decodes_move_only_where_turns_have_long_to_go(left: float, moves: bool) -> None:
    # At 0.1 s a token, 10 s and 100 s; the time ahead is 30 s.
    work = replace(NOTHING, decoding=10, decoding_left=left)
    situation = Situation(DEMAND, Allocation(1, 1), True, work)
    assert Planned(Plain()).handling(situation, Allocation(1, 1)).even_out is moves
    assert not Planned(Plain(), even_out=False).handling(situation, Allocation(1, 1)).even_out


def test_a_cadence_keeps_prompts_waiting_on_mixed_instances() -> None:
    work = replace(NOTHING, queued=1, queued_new=1000, decoding=10, decoding_left=300, decoding_context=100)
    now = Allocation(0, 0, 1)
    often, seldom = (yields(work, now, [now], FLAT, Bounds(1e9, prefill_every=k))[0] for k in (1, 64))
    # One prompt of a second, whose decode makes tokens as soon as it has begun: on average 3 s later with a cadence of 64.
    assert often > seldom


def test_it_is_asked_at_syncs_and_starts_unless_told_not_to() -> None:
    assert Planned(Plain()).moments == set(Moment)
    assert Planned(Plain(), at_syncs=False).moments == {Moment.GRID}


def test_without_a_forecast_of_the_work_there_is_no_plan() -> None:
    with pytest.raises(ValueError, match=r"policy\.forecast=survival"):
        decide(Planned(Plain()), None, Allocation(1, 1))
