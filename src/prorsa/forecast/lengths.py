"""Expected prompt lengths of requests that do not exist yet: x_k of a first prompt, x_hat after a tool result."""

from __future__ import annotations

from prorsa.forecast.backoff import Backoff, Ema

ALPHA = 1 / 256
"""A plain mean over the first 256 prompts of a class, then slowly forgetting."""


class PromptLengths:
    """All lengths are full lengths in tokens (paper, B.1). 0 until the first one was seen."""

    def __init__(self) -> None:
        self._first = Backoff(lambda: Ema(ALPHA))
        self._appended = Backoff(lambda: Ema(ALPHA))

    def add_first(self, task: str, tokens: int) -> None:
        self._first.add((task,), tokens)

    def add_appended(self, task: str, tool: str, tokens: int) -> None:
        """A tool result made the context `tokens` longer. One that became shorter says nothing of results."""
        if tokens >= 0:
            self._appended.add((task, tool), tokens)

    def first(self, task: str | None = None) -> float:
        """Expected length of a first prompt; without a task, of whatever the sampler draws next."""
        found = self._first.find(() if task is None else (task,))
        return found.value if found else 0.0

    def appended(self, task: str, tool: str) -> Ema | None:
        """The mean of what a result of the tool appends; None until any tool has returned."""
        return self._appended.find((task, tool))

    def appended_by_any(self, task: str) -> float:
        """What the result of whichever tool is called next appends."""
        found = self._appended.find((task,))
        return found.value if found else 0.0
