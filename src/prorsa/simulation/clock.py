"""An asyncio event loop whose time is virtual: it jumps to the next timer whenever nothing is ready to run.

Code that takes its time from `loop.time()`, `asyncio.sleep` and `asyncio.timeout` runs on it unchanged. A run is
deterministic, and takes as long as its computations take. There is no outside: no sockets, no threads, no subprocesses.

Where tasks wait and no timer is left, nothing can ever happen again: `Deadlock` says which task waits where.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Timer = tuple[float, int, asyncio.TimerHandle]
"""(when it is due, its number, the handle): timers of one moment are due in the order in which they were set."""


class Deadlock(Exception):
    """Every task waits for another and no timer is set; the message says who waits where."""


class Livelock(Exception):
    """The loop keeps running tasks and time does not move."""


MAX_ROUNDS = 1_000_000
"""Rounds of the loop at one moment of virtual time; a round runs every task that is ready."""


MIN_CANCELLED = 100
"""Cancelled timers that may lie in the heap, however few others do."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """Time starts at 0 and moves only while every task waits.

    It replaces the round of the base class, which asks the operating system for events each time, by its own: about half of
    what a simulation of short tasks would cost otherwise.
    """

    _ready: deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._rounds = 0
        self._timers: list[Timer] = []
        self._numbers = itertools.count()
        self._cancelled = 0
        """How many of the timers are."""

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        self._check_closed()  # type: ignore[attr-defined]
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()  # type: ignore[attr-defined]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """The base class's handles call it before they are cancelled."""
        if handle._scheduled:  # type: ignore[attr-defined]
            if self._cancelled > max(MIN_CANCELLED, len(self._timers) // 2):
                self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
                heapq.heapify(self._timers)
                self._cancelled = 0
            self._cancelled += 1

    def _run_once(self) -> None:
        """One round: run every handle that is ready, those of the timers that are due included."""
        ready = self._ready
        if not ready and not self._stopping:
            self._jump()
        self._rounds += 1
        if self._rounds > MAX_ROUNDS:
            self._rounds = 0
            raise Livelock(f"time stands at {self._now} s for {MAX_ROUNDS} rounds; {_waiting(asyncio.all_tasks(self))}")
        timers = self._timers
        while timers and timers[0][0] <= self._now:
            ready.append(self._pop())
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _jump(self) -> None:
        """To the next timer that is not cancelled."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            self._pop()
        if not timers:
            raise Deadlock(f"no timer is set; {_waiting(asyncio.all_tasks(self))}")
        if timers[0][0] > self._now:
            self._now = timers[0][0]
            self._rounds = 0

    def _pop(self) -> asyncio.TimerHandle:
        timer = heapq.heappop(self._timers)[2]
        timer._scheduled = False  # type: ignore[attr-defined]
        self._cancelled -= timer.cancelled()
        return timer

    def _write_to_self(self) -> None:
        """Wakes a loop that another thread schedules on; there is none."""


def run(main: Coroutine[Any, Any, T], debug: bool | None = None) -> T:
    """`asyncio.run` in virtual time. Raises `Deadlock` and `Livelock`."""
    with _rare_collections(), asyncio.Runner(loop_factory=VirtualTimeLoop, debug=debug) as runner:
        return runner.run(main)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A simulation has a great many small objects, nearly all freed by their reference counts: looking for cycles as often
    as Python does would cost a tenth of the run and more."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _waiting(tasks: set[asyncio.Task[Any]]) -> str:
    lines = [f"{len(tasks)} tasks:"]
    for task in sorted(tasks, key=lambda task: task.get_name()):
        stack = task.get_stack(limit=1)
        where = traceback.format_list(traceback.extract_stack(stack[0], limit=1))[0].strip() if stack else "not started"
        lines.append(f"{task.get_name()}: {where}")
    return "\n".join(lines)
