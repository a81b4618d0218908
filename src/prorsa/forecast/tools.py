"""When running tools will return: the EMA of their durations by class (Eq. 9, 10)."""

from __future__ import annotations

from prorsa.forecast.backoff import Backoff, Ema

ALPHA = 0.1
"""Weight of the newest duration (Eq. 9)."""

MAX_TURN = 63
"""Later turns share one class."""


class ToolDurations:
    """Classes back off from (task, tool, turn index, concurrent load) over its prefixes to all tools together."""

    def __init__(self) -> None:
        self._durations = Backoff(lambda: Ema(ALPHA))

    def add(self, task: str, tool: str, turn: int, load: int, seconds: float) -> None:
        """A tool returned after `seconds`. `turn` is the index of the turn it belongs to, `load` a `load_bucket`."""
        self._durations.add((task, tool, min(turn, MAX_TURN), load), seconds)

    def find(self, task: str, tool: str, turn: int, load: int) -> Ema | None:
        """The average that stands for tau, seconds; None until any tool has returned."""
        return self._durations.find((task, tool, min(turn, MAX_TURN), load))
