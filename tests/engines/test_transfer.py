"""KV transfer between two ends in one process, with made-up blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from prorsa.engines.embedded.frames import FrameError
from prorsa.engines.embedded.transfer import FirstToken, Handover, Prompt, Pull, Rooms
from prorsa.engines.protocol import Bootstrap

PROMPT = Prompt(weights_version=3, block_nbytes=8, tokens=70)
N_BLOCKS = 5
FIRST = FirstToken(token=42, logprob=-0.5, cached_tokens=16)


def block(index: int) -> bytes:
    return bytes([index]) * PROMPT.block_nbytes


class PrefillLeg:
    def __init__(self, rooms: Rooms, room: int, prompt: Prompt = PROMPT) -> None:
        self.pulled, self.ended = asyncio.Event(), asyncio.Event()
        self.outcome = ""
        self.handover = Handover(
            prompt=prompt,
            n_blocks=N_BLOCKS,
            export_block=lambda index: memoryview(block(index)),
            on_pull=self.pulled.set,
            on_done=lambda: self.end("done"),
            on_lost=self.end,
        )
        rooms.enter(room, self.handover)

    def end(self, outcome: str) -> None:
        assert not self.outcome, "ended twice"
        self.outcome = outcome
        self.ended.set()


class DecodeLeg:
    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.blocks: dict[int, bytes] = {}
        self.arrived = asyncio.Event()
        self.first: FirstToken | None = None
        self.lost = ""
        self.pull = Pull(self._import, self._token, self._lose)

    def _import(self, index: int, data: memoryview) -> None:
        if index >= N_BLOCKS:
            raise FrameError(f"block {index} is not awaited")
        self.blocks[index] = bytes(data)
        self.arrived.set()

    def _token(self, first: FirstToken) -> None:
        self.first = first
        self.ended.set()

    def _lose(self, reason: str) -> None:
        assert not self.ended.is_set(), "ended twice"
        self.lost = reason
        self.ended.set()


def with_rooms(test: Callable[[Rooms, Bootstrap], Awaitable[None]], room_seconds: float = 10.0) -> None:
    async def main() -> None:
        rooms = Rooms(room_seconds)
        port = await rooms.listen("127.0.0.1", 0)
        async with asyncio.timeout(10):
            await test(rooms, Bootstrap("127.0.0.1", port, 7))
        rooms.close()

    asyncio.run(main())


@pytest.mark.parametrize("decode_first", [False, True])
def test_blocks_move_while_the_rest_computes(decode_first: bool) -> None:
    async def test(rooms: Rooms, bootstrap: Bootstrap) -> None:
        decode = DecodeLeg()
        if decode_first:
            await decode.pull.connect(bootstrap, PROMPT)
            await asyncio.sleep(0.02)
        prefill = PrefillLeg(rooms, bootstrap.room)
        if not decode_first:
            await decode.pull.connect(bootstrap, PROMPT)
            await asyncio.sleep(0.02)
        assert not prefill.pulled.is_set()  # the decode side has no room for the KV yet
        decode.pull.begin(1)
        await prefill.pulled.wait()
        prefill.handover.advance(3, None)
        while len(decode.blocks) < 2:
            decode.arrived.clear()
            await decode.arrived.wait()
        assert decode.first is None
        prefill.handover.advance(N_BLOCKS, FIRST)
        await decode.ended.wait()
        await prefill.ended.wait()
        assert decode.blocks == {index: block(index) for index in range(1, N_BLOCKS)}
        assert decode.first == FIRST
        assert prefill.outcome == "done"

    with_rooms(test)


def test_a_room_where_only_one_side_comes_is_given_up() -> None:
    async def test(rooms: Rooms, bootstrap: Bootstrap) -> None:
        decode = DecodeLeg()
        await decode.pull.connect(bootstrap, PROMPT)
        await decode.ended.wait()
        assert "no prefill request came within 0.05 s" in decode.lost
        prefill = PrefillLeg(rooms, 8)
        await prefill.ended.wait()
        assert "no decode side came within 0.05 s" in prefill.outcome
        PrefillLeg(rooms, 8)  # the room is free again

    with_rooms(test, room_seconds=0.05)


def test_sides_that_do_not_fit_both_learn_why() -> None:
    async def test(rooms: Rooms, bootstrap: Bootstrap) -> None:
        prefill, decode = PrefillLeg(rooms, bootstrap.room), DecodeLeg()
        await decode.pull.connect(bootstrap, Prompt(weights_version=4, block_nbytes=8, tokens=70))
        await prefill.ended.wait()
        await decode.ended.wait()
        for reason in (prefill.outcome, decode.lost):
            assert "weights_version=3" in reason
            assert "weights_version=4" in reason

    with_rooms(test)


def test_each_side_learns_at_once_that_the_other_gave_up() -> None:
    async def test(rooms: Rooms, bootstrap: Bootstrap) -> None:
        prefill, decode = PrefillLeg(rooms, bootstrap.room), DecodeLeg()
        await decode.pull.connect(bootstrap, PROMPT)
        decode.pull.begin(0)
        await prefill.pulled.wait()
        decode.pull.give_up()
        await prefill.ended.wait()
        assert "the decode side is gone" in prefill.outcome
        assert not decode.ended.is_set()

        prefill, decode = PrefillLeg(rooms, bootstrap.room), DecodeLeg()
        await decode.pull.connect(bootstrap, PROMPT)
        decode.pull.begin(0)
        await prefill.pulled.wait()
        prefill.handover.withdraw("aborted by the client")
        await decode.ended.wait()
        assert decode.lost == "aborted by the client"
        assert not prefill.ended.is_set()

    with_rooms(test)


def test_a_room_has_one_prefill_and_one_decode() -> None:
    async def test(rooms: Rooms, bootstrap: Bootstrap) -> None:
        prefill, decode, second = PrefillLeg(rooms, bootstrap.room), DecodeLeg(), DecodeLeg()
        with pytest.raises(ValueError, match="7"):
            PrefillLeg(rooms, bootstrap.room)
        await decode.pull.connect(bootstrap, PROMPT)
        decode.pull.begin(0)
        await prefill.pulled.wait()
        await second.pull.connect(bootstrap, PROMPT)
        await second.ended.wait()
        assert "has its decode side already" in second.lost
        prefill.handover.advance(N_BLOCKS, FIRST)
        await decode.ended.wait()
        assert decode.first == FIRST

    with_rooms(test)


def test_an_engine_without_prefill_role_refuses() -> None:
    async def test(rooms: Rooms, bootstrap: Bootstrap) -> None:
        rooms.open_for_prefill = False
        decode = DecodeLeg()
        await decode.pull.connect(bootstrap, PROMPT)
        await decode.ended.wait()
        assert "no prefill role" in decode.lost

    with_rooms(test)


def test_a_block_that_cannot_be_imported_ends_both_sides() -> None:
    async def test(rooms: Rooms, bootstrap: Bootstrap) -> None:
        prefill, decode = PrefillLeg(rooms, bootstrap.room), DecodeLeg()
        await decode.pull.connect(bootstrap, PROMPT)
        decode.pull.begin(0)
        await prefill.pulled.wait()
        prefill.handover.advance(N_BLOCKS + 1, None)
        await decode.ended.wait()
        await prefill.ended.wait()
        assert "block 5 is not awaited" in decode.lost

    with_rooms(test)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x01\0\0\0\x1c\0\0\0" + bytes(28)])
def test_a_stranger_on_the_bootstrap_port_is_thrown_out(garbage: bytes) -> None:
    async def test(rooms: Rooms, bootstrap: Bootstrap) -> None:
        reader, writer = await asyncio.open_connection(bootstrap.host, bootstrap.port)
        writer.write(garbage)
        assert await reader.read() == b""
        writer.close()

    with_rooms(test)
