"""Tool calls in OpenAI's form."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from prorsa.rollout.toolcalls import Call


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
