"""Traces of requests, as an exporter and as a collector gets them. Their times are held against the test's own clock."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from gateway_bench import TOKENIZER, babble, bench, saying, until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from prorsa.config import ConfigError
from prorsa.gateway import serve
from prorsa.gateway.traces import Traces, traced

CHAT = "/v1/chat/completions"
QUESTION = {"role": "user", "content": "What is 1 plus 2?"}
BODY = {"messages": [QUESTION]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Exported:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = Traces(provider)

    @property
    def requests(self) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith("POST")]

    def below(self, request: ReadableSpan) -> list[ReadableSpan]:
        spans = self._exporter.get_finished_spans()
        return [span for span in spans if span.parent is not None and span.parent.span_id == request.context.span_id]


def stages(spans: list[ReadableSpan]) -> list[tuple[str, int, str | None]]:
    return [(span.name, span.attributes["prorsa.attempt"], span.attributes.get("prorsa.instance")) for span in spans]  # type: ignore[index, union-attr, misc]


def test_a_request_is_a_span_with_its_stages_below() -> None:
    async def main() -> None:
        exported = Exported()
        async with bench(saying("It is 3."), token_s=0.01, traces=exported.traces) as gateway:
            began = time.time_ns()
            answer = await gateway.chat([QUESTION], name="a/1")
            ended = time.time_ns()
            await until(lambda: exported.requests)
            await gateway.chat([QUESTION, answer["choices"][0]["message"], QUESTION], name="a/1")
            await until(lambda: len(exported.requests) == 2)
        first, second = exported.requests
        output = len(TOKENIZER.encode("It is 3.")) + 1
        assert first.name == "POST /v1/chat/completions"
        assert dict(first.attributes or {}) == {
            "http.request.method": "POST",
            "http.route": CHAT,
            "http.response.status_code": 200,
            "prorsa.trajectory": "a/1",
            "prorsa.turn": 0,
            "prorsa.attempts": 1,
            "gen_ai.usage.input_tokens": len(TOKENIZER.render([QUESTION])),
            "gen_ai.usage.cache_read.input_tokens": 3,
            "gen_ai.usage.output_tokens": output,
            "gen_ai.response.finish_reasons": ("stop",),
        }
        assert first.parent is None
        below = exported.below(first)
        assert stages(below) == [("queue", 1, None), ("prefill", 1, "e0"), ("decode", 1, "e1")]
        queue, prefill, decode = below
        moments = [began, first.start_time, queue.start_time, queue.end_time, prefill.end_time, decode.end_time]
        moments += [first.end_time, ended + 10**9]
        assert moments == sorted(moments)  # type: ignore[type-var]
        assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)
        # Each token took 10 ms, the first of them in the prefill stage or in the decode stage.
        assert decode.end_time - decode.start_time >= (output - 1) * 9 * 10**6
        (event,) = first.events
        assert event.name == "first token"
        assert prefill.start_time < event.timestamp < decode.end_time
        assert (second.attributes or {})["prorsa.turn"] == 1
        assert second.context.trace_id != first.context.trace_id

    asyncio.run(main())


def test_a_resent_turn_has_the_stages_of_each_attempt() -> None:
    async def main() -> None:
        exported = Exported()
        async with bench(roles="PDD", token_s=0.01, traces=exported.traces) as gateway:
            asked = asyncio.create_task(gateway.chat([QUESTION], max_tokens=20))
            await until(lambda: gateway.control.status().output_tokens > 5)
            (used,) = [engine.name for engine in gateway.engines if engine.legs]
            status, _ = await gateway.post(
                f"/prorsa/engines/{used}/drain", {}, Authorization="Bearer an-admin-token-for-tests"
            )
            assert status == 200
            await asked
            await until(lambda: exported.requests)
            told = {one.trace for engine in gateway.engines for one in engine.requests}
        (request,) = exported.requests
        assert len(told) == 1, "all four legs belong to it"
        other = {"e1": "e2", "e2": "e1"}[used]
        assert stages(exported.below(request)) == [
            ("queue", 1, None),
            ("prefill", 1, "e0"),
            ("decode", 1, used),
            ("queue", 2, None),
            ("prefill", 2, "e0"),
            ("decode", 2, other),
        ]
        assert (request.attributes or {})["prorsa.attempts"] == 2
        assert (request.attributes or {})["gen_ai.usage.output_tokens"] == 20

    asyncio.run(main())


def test_a_traceparent_is_the_parent() -> None:
    async def main() -> None:
        exported = Exported()
        async with bench(traces=exported.traces) as gateway:
            await gateway.post(CHAT, BODY, traceparent=f"00-{TRACE}-{PARENT}-01")
            await gateway.post(CHAT, BODY, traceparent=f"00-{TRACE}-{PARENT}-00")
            await gateway.post(CHAT, BODY, traceparent="nonsense")
            await until(lambda: len(exported.requests) == 2)
        sampled, orphan = exported.requests  # the second client does not want to be traced
        assert f"{sampled.context.trace_id:032x}" == TRACE
        assert sampled.parent is not None
        assert f"{sampled.parent.span_id:016x}" == PARENT
        assert {span.context.trace_id for span in exported.below(sampled)} == {sampled.context.trace_id}
        assert orphan.parent is None

    asyncio.run(main())


def test_engines_are_told_of_the_request_s_span() -> None:
    async def main() -> None:
        exported = Exported()
        async with bench(saying("It is 3."), token_s=0.01, traces=exported.traces) as gateway:
            client = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
            await gateway.post(CHAT, BODY, **client)
            await gateway.post(CHAT, BODY)
            await gateway.post(CHAT, BODY, traceparent=f"00-{TRACE}-{PARENT}-00")
            await until(lambda: len(exported.requests) == 2)
            prefill, decode = ([dict(one.trace) for one in engine.requests] for engine in gateway.engines)
        assert prefill == decode, "both legs"
        (joined, own, unwanted), (first, second) = prefill, exported.requests
        assert joined == {
            "traceparent": f"00-{TRACE}-{first.context.span_id:016x}-01",
            "tracestate": "vendor=1",
        }
        _, trace, parent, flags = own["traceparent"].split("-")
        assert (trace, parent) == (f"{second.context.trace_id:032x}", f"{second.context.span_id:016x}")
        assert int(flags, 16) & 1, "sampled"
        _, trace, _, flags = unwanted["traceparent"].split("-")
        assert (trace, flags) == (TRACE, "00")

    asyncio.run(main())


def test_without_traces_engines_are_told_nothing() -> None:
    async def main() -> None:
        async with bench(saying("It is 3.")) as gateway:
            await gateway.post(CHAT, BODY, traceparent=f"00-{TRACE}-{PARENT}-01")
            assert [one.trace for engine in gateway.engines for one in engine.requests] == [(), ()]

    asyncio.run(main())


def test_refused_failed_and_abandoned_requests_are_spans_too() -> None:
    async def main() -> None:
        exported = Exported()
        async with bench(babble, token_s=0.02, traces=exported.traces, request_timeout=0.1) as gateway:
            await gateway.post(CHAT, {"messages": []})
            await until(lambda: len(exported.requests) == 1)
            status, _ = await gateway.post(CHAT, BODY | {"max_tokens": 50})
            assert status == 504
            await until(lambda: len(exported.requests) == 2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await gateway.post(CHAT, BODY | {"max_tokens": 50})
            await until(lambda: len(exported.requests) == 3)
            await gateway.get("/health")
        refused, late, abandoned = exported.requests
        assert [(span.attributes or {})["http.response.status_code"] for span in exported.requests] == [400, 504, 499]
        assert [span.status.status_code for span in exported.requests] == [
            StatusCode.UNSET,
            StatusCode.ERROR,
            StatusCode.ERROR,
        ]
        assert exported.below(refused) == []
        assert "gateway.request_timeout" in (late.status.description or "")
        assert abandoned.status.description == "its client is gone"
        assert [name for name, *_ in stages(exported.below(late))] == ["queue", "prefill", "decode"]
        assert "gen_ai.response.finish_reasons" not in (late.attributes or {})

    asyncio.run(main())


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.spans: list[Any] = []
        self.services: set[str] = set()

    async def take(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        told = ExportTraceServiceRequest.FromString(await request.read())
        for resource in told.resource_spans:
            self.services |= {
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(content_type="application/x-protobuf")


def test_a_collector_gets_the_spans() -> None:
    async def main() -> None:
        collector, app = Collector(), web.Application()
        app.router.add_post("/{path:.*}", collector.take)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with serve.tracing(f"http://{host}:{port}") as traces:
            assert traces is not None
            async with bench(saying("It is 3."), traces=traces) as gateway:
                await gateway.chat([QUESTION], name="a/1")
        await runner.cleanup()
        assert set(collector.paths) == {"/v1/traces"}
        assert collector.services == {"prorsa"}
        request = collector.spans[-1]
        assert [span.name for span in collector.spans] == ["queue", "prefill", "decode", f"POST {CHAT}"]
        assert {span.parent_span_id for span in collector.spans[:-1]} == {request.span_id}
        assert {one.key: one.value.string_value for one in request.attributes}["prorsa.trajectory"] == "a/1"

    asyncio.run(main())


def test_a_file_gets_a_line_a_span(tmp_path: Path) -> None:
    async def main() -> None:
        path = str(tmp_path / "traces.jsonl")
        async with serve.tracing(path) as traces, bench(saying("It is 3."), traces=traces) as gateway:
            await gateway.chat([QUESTION], name="a/1")

    asyncio.run(main())
    lines = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["queue", "prefill", "decode", f"POST {CHAT}"]
    assert lines[-1]["attributes"]["prorsa.trajectory"] == "a/1"


@pytest.mark.parametrize("where", ["grpc://127.0.0.1:4317", "/no/such/directory/traces.jsonl"])
def test_what_cannot_be_written_to_is_refused(where: str) -> None:
    async def main() -> None:
        async with traced(where):
            pass

    with pytest.raises(ConfigError, match=f"gateway.traces='{where}'"):
        asyncio.run(main())


def test_without_the_extra_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prorsa.gateway.traces", None)

    async def main() -> None:
        async with serve.tracing("traces.jsonl"):
            pass

    with pytest.raises(ConfigError, match=r"pip install 'prorsa\[otel\]'"):
        asyncio.run(main())
