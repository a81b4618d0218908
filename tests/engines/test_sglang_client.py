"""The client against literal answers of SGLang 0.5.23: what its tokenizer manager and HTTP server send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from prorsa.engines.protocol import (
    Bootstrap,
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
)
from prorsa.engines.sglang import SGLangEngine

REQUEST = GenerateRequest("r1", (5, 6, 7), SamplingParams(max_new_tokens=8, temperature=0.0, stop_token_ids=(2,)))


class FakeSGLang:
    """Answers with canned payloads and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.traces: list[dict[str, str]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.events: list[str] = []
        self.hang = False
        self.disconnected = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path, body))
        self.traces.append({name: value for name, value in request.headers.items() if name.startswith("trace")})
        if request.path == "/generate" and self.events:
            return await self._stream(request)
        status, answer = self.answers.get(request.path, (404, {"error": "unknown"}))
        return web.json_response(answer, status=status)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self.events:
            # Cut in the middle, so that an event reaches the client in two pieces.
            data = f"data: {event}\n\n".encode()
            await response.write(data[:9])
            await asyncio.sleep(0.001)
            await response.write(data[9:])
        if self.hang:
            try:
                await asyncio.sleep(30)
            finally:
                self.disconnected.set()
        return response


@asynccontextmanager
async def serving(fake: FakeSGLang) -> AsyncIterator[SGLangEngine]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    engine = SGLangEngine("e0", f"http://127.0.0.1:{runner.addresses[0][1]}", "10.0.0.1", 8998)
    try:
        yield engine
    finally:
        await engine.close()
        await runner.cleanup()


