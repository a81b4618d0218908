"""The effective prefill speed theta, measured over busy intervals (paper, 4.2).

A busy interval of an instance runs from the start of service while it is idle until its prefill work drains. Each request
that completed in it counts its full prompt length once, cached prefix included; the interval counts its instance-seconds;
overlapping requests share them. An interval in which a request was cancelled is not used: its time served work that never
counted (the paper asks for uninterrupted intervals, so that tokens and time cover the same requests).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

RECENT = 64
"""Busy intervals that the estimate looks back on, for each workload. Counted, not timed: idling never ages an estimate."""


@dataclass(slots=True)
class _BusyInterval:
    start: float
    workloads: set[Hashable] = field(default_factory=set)
    waiting: dict[str, int] = field(default_factory=dict)
    """Trajectory -> full prompt length, of the requests in service."""
    tokens: int = 0
    interrupted: bool = False


class PrefillSpeed:
    """theta in full-prompt tokens per second of one busy instance.

    `workload` names what makes intervals comparable (a bucket of prompt lengths and prefix-hit ratios, say): each workload
    has its own estimate, and an interval that served several counts for none. Leave it out to have one for all.
    """

    def __init__(self, profile: float) -> None:
        """`profile` is the speed, tokens/s, until an interval has completed."""
        if not profile > 0:
            raise ValueError(f"profiled prefill speed {profile}: it must be positive, tokens/s")
        self._profile = profile
        self._busy: dict[str, _BusyInterval] = {}
        self._recent: dict[Hashable, deque[tuple[int, float]]] = {}

    def started(
        self, instance: str, trajectory: str, tokens: int, time: float, workload: Hashable | None = None
    ) -> None:
        """The instance began to serve a prompt of `tokens`, its full length."""
        interval = self._busy.setdefault(instance, _BusyInterval(time))
        if trajectory in interval.waiting:
            raise ValueError(f"prefill of {trajectory!r} on {instance!r} started twice")
        interval.waiting[trajectory] = tokens
        interval.workloads.add(workload)

    def finished(self, instance: str, trajectory: str, time: float) -> None:
        """The prefill completed (the decode admission)."""
        interval, tokens = self._leave(instance, trajectory)
        interval.tokens += tokens
        self._close_if_drained(instance, time)

    def cancelled(self, instance: str, trajectory: str, time: float) -> None:
        """The prefill ended without completing: cancelled, failed or dropped."""
        interval, _ = self._leave(instance, trajectory)
        interval.interrupted = True
        self._close_if_drained(instance, time)

    def theta(self, workload: Hashable | None = None) -> float:
        """Tokens over instance-seconds of the recent busy intervals, the last valid ones however old; else the profile."""
        recent = self._recent.get(workload)
        if not recent:
            return self._profile
        return sum(tokens for tokens, _ in recent) / sum(seconds for _, seconds in recent)

    def _leave(self, instance: str, trajectory: str) -> tuple[_BusyInterval, int]:
        interval = self._busy.get(instance)
        if interval is None or trajectory not in interval.waiting:
            raise ValueError(f"prefill of {trajectory!r} on {instance!r} ended but never started there")
        return interval, interval.waiting.pop(trajectory)

    def _close_if_drained(self, instance: str, time: float) -> None:
        interval = self._busy[instance]
        if interval.waiting:
            return
        del self._busy[instance]
        seconds = time - interval.start
        if interval.interrupted or len(interval.workloads) > 1 or interval.tokens == 0 or seconds <= 0:
            return
        (workload,) = interval.workloads
        self._recent.setdefault(workload, deque(maxlen=RECENT)).append((interval.tokens, seconds))
