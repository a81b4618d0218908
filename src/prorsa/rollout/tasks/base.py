"""What a task is: questions, the tools the model may call, and a reward for its final text.

Invariants: `questions` is deterministic in its arguments, a longer list begins with the shorter one, and no problem is in
both splits. `reward` and `parse_tool_call` take whatever a model writes and never raise.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prorsa.rollout import toolcalls

Split = Literal["train", "test"]
Message = dict[str, Any]
"""A chat message as chat templates take it: `role`, `content`, and for an assistant perhaps `tool_calls`."""


@dataclass(frozen=True, slots=True)
class Question:
    id: str
    """Unique over splits, seeds and indices of one task."""
    messages: tuple[Message, ...]
    """The conversation that the first model turn answers."""
    answer: str
    """The truth that `Task.reward` compares with."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


class Task(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        """JSON schemas of the tools, in the form that chat templates take."""
        ...

    def questions(self, split: Split, n: int, seed: int) -> list[Question]: ...

    def reward(self, question: Question, final_text: str) -> float:
        """1.0 if the text of the last model turn answers the question, else 0.0."""
        ...

    def parse_tool_call(self, text: str) -> ToolCall | None:
        """The call that a model turn makes; None if it makes none that can be understood."""
        ...


def parse_tool_call(text: str) -> ToolCall | None:
    """The first tool call of a model turn, in the convention of Qwen's chat templates (see `rollout.toolcalls`)."""
    for call in toolcalls.parse(text).calls:
        return ToolCall(call.name, json.loads(call.arguments))
    return None
