"""Work on large requests: in threads, so that the event loop goes on, and only so much of it at once.

Reading JSON and rendering hold Python's lock, which threads hand on a thousand times a second (see `run_server`); encoding a
text does not hold it at all.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import ParamSpec, TypeVar

from prorsa.gateway.errors import ApiError

P = ParamSpec("P")
R = TypeVar("R")

LARGE = 1 << 16
"""Bytes from which a thread reads: less takes the loop a millisecond."""
THREADS = 2
MOST_WAITING = 64
"""Pieces of work that may wait for a thread."""


RELEASE_SECONDS = 1.0
"""After a large request, until what it needed is given back to the system: glibc would keep it, hundreds of bytes a token."""


class LongWork:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prorsa-large")
        self._room = BoundedSemaphore(THREADS + MOST_WAITING)
        self._release: asyncio.TimerHandle | None = None
        """Runs from a piece of work until memory is given back."""

    async def run(self, size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """What `work` returns, which takes as long as reading `size` bytes. Raises `ApiError` (503) where too much waits.

        Cancelling it takes work back that no thread has begun.
        """
        if size < LARGE:
            return work(*args, **kwargs)
        if not self._room.acquire(blocking=False):
            raise ApiError(503, "too many large requests are being read; try again later")
        future = self._pool.submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._room.release())
        try:
            return await self._done(future)
        finally:
            del future  # as below

    async def finish(self, size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, for a request that is in service already: it is never refused."""
        if size < LARGE:
            return work(*args, **kwargs)
        return await self._done(self._pool.submit(work, *args, **kwargs))

    def close(self) -> None:
        if self._release is not None:
            self._release.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _done(self, future: Future[R]) -> R:
        try:
            return await asyncio.wrap_future(future)
        finally:
            # An error that it ended with has this frame in its traceback, and all that was read: a cycle, which would stay.
            del future
            if self._release is None and _malloc_trim is not None:
                self._release = asyncio.get_running_loop().call_later(
                    RELEASE_SECONDS, self._release_memory, _malloc_trim
                )

    def _release_memory(self, trim: Callable[[int], int]) -> None:
        self._release = None
        self._pool.submit(trim, 0)


def _c_function(name: str) -> Callable[[int], int] | None:
    """None where the C library has none of that name."""
    return getattr(ctypes.CDLL(None), name, None)


_malloc_trim = _c_function("malloc_trim")
