"""Which engines hang: those of which nothing moves, neither what they give nor what their scheduler tells of itself.

A scheduler that lives tells a new mark at each step and while it is idle, so a request that waits for KV room or behind a
long prefill is no hang. Only time between checks that were made counts: a process that was itself stopped for an hour has
not watched anybody for an hour.
"""

from __future__ import annotations

from dataclasses import dataclass

from prorsa.engines.protocol import Engine


@dataclass(slots=True)
class _Watched:
    mark: float
    at: float
    silent: float = 0.0


class ProgressWatch:
    """`longest_gap` bounds what one pause between checks adds to a silence, seconds."""

    def __init__(self, longest_gap: float) -> None:
        self._longest_gap = longest_gap
        self._watched: dict[Engine, _Watched] = {}

    def silence(self, engine: Engine, mark: float | None, gave_at: float, now: float) -> float:
        """Seconds for which nothing has moved, by this check; 0 for an engine that tells no mark."""
        if mark is None:
            self._watched.pop(engine, None)
            return 0.0
        watched = self._watched.get(engine)
        if watched is None or mark != watched.mark or gave_at > watched.at:
            watched = self._watched[engine] = _Watched(mark, now)
        else:
            watched.silent += min(now - watched.at, self._longest_gap)
            watched.at = now
        return watched.silent

    def keep(self, engines: set[Engine]) -> None:
        """Forget all others."""
        self._watched = {engine: watched for engine, watched in self._watched.items() if engine in engines}
