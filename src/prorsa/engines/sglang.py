"""The client of the SGLang HTTP protocol: one class for real SGLang (0.5.21 or later) and for the embedded engine.

Invariants: a stream yields every token once, whether the server streams cumulative or incremental output; it ends with
a chunk that has `finish`, or with an exception of `protocol`, never silently; closing it drops the connection, which
cancels the leg on the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

import aiohttp
import msgspec

from prorsa.engines.protocol import (
    SPLIT_ROLES,
    Chunk,
    EngineBusy,
    EngineError,
    EngineGone,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Load,
    Role,
    SamplingParams,
    Shortage,
)

CONNECT_SECONDS = 5.0
CONTROL_SECONDS = 30.0
"""Bound of a short control call."""
SWITCH_SECONDS = 120.0
UPDATE_SECONDS = 300.0
ABORT_SECONDS = 30.0
"""How long the requests that a weight update aborts may take to end."""
ABORT_POLL_SECONDS = 0.1
KEEPALIVE_SECONDS = 2.0
"""Below uvicorn's 5 s, so that a request never meets a connection that the server is just closing."""
END_MARK_SECONDS = 0.5
SHORTAGE_PAUSES = (0.05, 1.0)
"""Seconds until a control call that our own shortage prevented is tried again, the first time and at most."""
OUR_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EAGAIN})
ANSWER_EXCERPT = 300
JSON_HEADERS = {"Content-Type": "application/json"}
RID_END = "|"
"""SGLang aborts every request whose rid STARTS WITH the given one; with an end mark no rid is the start of another."""

Item = TypeVar("Item")


