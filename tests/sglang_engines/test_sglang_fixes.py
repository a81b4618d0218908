"""What SGLang does wrong when roles flip: each defect is there without its fix, and gone with it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from sglang_bench import (
    LANE,
    LONG,
    MODEL,
    TEST_SECONDS,
    D,
    P,
    become,
    both,
    disaggregated,
    embedded,
    flags,
    launching,
    prompt,
    request,
    tokens,
)

from prorsa.engines.protocol import EngineBusy, EngineError, Role, SamplingParams
from prorsa.engines.sglang import SGLangEngine
from prorsa.engines.sglang_server.flags import EngineFlags

pytestmark = LANE

HANGS_SECONDS = 12.0
"""What takes so long on an idle engine does not come at all: each of these requests takes a second."""
FIXED = pytest.mark.parametrize(
    "fixed", [pytest.param(False, id="unfixed", marks=LONG), pytest.param(True, id="fixed")]
)


@asynccontextmanager
async def three(log_dir: Path, fixed: bool, of: EngineFlags | None = None) -> AsyncIterator[list[SGLangEngine]]:
    with pytest.MonkeyPatch.context() as patch:
        if not fixed:
            patch.setenv("PRORSA_SGLANG_FIXES", "")
        async with launching(log_dir, of) as launcher:
            roles = {"a": P, "b": D, "c": D}
            yield list(await asyncio.gather(*(launcher.start(*instance) for instance in roles.items())))


async def post(engine: SGLangEngine, path: str, body: dict[str, object]) -> None:
    async with aiohttp.ClientSession() as session, session.post(engine.url + path, json=body) as response:
        assert response.status == 200, await response.text()


@FIXED
def test_a_decode_engine_finds_a_peer_that_was_decode_in_between(fixed: bool, tmp_path: Path) -> None:
    """Two engines hide it: the one that flips forgets its peers, the third remembers them."""

    async def main() -> None:
        ids = prompt(60)
        async with three(tmp_path, fixed) as [first, second, third]:
            expected = await disaggregated(first, third, ids, 12)
            await become(first, D)
            await become(first, P)
            assert await disaggregated(first, second, ids, 12) == expected
            again = asyncio.create_task(disaggregated(first, third, ids, 12))
            await asyncio.wait([again], timeout=TEST_SECONDS if fixed else HANGS_SECONDS)
            assert again.done() is fixed
            if fixed:
                assert await again == expected
            again.cancel()
            with suppress(asyncio.CancelledError):
                await again

    asyncio.run(main())


@FIXED
def test_a_flip_does_not_lose_requests_that_a_pause_holds(fixed: bool, tmp_path: Path) -> None:
    async def main() -> None:
        ids, budget = prompt(50, 1), 400
        expected = await embedded(MODEL, tmp_path, ids, budget)
        async with three(tmp_path, fixed) as [first, second, _third]:
            asked = request(ids, budget, first)
            turn = asyncio.create_task(both(first, second, asked))
            while not (await second.load()).running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            await post(second, "/pause_generation", {"mode": "retract"})
            if fixed:
                with pytest.raises(EngineBusy, match="it holds 1 paused request"):
                    await second.switch_role(P)
            else:
                await second.switch_role(P)
            await post(second, "/continue_generation", {})
            await asyncio.wait([turn], timeout=TEST_SECONDS if fixed else HANGS_SECONDS)
            assert turn.done() is fixed
            if fixed:
                assert tokens((await turn)[1]) == expected
            turn.cancel()
            with suppress(asyncio.CancelledError):
                await turn

    asyncio.run(main())


@dataclass(frozen=True, slots=True)
class WithoutDecodeCache(EngineFlags):
    """Flags of somebody who starts engines without us."""

    def of_engine(self, role: Role, port: int, bootstrap_port: int) -> list[str]:
        ours = EngineFlags.of_engine(self, role, port, bootstrap_port)
        return [flag for flag in ours if flag != "--disaggregation-decode-enable-radix-cache"]


@FIXED
def test_a_prefill_engine_that_would_fail_as_decode_does_not_become_it(fixed: bool, tmp_path: Path) -> None:
    async def main() -> None:
        of = WithoutDecodeCache(**{name: getattr(flags(), name) for name in EngineFlags.__slots__})
        ids = prompt(60)
        async with three(tmp_path, fixed, of) as [first, second, third]:
            expected = await disaggregated(first, second, ids, 12)
            if fixed:
                with pytest.raises(EngineError, match="--disaggregation-decode-enable-radix-cache"):
                    await first.switch_role(D)
                assert await disaggregated(first, third, ids, 12) == expected
            else:
                await first.switch_role(D)
                await become(second, P)
                async with asyncio.timeout(TEST_SECONDS):
                    while await first.healthy():
                        turns = [disaggregated(second, first, (*ids, number), 12) for number in range(4)]
                        with suppress(EngineError, TimeoutError):
                            async with asyncio.timeout(5.0):
                                await asyncio.gather(*turns)
                        await asyncio.sleep(0.5)
                assert "leak" in (tmp_path / "a.log").read_text()

    asyncio.run(main())


@FIXED
def test_a_flip_leaves_the_shared_kv_to_the_others(fixed: bool, tmp_path: Path) -> None:
    async def main() -> None:
        store = tmp_path / "store"
        ids, budget = prompt(100, 2), 64
        async with three(tmp_path, fixed, flags(kv_store=str(store))) as [first, second, third]:
            output = await disaggregated(first, second, ids, budget)
            await until_quiet(store)
            assert (written := len(os.listdir(store))) >= 9, "ten whole blocks, the last token's may be missing"
            await become(second, P)
            assert len(os.listdir(store)) == (written if fixed else 0)
            # The engine that was decode has computed nothing of this context as prefill, and its own cache is gone.
            again = await both(second, third, request(ids + output + ids[:5], 8, second))
            assert (again[0][0].cached_tokens >= 144) is fixed

    asyncio.run(main())


def test_stored_kv_is_found_again_but_not_by_other_weights(tmp_path: Path) -> None:
    async def main() -> None:
        store = tmp_path / "store"
        ids = prompt(100, 3)
        async with three(tmp_path, True, flags(kv_store=str(store))) as engines:
            first, second, third = engines
            before = await disaggregated(first, second, ids, 12)
            await until_quiet(store)
            # The same version again: the engine's own cache is emptied, what is stored stays.
            await asyncio.gather(*(engine.update_weights(str(MODEL), 0) for engine in engines))
            prefilled, decoded = await both(first, third, request(ids, 12, first))
            assert prefilled[0].cached_tokens == 96
            assert tokens(decoded) == before
            await asyncio.gather(*(engine.update_weights(str(MODEL), 1) for engine in engines))
            prefilled, decoded = await both(first, third, request(ids, 12, first))
            assert prefilled[0].cached_tokens == 0
            assert tokens(decoded) == before

    asyncio.run(main())


@pytest.mark.sglang_long
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no overlap"])
@pytest.mark.parametrize("fixed", [True, False], ids=["fixed", "unfixed"])
def test_a_seed_counts_whatever_shares_the_batch(fixed: bool, overlap: bool, tmp_path: Path) -> None:
    async def main() -> None:
        ids, how = prompt(40, 4), SamplingParams(40, temperature=1.5, seed=7)
        of = flags() if overlap else flags(extra=("--disable-overlap-schedule",))
        async with three(tmp_path, fixed, of) as [first, second, _third]:
            others = [SamplingParams(30, temperature=1.0, top_k=3, seed=n) for n in range(4)]
            asked = [request(ids, 40, first, one) for one in (how, how, *others, how, how)]
            legs = await asyncio.gather(*(both(first, second, one) for one in asked))
            answers = {tokens(decoded) for number, (_, decoded) in enumerate(legs) if number not in range(2, 6)}
            assert len(answers) == (1 if fixed else 4)

    asyncio.run(main())


async def until_quiet(store: Path) -> None:
    """Until no more KV is being written there."""
    before, now = -1, 0
    while before != now or not now:
        await asyncio.sleep(0.7)
        before, now = now, len(os.listdir(store))
