"""How often agents that run elsewhere begin new trajectories: as often as they did lately."""

from __future__ import annotations

import asyncio
from collections import deque

from prorsa.lifecycle import Transition

WINDOW = 60.0
"""Seconds of the past that the rate is taken from."""


class ObservedRate:
    """An `Injection` for the forecast. Nothing here launches anything, so what passed says nothing of what comes."""

    def __init__(self) -> None:
        self._sampled: deque[float] = deque()
        self._began: float | None = None

    def observe(self, transition: Transition) -> None:
        if transition.before is None:
            if self._began is None:
                self._began = transition.event.time
            self._sampled.append(transition.event.time)

    def launches(self, passed: float, horizon: float) -> float:
        if self._began is None:
            return 0.0
        now = asyncio.get_running_loop().time()
        while self._sampled and self._sampled[0] < now - WINDOW:
            self._sampled.popleft()
        # A first burst is no rate: at least one horizon is taken as the time in which it came.
        return len(self._sampled) * horizon / min(WINDOW, max(now - self._began, horizon))
