"""KV that three engines share in a Mooncake store: found after a resend, not after an update of the weights."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from sglang_bench import (
    LANE,
    LONG,
    MODEL,
    PYTHON,
    START_SECONDS,
    TEST_SECONDS,
    D,
    P,
    become,
    both,
    disaggregated,
    embedded,
    flags,
    leg,
    processes_of,
    prompt,
    request,
    tokens,
)

from prorsa.engines.protocol import FinishReason
from prorsa.engines.sglang import SGLangEngine
from prorsa.engines.sglang_server.launcher import SGLangLauncher

pytestmark = LANE


@asynccontextmanager
async def three(directory: Path) -> AsyncIterator[tuple[SGLangLauncher, list[SGLangEngine]]]:
    launcher = SGLangLauncher(str(PYTHON), flags(), start_seconds=START_SECONDS, log_dir=directory, mooncake_gb=0.25)
    try:
        async with asyncio.timeout(START_SECONDS + TEST_SECONDS):
            roles = {"a": P, "b": D, "c": D}
            engines = await asyncio.gather(*(launcher.start(*instance) for instance in roles.items()))
            await asyncio.gather(*(engine.info() for engine in engines))
            yield launcher, list(engines)
    finally:
        await launcher.close()


async def stored(launcher: SGLangLauncher) -> int:
    """How many objects the store has, by its master's metrics."""
    command = Path(f"/proc/{launcher.pid('mooncake_master')}/cmdline").read_text()  # noqa: ASYNC240
    port = re.search(r"--metrics_port=(\d+)", command)
    assert port
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port[1]}/metrics") as response:
        found = re.search(r"^master_key_count (\d+)$", await response.text(), re.MULTILINE)
    assert found
    return int(found[1])


def test_a_resend_elsewhere_finds_kv_in_the_store_and_new_weights_do_not(tmp_path: Path) -> None:
    async def main() -> None:
        ids, budget = prompt(100), 400
        expected = await embedded(MODEL, tmp_path, ids, budget)
        async with three(tmp_path) as (launcher, (first, second, third)):
            at_start = await stored(launcher)
            asked = request(ids, budget, first)
            legs = [asyncio.create_task(leg(engine, asked)) for engine in (first, second)]
            while (await second.load()).used_tokens < len(ids) + 64:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await asyncio.gather(first.abort(asked.rid), second.abort(asked.rid))
            _, decoded = await asyncio.gather(*legs)
            assert decoded[-1].finish is FinishReason.ABORT
            partial = tokens(decoded)
            known = (len(ids) + len(partial) - 1) // 16 * 16
            async with asyncio.timeout(TEST_SECONDS):
                # K and V of each block.
                while await stored(launcher) < at_start + 2 * known // 16:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

            # Its own cache goes with the flip, and as prefill it has computed nothing.
            await become(second, P)
            rest = budget - len(partial)
            prefilled, resumed = await both(second, third, request(ids + partial, rest, second))
            assert partial + tokens(resumed) == expected
            assert prefilled[0].cached_tokens >= known > 96

            await asyncio.gather(*(engine.update_weights(str(MODEL), 1) for engine in (first, second, third)))
            prefilled, resumed = await both(second, third, request(ids + partial, rest, second))
            assert partial + tokens(resumed) == expected
            assert prefilled[0].cached_tokens == 0

    asyncio.run(main())


@LONG
def test_a_store_that_dies_or_hangs_is_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        numbers = itertools.count()
        async with three(tmp_path) as (launcher, engines):

            async def shared() -> bool:
                """Whether another prompt's KV is found in the store."""
                ids = prompt(100, next(numbers))
                await disaggregated(*engines[:2], ids, 4)
                # Empties what the engines have themselves.
                await asyncio.gather(*(engine.update_weights(str(MODEL), 0) for engine in engines))
                prefilled, _ = await both(engines[0], engines[2], request(ids, 4, engines[0]))
                return prefilled[0].cached_tokens == 96

            async def until_shared() -> None:
                async with asyncio.timeout(TEST_SECONDS):
                    while not await shared():  # noqa: ASYNC110
                        await asyncio.sleep(0.5)

            await until_shared()
            programs = ("mooncake_master", "mooncake_client")
            former = [launcher.pid(program) for program in programs]
            for pid in former:
                os.kill(pid, signal.SIGKILL)
            await until_shared()
            second = [launcher.pid(program) for program in programs]
            for pid in second:
                os.kill(pid, signal.SIGSTOP)
            await until_shared()
            current = [launcher.pid(program) for program in programs]
            assert not {*current} & {*second}
        assert [processes_of(pid) for pid in former + second + current] == [[]] * 6

    asyncio.run(main())
