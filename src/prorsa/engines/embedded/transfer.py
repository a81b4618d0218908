"""KV on its way from a prefill engine to a decode engine, over TCP, block by block while later chunks still compute.

The decode side connects to the bootstrap port of the prefill side. In a room, which both legs of a request name, goes:

    decode -> prefill   HELLO room, weights version, block size, prompt length
                        PULL  first block that it misses                    (once it has allocated the blocks)
    prefill -> decode   BLOCK index, raw KV                                  (as each is completed)
                        TOKEN the first token, its log-probability, cached prompt tokens
    decode -> prefill   DONE                                                 (only now does the prefill side free the blocks)

Either side that gives up closes the connection, so the other one learns it at once; a refusal names its reason.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

from prorsa.engines.embedded.frames import FrameError, FrameProtocol
from prorsa.engines.protocol import Bootstrap

MAGIC = b"PKV1"
HELLO = struct.Struct("<4sQqII")
PULL = struct.Struct("<I")
INDEX = struct.Struct("<I")
TOKEN = struct.Struct("<qdI")
ROOM_SECONDS = 15.0
"""How long one side waits in a room for the other to turn up."""

log = logging.getLogger(__name__)


class Frame(IntEnum):
    HELLO = 1
    PULL = 2
    BLOCK = 3
    TOKEN = 4
    DONE = 5
    REFUSED = 6
    """UTF-8 text: why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What both sides must agree on before any KV moves."""

    weights_version: int
    block_nbytes: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: int
    logprob: float
    cached_tokens: int
    """Prompt tokens that the prefill side did not compute."""


@dataclass(slots=True)
class Handover:
    """The prefill leg of one room: `advance` it whenever more of the prompt has been computed.

    Exactly one of `on_done` and `on_lost` is called, once, unless the leg itself calls `withdraw`.
    """

    prompt: Prompt
    n_blocks: int
    export_block: Callable[[int], memoryview]
    on_pull: Callable[[], None]
    """The decode side has allocated the blocks: only now is it worth computing."""
    on_done: Callable[[], None]
    on_lost: Callable[[str], None]
    first: FirstToken | None = None
    _ready: int = 0
    _next: int | None = None
    """Next block to send; None until the decode side has pulled."""
    _peer: DecodePeer | None = None
    _ended: bool = False
    _withdraw: Callable[[str], None] | None = field(default=None, repr=False)

    def advance(self, ready_blocks: int, first: FirstToken | None) -> None:
        """`ready_blocks` of the prompt's blocks are complete; `first` comes with the last of them."""
        self._ready, self.first = ready_blocks, first
        self._send()

    def withdraw(self, reason: str) -> None:
        """The prefill leg gives up; the decode side is told why. Harmless when the handover has ended."""
        if not self._ended and self._withdraw is not None:
            self._ended = True
            self._withdraw(reason)

    def _send(self) -> None:
        if self._peer is None or self._next is None:
            return
        while self._next < self._ready:
            self._peer.send(Frame.BLOCK, INDEX.pack(self._next), bytes(self.export_block(self._next)))
            self._next += 1
        if self.first is not None:
            first = self.first
            self._peer.send(Frame.TOKEN, TOKEN.pack(first.token, first.logprob, first.cached_tokens))


