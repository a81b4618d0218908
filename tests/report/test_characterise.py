"""The characterisation, worked out by hand on two trajectories, and against independent sums on a synthetic run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    SandboxMode,
    SandboxStarting,
    ToolStarted,
)
from prorsa.report.analysis import read_cache, read_spans
from prorsa.report.characterise import (
    IDEAL,
    MEASURED,
    BadEvents,
    StepSpan,
    TurnCache,
    characterise,
    intra_class_correlation,
)
from prorsa.report.rundir import read_run
from prorsa.report.volumes import Volume, distribution, ratio_spread

TWO: list[Event] = [
    Sampled(0.0, "a", "g", "x"),
    SandboxStarting(0.0, "a", SandboxMode.COLD, "image", "node"),
    Sampled(0.0, "b", "g", "x"),
    Ready(1.0, "b", 100),
    PrefillStarted(1.0, "b", "p"),
    DecodeStarted(2.0, "b", "d"),
    Ready(2.0, "a", 100),
    PrefillStarted(3.0, "a", "p"),
    DecodeStarted(4.0, "a", "d"),
    Requeued(7.0, "b", 110),  # 10 tokens in 5 s
    PrefillStarted(8.0, "b", "p"),
    DecodeStarted(9.0, "b", "d"),
    ToolStarted(14.0, "a", "bash", 150),  # 50 tokens in 10 s
    RewardStarted(19.0, "b", 140),  # 30 tokens in 10 s
    Ready(20.0, "a", 180),
    Done(20.0, "b", 0.0, True),
    PrefillStarted(21.0, "a", "p"),
    DecodeStarted(22.0, "a", "d"),
    RewardStarted(32.0, "a", 200),  # 20 tokens in 10 s
    Done(33.0, "a", 1.0, True),
]
CACHE = {("a", 0): TurnCache(64), ("a", 1): TurnCache(150), ("b", 0): TurnCache(0, changes=(10,))}


def test_tokens_in_windows_by_hand() -> None:
    described = characterise(TWO)
    (step,) = described.steps
    assert described.cache == IDEAL
    assert step.windows == (
        Volume(0.0, 10.0, 310.0, 200.0, 43.0),  # decode: 6 s at 5, 10 at 2, 1 s at 3
        Volume(10.0, 20.0, 0.0, 0.0, 47.0),  # 4 s at 5, 9 s at 3
        Volume(20.0, 30.0, 180.0, 30.0, 16.0),  # 8 s at 2
        Volume(30.0, 33.0, 0.0, 0.0, 4.0),
    )
    assert step.volume == described.total == Volume(0.0, 33.0, 490.0, 230.0, 110.0)
    assert described.total.ratio == 490 / 110
    assert described.total.uncached_ratio == 230 / 110
    assert described.reuse.repeated_tokens == 110, "b was prefilled again with the 10 tokens that it kept"
    assert (described.reuse.uncached_tokens, described.reuse.ideal_tokens) == (230, 230)


def test_what_the_engines_computed_replaces_the_ideal() -> None:
    described = characterise(TWO, cache=CACHE)
    assert described.cache == MEASURED
    # b: 100, and all 110 again since the weights changed there; a: 100 - 64, then 180 - 150.
    assert described.reuse.uncached_tokens == 100 + 110 + 36 + 30
    assert described.reuse.ideal_tokens == 230
    same_weights = characterise(TWO, cache=CACHE | {("b", 0): TurnCache(0)})
    assert same_weights.reuse.uncached_tokens == 100 + 36 + 30
    unknown = characterise(TWO, cache={("a", 0): TurnCache(64)})
    assert unknown.reuse.uncached_tokens == 100 + 36 + 30, "a turn without a record counts by the ideal"


def test_steps_cut_the_run() -> None:
    spans = [StepSpan(4, 0.0, 10.0), StepSpan(5, 10.0, 22.0), StepSpan(6, 22.0, 33.0)]
    steps = characterise(TWO, steps=spans, window_s=6.0).steps
    assert [step.step for step in steps] == [4, 5, 6]
    # The prefill that completes at 22, where a step ends and the next one begins, is in the first of them.
    assert [step.volume.prompt_tokens for step in steps] == [310.0, 180.0, 0.0]
    assert [step.volume.decoded_tokens for step in steps] == [43.0, 47.0, 20.0]
    assert [(window.start, window.end) for window in steps[1].windows] == [(10.0, 16.0), (16.0, 22.0)]
    assert [(window.start, window.end) for window in steps[2].windows] == [(22.0, 28.0), (28.0, 33.0)]
    curve = steps[0].curve
    assert curve.seconds[::50] == (0.0, 5.0, 10.0)
    assert curve.prompt_tokens[::50] == (0.0, 200.0, 310.0)
    assert curve.decoded_tokens[::50] == pytest.approx((0.0, 6 + 5, 43.0))


def test_where_the_time_goes_by_hand() -> None:
    described = characterise(TWO)
    means = {name: part.mean_s for name, part in described.time.items()}
    assert means == pytest.approx(
        {"sandbox": 1.5, "ready queue": 1.5, "prefill": 2.0, "decode": 17.5, "tool": 3.0, "reward": 1.0}
    )
    assert described.time["decode"].share == pytest.approx(35 / 53)
    assert described.trajectories.seconds.mean == pytest.approx(sum(means.values()))
    assert described.live_mean == pytest.approx(53 / 33)
    assert described.live_peak == 2


def test_trajectories_turns_and_tools_by_hand() -> None:
    described = characterise(TWO)
    done, turns = described.trajectories, described.turns
    assert (described.sampled, described.done, described.dropped, described.tasks) == (2, 2, 0, {"x": 2})
    assert (done.turns.mean, done.output_tokens.mean, done.context_tokens.mean) == (1.5, 55.0, 170.0)
    assert (done.prompt_tokens.mean, done.appended_tokens.mean, done.first_prompt_tokens.p50) == (190.0, 115.0, 100.0)
    assert done.turns.log_sigma == pytest.approx(math.log(2) / math.sqrt(2)), "of ln 1 and ln 2"
    assert (turns.prompt_tokens.count, turns.appended_tokens.count, turns.appended_tokens.mean) == (3, 1, 30.0)
    assert turns.output_tokens.mean == pytest.approx((50 + 20 + 40) / 3), "a resent turn is one turn"
    assert list(described.tools) == ["bash"]
    assert (described.tools["bash"].seconds.mean, described.tools["bash"].share) == (6.0, 1.0)


def test_a_context_that_became_shorter_is_new() -> None:
    events = [*TWO[:12], ToolStarted(14.0, "a", "bash", 150), Ready(20.0, "a", 90)]
    events += [PrefillStarted(21.0, "a", "p"), DecodeStarted(22.0, "a", "d")]
    assert characterise(events).reuse.ideal_tokens == 100 + 100 + 90


def test_a_trajectory_that_is_dropped_or_still_runs_is_in_no_mean() -> None:
    described = characterise([*TWO[:13], Dropped(18.0, "b", "stale")])
    assert (described.sampled, described.done, described.dropped) == (2, 0, 1)
    assert described.trajectories.seconds.count == 0
    assert described.turns.output_tokens.count == 1
    assert described.total.decoded_tokens == 60.0, "what b made of its last attempt is not in the events"
    assert described.live_mean == pytest.approx((18 + 18) / 18)


def test_a_decode_of_next_to_no_time_leaves_the_others_alone() -> None:
    def decode(name: str, start: float, end: float, tokens: int) -> list[Event]:
        begin: list[Event] = [Sampled(0.0, name, "g", "x"), Ready(0.0, name, 9), PrefillStarted(0.0, name, "p")]
        return [
            *begin,
            DecodeStarted(start, name, "d"),
            RewardStarted(end, name, 9 + tokens),
            Done(end, name, 0.0, True),
        ]

    late = 1e5
    events = decode("long", 0.0, 3 * late, 300) + decode("short", late, math.nextafter(late, math.inf), 1_000_000)
    first, rest = characterise(events, steps=[StepSpan(1, 0.0, late + 1), StepSpan(2, late + 1, 3 * late)]).steps
    assert first.volume.decoded_tokens == pytest.approx(1_000_100, abs=0.01)
    assert rest.volume.decoded_tokens == pytest.approx(200, abs=0.01)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.3, 40.0), st.lists(st.floats(0.1, 32.9), max_size=4, unique=True))
def test_windows_and_steps_share_out_the_whole(window_s: float, cuts: list[float]) -> None:
    bounds = [0.0, *sorted(cuts), 33.0]
    spans = [StepSpan(index, start, end) for index, (start, end) in enumerate(itertools.pairwise(bounds))]
    described = characterise(TWO, cache=CACHE, steps=spans, window_s=window_s)
    for name in ("prompt_tokens", "uncached_tokens", "decoded_tokens"):
        whole = getattr(described.total, name)
        assert sum(getattr(step.volume, name) for step in described.steps) == pytest.approx(whole, abs=0.1), (
            "each is rounded to a thousandth"
        )
        for step in described.steps:
            volume = getattr(step.volume, name)
            assert sum(getattr(window, name) for window in step.windows) == pytest.approx(volume, abs=0.1), (
                "each is rounded to a thousandth"
            )
            assert getattr(step.curve, name)[-1] == pytest.approx(volume, abs=0.1), "each is rounded to a thousandth"


def test_a_run_directory_against_its_own_records(synthetic: Callable[..., Path]) -> None:
    directory = synthetic(groups=6, steps=3)
    run = read_run(directory)
    problems: list[str] = []
    described = characterise(run.events, cache=read_cache(directory, problems), steps=read_spans(directory))
    assert problems == []
    dropped = {event.trajectory for event in run.events if isinstance(event, Dropped)}
    ended = [turn for turn in run.turns if turn.trajectory not in dropped]
    in_steps = sum(step.volume.decoded_tokens for step in described.steps)
    assert len(described.steps) == 3
    assert in_steps == pytest.approx(described.total.decoded_tokens), "nothing happens between these steps"
    assert described.trajectories.output_tokens.mean * described.done == pytest.approx(
        sum(turn.output_tokens for turn in ended)
    )
    uncached = sum(turn.prompt_tokens - turn.cached_tokens for turn in run.turns)
    assert described.reuse.uncached_tokens == uncached, "a resend under the same weights adds nothing"
    again = sum(turn.prompt_tokens * (turn.attempts - 1) for turn in run.turns)
    assert described.reuse.repeated_tokens == again
    assert described.reuse.prompt_tokens == sum(turn.prompt_tokens for turn in run.turns) + again


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], "no event to describe"),
        ([Ready(1.0, "a", 5)], "event 1, .*no such trajectory was sampled"),
        ([TWO[0], TWO[0]], "event 2, .*sampled once"),
        ([TWO[0], DecodeStarted(1.0, "a", "d")], "event 2, .*in SAMPLED, and this may only come from PREFILL"),
        ([TWO[0], Ready(-1.0, "a", 5)], "event 2, .*before the trajectory's last event"),
        ([TWO[0], Ready(1.0, "a", 0)], "event 2, .*at least one token"),
        ([TWO[2], *TWO[3:6], Requeued(7.0, "b", 99)], "event 5, .*cannot be 99 tokens, the prompt had 100"),
        ([TWO[2], *TWO[3:6], RewardStarted(7.0, "b", 40)], "event 5, .*cannot be 40 tokens, the prompt had 100"),
        ([TWO[2], *TWO[3:5], Requeued(7.0, "b", 101)], "event 4, .*cannot be 101 tokens"),
    ],
)
def test_events_that_cannot_be_are_named(events: list[Event], words: str) -> None:
    with pytest.raises(BadEvents, match=words):
        characterise(events)


@pytest.mark.parametrize("cached", [-1, 101])
def test_more_cached_tokens_than_the_prompt_has_are_refused(cached: int) -> None:
    with pytest.raises(BadEvents, match=f"turn 0 has {cached} cached of 100 prompt tokens"):
        characterise(TWO, cache={("a", 0): TurnCache(cached)})


def test_intra_class_correlation_of_shrout_and_fleiss() -> None:
    # Shrout & Fleiss (1979), Table 2: six targets, four judges; ICC(1,1) is published as .17.
    rows = [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]]
    values = np.array(rows, dtype=float).ravel()
    groups = [f"target {index // 4}" for index in range(24)]
    assert intra_class_correlation(values, groups) == pytest.approx(0.1657, abs=1e-4)


def test_intra_class_correlation_finds_what_unequal_groups_were_drawn_with() -> None:
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 9, size=3000)
    groups = np.repeat(np.arange(3000), sizes)
    # Variance 0.7 between groups and 0.3 within.
    values = np.sqrt(0.7) * rng.standard_normal(3000)[groups] + np.sqrt(0.3) * rng.standard_normal(len(groups))
    assert intra_class_correlation(values, [str(group) for group in groups]) == pytest.approx(0.7, abs=0.02)


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        ([], []),
        ([1.0, 2.0], ["a", "a"]),
        ([1.0, 2.0], ["a", "b"]),
        ([1.0] * 4, list("aabb")),
        ([-np.inf] * 4, list("aabb")),
    ],
)
def test_a_correlation_that_is_not_defined_is_none(values: list[float], groups: list[str]) -> None:
    assert intra_class_correlation(np.array(values), groups) is None


def test_distributions_and_spreads() -> None:
    spread = distribution([1.0, 2.0, 3.0, 4.0, 0.0])
    assert (spread.count, spread.mean, spread.p50) == (5, 2.0, 2.0)
    assert spread.p95 == pytest.approx(3.8)
    assert spread.log_sigma == pytest.approx(np.std(np.log([1, 2, 3, 4]), ddof=1)), "without the 0"
    assert distribution([]).count == 0
    assert ratio_spread([2.0, None, 3.0]) == 1.5
    assert ratio_spread([2.0, None]) is None
    assert ratio_spread([0.0, 2.0]) is None
