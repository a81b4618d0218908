import math

import pytest
from story import Story, trajectory

from prorsa.forecast import Forecast, WindowMeter, wape
from prorsa.lifecycle import events as e
from prorsa.lifecycle.states import State


def forecast(time, horizon=10.0, ready=0.0, inflight=0.0):
    return Forecast(
        time=time,
        horizon=horizon,
        sampler=0.0,
        startup=0.0,
        ready=ready,
        tool=0.0,
        inflight=inflight,
        bias=1.0,
        prefill_tokens=0.0,
        admitted_tokens=0.0,
        admitted_kv=0.0,
        decode_kv=0.0,
    )


def test_counts_the_backlog_and_what_arrives_and_is_admitted_within_the_window():
    meter = WindowMeter()
    story = Story(meter)
    story.tell_all(
        trajectory("queued", 0.0, State.READY, first=100),
        trajectory("serving", 0.0, State.PREFILL, first=200),
        trajectory("starting", 95.0, State.SANDBOX_STARTING),
    )
    made = forecast(100.0, ready=100.0, inflight=200.0)
    meter.open(made)
    story.tell(
        e.DecodeStarted(101.0, "serving", "d0"),
        e.Sampled(102.0, "new", "g", "math"),
        e.Ready(103.0, "new", 40),
        e.Ready(104.0, "starting", 300),
        e.PrefillStarted(105.0, "new", "p0"),
        e.DecodeStarted(106.0, "new", "d0"),
        e.ToolStarted(107.0, "new", "python", 45),
        e.Ready(109.9, "new", 55),
        e.PrefillStarted(109.9, "queued", "p0"),
        e.DecodeStarted(110.0, "queued", "d0"),  # the window is half open
        e.PrefillStarted(110.0, "new", "p0"),
    )
    assert meter.finished(109.9) == []
    [(closed, measured)] = meter.finished(110.0)
    assert closed is made
    assert measured.prefill_tokens == 300 + 40 + 300 + 55
    assert measured.admitted_tokens == 200 + 40
    assert measured.arrived_tokens == 40 + 300 + 55
    assert measured.new_arrived_tokens == 40 + 55
    assert measured.new_admitted_tokens == 40
    assert meter.finished(1000.0) == []


def test_a_resend_is_not_demand():
    meter = WindowMeter()
    story = Story(meter)
    story.tell_all(
        trajectory("decoding", 0.0, State.DECODE, first=100),
        trajectory("serving", 0.0, State.PREFILL, first=200),
    )
    meter.open(forecast(100.0, inflight=200.0))
    story.tell(
        e.Requeued(101.0, "decoding", 130),
        e.Requeued(101.0, "serving", 200),
        e.PrefillStarted(102.0, "decoding", "p1"),
        e.PrefillStarted(102.0, "serving", "p1"),
        e.DecodeStarted(103.0, "decoding", "d0"),  # admitted before already
        e.DecodeStarted(103.0, "serving", "d0"),  # never admitted before
        e.ToolStarted(104.0, "decoding", "python", 140),
        e.Ready(105.0, "decoding", 150),
        e.PrefillStarted(105.0, "decoding", "p1"),
        e.DecodeStarted(106.0, "decoding", "d0"),  # the next turn counts again
    )
    [(_, measured)] = meter.finished(110.0)
    assert measured.prefill_tokens == 200 + 150
    assert measured.admitted_tokens == 200 + 150


def test_windows_may_overlap():
    meter = WindowMeter()
    story = Story(meter)
    meter.open(forecast(0.0, horizon=10.0))
    story.tell_all(trajectory("a", 1.0, State.READY, startup=1.0, first=10))
    meter.open(forecast(5.0, horizon=10.0, ready=10.0))
    story.tell_all(trajectory("b", 6.0, State.READY, startup=1.0, first=5))
    assert [(made.time, measured.prefill_tokens) for made, measured in meter.finished(20.0)] == [(0.0, 15), (5.0, 15)]


def test_wape_by_hand():
    assert wape([90.0, 220.0, 0.0], [100.0, 200.0, 10.0]) == pytest.approx(40 / 310)


def test_wape_of_nothing_measured():
    assert wape([0.0], [0.0]) == 0.0
    assert math.isinf(wape([1.0], [0.0]))


def test_wape_needs_a_pair_for_each():
    with pytest.raises(ValueError, match="shorter"):
        wape([1.0, 2.0], [1.0])
