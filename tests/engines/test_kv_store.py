from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.engines.embedded import kv_store
from prorsa.engines.embedded.kv_store import Blocks, StoreClient, StoreConnection

SIZE = 64


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int) -> bytes:
    return bytes([number % 256]) * SIZE


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 6))
def test_the_least_recently_used_block_goes_first(numbers: list[int], capacity: int) -> None:
    blocks = Blocks(capacity)
    for number in numbers:
        blocks.put(0, key(number), block(number))
    recent = list(dict.fromkeys(reversed(numbers)))[:capacity]
    assert len(blocks) == len(recent)
    for number in range(10):
        assert blocks.longest_run([key(number)]) == ([block(number)] if number in recent else [])


def test_reading_keeps_a_block_and_the_start_of_a_chain_longest() -> None:
    blocks = Blocks(3)
    for number in (1, 2, 3):
        blocks.put(0, key(number), block(number))
    assert blocks.longest_run([key(1), key(2), key(9), key(3)]) == [block(1), block(2)]
    blocks.put(0, key(4), block(4))  # block 3 was used before 1 and 2
    assert blocks.longest_run([key(3)]) == []
    blocks.put(0, key(5), block(5))  # 2 is the end of the chain that was read
    assert blocks.longest_run([key(1), key(2)]) == [block(1)]


def test_old_versions_can_be_dropped() -> None:
    blocks = Blocks(10)
    for version in (1, 2, 3):
        blocks.put(version, key(version), block(version))
    blocks.drop_before(3)
    assert len(blocks) == 1
    assert blocks.longest_run([key(3)]) == [block(3)]


def with_store(test: Callable[[StoreClient, int], Awaitable[None]], capacity: int = 100) -> None:
    async def main() -> None:
        blocks = Blocks(capacity)
        server = await asyncio.get_running_loop().create_server(lambda: StoreConnection(blocks), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = await StoreClient.connected_to("127.0.0.1", port, SIZE)
        async with asyncio.timeout(20):
            await test(client, port)
        client.close()
        server.close()

    asyncio.run(main())


def test_what_one_engine_stores_another_fetches() -> None:
    async def test(client: StoreClient, port: int) -> None:
        for number in range(5):
            assert client.put(7, key(number), block(number))
        await client.flush()
        other = await StoreClient.connected_to("127.0.0.1", port, SIZE)
        assert await other.fetch([key(n) for n in (0, 1, 2, 99, 3)]) == [block(0), block(1), block(2)]
        assert await other.fetch([key(99)]) == []
        assert (client.stored_blocks, other.fetched_blocks) == (5, 3)
        # Questions that are asked together get their own answers.
        assert await asyncio.gather(*(other.fetch([key(n)]) for n in range(5))) == [[block(n)] for n in range(5)]
        client.drop_before(8)
        await client.flush()
        assert await other.fetch([key(0)]) == []
        other.close()

    with_store(test)


async def met(server: socket.socket) -> tuple[StoreClient, socket.socket]:
    """A client of a store that answers it once and then neither reads nor writes."""
    server.setblocking(False)
    loop = asyncio.get_running_loop()
    client = asyncio.create_task(StoreClient.connected_to("127.0.0.1", server.getsockname()[1], SIZE))
    peer, _ = await loop.sock_accept(server)
    await loop.sock_recv(peer, 8)
    await loop.sock_sendall(peer, struct.pack("<B3xI", 5, 0))
    return await client, peer


def test_a_store_that_cannot_keep_up_loses_writes_and_holds_nobody_up() -> None:
    """A server that never reads."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client, peer = await met(server)
            big = bytes(1 << 20)
            stored = [client.put(0, key(number), big) for number in range(80)]
            assert stored[0]
            assert not stored[-1]
            assert client.dropped_blocks == stored.count(False) > 0
            assert client.unsent < kv_store.BACKLOG_BYTES + 2 * len(big)
            client.close()
            peer.close()

    asyncio.run(main())


def test_a_store_that_does_not_answer_is_given_up_after_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "FETCH_SECONDS", 0.05)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            client, peer = await met(server)
            assert await client.fetch([key(1)]) == []
            # It is not waited for a second time.
            assert not client.connected
            assert await client.fetch([key(1)]) == []
            client.close()
            peer.close()

    asyncio.run(main())


def test_a_store_that_takes_connections_and_does_not_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "FLUSH_SECONDS", 0.05)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
            await StoreClient.connected_to("127.0.0.1", server.getsockname()[1], SIZE)

    asyncio.run(main())


def test_a_client_finds_the_store_that_comes_after_one_that_is_gone() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        connections: list[StoreConnection] = []

        def connection() -> StoreConnection:
            connections.append(StoreConnection(Blocks(100)))
            return connections[-1]

        server = await loop.create_server(connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = await StoreClient.connected_to("127.0.0.1", port, SIZE)
        keeping = asyncio.create_task(client.keep_connected("127.0.0.1", port))
        server.close()
        connections[0].close()
        async with asyncio.timeout(20):
            while client.connected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert await client.fetch([key(1)]) == []
            server = await loop.create_server(connection, "127.0.0.1", port)
            while not client.connected:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            client.put(0, key(1), block(1))
            await client.flush()
            assert await client.fetch([key(1)]) == [block(1)]
        keeping.cancel()
        client.close()
        server.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<B3xI", 1, 3) + b"abc",
        struct.pack("<B3xI", 2, 17) + bytes(17),
        b"\xff" * 200,
    ],
    ids=["http", "short put", "half a hash", "huge length"],
)
def test_a_foreign_client_is_thrown_out(garbage: bytes) -> None:
    async def test(client: StoreClient, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        assert await reader.read() == b""
        writer.close()
        assert client.put(0, key(1), block(1))
        assert await client.fetch([key(1)]) == [block(1)]

    with_store(test)
