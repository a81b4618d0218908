"""Where every live trajectory is: events in, transitions out, and an atomic snapshot at any moment.

Invariants: an event that `TRANSITIONS` does not allow, or that goes back in time, raises and changes nothing; the live rows
are dense (row i of every column is one trajectory, an ended row is replaced by the last one), so that a snapshot is a few
array copies however many trajectories have come and gone.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import MODES, NONE, Names, Snapshot, Transition
from prorsa.lifecycle.states import LIVE, TRANSITIONS, State

REMEMBERED = 65_536
"""Ended trajectories whose last state is still known, so that a late event is refused by its name: about 10 MB."""

IDLE = 256
"""Names of tasks, tools, images and node classes that keep their code while no live trajectory has them."""

_COLUMNS = {
    "state": "b",
    "since": "d",
    "tokens": "q",
    "start": "q",
    "prompt": "q",
    "turn": "i",
    "version": "i",
    "order": "q",
    "group": "i",
    "task": "i",
    "tool": "i",
    "instance": "i",
    "mode": "b",
    "image": "i",
    "node_class": "i",
    "concurrency": "i",
    "sampled_at": "d",
}
"""The columns of a `Snapshot`, and `sampled_at`, which only transitions report; with their `array` type codes. One value of
an `array` is read and written several times faster than one of a NumPy array, which a snapshot makes of each."""

_NAMED = {
    "group": "groups",
    "task": "tasks",
    "tool": "tools",
    "instance": "instances",
    "image": "images",
    "node_class": "node_classes",
}
"""The columns that hold codes, and the field of `Names` that each is decoded with."""
_HELD = frozenset(("tool", "image", "node_class"))
"""Of the columns that belong to some states, those whose names come from outside, without end."""
_TRANSIENT: dict[State, tuple[str, ...]] = {
    State.SANDBOX_STARTING: ("mode", "image", "node_class"),
    State.PREFILL: ("instance",),
    State.DECODE: ("instance",),
    State.TOOL: ("tool",),
}
"""The columns that belong to some states only, and are NONE in every other."""
_STATES = tuple(State)
_TURN_ENDS = (State.TOOL, State.REWARD)
"""Where a trajectory goes from DECODE when its turn is over."""


class IllegalTransition(Exception):
    """An event that cannot happen now; the message names the trajectory, its state and the event. Nothing was changed."""

    def __init__(self, trajectory: str, state: State | None, event: object, problem: str) -> None:
        known = "not live" if state is None else f"in {state.name}"
        super().__init__(f"trajectory {trajectory!r} is {known}: {event} refused, {problem}")
        self.trajectory = trajectory
        self.state = state
        self.event = event


class _Codes:
    """Names to small integers and back. A code stands for its name while somebody holds it, and beyond that until so many
    others were let go after it; then a new name may get it. One that nobody ever held is not reused."""

    def __init__(self, names: Sequence[str] = (), idle: int = IDLE) -> None:
        """`idle` names keep their codes while nobody holds them."""
        self._codes = {name: code for code, name in enumerate(names)}
        self._names = list(names)
        self._most_idle = idle
        self._holders = [0] * len(names)
        self._idle: dict[int, None] = {}
        """In the order in which they were let go."""
        self._released: list[int] = []
        self._picture: tuple[str, ...] | None = None

    def code(self, name: str) -> int:
        code = self._codes.get(name)
        return self._new(name) if code is None else code

    def name(self, code: int) -> str:
        return self._names[code]

    def names(self) -> tuple[str, ...]:
        if self._picture is None:
            self._picture = tuple(self._names)
        return self._picture

    def hold(self, name: str) -> int:
        """The code of a name, until `let` is called as often."""
        code = self.code(name)
        self._holders[code] += 1
        self._idle.pop(code, None)
        return code

    def let(self, code: int) -> None:
        self._holders[code] -= 1
        if self._holders[code]:
            return
        self._idle[code] = None
        if len(self._idle) > self._most_idle:
            oldest = next(iter(self._idle))
            del self._idle[oldest]
            del self._codes[self._names[oldest]]
            self._released.append(oldest)

    def _new(self, name: str) -> int:
        self._picture = None
        if self._released:
            code = self._released.pop()
            self._names[code] = name
        else:
            code = len(self._names)
            self._names.append(name)
            self._holders.append(0)
        self._codes[name] = code
        return code


class Tracker:
    """The live trajectories of a run. `apply` and `decoded` are O(1); `snapshot` is O(live trajectories)."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []
        self._ended: OrderedDict[str, State] = OrderedDict()
        self._counts = {state: 0 for state in State if state in LIVE}
        self._entries = 0
        self._codes = {name: _Codes() for name in _NAMED} | {"group": _Codes(idle=0), "mode": _Codes(MODES)}
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in _COLUMNS.items()}

    def __len__(self) -> int:
        """How many trajectories are live."""
        return len(self._ids)

    def __contains__(self, trajectory: object) -> bool:
        """Whether the trajectory is live."""
        return trajectory in self._rows

    def state(self, trajectory: str) -> State:
        """The present state; DONE or DROPPED for one that ended lately (see `REMEMBERED`). Raises KeyError if unknown."""
        row = self._rows.get(trajectory)
        return self._ended[trajectory] if row is None else _STATES[self._columns["state"][row]]

    def counts(self) -> dict[State, int]:
        """Live trajectories by state, every live state included."""
        return dict(self._counts)

    def apply(self, event: e.Event) -> Transition:
        """Take the event in. Raises `IllegalTransition`, having changed nothing."""
        if isinstance(event, e.Sampled):
            return self._sample(event)
        row, before, after = self._check(event)
        columns = self._columns
        tokens_before = columns["tokens"][row]
        tokens = getattr(event, "tokens", tokens_before)
        transient = _TRANSIENT.get(before, ())
        transition = Transition(
            event=event,
            before=before,
            after=after,
            elapsed=event.time - columns["since"][row],
            tokens_before=tokens_before,
            tokens=tokens,
            turn=columns["turn"][row],
            task=self._name("task", row),
            group=self._name("group", row),
            group_code=columns["group"][row],
            concurrency=columns["concurrency"][row],
            sampled_at=columns["sampled_at"][row],
            **{name: self._name(name, row) for name in transient},
        )
        for name in transient:
            if name in _HELD:
                self._codes[name].let(columns[name][row])
            columns[name][row] = NONE
        self._counts[before] -= 1
        if before is State.DECODE and after in _TURN_ENDS:
            columns["turn"][row] += 1
        if after in LIVE:
            self._enter(row, after, event, tokens)
        else:
            self._remove(event.trajectory, row, after)
        return transition

    def decoded(self, trajectory: str, tokens: int) -> None:
        """Add newly streamed tokens to the context of a trajectory in DECODE. Raises `IllegalTransition` elsewhere."""
        row = self._rows.get(trajectory)
        if row is None or self._columns["state"][row] != State.DECODE:
            state = self._ended.get(trajectory) if row is None else self.state(trajectory)
            raise IllegalTransition(trajectory, state, f"{tokens} decoded tokens", "they need it in DECODE")
        self._columns["tokens"][row] += tokens

    def snapshot(self, time: float) -> Snapshot:
        """Every live trajectory as it is now; `time` is only noted."""
        columns = {name: np.array(column) for name, column in self._columns.items() if name != "sampled_at"}
        for column in columns.values():
            column.setflags(write=False)
        names = Names(**{field: self._codes[name].names() for name, field in _NAMED.items()})
        return Snapshot(time=time, ids=tuple(self._ids), names=names, **columns)

    def _check(self, event: e.Event) -> tuple[int, State, State]:
        """(row, state before, state after) of an event that is allowed."""
        row = self._rows.get(event.trajectory)
        if row is None:
            state = self._ended.get(event.trajectory)
            raise IllegalTransition(event.trajectory, state, event, "it needs a live trajectory")
        before = _STATES[self._columns["state"][row]]
        sources, after = TRANSITIONS[type(event)]
        if before not in sources:
            allowed = ", ".join(state.name for state in sorted(sources))
            raise IllegalTransition(event.trajectory, before, event, f"it may only come from {allowed}")
        since = self._columns["since"][row]
        if not event.time >= since:
            raise IllegalTransition(event.trajectory, before, event, f"its time is before the last event's, {since}")
        if isinstance(event, e.Ready) and event.kept != e.UNKNOWN:
            context = self._columns["tokens"][row] if before is State.TOOL else 0
            if not 0 <= event.kept <= min(context, event.tokens):
                raise IllegalTransition(event.trajectory, before, event, f"its former context has {context} tokens")
        return row, before, after

    def _sample(self, event: e.Sampled) -> Transition:
        known = event.trajectory in self._rows or event.trajectory in self._ended
        if known:
            state = self.state(event.trajectory)
            raise IllegalTransition(event.trajectory, state, event, "a trajectory is sampled once; use a new id")
        row = self._append(event.trajectory)
        columns = self._columns
        columns["turn"][row] = 0
        columns["version"][row] = event.version
        columns["order"][row] = NONE
        columns["group"][row] = self._codes["group"].hold(event.group)
        columns["task"][row] = self._codes["task"].hold(event.task)
        columns["sampled_at"][row] = event.time
        self._enter(row, State.SAMPLED, event, event.prompt_tokens)
        return Transition(
            event=event,
            before=None,
            after=State.SAMPLED,
            elapsed=0.0,
            tokens_before=0,
            tokens=event.prompt_tokens,
            turn=0,
            task=event.task,
            group=event.group,
            group_code=columns["group"][row],
            concurrency=0,
            sampled_at=event.time,
        )

    def _enter(self, row: int, state: State, event: e.Event, tokens: int) -> None:
        columns = self._columns
        self._counts[state] += 1
        columns["state"][row] = state
        columns["since"][row] = event.time
        columns["tokens"][row] = tokens
        columns["concurrency"][row] = 0
        match event:
            case e.SandboxStarting():
                columns["mode"][row] = self._codes["mode"].code(event.mode)
                columns["image"][row] = self._codes["image"].hold(event.image)
                columns["node_class"][row] = self._codes["node_class"].hold(event.node_class)
                columns["concurrency"][row] = self._counts[state]
            case e.Ready() | e.Requeued():
                if isinstance(event, e.Ready):
                    columns["start"][row] = tokens
                columns["prompt"][row] = tokens
                columns["order"][row] = self._entries
                self._entries += 1
            case e.PrefillStarted() | e.DecodeStarted():
                columns["instance"][row] = self._codes["instance"].code(event.instance)
            case e.ToolStarted():
                columns["tool"][row] = self._codes["tool"].hold(event.tool)
                columns["concurrency"][row] = self._counts[state]

    def _name(self, column: str, row: int) -> str:
        return self._codes[column].name(self._columns[column][row])

    def _append(self, trajectory: str) -> int:
        row = len(self._ids)
        for column in self._columns.values():
            column.append(NONE)
        self._ids.append(trajectory)
        self._rows[trajectory] = row
        return row

    def _remove(self, trajectory: str, row: int, state: State) -> None:
        for name in ("group", "task"):
            self._codes[name].let(self._columns[name][row])
        for column in self._columns.values():
            last = column.pop()
            if row < len(column):
                column[row] = last
        moved = self._ids.pop()
        if moved != trajectory:
            self._ids[row] = moved
            self._rows[moved] = row
        del self._rows[trajectory]
        self._ended[trajectory] = state
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
