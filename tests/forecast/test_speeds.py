"""How fast instances prefill and decode, by hand."""

import math

import numpy as np
import pytest

from prorsa.forecast.survival.speeds import FORGET_LINE, LARGE, SPARE, Busy, DecodeSpeed, PrefillSpeeds, Rate


def test_an_instance_is_busy_while_it_has_a_prompt():
    busy = Busy()
    assert busy.until("a", 5.0) == 0.0
    busy.joined("a", 10.0)
    busy.joined("a", 11.0)
    busy.joined("b", 11.5)
    assert busy.until("a", 12.0) == 2.0
    busy.left("a", 13.0)
    busy.left("a", 14.0)
    assert busy.until("a", 20.0) == 4.0
    busy.joined("a", 30.0)
    assert busy.until("a", 31.0) == 5.0
    assert busy.until("b", 31.0) == 19.5


def test_the_speed_of_turns_that_waited_is_kept_apart():
    speed = DecodeSpeed()
    assert speed.of("a") == 0.0
    speed.add("a", False, 100, 2.0)
    assert speed.of("a") == speed.of("a", busy=True) == speed.of("b") == 50.0
    speed.add("b", True, 30, 10.0)
    assert (speed.of("a"), speed.of("a", busy=True), speed.of("b", busy=True)) == (50.0, 3.0, 3.0)
    # Of an instance of which only the other turns are known, the turns of all.
    assert speed.of("b") == 50.0
    speed.add("b", False, 40, 1.0)
    assert speed.of("b") == 40.0
    assert speed.of() == pytest.approx((63 / 64 * 100 + 40) / (63 / 64 * 2 + 1))


def test_a_rate_forgets():
    rate = Rate()
    assert rate.at(100.0) == 0.0
    rate.add(100.0)
    rate.add(120.0)
    assert rate.at(120.0) == pytest.approx((1 + math.exp(-1)) / 20)
    assert rate.at(160.0) == pytest.approx((1 + math.exp(-1)) * math.exp(-2) / 20)
    for step in range(4000):
        rate.add(160.0 + step / 20)
    assert rate.at(360.0) == pytest.approx(20.0, rel=0.01)


def test_unlike_instances_are_one_server():
    speeds = PrefillSpeeds(1000.0)
    # The profile: 1 ms a token, on either kind.
    server = speeds.server(1, 2, new=100.0, rate=0.0)
    assert (server.fixed, server.slope, server.instances, server.latency) == (0.0, 0.001, 3.0, 0.0)
    # Prompts of 100 and 300 tokens in a queue: 0.2 s and 0.4 s where nothing else is done, twice that on a mixed instance.
    for mixed in (False, True):
        time = 0.0
        for number in range(20):
            new, seconds = (100, 0.2) if number % 2 else (300, 0.4)
            time += seconds * (1 + mixed)
            speeds.finished(mixed, f"{mixed}", new, 0.0, time, waits=True)
        one = speeds.server(0 if mixed else 1, 1 if mixed else 0, new=200.0, rate=0.0)
        assert (one.fixed, one.slope) == pytest.approx((0.1 * (1 + mixed), 0.001 * (1 + mixed)))
        # Until a mixed one is seen, it is like the others.
        both = speeds.server(2, 1, new=200.0, rate=0.0)
        assert both.fixed == pytest.approx(0.1)
        assert both.instances == pytest.approx(2.5 if mixed else 3.0)
    # Without a queue they take 0.5 s and 2 s: on average of the three, 1 s.
    for mixed, seconds in ((False, 0.5), (True, 2.0)):
        speeds.finished(mixed, "c", 200, 50.0, 50.0 + seconds, waits=False)
    server = speeds.server(2, 1, new=200.0, rate=0.0)
    assert server.latency == pytest.approx(1.0)
    # Ten prompts a second of 0.3 s each without a queue are more than what 2.5 such instances do.
    assert speeds.server(2, 1, new=200.0, rate=10.0).instances == pytest.approx(SPARE * 10 * 0.3)
    assert speeds.server(2, 1, new=200.0, rate=5.0).instances == pytest.approx(2.5)
    assert speeds.server(0, 0, new=200.0, rate=5.0).instances == 0.0


def test_large_prefills_count_less_in_the_line():
    """Against the weighted least squares of numpy."""
    new = np.array([40_000, 30_000, 50_000, 20_000] + 16 * [200, 900, 1500])
    seconds = 0.02 + 2e-3 * np.sqrt(new) + 1e-5 * new
    speeds, time = PrefillSpeeds(1000.0), 0.0
    for tokens, one in zip(new.tolist(), seconds.tolist(), strict=True):
        time += one
        speeds.finished(False, "a", tokens, 0.0, time, waits=True)
    weights = (1 - FORGET_LINE) ** np.arange(len(new))[::-1] / (1 + new / LARGE)
    slope, fixed = np.polyfit(new, seconds, 1, w=np.sqrt(weights))
    server = speeds.server(1, 0, new=900.0, rate=0.0)
    assert (server.fixed, server.slope) == pytest.approx((fixed, slope))
    # So the small ones are not far off, although the line bends.
    assert server.fixed + 900 * server.slope == pytest.approx(seconds[5], rel=0.1)
