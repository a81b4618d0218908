import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.forecast.admissions import MIN_PREFILLS, PrefillTime, finish_inflight, finish_queued

times = st.floats(min_value=0, max_value=50, allow_nan=False)


def codes(*values):
    return np.array(values, dtype=np.int32)


def test_equation_13_by_hand():
    # Instance 0 is free at 102, instance 1 at 100.
    arrival = np.array([100.0, 100.0, 100.0, 103.0, 109.0])
    service = np.array([5.0, 4.0, 9.0, 1.5, 0.5])
    # 1: 100 -> 105.  0: 102 -> 106.  1: 105 -> 114, too late.  0: 106 -> 107.5.  0: idle until 109 -> 109.5.
    finish = finish_queued(arrival, service, [102.0, 100.0], end=110.0)
    assert finish.tolist() == [105.0, 106.0, np.inf, 107.5, 109.5]


def test_what_finishes_at_the_very_end_is_too_late():
    assert finish_queued(np.zeros(1), np.array([10.0]), [0.0], end=10.0).tolist() == [np.inf]


def test_without_a_prefill_instance_nothing_finishes():
    assert finish_queued(np.zeros(2), np.ones(2), [], end=10.0).tolist() == [np.inf, np.inf]


@given(
    st.lists(st.tuples(times, st.floats(min_value=0, max_value=20)), max_size=40),
    st.lists(times, max_size=5),
    times,
)
def test_equals_the_recurrence_run_to_the_end(requests, free, end):
    requests.sort()
    arrival, service = (np.array([request[n] for request in requests], dtype=float) for n in (0, 1))
    expected, available = [], list(free)
    for joins, takes in requests:
        if not available:
            expected.append(np.inf)
            continue
        instance = min(range(len(available)), key=lambda m: available[m])
        available[instance] = max(joins, available[instance]) + takes
        expected.append(available[instance] if available[instance] < end else np.inf)
    assert finish_queued(arrival, service, free, end).tolist() == expected


def test_in_flight_prefills_keep_their_progress():
    # Instance 1 began its first at 98 (it was busy till then): 1 of 3 s is left. Instance 0's first is overdue by 1 s.
    finish = finish_inflight(
        time=100.0,
        instance=codes(1, 0, 1, 0),
        joined=np.array([97.0, 95.0, 99.0, 96.0]),
        service=np.array([3.0, 4.0, 2.0, 5.0]),
        free_since=np.array([90.0, 98.0]),
    )
    assert finish.tolist() == [101.0, 100.0, 103.0, 105.0]


def test_nothing_in_flight():
    empty = np.zeros(0)
    assert finish_inflight(0.0, codes(), empty, empty, np.zeros(3)).tolist() == []


@given(st.lists(st.tuples(st.integers(0, 3), times, st.floats(min_value=0, max_value=20)), max_size=30))
def test_in_flight_equals_one_instance_after_another(prefills):
    finish = finish_inflight(
        50.0,
        codes(*(instance for instance, _, _ in prefills)),
        np.array([joined for _, joined, _ in prefills]),
        np.array([service for _, _, service in prefills]),
        np.full(4, -np.inf),
    )
    for instance in range(4):
        rows = sorted((n for n, prefill in enumerate(prefills) if prefill[0] == instance), key=lambda n: prefills[n][1])
        clock = 50.0
        for place, row in enumerate(rows):
            _, joined, service = prefills[row]
            clock += max(service - (50.0 - joined), 0.0) if place == 0 else service
            assert finish[row] == pytest.approx(clock)


def test_prefill_time_is_the_profile_until_enough_was_seen():
    prefill = PrefillTime(tokens_per_s=1000.0)
    for n in range(MIN_PREFILLS - 1):
        prefill.finished("p0", 1000, joined=10.0 * n, time=10.0 * n + 5.0)
    assert prefill(np.array([500.0])) == pytest.approx([0.5])
    prefill.finished("p0", 1000, joined=990.0, time=995.0)
    assert prefill(np.array([500.0])) == pytest.approx([2.5])


def test_prefill_time_finds_the_line_behind_a_serial_instance():
    # Requests join in pairs, so that the second waits for the first: 0.1 s + 1 ms a token is spent on each.
    prefill = PrefillTime(tokens_per_s=1.0)
    for n, (first, second) in enumerate([(100, 900), (500, 200), (300, 700), (1000, 400), (50, 2000)]):
        start = 100.0 * n
        middle = start + 0.1 + first / 1000
        prefill.finished("p0", first, joined=start, time=middle)
        prefill.finished("p0", second, joined=start, time=middle + 0.1 + second / 1000)
    assert prefill.line() == pytest.approx((0.1, 0.001))
    assert prefill(np.array([0.0, 1000.0])) == pytest.approx([0.1, 1.1])


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 10)), min_size=MIN_PREFILLS, max_size=40))
def test_prefill_time_is_never_negative(prefills):
    prefill, time = PrefillTime(1000.0), 0.0
    for tokens, takes in prefills:
        prefill.finished("p0", tokens, joined=time, time=time + takes)
        time += takes
    fixed, slope = prefill.line()
    assert fixed >= 0
    assert slope >= 0
