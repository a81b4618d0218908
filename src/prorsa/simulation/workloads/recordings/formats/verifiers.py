"""verifiers: `results.jsonl` of `vf-eval`, a rollout a line; rollouts of one example are a group.

Lengths are exact where the rollout has its token ids or the responses' usage (`trajectory`), or one turn and its
`token_usage`; else they are guessed from the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import MISSING, Json, at, located
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats import chats
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.model import Conversation, Trajectory, Turn, common_prefix

KEYS = {"prompt", "completion", "reward"}


def recognises(record: Mapping[str, Any]) -> bool:
    return record.keys() >= KEYS and isinstance(record["completion"], str | list)


def read(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    for where, values in records:
        with located(where):
            example = fields.maybe_name(values, "example_id") or fields.maybe_name(values, "id")
            yield Trajectory(
                where,
                example,
                _exact(values) or _guessed(values, source),
                task=fields.maybe_name(values, "task") or "verifiers",
                reward=fields.maybe_number(values, "reward") or 0.0,
                reward_s=fields.maybe_seconds(values, "timing.scoring_ms", 0.001),
            )


def _exact(values: Json) -> list[Turn]:
    """Empty where a step says neither its tokens nor its usage."""
    turns: list[Turn] = []
    before: list[int] = []
    for index, step in enumerate(fields.listed(values, "trajectory")):
        with located(f"step {index}"):
            turn = Turn(1, 0, tool=_tool(step))
            prompt, output = (at(step, f"tokens.{part}_ids") for part in ("prompt", "completion"))
            if isinstance(prompt, list) and isinstance(output, list) and prompt:
                turn.prompt, turn.output = len(prompt), len(output)
                turn.kept = common_prefix(before, prompt) if turns else None
                before = prompt + output
            elif counts := chats.measured(at(step, "response.usage")):
                turn.prompt, turn.output, _ = counts
                before = []
            else:
                return []
            turns.append(turn)
    return turns


def _tool(step: Json) -> str | None:
    said = at(step, "completion")
    first = said[0] if isinstance(said, list) and said else {}
    return (chats.called(first) if isinstance(first, dict) else None) or "environment"


def _guessed(values: Json, source: Source) -> list[Turn]:
    conversation = Conversation(source.characters)
    conversation.hear(*chats.messages(_records(values, "prompt", "user")))
    for said in _records(values, "completion", "assistant"):
        message = chats.message(said)
        if message.role in chats.MODEL:
            conversation.speak(message).tool = chats.called(said) or "environment"
        else:
            conversation.hear(message)
    if len(conversation.turns) == 1:
        chats.use_counts(conversation.turns, [chats.measured(values.get("token_usage"))])
    return conversation.turns


def _records(values: Json, key: str, role: str) -> list[Json]:
    """Messages, or a text as one."""
    value = at(values, key)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [] if value is MISSING else fields.listed(values, key)


FORMAT = Format("verifiers", "results.jsonl of verifiers' vf-eval", recognises, read)
