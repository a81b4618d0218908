"""Single requests, and sessions of them: Mooncake's JSON lines, BurstGPT's and Azure's CSV.

Rows of one session are turns of one trajectory. A prompt is the whole prompt, with what the session had before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import MISSING, Wrong, at
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.located import located
from prorsa.simulation.workloads.recordings.model import Trajectory, Turn, gap

TASK = "requests"
BLOCK = 512
"""Tokens that a hash of Mooncake's traces stands for."""


@dataclass(slots=True)
class _Row:
    where: str
    time: float | None
    turn: Turn
    delay_s: float | None = None
    hashes: tuple[int | str, ...] = ()


@dataclass(slots=True)
class _Session:
    name: str
    rows: list[_Row] = field(default_factory=list)


def _read(records: Iterator[Record], row_of: Any, session_key: str) -> Iterator[Trajectory]:
    sessions: dict[str, _Session] = {}
    for count, (where, values) in enumerate(records, start=1):
        with located(where):
            row: _Row = row_of(where, values)
            name = fields.maybe_name(values, session_key) if session_key else None
            if name is not None:
                sessions.setdefault(name, _Session(name)).rows.append(row)
            elif row.time is None:
                raise Wrong("timestamp is missing; give the time at which the request came, or its session_id")
            else:
                yield Trajectory(where, f"r{count}", [row.turn], task=TASK, start=row.time, reward_s=0.0)
    block = _block(row for session in sessions.values() for row in session.rows)
    for session in sessions.values():
        yield _joined(session, block)


def _joined(session: _Session, block: int) -> Trajectory:
    rows = session.rows
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
    return Trajectory(rows[0].where, session.name, turns, task="sessions", start=rows[0].time or 0.0, reward_s=0.0)


def _kept(before: _Row, row: _Row, block: int) -> int | None:
    if not before.hashes or not row.hashes:
        return None
    pairs = zip(before.hashes, row.hashes, strict=False)
    common = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(before.hashes), len(row.hashes)))
    context = before.turn.prompt + before.turn.output
    # The block in which the former prompt ends has another hash once something follows it.
    extends = common >= before.turn.prompt // block and row.turn.prompt >= context
    return None if extends else min(common * block, before.turn.prompt)


def _block(rows: Iterator[_Row]) -> int:
    """Tokens a hash: `BLOCK`, or what the rows say where that cannot be."""
    sizes = [(row.turn.prompt, len(row.hashes)) for row in rows if row.hashes]
    if all(-(-prompt // BLOCK) == count for prompt, count in sizes):
        return BLOCK
    return max(-(-prompt // count) for prompt, count in sizes)


# Mooncake.


def _mooncake_row(where: str, values: dict[str, Any]) -> _Row:
    hashes = at(values, "hash_ids")
    if hashes is MISSING:
        hashes = []
    if not isinstance(hashes, list) or not all(isinstance(one, int | str) for one in hashes):
        raise Wrong(f"hash_ids={fields.shown(hashes)}: not a list of hashes; write whole numbers, or leave it out")
    turn = Turn(fields.tokens(values, "input_length", 1), fields.tokens(values, "output_length", 1))
    time = fields.maybe_time(values, "timestamp", 0.001)
    return _Row(where, time, turn, fields.maybe_seconds(values, "delay", 0.001), tuple(hashes))


def _mooncake(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    return _read(records, _mooncake_row, "session_id")


def _is_mooncake(record: Mapping[str, Any]) -> bool:
    return "input_length" in record


MOONCAKE = Format(
    "mooncake", "Mooncake's JSON lines of requests, or of sessions by session_id", _is_mooncake, _mooncake
)


# Azure.


def _azure_row(where: str, values: dict[str, Any]) -> _Row:
    turn = Turn(fields.tokens(values, "ContextTokens", 1), fields.tokens(values, "GeneratedTokens"))
    return _Row(where, fields.time(values, "TIMESTAMP"), turn)


def _azure(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    return _read(records, _azure_row, "")


def _is_azure(record: Mapping[str, Any]) -> bool:
    return {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= record.keys()


AZURE = Format("azure", "Azure's LLM inference traces of 2023 and 2024 (CSV)", _is_azure, _azure)


# The same as short JSON lines.


def _short_row(where: str, values: dict[str, Any]) -> _Row:
    turn = Turn(fields.tokens(values, "in", 1), fields.tokens(values, "out", 1))
    return _Row(where, fields.time(values, "ts"), turn)


def _short(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    return _read(records, _short_row, "")


def _is_short(record: Mapping[str, Any]) -> bool:
    return {"ts", "in", "out"} <= record.keys()


SHORT = Format("requests", "JSON lines of requests with ts, in and out", _is_short, _short)


# BurstGPT.


def _burst_row(where: str, values: dict[str, Any]) -> _Row:
    turn = Turn(
        fields.tokens(values, "Request tokens", 1),
        fields.tokens(values, "Response tokens"),
        llm_s=fields.maybe_seconds(values, "Elapsed time"),
    )
    return _Row(where, fields.time(values, "Timestamp"), turn)


def _burst(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    return _read(records, _burst_row, "Session ID")


def _is_burst(record: Mapping[str, Any]) -> bool:
    return {"Timestamp", "Request tokens", "Response tokens"} <= record.keys()


BURSTGPT = Format("burstgpt", "BurstGPT's traces, with or without Session ID and Elapsed time (CSV)", _is_burst, _burst)
