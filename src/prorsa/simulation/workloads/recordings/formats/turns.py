"""Trajectories as JSON lines: `id`, `turns`, and where they are known `domain`, `group`, `success`, `sandbox` and
`reward_duration_s`. This is the format to write for recordings that no other format covers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prorsa.lifecycle.events import SandboxMode
from prorsa.simulation.workloads.recordings import fields
from prorsa.simulation.workloads.recordings.fields import Wrong, at, located, shown
from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.formats.base import Format, Source
from prorsa.simulation.workloads.recordings.model import Trajectory, Turn

TASKS = {"coding": "coding-agent", "general": "general-agent"}


def recognises(record: Mapping[str, Any]) -> bool:
    turns = record.get("turns")
    return isinstance(turns, list) and (not turns or (isinstance(turns[0], dict) and "prompt_tokens" in turns[0]))


def read(records: Iterator[Record], source: Source) -> Iterator[Trajectory]:
    for where, values in records:
        with located(where):
            yield _trajectory(where, values)


def _trajectory(where: str, values: dict[str, Any]) -> Trajectory:
    if not isinstance(values.get("turns"), list):
        raise Wrong("turns is missing; a summary cannot be played, give each turn's tokens")
    turns = []
    for index, turn in enumerate(fields.listed(values, "turns")):
        with located(f"turn {index}"):
            turns.append(_turn(turn))
    task = TASKS.get(fields.maybe_name(values, "domain") or "", "trace")
    return Trajectory(
        where,
        fields.maybe_name(values, "id"),
        turns,
        group=fields.maybe_name(values, "group"),
        task=task,
        start=fields.maybe_time(values, "start_s") or 0.0,
        reward=fields.maybe_number(values, "success") or 0.0,
        reward_s=fields.maybe_seconds(values, "reward_duration_s"),
        sandbox=_sandbox(values),
    )


def _turn(turn: dict[str, Any]) -> Turn:
    prompt, kept = fields.tokens(turn, "prompt_tokens", 1), fields.maybe_tokens(turn, "cached_prefix_tokens")
    new = fields.maybe_tokens(turn, "prompt_tokens_new")
    if new is not None and kept is None:
        kept = prompt - new
    if kept is not None and (kept < 0 or (new is not None and new + kept != prompt)):
        raise Wrong(
            f"prompt_tokens={prompt}: it must be prompt_tokens_new + cached_prefix_tokens, which are {new} + {kept}; "
            "mend them or leave both out"
        )
    if turn.get("reset") and kept is None:
        kept = 0
    return Turn(
        prompt,
        fields.tokens(turn, "output_tokens"),
        kept,
        fields.maybe_name(turn, "tool.name"),
        fields.maybe_seconds(turn, "tool.duration_s"),
        fields.maybe_seconds(turn, "llm_time_s"),
        fields.maybe_seconds(turn, "ttft_s"),
        fields.maybe_seconds(turn, "step_interval_s"),
    )


def _sandbox(values: dict[str, Any]) -> tuple[SandboxMode, float] | None:
    if at(values, "sandbox") is fields.MISSING:
        return None
    seconds = fields.maybe_seconds(values, "sandbox.duration_s")
    if seconds is None:
        raise Wrong(f"sandbox={shown(values['sandbox'])}: sandbox.duration_s is missing; give it, or no sandbox")
    prewarmed = fields.maybe_name(values, "sandbox.mode") == SandboxMode.PREWARMED
    return SandboxMode.PREWARMED if prewarmed else SandboxMode.COLD, seconds


FORMAT = Format("turns", "JSON lines with a list of turns in tokens (docs/recordings.md)", recognises, read)
