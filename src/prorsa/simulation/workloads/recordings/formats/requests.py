"""Requests with their lengths and arrivals, and sessions of them: Mooncake's JSON lines, Azure's and BurstGPT's CSV.

Rows of one session are turns of one trajectory. A prompt is the whole prompt, with what the session had before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import MISSING, Wrong, at, located
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.model import Trajectory, Turn, common_prefix, gap

TASK, SESSIONS = "requests", "sessions"
BLOCK = 512
"""Tokens that a hash of Mooncake's traces stands for."""


@dataclass(frozen=True, slots=True)
class _Columns:
    """What a row's fields are called; empty where it has none."""

    time: str
    prompt: str
    output: str
    session: str = ""
    elapsed: str = ""
    time_unit: float = 1.0
    """Seconds of a time that is a number."""
    least_output: int = 1

    def recognises(self, record: Mapping[str, Any]) -> bool:
        return {self.prompt, self.output} <= record.keys()

    def row(self, where: str, values: dict[str, Any]) -> _Row:
        turn = Turn(
            fields.tokens(values, self.prompt, 1),
            fields.tokens(values, self.output, self.least_output),
            llm_s=fields.maybe_seconds(values, self.elapsed) if self.elapsed else None,
        )
        session = fields.maybe_name(values, self.session) if self.session else None
        time = fields.maybe_time(values, self.time, self.time_unit)
        if time is None and session is None:
            raise Wrong(f"{self.time} is missing; give the time at which the request came")
        return _Row(where, session, time, turn, fields.maybe_seconds(values, "delay", 0.001), _hashes(values))

    def read(self, records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
        sessions: defaultdict[str, list[_Row]] = defaultdict(list)
        for count, (where, values) in enumerate(records, start=1):
            with located(where):
                row = self.row(where, values)
            if row.session is None:
                yield Trajectory(where, f"r{count}", [row.turn], task=TASK, start=row.time or 0.0, reward_s=0.0)
            else:
                sessions[row.session].append(row)
        block = _block([row for rows in sessions.values() for row in rows])
        for name, rows in sessions.items():
            yield _joined(name, rows, block)


@dataclass(slots=True)
class _Row:
    where: str
    session: str | None
    time: float | None
    turn: Turn
    delay_s: float | None
    """Since the end of the session's row before it."""
    hashes: tuple[int | str, ...]
    """Of the blocks of its prompt."""


def _hashes(values: dict[str, Any]) -> tuple[int | str, ...]:
    hashes = at(values, "hash_ids")
    if hashes is MISSING:
        return ()
    if not isinstance(hashes, list) or not all(isinstance(one, int | str) for one in hashes):
        raise Wrong(f"hash_ids={fields.shown(hashes)}: not a list of hashes; write whole numbers, or leave it out")
    return tuple(hashes)


def _joined(name: str, rows: list[_Row], block: int) -> Trajectory:
    if all(row.time is not None for row in rows):
        rows.sort(key=lambda row: row.time or 0.0)
    for before, row in pairwise(rows):
        before.turn.tool = "user"
        before.turn.step_s = gap(before.time, row.time)
        if row.delay_s is not None:
            # The name of a human would make the delay count as unknown.
            before.turn.tool, before.turn.tool_s = "delay", row.delay_s
        row.turn.kept = _kept(before, row, block)
    turns = [row.turn for row in rows]
    return Trajectory(rows[0].where, name, turns, task=SESSIONS, start=rows[0].time or 0.0, reward_s=0.0)


def _kept(before: _Row, row: _Row, block: int) -> int | None:
    if not before.hashes or not row.hashes:
        return None
    common = common_prefix(before.hashes, row.hashes)
    # The block in which the former prompt ends has another hash once something follows it.
    whole = common >= before.turn.prompt // block
    extends = whole and row.turn.prompt >= before.turn.prompt + before.turn.output
    return None if extends else min(common * block, before.turn.prompt)


def _block(rows: list[_Row]) -> int:
    """Tokens a hash: `BLOCK`, or what the rows say where that cannot be."""
    sizes = [(row.turn.prompt, len(row.hashes)) for row in rows if row.hashes]
    if all(-(-prompt // BLOCK) == count for prompt, count in sizes):
        return BLOCK
    return max(-(-prompt // count) for prompt, count in sizes)


_MOONCAKE = _Columns("timestamp", "input_length", "output_length", "session_id", time_unit=0.001)
_SHORT = _Columns("ts", "in", "out")
_AZURE = _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens", least_output=0)
_BURSTGPT = _Columns("Timestamp", "Request tokens", "Response tokens", "Session ID", "Elapsed time", least_output=0)

FORMATS = (
    Format(
        "mooncake",
        "Mooncake's JSON lines of requests, or of sessions by session_id",
        _MOONCAKE.recognises,
        _MOONCAKE.read,
    ),
    Format("requests", "JSON lines of requests with ts, in and out", _SHORT.recognises, _SHORT.read),
    Format("azure", "Azure's LLM inference traces of 2023 and 2024 (CSV)", _AZURE.recognises, _AZURE.read),
    Format("burstgpt", "BurstGPT's traces, perhaps with sessions (CSV)", _BURSTGPT.recognises, _BURSTGPT.read),
)
