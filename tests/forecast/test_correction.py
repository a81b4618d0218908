import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.forecast.correction import BOUND, BiasCorrection

tokens = st.floats(min_value=0, max_value=1e9)


def test_by_hand():
    correction = BiasCorrection()
    assert correction.bias == 1.0
    correction.update(predicted=100.0, arrived=200.0)
    # The imagined right window weighs 0.95: (0.95 * 100 + 200) / (0.95 * 100 + 100).
    assert correction.bias == pytest.approx(295 / 195)
    correction.update(predicted=50.0, arrived=0.0)
    assert correction.bias == pytest.approx(0.95 * 295 / (0.95 * 195 + 50))


def test_finds_a_constant_bias():
    correction = BiasCorrection()
    for _ in range(200):
        correction.update(100.0, 150.0)
    assert correction.bias == pytest.approx(1.5, rel=1e-3)


def test_a_window_without_a_prediction_before_any_other_teaches_nothing():
    correction = BiasCorrection()
    correction.update(0.0, 1000.0)
    assert correction.bias == 1.0


def test_idle_windows_do_not_wear_away_what_was_learnt():
    correction, same = BiasCorrection(), BiasCorrection()
    for learner in (correction, same):
        learner.update(100.0, 300.0)
    for _ in range(1000):
        same.update(0.0, 0.0)
    for learner in (correction, same):
        learner.update(10.0, 0.0)
    assert same.bias == correction.bias


@given(st.lists(st.tuples(tokens, tokens), max_size=30))
def test_is_bounded(windows):
    correction = BiasCorrection()
    for predicted, arrived in windows:
        correction.update(predicted, arrived)
        assert 1 / BOUND <= correction.bias <= BOUND
