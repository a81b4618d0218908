"""How fast the engines are: decodes of each instance, prompts of those that prefill.

A mixed instance prefills and decodes: its prompts take longer than where nothing decodes, and its decodes hardly go on while
it has prompts. So both are learnt for either case, and a change of roles or the end of a queue changes no speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from prorsa.forecast.admissions import PrefillTime
from prorsa.forecast.backoff import Ema

FORGET_LINE = 1 / 1024
"""Weight of the newest prefill that others waited for in the line of prefill time."""
LARGE = 3000.0
"""A prefill that computes so many tokens counts half in that line, and larger ones count less: they are off by more seconds,
and those that a weight update leaves behind would bend the line for all the small ones that come after."""
FORGET_LATENCY = 1 / 2048
"""Weight of the newest prefill in the latency: the last second alone is an accident."""
SPARE = 1.5
"""Where nothing waits, instances are taken to be able to do so many times as much as they did of late."""


class Busy:
    """How long each instance has had prompts to prefill, in seconds."""

    def __init__(self) -> None:
        self._prompts: dict[str, int] = {}
        self._since: dict[str, float] = {}
        """Of the instances that have some."""
        self._seconds: dict[str, float] = {}
        """Until then."""

    def joined(self, instance: str, time: float) -> None:
        prompts = self._prompts.get(instance, 0)
        self._prompts[instance] = prompts + 1
        if not prompts:
            self._since[instance] = time

    def left(self, instance: str, time: float) -> None:
        self._prompts[instance] -= 1
        if not self._prompts[instance]:
            self._seconds[instance] = self._seconds.get(instance, 0.0) + time - self._since.pop(instance)

    def until(self, instance: str, time: float) -> float:
        return self._seconds.get(instance, 0.0) + time - self._since.get(instance, time)


class DecodeSpeed:
    """Tokens/s of a decode by instance: the tokens of the last turns over the time that they took.

    Turns during most of which the instance had prompts to prefill are kept apart from the others.
    """

    FORGET = 1 / 64

    def __init__(self) -> None:
        self._sums: dict[tuple[str | None, bool], tuple[float, float]] = {}

    def add(self, instance: str, busy: bool, tokens: int, seconds: float) -> None:
        kept = 1.0 - self.FORGET
        for key in ((instance, busy), (None, busy)):
            before = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = (kept * before[0] + tokens, kept * before[1] + seconds)

    def of(self, instance: str | None = None, busy: bool = False) -> float:
        """Where nothing is known of this instance, of all; else of the other turns; 0 where no turn has ended."""
        for key in ((instance, busy), (None, busy), (instance, not busy), (None, not busy)):
            tokens, seconds = self._sums.get(key, (0.0, 0.0))
            if seconds > 0.0:
                return tokens / seconds
        return 0.0


class Rate:
    """How often something happens."""

    SECONDS = 20.0
    """What is so long ago counts 1/e."""

    def __init__(self) -> None:
        self._count = self._last = 0.0

    def add(self, time: float) -> None:
        self._count = 1.0 + self._left(time)
        self._last = time

    def at(self, time: float) -> float:
        """A second."""
        return self._left(time) / self.SECONDS

    def _left(self, time: float) -> float:
        return self._count * math.exp((self._last - time) / self.SECONDS)


@dataclass(frozen=True, slots=True)
class Server:
    """The prefill instances as one that serves its queue in order."""

    fixed: float
    """Seconds of an instance that a prompt takes, and those that each of its tokens to compute adds."""
    slope: float
    instances: float
    """So many instances of that speed do what these do."""
    latency: float
    """Seconds that a prompt takes while nothing waits."""


class PrefillSpeeds:
    """Of instances that only prefill (False) and of mixed ones (True); one stands for the other until that is known."""

    def __init__(self, tokens_per_s: float) -> None:
        self._times = [PrefillTime(tokens_per_s, FORGET_LINE) for _ in range(2)]
        """Of tokens to compute."""
        self._latencies = [Ema(FORGET_LATENCY) for _ in range(2)]

    def finished(self, mixed: bool, instance: str, new: int, joined: float, time: float, waits: bool) -> None:
        """A prefill that computed `new` tokens; `waits` says whether more prompts wait for an instance.

        Only then does the time between two prefills say how long one takes: an engine does several at once.
        """
        self._times[mixed].finished(instance, new, joined, time, waits / (1.0 + new / LARGE))
        if not waits:
            self._latencies[mixed].add(time - joined)

    def server(self, prefill: int, mixed: int, new: float, rate: float) -> Server:
        """Of so many instances of either kind, for prompts of about `new` tokens to compute.

        `rate` are the prompts a second that they do without a queue, 0 where there is one: then the line may be old.
        """
        times = [self._times[kind if self._times[kind].learnt else not kind] for kind in (False, True)]
        latencies = [self._latencies[kind if self._latencies[kind].count else not kind].value for kind in (False, True)]
        seconds = [float(time(np.array(max(new, 1.0)))) for time in times]
        kind = not prefill
        instances = prefill + mixed * seconds[False] / seconds[True] if prefill else float(mixed)
        if instances:
            instances = max(instances, SPARE * rate * seconds[kind])
        latency = (prefill * latencies[False] + mixed * latencies[True]) / max(prefill + mixed, 1)
        return Server(*times[kind].line(), instances, latency)
