"""Survival curves, against counts of samples."""

import math

import numpy as np
import pytest

from prorsa.forecast.survival import hazards as learnt
from prorsa.forecast.survival.hazards import HALF_LIFE, Hazards, Level

FIRST = np.zeros(1, dtype=np.intp)


def curves_of(hazards, keys, time, running=()):
    """Of keys of one length, which lie in one class; `running` are (reached, weight) of operations of the first one."""
    reached, weight = np.array(running, dtype=float).reshape(-1, 2).T
    which = np.zeros(len(reached), dtype=np.intp)
    levels = [Level([part], FIRST, which) for part in keys[0][:-1]]
    levels.append(Level([key[-1] for key in keys], np.zeros(len(keys), dtype=np.intp), which))
    return hazards.curves(levels, reached, weight, time)[-1]


def beyond(curves, value):
    return float(curves.beyond(FIRST, np.array([value]))[0])


def test_curves_are_those_of_the_samples():
    values = np.random.default_rng(0).lognormal(1.0, 1.0, 20_000)
    hazards = Hazards()
    for value in values:
        hazards.add(("task", "tool"), value, 0.0)
    curves = curves_of(hazards, [("task", "tool")], 0.0)
    for value in (0.5, 2.0, 3.0, 8.0, 20.0):
        assert beyond(curves, value) == pytest.approx(np.mean(values > value), abs=0.01)
    assert curves.left(FIRST, np.array([5.0]))[0] == pytest.approx(np.mean(values[values > 5] - 5), rel=0.05)
    chance, mean = curves.within(FIRST, 10.0)
    assert chance[0] == pytest.approx(np.mean(values < 10), abs=0.01)
    assert mean[0] == pytest.approx(np.mean(values[values < 10]), rel=0.05)
    course, alive = curves.course(FIRST, np.array([2.0]), 1.5 * np.arange(5.0)[None])
    late = values[values > 2.0]
    assert course[0] / alive == pytest.approx([np.mean(late > value) for value in (2.0, 3.5, 5.0, 6.5, 8.0)], abs=0.01)


def test_what_still_runs_counts_as_far_as_it_has_got():
    # Of 2,000 operations that take 1 s or 100 s, the slow half still runs after 10 s.
    hazards = Hazards()
    for _ in range(1000):
        hazards.add(("task",), 1.0, 0.0)
    assert beyond(curves_of(hazards, [("task",)], 10.0), 5.0) < 0.01
    assert beyond(curves_of(hazards, [("task",)], 10.0, [(10.0, 1000.0)]), 5.0) == pytest.approx(0.5, abs=0.01)


def test_a_class_without_samples_is_like_the_one_around_it():
    hazards = Hazards()
    for _ in range(1000):
        hazards.add(("task", "known"), 4.0, 0.0)
    new, known = curves_of(hazards, [("task", "new"), ("task", "known")], 0.0)._survival
    assert new == pytest.approx(known, abs=0.01)


def test_without_any_sample_a_value_is_expected_to_get_twice_as_far():
    curves = curves_of(Hazards(), [("task",)], 0.0)
    assert beyond(curves, 8.0) / beyond(curves, 4.0) == pytest.approx(0.25)
    assert curves.left(FIRST, np.array([10.0]))[0] == pytest.approx(10.0, rel=0.1)


def test_what_has_got_further_than_anything_yet_goes_on_as_it_did():
    # Of 10,000 that began together and have got to 8, a tenth has ended in each quarter of an octave since 4.
    hazards, left = Hazards(), 10_000.0
    for quarter in range(4):
        for _ in range(round(left / 10)):
            hazards.add(("task",), 4.0 * 2.0 ** ((quarter + 0.5) / 4), 0.0)
        left *= 0.9
    curves = curves_of(hazards, [("task",)], 0.0, [(8.0 - 1e-9, left)])
    assert beyond(curves, 16.0) / beyond(curves, 8.0) == pytest.approx(0.9**4, abs=0.02)


def test_what_never_ends_stays():
    hazards = Hazards()
    for _ in range(500):
        hazards.add(("task",), 1.0, 0.0)
        hazards.add(("task",), math.inf, 0.0)
    assert beyond(curves_of(hazards, [("task",)], 0.0), 1000.0) == pytest.approx(0.5, abs=0.02)


def test_what_began_a_half_life_ago_counts_half():
    hazards = Hazards()
    for _ in range(1000):
        hazards.add(("task",), 1.0, 0.0)
        hazards.add(("task",), 100.0, HALF_LIFE)
    curves = curves_of(hazards, [("task",)], HALF_LIFE)
    assert beyond(curves, 10.0) == pytest.approx(2 / 3, abs=0.01)
    # Long after, the weights have been rewritten; old samples weigh nothing beside new ones.
    late = 200 * HALF_LIFE
    for _ in range(1000):
        hazards.add(("task",), 100.0, late)
    assert beyond(curves_of(hazards, [("task",)], late), 10.0) > 0.98


def test_classes_that_were_used_longest_ago_are_forgotten_and_the_rest_stays(monkeypatch):
    """Against one that never forgets: what is kept has the same curves, what is not those of its wider class."""
    random = np.random.default_rng(3)
    everything, bounded = Hazards(), Hazards()
    keys = [(f"task{number % 3}", f"tool{number}") for number in range(40)]
    for number, key in enumerate(keys):
        for value in random.lognormal(number % 5, 1.0, 30):
            monkeypatch.setattr(learnt, "MOST_KEYS", 1000)
            everything.add(key, value, 10.0)
            monkeypatch.setattr(learnt, "MOST_KEYS", 16)
            bounded.add(key, value, 10.0)
    kept = [key for key in keys if key in bounded._chains]
    assert kept == keys[-len(kept) :]
    assert 8 <= len(kept) <= 16
    for key in kept:
        for hazards in (everything, bounded):
            hazards.curves([Level([key[0]], FIRST, FIRST[:0])], np.zeros(0), np.zeros(0), 10.0)
        ours, theirs = (row_of(hazards, key) for hazards in (bounded, everything))
        assert ours.tolist() == theirs.tolist()
    assert row_of(bounded, ()).tolist() == row_of(everything, ()).tolist()
    assert len(bounded._ended) <= (learnt.BINS + 1) * (2 + 3 + 16)
    forgotten, shared = curves_of(bounded, [("task0", "tool0")], 10.0), curves_of(bounded, [("task0", "none")], 10.0)
    assert beyond(forgotten, 3.0) == beyond(shared, 3.0)


def row_of(hazards, key):
    row = hazards._chain(key)[-1]
    return np.array(hazards._ended).reshape(-1, learnt.BINS + 1)[row]
