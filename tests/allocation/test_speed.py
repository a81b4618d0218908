"""theta over busy intervals, every number by hand (paper, 4.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.allocation import PrefillSpeed
from prorsa.allocation.speed import RECENT


def test_the_profile_until_an_interval_has_completed() -> None:
    speed = PrefillSpeed(500.0)
    assert speed.theta() == 500.0
    speed.started("p", "a", 100, 1.0)
    assert speed.theta() == 500.0
    speed.finished("p", "a", 2.0)
    assert speed.theta() == 100.0


def test_overlapping_requests_share_the_time_and_idle_time_is_left_out() -> None:
    speed = PrefillSpeed(1.0)
    speed.started("p", "a", 300, 10.0)
    speed.started("p", "b", 500, 11.0)
    speed.finished("p", "a", 12.0)
    assert speed.theta() == 1.0, "the instance is still busy"
    speed.finished("p", "b", 14.0)
    assert speed.theta() == 200.0, "800 tokens in [10, 14)"
    speed.started("p", "c", 400, 100.0)
    speed.finished("p", "c", 104.0)
    assert speed.theta() == 150.0, "1,200 tokens in 8 busy seconds; the 86 idle ones do not count"


def test_instances_are_busy_on_their_own_and_their_seconds_add_up() -> None:
    speed = PrefillSpeed(1.0)
    speed.started("p0", "a", 100, 0.0)
    speed.started("p1", "b", 300, 0.0)
    speed.finished("p0", "a", 1.0)
    speed.finished("p1", "b", 1.0)
    assert speed.theta() == 200.0, "400 tokens in 2 instance-seconds"


def test_back_to_back_requests_are_two_intervals_of_one_busy_time() -> None:
    speed = PrefillSpeed(1.0)
    speed.started("p", "a", 100, 0.0)
    speed.finished("p", "a", 1.0)
    speed.started("p", "b", 300, 1.0)
    speed.finished("p", "b", 2.0)
    assert speed.theta() == 200.0


def test_an_interrupted_interval_says_nothing() -> None:
    speed = PrefillSpeed(7.0)
    speed.started("p", "a", 100, 0.0)
    speed.started("p", "b", 100, 0.0)
    speed.finished("p", "a", 1.0)
    speed.cancelled("p", "b", 50.0)
    assert speed.theta() == 7.0
    speed.started("p", "b", 100, 60.0)
    speed.finished("p", "b", 61.0)
    assert speed.theta() == 100.0, "the next interval starts afresh"


def test_the_last_valid_estimate_outlives_any_idle_time_and_any_interruption() -> None:
    speed = PrefillSpeed(7.0)
    speed.started("p", "a", 100, 0.0)
    speed.finished("p", "a", 1.0)
    speed.started("p", "b", 100, 1e6)
    speed.cancelled("p", "b", 2e6)
    assert speed.theta() == 100.0


def test_an_interval_of_no_duration_is_no_measurement() -> None:
    speed = PrefillSpeed(7.0)
    speed.started("p", "a", 100, 5.0)
    speed.finished("p", "a", 5.0)
    assert speed.theta() == 7.0


def test_only_recent_intervals_count() -> None:
    speed = PrefillSpeed(1.0)
    speed.started("p", "slow", 10, 0.0)
    speed.finished("p", "slow", 100.0)
    for i in range(RECENT):
        speed.started("p", f"t{i}", 50, 1000.0 + i)
        speed.finished("p", f"t{i}", 1000.5 + i)
    assert speed.theta() == 100.0


def test_workloads_are_told_apart_and_mixed_intervals_count_for_none() -> None:
    speed = PrefillSpeed(1.0)
    speed.started("p", "a", 100, 0.0, workload="short")
    speed.finished("p", "a", 1.0)
    speed.started("p", "b", 6000, 2.0, workload="long")
    speed.finished("p", "b", 4.0)
    speed.started("p", "c", 9, 5.0, workload="short")
    speed.started("p", "d", 9, 5.0, workload="long")
    speed.finished("p", "c", 9.0)
    speed.finished("p", "d", 9.0)
    assert speed.theta("short") == 100.0
    assert speed.theta("long") == 3000.0
    assert speed.theta("unseen") == 1.0


def test_misuse_is_named() -> None:
    speed = PrefillSpeed(1.0)
    speed.started("p", "a", 100, 0.0)
    with pytest.raises(ValueError, match="'a' on 'p' started twice"):
        speed.started("p", "a", 100, 1.0)
    with pytest.raises(ValueError, match="'a' on 'q' ended but never started"):
        speed.finished("q", "a", 1.0)
    with pytest.raises(ValueError, match="'b' on 'p' ended but never started"):
        speed.cancelled("p", "b", 1.0)
    with pytest.raises(ValueError, match="must be positive"):
        PrefillSpeed(0.0)


@given(
    st.lists(
        st.tuples(st.floats(0, 40), st.floats(0.1, 10), st.integers(1, 1000)),
        min_size=1,
        max_size=30,
    )
)
def test_busy_time_is_the_union_of_the_service_times(services: list[tuple[float, float, int]]) -> None:
    """Against the area under "is anything in service", computed from the merged intervals."""
    speed = PrefillSpeed(1.0)
    spans = [(start, start + length, tokens) for start, length, tokens in services]
    # At one and the same moment a start comes first, so that touching spans are one busy interval in both computations.
    moments = [(s, 0, i) for i, (s, _, _) in enumerate(spans)] + [(e, 1, i) for i, (_, e, _) in enumerate(spans)]
    for time, ends, i in sorted(moments):
        if ends:
            speed.finished("p", str(i), time)
        else:
            speed.started("p", str(i), spans[i][2], time)
    busy, reach = 0.0, float("-inf")
    for start, end, _ in sorted(spans):
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    assert speed.theta() == pytest.approx(sum(tokens for _, _, tokens in spans) / busy)
