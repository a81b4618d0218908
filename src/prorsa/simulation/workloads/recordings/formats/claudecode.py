"""Claude Code: sessions of `~/.claude/projects`. A sub-agent (a side chain) is a trajectory of its own.

Lengths are the usage of each response; times are when its lines were written. An answer is several lines of one message id.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import MISSING, Json, at, located
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats import chats
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.model import Trajectory, Turn, gap

USER = "user"
"""The tool of an answer that calls none: somebody reads it and writes the next prompt."""
SYNTHETIC = "<synthetic>"
"""The model of answers that the client wrote itself, such as those that tell of an error."""


def recognises(record: Mapping[str, Any]) -> bool:
    return record.get("type") in ("user", "assistant") and "message" in record and "sessionId" in record


@dataclass(slots=True)
class _Thread:
    where: str
    name: str
    turns: list[Turn] = field(default_factory=list)
    start: float | None = None
    message: str | None = None
    """That of the last turn."""
    heard: float | None = None
    """When the last line came that is not the model's, and the last before the last turn."""
    asked: float | None = None
    said: float | None = None
    """When the last one came that is."""

    def hear(self, time: float | None) -> None:
        if self.turns and self.turns[-1].tool != USER:
            self.turns[-1].tool_s = gap(self.said, time)
        self.heard = time

    def say(self, message: str | None, answer: Json, time: float | None) -> None:
        counts = chats.measured(answer.get("usage"))
        if counts is None:
            raise fields.Wrong("message.usage is missing or has no input_tokens and output_tokens; they are its length")
        prompt, output, kept = counts
        if message is not None and message == self.message:
            # Later lines of an answer know more of its tokens.
            self.turns[-1].output = max(self.turns[-1].output, output)
        else:
            self.turns.append(Turn(prompt, output, kept, USER))
            self.message, self.asked = message, self.heard
            if self.start is None:
                self.start = time if self.heard is None else self.heard
        turn = self.turns[-1]
        turn.llm_s = gap(self.asked, time)
        tool = _tool(answer)
        if tool is not None and turn.tool == USER:
            turn.tool = tool
        self.said = time


def read(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    threads: dict[str, _Thread] = {}
    sides: dict[str, str] = {}
    """Line of a side chain -> the line that it began with."""
    for where, values in records:
        with located(where):
            kind, answer = values.get("type"), values.get("message")
            if kind not in ("user", "assistant") or not isinstance(answer, dict):
                continue
            name = _thread(values, sides, source)
            thread = threads.setdefault(name, _Thread(where, name))
            time = fields.maybe_time(values, "timestamp")
            if kind == "user":
                thread.hear(time)
            elif answer.get("model") != SYNTHETIC and not values.get("isApiErrorMessage"):
                thread.say(fields.maybe_name(answer, "id"), answer, time)
    for thread in threads.values():
        chats.only_where_shorter(thread.turns)
        yield Trajectory(thread.where, thread.name, thread.turns, task="coding-agent", start=thread.start or 0.0)


def _thread(values: Json, sides: dict[str, str], source: Source) -> str:
    """The session, or the sub-agent of it that the line belongs to."""
    session = fields.maybe_name(values, "sessionId") or source.stem
    if values.get("isSidechain") is not True:
        return session
    agent = fields.maybe_name(values, "agentId")
    if agent is None:
        line, parent = (fields.maybe_name(values, key) or "" for key in ("uuid", "parentUuid"))
        agent = sides[line] = sides.get(parent, line)
    return f"{session}/{agent}"


def _tool(answer: Json) -> str | None:
    content = at(answer, "content")
    parts = content if isinstance(content, list) and content is not MISSING else []
    calls = (part for part in parts if isinstance(part, dict) and part.get("type") == "tool_use")
    return next((fields.maybe_name(call, "name") for call in calls), None)


FORMAT = Format("claude-code", "sessions of Claude Code (JSON lines)", recognises, read)
