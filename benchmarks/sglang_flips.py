"""Role flips of three real SGLang engines under live sessions: are the tokens right, and what does a flip cost?

    python benchmarks/sglang_flips.py [--flips 50] [--kv-store] [--relaunches 3]

16 sessions of several turns run again and again, with new prompts each time, until so many flips have happened; greedy tokens
are compared with the embedded engine's, which generates them alone and undisturbed. Then the same change of role is made by
stopping the engine and launching it anew.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, quantiles

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sglang_engines"))
from sglang_bench import MODEL, SESSIONS, D, P, controlled, idle, launching, session, undisturbed

from prorsa.allocation import Allocation
from prorsa.cluster.control import ControlPlane
from prorsa.engines.sglang_server.launcher import SGLangLauncher

TARGETS = (Allocation(2, 1), Allocation(1, 2))
PAUSE_SECONDS = 0.25
"""From the end of a flip to the next one."""


async def main(parsed: argparse.Namespace, directory: Path) -> None:
    rounds = 0
    served: list[list[tuple[int, ...]]] = []
    store = directory / "store" if parsed.kv_store else None
    async with launching(directory / "engines", kv_store_dir=store) as launcher:
        start = time.perf_counter()
        roles = {"a": P, "b": D, "c": D}
        engines = await asyncio.gather(*(launcher.start(*instance) for instance in roles.items()))
        print(f"three engines serve after {time.perf_counter() - start:.1f} s")
        async with controlled(engines) as control:
            start = time.perf_counter()
            flipping = asyncio.create_task(flip_until(control, parsed.flips))
            while not flipping.done():
                numbers = range(rounds * SESSIONS, (rounds + 1) * SESSIONS)
                got = await asyncio.gather(*(session(control, number) for number in numbers))
                rounds += 1
                served.extend(got)
            await flipping
            seconds = time.perf_counter() - start
            status, flips = control.status(), list(control.flips)
        for engine in engines:
            await idle(engine)
        left = sum([(await engine.load()).used_tokens for engine in engines])
        reference = await undisturbed(MODEL, directory / "reference", rounds * SESSIONS)
        wrong = sum(ours != theirs for ours, theirs in zip(served, reference, strict=True))
        turns = sum(len(outputs) for outputs in served)
        tokens = sum(len(output) for outputs in served for output in outputs)
        print(f"{len(flips)} flips, {sum(f.failure is not None for f in flips)} failed, in {seconds:.1f} s")
        print(f"{rounds * SESSIONS} sessions, {turns} turns, {tokens} tokens; sessions that differ: {wrong}")
        print(f"{status.resends} resends; KV tokens that idle engines hold for requests: {left}")
        show("drain", [flip.drain_s for flip in flips])
        show("flip", [flip.flip_s for flip in flips])
        show("both", [flip.drain_s + flip.flip_s for flip in flips])
        relaunched = [await relaunch(launcher, number) for number in range(parsed.relaunches)]
        show("relaunch: stop", [stop for stop, _ in relaunched])
        show("relaunch: start", [start for _, start in relaunched])


async def flip_until(control: ControlPlane, count: int) -> None:
    for target in itertools.cycle(TARGETS):
        await asyncio.sleep(PAUSE_SECONDS)
        if len(control.flips) >= count:
            return
        await control.switcher.apply(target)


async def relaunch(launcher: SGLangLauncher, number: int) -> tuple[float, float]:
    """Seconds to stop an engine in order, and to launch it in the other role."""
    begun = time.perf_counter()
    await launcher.stop("b")
    stopped = time.perf_counter()
    await launcher.start("b", (P, D)[number % 2])
    return stopped - begun, time.perf_counter() - stopped


def show(what: str, seconds: Sequence[float]) -> None:
    if len(seconds) > 1:
        high = quantiles(seconds, n=20)[-1]
        print(
            f"{what:>16}: mean {fmean(seconds):.2f} s, median {median(seconds):.2f}, 95 % {high:.2f}, most {max(seconds):.2f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=50)
    parser.add_argument("--kv-store", action="store_true", help="with KV shared as files")
    parser.add_argument("--relaunches", type=int, default=3)
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(main(parser.parse_args(), Path(scratch)))
