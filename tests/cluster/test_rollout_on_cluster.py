"""The rollout on the real control plane: no trajectory notices flips, deaths or weight updates (promises 1, 2, 6 and 10)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from cluster_bench import Bench
from rollouts import QUESTION, ScriptedSandboxes, call, environment

from prorsa.allocation import Allocation, Policy, Situation
from prorsa.rollout.controller import Controller, Plan
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.sampler import Outcome, Sampler
from prorsa.rollout.tasks.base import Message, Question
from prorsa.simulation import clock

QUESTIONS = [Question(f"q{i}", QUESTION.messages, "1776") for i in range(6)]


class Oracle:
    """A tokenizer that reads something sensible into the fake engines' tokens. Implements `Tokenizer`."""

    eos_ids = (0,)

    def __init__(self) -> None:
        self._prompts = 0

    def render(self, messages: Sequence[Message], tools: Any, add_generation_prompt: bool) -> list[int]:
        """Another prompt each time, the same sequence of them for every `Oracle`."""
        self._prompts += 1
        return [self._prompts % 97, 1, 2, 3]

    def decode(self, ids: Sequence[int]) -> str:
        return call("1") if sum(ids) % 4 else "The answer is 1776."

    def tool_turn(self, result_text: str) -> list[int]:
        return [1, *(ord(letter) % 97 for letter in result_text), 2]


class Restless(Policy):
    """A policy that always wants other roles than it has."""

    def __init__(self) -> None:
        self._splits = cycle([Allocation(1, 3), Allocation(3, 1), Allocation(2, 2)])

    def decide(self, situation: Situation) -> Allocation:
        return next(self._splits)


Disturbance = Callable[[Bench], Awaitable[None]]


def roll_out(bench: Bench, disturb: Disturbance | None = None) -> dict[str, TrajectoryRecord]:
    """Four synchronous batches of three groups of four."""

    async def main() -> dict[str, TrajectoryRecord]:
        sandboxes = ScriptedSandboxes(start_s=0.1, run_s=0.2)
        world = replace(environment(sandboxes, max_new_tokens=120), tokenizer=Oracle())
        sampler = Sampler(QUESTIONS, 4, seed=0)
        records = {}
        plan = Plan(groups=3, max_staleness=9)
        async with bench, Controller(bench.control, world, sampler, plan) as controller:
            disturbing = asyncio.ensure_future(disturb(bench)) if disturb else None
            for _ in range(4):
                for group in await controller.batch():
                    assert group.outcome is Outcome.TRAINED
                    records |= {record.trajectory: record for record in group.records}
            if disturbing is not None:
                await disturbing
        assert controller.lost == 0
        assert sandboxes.used == 0
        assert len(bench.control.tracker) == 0
        return records

    return clock.run(main())


def undisturbed() -> dict[str, TrajectoryRecord]:
    records = roll_out(Bench("M"))
    assert len(records) == 48
    assert {record.turns for record in records.values()} == {1, 2, 3, 4}
    return records


def test_flips_change_no_token_of_any_trajectory() -> None:
    bench = Bench("PPDD", policy=Restless())
    assert roll_out(bench) == undisturbed()
    assert sum(flip.failure is None for flip in bench.notes.flips) >= 10
    assert sum(turn.attempts - 1 for turn in bench.notes.turns) >= 10


def test_a_death_costs_no_trajectory() -> None:
    async def kill(bench: Bench) -> None:
        for name in ("e0", "e2"):
            await asyncio.sleep(1.0)
            bench.engine(name).die()

    bench = Bench("PPDD")
    assert roll_out(bench, kill) == undisturbed()
    assert len(bench.restarter.restarted) == 2


def test_weight_updates_cost_no_token_and_are_marked_on_each() -> None:
    async def update(bench: Bench) -> None:
        for version in (1, 2):
            await asyncio.sleep(1.0)
            await bench.control.update_weights(f"/weights/{version}", version)

    records = roll_out(Bench("PPDD", policy=Restless()), update)
    expected = undisturbed()
    assert {name: record.response_ids for name, record in records.items()} == {
        name: record.response_ids for name, record in expected.items()
    }
    spans = set()
    for record in records.values():
        versions = [v for v, mask in zip(record.versions, record.response_mask, strict=True) if mask]
        assert versions == sorted(versions)
        spans.add((versions[0], versions[-1]))
    assert any(first < last for first, last in spans)
