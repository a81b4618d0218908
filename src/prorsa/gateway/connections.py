"""Connections within bounds: how many are open, how long the head of a request may take, how long an answer may lie unread.

Invariants. A connection beyond the bound is answered 503 and closed, and never reaches a handler. One that has not sent the
whole head of a request `HEAD_SECONDS` after its first byte, or after it was made, is closed. A client that reads nothing for
`gateway.write_timeout` while there is something to read is let go, also one whose answer only waits to be sent. Open files
that engines, recordings and logs need are never given to clients.
"""

from __future__ import annotations

import json
import logging
from asyncio import AbstractEventLoop, BaseTransport, TimerHandle, Transport
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from aiohttp import web

from prorsa.config import Config, ConfigError
from prorsa.gateway.errors import ApiError

log = logging.getLogger(__name__)

RESERVED, FOR_AN_ENGINE = 224, 8
"""Open files for recordings, logs and whatever else is no request, and those for the pipes and connections of an engine."""
FOR_A_REQUEST = 3
"""Open files of a request in service: its client, its prefill and its decode engine."""
HEAD_SECONDS = 10.0
"""How long a client may take to send the head of a request."""
IDLE_SECONDS = 75.0
"""How long a connection stays open without a request."""
REFUSED_SECONDS = 1.0
"""How long a connection that is refused may take to say something: a client that is answered earlier may not see it."""
MOST_REFUSED = 64
"""Connections that are being refused at once; further ones are closed unanswered."""
FULL = "the gateway has as many connections as it may have (gateway.max_connections); try again later"


def most_connections(config: Config, files: int) -> int:
    """How many connections may be open where the process may have `files` open. Raises `ConfigError`."""
    limits, reserved = config.gateway, RESERVED + FOR_AN_ENGINE * config.cluster.instances
    left = files - reserved - (FOR_A_REQUEST - 1) * limits.max_requests
    if left < limits.max_requests:
        needed, fits = reserved + FOR_A_REQUEST * limits.max_requests, (files - reserved) // FOR_A_REQUEST
        lower = f", or set gateway.max_requests to {fits} or less" if fits > 0 else ""
        raise ConfigError(
            f"gateway.max_requests={limits.max_requests}: needs {needed} open files ({FOR_A_REQUEST} a request, "
            f"{reserved} for the rest), and the hard limit of this process is {files}; raise it (ulimit -Hn {needed}){lower}"
        )
    return min(limits.max_connections, left)


@dataclass(slots=True)
class Connections:
    """The book of all connections of a gateway."""

    most: int
    write_timeout: float
    open: int = 0
    refusing: int = 0
    refused: int = 0
    """So far."""

    def factory(self, server: web.Server, loop: AbstractEventLoop) -> Callable[[], Connection]:
        return lambda: Connection(self, server, loop)


class Connection(web.RequestHandler):
    __slots__ = ("_book", "_head", "_refused", "_serving", "_unread")

    def __init__(self, book: Connections, server: web.Server, loop: AbstractEventLoop) -> None:
        # Without an access log aiohttp formats nothing; the gateway writes its own.
        super().__init__(server, loop=loop, access_log=cast(logging.Logger, None), keepalive_timeout=IDLE_SECONDS)
        self._book = book
        self._refused = False
        self._serving = False
        self._head: TimerHandle | None = None
        """Runs while a head is waited for."""
        self._unread: TimerHandle | None = None
        """Runs while the client does not read."""

    # What the gateway tells.

    def begun(self) -> None:
        """The head of a request is here, and it is being answered."""
        self._serving = True
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def answered(self) -> None:
        self._serving = False

    # What the loop tells.

    def connection_made(self, transport: BaseTransport) -> None:
        self._refused = self._book.open >= self._book.most
        if self._refused:
            self._refuse(cast(Transport, transport))
            return
        self._book.open += 1
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._say_refused()
            return
        super().data_received(data)
        if self._head is None and not self._serving and self.transport is not None:
            self._wait_for_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        if self._refused:
            self.transport = None
            self._book.refusing -= 1
            return
        self._book.open -= 1
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self._loop.call_later(self._book.write_timeout, self._abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    # What aiohttp does at the end.

    async def start(self) -> None:
        await super().start()
        self._close_in_time()

    def force_close(self) -> None:
        self._close_in_time()
        super().force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A request that is no HTTP, or more than is taken of it, in the shape of the other errors."""
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        said = (message or "it is no HTTP/1.1").strip().partition("\n")[0][:200]
        log.info("a request that cannot be read, from %s: %r", request.remote, said)
        response = ApiError(status, f"the request cannot be read: {said}").response()
        response.force_close()
        return response

    # Helpers.

    def _wait_for_head(self) -> None:
        self._head = self._loop.call_later(HEAD_SECONDS, self._late)

    def _late(self) -> None:
        self._head = None
        self.force_close()

    def _close_in_time(self) -> None:
        """A transport that is closed sends what it has left first, for as long as that takes."""
        if self.transport is not None and self.transport.get_write_buffer_size():
            self._loop.call_later(self._book.write_timeout, self.transport.abort)

    def _abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _refuse(self, transport: Transport) -> None:
        self.transport = transport
        self._book.refused += 1
        self._book.refusing += 1
        if self._book.refusing > MOST_REFUSED:
            transport.abort()
        else:
            self._head = self._loop.call_later(REFUSED_SECONDS, self._say_refused)

    def _say_refused(self) -> None:
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.write(_REFUSAL)
            transport.close()


def _refusal() -> bytes:
    body = json.dumps(ApiError(503, FULL).body()).encode()
    head = "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\nRetry-After: 1\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


_REFUSAL = _refusal()
