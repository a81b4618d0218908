"""The tracker: hand-worked walks, and a naive model under random events, legal and not."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.lifecycle import (
    NONE,
    TRANSITIONS,
    DecodeStarted,
    Done,
    Dropped,
    Event,
    IllegalTransition,
    PrefillStarted,
    Ready,
    Requeued,
    RewardStarted,
    Sampled,
    SandboxMode,
    SandboxStarting,
    Snapshot,
    State,
    ToolStarted,
    Tracker,
)


def tracker_after(*events: Event) -> Tracker:
    tracker = Tracker()
    for event in events:
        tracker.apply(event)
    return tracker


def test_a_whole_trajectory_with_a_tool_call_and_a_resend() -> None:
    tracker = Tracker()
    walk = [
        # event, before, after, elapsed, tokens before, tokens after, turn before
        (Sampled(1.0, "t", "g", "math", 7, 10), None, State.SAMPLED, 0.0, 0, 10, 0),
        (
            SandboxStarting(1.5, "t", SandboxMode.COLD, "img", "big"),
            State.SAMPLED,
            State.SANDBOX_STARTING,
            0.5,
            10,
            10,
            0,
        ),
        (Ready(3.5, "t", 12), State.SANDBOX_STARTING, State.READY, 2.0, 10, 12, 0),
        (PrefillStarted(4.0, "t", "p0"), State.READY, State.PREFILL, 0.5, 12, 12, 0),
        (DecodeStarted(4.25, "t", "d0"), State.PREFILL, State.DECODE, 0.25, 12, 12, 0),
        (Requeued(5.0, "t", 15), State.DECODE, State.READY, 0.75, 15, 15, 0),
        (PrefillStarted(5.0, "t", "p1"), State.READY, State.PREFILL, 0.0, 15, 15, 0),
        (DecodeStarted(6.0, "t", "d1"), State.PREFILL, State.DECODE, 1.0, 15, 15, 0),
        (ToolStarted(7.0, "t", "python", 20), State.DECODE, State.TOOL, 1.0, 15, 20, 0),
        (Ready(9.0, "t", 26), State.TOOL, State.READY, 2.0, 20, 26, 1),
        (PrefillStarted(9.5, "t", "p0"), State.READY, State.PREFILL, 0.5, 26, 26, 1),
        (DecodeStarted(10.0, "t", "d0"), State.PREFILL, State.DECODE, 0.5, 26, 26, 1),
        (RewardStarted(11.0, "t", 30), State.DECODE, State.REWARD, 1.0, 26, 30, 1),
        (Done(11.5, "t", 1.0, True), State.REWARD, State.DONE, 0.5, 30, 30, 2),
    ]
    for event, before, after, elapsed, tokens_before, tokens, turn in walk:
        if isinstance(event, Requeued):
            tracker.decoded("t", 3)
        transition = tracker.apply(event)
        assert transition.event is event
        assert (transition.before, transition.after, transition.elapsed) == (before, after, elapsed)
        assert (transition.tokens_before, transition.tokens, transition.turn) == (tokens_before, tokens, turn)
        assert (transition.task, transition.group, transition.sampled_at) == ("math", "g", 1.0)
        assert tracker.state("t") == after
        in_sandbox = before == State.SANDBOX_STARTING
        assert (transition.mode, transition.image, transition.node_class) == (
            ("cold", "img", "big") if in_sandbox else (None, None, None)
        )
        assert transition.tool == ("python" if before == State.TOOL else None)
        assert (transition.instance is None) == (before not in (State.PREFILL, State.DECODE))
        assert transition.concurrency == (1 if before in (State.SANDBOX_STARTING, State.TOOL) else 0)
    assert "t" not in tracker
    assert len(tracker) == 0
    assert set(tracker.counts().values()) == {0}


def test_a_trajectory_that_ends_in_its_tool_has_no_more_turns_than_it_decoded() -> None:
    """An agent elsewhere that never came back."""
    tracker = tracker_after(Sampled(0.0, "t", "g", "a"), Ready(0.0, "t", 1), PrefillStarted(1.0, "t", "p"))
    tracker.apply(DecodeStarted(2.0, "t", "d"))
    tracker.apply(ToolStarted(3.0, "t", "reply", 9))
    ended = tracker.apply(RewardStarted(8.0, "t", 9))
    assert (ended.before, ended.after, ended.elapsed, ended.tool, ended.turn) == (
        State.TOOL,
        State.REWARD,
        5.0,
        "reply",
        1,
    )
    assert tracker.apply(Done(8.0, "t", 0.0, True)).turn == 1


def test_a_transition_names_the_instance_that_was_left() -> None:
    tracker = tracker_after(Sampled(0.0, "t", "g", "a"), Ready(0.0, "t", 1))
    assert tracker.apply(PrefillStarted(1.0, "t", "p")).instance is None
    assert tracker.apply(DecodeStarted(2.0, "t", "d")).instance == "p"
    assert tracker.apply(RewardStarted(3.0, "t", 2)).instance == "d"


def test_a_snapshot_shows_every_state_by_its_own_columns() -> None:
    tracker = tracker_after(
        Sampled(0.0, "sampled", "g0", "a", 1, 5),
        Sampled(0.0, "starting", "g0", "a", 1, 6),
        SandboxStarting(1.0, "starting", SandboxMode.PREWARMED, "img", "big"),
        Sampled(0.0, "ready", "g1", "b", 2),
        Ready(1.0, "ready", 7),
        Sampled(0.0, "decode", "g1", "b", 2),
        Ready(1.5, "decode", 8),
        PrefillStarted(2.0, "decode", "p0"),
        DecodeStarted(3.0, "decode", "d0"),
        Sampled(0.0, "tool", "g1", "b", 3),
        Ready(1.0, "tool", 9),
        PrefillStarted(2.0, "tool", "p0"),
        DecodeStarted(3.0, "tool", "d0"),
        ToolStarted(4.0, "tool", "python", 11),
    )
    tracker.decoded("decode", 2)
    tracker.decoded("decode", 1)
    snapshot = tracker.snapshot(5.0)
    assert snapshot.time == 5.0
    assert snapshot.ids == ("sampled", "starting", "ready", "decode", "tool")
    assert snapshot.state.tolist() == [State.SAMPLED, State.SANDBOX_STARTING, State.READY, State.DECODE, State.TOOL]
    assert snapshot.since.tolist() == [0.0, 1.0, 1.0, 3.0, 4.0]
    assert snapshot.tokens.tolist() == [5, 6, 7, 11, 11]
    assert snapshot.turn.tolist() == [0, 0, 0, 0, 1]
    assert snapshot.version.tolist() == [1, 1, 2, 2, 3]
    assert snapshot.order[2:].tolist() == [0, 1, 2]
    assert [snapshot.names.groups[code] for code in snapshot.group] == ["g0", "g0", "g1", "g1", "g1"]
    assert [snapshot.names.tasks[code] for code in snapshot.task] == ["a", "a", "b", "b", "b"]
    assert snapshot.tool.tolist() == [NONE, NONE, NONE, NONE, snapshot.names.tools.index("python")]
    assert snapshot.instance.tolist() == [NONE, NONE, NONE, snapshot.names.instances.index("d0"), NONE]
    assert snapshot.mode.tolist() == [NONE, 0, NONE, NONE, NONE]
    assert snapshot.image[1] == snapshot.names.images.index("img")
    assert snapshot.node_class[1] == snapshot.names.node_classes.index("big")
    assert snapshot.concurrency.tolist() == [0, 1, 0, 0, 1]


def test_concurrency_counts_those_running_when_it_began_itself_included() -> None:
    tracker = Tracker()
    for name in "abc":
        tracker.apply(Sampled(0.0, name, "g", "x"))
        tracker.apply(SandboxStarting(1.0, name, SandboxMode.COLD, "i", "n"))
    assert tracker.snapshot(2.0).concurrency.tolist() == [1, 2, 3]
    tracker.apply(Ready(2.0, "a", 1))
    tracker.apply(Sampled(2.0, "d", "g", "x"))
    tracker.apply(SandboxStarting(2.0, "d", SandboxMode.COLD, "i", "n"))
    assert tracker.snapshot(2.0).concurrency.tolist() == [0, 2, 3, 3]


def test_requeued_goes_to_the_end_of_the_queue_and_keeps_its_turn() -> None:
    tracker = tracker_after(
        *(event for name in "ab" for event in (Sampled(0.0, name, "g", "x"), Ready(1.0, name, 5))),
        PrefillStarted(2.0, "a", "p"),
        Requeued(3.0, "a", 5),
    )
    snapshot = tracker.snapshot(3.0)
    assert [snapshot.ids[row] for row in np.argsort(snapshot.order)] == ["b", "a"]
    assert snapshot.turn.tolist() == [0, 0]


def test_a_snapshot_is_read_only_and_does_not_move_with_later_events() -> None:
    tracker = tracker_after(Sampled(0.0, "a", "g", "x", 0, 3), Sampled(0.0, "b", "g", "x", 0, 4))
    snapshot = tracker.snapshot(1.0)
    tracker.apply(Dropped(2.0, "a", "stale"))
    tracker.apply(Sampled(2.0, "c", "h", "y"))
    assert snapshot.ids == ("a", "b")
    assert snapshot.tokens.tolist() == [3, 4]
    assert snapshot.names.groups == ("g",)
    with pytest.raises(ValueError, match="read-only"):
        snapshot.tokens[0] = 1


def test_an_illegal_event_names_trajectory_state_and_event() -> None:
    tracker = tracker_after(Sampled(0.0, "t-9", "g", "x"), Ready(1.0, "t-9", 5))
    with pytest.raises(IllegalTransition, match=r"'t-9' is in READY: ToolStarted\(.*may only come from DECODE"):
        tracker.apply(ToolStarted(2.0, "t-9", "python", 6))
    with pytest.raises(IllegalTransition, match=r"'t-9' is in READY: Sampled\("):
        tracker.apply(Sampled(2.0, "t-9", "g", "x"))
    with pytest.raises(IllegalTransition, match=r"'nobody' is not live: Ready\("):
        tracker.apply(Ready(2.0, "nobody", 5))
    with pytest.raises(IllegalTransition, match=r"'t-9' is in READY: 3 decoded tokens"):
        tracker.decoded("t-9", 3)
    tracker.apply(Dropped(2.0, "t-9", "stale"))
    with pytest.raises(IllegalTransition, match=r"'t-9' is in DROPPED: Ready\("):
        tracker.apply(Ready(3.0, "t-9", 5))
    with pytest.raises(IllegalTransition, match=r"'t-9' is in DROPPED: Sampled\("):
        tracker.apply(Sampled(3.0, "t-9", "g", "x"))


@pytest.mark.parametrize("time", [0.5, math.nan, -math.inf])
def test_time_does_not_go_backwards_for_one_trajectory(time: float) -> None:
    tracker = tracker_after(Sampled(1.0, "t", "g", "x"))
    with pytest.raises(IllegalTransition, match="its time is before the last event's"):
        tracker.apply(Ready(time, "t", 5))
    tracker.apply(Sampled(0.5, "another", "g", "x"))
    assert tracker.state("t") == State.SAMPLED


@dataclass
class Naive:
    """A trajectory as a plain object: the slow and obvious tracker."""

    state: State
    since: float
    tokens: int
    turn: int = 0
    order: int = NONE


NAMES = st.sampled_from("abcdef")
TIMES = st.sampled_from([0.0, 1.0, 2.0, 3.0])
TOKENS = st.integers(0, 50)


def _events() -> st.SearchStrategy[Event]:
    modes = st.sampled_from(SandboxMode)
    where = st.sampled_from(["i0", "i1"])
    return st.one_of(
        st.builds(Sampled, TIMES, NAMES, where, where, st.integers(0, 3), TOKENS),
        st.builds(SandboxStarting, TIMES, NAMES, modes, where, where),
        st.builds(Ready, TIMES, NAMES, TOKENS),
        st.builds(PrefillStarted, TIMES, NAMES, where),
        st.builds(DecodeStarted, TIMES, NAMES, where),
        st.builds(Requeued, TIMES, NAMES, TOKENS),
        st.builds(ToolStarted, TIMES, NAMES, where, TOKENS),
        st.builds(RewardStarted, TIMES, NAMES, TOKENS),
        st.builds(Done, TIMES, NAMES, st.just(1.0), st.booleans()),
        st.builds(Dropped, TIMES, NAMES, where),
    )


def _columns(snapshot: Snapshot) -> list[object]:
    values = [getattr(snapshot, f.name) for f in fields(snapshot)]
    return [value.tolist() if isinstance(value, np.ndarray) else value for value in values]


@given(st.lists(_events(), max_size=120))
def test_random_events_agree_with_the_naive_tracker(events: list[Event]) -> None:
    tracker = Tracker()
    live: dict[str, Naive] = {}
    ended: set[str] = set()
    entries = 0
    for event in events:
        name = event.trajectory
        known = live.get(name)
        if isinstance(event, Sampled):
            legal = known is None and name not in ended
        else:
            legal = known is not None and known.state in TRANSITIONS[type(event)][0] and event.time >= known.since
        if not legal:
            before = _columns(tracker.snapshot(9.0))
            with pytest.raises(IllegalTransition):
                tracker.apply(event)
            assert _columns(tracker.snapshot(9.0)) == before
            continue
        tracker.apply(event)
        if isinstance(event, Sampled):
            live[name] = Naive(State.SAMPLED, event.time, event.prompt_tokens)
            continue
        assert known is not None
        after = TRANSITIONS[type(event)][1]
        if not after.live:
            ended.add(name)
            del live[name]
            continue
        known.turn += known.state is State.DECODE and isinstance(event, ToolStarted | RewardStarted)
        known.state, known.since = after, event.time
        known.tokens = getattr(event, "tokens", known.tokens)
        if after == State.READY:
            known.order, entries = entries, entries + 1
    snapshot = tracker.snapshot(9.0)
    assert sorted(snapshot.ids) == sorted(live)
    assert len(tracker) == len(live)
    for row, name in enumerate(snapshot.ids):
        expected = live[name]
        assert tracker.state(name) == expected.state
        assert (snapshot.state[row], snapshot.since[row]) == (expected.state, expected.since)
        assert (snapshot.tokens[row], snapshot.turn[row]) == (expected.tokens, expected.turn)
        assert snapshot.order[row] == expected.order
    for state, count in tracker.counts().items():
        assert count == sum(one.state == state for one in live.values())


def test_ten_thousand_come_and_go_and_the_rows_stay_dense() -> None:
    tracker = Tracker()
    for i in range(10_000):
        tracker.apply(Sampled(float(i), f"t{i}", f"g{i}", "x", i, i))
        if i >= 100:
            tracker.apply(Dropped(float(i), f"t{i - 100}", "stale"))
    snapshot = tracker.snapshot(1e4)
    assert sorted(snapshot.tokens.tolist()) == list(range(9_900, 10_000))
    assert all(snapshot.ids[row] == f"t{snapshot.tokens[row]}" for row in range(100))
    assert all(snapshot.names.groups[snapshot.group[row]] == f"g{snapshot.version[row]}" for row in range(100))


def test_the_names_of_ended_groups_are_forgotten() -> None:
    """Three groups live at a time, of 1,000; the second member of each outlives the first."""
    tracker = Tracker()
    for i in range(1_000):
        for member in range(2):
            tracker.apply(Sampled(float(i), f"t{i}.{member}", f"g{i}", "x", i))
        tracker.apply(Dropped(float(i), f"t{i}.0", "stale"))
        if i >= 3:
            assert tracker.apply(Dropped(float(i), f"t{i - 3}.1", "stale")).group == f"g{i - 3}"
        snapshot = tracker.snapshot(float(i))
        assert len(snapshot) == min(i + 1, 3)
        assert len(snapshot.names.groups) <= 4
        for group, version in zip(snapshot.group, snapshot.version, strict=True):
            assert snapshot.names.groups[group] == f"g{version}"


def test_codes_of_names_that_nobody_has_are_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two live trajectories keep their names; of 400 others that come and go the latest `IDLE` keep theirs."""
    tracker = tracker_after(Sampled(0.0, "a", "g", "task-a", 1, 0), Sampled(0.0, "b", "g", "task-b", 1, 0))
    for number in range(400):
        tracker.apply(Sampled(0.0, f"t{number}", "g", f"task{number}", 1, 0))
        tracker.apply(SandboxStarting(0.0, f"t{number}", SandboxMode.COLD, f"image{number}", "small"))
        tracker.apply(Dropped(0.0, f"t{number}", ""))
    tracker.apply(Sampled(0.0, "c", "g", "task399", 1, 0))
    snapshot = tracker.snapshot(0.0)
    names = snapshot.names
    assert [names.tasks[code] for code in snapshot.task] == ["task-a", "task-b", "task399"]
    assert (len(names.tasks), len(names.images)) == (256 + 3, 256 + 1)
    assert set(names.tasks[2:]) == {f"task{number}" for number in range(400 - 257, 400)}
