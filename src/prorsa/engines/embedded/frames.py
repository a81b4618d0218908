"""Length-prefixed binary frames over TCP, for KV blocks: a kind, a length, raw bytes. Nothing is ever unpickled.

A frame is `<u8 kind, 3 zero bytes, u32 payload length>` and the payload. Reading works on whole arrivals, not on awaited
pieces, so that a busy step loop costs a transfer a few of its turns and not two a frame.
"""

from __future__ import annotations

import asyncio
import struct
from typing import cast

HEADER = struct.Struct("<B3xI")
MAX_PAYLOAD = 1 << 28
"""Larger than any honest frame: what claims more is not our protocol."""


class FrameError(Exception):
    """The peer does not speak this protocol."""


class FrameProtocol(asyncio.Protocol):
    """One end of a connection. Subclasses implement `frame_received` and `connection_ended`."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._reason = "the peer closed the connection"
        self._transport: asyncio.Transport | None = None

    def frame_received(self, kind: int, payload: memoryview) -> None:
        """`payload` is valid only during the call. Raising `FrameError` ends the connection."""
        raise NotImplementedError

    def connection_ended(self, reason: str) -> None:
        """Called once, whoever ended it."""
        raise NotImplementedError

    def send(self, kind: int, *parts: bytes) -> None:
        """Queue a frame; does nothing on a connection that is gone (`connection_ended` tells)."""
        if self._transport is None or self._transport.is_closing():
            return
        length = sum(len(part) for part in parts)
        self._transport.write(b"".join((HEADER.pack(kind, length), *parts)))

    def close(self) -> None:
        """Close after everything queued has been sent."""
        if self._transport is not None:
            self._transport.close()

    @property
    def unsent(self) -> int:
        """Bytes queued but not yet taken by the kernel."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._buffer = bytearray()
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            used = self._take_frames()
        except FrameError as error:
            self._fail(str(error))
            return
        del self._buffer[:used]

    def _take_frames(self) -> int:
        view = memoryview(self._buffer)
        offset = 0
        while len(view) - offset >= HEADER.size:
            kind, length = HEADER.unpack_from(view, offset)
            if length > MAX_PAYLOAD:
                raise FrameError(f"a frame that claims {length} bytes")
            start = offset + HEADER.size
            if start + length > len(view):
                break
            self.frame_received(kind, view[start : start + length])
            offset = start + length
        return offset

    def _fail(self, reason: str) -> None:
        """End the connection at once."""
        # The error's traceback still holds views of the old buffer, so it cannot be resized.
        self._buffer = bytearray()
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.connection_ended(str(error) if error is not None else self._reason)
