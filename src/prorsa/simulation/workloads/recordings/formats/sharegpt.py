"""ShareGPT: conversations as text. Everything but the order of the messages is guessed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import located
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats import chats
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.model import Conversation, Trajectory

KEYS = ("conversations", "conversation", "items", "messages")
"""Where a record may have its messages."""


def _key(record: Mapping[str, Any]) -> str | None:
    return next((key for key in KEYS if isinstance(record.get(key), list)), None)


def recognises(record: Mapping[str, Any]) -> bool:
    key = _key(record)
    if key is None:
        return False
    said = record[key]
    # Some conversations of the published sets are empty.
    return (
        key.startswith("conversation")
        if not said
        else isinstance(said[0], dict) and bool({"from", "role"} & said[0].keys())
    )


def read(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    for where, values in records:
        with located(where):
            conversation = Conversation(source.characters)
            for said in fields.listed(values, _key(values) or KEYS[0]):
                message = chats.message(said)
                if message.role in chats.MODEL and conversation.context:
                    conversation.speak(message).tool = chats.called(said) or "user"
                else:
                    conversation.hear(message)
            yield Trajectory(where, fields.maybe_name(values, "id"), conversation.turns, task="chat", reward_s=0.0)


FORMAT = Format("sharegpt", "ShareGPT and other conversations as text (JSON or JSON lines)", recognises, read)
