"""Empirical distributions of durations, asked about operations that are still running (Eq. 2 and 6)."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WINDOW = 512
"""Samples that a class keeps; older ones are forgotten."""


class Durations:
    """The last `WINDOW` durations of one class, in seconds.

    An operation that has outlived every stored sample (or of which none was ever seen) is beyond the evidence. Its chance
    of ending then follows the scale-free rule Pr(T < e + h | T > e) = h / (e + h): as likely as not it doubles its age.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._sorted: Floats | None = None
        self._sums: Floats = np.zeros(1)

    def add(self, value: float) -> None:
        self._recent.append(value)
        self._sorted = None

    def __len__(self) -> int:
        return len(self._recent)

    def ends_within(self, elapsed: Floats, horizon: Floats | float) -> Floats:
        """Pr(T < e + h | T > e) for every elapsed time e, in [0, 1]; the two arguments broadcast."""
        longer, ending = self._counts(elapsed, horizon)
        beyond = horizon / np.maximum(elapsed + horizon, np.finfo(np.float64).tiny)
        return np.where(longer > 0, ending / np.maximum(longer, 1), beyond)

    def residual(self, elapsed: Floats, horizon: float) -> Floats:
        """Seconds until the end, given that it comes within the horizon: the mean over the samples that end there.

        Beyond the evidence: the median under the scale-free rule. Where no sample ends within the horizon: the horizon.
        """
        samples = self._samples()
        low, high = self._bounds(elapsed, horizon)
        inside = np.maximum(high - low, 1)
        mean = (self._sums[np.maximum(high, low)] - self._sums[low]) / inside - elapsed
        beyond = elapsed * horizon / np.maximum(2 * elapsed + horizon, np.finfo(np.float64).tiny)
        found = np.where(high > low, np.clip(mean, 0.0, horizon), horizon)
        return np.where(low < len(samples), found, beyond)

    def _counts(self, elapsed: Floats, horizon: Floats | float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        low, high = self._bounds(elapsed, horizon)
        return len(self._recent) - low, np.maximum(high - low, 0)

    def _bounds(self, elapsed: Floats, horizon: Floats | float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """How many samples are <= e, and how many are < e + h."""
        samples = self._samples()
        return np.searchsorted(samples, elapsed, side="right"), np.searchsorted(samples, elapsed + horizon, side="left")

    def _samples(self) -> Floats:
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent, dtype=np.float64))
            self._sums = np.concatenate(([0.0], np.cumsum(self._sorted)))
        return self._sorted
