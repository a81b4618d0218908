"""Role changes of three real SGLang engines under live sessions: are the tokens right, and what does a change cost?

    python benchmarks/sglang_flips.py [--flips 50] [--relaunches 10] [--only flip] [--pause 0.25]

16 sessions of several turns run again and again, with new prompts each time: once undisturbed, then until so many role
changes have happened. A change is a flip, or, for comparison, the engine is stopped and launched anew in the other role; the
control plane drains, checks and routes it the same way. Both without and with KV shared as files. Greedy tokens are compared
with the embedded engine's, which generates them alone and undisturbed.

Recomputed are the prompt tokens of an attempt less those that its prefill engine found in its cache or in the shared KV. A
cancelled request is resent with the tokens that it has as part of its prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sglang_engines"))
from sglang_bench import MODEL, SESSIONS, D, P, controlled, idle, launching, session, undisturbed

from prorsa.allocation import Allocation
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.observers import Flip
from prorsa.engines.protocol import Chunk, GenerateRequest, Role
from prorsa.engines.sglang import SGLangEngine
from prorsa.engines.sglang_server.launcher import SGLangLauncher

TARGETS = (Allocation(2, 1), Allocation(1, 2))
WAYS = {
    "flip": (False, False),
    "flip-shared": (False, True),
    "relaunch": (True, False),
    "relaunch-shared": (True, True),
}
"""Name -> (whether engines are relaunched, whether they share their KV)."""


@dataclass
class Attempt:
    """As its prefill engine saw it."""

    prompt: int
    cached: int | None = None
    """None: it was cancelled before it was prefilled."""


class Watched:
    """An engine that counts what is asked of it as a prefill engine, and may be relaunched where it would flip."""

    def __init__(self, engine: SGLangEngine, role: Role, attempts: dict[str, Attempt], launcher: SGLangLauncher | None):
        """`attempts` by rid, of all engines. A `launcher` relaunches it."""
        self.engine = engine
        self._role = role
        self._attempts = attempts
        self._launcher = launcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        attempt = Attempt(len(request.input_ids)) if self._role is P else None
        if attempt is not None:
            self._attempts[request.rid] = attempt
        async with aclosing(cast(AsyncGenerator[Chunk, None], self.engine.generate(request))) as stream:
            async for chunk in stream:
                if attempt is not None and chunk.token_ids:
                    attempt.cached = chunk.cached_tokens
                yield chunk

    async def switch_role(self, role: Role) -> None:
        if self._launcher is None:
            await self.engine.switch_role(role)
        else:
            self.engine = await self._launcher.restart(self.engine.name, role)
        self._role = role


@dataclass
class Outcome:
    seconds: float
    """Of the sessions during the changes."""
    flips: list[Flip]
    served: list[list[tuple[int, ...]]]
    """The outputs of each session, the undisturbed ones included."""
    left: int
    """KV tokens that idle engines hold for requests in the end."""
    calm: dict[str, Attempt]
    """Of the undisturbed sessions."""
    disturbed: dict[str, Attempt]


async def change_roles(relaunch: bool, shared: bool, changes: int, pause: float, directory: Path) -> Outcome:
    attempts: dict[str, Attempt] = {}
    store = directory / "store" if shared else None
    async with launching(directory / "engines", kv_store_dir=store) as launcher:
        roles = {"a": P, "b": D, "c": D}
        started = await asyncio.gather(*(launcher.start(*instance) for instance in roles.items()))
        relaunching = launcher if relaunch else None
        engines = [
            Watched(engine, role, attempts, relaunching) for engine, role in zip(started, roles.values(), strict=True)
        ]
        async with controlled(engines) as control:
            served = list(await asyncio.gather(*(session(control, number) for number in range(SESSIONS))))
            calm, start = dict(attempts), time.perf_counter()
            attempts.clear()
            changing = asyncio.create_task(change_until(control, changes, pause))
            while not changing.done():
                numbers = range(len(served), len(served) + SESSIONS)
                served += await asyncio.gather(*(session(control, number) for number in numbers))
            await changing
            seconds, flips = time.perf_counter() - start, list(control.flips)
        for engine in engines:
            await idle(engine)
        left = sum([(await engine.load()).used_tokens for engine in engines])
    return Outcome(seconds, flips, served, left, calm, attempts)


async def change_until(control: ControlPlane, count: int, pause: float) -> None:
    for target in itertools.cycle(TARGETS):
        await asyncio.sleep(pause)
        if len(control.flips) >= count:
            return
        await control.switcher.apply(target)


def computed(attempts: Sequence[Attempt]) -> int:
    return sum(attempt.prompt - attempt.cached for attempt in attempts if attempt.cached is not None)


def resent(attempts: dict[str, Attempt]) -> list[Attempt]:
    """Those after the first of a turn; a canary has only one."""
    return [attempt for rid, attempt in attempts.items() if not rid.endswith(".0")]


def show(name: str, outcome: Outcome, reference: Sequence[list[tuple[int, ...]]]) -> None:
    wrong = sum(ours != theirs for ours, theirs in zip(outcome.served, reference, strict=True))
    turns = sum(len(outputs) for outputs in outcome.served)
    tokens = sum(len(output) for outputs in outcome.served for output in outputs)
    flips, again = outcome.flips, resent(outcome.disturbed)
    sessions = len(outcome.served) - SESSIONS
    failed = sum(flip.failure is not None for flip in flips)
    print(f"{name}: {len(flips)} changes in {outcome.seconds:.1f} s, {failed} failed")
    print(f"  {len(outcome.served)} sessions, {turns} turns, {tokens} tokens; sessions that differ: {wrong}")
    print(f"  KV tokens held for requests in the end: {outcome.left}")
    for what, seconds in (
        ("drain", [flip.drain_s for flip in flips]),
        ("change", [flip.flip_s for flip in flips]),
        ("out of service", [flip.drain_s + flip.flip_s for flip in flips]),
    ):
        print(
            f"  {what}: mean {fmean(seconds):.2f} s, 95 % {quantiles(seconds, n=20)[-1]:.2f}, most {max(seconds):.2f}"
        )
    print(f"  requests disturbed: {fmean(flip.cancelled for flip in flips):.2f} a change")
    print(
        f"  {len(again)} resent attempts, {sum(attempt.cached is None for attempt in again)} of them cancelled unprefilled; "
        f"prompts {sum(attempt.prompt for attempt in again)}, recomputed {computed(again)} tokens: "
        f"{computed(again) / len(flips):.0f} a change"
    )
    calm = computed(list(outcome.calm.values())) / SESSIONS
    disturbed = computed(list(outcome.disturbed.values())) / sessions
    print(
        f"  prompt tokens computed a session: {calm:.0f} undisturbed, {disturbed:.0f} during the changes; "
        f"{(disturbed - calm) * sessions / len(flips):.0f} more for each change"
    )


async def main(parsed: argparse.Namespace, directory: Path) -> None:
    for name in [parsed.only] if parsed.only else WAYS:
        relaunch, shared = WAYS[name]
        changes = parsed.relaunches if relaunch else parsed.flips
        outcome = await change_roles(relaunch, shared, changes, parsed.pause, directory / name)
        show(name, outcome, await undisturbed(MODEL, directory / "reference", len(outcome.served)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=50)
    parser.add_argument("--relaunches", type=int, default=10)
    parser.add_argument("--only", choices=WAYS, help="one way; the default is all")
    parser.add_argument("--pause", type=float, default=0.25, help="seconds between two changes")
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(main(parser.parse_args(), Path(scratch)))
