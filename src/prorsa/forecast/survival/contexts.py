"""What is known of each live trajectory beyond its row in a snapshot: where its turn began and what a cache has of it."""

from __future__ import annotations

import math
from array import array

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.durations import Floats
from prorsa.forecast.survival.groups import Groups
from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import Transition
from prorsa.lifecycle.states import State

UNKNOWN = -1
"""Cached tokens of a trajectory of which nothing has been computed."""


class _Queue:
    """The requests in READY and PREFILL, in columns that are read all at once."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        """In the order in which they are served."""
        self._free: list[int] = []
        self._groups = array("q")
        self._tokens, self._cached = array("q"), array("q")
        """Of the prompt, and how many of these are in a cache: UNKNOWN for as many as of its group; 0 in a free row."""

    def put(self, trajectory: str, group: int, tokens: int, cached: int) -> None:
        row = self._rows.pop(trajectory, None)
        if row is None and self._free:
            row = self._free.pop()
        self._rows[trajectory] = len(self._groups) if row is None else row
        if row is None:
            self._groups.append(group)
            self._tokens.append(tokens)
            self._cached.append(cached)
        else:
            self._groups[row], self._tokens[row], self._cached[row] = group, tokens, cached

    def take(self, trajectory: str) -> None:
        row = self._rows.pop(trajectory, None)
        if row is not None:
            self._tokens[row] = self._cached[row] = 0
            self._free.append(row)

    def caches_lost(self) -> None:
        for row in self._rows.values():
            self._cached[row] = UNKNOWN

    def tokens(self, shared: Floats) -> tuple[Floats, Floats]:
        """(tokens, tokens to compute, one at least) of each request, as they are served.

        `shared` are those that a cache has for all of each group.
        """
        rows = np.fromiter(self._rows.values(), np.intp, len(self._rows))
        tokens, cached, groups = (np.array(column)[rows] for column in (self._tokens, self._cached, self._groups))
        cached = np.where(cached == UNKNOWN, shared[groups], cached)
        return tokens.astype(np.float64), np.maximum(tokens - cached, 1.0)


class Contexts:
    """`observe` is O(1); nothing is kept of a trajectory that has ended."""

    def __init__(self, groups: Groups) -> None:
        self._starts: dict[str, int] = {}
        self._cached: dict[str, int] = {}
        self._groups = groups
        self._prompts = groups.column()
        """Tokens of the first prompt of each group."""
        self._computed = groups.column()
        """1 for groups whose first prompt is in a cache: one member has it there for all."""
        self._members = groups.column()
        self._queue = _Queue()
        self.lost_at = -math.inf
        """When all caches were lost for the last time, seconds: the time of the last event before it."""
        self._now = -math.inf

    def observe(self, transition: Transition) -> bool:
        """Take a transition in, once what it was known for has been read. True: the last live one of its group has ended."""
        event = transition.event
        name, group = event.trajectory, transition.group_code
        self._now = event.time
        if isinstance(event, e.Sampled):
            self._groups.cover(group + 1)
            self._members[group] += 1.0
        elif isinstance(event, e.Ready):
            self._starts[name] = event.tokens
            if transition.before is not State.TOOL:
                self._prompts[group] = event.tokens
            elif name in self._cached:
                self._cached[name] = min(self._cached[name], event.extends(transition.tokens_before))
            self._queue.put(name, group, transition.tokens, self._cached.get(name, UNKNOWN))
        elif isinstance(event, e.DecodeStarted):
            self._queue.take(name)
            self._cached[name] = transition.tokens
            self._computed[group] = 1.0
        elif isinstance(event, e.ToolStarted):
            self._cached[name] = event.tokens
        elif isinstance(event, e.Requeued):
            if transition.before is State.DECODE:
                self._cached[name] = event.tokens
            self._queue.put(name, group, transition.tokens, self._cached.get(name, UNKNOWN))
        elif isinstance(event, e.ENDS):
            return self._ended(name, group)
        return False

    def caches_lost(self) -> None:
        self._cached.clear()
        self._computed[:] = array("d", [0.0] * len(self._computed))
        self._queue.caches_lost()
        self.lost_at = self._now

    def start(self, trajectory: str) -> int:
        """Tokens of the context with which the present turn began."""
        return self._starts.get(trajectory, 0)

    def cached(self, trajectory: str) -> int:
        """Tokens of the context that are in a cache: of one in DECODE, those with which it began."""
        return self._cached.get(trajectory, 0)

    def have_prompts(self) -> NDArray[np.bool_]:
        """[group]: whether the first prompt is in a cache."""
        return np.array(self._computed) > 0.0

    def uncached(self, trajectory: str, group: int, tokens: int) -> int:
        """Of a prompt of `tokens`, how many have to be computed; one at least."""
        cached = self._cached.get(trajectory)
        if cached is None:
            cached = int(self._prompts[group] * self._computed[group])
        return max(tokens - cached, 1)

    def queue(self) -> tuple[Floats, Floats]:
        """(tokens, tokens that have to be computed) of the requests in READY and PREFILL, in the order of the queue."""
        return self._queue.tokens(np.array(self._prompts) * np.array(self._computed))

    def _ended(self, trajectory: str, group: int) -> bool:
        self._queue.take(trajectory)
        self._starts.pop(trajectory, None)
        self._cached.pop(trajectory, None)
        self._members[group] -= 1.0
        return self._members[group] <= 0.0
