"""SWE-agent: `.traj` files. Lengths are guessed from the text; tools and their times are recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import located
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats import chats
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.model import Conversation, Message, Trajectory


def recognises(record: Mapping[str, Any]) -> bool:
    steps = record.get("trajectory")
    if not isinstance(steps, list) or "example_id" in record:
        return False
    return (
        "history" in record
        or "environment" in record
        or bool(steps and isinstance(steps[0], dict) and "action" in steps[0])
    )


def read(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    for where, values in records:
        with located(where):
            conversation = Conversation(source.characters)
            history = chats.messages(fields.listed(values, "history"))
            conversation.hear(*takewhile(lambda said: said.role not in chats.MODEL, history))
            for index, step in enumerate(fields.listed(values, "trajectory")):
                with located(f"step {index}"):
                    _step(conversation, step)
            yield Trajectory(where, source.stem, conversation.turns, task="coding-agent")


def _step(conversation: Conversation, step: dict[str, Any]) -> None:
    """A turn and its tool. `query` is the prompt, where it is recorded: what was left out of the context shows there."""
    said = fields.text(step.get("response")) or fields.text(step.get("thought")) + fields.text(step.get("action"))
    if not said:
        # The model was not asked, or its answer was lost with the run.
        return
    # It was called `messages` before.
    asked = next((key for key in ("query", "messages") if isinstance(step.get(key), list) and step[key]), None)
    prompt = None if asked is None else chats.messages(fields.listed(step, asked))
    turn = conversation.speak(Message("assistant", said), prompt)
    words = fields.text(step.get("action")).split(maxsplit=1)
    turn.tool = words[0][: fields.MOST_NAME] if words else None
    turn.tool_s = fields.maybe_seconds(step, "execution_time")
    conversation.hear(Message("tool", fields.text(step.get("observation"))))


FORMAT = Format("swe-agent", "SWE-agent's .traj files", recognises, read)
