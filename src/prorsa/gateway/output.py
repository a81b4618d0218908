"""The output of one turn while it arrives: ids, log-probabilities and text, with stop strings found as they complete.

Invariants: what `fresh` has given is never taken back, and all of it together is `text` once the turn has ended. Text that
may yet turn out to be the beginning of a stop string, or of a tool call where those are parsed, is held back until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prorsa.rollout.toolcalls import CLOSE, OPEN, first_call_end


class Output:
    """A `Listener` of the cluster. `step` turns the next id into the text that it completes, "" while it completes none."""

    def __init__(
        self,
        step: Callable[[int], str],
        stop_ids: Sequence[int],
        stops: Sequence[str],
        now: Callable[[], float],
        calls: bool = False,
        news: Callable[[], None] = lambda: None,
        keep_stop: bool = False,
        one_call: bool = False,
    ) -> None:
        """`calls`: hold text from the first tool call on back. `news` is told of each token. `keep_stop`: the stop string
        or stop id that ends the turn is part of the text. `one_call`: the end of the first tool call ends the turn."""
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.stopped: str | int | None = None
        """The stop string or stop id that ended the turn; the closing tag where that was the end of its first call."""
        self.first_at: float | None = None
        self.last_at: float | None = None
        self._step = step
        self._stop_ids = frozenset(stop_ids)
        self._stops = tuple(stops)
        self._reach = max(map(len, stops), default=0)
        self._marks = (*stops, OPEN) if calls else tuple(stops)
        self._calls = calls
        self._call_at = -1
        """Where the first tool call begins in `text`; -1 before there is one."""
        self._given = 0
        self._now = now
        self._news = news
        self._keep_stop = keep_stop
        self._one_call = one_call

    def __call__(self, token: int, logprob: float) -> bool:
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.last_at = self._now()
        if self.first_at is None:
            self.first_at = self.last_at
        if token in self._stop_ids:
            self.stopped = token
        if (self.stopped is None or self._keep_stop) and (piece := self._step(token)):
            self._add(piece)
        self._news()
        return isinstance(self.stopped, str)

    def fresh(self) -> str:
        """Text that has not been given yet and may be."""
        end = self._safe()
        if end <= self._given:
            return ""
        piece = self.text[self._given : end]
        self._given = end
        return piece

    def rest(self) -> str:
        """What `fresh` still held back, once the turn has ended."""
        return self.text[self._given :]

    def _add(self, piece: str) -> None:
        before = len(self.text)
        self.text += piece
        if self._stops:
            start = max(0, before - self._reach + 1)
            found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
            if found:
                at, self.stopped = min(found)
                self.text = self.text[: at + (len(self.stopped) if self._keep_stop else 0)]
        if self._calls and self._call_at < 0:
            self._call_at = self.text.find(OPEN, max(0, before - len(OPEN) + 1))
        if self._one_call and ">" in piece and (end := first_call_end(self.text)) is not None:
            self.stopped, self.text = CLOSE, self.text[:end]

    def _safe(self) -> int:
        """How much of the text may be given."""
        text = self.text
        if self._call_at >= 0:
            end = self._call_at
        elif self.stopped is not None:
            end = len(text)
        else:
            end = len(text) - max((_overlap(text, mark) for mark in self._marks), default=0)
        if self._calls:
            # The blanks before a tool call belong to neither.
            end = len(text[:end].rstrip()) if self.stopped is None or self._call_at >= 0 else end
        return end


def _overlap(text: str, mark: str) -> int:
    """Length of the longest proper beginning of `mark` that `text` ends with."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
