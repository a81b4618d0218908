import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.forecast.durations import WINDOW, Durations, Running

seconds = st.floats(min_value=0, max_value=1e4, allow_nan=False)


def running(samples_by_class, which, elapsed):
    classes = []
    for samples in samples_by_class:
        durations = Durations()
        for sample in samples:
            durations.add(sample)
        classes.append(durations)
    return Running(classes, np.array(which, dtype=np.intp), np.array(elapsed, dtype=float))


@pytest.mark.parametrize(
    ("elapsed", "horizon", "probability"),
    [
        (3.5, 3.0, 3 / 7),  # 4..10 are longer; 4, 5 and 6 end before 6.5
        (4.0, 3.0, 2 / 6),  # strictly longer than 4: 5..10; strictly before 7: 5 and 6
        (0.0, 100.0, 1.0),
        (0.0, 1.0, 0.0),
        (9.5, 0.4, 0.0),
    ],
)
def test_equation_2_by_hand(elapsed, horizon, probability):
    assert running([range(1, 11)], [0], [elapsed]).ends_within(horizon) == pytest.approx([probability])


def test_residual_is_the_mean_of_the_samples_that_end_in_time():
    # At 3.5 the next 3 s hold the samples 4, 5 and 6: 0.5, 1.5 and 2.5 s away.
    assert running([range(1, 11)], [0], [3.5]).arrivals_within(3.0)[1] == pytest.approx([1.5])


def test_beyond_the_evidence_it_doubles_its_age_as_likely_as_not():
    outlived, unseen = running([[1, 2]], [0], [6.0]), running([[]], [0], [6.0])
    for operation in (outlived, unseen):
        assert operation.ends_within(6.0) == pytest.approx([0.5])
        assert operation.ends_within(18.0) == pytest.approx([0.75])
        # Half of the 0.5 that end within 6 s do so within r with r / (6 + r) = 0.25.
        assert operation.arrivals_within(6.0)[1] == pytest.approx([2.0])


def test_infinite_samples_are_those_that_never_end():
    two = running([[1.0, math.inf, math.inf], [1.0, 3.0]], [0, 0, 1], [0.0, 1.0, 0.0])
    assert two.ends_within(1e6) == pytest.approx([1 / 3, 0, 1])
    assert two.arrivals_within(1e6)[1] == pytest.approx([1.0, 1e6, 2.0])


def test_nothing_ends_within_no_time():
    assert running([[], [1.0, 2.0]], [0, 0, 1], [0.0, 3.0, 1.0]).ends_within(0.0) == pytest.approx([0, 0, 0])


def test_old_samples_are_forgotten():
    durations = Durations()
    for sample in [1.0] * WINDOW + [2.0] * WINDOW:
        durations.add(sample)
    assert durations.count == WINDOW
    assert set(durations.ascending()) == {2.0}


@given(
    st.lists(st.lists(seconds, max_size=20), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), seconds), max_size=20),
    seconds,
)
def test_equals_counting_one_by_one(samples, operations, horizon):
    operations = [(cls % len(samples), elapsed) for cls, elapsed in operations]
    asked = running(samples, [cls for cls, _ in operations], [elapsed for _, elapsed in operations])
    probabilities, residuals = asked.arrivals_within(horizon)
    assert probabilities.tolist() == asked.ends_within(horizon).tolist()
    for (cls, elapsed), probability, residual in zip(operations, probabilities, residuals, strict=True):
        longer = [sample for sample in samples[cls] if sample > elapsed]
        ending = [sample for sample in longer if sample < elapsed + horizon]
        if longer:
            assert probability == pytest.approx(len(ending) / len(longer))
        if ending:
            assert residual == pytest.approx(sum(ending) / len(ending) - elapsed, abs=1e-6)
        assert 0.0 <= residual <= horizon


@given(st.lists(seconds, max_size=20), st.lists(seconds, min_size=1, max_size=10), seconds, seconds)
def test_probability_is_within_0_and_1_and_grows_with_the_horizon(samples, elapsed, horizon, more):
    operations = running([samples], [0] * len(elapsed), elapsed)
    shorter, longer = operations.ends_within(horizon), operations.ends_within(horizon + more)
    assert np.all((shorter >= 0) & (longer <= 1))
    assert np.all(shorter <= longer + 1e-12)
