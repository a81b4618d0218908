"""When trajectories that decode now will be back with their next request: a source beyond the paper's.

The paper leaves DECODE out (B.2, B.8: one step) and lets the bias correction make up for it, which it cannot where a turn and
its tool call are shorter than the horizon: then most of what arrives was decoding when the forecast was made.
"""

from __future__ import annotations

import math

from prorsa.forecast.backoff import Backoff
from prorsa.forecast.durations import MOST_CLASSES, Durations
from prorsa.forecast.tools import MAX_TURN
from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import Transition
from prorsa.lifecycle.states import State


class DecodeReturns:
    """Seconds from the start of a decode to the arrival of the next request, by (task, turn index); infinite for a turn
    that ends in the reward."""

    def __init__(self) -> None:
        self._durations: Backoff[Durations] = Backoff(Durations, most=MOST_CLASSES)
        self._decoded: dict[str, float] = {}
        """How long the trajectories now in TOOL decoded, seconds."""

    def observe(self, transition: Transition) -> None:
        event = transition.event
        if isinstance(event, e.ToolStarted):
            self._decoded[event.trajectory] = transition.elapsed
        elif transition.before is State.TOOL:
            decoded = self._decoded.pop(event.trajectory)
            # The tool's transition has the index of the turn to come.
            turn = min(transition.turn - 1, MAX_TURN)
            if isinstance(event, e.Ready):
                self._durations.add((transition.task, turn), decoded + transition.elapsed)
            elif isinstance(event, e.RewardStarted):
                self._durations.add((transition.task, turn), math.inf)
        elif isinstance(event, e.RewardStarted):
            self._durations.add((transition.task, min(transition.turn, MAX_TURN)), math.inf)

    def find(self, task: str, turn: int) -> Durations | None:
        """The durations that stand for a decode of that turn; None until any turn has ended."""
        return self._durations.find((task, min(turn, MAX_TURN)))


def never() -> Durations:
    """Of a turn about which nothing is known: no next request is expected."""
    durations = Durations()
    durations.add(math.inf)
    return durations
