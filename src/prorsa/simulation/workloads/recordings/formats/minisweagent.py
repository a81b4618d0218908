"""mini-swe-agent: `.traj.json` files. Lengths are the responses' own where they are recorded, and so are times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import MISSING, at, located
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats import chats
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.model import Conversation, Trajectory, Turn, gap


def recognises(record: Mapping[str, Any]) -> bool:
    known = str(record.get("trajectory_format", "")).startswith("mini-swe-agent")
    info = record.get("info")
    return known or (isinstance(record.get("messages"), list) and isinstance(info, dict) and "model_stats" in info)


def read(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    for where, values in records:
        with located(where):
            name = fields.maybe_name(values, "instance_id") or source.stem
            turns, start = _turns(values, source)
            yield Trajectory(where, name, turns, task="coding-agent", start=start)


def _turns(values: dict[str, Any], source: Source) -> tuple[list[Turn], float]:
    """And when the first began. Messages are stamped when they are complete: a turn lasts from the one before."""
    conversation = Conversation(source.characters)
    counts = []
    first: float | None = None
    former: float | None = None
    ended: float | None = None
    for index, said in enumerate(fields.listed(values, "messages")):
        with located(f"message {index}"):
            message, time = chats.message(said), _time(said)
            if message.role == "exit":
                continue
            if message.role in chats.MODEL and conversation.context:
                turn = conversation.speak(message)
                turn.tool, turn.llm_s = chats.called(said) or "bash", gap(former, time)
                ended = time
                counts.append(chats.measured(at(said, "extra.response.usage")))
            else:
                if conversation.turns:
                    # Of several results the last one counts.
                    conversation.turns[-1].tool_s = gap(ended, time)
                conversation.hear(message)
            first = time if first is None else first
            former = time
    chats.use_counts(conversation.turns, counts)
    return conversation.turns, first or 0.0


def _time(said: dict[str, Any]) -> float | None:
    return fields.maybe_time(said, "extra.timestamp" if at(said, "extra.timestamp") is not MISSING else "timestamp")


FORMAT = Format("mini-swe-agent", "mini-swe-agent's .traj.json files", recognises, read)
