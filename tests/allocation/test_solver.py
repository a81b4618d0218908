"""The solver (promise 8): numbers by hand, brute force in exact fractions, and the paper's own two-case formulation."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prorsa.allocation import Allocation, solve

DEMANDS = st.one_of(st.just(0.0), st.integers(0, 40).map(lambda n: n / 8), st.floats(0.0, 50.0))
GPUS_EACH = st.integers(1, 5)
EPSILON = Fraction(1, 10**8)
"""Differences below this are rounding."""


@st.composite
def problems(draw: st.DrawFn) -> tuple[float, float, int, int, int, Allocation]:
    m_p, m_d = draw(GPUS_EACH), draw(GPUS_EACH)
    gpus = draw(st.integers(m_p + m_d, 40))
    current = Allocation(draw(st.integers(0, 12)), draw(st.integers(0, 12)))
    return draw(DEMANDS), draw(DEMANDS), m_p, m_d, gpus, current


def served(count: int, demand: float) -> Fraction | float:
    return Fraction(count) / Fraction(demand) if demand > 0 else math.inf


def affordable(m_p: int, m_d: int, gpus: int) -> list[Allocation]:
    most = range(1, gpus + 1)
    return [Allocation(p, d) for p in most for d in most if m_p * p + m_d * d <= gpus]


def test_by_hand_a_margin_fits() -> None:
    # 4 GPUs, a = 1, b = 1: 2:2 has margin 1; 3:1 and 1:3 have none.
    assert solve(1.0, 1.0, 1, 1, 4, Allocation(1, 3)) == Allocation(2, 2)
    # a = 0.9, b = 2.5 on 4 GPUs: 1:3 gives min(1.11, 1.2), 2:2 only 0.8.
    assert solve(0.9, 2.5, 1, 1, 4, Allocation(3, 1)) == Allocation(1, 3)


def test_by_hand_the_demand_does_not_fit() -> None:
    # a = 6, b = 3 on 4 GPUs. Demand over capacity, the larger of the two: 3:1 max(2, 3), 2:2 max(3, 1.5), 1:3 max(6, 1).
    # 3:1 and 2:2 tie at 3; the current roles decide.
    assert solve(6.0, 3.0, 1, 1, 4, Allocation(3, 1)) == Allocation(3, 1)
    assert solve(6.0, 3.0, 1, 1, 4, Allocation(2, 2)) == Allocation(2, 2)
    assert solve(6.1, 3.0, 1, 1, 4, Allocation(2, 2)) == Allocation(3, 1)


def test_by_hand_unequal_gpus_an_instance() -> None:
    # m_p = 2, m_d = 3, G = 12, a = 2, b = 2. Candidates: 1:3 (11) 0.5; 2:2 (10) 1; 3:2 (12) 1; 4:1 (11) 0.5.
    # 2:2 and 3:2 cost no instance its role; 3:2 uses all 12 GPUs.
    assert solve(2.0, 2.0, 2, 3, 12, Allocation(2, 2)) == Allocation(3, 2)


def test_equal_gpus_use_the_whole_budget_and_the_rest_keeps_its_role() -> None:
    # Decode needs nothing beyond its one, so prefill takes all; without any demand nothing moves.
    assert solve(3.0, 0.0, 1, 1, 8, Allocation(4, 4)) == Allocation(7, 1)
    assert solve(0.0, 3.0, 1, 1, 8, Allocation(4, 4)) == Allocation(1, 7)
    assert solve(0.0, 0.0, 1, 1, 8, Allocation(5, 3)) == Allocation(5, 3)


def test_a_fixed_number_of_instances() -> None:
    # 4 instances, prefill of 1 GPU, decode of 2, 6 GPUs: 1:3 would take 7, so 2:2 is the most decode there can be.
    assert solve(0.5, 9.0, 1, 2, 6, Allocation(3, 1), instances=4) == Allocation(2, 2)
    assert solve(9.0, 0.5, 1, 2, 6, Allocation(2, 2), instances=4) == Allocation(3, 1)


@given(problems())
def test_as_good_as_the_best_of_all_pairs(problem: tuple[float, float, int, int, int, Allocation]) -> None:
    a, b, m_p, m_d, gpus, _ = problem
    found = solve(*problem)
    best = max(min(served(pair.prefill, a), served(pair.decode, b)) for pair in affordable(m_p, m_d, gpus))
    got = min(served(found.prefill, a), served(found.decode, b))
    assert got >= best * (1 - EPSILON)
    assert found.prefill >= 1
    assert found.decode >= 1
    assert m_p * found.prefill + m_d * found.decode <= gpus


@given(problems())
def test_no_equally_good_pair_costs_fewer_instances_their_role(
    problem: tuple[float, float, int, int, int, Allocation],
) -> None:
    a, b, m_p, m_d, gpus, current = problem
    found = solve(*problem)

    def leaving(pair: Allocation) -> int:
        return max(0, current.prefill - pair.prefill) + max(0, current.decode - pair.decode)

    def ratio(pair: Allocation) -> Fraction | float:
        return min(served(pair.prefill, a), served(pair.decode, b))

    as_good = [pair for pair in affordable(m_p, m_d, gpus) if ratio(pair) >= ratio(found)]
    least = min(map(leaving, as_good))
    assert leaving(found) == least
    spent = m_p * found.prefill + m_d * found.decode
    assert spent == max(m_p * p.prefill + m_d * p.decode for p in as_good if leaving(p) == least)


@given(problems())
def test_the_one_rule_is_the_papers_two_cases(problem: tuple[float, float, int, int, int, Allocation]) -> None:
    """Eq. 1 with the largest d that fits; where d = 0 does not, the smallest larger demand-to-capacity ratio."""
    a, b, m_p, m_d, gpus, _ = problem
    if a == 0 or b == 0:
        return
    found = solve(*problem)
    a_exact, b_exact = Fraction(a), Fraction(b)

    def cost(margin: Fraction) -> int:
        return m_p * math.ceil(a_exact * (1 + margin)) + m_d * math.ceil(b_exact * (1 + margin))

    if cost(Fraction(0)) <= gpus:
        # The cost only steps up where one of the two counts does: the largest d that fits is at such a step.
        steps = [Fraction(n) / demand - 1 for demand in (a_exact, b_exact) for n in range(1, gpus + 1)]
        margin = max(step for step in steps if step >= 0 and cost(step) <= gpus)
        reached = min(found.prefill / a_exact, found.decode / b_exact)
        assert (1 + margin) * (1 - EPSILON) <= reached <= 1 + margin
    else:
        load = min(max(a_exact / p.prefill, b_exact / p.decode) for p in affordable(m_p, m_d, gpus))
        assert load <= max(a_exact / found.prefill, b_exact / found.decode) <= load * (1 + EPSILON)


@given(problems())
def test_constant_demand_does_not_oscillate(problem: tuple[float, float, int, int, int, Allocation]) -> None:
    first = solve(*problem)
    assert solve(*problem[:5], first) == first


@given(problems(), st.floats(0.0, 30.0))
@example((2.0, 2.0, 1, 1, 3, Allocation(0, 0)), 1e-9)
def test_more_demand_for_a_role_never_gives_it_less(
    problem: tuple[float, float, int, int, int, Allocation], more: float
) -> None:
    a, b, m_p, m_d, gpus, current = problem
    found = solve(*problem)
    assert solve(a + more, b, m_p, m_d, gpus, current).prefill >= found.prefill
    assert solve(a, b + more, m_p, m_d, gpus, current).decode >= found.decode


@given(DEMANDS, DEMANDS, st.integers(1, 4), st.integers(1, 20), st.integers(1, 20))
def test_flips_keep_the_number_of_instances(a: float, b: float, gpus_each: int, prefill: int, decode: int) -> None:
    current = Allocation(prefill, decode)
    budget = gpus_each * current.total
    found = solve(a, b, gpus_each, gpus_each, budget, current)
    assert found.total == current.total
    assert solve(a, b, gpus_each, gpus_each, budget, current, instances=current.total) == found


def test_thousands_of_gpus() -> None:
    # a : b = 3 : 1 on 16,384 GPUs of 4 each: 3,072 and 1,024 instances, an exact fit.
    assert solve(300.0, 100.0, 4, 4, 16_384, Allocation(2048, 2048)) == Allocation(3072, 1024)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1.0, 2, 2, 3), "budget of 3 GPUs: one instance of each role takes 4"),
        ((-1.0, 1.0, 1, 1, 4), "prefill demand -1.0: it must be finite and not negative"),
        ((1.0, math.nan, 1, 1, 4), "decode demand nan"),
        ((math.inf, 1.0, 1, 1, 4), "prefill demand inf"),
        ((1.0, 1.0, 0, 1, 4), "0 and 1 GPUs an instance"),
    ],
)
def test_the_impossible_is_refused(arguments: tuple[float, float, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(*arguments, Allocation(1, 1))


def test_a_fixed_number_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"5 instances of 1 .* do not fit 4 GPUs"):
        solve(1.0, 1.0, 1, 1, 4, Allocation(2, 3), instances=5)
