"""What formats of agents' chats share: messages as OpenAI's API has them, and the usage that a response reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import MISSING, Json, at
from prorsa.simulation.workloads.recordings.model import Message, Turn

MODEL = ("assistant", "model", "gpt", "ai", "bot", "chatgpt", "bing", "bard")
"""Roles of the model."""
_TEXTS = ("reasoning_content", "thinking", "content", "value", "tool_calls", "function_call")


def message(values: Mapping[str, Any]) -> Message:
    """With everything that the model reads or writes of it as text."""
    role = values.get("role", values.get("from", ""))
    return Message(str(role).lower(), "".join(fields.text(values.get(key)) for key in _TEXTS))


def messages(records: Iterable[Mapping[str, Any]]) -> list[Message]:
    return [message(record) for record in records]


def called(values: Mapping[str, Any]) -> str | None:
    """The first tool that a message calls; None where it calls none."""
    calls = values.get("tool_calls")
    first = calls[0] if isinstance(calls, list) and calls else None
    if not isinstance(first, dict):
        return None
    name = at(first, "function.name")
    return fields.maybe_name(first, "name" if name is MISSING else "function.name")


def measured(usage: Any) -> tuple[int, int, int | None] | None:
    """(prompt, output, what the server had cached of the prompt) of a usage report of OpenAI's or Anthropic's kind."""
    if not isinstance(usage, dict):
        return None
    prompt, output = (_first(usage, keys) for keys in (_PROMPT, _OUTPUT))
    if prompt is None or output is None:
        return None
    written, read = (fields.maybe_tokens(usage, f"cache_{what}_input_tokens") for what in ("creation", "read"))
    if written is None and read is None:
        read = _first(usage, _CACHED)
    else:
        # Anthropic counts apart what was cached.
        prompt += (written or 0) + (read or 0)
    return (prompt, output, read) if prompt else None


_PROMPT = ("prompt_tokens", "input_tokens")
_OUTPUT = ("completion_tokens", "output_tokens")
_CACHED = (
    "prompt_tokens_details.cached_tokens",
    "input_tokens_details.cached_tokens",
    "cache_read_tokens",
)


def _first(usage: Json, keys: tuple[str, ...]) -> int | None:
    return next((found for key in keys if (found := fields.maybe_tokens(usage, key)) is not None), None)


def use_counts(turns: list[Turn], counts: Sequence[tuple[int, int, int | None] | None]) -> None:
    """Give the turns their exact lengths, where all of them have some: lengths that are partly guesses would jump."""
    if not all(counts):
        return
    for turn, exact in zip(turns, counts, strict=True):
        assert exact is not None
        turn.prompt, turn.output, turn.kept = exact
    only_where_shorter(turns)


def only_where_shorter(turns: list[Turn]) -> None:
    """What a server had cached says how much a prompt keeps where it is shorter than the context before it; elsewhere it says
    what the server had evicted too, and the prompt is taken for one that extends the context."""
    for before, turn in pairwise(turns):
        if turn.prompt >= before.prompt + max(1, before.output):
            turn.kept = None
    if turns:
        turns[0].kept = None
