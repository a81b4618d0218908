"""Work on large requests: in threads, so that the event loop goes on, and only so much of it at once.

Reading JSON and rendering hold Python's lock, which threads hand on a thousand times a second (see `run_server`); encoding a
text does not hold it at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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


class LongWork:
    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="prorsa-large")
        self._room = BoundedSemaphore(THREADS + MOST_WAITING)

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
        return await asyncio.wrap_future(future)

    async def finish(self, size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """As `run`, for a request that is in service already: it is never refused."""
        if size < LARGE:
            return work(*args, **kwargs)
        return await asyncio.wrap_future(self._pool.submit(work, *args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
