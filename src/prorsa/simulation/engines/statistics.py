"""What the simulated engines count, and the books that show that no token was lost or made twice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

BIN_S = 10.0
"""Width of the bins of `Statistics.itl_over_time`, seconds."""


class ConservationError(Exception):
    """The simulation's books do not balance: a bug of the simulator. The message says which sums differ."""


@dataclass
class Histogram:
    """Weights of positive values in logarithmic bins, about 2 % wide."""

    BINS_PER_E: ClassVar = 50
    weights: dict[int, float] = field(default_factory=dict)

    def add(self, value: float, weight: float) -> None:
        index = math.floor(math.log(value) * self.BINS_PER_E) if value > 0 else -(1 << 30)
        self.weights[index] = self.weights.get(index, 0.0) + weight

    def percentile(self, q: float) -> float:
        """The value below which a share `q` (0 to 1) of the weight lies, to a bin's width; NaN when empty."""
        wanted = q * sum(self.weights.values())
        for index in sorted(self.weights):
            wanted -= self.weights[index]
            if wanted <= 1e-9:
                return math.exp((index + 0.5) / self.BINS_PER_E)
        return math.nan


@dataclass
class Statistics:
    """Summed over all engines of a cluster. Times in engine-seconds, tokens in tokens."""

    steps: int = 0
    prefill_steps: int = 0
    """Steps in which any rank prefilled."""
    step_s: float = 0.0
    """Time that engines spent in steps."""
    interference_s: float = 0.0
    """Mean over the ranks of the time that decoding ones waited at the barrier for ranks that prefilled."""
    imbalance_s: float = 0.0
    """The same for every other wait at the barrier."""
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the instance still had."""
    fetched_tokens: int = 0
    """Prompt tokens that came from the KV store."""
    moved_tokens: int = 0
    """From prefill to decode."""
    decoded_tokens: int = 0
    """Generated, those that a prefill ends with included."""
    retracted: int = 0
    """Decodes that lost their KV cache to older ones."""
    itl: Histogram = field(default_factory=Histogram)
    """Inter-token latency, weighted by tokens. From the second token of a decode that nothing interrupts."""
    itl_over_time: dict[int, tuple[float, float]] = field(default_factory=dict)
    """(seconds, tokens) by bin of `BIN_S`: the latencies of the tokens that were decoded then."""
    prompts_over_time: dict[int, tuple[int, int]] = field(default_factory=dict)
    """(full length, computed tokens) by bin of `BIN_S`: of the prompts whose prefill was done then, resends included."""

    @property
    def idle_ratio(self) -> float:
        """Share of the step time that ranks waited at the barrier."""
        return (self.interference_s + self.imbalance_s) / self.step_s if self.step_s else 0.0

    def add_prompt(self, time: float, full: int, computed: int) -> None:
        index = int(time / BIN_S)
        before = self.prompts_over_time.get(index, (0, 0))
        self.prompts_over_time[index] = (before[0] + full, before[1] + computed)

    def add_latency(self, start: float, end: float, latency: float, tokens: float) -> None:
        """`tokens` tokens made evenly from `start` to `end`, each `latency` seconds after the one before."""
        self.itl.add(latency, tokens)
        first, last = int(start / BIN_S), int(end / BIN_S)
        for index in range(first, last + 1):
            share = 1.0
            if first != last:
                share = (min(end, (index + 1) * BIN_S) - max(start, index * BIN_S)) / (end - start)
            seconds, count = self.itl_over_time.get(index, (0.0, 0.0))
            self.itl_over_time[index] = (seconds + latency * tokens * share, count + tokens * share)


@dataclass
class Ledger:
    """What became of the tokens that `Statistics` counts as they are made. Booked when a request, or its part, ends."""

    prompts: int = 0
    """Of completed prefills; of those, `computed` were prefilled."""
    computed: int = 0
    recomputed: int = 0
    """Of `computed`, those of requests that were sent again."""
    cut: int = 0
    """Prefilled for requests that ended before their prefill did."""
    handed: int = 0
    """Prompt tokens whose KV cache was handed over."""
    lost: int = 0
    """Moved for handovers that broke."""
    streamed: int = 0
    unread: int = 0
    """Generated for requests whose stream was closed or broken before it told them."""

    def check(self, statistics: Statistics, prefilling: int, moving: int, untold: int) -> None:
        """`prefilling`, `moving` and `untold` are what live requests have so far. Raises `ConservationError`."""
        s = statistics
        sums = {
            "prompt tokens = computed + cached + fetched": (
                self.prompts,
                self.computed + s.cached_tokens + s.fetched_tokens,
            ),
            "prefilled = of completed + of cut + of live requests": (
                s.prefilled_tokens,
                self.computed + self.cut + prefilling,
            ),
            "moved = handed over + lost + on the way": (s.moved_tokens, self.handed + self.lost + moving),
            "decoded = streamed + unread + not yet told": (s.decoded_tokens, self.streamed + self.unread + untold),
        }
        wrong = [f"{rule}: {left} != {right}" for rule, (left, right) in sums.items() if left != right]
        if wrong:
            raise ConservationError("; ".join(wrong))
