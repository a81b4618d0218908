"""An asyncio event loop whose time is virtual: it jumps to the next timer whenever nothing is ready to run.

Code that takes its time from `loop.time()`, `asyncio.sleep` and `asyncio.timeout` runs on it unchanged. A run is
deterministic, and takes as long as its computations take. There is no outside: no sockets, no threads, no subprocesses.

Where tasks wait and no timer is left, nothing can ever happen again: `Deadlock` says which task waits where.
"""

from __future__ import annotations

import asyncio
import math
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(Exception):
    """Every task waits for another and no timer is set; the message says who waits where."""


class Livelock(Exception):
    """The loop keeps running tasks and time does not move."""


MAX_ROUNDS = 1_000_000
"""Rounds of the loop at one moment of virtual time; a round runs every task that is ready."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Time starts at 0 and moves only while every task waits."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._rounds = 0
        # BaseEventLoop asks its selector to wait for the next timer, or for ever (None) where there is none.
        self._selector = self

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock(f"no timer is set; {_waiting(asyncio.all_tasks(self))}")
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            self._rounds = 0
            raise Livelock(f"time stands at {self._now} s for {MAX_ROUNDS} rounds; {_waiting(asyncio.all_tasks(self))}")
        if timeout > 0:
            self._rounds = 0
            # Not `now + timeout`: its rounding could fall an ulp short of the deadline.
            self._now = self._scheduled[0].when()  # type: ignore[attr-defined]
            # Timers are due up to this much early: exactly those of now, however large the time has grown.
            self._clock_resolution = math.ulp(self._now)
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """No file descriptors, so no events."""

    def _write_to_self(self) -> None:
        """Wakes a loop that another thread schedules on; there is none."""


def run(main: Coroutine[Any, Any, T], debug: bool | None = None) -> T:
    """`asyncio.run` in virtual time. Raises `Deadlock` and `Livelock`."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop, debug=debug) as runner:
        return runner.run(main)


def _waiting(tasks: set[asyncio.Task[Any]]) -> str:
    lines = [f"{len(tasks)} tasks:"]
    for task in sorted(tasks, key=lambda task: task.get_name()):
        stack = task.get_stack(limit=1)
        where = traceback.format_list(traceback.extract_stack(stack[0], limit=1))[0].strip() if stack else "not started"
        lines.append(f"{task.get_name()}: {where}")
    return "\n".join(lines)
