from __future__ import annotations

import asyncio
import time

import pytest

from prorsa.simulation import clock
from prorsa.simulation.clock import Deadlock, Livelock, run


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        for seconds in (0.1, 86_400.0 * 365, 0.2):
            await asyncio.sleep(seconds)
            times.append(loop.time())
        return times

    start = time.perf_counter()
    assert run(main()) == pytest.approx([0.0, 0.1, 31_536_000.1, 31_536_000.3])
    assert time.perf_counter() - start < 5.0


def test_tasks_interleave_by_virtual_time_and_timeouts_hold() -> None:
    async def main() -> list[str]:
        order: list[str] = []

        async def note(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            order.append(name)

        async with asyncio.TaskGroup() as tasks:
            for name, seconds in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
                tasks.create_task(note(name, seconds))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        assert asyncio.get_running_loop().time() == 8.0
        return order

    assert run(main()) == ["a", "b", "c"]


def test_a_deadlock_says_who_waits_where() -> None:
    async def wait_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(wait_for_ever(), name="the sleeper")

    with pytest.raises(
        Deadlock, match=r"(?s)no timer is set; 2 tasks:.*the sleeper: File .*test_clock.py.* in wait_for_ever"
    ):
        run(main())


def test_equal_deadlines_are_due_together_and_near_ones_are_not() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        fired: list[float] = []
        for when in (0.3, 0.1 + 0.2, 0.3 + 2e-10):
            loop.call_at(when, lambda: fired.append(loop.time()))
        await asyncio.sleep(1.0)
        return fired

    assert run(main()) == [0.3, 0.1 + 0.2, 0.3 + 2e-10]


def test_a_livelock_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "MAX_ROUNDS", 1000)

    async def main() -> None:
        await asyncio.sleep(2.0)
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match=r"time stands at 2\.0 s"):
        run(main())


def test_timers_of_one_moment_are_due_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        fired: list[int] = []
        for number in range(100):
            loop.call_at(1.0, fired.append, number)
        await asyncio.sleep(2.0)
        return fired

    assert run(main()) == list(range(100))


def test_cancelled_timers_neither_fire_nor_pile_up() -> None:
    async def main() -> tuple[list[int], int]:
        loop = asyncio.get_running_loop()
        fired: list[int] = []
        for number in range(10_000):
            timer = loop.call_later(1e6 + number, fired.append, number)
            if number % 100:
                timer.cancel()
            await asyncio.sleep(0.001)
        left = len(loop._timers)  # type: ignore[attr-defined]
        await asyncio.sleep(2e6)
        return fired, left

    fired, left = run(main())
    assert fired == list(range(0, 10_000, 100))
    assert left < 300
