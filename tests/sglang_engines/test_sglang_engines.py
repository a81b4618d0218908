"""The client against three real SGLang engines. The embedded engine, other code altogether, says which tokens are right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from sglang_bench import (
    LANE,
    MODEL,
    TEST_SECONDS,
    D,
    P,
    Served,
    become,
    both,
    disaggregated,
    embedded,
    idle,
    leg,
    prompt,
    request,
    tokens,
)

from prorsa.engines.protocol import EngineBusy, EngineError, FinishReason
from prorsa.engines.sglang import SGLangEngine

pytestmark = LANE


def test_a_turn_over_two_engines_has_the_right_tokens(served: Served, tmp_path: Path) -> None:
    async def main() -> None:
        ids, budget = prompt(90), 60
        expected = await embedded(MODEL, tmp_path, ids, budget)
        async with served.engines(P, D, D) as (first, second, third):
            for decode in (second, third):
                prefilled, decoded = await both(first, decode, request(ids, budget, first))
                assert tokens(decoded) == expected
                assert tokens(prefilled) == expected[:1]
                assert decoded[-1].finish is FinishReason.LENGTH
                assert all(len(chunk.token_ids) == len(chunk.logprobs) for chunk in decoded)
            # The second turn's prompt was resident on the prefill engine, to the last whole block.
            assert prefilled[0].cached_tokens == 80

    asyncio.run(main())


def test_an_aborted_turn_goes_on_elsewhere_with_the_same_tokens(served: Served, tmp_path: Path) -> None:
    async def main() -> None:
        ids, budget = prompt(50, 1), 400
        expected = await embedded(MODEL, tmp_path, ids, budget)
        async with served.engines(P, D, D) as (first, second, third):
            asked = request(ids, budget, first)
            legs = [asyncio.create_task(leg(engine, asked)) for engine in (first, second)]
            await until_running(second)
            await asyncio.gather(first.abort(asked.rid), second.abort(asked.rid))
            partial = tokens(await legs[1])
            await legs[0]
            assert (await legs[1])[-1].finish is FinishReason.ABORT
            assert 0 < len(partial) < budget
            assert partial == expected[: len(partial)]
            rest = await disaggregated(first, third, ids + partial, budget - len(partial))
            assert partial + rest == expected
            await asyncio.gather(*(idle(engine) for engine in (first, second, third)))
            assert [(await engine.load()).used_tokens for engine in (first, second, third)] == [0, 0, 0]

    asyncio.run(main())


async def until_running(engine: SGLangEngine) -> None:
    while not (await engine.load()).running:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)


def test_a_closed_stream_frees_both_engines(served: Served) -> None:
    async def main() -> None:
        async with served.engines(P, D, D) as (first, second, _):
            asked = request(prompt(50, 2), 1200, first)
            legs = [asyncio.create_task(leg(engine, asked)) for engine in (first, second)]
            await until_running(second)
            for task in legs:
                task.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
            async with asyncio.timeout(TEST_SECONDS):
                await asyncio.gather(idle(first), idle(second))

    asyncio.run(main())


def test_load_and_info_tell_what_the_engine_does(served: Served) -> None:
    async def main() -> None:
        async with served.engines(P, D, D) as (first, second, third):
            assert [(await engine.info()).role for engine in (first, second, third)] == [P, D, D]
            assert {(await engine.info()).model_path for engine in (first, second, third)} == {str(MODEL)}
            assert all([await engine.healthy() for engine in (first, second, third)])
            asked = request(prompt(64, 3), 300, first)
            legs = [asyncio.create_task(leg(engine, asked)) for engine in (first, second)]
            await until_running(second)
            busy, free = await second.load(), await third.load()
            await asyncio.gather(first.abort(), second.abort())
            await asyncio.gather(*legs)
            assert (busy.running, busy.waiting) == (1, 0)
            assert 64 < busy.used_tokens <= 64 + 300 + 16
            assert busy.max_tokens == free.max_tokens == 16384
            assert free.idle
            assert free.used_tokens == 0

    asyncio.run(main())


def test_every_engine_takes_every_role(served: Served, tmp_path: Path) -> None:
    """Every pair of three, in turn, is prefill and decode; each engine becomes prefill again after it was decode."""

    async def main() -> None:
        ids, budget = prompt(70, 4), 24
        expected = await embedded(MODEL, tmp_path, ids, budget)
        async with served.engines(P, D, D) as engines:
            for _ in range(2):
                for prefill in engines:
                    await become(prefill, P)
                    others = [engine for engine in engines if engine is not prefill]
                    for decode in others:
                        await become(decode, D)
                        assert await disaggregated(prefill, decode, ids, budget) == expected

    asyncio.run(main())


def test_a_busy_engine_does_not_flip_and_a_needless_flip_is_an_error(served: Served) -> None:
    async def main() -> None:
        async with served.engines(P, D, D) as (first, second, third):
            legs = [
                asyncio.create_task(leg(e, asked))
                for asked in [request(prompt(50, 5), 600, first)]
                for e in (first, second)
            ]
            await until_running(second)
            with pytest.raises(EngineBusy, match="not idle"):
                await second.switch_role(P)
            with pytest.raises(EngineError, match="had that role already"):
                await third.switch_role(D)
            await asyncio.gather(first.abort(), second.abort())
            await asyncio.gather(*legs)
            assert [(await engine.info()).role for engine in (first, second, third)] == [P, D, D]

    asyncio.run(main())


def test_new_weights_from_disk_take_effect_at_once(served: Served, tmp_path: Path) -> None:
    async def main() -> None:
        ids, budget, other = prompt(80, 6), 40, other_weights(tmp_path / "other")
        before = await embedded(MODEL, tmp_path, ids, budget)
        after = await embedded(other, tmp_path, ids, budget)
        assert before != after
        async with served.engines(P, D, D) as engines:
            first, second, _ = engines
            version = (await first.info()).weights_version
            assert await disaggregated(first, second, ids, budget) == before
            asked = request(ids, 800, first)
            legs = [asyncio.create_task(leg(engine, asked)) for engine in (first, second)]
            await until_running(second)
            await asyncio.gather(*(engine.update_weights(str(other), version + 1) for engine in engines))
            aborted = (await legs[1])[-1]
            await legs[0]
            assert aborted.finish is FinishReason.ABORT
            assert {(await engine.info()).weights_version for engine in engines} == {version + 1}
            prefilled, decoded = await both(first, second, request(ids, budget, first))
            assert tokens(decoded) == after
            assert {chunk.weights_version for chunk in decoded} == {version + 1}
            assert prefilled[0].cached_tokens == 0
            await asyncio.gather(*(engine.update_weights(str(MODEL), version + 2) for engine in engines))
            assert await disaggregated(first, second, ids, budget) == before

    asyncio.run(main())


def test_a_checkpoint_that_is_none_is_refused_and_the_engine_serves_on(served: Served, tmp_path: Path) -> None:
    async def main() -> None:
        ids, budget = prompt(80, 7), 20
        expected = await embedded(MODEL, tmp_path, ids, budget)
        async with served.engines(P, D, D) as (first, second, _):
            version = (await second.info()).weights_version
            with pytest.raises(EngineError, match="no-such"):
                await second.update_weights(str(tmp_path / "no-such"), version + 1)
            assert (await second.info()).weights_version == version
            assert await disaggregated(first, second, ids, budget) == expected

    asyncio.run(main())


def other_weights(path: Path) -> Path:
    """The same model with noise on its weights."""
    path.mkdir()
    for file in MODEL.iterdir():
        if file.suffix != ".safetensors":
            (path / file.name).write_bytes(file.read_bytes())
    rng = np.random.default_rng(0)
    weights = load_file(MODEL / "model.safetensors")
    noisy = {name: (array + rng.normal(0.0, 0.05, array.shape)).astype(array.dtype) for name, array in weights.items()}
    save_file(noisy, path / "model.safetensors", metadata={"format": "pt"})
    return path
