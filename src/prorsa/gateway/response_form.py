"""An answer in the form of OpenAI's Responses interface: one object, or the events in which it grows."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from prorsa.cluster.turns import TurnResult
from prorsa.engines.protocol import FinishReason
from prorsa.gateway.errors import ApiError
from prorsa.gateway.toolcalls import openai_calls
from prorsa.gateway.turns import Running

Json = dict[str, Any]


class ResponsesForm:
    """Implements `Form`: a response object, or the events in which it grows."""

    def __init__(self, running: Running, model: str) -> None:
        body = running.ask.response_to or {}
        self._running = running
        self._name = f"{running.trajectory}.{running.number}"
        self._message_id = f"msg_{self._name}"
        self._frame: Json = {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": not running.ask.one_call,
            "previous_response_id": None,
            "store": False,
            "temperature": running.ask.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_p": running.ask.sampling.top_p,
            "truncation": "disabled",
        }
        self._events = 0
        self._content = ""
        self._speaking = False
        """Whether the message item has begun."""

    def piece(self) -> bytes:
        text = self._running.output.fresh()
        return self._begin() + self._delta(text) if text else b""

    def end(self, result: TurnResult) -> bytes:
        parsed = self._running.parsed()
        events = self._begin()
        if rest := parsed.content.removeprefix(self._content):
            events += self._delta(rest)
        whole = self.whole(result)
        for index, item in enumerate(whole["output"]):
            events += self._end_message(item, index) if item["type"] == "message" else self._call(item, index)
        return events + self._event(f"response.{whole['status']}", response=whole)

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which has begun and cannot go on."""
        details = {"code": error.code or "server_error", "message": str(error)}
        return self._begin() + self._event("response.failed", response=self._state("failed") | {"error": details})

    def whole(self, result: TurnResult) -> Json:
        cut = result.finish is FinishReason.LENGTH
        prompt, output = len(self._running.prompt_ids), len(result.token_ids)
        return self._state("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items("incomplete" if cut else "completed"),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": output,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + output,
            },
        }

    def _items(self, status: str) -> list[Json]:
        parsed = self._running.parsed()
        items: list[Json] = []
        if parsed.content or not parsed.calls:
            items.append(self._message(parsed.content, status))
        for call in openai_calls(parsed.calls, self._running.trajectory, self._running.number):
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{call['id']}",
                    "call_id": call["id"],
                    "status": "completed",
                    **call["function"],
                }
            )
        return items

    def _message(self, text: str | None, status: str) -> Json:
        content = [] if text is None else [_part(text)]
        message = {"type": "message", "id": self._message_id, "role": "assistant"}
        return message | {"status": status, "content": content}

    def _begin(self) -> bytes:
        if self._events:
            return b""
        state = self._state("in_progress")
        return self._event("response.created", response=state) + self._event("response.in_progress", response=state)

    def _delta(self, text: str) -> bytes:
        events = b"" if self._speaking else self._begin_message()
        self._content += text
        return events + self._event("response.output_text.delta", **self._place(0), delta=text, logprobs=[])

    def _begin_message(self) -> bytes:
        self._speaking = True
        added = self._event("response.output_item.added", output_index=0, item=self._message(None, "in_progress"))
        return added + self._event("response.content_part.added", **self._place(0), part=_part(""))

    def _end_message(self, item: Json, index: int) -> bytes:
        events = b"" if self._speaking else self._begin_message()
        text = item["content"][0]["text"]
        events += self._event("response.output_text.done", **self._place(index), text=text, logprobs=[])
        events += self._event("response.content_part.done", **self._place(index), part=_part(text))
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _call(self, item: Json, index: int) -> bytes:
        place = {"item_id": item["id"], "output_index": index}
        empty = item | {"arguments": "", "status": "in_progress"}
        arguments = {"arguments": item["arguments"], "name": item["name"]}
        return (
            self._event("response.output_item.added", output_index=index, item=empty)
            + self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            + self._event("response.function_call_arguments.done", **place, **arguments)
            + self._event("response.output_item.done", output_index=index, item=item)
        )

    def _place(self, index: int) -> Json:
        return {"item_id": self._message_id, "output_index": index, "content_index": 0}

    def _state(self, status: str) -> Json:
        return {**self._frame, "status": status, "output": [], "usage": None}

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._events, **fields})
        self._events += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
