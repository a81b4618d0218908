"""The figures of a report, each against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from prorsa.allocation import Allocation, Demand
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, TurnRecord
from prorsa.engines.protocol import FinishReason, Role
from prorsa.forecast import Forecast
from prorsa.lifecycle import (
    DecodeStarted,
    Done,
    Dropped,
    Event,
    PrefillStarted,
    Ready,
    Requeued,
    RewardStarted,
    Sampled,
    State,
    ToolStarted,
)
from prorsa.report.measures import (
    RoleSpan,
    Stay,
    cumulative_tokens,
    forecast_errors,
    integrity,
    inter_token_latencies,
    replay,
    rewards_by_order,
    role_spans,
    totals,
)
from prorsa.report.rundir import Decided, InstanceChange, Run, read_run


def run_of(events: list[Event], decided: list[Decided] | None = None, turns: list[TurnRecord] | None = None) -> Run:
    return Run(Path("run"), {}, events, decided or [], turns or [], [], [], [], {}, [])


def decided(after_events: int, time: float, ready: float, prefill: float, admitted: float) -> Decided:
    forecast = Forecast(time, 2.0, 0.0, 0.0, ready, 0.0, 0.0, 1.0, prefill, admitted, admitted, 0.0)
    demand = Demand(prefill, 100.0, 2.0, admitted, 1000.0)
    return Decided(after_events, Decision(time, {}, forecast, demand, Allocation(1, 1), True, Allocation(1, 1)))


def turn(name: str, index: int, prompt: int, cached: int, arrivals: tuple[float, ...]) -> TurnRecord:
    return TurnRecord(
        name, index, prompt, cached, (("p", "d"),), 0.0, arrivals, (0,) * len(arrivals), FinishReason.STOP
    )


TWO: list[Event] = [
    Sampled(0.0, "a", "g", "x"),
    Ready(1.0, "a", 100),
    # decision at 1.5 over [1.5, 3.5): 100 waiting, b arrives with 40; a is admitted with 100
    PrefillStarted(1.6, "a", "p"),
    DecodeStarted(2.0, "a", "d"),
    Sampled(2.0, "b", "g", "x"),
    Ready(3.0, "b", 40),
    # decision at 3.5 over [3.5, 5.5): 40 waiting, a comes back with 150; b is admitted with 40
    ToolStarted(3.6, "a", "python", 120),
    PrefillStarted(3.6, "b", "p"),
    Ready(4.0, "a", 150),
    DecodeStarted(5.0, "b", "d"),
    # after the windows
    PrefillStarted(5.5, "a", "p"),
    DecodeStarted(6.0, "a", "d"),
]
DECIDED = [decided(2, 1.5, 100.0, 120.0, 90.0), decided(6, 3.5, 40.0, 200.0, 50.0)]


def test_windows_and_wape_by_hand() -> None:
    replayed = replay(run_of(TWO, DECIDED))
    measured = [(window.measured.prefill_tokens, window.measured.admitted_tokens) for window in replayed.windows]
    assert measured == [(140, 100), (190, 40)]
    persistence = [
        (window.persistence.prefill_tokens, window.persistence.admitted_tokens) for window in replayed.windows
    ]
    assert persistence == [(100, 100), (140, 100)], "the backlog first, then the window before"
    errors = forecast_errors(replayed.windows)
    assert errors.windows == 2
    assert errors.prefill == pytest.approx((20 + 10) / 330)
    assert errors.admitted == pytest.approx((10 + 10) / 140)
    assert errors.persistence_prefill == pytest.approx((40 + 50) / 330)
    assert errors.persistence_admitted == pytest.approx((0 + 60) / 140)


def test_a_window_that_the_run_did_not_reach_the_end_of_is_left_out() -> None:
    replayed = replay(run_of(TWO[:-1], [*DECIDED, decided(10, 5.4, 150.0, 1.0, 1.0)]))
    assert [window.forecast.time for window in replayed.windows] == [1.5, 3.5]


def test_where_every_trajectory_was() -> None:
    replayed = replay(
        run_of([*TWO[:4], Requeued(2.5, "a", 104), Dropped(3.0, "a", "stale"), Sampled(3.0, "b", "g", "x")])
    )
    assert replayed.stays["a"] == [
        Stay(State.SAMPLED, 0.0, 1.0),
        Stay(State.READY, 1.0, 1.6),
        Stay(State.PREFILL, 1.6, 2.0),
        Stay(State.DECODE, 2.0, 2.5),
        Stay(State.READY, 2.5, 3.0),
    ]
    assert replayed.stays["b"] == [Stay(State.SAMPLED, 3.0, 3.0)]
    assert replayed.requeued == 1
    assert replayed.ends == {"a": Dropped(3.0, "a", "stale")}


def test_time_without_live_trajectories_does_not_count_for_the_speed() -> None:
    def lone(name: str, at: float, reward: float) -> list[Event]:
        return [
            Sampled(at, name, "g", "x"),
            Ready(at, name, 10),
            PrefillStarted(at, name, "p"),
            DecodeStarted(at + 1, name, "d"),
            RewardStarted(at + 2, name, 14),
            Done(at + 2, name, reward, True),
        ]

    turns = [turn("a", 0, 10, 0, (1.0, 1.2, 1.5, 2.0)), turn("b", 0, 10, 5, (101.0, 101.2, 101.5, 102.0))]
    run = run_of([*lone("a", 0.0, 0.0), *lone("b", 100.0, 1.0)], turns=turns)
    replayed = replay(run)
    summed = totals(run, replayed)
    assert (summed.seconds, summed.live_seconds) == (102.0, 4.0)
    assert summed.tokens_per_s == 2.0, "8 tokens in 4 live seconds"
    assert (summed.sampled, summed.done, summed.dropped) == (2, 2, 0)
    assert (summed.prompt_tokens, summed.cached_tokens, summed.cached_share) == (20, 5, 0.25)
    times, rewards = rewards_by_order(replayed)
    assert (times.tolist(), rewards.tolist()) == ([2.0, 102.0], [0.0, 1.0])


def test_cumulative_tokens_by_hand() -> None:
    cumulative = cumulative_tokens([turn("a", 0, 100, 0, (2.0, 2.5, 4.0)), turn("b", 0, 40, 16, (3.0,))])
    assert [part.tolist() for part in cumulative.prompt] == [[2.0, 3.0], [100.0, 140.0]]
    assert [part.tolist() for part in cumulative.computed] == [[2.0, 3.0], [100.0, 124.0]]
    assert [part.tolist() for part in cumulative.decoded] == [[2.0, 2.5, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]


def test_inter_token_latency_by_hand() -> None:
    # Gaps: 0.5 at 2.5 and 1.5 at 4.0; the lone token of b has none. Two bins of 0.75 s from 2.5 on.
    latencies = inter_token_latencies([turn("a", 0, 100, 0, (2.0, 2.5, 4.0)), turn("b", 0, 40, 16, (3.0,))], bins=2)
    assert latencies.times.tolist() == [2.875, 3.625]
    assert latencies.p50.tolist() == [0.5, 1.5]
    assert latencies.p99.tolist() == [0.5, 1.5]
    assert latencies.overall_p50 == 1.0
    assert latencies.overall_p99 == pytest.approx(0.5 + 0.99 * 1.0)
    nothing = inter_token_latencies([turn("b", 0, 40, 16, (3.0,))])
    assert len(nothing.times) == 0
    assert math.isnan(nothing.overall_p50)


def test_tokens_that_arrive_together_share_the_time_that_they_took() -> None:
    # The second piece has 4 tokens after 100 ms: 25 ms each. Then one token 200 ms after that piece began.
    arrivals = (0.0, 0.0001, 0.1, 0.1002, 0.1004, 0.1006, 0.3)
    latencies = inter_token_latencies([turn("a", 0, 1, 0, arrivals)], bins=2)
    assert latencies.times.tolist() == pytest.approx([0.15, 0.25])
    assert latencies.p50.tolist() == pytest.approx([0.025, 0.2])
    assert latencies.overall_p50 == pytest.approx(0.025)


def test_a_hundred_gaps_in_one_bin() -> None:
    # Gaps of 1, 2, ..., 100 ms: with linear interpolation the median is 50.5 ms and the 99th percentile 99.01 ms.
    arrivals = [0.0]
    for gap in range(1, 101):
        arrivals.append(arrivals[-1] + gap / 1000)
    latencies = inter_token_latencies([turn("a", 0, 1, 0, tuple(arrivals))], bins=1)
    assert latencies.overall_p50 == pytest.approx(0.0505)
    assert latencies.p99[0] == pytest.approx(0.09901)


def test_integrity_counts_every_token_that_one_side_lacks() -> None:
    contexts = {("a", 0): 103, ("a", 1): 120, ("c", 0): 9}
    whole = [turn("a", 0, 100, 0, (1.0, 2.0, 3.0)), turn("b", 0, 40, 0, (1.0,))]
    checked = integrity(run_of([], turns=whole), contexts)
    assert (checked.turns, checked.tokens, checked.lost) == (1, 3, 0), "b's episode has not reported yet"
    assert integrity(run_of([], turns=[turn("a", 0, 100, 0, (1.0, 2.0))]), contexts).lost == 1
    assert integrity(run_of([], turns=[turn("a", 1, 118, 0, (1.0, 2.0, 3.0, 4.0))]), contexts).lost == 2
    unequal = TurnRecord("a", 0, 100, 0, (("p", "d"),), 0.0, (1.0, 2.0, 3.0), (0, 0), FinishReason.STOP)
    assert integrity(run_of([], turns=[unequal]), contexts).lost == 1


def test_integrity_compares_the_recorded_trajectories_too() -> None:
    run = run_of(
        [], turns=[turn("a", 0, 9, 0, (1.0, 2.0, 3.0)), turn("a", 1, 20, 0, (4.0,)), turn("b", 0, 9, 0, (1.0,))]
    )
    run.generated["a"] = 4
    assert integrity(run, {}).lost == 0
    run.generated["b"] = 0
    assert integrity(run, {}).lost == 1


def test_role_spans_by_hand() -> None:
    run = run_of([])
    for time, name, role, state in (
        (0.0, "e0", Role.PREFILL, InstanceState.ROUTED),
        (0.5, "e1", Role.DECODE, InstanceState.ROUTED),
        (2.0, "e0", Role.PREFILL, InstanceState.DRAINING),
        (2.2, "e0", Role.PREFILL, InstanceState.FLIPPING),
        (2.5, "e0", Role.DECODE, InstanceState.ROUTED),
        (4.0, "e1", Role.DECODE, InstanceState.DEAD),
    ):
        run.instances.append(InstanceChange(time, name, role, state))
    assert role_spans(run, 5.0) == [
        RoleSpan("e0", "prefill", 0.0, 2.0),
        RoleSpan("e0", "flipping", 2.0, 2.5),
        RoleSpan("e0", "decode", 2.5, 5.0),
        RoleSpan("e1", "decode", 0.5, 4.0),
        RoleSpan("e1", "dead", 4.0, 5.0),
    ]


def test_an_event_that_cannot_be_ends_the_replay_and_is_named() -> None:
    run = run_of([*TWO[:3], Done(1.7, "a", 1.0, True), *TWO[3:]])
    replayed = replay(run)
    assert replayed.end == 1.6
    (problem,) = run.problems
    assert "event 4" in problem
    assert "'a' is in PREFILL" in problem


def test_a_whole_run_loses_nothing(synthetic: Callable[..., Path]) -> None:
    run = read_run(synthetic())
    replayed = replay(run)
    summed = totals(run, replayed)
    assert summed.sampled == 64
    assert summed.done + summed.dropped == 64
    assert summed.turns == integrity(run, replayed.contexts).turns + summed.dropped
    assert integrity(run, replayed.contexts).lost == 0
    assert summed.resends == sum(record.attempts - 1 for record in run.turns)
