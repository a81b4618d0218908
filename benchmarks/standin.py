"""Engines that compute nothing, behind SGLang's HTTP protocol: load for whatever stands in front of engines.

    python benchmarks/standin.py --engines 16 --prefill 4 --interval 0.1

One process with a port an engine: the first `--prefill` ones answer at once with one token, as prefill instances do, the
others stream a token every `--interval` seconds from the arrival of a request. All tokens are alike. `/generate` streams
what is new, as SGLang does under `--incremental-streaming-output`; `/v1/chat/completions` streams OpenAI's chunks. The ports
are printed as a line of JSON; the end of its input ends it. HTTP is as much of it as the peers of the benchmark need, and
written without a framework, so that the engines are the smallest part of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from functools import lru_cache
from typing import Any, cast

import uvloop

TOKEN, TEXT = 71, "h"
"""The one token, as id and as text; `gateway.py` holds it against its tokenizer."""
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END_OF_STREAM = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
ENOUGH = 1 << 30
"""KV-cache tokens."""


@lru_cache(maxsize=1 << 16)
def generated(index: int, last: bool, logprobs: bool) -> bytes:
    """The event of the token number `index`, as a chunk of HTTP."""
    meta: dict[str, Any] = {
        "id": "8f0e7c0d4b3a4f6c9d2e1a5b7c8d9e0f",
        "finish_reason": {"type": "length", "length": index + 1} if last else None,
        "prompt_tokens": 320,
        "weight_version": "default",
        "total_retractions": 0,
        "completion_tokens": index + 1,
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": 0.123456789,
    }
    if logprobs:
        meta |= {"input_token_logprobs": [], "output_token_logprobs": [[-0.6931471824645996, TOKEN, None]]}
    return event({"text": TEXT, "output_ids": [TOKEN], "meta_info": meta})


@lru_cache(maxsize=1 << 10)
def chatted(first: bool, last: bool) -> bytes:
    delta = {"role": "assistant" if first else None, "content": TEXT, "reasoning_content": None, "tool_calls": None}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": "length" if last else None}
    head = {"id": "8f0e7c0d4b3a4f6c9d2e1a5b7c8d9e0f", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event({**head, "choices": [choice], "usage": None})


def event(data: Any) -> bytes:
    written = b"data: " + json.dumps(data).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(written), written)


class Connection(asyncio.Protocol):
    """One client of one engine."""

    transport: asyncio.Transport

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.buffer = b""
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (end := self.buffer.find(b"\r\n\r\n")) >= 0:
            first, *lines = self.buffer[:end].decode().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body_end = end + 4 + int(headers.get("content-length", "0"))
            if len(self.buffer) < body_end:
                return
            body, self.buffer = self.buffer[end + 4 : body_end], self.buffer[body_end:]
            try:
                self.answer(first.split(" ")[1].partition("?")[0], body)
            except (LookupError, ValueError):
                # Such as the preface of HTTP/2, by which sglang-router tries what an engine speaks.
                self.transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                self.transport.close()
                return

    def answer(self, path: str, body: bytes) -> None:
        match path:
            case "/generate":
                asked = json.loads(body)
                logprobs = bool(asked.get("return_logprob"))
                self.stream(asked["sampling_params"]["max_new_tokens"], lambda i, last: generated(i, last, logprobs))
            case "/v1/chat/completions":
                asked = json.loads(body)
                count = asked.get("max_tokens") or asked["max_completion_tokens"]  # sglang-router writes the latter
                self.stream(count, lambda i, last: chatted(i == 0, last))
            case "/health" | "/abort_request":
                self.whole({})
            case "/v1/models":
                self.whole({"object": "list", "data": [{"id": "arithmetic", "object": "model", "owned_by": "sglang"}]})
            case "/v1/loads":
                load = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0}
                self.whole({"loads": [load | {"max_total_num_tokens": ENOUGH}]})
            case _:  # the several names of what an engine is
                info = {
                    "model_path": "m",
                    "served_model_name": "arithmetic",
                    "weight_version": "default",
                    "is_generation": True,
                }
                self.whole({**info, "disaggregation_mode": self.engine.mode, "tp_size": 1, "dp_size": 1})

    def whole(self, data: Any) -> None:
        written = json.dumps(data).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(written)}\r\n\r\n"
        self.transport.write(head.encode() + written)

    def stream(self, count: int, written: Any) -> None:
        if self.engine.mode == "prefill":
            self.transport.write(STREAM_HEAD + written(0, True) + END_OF_STREAM)
            return
        loop, interval = asyncio.get_running_loop(), self.engine.interval
        began = loop.time()

        def token(index: int) -> None:
            last = index == count - 1
            data = written(index, last)
            self.transport.write((STREAM_HEAD if index == 0 else b"") + data + (END_OF_STREAM if last else b""))
            self.timer = None if last else loop.call_at(began + (index + 2) * interval, token, index + 1)

        self.timer = loop.call_at(began + interval, token, 0)


class Engine:
    def __init__(self, mode: str, interval: float) -> None:
        self.mode = mode
        self.interval = interval

    async def listen(self) -> int:
        server = await asyncio.get_running_loop().create_server(lambda: Connection(self), "127.0.0.1", 0, backlog=4096)
        port: int = server.sockets[0].getsockname()[1]
        return port


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, required=True)
    parser.add_argument("--prefill", type=int, required=True, help="how many are prefill instances; 0: all are mixed")
    parser.add_argument("--interval", type=float, required=True, help="seconds from a token to the next")
    parsed = parser.parse_args()
    rest = "decode" if parsed.prefill else "null"
    modes = ["prefill"] * parsed.prefill + [rest] * (parsed.engines - parsed.prefill)
    print(json.dumps([await Engine(mode, parsed.interval).listen() for mode in modes]), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(main())
