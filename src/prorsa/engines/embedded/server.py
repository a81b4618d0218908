"""The embedded engine as a process: the SGLang HTTP subset over an `EngineCore`.

    python -m prorsa.engines.embedded.server --model DIR --role prefill

One asyncio loop does everything: it serves HTTP, moves KV, and steps the core while there is work (waiting, not spinning,
while there is none). Prints one line of JSON, `{"port": ..., "bootstrap_port": ...}`, when it is ready.

Invariants: every accepted request ends with exactly one message that has a finish reason, unless its client went away; a
request that ends in any way leaves no blocks, no room and no connection behind; a request of the wrong role is refused
at once; a prefill starts only when its decode side has room for the KV, so that the two never wait for each other in a
circle; before an aborted request is told its end, its full KV blocks are in the store.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from aiohttp import web

from prorsa.engines.embedded.checkpoint import ModelError
from prorsa.engines.embedded.core import (
    CoreError,
    EngineCore,
    Output,
    QueueFull,
    RequestRefused,
    StepOutput,
)
from prorsa.engines.embedded.frames import FrameError
from prorsa.engines.embedded.kv_store import StoreClient
from prorsa.engines.embedded.process import announce, watch_for_stop
from prorsa.engines.embedded.requests import (
    Asked,
    BadRequest,
    field,
    parse_generate,
    parse_object,
    parse_role,
    parse_version,
    role_name,
)
from prorsa.engines.embedded.tickets import Ticket
from prorsa.engines.embedded.transfer import FirstToken, Handover, Prompt, Pull, Rooms
from prorsa.engines.protocol import FinishReason, Role, in_place

MAX_BODY_BYTES = 64 << 20
KEEPALIVE_SECONDS = 3600.0
"""Longer than any client keeps an idle connection, so that it is never the server that closes one under a request."""
SHUTDOWN_SECONDS = 1.0
TURNS_PER_STEP = 3
"""Turns of the event loop between two steps: a request that arrives takes three to get from the socket to the core."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)


