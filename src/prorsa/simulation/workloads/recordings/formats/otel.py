"""OpenTelemetry: spans of generative AI in OTLP's JSON, as a collector's file exporter writes them.

A trajectory is a conversation (`gen_ai.conversation.id`), or else what one agent's span holds, or else a trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import Json, Wrong, at, located
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats import chats
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.model import Trajectory, Turn, gap

MODEL = ("chat", "text_completion", "generate_content")
TOOL = "execute_tool"
AGENT = "invoke_agent"
OPERATION = "gen_ai.operation.name"
PROMPT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
CACHED = ("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens")
FAILED = 2
"""A span's status code."""
NANO = 1e-9


@dataclass(frozen=True, slots=True)
class _Span:
    where: str
    id: str
    parent: str
    trace: str
    start: float
    end: float
    attributes: dict[str, Any]
    failed: bool

    @property
    def operation(self) -> str:
        said = str(self.attributes.get(OPERATION, ""))
        # Older instrumentations do not say the operation, but count its tokens.
        return said or (MODEL[0] if any(key in self.attributes for key in PROMPT) else "")


def recognises(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("resourceSpans"), list)


def read(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    spans: dict[str, _Span] = {}
    for where, values in records:
        with located(where):
            for span in _spans(where, values):
                spans[span.id] = span
    calls: defaultdict[str, list[_Span]] = defaultdict(list)
    for span in spans.values():
        if span.operation in (*MODEL, TOOL):
            calls[_conversation(span, spans)].append(span)
    for name, ours in calls.items():
        ours.sort(key=lambda span: span.start)
        turns = list(_turns(ours))
        yield Trajectory(ours[0].where, name, turns, task="traced-agent", start=ours[0].start)


def _spans(where: str, values: Json) -> Iterator[_Span]:
    for resource in fields.listed(values, "resourceSpans"):
        for scope in fields.listed(resource, "scopeSpans"):
            for span in fields.listed(scope, "spans"):
                name = fields.maybe_name(span, "spanId")
                if name is None:
                    raise Wrong("spanId is missing; give each span its own")
                with located(f"span {name}"):
                    start, end = (fields.time(span, f"{edge}TimeUnixNano", NANO) for edge in ("start", "end"))
                    parent, trace = (fields.maybe_name(span, key) or "" for key in ("parentSpanId", "traceId"))
                    failed = at(span, "status.code") in (FAILED, "STATUS_CODE_ERROR")
                    yield _Span(f"{where}, span {name}", name, parent, trace, start, end, _attributes(span), failed)


def _attributes(span: Json) -> dict[str, Any]:
    """Key -> its value; of a list or a map, nothing."""
    found: dict[str, Any] = {}
    for attribute in fields.listed(span, "attributes"):
        value = attribute.get("value")
        if isinstance(value, dict):
            kinds = (kind for kind in ("stringValue", "intValue", "doubleValue", "boolValue") if kind in value)
            found[str(attribute.get("key"))] = next((value[kind] for kind in kinds), None)
    return found


def _conversation(span: _Span, spans: Mapping[str, _Span]) -> str:
    seen: set[str] = set()
    above: _Span | None = span
    while above is not None and above.id not in seen:
        seen.add(above.id)
        said = above.attributes.get("gen_ai.conversation.id")
        if said or above.operation == AGENT:
            return str(said or above.id)[: fields.MOST_NAME]
        above = spans.get(above.parent)
    return span.trace or span.id


def _turns(spans: list[_Span]) -> Iterator[Turn]:
    """Of the calls of one conversation, in the order of their starts."""
    turns: list[Turn] = []
    models: list[_Span] = []
    tools: defaultdict[int, list[_Span]] = defaultdict(list)
    for span in spans:
        if span.operation == TOOL:
            tools[len(models)].append(span)
        elif (turn := _turn(span)) is not None:
            turns.append(turn)
            models.append(span)
    for index, (before, after) in enumerate(pairwise(models)):
        turns[index].tool_s = gap(before.end, after.start)
    for index, turn in enumerate(turns, start=1):
        named = tools[index][0].attributes.get("gen_ai.tool.name") if tools[index] else None
        turn.tool = None if named is None else str(named)[: fields.MOST_NAME]
    chats.only_where_shorter(turns)
    return iter(turns)


def _turn(span: _Span) -> Turn | None:
    """None of one that failed and says no length."""
    counts = [_count(span, keys) for keys in (PROMPT, OUTPUT, CACHED)]
    prompt, output, kept = counts
    if prompt is None or output is None:
        if span.failed:
            return None
        raise Wrong(f"{span.where}: {PROMPT[0]} or {OUTPUT[0]} is missing; a span of {span.operation} must have both")
    if prompt < 1:
        raise Wrong(f"{span.where}: {PROMPT[0]}=0: a prompt has a token at least; mend the span or take it out")
    return Turn(prompt, output, kept, llm_s=gap(span.start, span.end))


def _count(span: _Span, keys: tuple[str, ...]) -> int | None:
    key = next((key for key in keys if span.attributes.get(key) is not None), None)
    if key is None:
        return None
    with located(span.where):
        # The dots of a name are no path here.
        return fields.tokens({"value": span.attributes[key]}, "value", named=key)


FORMAT = Format("otel", "OpenTelemetry's generative AI spans (OTLP JSON)", recognises, read)
