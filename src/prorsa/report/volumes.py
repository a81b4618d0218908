"""Prefill and decode tokens in spans of time, and how numbers spread: plain values that analysis and comparison share.

Prefill is counted by two conventions. Full prompts: every completed prefill with the whole length of its prompt, as the paper
counts. Uncached: only the tokens of it that no cache had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Volume:
    """Tokens between two moments, seconds on the run's clock."""

    start: float
    end: float
    prompt_tokens: float
    """Prefill, full prompts."""
    uncached_tokens: float
    """Prefill, without what a cache had."""
    decoded_tokens: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def ratio(self) -> float | None:
        """Prefill to decode by full prompts; None where nothing was decoded."""
        return self.prompt_tokens / self.decoded_tokens if self.decoded_tokens else None

    @property
    def uncached_ratio(self) -> float | None:
        """Prefill to decode by uncached tokens; None where nothing was decoded."""
        return self.uncached_tokens / self.decoded_tokens if self.decoded_tokens else None


def total(volumes: Sequence[Volume], start: float, end: float) -> Volume:
    """What all of them have together, as of `start` to `end`."""
    return Volume(
        start,
        end,
        sum(volume.prompt_tokens for volume in volumes),
        sum(volume.uncached_tokens for volume in volumes),
        sum(volume.decoded_tokens for volume in volumes),
    )


@dataclass(frozen=True, slots=True)
class Distribution:
    """How `count` values spread. Without values everything else is 0."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    log_sigma: float
    """Standard deviation of the natural logarithms of the positive values; 0 with less than two."""


def distribution(values: Sequence[float] | NDArray[np.float64]) -> Distribution:
    if not len(values):
        return Distribution(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    array = np.asarray(values, dtype=np.float64)
    p50, p95, p99 = (float(value) for value in np.percentile(array, [50, 95, 99]))
    logs = np.log(array[array > 0])
    sigma = float(logs.std(ddof=1)) if len(logs) > 1 else 0.0
    return Distribution(len(array), float(array.mean()), p50, p95, p99, sigma)


def ratio_spread(ratios: Iterable[float | None]) -> float | None:
    """The largest over the smallest (paper, section 3.3); None with fewer than two, or where one is 0."""
    known = [ratio for ratio in ratios if ratio is not None]
    return max(known) / min(known) if len(known) > 1 and min(known) > 0 else None
