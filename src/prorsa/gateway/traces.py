"""OpenTelemetry traces of the generation endpoints: a span a request, and below it one for each stage of each attempt.

A request's span begins with it, and its engines are told of it; the stages are made when the request is over, out of what the
lifecycle recorded meanwhile. Needs the extra `otel`; imported only where `gateway.traces` is set. Names and attributes are in
docs/gateway.md.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, Flip, TurnRecord
from prorsa.config import ConfigError
from prorsa.engines.protocol import Role, TraceHeaders
from prorsa.gateway.turns import Running
from prorsa.lifecycle import State, Transition

SERVICE = "prorsa"
"""The name of the service, unless OTEL_SERVICE_NAME says another."""
OTLP_PATH = "/v1/traces"
STAGES = {State.READY: "queue", State.PREFILL: "prefill", State.DECODE: "decode"}


@dataclass(slots=True)
class Stage:
    """Times on the loop's clock."""

    state: State
    attempt: int
    """From 1."""
    instance: str | None
    start: float
    end: float | None = None
    """None while it lasts."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A request whose span has begun."""

    span: Span
    headers: TraceHeaders
    """By which engines make what they do for it part of its trace."""
    to_wall: _Wall


class Traces:
    """An `Observer` that keeps the stages of the turns in service, and makes the spans of requests."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("prorsa.gateway")
        self._propagator = TraceContextTextMapPropagator()
        self._stages: dict[tuple[str, int], list[Stage]] = {}
        """By trajectory and turn, until the turn's request ends."""

    def transition(self, transition: Transition) -> None:
        event = transition.event
        turn = event.trajectory, transition.turn
        if transition.before in STAGES and (stages := self._stages.get(turn)):
            stages[-1].end = event.time
        if transition.after in STAGES:
            stages = self._stages.setdefault(turn, [])
            attempt = sum(stage.state is State.READY for stage in stages) + (transition.after is State.READY)
            instance = getattr(event, "instance", None)
            stages.append(Stage(transition.after, attempt, instance, event.time))

    def decision(self, decision: Decision) -> None:
        """Not of a request."""

    def flip(self, flip: Flip) -> None:
        """Seen as the end of an attempt."""

    def turn(self, turn: TurnRecord) -> None:
        """Its request has it all."""

    def instance(self, time: float, name: str, role: Role, state: InstanceState) -> None:
        """Not of a request."""

    def begin(self, headers: Mapping[str, str], endpoint: str, began: float) -> Begun:
        """A request is here, since `began` on the loop's clock. `end` must follow."""
        to_wall = _Wall(asyncio.get_running_loop().time())
        span = self._tracer.start_span(
            f"POST {endpoint}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": "POST", "http.route": endpoint},
            start_time=to_wall(began),
        )
        told: dict[str, str] = {}
        self._propagator.inject(told, set_span_in_context(span))
        return Begun(span, tuple(told.items()), to_wall)

    def end(self, begun: Begun, status: int, running: Running | None) -> None:
        """The request is over; without `running` it was refused before it had a turn."""
        span, to_wall, now = begun.span, begun.to_wall, asyncio.get_running_loop().time()
        span.set_attribute("http.response.status_code", status)
        if running is not None:
            stages = self._stages.pop((running.trajectory, running.number), [])
            if span.is_recording():
                _describe(span, running, to_wall)
                self._add(span, stages, now, to_wall)
        failure = None if running is None else running.failure
        if failure is not None or status >= 500:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(to_wall(now))

    def _add(self, parent: Span, stages: list[Stage], now: float, to_wall: _Wall) -> None:
        context = set_span_in_context(parent)
        for stage in stages:
            attributes: dict[str, Any] = {"prorsa.attempt": stage.attempt}
            if stage.instance is not None:
                attributes["prorsa.instance"] = stage.instance
            start, end = to_wall(stage.start), to_wall(now if stage.end is None else stage.end)
            self._tracer.start_span(STAGES[stage.state], context, attributes=attributes, start_time=start).end(end)


class _Wall:
    """From the loop's clock to nanoseconds since 1970."""

    def __init__(self, now: float) -> None:
        self._offset = time.time_ns() - round(now * 1e9)

    def __call__(self, moment: float) -> int:
        return self._offset + round(moment * 1e9)


def _describe(span: Span, running: Running, to_wall: _Wall) -> None:
    output, result = running.output, running.result
    span.set_attributes(
        {
            "prorsa.trajectory": running.trajectory,
            "prorsa.turn": running.number,
            "gen_ai.usage.input_tokens": len(running.prompt_ids),
            "gen_ai.usage.output_tokens": len(output.ids),
        }
    )
    if output.first_at is not None:
        span.add_event("first token", timestamp=to_wall(output.first_at))
    if result is not None:
        span.set_attributes(
            {
                "gen_ai.usage.cache_read.input_tokens": result.cached_tokens,
                "gen_ai.response.finish_reasons": [result.finish.value],
                "prorsa.attempts": result.attempts,
            }
        )


@asynccontextmanager
async def traced(where: str) -> AsyncIterator[Traces]:
    """Traces that go to `where`, a file or the URL of a collector. Leaving it sends the last. Raises `ConfigError`."""
    async with AsyncExitStack() as stack:
        resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", SERVICE)})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(_exporter(where, stack)))
        # Not on the loop: a collector that is gone is waited for.
        stack.push_async_callback(asyncio.to_thread, provider.shutdown)
        yield Traces(provider)


def _exporter(where: str, stack: AsyncExitStack) -> SpanExporter:
    url = urlsplit(where)
    if url.scheme in ("http", "https"):
        return OTLPSpanExporter(url._replace(path=url.path.rstrip("/") or OTLP_PATH).geturl())
    if "://" in where:
        raise ConfigError(
            f"gateway.traces={where!r}: must be the http:// or https:// URL of an OTLP collector, or a file"
        )
    try:
        file = stack.enter_context(open(where, "a", encoding="utf-8"))  # noqa: SIM115
    except OSError as error:
        raise ConfigError(
            f"gateway.traces={where!r}: cannot be written ({error.strerror}); name a file that can"
        ) from error
    return ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
