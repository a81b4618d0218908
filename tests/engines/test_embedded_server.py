"""The server in this process, where a test can see its parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from engine_helpers import BLOCK_TOKENS, greedy, leg, prompt, request

from prorsa.engines.embedded import kv_store
from prorsa.engines.embedded.core import EngineCore, block_hashes
from prorsa.engines.embedded.kv_store import Blocks, StoreClient, StoreConnection
from prorsa.engines.embedded.server import EngineServer
from prorsa.engines.protocol import ALL_ROLES, EngineError, FinishReason, Role
from prorsa.engines.sglang import SGLangEngine


@asynccontextmanager
async def serving(checkpoint: Path, blocks: Blocks) -> AsyncIterator[SGLangEngine]:
    """A mixed engine that writes through to `blocks`."""
    loop = asyncio.get_running_loop()
    store = await loop.create_server(lambda: StoreConnection(blocks), "127.0.0.1", 0)
    core = EngineCore(str(checkpoint), Role.MIXED, kv_tokens=2048, block_tokens=BLOCK_TOKENS)
    client = await StoreClient.connected_to("127.0.0.1", store.sockets[0].getsockname()[1], core.block_nbytes)
    server = EngineServer(core, 16, client)
    runner = web.AppRunner(server.application(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    stepping = asyncio.create_task(server.run())
    engine = SGLangEngine("e0", f"http://127.0.0.1:{runner.addresses[0][1]}", "127.0.0.1", 0, roles=ALL_ROLES)
    try:
        async with asyncio.timeout(20):
            yield engine
    finally:
        await engine.close()
        server.close()
        await runner.cleanup()
        stepping.cancel()
        store.close()


@pytest.mark.parametrize("overloaded", [False, True])
def test_an_aborted_request_is_in_the_store_before_its_end_is_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, overloaded: bool
) -> None:
    """Also when the store was too slow for every single write until then."""
    if overloaded:
        monkeypatch.setattr(kv_store, "BACKLOG_BYTES", -1)

    async def main() -> None:
        blocks = Blocks(1000)
        async with serving(checkpoint, blocks) as engine:
            asked = request(prompt(100), greedy(1500))
            chunks = []
            async for chunk in engine.generate(asked):
                chunks.append(chunk)
                if len(chunks) == 30:
                    if overloaded:
                        assert len(blocks) == 0
                    await engine.abort(asked.rid)
            # Nothing is awaited between the end of the stream and this look.
            told = leg(chunks)
            assert told.finish is FinishReason.ABORT
            hashes = block_hashes((asked.input_ids + tuple(told.tokens))[:-1], 0, BLOCK_TOKENS)
            assert len(hashes) >= 8
            assert len(blocks.longest_run(hashes)) == len(hashes)

    asyncio.run(main())


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_engine_that_was_of_another_role_is_mixed_again_with_its_cache(checkpoint: Path, role: Role) -> None:
    async def main() -> None:
        async with serving(checkpoint, Blocks(1000)) as engine:
            before = leg([chunk async for chunk in engine.generate(request(prompt(100), greedy(20)))])
            await engine.switch_role(role)
            with pytest.raises(EngineError, match=f"this is a {role} engine"):
                async for _ in engine.generate(request(prompt(100), greedy(20))):
                    pass
            await engine.switch_role(Role.MIXED)
            after = leg([chunk async for chunk in engine.generate(request(prompt(100), greedy(20)))])
            assert after.tokens == before.tokens
            assert (before.cached_tokens, after.cached_tokens) == (0, 96)

    asyncio.run(main())


def test_a_block_is_written_once(checkpoint: Path) -> None:
    async def main() -> None:
        async with serving(checkpoint, Blocks(1000)) as engine:
            for _ in range(3):
                async for _ in engine.generate(request(prompt(100), greedy(29))):
                    pass
            # 128 of the 129 tokens have KV: 8 blocks.
            async with engine._http().get(f"{engine.url}/v1/loads") as response:
                assert (await response.json())["loads"][0]["kv_store"]["stored_blocks"] == 8

    asyncio.run(main())
