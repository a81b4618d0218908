"""The policies, on demands worked out by hand; within the budget, one instance of each role, steady (promise 8)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.allocation import Adaptive, Allocation, Colocated, Demand, Situation, Static

# W = 6,000 tokens in S = 2 s at theta = 1,000: a = 3. 5,000 of 10,000 KV tokens: b = 0.5.
DEMAND = Demand(prefill_tokens=6000, prefill_speed=1000, horizon=2.0, decode_tokens=5000, decode_capacity=10_000)


def test_demand_in_instances() -> None:
    assert DEMAND.prefill_instances == 3.0
    assert DEMAND.decode_instances == 0.5


def test_adaptive_follows_the_demand() -> None:
    # min(3/3, 1/0.5) = 1 for 3:1; min(2/3, ...) for 2:2.
    assert Adaptive(1, 1, 4).decide(Situation(DEMAND, Allocation(2, 2), live=True)) == Allocation(3, 1)


def test_adaptive_spreads_what_is_in_service_when_an_instance_is_out() -> None:
    assert Adaptive(1, 1, 4).decide(Situation(DEMAND, Allocation(1, 2), live=True)) == Allocation(2, 1)


@pytest.mark.parametrize("current", [Allocation(1, 0), Allocation(0, 1), Allocation(0, 0)])
def test_adaptive_leaves_a_lone_instance_alone(current: Allocation) -> None:
    assert Adaptive(1, 1, 4).decide(Situation(DEMAND, current, live=True)) == current


def test_adaptive_brings_back_a_role_that_has_no_instance() -> None:
    assert Adaptive(1, 1, 4).decide(Situation(DEMAND, Allocation(4, 0), live=True)) == Allocation(3, 1)


def test_adaptive_rests_when_nothing_is_live() -> None:
    assert Adaptive(1, 1, 4).decide(Situation(DEMAND, Allocation(2, 2), live=False)) == Allocation(2, 2)


@pytest.mark.parametrize(
    ("current", "relaunch_s", "target"),
    [
        # 6 GPUs are 1:4 or 2:2. One prefill instance serves a third of a = 3, two serve two thirds.
        (Allocation(1, 4), 1.9, Allocation(2, 2)),
        (Allocation(1, 4), 2.0, Allocation(1, 4)),
        (Allocation(2, 2), 1.9, Allocation(2, 2)),
        # GPUs that nobody uses.
        (Allocation(1, 1), 1.9, Allocation(2, 2)),
        (Allocation(1, 0), 1.9, Allocation(1, 0)),
    ],
)
def test_adaptive_regroups_where_launches_end_within_the_horizon(
    current: Allocation, relaunch_s: float, target: Allocation
) -> None:
    assert Adaptive(2, 1, 6).decide(Situation(DEMAND, current, live=True, relaunch_s=relaunch_s)) == target


def test_adaptive_does_not_regroup_for_more_than_the_demand() -> None:
    # a = 1, b = 2.5: 1:4 and 2:2 would serve all, or four fifths; 1:3 serves all.
    demand = Demand(prefill_tokens=2000, prefill_speed=1000, horizon=2.0, decode_tokens=25_000, decode_capacity=10_000)
    policy = Adaptive(2, 1, 6)
    assert policy.decide(Situation(demand, Allocation(1, 4), live=True, relaunch_s=1.0)) == Allocation(1, 4)
    assert policy.decide(Situation(demand, Allocation(1, 3), live=True, relaunch_s=1.0)) == Allocation(1, 3)
    assert policy.decide(Situation(demand, Allocation(2, 2), live=True, relaunch_s=1.0)) == Allocation(1, 4)


def test_static_and_colocated_do_not_look_at_the_demand() -> None:
    assert Static(1, 3).decide(Situation(DEMAND, Allocation(2, 2), live=True)) == Allocation(1, 3)
    assert Colocated().decide(Situation(DEMAND, Allocation(0, 0), live=True)) is None


@given(
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.integers(1, 10),
    st.integers(1, 10),
    st.sampled_from([(1, 1), (1, 2), (2, 1)]),
)
def test_adaptive_within_budget_one_of_each_and_steady(
    prefill_tokens: float, decode_tokens: float, prefill: int, decode: int, gpus_each: tuple[int, int]
) -> None:
    m_p, m_d = gpus_each
    gpus = max(m_p * prefill + m_d * decode, m_p + m_d)
    policy = Adaptive(m_p, m_d, gpus)
    demand = Demand(prefill_tokens, 1000.0, 10.0, decode_tokens, 8192.0)
    found = policy.decide(Situation(demand, Allocation(prefill, decode), live=True))
    assert found.total == prefill + decode
    assert m_p * found.prefill + m_d * found.decode <= gpus
    assert min(found.prefill, found.decode) >= 1
    assert policy.decide(Situation(demand, found, live=True)) == found