def with_fake(test: Callable[[FakeSGLang, SGLangEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        fake = FakeSGLang()
        async with serving(fake) as engine, asyncio.timeout(20):
            await test(fake, engine)

    asyncio.run(main())


async def collect(engine: SGLangEngine, request: GenerateRequest = REQUEST) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def message(ids: list[int], logprobs: list[list[Any]], finish: Any = None, **meta: Any) -> str:
    info = {
        "id": "r1|",
        "finish_reason": finish,
        "prompt_tokens": 3,
        "weight_version": "7",
        "num_retractions": 0,
        "output_token_logprobs": logprobs,
        "output_token_logprobs_length": len(logprobs),
        "completion_tokens": len(ids),
        "cached_tokens": 2,
        "e2e_latency": 0.1,
        **meta,
    }
    return json.dumps({"text": "", "output_ids": ids, "meta_info": info})


LOGPROBS = [[-0.5, 11, None], [-0.25, 12, None], [-1.0, 2, None]]
CUMULATIVE = [
    message([11], LOGPROBS[:1]),
    # The list of a cumulative message may have grown past the count that was taken before.
    message([11, 12], LOGPROBS[:2], completion_tokens=1),
    message([11, 12], LOGPROBS[:2]),
    message([11, 12, 2], LOGPROBS, {"type": "stop", "matched": 2}),
    "[DONE]",
]
INCREMENTAL = [
    message([11], LOGPROBS[:1]),
    message([12, 2], LOGPROBS[1:], {"type": "stop", "matched": 2}, completion_tokens=3, output_token_logprobs_length=3),
    "[DONE]",
]


@pytest.mark.parametrize("events", [CUMULATIVE, INCREMENTAL], ids=["cumulative", "incremental"])
def test_every_token_comes_once(events: list[str]) -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        fake.events = events
        chunks = await collect(engine)
        assert [token for chunk in chunks for token in chunk.token_ids] == [11, 12, 2]
        assert [logprob for chunk in chunks for logprob in chunk.logprobs] == [-0.5, -0.25, -1.0]
        assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].finish is FinishReason.STOP
        assert {(chunk.weights_version, chunk.cached_tokens) for chunk in chunks} == {(7, 2)}

    with_fake(test)


def test_the_trace_of_a_request_goes_with_it() -> None:
    trace = (("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("tracestate", "vendor=1"))

    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        fake.events = CUMULATIVE
        await collect(engine, replace(REQUEST, trace=trace))
        await collect(engine)
        assert fake.traces == [dict(trace), {}]

    with_fake(test)


@pytest.mark.parametrize(
    ("ids", "logprobs"), [([11, 12], LOGPROBS[:2]), ([12], LOGPROBS[:2])], ids=["cumulative", "incremental"]
)
def test_an_abort_keeps_the_tokens_so_far(ids: list[int], logprobs: list[list[Any]]) -> None:
    """With incremental streaming SGLang repeats the last token, and every log-probability, in the message of an abort."""

    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        abort = {"type": "abort", "message": "Abort in waiting queue"}
        fake.events = [
            message([11, 12], LOGPROBS[:2]),
            message(ids, logprobs, abort, completion_tokens=2),
            "[DONE]",
        ]
        chunks = await collect(engine)
        assert [(chunk.token_ids, chunk.finish) for chunk in chunks] == [((11, 12), None), ((), FinishReason.ABORT)]

    with_fake(test)


def test_an_abort_in_the_queue_has_no_tokens() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        meta = {"id": "r1|", "finish_reason": {"type": "abort", "message": "m"}, "weight_version": "default"}
        fake.events = [json.dumps({"text": "", "output_ids": [], "meta_info": {**meta, "completion_tokens": 0}})]
        assert await collect(engine) == [Chunk((), (), 0, 0, FinishReason.ABORT)]

    with_fake(test)


def test_what_is_asked() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        fake.events = CUMULATIVE
        sampling = SamplingParams(max_new_tokens=4, temperature=0.5, top_p=0.9, top_k=3, seed=42)
        await collect(engine, GenerateRequest("t/1", (1, 2), sampling, Bootstrap("10.0.0.9", 8998, 77)))
        assert fake.asked == [
            (
                "/generate",
                {
                    "rid": "t/1|",
                    "input_ids": [1, 2],
                    "sampling_params": {
                        "max_new_tokens": 4,
                        "temperature": 0.5,
                        "top_p": 0.9,
                        "top_k": 3,
                        "stop_token_ids": [],
                        "ignore_eos": True,
                        "sampling_seed": 42,
                    },
                    "stream": True,
                    "return_logprob": True,
                    "bootstrap_host": "10.0.0.9",
                    "bootstrap_port": 8998,
                    "bootstrap_room": 77,
                },
            )
        ]

    with_fake(test)


def test_no_abort_reaches_a_request_whose_rid_only_starts_the_same() -> None:
    """SGLang aborts by `rid.startswith`."""

    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        fake.events, fake.answers = CUMULATIVE, {"/abort_request": (200, None)}
        await collect(engine, GenerateRequest("t1", (1,), REQUEST.sampling))
        await collect(engine, GenerateRequest("t12", (1,), REQUEST.sampling))
        await engine.abort("t1")
        await engine.abort()
        running = [body["rid"] for path, body in fake.asked if path == "/generate"]
        one, everything = [body for path, body in fake.asked if path == "/abort_request"]
        assert [rid.startswith(one["rid"]) for rid in running] == [True, False]
        assert everything == {"abort_all": True}

    with_fake(test)


def test_a_full_queue_is_busy() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        finish = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
        fake.events = [message([], [], finish)]
        with pytest.raises(EngineBusy, match=r"engine e0: asked /generate r1; answered 503: The request queue is full"):
            await collect(engine)
        fake.events, fake.answers = [], {"/generate": (503, {"error": {"message": "queue"}})}
        with pytest.raises(EngineBusy):
            await collect(engine)

    with_fake(test)


def test_a_failed_transfer_is_an_abort() -> None:
    """A decode whose prefill died ends with status 500: the request can be resent."""

    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        finish = {"type": "abort", "message": "KVTransferError", "status_code": 500, "err_type": "InternalServerError"}
        fake.events = [message([], [], finish)]
        assert (await collect(engine))[-1].finish is FinishReason.ABORT

    with_fake(test)


def test_a_refused_request_is_an_error_with_the_answer() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        error = {"message": "input too long", "type": "invalid_request_error", "code": 400, "retryable": False}
        fake.events = [json.dumps({"error": error}), "[DONE]"]
        with pytest.raises(EngineError, match=r"answered 400: .*input too long"):
            await collect(engine)

    with_fake(test)


def test_a_stream_that_breaks_off_is_gone() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        fake.events = CUMULATIVE[:2]
        stream = engine.generate(REQUEST)
        assert [(await anext(stream)).token_ids for _ in range(2)] == [(11,), (12,)]
        with pytest.raises(EngineGone, match="broke off after 2 tokens"):
            await anext(stream)

    with_fake(test)


def test_closing_a_stream_disconnects() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        fake.events, fake.hang = CUMULATIVE[:1], True
        stream = engine.generate(REQUEST)
        assert (await anext(stream)).token_ids == (11,)
        await stream.aclose()
        async with asyncio.timeout(5):
            await fake.disconnected.wait()

    with_fake(test)


def test_nothing_listening_is_gone() -> None:
    async def main() -> None:
        engine = SGLangEngine("e9", "http://127.0.0.1:9", "127.0.0.1", 0)
        with pytest.raises(EngineGone, match="e9"):
            await collect(engine)
        with pytest.raises(EngineGone, match="e9"):
            await engine.load()
        assert not await engine.healthy()
        await engine.close()

    asyncio.run(main())


def test_a_handle_that_was_closed_is_gone_also_for_who_asks_just_then() -> None:
    """A probe may ask an engine while a restart puts another one in its place."""

    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        fake.answers["/health"] = (200, {})
        assert await engine.healthy()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        assert not await engine.healthy()
        with pytest.raises(EngineGone, match="its handle was closed"):
            await engine.load()
        await closing

    with_fake(test)


def test_load_counts_everything_that_was_accepted() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        rank = {
            "dp_rank": 0,
            "num_running_reqs": 3,
            "num_waiting_reqs": 4,
            "num_used_tokens": 500,
            "num_total_tokens": 900,
            "max_total_num_tokens": 8192,
            "max_running_requests": 32,
            "disaggregation": {
                "mode": "prefill",
                "prefill_bootstrap_queue_reqs": 1,
                "prefill_inflight_queue_reqs": 2,
                "decode_prealloc_queue_reqs": 0,
                "decode_transfer_queue_reqs": 0,
                "decode_retracted_queue_reqs": 0,
                "kv_transfer_speed_gb_s": 0.0,
                "kv_transfer_latency_ms": 0.0,
            },
            "queues": {"waiting": 3, "grammar": 1, "paused": 5, "retracted": 0, "prealloc_ready": 0},
        }
        fake.answers["/v1/loads"] = (200, {"timestamp": "t", "version": "0.5.23", "loads": [rank, rank]})
        # 4 waiting (bootstrap included) + 2 being sent + 1 in grammar + 5 paused, on each of two ranks.
        assert await engine.load() == Load(running=6, waiting=24, used_tokens=1000, max_tokens=16384)

    with_fake(test)


def test_info() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        answer = {"model_path": "/m", "weight_version": "default", "disaggregation_mode": "null"}
        fake.answers["/model_info"] = (200, answer)
        assert await engine.info() == EngineInfo(Role.MIXED, 0, "/m")
        fake.answers["/model_info"] = (200, {**answer, "weight_version": "12", "disaggregation_mode": "decode"})
        assert await engine.info() == EngineInfo(Role.DECODE, 12, "/m")
        fake.answers["/model_info"] = (200, {"model_path": "/m"})
        with pytest.raises(EngineError, match="/model_info"):
            await engine.info()

    with_fake(test)


def switch_answer(success: bool, message: str, old: str = "prefill", new: str = "decode") -> dict[str, Any]:
    return {"success": success, "message": message, "old_role": old, "new_role": new, "safe_to_restore": False}


def test_an_engine_that_splits_the_stages_refuses_to_become_mixed_and_is_not_even_asked() -> None:
    async def check(fake: FakeSGLang, engine: SGLangEngine) -> None:
        with pytest.raises(EngineError, match="asked to become mixed; without a restart it can only be decode or"):
            await engine.switch_role(Role.MIXED)
        assert fake.asked == []

    with_fake(check)


def test_switching_roles() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        fake.answers["/pd_role_switch"] = (200, switch_answer(True, "ok"))
        await engine.switch_role(Role.DECODE)
        assert fake.asked == [("/pd_role_switch", {"new_role": "decode", "decode_cuda_graph_memory_gb": 0})]

        idle = "instance is not idle; drain all requests before switching"
        fake.answers["/pd_role_switch"] = (400, switch_answer(False, idle))
        with pytest.raises(EngineBusy, match="not idle"):
            await engine.switch_role(Role.DECODE)

        broken = "role switch failed; instance unhealthy, restart required: x"
        fake.answers["/pd_role_switch"] = (400, switch_answer(False, broken))
        with pytest.raises(EngineError, match="restart required") as raised:
            await engine.switch_role(Role.DECODE)
        assert not isinstance(raised.value, EngineBusy)

        # SGLang calls a switch to the present role a success.
        fake.answers["/pd_role_switch"] = (200, switch_answer(True, "ok", old="decode"))
        with pytest.raises(EngineError, match="already"):
            await engine.switch_role(Role.DECODE)

    with_fake(test)


def test_updating_weights() -> None:
    async def test(fake: FakeSGLang, engine: SGLangEngine) -> None:
        fake.answers["/update_weights_from_disk"] = (200, {"success": True, "message": "ok", "num_paused_requests": 0})
        await engine.update_weights("/ckpt", 3)
        body = {"model_path": "/ckpt", "weight_version": "3", "abort_all_requests": True, "flush_cache": True}
        assert fake.asked == [("/update_weights_from_disk", body)]
        fake.answers["/update_weights_from_disk"] = (400, {"success": False, "message": "no such file"})
        with pytest.raises(EngineError, match="no such file"):
            await engine.update_weights("/ckpt", 3)

    with_fake(test)
