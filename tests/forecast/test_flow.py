"""What passes through the stages, worked out by hand."""

import numpy as np
import pytest

from prorsa.forecast.survival.flow import REQUESTS, TOKENS, Grid, Queue, Stages, Turns, convolved, pass_through

GRID = Grid(bins=4, step=1.0)
TWO = Queue(np.array([[2.0], [200.0]]), np.full(2, 100.0), np.ones(2))
"""Requests of 100 tokens, that take a second each."""


def lag(*chances):
    """A kernel of one task."""
    return np.array([np.pad(np.array(chances, dtype=float), (0, GRID.bins - len(chances)))])


def stages(**others):
    turns = Turns(ends=lag(0, 1), goes_on=np.array([1.0]), speed=5.0)
    given = {
        "grid": GRID,
        "coming": np.zeros((2, 1, GRID.bins)),
        "coming_work": np.zeros(GRID.bins),
        "queued": Queue(np.zeros((2, 1)), np.zeros(0), np.zeros(0)),
        "queued_turns": turns,
        "turns": turns,
        "tools": lag(1),
        "appended": np.array([10.0]),
        "later_work": np.array([0.0]),
        "instances": 1.0,
        "latency": 0.0,
    }
    return Stages(**given | others)


def test_a_queue_is_served_at_the_speed_of_the_instances_and_comes_back_longer():
    # Two requests of 100 tokens, 2 s of work: one a bin. A turn ends one bin later with 5 tokens more, a result adds 10.
    passed = pass_through(stages(queued=TWO))
    assert passed.admitted_queued[REQUESTS, 0] == pytest.approx([1, 1, 0, 0])
    assert passed.admitted_queued[TOKENS, 0] == pytest.approx([100, 100, 0, 0])
    # What is admitted in bin k is back in k + 1, and again after that.
    assert passed.arrived[REQUESTS, 0] == pytest.approx([0, 1, 2, 2])
    assert passed.arrived[TOKENS, 0] == pytest.approx([0, 115, 245, 275])
    assert passed.decoding[REQUESTS] == pytest.approx([1, 2, 2, 2])


def test_a_queue_is_served_in_order():
    # The first takes 3 of 4 s and has 300 of 400 tokens.
    queued = Queue(np.array([[2.0], [400.0]]), np.array([300.0, 100.0]), np.array([3.0, 1.0]))
    passed = pass_through(stages(queued=queued))
    assert passed.admitted_queued[REQUESTS, 0] == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    assert passed.admitted_queued[TOKENS, 0] == pytest.approx([100, 100, 100, 100])
    queued = Queue(queued.volume, queued.tokens, np.array([1.0, 3.0]))
    passed = pass_through(stages(queued=queued))
    assert passed.admitted_queued[REQUESTS, 0] == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert passed.admitted_queued[TOKENS, 0] == pytest.approx([300, 100 / 3, 100 / 3, 100 / 3])


def test_what_arrives_waits_behind_the_queue():
    coming = np.zeros((2, 1, GRID.bins))
    coming[:, 0, 0] = 1.0, 50.0
    last = Turns(ends=lag(0, 1), goes_on=np.array([0.0]), speed=5.0)
    work = np.array([1.0, 0, 0, 0])
    passed = pass_through(
        stages(
            coming=coming,
            coming_work=work,
            queued=TWO,
            turns=last,
            queued_turns=last,
        )
    )
    assert passed.admitted_new[REQUESTS, 0] == pytest.approx([0, 0, 1, 0])
    assert passed.later.sum() == 0.0
    assert passed.ended[TOKENS, 0] == pytest.approx([0, 105, 105, 55])


def test_a_latency_delays_an_idle_instance_too():
    coming = np.zeros((2, 1, GRID.bins))
    coming[:, 0, 0] = 4.0, 400.0
    passed = pass_through(stages(coming=coming, latency=1.25))
    assert passed.admitted_new[REQUESTS, 0, :3] == pytest.approx([0, 3, 1])


def test_nothing_is_admitted_without_instances():
    passed = pass_through(stages(queued=TWO, instances=0.0))
    assert passed.admitted_queued.sum() == 0.0


def test_convolution_is_that_of_numpy():
    volume, kernel = np.array([[1.0, 2.0, 0.0, 3.0]]), lag(0.5, 0.25, 0.25)
    assert convolved(volume, kernel)[0] == pytest.approx(np.convolve(volume[0], kernel[0])[: GRID.bins])
