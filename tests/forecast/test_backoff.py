import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.forecast.backoff import MIN_SAMPLES, Backoff, Ema, load_bucket, load_buckets, resolve
from prorsa.forecast.durations import Durations


def test_equation_9_by_hand():
    ema = Ema(alpha=0.1)
    for _ in range(10):
        ema.add(10.0)
    ema.add(20.0)
    assert ema.value == pytest.approx(11.0)  # 0.9 * 10 + 0.1 * 20
    ema.add(0.0)
    assert ema.value == pytest.approx(9.9)


def test_the_average_starts_as_the_mean_of_the_first_ten():
    ema = Ema(alpha=0.1, value=1000.0)
    for value in range(1, 11):
        ema.add(value)
    assert ema.value == pytest.approx(5.5)


def test_a_class_speaks_for_itself_once_it_has_enough_samples():
    backoff = Backoff(lambda: Ema(0.1))
    for _ in range(MIN_SAMPLES - 1):
        backoff.add(("coding", "bash", 0), 3.0)
    for _ in range(MIN_SAMPLES):
        backoff.add(("coding", "tests", 1), 60.0)
    assert backoff.find(("coding", "tests", 1)).value == pytest.approx(60.0)
    # One sample is missing for (coding, bash, 0) and for (coding, bash): all of coding answers.
    assert backoff.find(("coding", "bash", 0)) is backoff.find(("coding",))
    backoff.add(("coding", "bash", 5), 3.0)
    assert backoff.find(("coding", "bash", 0)).value == pytest.approx(3.0)
    assert backoff.find(("coding", "bash", 0)).count == MIN_SAMPLES
    assert backoff.find(("general", "search", 2)) is backoff.find(())


def test_the_widest_class_answers_with_any_sample_and_is_never_left():
    backoff = Backoff(lambda: Ema(0.1), widest=1)
    backoff.add(("cold", "python"), 9.0)
    assert backoff.find(("cold", "other")).value == 9.0
    assert backoff.find(("prewarmed", "python")) is None


@pytest.mark.parametrize(
    ("concurrency", "bucket"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (7, 2), (8, 3), (1023, 9), (1024, 10)]
)
def test_load_bucket(concurrency, bucket):
    assert load_bucket(concurrency) == bucket
    assert load_buckets(np.array([concurrency], dtype=np.int32)).tolist() == [bucket]


@given(st.lists(st.tuples(st.integers(-2, 3), st.integers(0, 300), st.integers(0, 2)), max_size=50))
def test_resolve_asks_once_for_each_class(rows):
    asked = []
    known = {}

    def find(*key):
        asked.append(key)
        return known.setdefault(key[0], Durations()) if key[0] >= 0 else None

    unknown = Durations()
    columns = [np.array([row[n] for row in rows], dtype=np.int32) for n in range(3)]
    statistics, which = resolve(columns, find, unknown)
    assert len(asked) == len(set(asked)) == len(set(rows))
    assert [statistics[index] for index in which] == [known[row[0]] if row[0] >= 0 else unknown for row in rows]


def test_the_keys_that_were_used_longest_ago_are_forgotten():
    """Of five keys, half are kept when a fifth one comes: those that were added to last."""
    backoff = Backoff(lambda: Ema(0.1), most=4)
    for _ in range(MIN_SAMPLES):
        for task in "abcd":
            backoff.add((task, "tool"), ord(task))
    backoff.add(("a", "tool"), ord("a"))
    backoff.add(("e", "tool"), ord("e"))
    assert [backoff.find((task, "tool")).value for task in "ad"] == [ord("a"), ord("d")]
    everything = backoff.find(())
    assert everything.count == 4 * MIN_SAMPLES + 2
    assert [backoff.find((task, "tool")) for task in "bc"] == [everything, everything]


def test_a_class_that_is_in_use_is_never_forgotten():
    backoff = Backoff(lambda: Ema(0.1), most=8)
    for number in range(1000):
        backoff.add(("known", "tool"), 7.0)
        backoff.add((f"stranger {number}",), 1.0)
    assert backoff.find(("known", "tool")).count == 1000
