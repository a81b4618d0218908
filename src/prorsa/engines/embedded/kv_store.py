"""The KV store outside the instances: full KV blocks by block hash, kept in the memory of a process of its own.

    python -m prorsa.engines.embedded.kv_store --capacity-tokens 65536 --block-tokens 16

A block hash already covers the weights version and every token before the block, so a block that is found is right. The
store is bounded and forgets the least recently used block first. Engines treat it as a helper: when it is slow or gone
they go on without it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import struct
from collections import OrderedDict, deque
from collections.abc import Sequence
from enum import IntEnum

from prorsa.engines.embedded.frames import FrameError, FrameProtocol
from prorsa.engines.embedded.process import announce, watch_for_stop

HASH_BYTES = 16
VERSION = struct.Struct("<q")
FETCH_SECONDS = 1.0
"""How long a prefill waits for stored blocks before it computes them."""
FLUSH_SECONDS = 2.0
RECONNECT_PAUSE, MAX_RECONNECT_PAUSE = 0.1, 5.0
"""Seconds until a store that was not found is looked for again: the first pause, which doubles, and the last."""
BACKLOG_BYTES = 64 << 20
"""Writes beyond this much unsent data are dropped: losing reuse is better than holding up decode."""

log = logging.getLogger(__name__)


class Frame(IntEnum):
    PUT = 1
    """Version, hash, block. No answer."""
    FETCH = 2
    """Hashes, in chain order. Answered by FETCHED."""
    FETCHED = 3
    """The blocks of the longest stored run from the first hash on."""
    FLUSH = 4
    """Answered by FLUSHED when everything sent before has been stored."""
    FLUSHED = 5
    VERSION = 6
    """These weights are in use now; blocks of older ones can go."""


class Blocks:
    """Bounded map from block hash to block, least recently used out first. Not tied to any connection."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, version: int, block_hash: bytes, block: bytes) -> None:
        self._blocks[block_hash] = (version, block)
        self._blocks.move_to_end(block_hash)
        if len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def longest_run(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The blocks of the leading hashes that are all here."""
        run = []
        for block_hash in hashes:
            if block_hash not in self._blocks:
                break
            run.append(self._blocks[block_hash][1])
        # The start of a chain is used last, so that a chain is forgotten from its end and what is left stays usable.
        for block_hash in reversed(hashes[: len(run)]):
            self._blocks.move_to_end(block_hash)
        return run

    def drop_before(self, version: int) -> None:
        old = [block_hash for block_hash, (made_by, _) in self._blocks.items() if made_by < version]
        for block_hash in old:
            del self._blocks[block_hash]


class StoreConnection(FrameProtocol):
    """The store's end of one engine's connection."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__()
        self._blocks = blocks

    def frame_received(self, kind: int, payload: memoryview) -> None:
        if kind == Frame.PUT and len(payload) > VERSION.size + HASH_BYTES:
            (version,) = VERSION.unpack_from(payload)
            block_hash, block = _cut(payload[VERSION.size :], HASH_BYTES)
            self._blocks.put(version, block_hash, block)
        elif kind == Frame.FETCH and len(payload) % HASH_BYTES == 0:
            self.send(Frame.FETCHED, *self._blocks.longest_run(_split(payload, HASH_BYTES)))
        elif kind == Frame.FLUSH:
            self.send(Frame.FLUSHED)
        elif kind == Frame.VERSION and len(payload) == VERSION.size:
            self._blocks.drop_before(VERSION.unpack_from(payload)[0])
        else:
            raise FrameError(f"the KV store does not know frame {kind} with {len(payload)} bytes")

    def connection_ended(self, reason: str) -> None:
        log.debug("a connection ended: %s", reason)


class StoreClient(FrameProtocol):
    """An engine's end. Answers come in the order of the questions.

    A store that is gone or leaves a question unanswered is done without; `keep_connected` finds the next one.
    """

    def __init__(self, block_nbytes: int) -> None:
        super().__init__()
        self._block_nbytes = block_nbytes
        self._answers: deque[asyncio.Future[list[bytes] | None]] = deque()
        self._connected = False
        self._lost = asyncio.Event()
        self._lost.set()
        self.stored_blocks = 0
        self.dropped_blocks = 0
        """Writes that the store was too slow for."""
        self.fetched_blocks = 0

    @classmethod
    async def connected_to(cls, host: str, port: int, block_nbytes: int) -> StoreClient:
        """Raises `OSError`, a `TimeoutError` where the store does not answer."""
        client = cls(block_nbytes)
        await client.connect(host, port)
        return client

    async def connect(self, host: str, port: int) -> None:
        """Connect, where it is not connected. Raises `OSError`, a `TimeoutError` where the store does not answer: the system
        takes connections for a process that hangs."""
        async with asyncio.timeout(FLUSH_SECONDS):
            await asyncio.get_running_loop().create_connection(lambda: self, host, port)
        self._lost.clear()
        if await self._exchange(Frame.FLUSH, (), FLUSH_SECONDS) is None:
            raise TimeoutError("the KV store takes connections but does not answer")
        self._connected = True

    async def keep_connected(self, host: str, port: int) -> None:
        """For ever: connect again, with growing pauses, whenever the connection is lost."""
        pause = RECONNECT_PAUSE
        while True:
            await self._lost.wait()
            try:
                await self.connect(host, port)
                log.info("connected to the KV store at %s:%d", host, port)
                pause = RECONNECT_PAUSE
            except OSError as error:
                log.debug("no KV store at %s:%d: %r", host, port, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RECONNECT_PAUSE)

    @property
    def connected(self) -> bool:
        return self._connected

    def put(self, version: int, block_hash: bytes, block: bytes, *, urgent: bool = False) -> bool:
        """Write one block in the background. False when it was dropped because the store is too slow; an urgent one is
        never dropped."""
        if self.unsent > BACKLOG_BYTES and not urgent:
            self.dropped_blocks += 1
            return False
        self.send(Frame.PUT, VERSION.pack(version), block_hash, block)
        self.stored_blocks += 1
        return True

    async def fetch(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The blocks of the longest stored run from the first hash on; empty when the store is slow or gone."""
        blocks = await self._ask(Frame.FETCH, hashes, FETCH_SECONDS)
        self.fetched_blocks += len(blocks)
        return blocks

    async def flush(self) -> None:
        """Wait (bounded) until everything put so far is stored."""
        await self._ask(Frame.FLUSH, (), FLUSH_SECONDS)

    def drop_before(self, version: int) -> None:
        self.send(Frame.VERSION, VERSION.pack(version))

    async def _ask(self, kind: Frame, parts: Sequence[bytes], seconds: float) -> list[bytes]:
        return (await self._exchange(kind, parts, seconds) or []) if self._connected else []

    async def _exchange(self, kind: Frame, parts: Sequence[bytes], seconds: float) -> list[bytes] | None:
        """None where the connection is lost, or the store did not answer, which ends the connection."""
        answer: asyncio.Future[list[bytes] | None] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self.send(kind, *parts)
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            self._fail(f"it did not answer {kind.name} within {seconds:g} s")
            await self._lost.wait()
            return None

    def frame_received(self, kind: int, payload: memoryview) -> None:
        if kind not in (Frame.FETCHED, Frame.FLUSHED) or not self._answers or len(payload) % self._block_nbytes:
            raise FrameError(f"the KV store sent frame {kind} with {len(payload)} bytes")
        answer = self._answers.popleft()
        if not answer.done():
            answer.set_result(_split(payload, self._block_nbytes))

    def close(self) -> None:
        self._connected = False
        super().close()

    def connection_ended(self, reason: str) -> None:
        if self._connected:
            log.warning("the KV store is gone (%s); going on without it", reason)
        self._connected = False
        for answer in self._answers:
            if not answer.done():
                answer.set_result(None)
        self._answers.clear()
        self._lost.set()


def _cut(payload: memoryview, at: int) -> tuple[bytes, bytes]:
    return bytes(payload[:at]), bytes(payload[at:])


def _split(payload: memoryview, size: int) -> list[bytes]:
    return [bytes(payload[start : start + size]) for start in range(0, len(payload), size)]


async def serve(host: str, port: int, max_blocks: int) -> None:
    loop = asyncio.get_running_loop()
    stop = watch_for_stop()
    blocks = Blocks(max_blocks)
    server = await loop.create_server(lambda: StoreConnection(blocks), host, port)
    announce(port=server.sockets[0].getsockname()[1])
    await stop.wait()
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="KV blocks of all engines, by hash.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--capacity-tokens", type=int, required=True)
    parser.add_argument("--block-tokens", type=int, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    max_blocks = arguments.capacity_tokens // arguments.block_tokens
    asyncio.run(serve(arguments.host, arguments.port, max_blocks))


if __name__ == "__main__":
    main()
