"""What the cluster remembers does not grow with the turns that it has served."""

from __future__ import annotations

import asyncio
import gc
import types
from array import array
from collections import deque
from typing import Any

import pytest
from cluster_bench import Bench, ask
from fake_engine import FakeEngine, World

from prorsa.cluster import control, placement
from prorsa.forecast import LifecycleForecaster, SurvivalForecaster, backoff, durations, forecaster, launches, returns
from prorsa.forecast.forecast import Forecaster
from prorsa.forecast.survival import groups, hazards
from prorsa.lifecycle import Tracker, tracker
from prorsa.lifecycle.events import (
    DecodeStarted,
    Done,
    Event,
    PrefillStarted,
    Ready,
    RewardStarted,
    Sampled,
    SandboxMode,
    SandboxStarting,
    ToolStarted,
)
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
        found += len(thing) if isinstance(thing, dict | list | tuple | set | deque | array) else 1
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


def strangers(number: int) -> list[Event]:
    """The events of a trajectory whose names never came before."""
    at, name = 10.0 * number, f"t{number}"
    return [
        Sampled(at, name, f"g{number}", f"task{number}", 30, 0),
        SandboxStarting(at, name, SandboxMode.COLD, f"image{number}", f"node{number}"),
        Ready(at + 1, name, 30),
        PrefillStarted(at + 2, name, "e0"),
        DecodeStarted(at + 3, name, "e1"),
        ToolStarted(at + 4, name, f"tool{number}", 40),
        Ready(at + 5, name, 50),
        PrefillStarted(at + 6, name, "e0"),
        DecodeStarted(at + 7, name, "e1"),
        RewardStarted(at + 8, name, 60),
        Done(at + 9, name, 1.0, True),
    ]


@pytest.mark.parametrize(
    "learning", [LifecycleForecaster(None, 1000.0, decode_returns=True), SurvivalForecaster(None, 1000.0)]
)
def test_names_without_end_are_forgotten(learning: Forecaster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that runs for weeks sees tasks, tools and images that no other trajectory has."""
    for module, bound in (
        (tracker, "REMEMBERED"),
        (backoff, "MOST_KEYS"),
        (durations, "WINDOW"),
        (hazards, "MOST_KEYS"),
        (groups, "MOST_TASKS"),
    ):
        monkeypatch.setattr(module, bound, 20)
    for known in (launches, returns, forecaster):
        monkeypatch.setattr(known, "MOST_CLASSES", 20)
    learning.__init__(None, 1000.0)  # type: ignore[misc]
    seen, sizes = Tracker(), []
    for number in range(1200):
        for event in strangers(number):
            learning.observe(seen.apply(event))
        if number % 300 == 299:
            made = learning.forecast(seen.snapshot(10.0 * number + 9), 5.0, ["e0"])
            assert made.prefill_tokens >= 0.0
            assert len(seen.snapshot(0.0).names.tasks) <= tracker.IDLE + 2
            sizes.append(entries(learning, seen))
    assert max(sizes[1:]) < 1.05 * sizes[1], sizes


def test_the_last_decisions_and_flips_are_kept() -> None:
    kept: list[int] = []
    for number in range(5 * control.KEPT):
        control._keep(kept, number)
        assert kept == list(range(max(0, number + 1 - len(kept)), number + 1))
        assert number < control.KEPT or control.KEPT <= len(kept) < 2 * control.KEPT
