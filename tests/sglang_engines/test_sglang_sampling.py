"""Draws of real SGLang engines at temperatures above zero. The embedded engine says which are right."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from sglang_bench import (
    LANE,
    MODEL,
    D,
    P,
    Served,
    both,
    controlled,
    greedy,
    leg,
    prompt,
    reference,
    request,
    tokens,
)

from prorsa.cluster.turns import TurnRequest
from prorsa.engines.protocol import SamplingParams
from prorsa.engines.sglang import SGLangEngine
from prorsa.lifecycle.events import Done, RewardStarted, Sampled

pytestmark = LANE

BUDGET = 48
Turn = tuple[tuple[int, ...], SamplingParams]


def seeded(seed: int | None, **others: float) -> SamplingParams:
    return SamplingParams(BUDGET, seed=seed, **{"temperature": 1.0, **others})  # type: ignore[arg-type]


async def expected_of(log_dir: Path, turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    async with reference(MODEL, log_dir) as engine:
        return [tokens(await leg(engine, request(ids, BUDGET, None, how))) for ids, how in turns]


async def answers(prefill: SGLangEngine, decode: SGLangEngine, turns: Sequence[Turn]) -> list[tuple[int, ...]]:
    """All at once, so that they share batches."""
    asked = (both(prefill, decode, request(ids, BUDGET, prefill, how)) for ids, how in turns)
    return [tokens(decoded) for _, decoded in await asyncio.gather(*asked)]


def test_a_seed_says_the_answer_and_another_seed_says_another(served: Served, tmp_path: Path) -> None:
    async def main() -> None:
        ids = prompt(40, 5)
        seeds = [7] * 8 + [8, -7, 2**63 - 1, -(2**63)]
        expected = await expected_of(tmp_path, [(ids, seeded(seed, temperature=1.5)) for seed in seeds])
        async with served.engines(P, D, D) as (first, second, _):
            got = await answers(first, second, [(ids, seeded(seed, temperature=1.5)) for seed in seeds])
            assert got == expected
            assert len(set(got)) == 5
            assert len(set(await answers(first, second, [(ids, seeded(None))] * 8))) == 8, "none: each draws anew"

    asyncio.run(main())


def test_the_other_requests_of_a_batch_change_no_draw(served: Served, tmp_path: Path) -> None:
    """With a top-k, a top-p or none, greedy, and among requests without a seed."""

    async def main() -> None:
        kinds = [seeded(3), seeded(4, top_k=5), seeded(5, top_p=0.8), seeded(6, top_k=40, top_p=0.9), greedy(BUDGET)]
        turns = [(prompt(30 + number, number), how) for number, how in enumerate(kinds * 2)]
        expected = await expected_of(tmp_path, turns)
        strangers = [(prompt(20, number), seeded(None, temperature=0.5 + number / 4)) for number in range(4)]
        async with served.engines(P, D, D) as (first, second, third):
            for decode, others in ((second, []), (third, strangers), (second, turns[::2])):
                assert (await answers(first, decode, [*turns, *others]))[: len(turns)] == expected
            alone = [(await answers(first, second, [turn]))[0] for turn in turns[:5]]
            assert alone == expected[:5]

    asyncio.run(main())


async def posted(engine: SGLangEngine, body: dict[str, Any]) -> tuple[int, ...]:
    async with aiohttp.ClientSession() as session, session.post(f"{engine.url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        return tuple((await response.json())["output_ids"])


def test_a_min_p_beside_seeds_is_served(served: Served, tmp_path: Path) -> None:
    """With 1 it keeps the likeliest token alone, so that the answer is the greedy one."""

    async def main() -> None:
        turns = [(prompt(30 + n, n), seeded(n)) for n in range(3)]
        ids = prompt(35, 9)
        *expected, best = await expected_of(tmp_path, [*turns, (ids, greedy(BUDGET))])
        async with served.engines(P, D, D) as (first, second, _):
            asked = request(ids, BUDGET, first)
            assert asked.bootstrap is not None
            body = {
                "rid": asked.rid,
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": BUDGET, "ignore_eos": True, "min_p": 1.0, "sampling_seed": 5},
                "bootstrap_host": asked.bootstrap.host,
                "bootstrap_port": asked.bootstrap.port,
                "bootstrap_room": asked.bootstrap.room,
            }
            got, _, with_min_p = await asyncio.gather(
                answers(first, second, turns), posted(first, body), posted(second, body)
            )
            assert got == expected
            assert with_min_p == best

    asyncio.run(main())


def test_turns_that_flips_break_off_draw_what_undisturbed_ones_do(served: Served, tmp_path: Path) -> None:
    async def main() -> None:
        budget = 200
        turns = [
            (prompt(30 + 3 * n, n), replace(seeded(100 + n, temperature=1.3), max_new_tokens=budget)) for n in range(12)
        ]
        expected = await expected_of(tmp_path, turns)
        async with served.engines(P, D, D) as engines, controlled(engines) as control:
            now, names = asyncio.get_running_loop().time, itertools.count()

            async def turn(ids: tuple[int, ...], how: SamplingParams) -> tuple[int, ...]:
                name = f"draws{next(names)}"
                await control.record(Sampled(now(), name, group=name, task="t"))
                result = await control.generate(TurnRequest(name, 0, ids, how))
                await control.record(RewardStarted(now(), name, len(ids) + budget))
                await control.record(Done(now(), name, 0.0, admitted=True))
                return tuple(result.token_ids)

            running = [asyncio.create_task(turn(*one)) for one in turns]
            cancelled = 0
            while not all(task.done() for task in running):
                await asyncio.sleep(0.3)
                cancelled += await control.router.cancel_all("test")
            assert [task.result() for task in running] == expected
            assert cancelled > 0

    asyncio.run(main())