class Rooms:
    """The prefill side's meeting place. A leg and its decode side may come in either order."""

    def __init__(self, room_seconds: float = ROOM_SECONDS) -> None:
        self.open_for_prefill = True
        """False while the engine has another role: whoever connects for a leg that is not here is told so at once."""
        self._room_seconds = room_seconds
        self._legs: dict[int, Handover] = {}
        self._waiting: dict[int, tuple[DecodePeer, Prompt]] = {}
        """Decode sides whose prefill leg has not come yet."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """The port, which is `port` unless that is 0."""
        self._server = await asyncio.get_running_loop().create_server(lambda: DecodePeer(self), host, port)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def enter(self, room: int, leg: Handover) -> None:
        """A prefill leg comes in. Raises `ValueError` when the room has one already."""
        if room in self._legs:
            raise ValueError(f"bootstrap_room {room} is in use")
        self._legs[room] = leg
        leg._withdraw = lambda reason: self._leave(room, leg, reason)
        if room in self._waiting:
            peer, prompt = self._waiting.pop(room)
            self._stop_timer(room)
            self._pair(room, leg, peer, prompt)
        else:
            self._start_timer(room)

    def hello(self, room: int, peer: DecodePeer, prompt: Prompt) -> None:
        if not self.open_for_prefill and room not in self._legs:
            peer.refuse("this engine has no prefill role now")
        elif room in self._waiting or (room in self._legs and self._legs[room]._peer is not None):
            peer.refuse(f"room {room} has its decode side already")
        elif room in self._legs:
            self._stop_timer(room)
            self._pair(room, self._legs[room], peer, prompt)
        else:
            self._waiting[room] = (peer, prompt)
            self._start_timer(room)

    def pull(self, room: int, first_block: int) -> None:
        leg = self._legs.get(room)
        if leg is not None and leg._next is None:
            leg._next = first_block
            leg.on_pull()

    def done(self, room: int) -> None:
        leg = self._legs.get(room)
        if leg is not None and leg.first is not None and not leg._ended:
            del self._legs[room]
            leg._ended = True
            leg.on_done()

    def peer_lost(self, room: int, peer: DecodePeer, reason: str) -> None:
        if room in self._waiting and self._waiting[room][0] is peer:
            del self._waiting[room]
            self._stop_timer(room)
        leg = self._legs.get(room)
        if leg is not None and leg._peer is peer:
            self._lose(room, leg, f"the decode side is gone ({reason})")

    def _pair(self, room: int, leg: Handover, peer: DecodePeer, prompt: Prompt) -> None:
        if prompt != leg.prompt:
            reason = f"room {room}: the prefill side has {leg.prompt}, the decode side {prompt}"
            peer.refuse(reason)
            self._lose(room, leg, reason)
            return
        leg._peer = peer
        if peer.first_block is not None:
            self.pull(room, peer.first_block)

    def _leave(self, room: int, leg: Handover, reason: str) -> None:
        self._legs.pop(room, None)
        self._stop_timer(room)
        if leg._peer is not None:
            leg._peer.refuse(reason)

    def _lose(self, room: int, leg: Handover, reason: str) -> None:
        self._legs.pop(room, None)
        if not leg._ended:
            leg._ended = True
            leg.on_lost(reason)

    def _start_timer(self, room: int) -> None:
        loop = asyncio.get_running_loop()
        self._timers[room] = loop.call_later(self._room_seconds, self._expire, room)

    def _stop_timer(self, room: int) -> None:
        timer = self._timers.pop(room, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, room: int) -> None:
        del self._timers[room]
        if room in self._waiting:
            peer, _ = self._waiting.pop(room)
            peer.refuse(f"room {room}: no prefill request came within {self._room_seconds:g} s")
        else:
            reason = f"room {room}: no decode side came within {self._room_seconds:g} s"
            self._lose(room, self._legs[room], reason)


class DecodePeer(FrameProtocol):
    """The prefill side's end of one connection."""

    def __init__(self, rooms: Rooms) -> None:
        super().__init__()
        self._rooms = rooms
        self._room: int | None = None
        self.first_block: int | None = None

    def refuse(self, reason: str) -> None:
        self.send(Frame.REFUSED, reason.encode())
        self.close()

    def frame_received(self, kind: int, payload: memoryview) -> None:
        if kind == Frame.HELLO and len(payload) == HELLO.size and self._room is None:
            magic, self._room, version, block_nbytes, tokens = HELLO.unpack_from(payload)
            if magic != MAGIC:
                raise FrameError(f"HELLO with {magic!r} instead of {MAGIC!r}")
            assert self._room is not None
            self._rooms.hello(self._room, self, Prompt(version, block_nbytes, tokens))
        elif kind == Frame.PULL and len(payload) == PULL.size and self._room is not None:
            (self.first_block,) = PULL.unpack_from(payload)
            assert self.first_block is not None
            self._rooms.pull(self._room, self.first_block)
        elif kind == Frame.DONE and self._room is not None:
            self._rooms.done(self._room)
        else:
            raise FrameError(f"unexpected frame {kind} with {len(payload)} bytes")

    def connection_ended(self, reason: str) -> None:
        if self._room is not None:
            self._rooms.peer_lost(self._room, self, reason)


class Pull(FrameProtocol):
    """The decode side's end: imports what arrives. Exactly one of `on_token` and `on_lost` is called, once, unless `give_up`
    comes first."""

    def __init__(
        self,
        import_block: Callable[[int, memoryview], None],
        on_token: Callable[[FirstToken], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._import_block = import_block
        self._on_token = on_token
        self._on_lost = on_lost
        self._ended = False
        self._hello: bytes | None = None
        self._pull: bytes | None = None

    async def connect(self, bootstrap: Bootstrap, prompt: Prompt) -> None:
        """Failing calls `on_lost`."""
        host, port = bootstrap.host, bootstrap.port
        self._hello = HELLO.pack(MAGIC, bootstrap.room, prompt.weights_version, prompt.block_nbytes, prompt.tokens)
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                await asyncio.get_running_loop().create_connection(lambda: self, host, port)
        except (OSError, TimeoutError) as error:
            self.connection_ended(f"cannot connect to {host}:{port}: {error!r}")

    def begin(self, first_block: int) -> None:
        """The blocks are allocated: send what is missing, from `first_block` on."""
        self._pull = PULL.pack(first_block)
        self.send(Frame.PULL, self._pull)

    def give_up(self) -> None:
        self._ended = True
        self.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._ended:
            self.close()
            return
        assert self._hello is not None
        self.send(Frame.HELLO, self._hello)
        if self._pull is not None:
            self.send(Frame.PULL, self._pull)

    def frame_received(self, kind: int, payload: memoryview) -> None:
        if self._ended:
            return
        if kind == Frame.BLOCK and len(payload) > INDEX.size:
            self._import_block(INDEX.unpack_from(payload)[0], payload[INDEX.size :])
        elif kind == Frame.TOKEN and len(payload) == TOKEN.size:
            self._on_token(FirstToken(*TOKEN.unpack_from(payload)))
            self._ended = True
            self.send(Frame.DONE)
            self.close()
        elif kind == Frame.REFUSED:
            raise FrameError(bytes(payload).decode(errors="replace"))
        else:
            raise FrameError(f"unexpected frame {kind} with {len(payload)} bytes")

    def connection_ended(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._on_lost(reason)