class SGLangEngine:
    """Implements `protocol.Engine` over HTTP.

    `bootstrap_host` and `bootstrap_port` are where decode sides meet this instance while it is a prefill instance. SGLang
    cannot turn an engine that splits the stages into a mixed one: only the embedded engine has all `roles`. A
    `session` that is passed in is shared and not closed by `close`; it must not limit the number of connections.
    """

    tells_progress = True

    def __init__(
        self,
        name: str,
        url: str,
        bootstrap_host: str,
        bootstrap_port: int,
        session: aiohttp.ClientSession | None = None,
        roles: frozenset[Role] = SPLIT_ROLES,
    ) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._bootstrap_host = bootstrap_host
        self._bootstrap_port = bootstrap_port
        self._roles = roles
        self._session = session
        self._owns_session = session is None
        self._closed = False
        self._version: int | None = None
        """Of the weights, as far as this handle has been told."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def roles(self) -> frozenset[Role]:
        return self._roles

    @property
    def url(self) -> str:
        return self._url

    @property
    def bootstrap_host(self) -> str:
        return self._bootstrap_host

    @property
    def bootstrap_port(self) -> int:
        return self._bootstrap_port

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        asked = f"/generate {request.rid}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        reader = _StreamReader(self._name, asked)
        try:
            body = _encode(_generate_body(request, self._version))
            headers = {**JSON_HEADERS, **dict(request.trace)}
            async with self._http().post(
                f"{self._url}/generate", data=body, headers=headers, timeout=timeout
            ) as response:
                try:
                    if response.status != 200:
                        raise _refusal(self._name, asked, response.status, await response.text())
                    messages = _messages(response.content)
                    async for message in messages:
                        chunk = reader.read(message)
                        if chunk is not None and chunk.finish is not None:
                            await _exhaust(messages)
                            yield chunk
                            return
                        if chunk is not None:
                            yield chunk
                finally:
                    if not response.content.at_eof():
                        # Cancels the leg; releasing the connection would leave it running.
                        response.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreached(asked, error) from error
        raise EngineGone(f"engine {self._name}: asked {asked}; the stream broke off after {reader.seen} tokens")

    async def abort(self, rid: str | None = None) -> None:
        body = {"abort_all": True} if rid is None else {"rid": rid + RID_END}
        await self._post("/abort_request", body, CONTROL_SECONDS)

    async def load(self) -> Load:
        answer = await self._get("/v1/loads")
        try:
            return _parse_load(answer)
        except (KeyError, TypeError, ValueError) as error:
            raise self._unreadable("/v1/loads", answer) from error

    async def info(self) -> EngineInfo:
        answer = await self._get("/model_info")
        try:
            info = EngineInfo(
                role=_parse_role(answer["disaggregation_mode"]),
                weights_version=_parse_version(answer["weight_version"]),
                model_path=answer["model_path"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise self._unreadable("/model_info", answer) from error
        self._version = info.weights_version
        return info

    async def switch_role(self, role: Role) -> None:
        """Also raises `EngineError` when the engine had that role already: the caller's picture of it was wrong."""
        if role not in self._roles:
            raise EngineError(
                f"engine {self._name}: asked to become {role}; without a restart it can only be "
                f"{' or '.join(sorted(self._roles))}"
            )
        # SGLang wants to know the memory for decode CUDA graphs before it captures any; 0 lets it capture to fit.
        body = {"new_role": _role_name(role), "decode_cuda_graph_memory_gb": 0}
        asked = f"/pd_role_switch {body['new_role']}"
        status, text = await self._ask("POST", "/pd_role_switch", body, SWITCH_SECONDS)
        answer = _parse_object(text)
        if status != 200 or not answer.get("success"):
            message = str(answer.get("message", ""))
            busy = "not idle" in message or "in progress" in message
            raise (EngineBusy if busy else EngineError)(_sentence(self._name, asked, status, text))
        if answer.get("old_role") == body["new_role"]:
            raise EngineError(f"engine {self._name}: asked {asked}; it had that role already, nothing was switched")

    async def update_weights(self, path: str, version: int) -> None:
        body = {
            "model_path": path,
            "weight_version": str(version),
            "abort_all_requests": True,
            "flush_cache": True,
        }
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ABORT_SECONDS
        status, text = await self._ask("POST", "/update_weights_from_disk", body, UPDATE_SECONDS)
        # SGLang may load the weights before the last request that it aborts has ended, and then keeps the KV of the old ones.
        while status != 200 and "requests are still running" in text and loop.time() < deadline:
            await asyncio.sleep(ABORT_POLL_SECONDS)
            status, text = await self._ask("POST", "/update_weights_from_disk", body, UPDATE_SECONDS)
        if status != 200 or not _parse_object(text).get("success"):
            asked = f"/update_weights_from_disk {path} as version {version}"
            raise EngineError(_sentence(self._name, asked, status, text))
        self._version = version

    async def healthy(self) -> bool:
        try:
            status, _ = await self._ask("GET", "/health", None, CONNECT_SECONDS)
        except EngineGone:
            return False
        return status == 200

    async def close(self) -> None:
        self._closed = True
        if self._session is not None and self._owns_session:
            session, self._session = self._session, None
            await session.close()

    def _http(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineGone(f"engine {self._name}: its handle was closed; another one may have taken its place")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> tuple[int, str]:
        """Raises `EngineGone`, or `Shortage` where we could not even ask for so long."""
        now = asyncio.get_running_loop().time
        deadline = now() + seconds
        pause, longest = SHORTAGE_PAUSES
        while True:
            try:
                return await self._ask_once(method, path, body, deadline - now())
            except Shortage:
                if now() + pause >= deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _ask_once(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> tuple[int, str]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
        try:
            async with self._http().request(method, self._url + path, json=body, timeout=timeout) as response:
                return response.status, await response.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreached(path, error) from error

    def _unreached(self, asked: str, error: Exception) -> EngineError:
        if isinstance(error, OSError) and error.errno in OUR_SHORTAGES:
            return Shortage(f"engine {self._name}: asked {asked}; this process cannot connect now: {error!r}")
        return EngineGone(f"engine {self._name}: asked {asked}; connection failed: {error!r}")

    async def _post(self, path: str, body: dict[str, Any], seconds: float) -> None:
        status, text = await self._ask("POST", path, body, seconds)
        if status != 200:
            raise _refusal(self._name, path, status, text)

    async def _get(self, path: str) -> dict[str, Any]:
        status, text = await self._ask("GET", path, None, CONTROL_SECONDS)
        if status != 200:
            raise _refusal(self._name, path, status, text)
        return _parse_object(text)

    def _unreadable(self, asked: str, answer: dict[str, Any]) -> EngineError:
        return EngineError(_sentence(self._name, asked, 200, json.dumps(answer)))


class _Finish(msgspec.Struct):
    type: FinishReason
    status_code: int | None = None
    message: Any = None


class _Meta(msgspec.Struct):
    weight_version: str
    finish_reason: _Finish | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    output_token_logprobs: list[tuple[float, int, Any]] | None = None
    """(log-probability, id, text) of each token."""


class _Answer(msgspec.Struct):
    """What is read of a message of a stream; the rest of it is skipped unread."""

    error: Any = None
    output_ids: list[int] = []
    meta_info: _Meta | None = None


_encode = msgspec.json.Encoder().encode
_decode_answer = msgspec.json.Decoder(_Answer).decode


class _StreamReader:
    """Turns the messages of one stream into chunks of new tokens; remembers how many tokens it has seen."""

    def __init__(self, engine: str, asked: str) -> None:
        self._engine = engine
        self._asked = asked
        self.seen = 0

    def read(self, message: bytes) -> Chunk | None:
        """None for a message without news: no new token, not the last."""
        if message == b"[DONE]":
            return None
        try:
            answer = _decode_answer(message)
            if answer.error is not None:
                raise self._failure(answer.error)
            if answer.meta_info is None:
                raise ValueError("it has no meta_info")
            chunk = self._chunk(answer.output_ids, answer.meta_info)
        except ValueError as error:
            raise EngineError(_sentence(self._engine, self._asked, 200, message.decode(errors="replace"))) from error
        self.seen += len(chunk.token_ids)
        return chunk if chunk.token_ids or chunk.finish is not None else None

    def _chunk(self, ids: list[int], meta: _Meta) -> Chunk:
        total = len(ids) if meta.completion_tokens is None else meta.completion_tokens
        fresh = _fresh(ids, self.seen, total)
        logprobs = _fresh(meta.output_token_logprobs or (), self.seen, total)
        if len(fresh) != len(logprobs):
            raise ValueError(f"{len(fresh)} new tokens came with {len(logprobs)} log-probabilities")
        return Chunk(
            token_ids=tuple(fresh),
            logprobs=tuple(entry[0] for entry in logprobs),
            weights_version=_parse_version(meta.weight_version),
            cached_tokens=meta.cached_tokens,
            finish=None if meta.finish_reason is None else self._finish(meta.finish_reason),
        )

    def _finish(self, reason: _Finish) -> FinishReason:
        finish, status = reason.type, reason.status_code
        if finish is FinishReason.ABORT and status is not None and status < 500:
            raise EngineError(_sentence(self._engine, self._asked, status, str(reason.message)))
        if finish is FinishReason.ABORT and status == 503 and self.seen == 0:
            raise EngineBusy(_sentence(self._engine, self._asked, status, str(reason.message)))
        return finish

    def _failure(self, error: Any) -> EngineError:
        status = error.get("code", 500) if isinstance(error, dict) else 500
        return _refusal(self._engine, self._asked, status, json.dumps(error))


def _fresh(items: Sequence[Item], seen: int, total: int) -> Sequence[Item]:
    """What is new in `items`, of which `seen` are known, when `total` have been generated so far.

    By default SGLang repeats the whole output in every message; with incremental streaming it sends the news only, except
    in the message of an abort. `items` may run ahead of `total`, which is taken a moment earlier.
    """
    if len(items) >= total:
        return items[seen:]
    return items[len(items) - max(0, total - seen) :]


async def _messages(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The payloads of a stream of server-sent events. A line has no length limit: cumulative output grows long."""
    buffer = b""
    async for piece in content.iter_any():
        *events, buffer = (buffer + piece).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event[6:]


async def _exhaust(messages: AsyncIterator[bytes]) -> None:
    """Read the end mark too, so that the connection can be used again. All that matters has been read already."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(END_MARK_SECONDS):
            async for _ in messages:
                pass


def _generate_body(request: GenerateRequest, version: int | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "rid": request.rid + RID_END,
        "input_ids": request.input_ids,
        "sampling_params": _sampling_body(request.sampling),
        "stream": True,
        "return_logprob": True,
    }
    if version is not None:
        # SGLang keeps KV of different keys apart, in its own cache and in the storage behind it. This one is never newer than
        # the weights that compute: KV that older weights wrote is not found under it.
        body["extra_key"] = f"weights-{version}"
    if request.bootstrap is not None:
        body["bootstrap_host"] = request.bootstrap.host
        body["bootstrap_port"] = request.bootstrap.port
        body["bootstrap_room"] = request.bootstrap.room
    return body


def _sampling_body(sampling: SamplingParams) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": sampling.stop_token_ids,
        # Unasked, SGLang also stops at the tokenizer's end token; told to ignore that, it ignores stop_token_ids too.
        "ignore_eos": not sampling.stop_token_ids,
    }
    if sampling.seed is not None:
        body["sampling_seed"] = sampling.seed
    return body


def _parse_load(answer: dict[str, Any]) -> Load:
    """Sum over the data-parallel ranks. SGLang's `num_waiting_reqs` leaves out prefills whose KV is still being sent."""
    ranks = answer["loads"]
    waiting = sum(rank["num_waiting_reqs"] for rank in ranks)
    waiting += sum((rank.get("disaggregation") or {}).get("prefill_inflight_queue_reqs", 0) for rank in ranks)
    waiting += sum((rank.get("queues") or {}).get(queue, 0) for rank in ranks for queue in ("grammar", "paused"))
    return Load(
        running=sum(rank["num_running_reqs"] for rank in ranks),
        waiting=waiting,
        used_tokens=sum(rank["num_used_tokens"] for rank in ranks),
        max_tokens=sum(rank["max_total_num_tokens"] for rank in ranks),
        # Of the rank that is behind: one that hangs holds up all.
        mark=min((rank["timestamp"] for rank in ranks), default=None) if all("timestamp" in r for r in ranks) else None,
    )


def _role_name(role: Role) -> str:
    return "null" if role is Role.MIXED else role.value


def _parse_role(name: str) -> Role:
    return Role.MIXED if name == "null" else Role(name)


def _parse_version(text: str) -> int:
    """SGLang calls the weights that it started with "default"."""
    return 0 if text == "default" else int(text)


def _parse_object(text: str) -> dict[str, Any]:
    """An answer that is not a JSON object carries nothing that a caller asks for."""
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _refusal(engine: str, asked: str, status: int, text: str) -> EngineError:
    return (EngineBusy if status == 503 else EngineError)(_sentence(engine, asked, status, text))


def _sentence(engine: str, asked: str, status: int, text: str) -> str:
    return f"engine {engine}: asked {asked}; answered {status}: {text[:ANSWER_EXCERPT]}"
