"""The HTTP server in front of the control plane: any agent framework can point at it.

    POST /v1/chat/completions, /v1/completions, /v1/responses   OpenAI's, streaming and not
    GET  /v1/models
    POST /generate                               SGLang's, with token ids
    POST /prorsa/events                          what a framework knows better than the gateway can guess
    GET  /health, /metrics, /                    for probes, for Prometheus, for a person
    /prorsa/...                                  admin, see `prorsa.gateway.admin`

Invariants. Every request ends in an answer, in an error of OpenAI's shape, or with its client gone; in any case its turn is
over then and its engines are free. At most `gateway.max_requests` are in service, each for `gateway.request_timeout` at most.
With an API key, no request of an agent or a framework (the first four lines above) is read before it has shown the key.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from prorsa.assembly import sampling_params
from prorsa.cluster.control import ControlPlane
from prorsa.config import Config, ConfigError
from prorsa.engines.descriptors import raise_open_files
from prorsa.engines.protocol import TraceHeaders
from prorsa.gateway.admin import Admin
from prorsa.gateway.answers import Form, encoded, form_of
from prorsa.gateway.asks import TRAJECTORY_HEADER, Ask, AskReader, Identity, read_identity
from prorsa.gateway.bodies import BodyReader
from prorsa.gateway.connections import Connection, Connections, most_connections
from prorsa.gateway.errors import ApiError, unknown_model
from prorsa.gateway.fields import short
from prorsa.gateway.hosts import Hosts
from prorsa.gateway.keys import shows
from prorsa.gateway.live import LiveView
from prorsa.gateway.metrics import CONTENT_TYPE, Metrics
from prorsa.gateway.trajectories import Trajectories
from prorsa.gateway.turns import Running, Turns
from prorsa.gateway.work import LongWork
from prorsa.rollout.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from prorsa.gateway.traces import Begun, Traces  # of the extra `otel`

access = logging.getLogger("prorsa.gateway.access")
log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 5.0
"""How long connections may take to close at the end."""
ANSWERING = 64
"""Writing a token of an answer takes as long as reading so many bytes."""
MOST_EVENTS = 1000
"""Of one request to /prorsa/events."""
BACKLOG = 4096
"""Connections that may wait to be accepted (the system may allow fewer): agents come by the thousand, all at once."""
ACCEPTERS = 16
"""Connections that are accepted in a step of the loop at most: uvloop takes one for each descriptor that it listens with."""
STOPPING = "the gateway is stopping"
RUNNING: web.RequestKey[Running] = web.RequestKey("running", Running)
TRACE: web.RequestKey[TraceHeaders] = web.RequestKey("trace", tuple)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Address = tuple[int, tuple[str, int]]
"""(family, (IP address, port))."""


class Gateway:
    """The endpoints over a running control plane."""

    def __init__(
        self,
        control: ControlPlane,
        config: Config,
        tokenizer: ChatTokenizer,
        model: str,
        token: str,
        metrics: Metrics,
        live: LiveView,
        traces: Traces | None = None,
        api_key: str | None = None,
    ) -> None:
        """`model` is the name that clients ask for, `token` the admin's; `metrics`, `live` and `traces` are observers of
        `control`. Without an `api_key` anyone may use the engines."""
        limits = config.gateway
        self.work = LongWork()
        self._bodies = BodyReader(self.work, limits.max_body_mb, config.model.max_context)
        self.trajectories = Trajectories(
            control, tokenizer, config.model.max_context, limits.tool_timeout, limits.idle_timeout, self.work
        )
        self._control = control
        self._limits = limits
        self._tokenizer = tokenizer
        self._model = model
        self._metrics = metrics
        self._live = live
        self._traces = traces
        self._api_key = api_key
        self._hosts = Hosts(limits.host, limits.allowed_hosts)
        reader = AskReader(tokenizer, model, sampling_params(config))
        self._readers = {
            "/v1/chat/completions": reader.chat,
            "/v1/completions": reader.completions,
            "/v1/responses": reader.responses,
            "/generate": reader.generate,
        }
        self._turns = Turns(control, tokenizer, self.trajectories, config.model.max_context, limits.seed, self.work)
        self._admin = Admin(control, token, self._bodies)
        self._created = int(time.time())
        self.connections = Connections(most_connections(config, raise_open_files()), limits.write_timeout)
        self._running: set[Running] = set()
        self._stopping = False

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._answer])
        app.add_routes(
            [
                *(web.post(path, self._keyed(self._generating(read))) for path, read in self._readers.items()),
                web.get("/v1/models", self._keyed(self._models)),
                web.get("/v1/models/{name:.+}", self._keyed(self._one_model)),
                web.post("/prorsa/events", self._keyed(self._events)),
                web.get("/health", self._health),
                web.get("/metrics", self._show_metrics),
                web.get("/", self._page),
                *self._admin.routes(),
            ]
        )
        return app

    def stop(self) -> None:
        """Cancel every turn in service, begin no other, and end the trajectories that wait for their clients."""
        self._stopping = True
        for running in self._running:
            running.cancel(ApiError(503, STOPPING))
        self.trajectories.close(STOPPING)

    # Around every request.

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turns errors into answers, counts and logs."""
        began = asyncio.get_running_loop().time()
        traced = self._traced(request, began)
        connection = cast(Connection, request.protocol)
        connection.begun()
        status = 499  # the client is gone, unless something else is known
        try:
            self._hosts.check(request)
            response = await handler(request)
            status = response.status
        except (asyncio.CancelledError, ConnectionResetError):
            self._metrics.disconnects.add()
            raise
        except Exception as error:
            refusal = self._failed(request, error)
            response, status = refusal.response(), refusal.status
            if request.content.exception() is not None:
                # Where its body ends is not known, nor where a next request begins.
                request.content.feed_eof()
                response.force_close()
        finally:
            connection.answered()
            self._note(request, status, began, traced)
        return response

    def _traced(self, request: web.Request, began: float) -> Begun | None:
        endpoint = _endpoint(request)
        if self._traces is None or request.method != "POST" or endpoint not in self._readers:
            return None
        begun = self._traces.begin(request.headers, endpoint, began)
        request[TRACE] = begun.headers
        return begun

    def _note(self, request: web.Request, status: int, began: float, traced: Begun | None) -> None:
        seconds = asyncio.get_running_loop().time() - began
        endpoint = _endpoint(request)
        self._metrics.requests.add(endpoint=endpoint, status=str(status))
        known: dict[str, Any] = {"endpoint": endpoint, "status": status, "seconds": round(seconds, 4)}
        running = request.get(RUNNING)
        if running is not None:
            self._metrics.request_seconds.observe(seconds, endpoint=endpoint)
            known |= {"trajectory": running.trajectory, "turn": running.number}
            known |= {"prompt_tokens": len(running.prompt_ids), "output_tokens": len(running.output.ids)}
        if self._traces is not None and traced is not None:
            self._traces.end(traced, status, running)
        access.info("%s %s %d %.3f s", request.method, request.path, status, seconds, extra=known)

    def _keyed(self, handler: Handler) -> Handler:
        key = self._api_key
        if key is None:
            return handler

        async def handle(request: web.Request) -> web.StreamResponse:
            if not shows(request, key):
                needed = "the header `Authorization: Bearer KEY` with the API key (OpenAI's clients call it api_key)"
                raise ApiError(401, f"{request.path} needs {needed}", code="invalid_api_key")
            return await handler(request)

        return handle

    # Turns.

    def _generating(self, read: Callable[[dict[str, Any], Identity], Ask]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if self._stopping:
                raise ApiError(503, STOPPING)
            if self._metrics.in_flight >= self._limits.max_requests:
                raise ApiError(
                    429,
                    f"{self._limits.max_requests} requests are in service; try again later",
                    code="rate_limit_exceeded",
                )
            self._metrics.in_flight += 1
            try:
                return await self._generate(request, read)
            finally:
                self._metrics.in_flight -= 1

        return handle

    async def _generate(
        self, request: web.Request, read: Callable[[dict[str, Any], Identity], Ask]
    ) -> web.StreamResponse:
        body, size = await self._bodies.object(request)
        ask = await self.work.run(size, read, body, read_identity(request.headers, body))
        del body  # the request may last for long
        deadline = asyncio.get_running_loop().time() + self._limits.request_timeout
        async with self._turns.run(ask, deadline, request.get(TRACE, ())) as running:
            request[RUNNING] = running
            self._running.add(running)
            if self._stopping:
                running.cancel(ApiError(503, STOPPING))
            try:
                form = form_of(running, self._tokenizer, self._model)
                if ask.stream:
                    return await self._stream(request, running, form)
                return await self._whole(running, form)
            finally:
                self._running.discard(running)

    async def _whole(self, running: Running, form: Form) -> web.Response:
        await asyncio.wait({running.task})
        outcome = running.outcome()
        if isinstance(outcome, ApiError):
            raise outcome
        headers = {TRAJECTORY_HEADER: running.name}
        size = ANSWERING * len(running.output.ids) + len(running.prompt_ids)
        body = await self.work.finish(size, lambda: encoded(form.whole(outcome)))
        return web.Response(body=body, content_type="application/json", headers=headers)

    async def _stream(self, request: web.Request, running: Running, form: Form) -> web.StreamResponse:
        """Begins with the first news, so that what fails before it has a status of its own."""
        headers = {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",  # or a proxy would collect the pieces
            TRAJECTORY_HEADER: running.name,
        }
        response = web.StreamResponse(headers=headers)
        try:
            while not running.task.done():
                await running.news.wait()
                running.news.clear()
                if running.output.ids and not response.prepared:
                    await response.prepare(request)
                if piece := form.piece():
                    await response.write(piece)
            outcome = running.outcome()
            if isinstance(outcome, ApiError):
                raise outcome
            last = form.end(outcome)
            if not response.prepared:
                await response.prepare(request)
        except ConnectionResetError:
            raise
        except Exception as error:
            if not response.prepared:
                raise
            # Nothing but events may follow the headers.
            last = form.failed(self._failed(request, error))
        await response.write(last)
        await response.write_eof()
        return response

    def _failed(self, request: web.Request, error: Exception) -> ApiError:
        """What a request is answered that ended in this."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, web.RequestPayloadError):
            return ApiError(400, f"the body cannot be read ({' '.join(str(error).split())})")
        if isinstance(error, web.HTTPException):
            return ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
        log.error("%s %s failed", request.method, request.path, exc_info=error)
        return ApiError(500, "the gateway failed; its log says how")

    # The rest.

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._described()]})

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name != self._model:
            raise unknown_model(short(name), self._model)
        return web.json_response(self._described())

    def _described(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "prorsa"}

    async def _events(self, request: web.Request) -> web.Response:
        body, _ = await self._bodies.json(request)
        listed = body if isinstance(body, list) else [body]
        if len(listed) > MOST_EVENTS:
            raise ApiError(413, f"{len(listed)} events are too many for one request; send {MOST_EVENTS} at most")
        told = []
        for one in listed:
            if not isinstance(one, dict):
                raise ApiError(400, "the body must be an event, a JSON object, or a list of events")
            trajectory = self.trajectories.post(one)
            told.append({"trajectory": trajectory.name, "state": self.trajectories.state(trajectory)})
        return web.json_response(told if isinstance(body, list) else told[0])

    async def _health(self, request: web.Request) -> web.Response:
        """200 while a turn can be served, else 503."""
        facts = self._control.health()
        ready = facts["can_serve"] and not self._stopping
        status = {"status": "ok" if ready else "unavailable", "recording": self._control.trouble or "ok"}
        return web.json_response(status | facts, status=200 if ready else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        text = self._metrics.render(self._control.status(), self.trajectories.continued, self.connections)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _page(self, request: web.Request) -> web.Response:
        html = self._live.render(self._control.status(), self._metrics.in_flight)
        return web.Response(text=html, content_type="text/html")


def _endpoint(request: web.Request) -> str:
    route = request.match_info.route.resource
    return route.canonical if route is not None else "unknown"


@asynccontextmanager
async def listening(gateway: Gateway, host: str, port: int) -> AsyncIterator[str]:
    """Serve while the block lasts; yields the URL. Leaving it ends the turns in service. Raises `ConfigError`."""
    # A handler is cancelled when its client is gone: that is what frees the engines.
    runner = web.AppRunner(gateway.application(), handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS)
    await runner.setup()
    assert runner.server is not None
    listeners: list[asyncio.Server] = []
    try:
        await _listen(gateway.connections.factory(runner.server, asyncio.get_running_loop()), listeners, host, port)
        bound_host, bound_port = listeners[0].sockets[0].getsockname()[:2]
        yield f"http://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"
    finally:
        for listener in listeners:
            listener.close()
        gateway.stop()
        await runner.cleanup()
        gateway.work.close()


async def resolved(host: str, port: int) -> list[Address]:
    """What to listen at. Raises `ConfigError`."""
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return [(family, (str(address[0]), int(address[1]))) for family, *_, address in infos]


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    problem = f"gateway.host={host!r}, gateway.port={port}: cannot listen there ({error.strerror})"
    return ConfigError(f"{problem}; choose others, or port 0 to let the system choose")


async def _listen(connection: Callable[[], Connection], listeners: list[asyncio.Server], host: str, port: int) -> None:
    """At each address of the host. Raises `ConfigError`."""
    loop = asyncio.get_running_loop()
    try:
        for family, address in await resolved(host, port):
            with socket.create_server(address, family=family, backlog=BACKLOG) as listener:
                for _ in range(ACCEPTERS):
                    listeners.append(await loop.create_server(connection, sock=listener.dup(), backlog=BACKLOG))
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
