"""Tool calls in the convention of Qwen's chat templates, out of a turn's text and into OpenAI's form.

A call is a JSON object with a string `name` and an object `arguments` between `<tool_call>` and `</tool_call>`. Its
arguments are handed over as the model wrote them, character by character, so that the chat template renders the same text
again and the next request continues the same tokens.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{OPEN}(.*?)(?:{CLOSE}|$)", re.DOTALL)
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """JSON."""


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str
    calls: tuple[Call, ...]


def parse(text: str) -> Parsed:
    """Every call of a turn, and what stands around them; a turn with one that cannot be understood is all content."""
    if OPEN not in text:
        return Parsed(text, ())
    calls = [_parse(body) for body in _CALL.findall(text)]
    understood = [call for call in calls if call is not None]
    if len(understood) < len(calls):
        return Parsed(text, ())
    before, _, rest = text.partition(OPEN)
    after = _CALL.sub("", OPEN + rest).strip()
    return Parsed(before.rstrip() + after, tuple(understood))


def call_id(trajectory: str, turn: int, index: int) -> str:
    return "call_" + blake2b(f"{trajectory}.{turn}.{index}".encode(), digest_size=12).hexdigest()


def openai_calls(calls: tuple[Call, ...], trajectory: str, turn: int) -> list[dict[str, Any]]:
    return [
        {
            "id": call_id(trajectory, turn, index),
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


def _parse(body: str) -> Call | None:
    try:
        call = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, _as_written(body, arguments))


def _as_written(body: str, arguments: dict[str, Any]) -> str:
    for match in _ARGUMENTS.finditer(body):
        try:
            value, end = _DECODER.raw_decode(body, match.end())
        except ValueError:
            continue
        if value == arguments:
            return body[match.end() : end]
    return json.dumps(arguments, ensure_ascii=False)