class EngineServer:
    """`max_waiting` bounds the prefills that wait for their decode side; the core bounds its own queue."""

    def __init__(self, core: EngineCore, max_waiting: int, store: StoreClient | None = None) -> None:
        self._core = core
        self._max_waiting = max_waiting
        self._store = store
        self._unwritten: set[bytes] = set()
        """Hashes of blocks that the store was too slow for."""
        self._rooms = Rooms()
        self._rooms.open_for_prefill = core.role is Role.PREFILL
        self._tickets: dict[str, Ticket] = {}
        self._work = asyncio.Event()

    async def listen_bootstrap(self, host: str, port: int) -> int:
        return await self._rooms.listen(host, port)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_explain_refusals])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort_request)
        app.router.add_post("/pd_role_switch", self._pd_role_switch)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/health", self._health)
        return app

    async def run(self) -> None:
        """Step the core for ever. An exception of the core ends the process: its state cannot be trusted."""
        while True:
            if not self._core.has_work():
                self._work.clear()
                await self._work.wait()
            self._deliver(self._core.step())
            for _ in range(TURNS_PER_STEP):
                await asyncio.sleep(0)

    def close(self) -> None:
        self._abort_all("the engine is shutting down")
        self._rooms.close()
        if self._store is not None:
            self._store.close()

    # From the core to the requests

    def _deliver(self, step: StepOutput) -> None:
        for filled in step.filled:
            self._write_through(filled.hash, self._core.block_data(filled.block))
        for rid, reservation in step.reserved:
            ticket = self._tickets.get(rid)
            if ticket is not None and ticket.pull is not None:
                ticket.pull.begin(reservation.first_missing_block)
        for output in step.outputs:
            ticket = self._tickets.get(output.rid)
            if ticket is not None:
                self._deliver_output(ticket, output)

    def _deliver_output(self, ticket: Ticket, output: Output) -> None:
        if ticket.pull is None:
            ticket.cached_tokens = output.cached_tokens
        if ticket.handover is not None and output.finish is None:
            self._advance(ticket.handover, output)
            return
        if output.finish is not None:
            ticket.part("aborted")
        ticket.put(output.token_ids, output.logprobs, output.finish)

    def _advance(self, handover: Handover, output: Output) -> None:
        if output.token_ids:
            first = FirstToken(output.token_ids[0], output.logprobs[0], output.cached_tokens)
            handover.advance(handover.n_blocks, first)
        else:
            handover.advance(output.prefilled // self._core.block_tokens, None)

    # /generate

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        asked = parse_generate(parse_object(await request.read()))
        self._check(asked)
        ticket = Ticket(asked, self._core.weights_version)
        self._tickets[asked.rid] = ticket
        try:
            await self._start(ticket)
            return await self._stream(request, ticket)
        except (QueueFull, RequestRefused, BadRequest) as error:
            self._abort(ticket, str(error))
            raise
        finally:
            # Without effect on a request that has ended: this is for a client that went away.
            self._abort(ticket, "the client went away")
            del self._tickets[asked.rid]

    def _check(self, asked: Asked) -> None:
        role = self._core.role
        if asked.rid in self._tickets:
            raise BadRequest(f"rid={asked.rid!r}: already on this engine; use a new one for each attempt")
        if role is Role.MIXED and asked.bootstrap is not None:
            raise BadRequest("bootstrap_room: this engine is mixed; it takes requests without bootstrap fields only")
        if role is not Role.MIXED and asked.bootstrap is None:
            raise BadRequest(f"bootstrap_room: missing; this is a {role} engine, which serves one leg of a request")
        waiting = sum(ticket.finish is None and not ticket.in_core for ticket in self._tickets.values())
        if waiting >= self._max_waiting:
            raise QueueFull(f"request {asked.rid}: {waiting} requests wait already, which is the bound")

    async def _start(self, ticket: Ticket) -> None:
        asked = ticket.asked
        if self._core.role is Role.DECODE:
            await self._start_decode(ticket)
            return
        if asked.bootstrap is not None:
            self._enter_room(ticket, asked.bootstrap.room)
        await self._fetch_prefix(ticket)
        if ticket.handover is not None:
            await ticket.awaited.wait()
        if ticket.finish is None:
            self._core.submit(asked.rid, asked.input_ids, asked.sampling, handover=asked.bootstrap is not None)
            ticket.in_core = True
            self._work.set()

    def _enter_room(self, ticket: Ticket, room: int) -> None:
        prompt = self._prompt(ticket)
        handover = Handover(
            prompt=prompt,
            n_blocks=-(-prompt.tokens // self._core.block_tokens),
            export_block=partial(self._core.export_block, ticket.asked.rid),
            on_pull=ticket.awaited.set,
            on_done=partial(self._handed_over, ticket),
            on_lost=partial(self._abort, ticket),
        )
        try:
            self._rooms.enter(room, handover)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        ticket.handover = handover

    def _handed_over(self, ticket: Ticket) -> None:
        assert ticket.handover is not None
        first = ticket.handover.first
        assert first is not None
        self._core.release(ticket.asked.rid)
        stopped = first.token in ticket.asked.sampling.stop_token_ids
        ticket.put([first.token], [first.logprob], FinishReason.STOP if stopped else FinishReason.LENGTH)

    async def _start_decode(self, ticket: Ticket) -> None:
        asked = ticket.asked
        assert asked.bootstrap is not None
        reservation = self._core.reserve(asked.rid, asked.input_ids, asked.sampling)
        ticket.in_core = True
        ticket.pull = Pull(
            import_block=partial(self._import_block, asked.rid),
            on_token=partial(self._admit, ticket),
            on_lost=partial(self._abort, ticket),
        )
        if reservation is not None:
            ticket.pull.begin(reservation.first_missing_block)
        await ticket.pull.connect(asked.bootstrap, self._prompt(ticket))

    def _import_block(self, rid: str, index: int, data: memoryview) -> None:
        try:
            self._core.import_block(rid, index, data)
        except CoreError as error:
            raise FrameError(str(error)) from error

    def _admit(self, ticket: Ticket, first: FirstToken) -> None:
        ticket.cached_tokens = first.cached_tokens
        try:
            self._core.admit(ticket.asked.rid, first.token, first.logprob)
        except CoreError as error:
            raise FrameError(str(error)) from error
        self._work.set()

    def _prompt(self, ticket: Ticket) -> Prompt:
        return Prompt(ticket.weights_version, self._core.block_nbytes, len(ticket.asked.input_ids))

    async def _stream(self, request: web.Request, ticket: Ticket) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while ticket.finish is None:
            await ticket.news.wait()
            if ticket.finish is None:
                await response.write(ticket.take())
        if ticket.finish is FinishReason.ABORT:
            await self._save(ticket)
        await response.write_eof(ticket.take() + b"data: [DONE]\n\n")
        return response

    # The KV store

    async def _fetch_prefix(self, ticket: Ticket) -> None:
        """Bring what other instances have computed of this prompt into the prefix cache."""
        if self._store is None:
            return
        missing = self._core.missing_hashes(ticket.asked.input_ids)
        blocks = await self._store.fetch(missing) if missing else []
        if blocks and ticket.finish is None:
            self._core.import_prefix(missing[: len(blocks)], blocks)

    def _write_through(self, block_hash: bytes, data: memoryview) -> None:
        if self._store is None or not self._store.connected:
            return
        if not self._store.put(self._core.weights_version, block_hash, bytes(data)):
            self._unwritten.add(block_hash)

    async def _save(self, ticket: Ticket) -> None:
        """Have the KV of an aborted request in the store before its client can send it again elsewhere."""
        if self._store is None or ticket.weights_version != self._core.weights_version:
            return
        for block_hash in self._unwritten:
            data = self._core.cached_block(block_hash)
            if data is not None:
                self._store.put(self._core.weights_version, block_hash, bytes(data), urgent=True)
        self._unwritten.clear()
        await self._store.flush()

    # Aborting

    def _abort(self, ticket: Ticket, reason: str) -> None:
        """End a request, unless it has ended. What the core has made of it comes with the next step."""
        if ticket.finish is not None:
            return
        ticket.message = reason
        ticket.part(reason)
        if ticket.in_core:
            self._core.abort(ticket.asked.rid)
            self._work.set()
        else:
            ticket.put((), (), FinishReason.ABORT)

    def _abort_all(self, reason: str) -> None:
        for ticket in self._tickets.values():
            self._abort(ticket, reason)

    async def _abort_request(self, request: web.Request) -> web.Response:
        body = parse_object(await request.read())
        if field(body, "abort_all", bool, False):
            self._abort_all("aborted by the client")
            return web.Response()
        ticket = self._tickets.get(field(body, "rid", str))
        if ticket is not None:
            self._abort(ticket, "aborted by the client")
        return web.Response()

    # Role and weights

    def _unfinished(self) -> int:
        return sum(ticket.finish is None for ticket in self._tickets.values())

    async def _pd_role_switch(self, request: web.Request) -> web.Response:
        old, new = self._core.role, parse_role(parse_object(await request.read()))
        answer: dict[str, Any] = {"old_role": role_name(old), "new_role": role_name(new)}
        if new is old:
            return web.json_response({"success": True, "message": "already in target role", **answer})
        if self._unfinished() and not in_place(old, new):
            message = "instance is not idle; drain all requests before switching"
            return web.json_response({"success": False, "message": message, **answer}, status=400)
        self._core.set_role(new)
        self._rooms.open_for_prefill = new is Role.PREFILL
        return web.json_response({"success": True, "message": "ok", **answer})

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = parse_object(await request.read())
        path, version = field(body, "model_path", str), parse_version(body)
        if self._unfinished() and not field(body, "abort_all_requests", bool, False):
            raise BadRequest(
                "abort_all_requests=false: requests are live; set it to true or wait until they have ended"
            )
        try:
            self._core.load_weights(path, version)
        except ModelError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        self._abort_all(f"the weights were updated to version {version}")
        self._unwritten.clear()
        if self._store is not None:
            self._store.drop_before(version)
        return web.json_response({"success": True, "message": "ok", "num_paused_requests": 0})

    # What the engine says of itself

    async def _loads(self, request: web.Request) -> web.Response:
        load = self._core.load()
        rank: dict[str, Any] = {
            "dp_rank": 0,
            "num_running_reqs": load.running,
            "num_waiting_reqs": self._unfinished() - load.running,
            "num_used_tokens": load.used_tokens,
            "max_total_num_tokens": load.max_tokens,
            "timestamp": time.time(),  # whoever answers steps the core: to answer is to live
            "disaggregation": {"mode": role_name(self._core.role)},
        }
        if self._store is not None:
            rank["kv_store"] = {
                "connected": self._store.connected,
                "stored_blocks": self._store.stored_blocks,
                "dropped_blocks": self._store.dropped_blocks,
                "fetched_blocks": self._store.fetched_blocks,
            }
        return web.json_response({"loads": [rank]})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self._core.model_path,
                "weight_version": str(self._core.weights_version),
                "disaggregation_mode": role_name(self._core.role),
            }
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()


@web.middleware
async def _explain_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (BadRequest, RequestRefused) as error:
        return web.json_response({"error": {"message": str(error)}}, status=400)
    except QueueFull as error:
        return web.json_response({"error": {"message": str(error)}}, status=503)


async def serve(arguments: argparse.Namespace) -> None:
    stop = watch_for_stop()
    core = EngineCore(
        arguments.model,
        Role(arguments.role),
        kv_tokens=arguments.kv_tokens,
        block_tokens=arguments.block_tokens,
        prefill_chunk=arguments.prefill_chunk,
        max_running=arguments.max_running,
        max_waiting=arguments.max_waiting,
        weights_version=arguments.weights_version,
    )
    store, keep_connected = await _connect_store(arguments.kv_store, core.block_nbytes)
    server = EngineServer(core, arguments.max_waiting, store)
    runner = web.AppRunner(
        server.application(),
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=KEEPALIVE_SECONDS,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    await runner.setup()
    await web.TCPSite(runner, arguments.host, arguments.port).start()
    bootstrap_port = await server.listen_bootstrap(arguments.host, arguments.bootstrap_port)
    announce(port=runner.addresses[0][1], bootstrap_port=bootstrap_port)
    await _first(server.run(), stop.wait(), *keep_connected)
    server.close()
    await runner.cleanup()


async def _first(*coroutines: Awaitable[Any]) -> None:
    """Run several until one ends, and raise what it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    for task in done:
        task.result()


async def _connect_store(
    address: str | None, block_nbytes: int
) -> tuple[StoreClient | None, list[Coroutine[Any, Any, None]]]:
    """And what keeps it connected, for ever."""
    if address is None:
        return None, []
    host, _, port = address.rpartition(":")
    store = StoreClient(block_nbytes)
    try:
        await store.connect(host, int(port))
    except OSError as error:
        log.warning("the KV store at %s does not answer (%s); going on without it", address, error)
    return store, [store.keep_connected(host, int(port))]


def main() -> None:
    parser = argparse.ArgumentParser(description="One embedded inference engine.")
    parser.add_argument("--model", required=True, help="directory of a Qwen3 checkpoint")
    parser.add_argument("--role", choices=[role.value for role in Role], default=Role.MIXED.value)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--bootstrap-port", type=int, default=0, help="where decode sides fetch KV; 0 takes a free one")
    parser.add_argument("--kv-tokens", type=int, default=8192)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--max-running", type=int, default=32)
    parser.add_argument("--max-waiting", type=int, default=256)
    parser.add_argument("--kv-store", help="host:port of a running KV store; without it there is none")
    parser.add_argument("--weights-version", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
