"""The event loop of `prorsa serve`: its clock is exact and no timer is early, neither of which uvloop alone promises."""

from __future__ import annotations

import asyncio
import time

import uvloop

from prorsa.gateway.serve import run_server


def test_the_clock_goes_on_within_a_step_and_no_timer_is_early() -> None:
    early = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, uvloop.Loop)
        before = time.monotonic()
        told = loop.time()
        assert before <= told <= time.monotonic()
        for index in range(40):
            due = loop.time() + 0.0007 * index
            reached = loop.create_future()
            loop.call_at(due, reached.set_result, None)
            await reached
            early.append(due - loop.time())

    run_server(main())
    assert max(early) <= 0
