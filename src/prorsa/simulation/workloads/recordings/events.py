"""Trajectories of a foreign recording as lifecycle events. What the recording does not say is assumed here, and only here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush

from prorsa.lifecycle import events as e
from prorsa.simulation.workloads.recordings.model import Trajectory, Turn

TOKEN_S = 0.03
"""Seconds to generate a token."""
PREFILL_TOKENS_PER_S = 10_000.0
"""New prompt tokens; but a prefill takes half of a turn at most."""
TOOL_S = 1.0
REWARD_S = 4.4
"""The median of the quicker half of the measured unit-test rewards."""
HUMAN = ("user", "tool_or_approval")
"""Tools whose durations are a human's, who reads, thinks or approves: they count as unknown."""
UNNAMED = "unknown"
INSTANCE = "recorded"


def events_of(trajectories: Iterable[tuple[str, str, Trajectory]]) -> Iterator[e.Event]:
    """Of (name, group, trajectory), in the order of their times; the first starts at 0."""
    started = sorted(trajectories, key=lambda named: named[2].start)
    first = started[0][2].start if started else 0.0
    serial = itertools.count()
    waiting: list[tuple[float, int, e.Event]] = []
    for name, group, trajectory in started:
        start = trajectory.start - first
        while waiting and waiting[0][0] < start:
            yield heappop(waiting)[2]
        for event in _events(name, group, trajectory, start):
            heappush(waiting, (event.time, next(serial), event))
    while waiting:
        yield heappop(waiting)[2]


def _events(name: str, group: str, trajectory: Trajectory, time: float) -> Iterator[e.Event]:
    turns = trajectory.turns
    yield e.Sampled(time, name, group, trajectory.task, 0, turns[0].prompt)
    if trajectory.sandbox is not None:
        mode, seconds = trajectory.sandbox
        yield e.SandboxStarting(time, name, mode, INSTANCE, INSTANCE)
        time += seconds
    context = 0
    for turn, kept in zip(turns, kept_tokens(turns), strict=True):
        ready = e.Ready(time, name, turn.prompt, kept)
        yield ready
        yield e.PrefillStarted(time, name, INSTANCE)
        new = turn.prompt - ready.extends(context)
        llm = _llm_s(turn, new)
        prefill = new / PREFILL_TOKENS_PER_S if turn.ttft_s is None else turn.ttft_s
        yield e.DecodeStarted(time + min(prefill, llm / 2), name, INSTANCE)
        time += llm
        context = _end(turn)
        if turn is not turns[-1]:
            yield e.ToolStarted(time, name, turn.tool or UNNAMED, context)
            time += _tool_s(turn, llm)
    yield e.RewardStarted(time, name, context)
    reward_s = REWARD_S if trajectory.reward_s is None else trajectory.reward_s
    yield e.Done(time + reward_s, name, trajectory.reward, admitted=True)


def kept_tokens(turns: Sequence[Turn]) -> Iterator[int]:
    """`Ready.kept` of each turn.

    Where nobody recorded it: a prompt that is not shorter than the context extends it; one that is shorter, but not than the
    prompt before, has replaced the output, as templates do that drop reasoning; a shorter one has nothing in common with it.
    """
    yield e.UNKNOWN
    for before, turn in itertools.pairwise(turns):
        context = _end(before)
        kept = turn.kept
        if kept is None and before.prompt <= turn.prompt < context:
            kept = before.prompt
        kept = e.UNKNOWN if kept is None else min(kept, context, turn.prompt)
        yield e.UNKNOWN if kept == context else kept


def _end(turn: Turn) -> int:
    """Length of the context after the turn; one that was broken off before its first token has cost its prefill."""
    return turn.prompt + max(1, turn.output)


def _llm_s(turn: Turn, new: int) -> float:
    """Seconds until the turn's last token."""
    if turn.llm_s is not None:
        return turn.llm_s
    assumed = turn.output * TOKEN_S + new / PREFILL_TOKENS_PER_S
    return assumed if turn.step_s is None else min(assumed, turn.step_s)


def _tool_s(turn: Turn, llm: float) -> float:
    """Seconds from the turn's end to the next turn: those of its tool, or else what the turn leaves of its step."""
    if turn.tool_s is not None and turn.tool not in HUMAN:
        return turn.tool_s
    return TOOL_S if turn.step_s is None else max(turn.step_s - llm, 0.0)
