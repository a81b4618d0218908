"""The check that no trajectory noticed a flip: every turn generated again by one engine, without router, flips or resends.

A token depends on the context, the seed and its position alone, so the tokens must be equal, greedy or sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from prorsa.engines.protocol import Engine, GenerateRequest, SamplingParams
from prorsa.rollout.records import TrajectoryRecord


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    name: str
    """`TRAJECTORY.TURN`"""
    context: tuple[int, ...]
    output: tuple[int, ...]
    versions: frozenset[int]
    """The weights versions that generated it."""
    seed: int


@dataclass(frozen=True, slots=True)
class Difference:
    turn: str
    index: int
    """The first output token that differs."""
    recorded: int | None
    """None where the recorded output is the shorter one; so with `generated`."""
    generated: int | None


def recorded_turns(record: TrajectoryRecord) -> Iterator[RecordedTurn]:
    """The model turns of a trajectory: the runs of 1 in its response mask."""
    ids, mask = record.response_ids, record.response_mask
    start = turn = 0
    while start < len(ids):
        end = start
        while end < len(ids) and mask[end] == mask[start]:
            end += 1
        if mask[start]:
            context = record.prompt_ids + ids[:start]
            versions = frozenset(record.versions[start:end])
            yield RecordedTurn(f"{record.trajectory}.{turn}", context, ids[start:end], versions, record.seed)
            turn += 1
        start = end


async def differences(
    engine: Engine, turns: Sequence[RecordedTurn], sampling: SamplingParams, max_context: int, concurrency: int
) -> list[Difference]:
    """Generate every turn again on a mixed `engine`; `sampling` as in the run, its seed apart."""
    slots = asyncio.Semaphore(concurrency)

    async def check(turn: RecordedTurn) -> Difference | None:
        budget = min(sampling.max_new_tokens, max_context - len(turn.context))
        again = replace(sampling, max_new_tokens=budget, seed=turn.seed)
        async with slots:
            output = await _generate(engine, GenerateRequest(turn.name, turn.context, again))
        return first_difference(turn, output)

    found = await asyncio.gather(*(check(turn) for turn in turns))
    return [difference for difference in found if difference is not None]


async def _generate(engine: Engine, request: GenerateRequest) -> tuple[int, ...]:
    tokens: list[int] = []
    async for chunk in engine.generate(request):
        tokens += chunk.token_ids
    return tuple(tokens)


def first_difference(turn: RecordedTurn, output: tuple[int, ...]) -> Difference | None:
    recorded = turn.output
    for index in range(max(len(recorded), len(output))):
        ours = recorded[index] if index < len(recorded) else None
        theirs = output[index] if index < len(output) else None
        if ours != theirs:
            return Difference(turn.name, index, ours, theirs)
    return None
