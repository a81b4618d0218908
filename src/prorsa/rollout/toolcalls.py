"""Tool calls in the convention of Qwen's chat templates, out of the text of a model's turn.

A call is a JSON object between `<tool_call>` and `</tool_call>`: a string `name` that is not empty, and an object
`arguments` (`parameters` is read as well; absent and null are no arguments). Its closing tag may be missing before the next
call and at the end of the text. What is not so stays text: an object with other keys, a key that stands twice, NaN,
infinities, half a character.

Invariants. No text raises. Nothing is lost: every character but the blanks around calls is in the content or in a call. The
arguments are handed over as the model wrote them, character by character, so that the chat template renders the same text
again and the next request continues the same tokens.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLANKS = re.compile(r"[ \t\n\r]*")
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_LABELS = frozenset({"name", "id", "type"})
"""Keys beside the arguments; all of them strings."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str
    calls: tuple[Call, ...]


def parse(text: str) -> Parsed:
    """Every call of a turn, and what stands around them. Of several blocks those that cannot be understood stay content."""
    pieces, calls, shown = [], [], 0
    found = _next_call(text, 0)
    while found is not None:
        call, start, end = found
        pieces.append(text[shown:start])
        calls.append(call)
        shown = end
        found = _next_call(text, end)
    if not calls:
        return Parsed(text, ())
    around = (pieces[0].rstrip(), *(piece.strip() for piece in (*pieces[1:], text[shown:])))
    return Parsed("\n".join(piece for piece in around if piece), tuple(calls))


def first_call_end(text: str) -> int | None:
    """Where the first call of an unfinished turn ends: behind its closing tag, or before the tag that opens the next one."""
    found = _next_call(text, 0)
    if found is None:
        return None
    _, _, end = found
    return end if text.endswith(CLOSE, 0, end) or text.startswith(OPEN, end) else None


def loads(text: str) -> Any:
    """JSON as strict readers take it. Raises `ValueError` for NaN, infinities, keys that stand twice and halves of
    characters, `RecursionError` for what is nested too deeply."""
    value = _DECODER.decode(text)
    _check_strings(value)
    return value


def _next_call(text: str, at: int) -> tuple[Call, int, int] | None:
    """The first call from `at` on, with where it begins and ends."""
    while (start := text.find(OPEN, at)) >= 0:
        at = start + len(OPEN)
        found = _read(text, at)
        if found is not None:
            call, end = found
            return call, start, end
    return None


def _read(text: str, at: int) -> tuple[Call, int] | None:
    start = _skip(text, at)
    try:
        block, end = _DECODER.raw_decode(text, start)
        _check_strings(block)
    except (ValueError, RecursionError):
        return None
    call = _understood(block, text, start)
    end = _skip(text, end)
    if call is None:
        return None
    if text.startswith(CLOSE, end):
        return call, end + len(CLOSE)
    if CLOSE.startswith(text[end : end + len(CLOSE)]):
        return call, len(text)  # the turn ends here, perhaps within the tag
    return (call, end) if text.startswith(OPEN, end) else None


def _understood(block: Any, text: str, start: int) -> Call | None:
    if not isinstance(block, dict):
        return None
    given = block.keys() - _LABELS
    if len(given) > 1 or not given <= {"arguments", "parameters"}:
        return None
    if not block.get("name") or not all(isinstance(block[label], str) for label in block.keys() & _LABELS):
        return None
    arguments = block[given.pop()] if given else None
    if arguments is None:
        return Call(block["name"], "{}")
    return Call(block["name"], _as_written(arguments, text, start)) if isinstance(arguments, dict) else None


def _as_written(arguments: dict[str, Any], text: str, start: int) -> str:
    """All that stands before the arguments are strings, so that the first match is their key, unless that has escapes."""
    match = _ARGUMENTS.search(text, start)
    if match is None:
        return json.dumps(arguments, ensure_ascii=False)
    value, end = _DECODER.raw_decode(text, match.end())
    return text[match.end() : end] if value == arguments else json.dumps(arguments, ensure_ascii=False)


def _skip(text: str, at: int) -> int:
    blanks = _BLANKS.match(text, at)
    assert blanks is not None
    return blanks.end()


def _check_strings(value: Any) -> None:
    """Raises `ValueError` where a string has half a character, which no UTF-8 can hold."""
    json.dumps(value, ensure_ascii=False).encode()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(pairs)
    if len(known) < len(pairs):
        raise ValueError("a key stands twice")
    return known


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError(f"{written} is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_refuse, parse_float=_finite)
