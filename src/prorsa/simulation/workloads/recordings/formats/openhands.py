"""OpenHands: `output.jsonl` of its benchmarks, a run a line, and event streams, a run a file; of either version.

A turn is what one response of the model led to; events of the older version say which by `tool_call_metadata`, those of the
newer one by `llm_response_id`. Lengths are exact where the response's usage is recorded, else guessed from the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import MISSING, Json, at, located
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats import chats
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.model import Conversation, Message, Trajectory, gap

KINDS = ("SystemPromptEvent", "MessageEvent", "ActionEvent", "ObservationEvent")
SILENT = ("change_agent_state", "agent_state_changed", "null", "recall", "ConversationStateUpdateEvent")
"""Events that no model reads or writes."""


def recognises(record: Mapping[str, Any]) -> bool:
    history = record.get("history")
    if isinstance(history, list):
        return bool(history) and isinstance(history[0], dict) and _is_event(history[0])
    return _is_event(record)


def _is_event(event: Mapping[str, Any]) -> bool:
    if "kind" in event:
        return event["kind"] in KINDS and "source" in event
    return "source" in event and bool({"action", "observation"} & event.keys())


def read(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    stream: list[Record] = []
    for where, values in records:
        with located(where):
            if not isinstance(values.get("history"), list):
                stream.append(Record(where, values))
                continue
            events = [Record(f"event {index}", event) for index, event in enumerate(fields.listed(values, "history"))]
            name = fields.maybe_name(values, "instance_id") or source.stem
            yield _Run(source, _usages(values)).trajectory(where, name, events, _reward(values))
    if stream:
        yield _Run(source, {}).trajectory(stream[0].where, source.stem, stream, 0.0)


def _reward(values: Json) -> float:
    keys = ("report.resolved", "test_result.report.resolved", "test_result.resolved", "resolved")
    return next((found for key in keys if (found := fields.maybe_number(values, key)) is not None), 0.0)


def _usages(values: Json) -> dict[str, Json]:
    """Response id -> its usage."""
    usages = at(values, "metrics.token_usages")
    known = usages if isinstance(usages, list) else []
    return {str(usage["response_id"]): usage for usage in known if isinstance(usage, dict) and usage.get("response_id")}


class _Run:
    def __init__(self, source: Source, usages: dict[str, Json]) -> None:
        self._usages = usages
        self._conversation = Conversation(source.characters)
        self._exact: list[tuple[int, int, int | None] | None] = []
        """Of each turn, its recorded lengths."""
        self._response: str | None = None
        """That of the last turn, while nothing has answered it."""
        self._former: float | None = None
        self._ended: float | None = None
        """When the last event came, and the last of the model's."""
        self._start: float | None = None

    def trajectory(self, where: str, name: str, events: list[Record], reward: float) -> Trajectory:
        for place, event in events:
            with located(place):
                self._take(event)
        turns = self._conversation.turns
        chats.use_counts(turns, self._exact)
        return Trajectory(where, name, turns, task="coding-agent", start=self._start or 0.0, reward=reward)

    def _take(self, event: Json) -> None:
        self._usages |= _usages({"metrics": event.get("llm_metrics")})
        what = event.get("kind", event.get("action", event.get("observation")))
        if what in SILENT or what is None:
            return
        time = fields.maybe_time(event, "timestamp")
        self._start = time if self._start is None else self._start
        if event.get("source") == "agent" and _acts(event, what) and self._conversation.context:
            self._act(event, time)
        else:
            self._hear(event, time)

    def _act(self, event: Json, time: float | None) -> None:
        response = _response(event)
        if response is not None and response == self._response:
            # A further call of the same answer.
            return
        self._response = response
        turn = self._conversation.speak(Message("assistant", _text(event)))
        turn.tool, turn.llm_s = _tool(event), gap(self._former, time)
        usage = at(event, "tool_call_metadata.model_response.usage")
        self._exact.append(chats.measured(usage if usage is not MISSING else self._usages.get(response or "")))
        self._former = self._ended = time

    def _hear(self, event: Json, time: float | None) -> None:
        if self._conversation.turns:
            # Of several results the last one counts.
            self._conversation.turns[-1].tool_s = gap(self._ended, time)
        self._conversation.hear(Message("tool", _text(event)))
        self._former = time


def _acts(event: Json, what: Any) -> bool:
    """Whether an agent's event is the model's doing."""
    return (
        what in ("ActionEvent", "MessageEvent") if "kind" in event else "observation" not in event and what != "system"
    )


def _response(event: Json) -> str | None:
    """The response of the model that an event comes from."""
    key = "llm_response_id" if "kind" in event else "tool_call_metadata.model_response.id"
    return fields.maybe_name(event, key)


def _tool(event: Json) -> str:
    if "kind" in event:
        return fields.maybe_name(event, "tool_name") or "user"
    function = fields.maybe_name(event, "tool_call_metadata.function_name")
    action = function or fields.maybe_name(event, "action")
    return "user" if action in (None, "message") else action or "user"


def _text(event: Json) -> str:
    """What the model writes or reads of it."""
    new = ("system_prompt", "tools", "llm_message", "thought", "reasoning_content", "tool_call", "observation")
    parts = new if "kind" in event else ("args", "content")
    return "".join(fields.text(event.get(part)) for part in parts) or fields.text(event.get("message"))


FORMAT = Format("openhands", "OpenHands' output.jsonl and event streams", recognises, read)
