"""How long sandboxes take: prewarmed and cold start, one call, and many started at once beside a working event loop.

python benchmarks/sandboxes.py
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import resource
import statistics
from time import perf_counter

from prorsa.rollout.sandboxes.pool import SandboxPool


def report(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    print(f"{name:34} median {statistics.median(ordered) * 1e3:8.2f} ms   p95 {p95 * 1e3:8.2f} ms   n {len(ordered)}")


def children_cpu() -> float:
    """CPU seconds of the processes that have ended: unlike the wall time, they depend little on what else runs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def start_one(pool: SandboxPool) -> float:
    began = perf_counter()
    async with pool.sandbox() as sandbox:
        await sandbox.start()
        return perf_counter() - began


async def measure_starts(count: int) -> None:
    before = children_cpu()
    async with SandboxPool(prewarmed=0) as pool:
        report("cold start", [await start_one(pool) for _ in range(count)])
    print(f"CPU time of a cold sandbox's process {(children_cpu() - before) / count * 1e3:.2f} ms")
    async with SandboxPool(prewarmed=1) as pool:
        seconds = []
        for _ in range(count):
            while pool.ready == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            seconds.append(await start_one(pool))
        report("prewarmed start", seconds)


async def measure_calls(count: int) -> None:
    async with SandboxPool(prewarmed=0) as pool, pool.sandbox() as sandbox:
        await sandbox.start()
        seconds = []
        for number in range(count):
            began = perf_counter()
            await sandbox.run(f"print({number} * 48)")
            seconds.append(perf_counter() - began)
        report("call of print(n * 48)", seconds)


async def measure_crowd(count: int) -> None:
    """The lateness of a 1 ms timer says how much the starts hold up whatever else runs on the loop."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            began = perf_counter()
            await asyncio.sleep(0.001)
            late.append(perf_counter() - began - 0.001)

    async with SandboxPool(prewarmed=8) as pool:
        while pool.ready < 8:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        ticker = asyncio.create_task(tick())
        began = perf_counter()
        seconds = await asyncio.gather(*(start_one(pool) for _ in range(count)))
        whole = perf_counter() - began
        ticker.cancel()
    report(f"start, {count} at once, 8 prewarmed", seconds)
    report("lateness of a 1 ms timer meanwhile", late)
    print(f"{count} at once: {whole:.2f} s, {count / whole:.0f} sandboxes/s")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=64)
    count = parser.parse_args().count
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    await measure_starts(count)
    await measure_calls(10 * count)
    await measure_crowd(count)


if __name__ == "__main__":
    asyncio.run(main())
