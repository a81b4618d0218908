"""What the cluster remembers does not grow with the turns that it has served."""

from __future__ import annotations

import asyncio
import gc
import types
from collections import deque
from typing import Any

import pytest
from cluster_bench import Bench, ask
from fake_engine import FakeEngine, World

from prorsa.cluster import placement
from prorsa.forecast import durations
from prorsa.lifecycle import tracker
from prorsa.lifecycle.events import Done, RewardStarted, Sampled, ToolStarted
from prorsa.simulation.clock import run

LEFT_OUT = (
    type | types.ModuleType | types.FunctionType | types.CodeType | asyncio.AbstractEventLoop | FakeEngine | World
)


def entries(*roots: Any) -> int:
    """Values in all containers that can be reached, but for engines and code."""
    seen: dict[int, Any] = {}
    found, queue = 0, deque(roots)
    while queue:
        thing = queue.popleft()
        if id(thing) in seen or isinstance(thing, LEFT_OUT):
            continue
        seen[id(thing)] = thing
        found += len(thing) if isinstance(thing, dict | list | tuple | set | deque) else 1
        queue.extend(gc.get_referents(thing))
    return found


async def trajectory(bench: Bench, number: int) -> None:
    now, control, name = asyncio.get_running_loop().time, bench.control, f"t{number}"
    await control.record(Sampled(now(), name, f"g{number}", "task"))
    for turn in range(3):
        prompt = (number, *range(10 * turn))
        result = await control.generate(ask(name, 5, turn, prompt))
        length = len(prompt) + len(result.token_ids)
        if turn < 2:
            await control.record(ToolStarted(now(), name, "python", length))
            await asyncio.sleep(0.01)
    await control.record(RewardStarted(now(), name, length))
    await control.record(Done(now(), name, 1.0, True))


def test_what_is_remembered_does_not_grow_with_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, bound in ((tracker, "REMEMBERED"), (placement, "REMEMBERED"), (durations, "WINDOW")):
        monkeypatch.setattr(module, bound, 20)

    async def main() -> list[int]:
        sizes = []
        async with Bench() as bench:
            for engine in bench.engines.values():
                engine.prefill_s = 0.01
            control = bench.control
            for first in range(0, 800, 200):
                for number in range(first, first + 200, 4):
                    await asyncio.gather(*(trajectory(bench, number + i) for i in range(4)))
                # What a run is there to report grows with it.
                control.decisions.clear()
                bench.notes.__init__()  # type: ignore[misc]
                sizes.append(entries(control))
        return sizes

    sizes = run(main())
    assert max(sizes[1:]) < 1.05 * sizes[1], sizes
