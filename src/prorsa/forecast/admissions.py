"""Which requests will have finished their prefill within the horizon, and so enter decode (Eq. 13, 14)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.durations import Floats

FORGET = 1 / 256
"""Weight of the newest prefill in the fit of `PrefillTime`."""

MIN_PREFILLS = 8
"""Prefills seen before the fit replaces the profile."""


class PrefillTime:
    """g: the time that a prefill instance spends on one prompt, as seconds = fixed + tokens * slope.

    Learnt by inverting the recurrence of Eq. 13: a prefill that finished at b on an instance that was free at v, and had
    joined it at u, took b - max(u, v). A cached prefix makes it shorter, so g includes the average cache benefit.
    """

    def __init__(self, tokens_per_s: float, forget: float = FORGET) -> None:
        """`tokens_per_s` is the profiled speed of one instance, in full-prompt tokens/s, until enough prefills are seen.

        `forget` is the weight of the newest prefill.
        """
        self._kept = 1.0 - forget
        self._profile = 1.0 / tokens_per_s
        self._seen = 0
        self._weight = 0.0
        # Means of tokens, seconds, tokens^2 and tokens * seconds, newer prefills weighing more.
        self._x = self._y = self._xx = self._xy = 0.0
        self._free: dict[str, float] = {}

    def finished(self, instance: str, tokens: int, joined: float, time: float, weight: float = 1.0) -> None:
        """A prefill of `tokens` that joined the instance at `joined` finished at `time`; it counts `weight` times."""
        seconds = max(time - max(joined, self.free_since(instance)), 0.0)
        self._free[instance] = time
        if not weight:
            return
        self._seen += 1
        self._weight = self._kept * self._weight + weight
        weight /= self._weight
        self._x += weight * (tokens - self._x)
        self._y += weight * (seconds - self._y)
        self._xx += weight * (tokens * tokens - self._xx)
        self._xy += weight * (tokens * seconds - self._xy)

    def free_since(self, instance: str) -> float:
        """When the instance last finished a prefill; minus infinity when it never did."""
        return self._free.get(instance, float("-inf"))

    @property
    def learnt(self) -> bool:
        """Whether the fit has replaced the profile."""
        return self._seen >= MIN_PREFILLS

    def line(self) -> tuple[float, float]:
        """(fixed seconds, seconds a token): least squares, neither negative."""
        if not self.learnt or self._y <= 0.0 or self._x <= 0.0:
            return 0.0, self._profile
        variance = self._xx - self._x * self._x
        # Prompts of one length do not tell the fixed part from the slope.
        slope = (self._xy - self._x * self._y) / variance if variance > 1e-6 * self._xx else self._y / self._x
        if slope <= 0.0:
            return self._y, 0.0
        fixed = self._y - slope * self._x
        return (fixed, slope) if fixed >= 0.0 else (0.0, self._xy / self._xx)

    def __call__(self, tokens: Floats) -> Floats:
        fixed, slope = self.line()
        return fixed + slope * tokens


def finish_inflight(
    time: float, instance: NDArray[np.int32], joined: Floats, service: Floats, free_since: Floats
) -> Floats:
    """Finish times of the prefills that instances hold at `time`, one for each row of `instance`.

    An instance serves them in the order in which they joined. Its first has progressed since it joined or since the
    instance finished the one before (`free_since`, by instance code); those behind it have not begun. One that is overdue
    is taken to finish now.
    """
    if not len(instance):
        return np.zeros(0)
    order = np.lexsort((joined, instance))
    on = instance[order]
    first = np.concatenate(([True], on[1:] != on[:-1]))
    heads = np.flatnonzero(first)
    left = service[order]
    began = np.maximum(joined[order][heads], free_since[on[heads]])
    left[heads] = np.maximum(left[heads] - (time - began), 0.0)
    work = np.cumsum(left)
    before = (work - left)[heads]
    finish = np.empty(len(on))
    finish[order] = time + work - np.repeat(before, np.diff(np.append(heads, len(on))))
    return finish


def finish_queued(arrival: Floats, service: Floats, free: Sequence[float], end: float) -> Floats:
    """Finish times (Eq. 13) of requests in scheduling order, each on the instance that is free first.

    `free` is when each prefill instance is next free (v_m). Requests that do not finish before `end` get infinity. Stops
    as soon as no instance is free before `end`, so the work is bounded by what fits into the horizon.
    """
    finish = np.full(len(arrival), np.inf)
    next_free = [time for time in free if time < end]
    if not next_free:
        return finish
    heapify(next_free)
    served: list[float] = []
    for joins, takes in zip(arrival.tolist(), service.tolist(), strict=True):
        soonest = next_free[0]
        if soonest >= end:
            break
        done = (joins if joins > soonest else soonest) + takes
        served.append(done)
        heapreplace(next_free, done)
    finish[: len(served)] = served
    finish[finish >= end] = np.inf
    return finish
