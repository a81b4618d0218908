"""Empirical distributions of durations, asked about operations that are still running (Eq. 2 and 6)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

WINDOW = 512
"""Samples that a class keeps; older ones are forgotten."""
MOST_CLASSES = 2048
"""Keys of a `Backoff` of these, which are larger than other statistics: 4 KiB each."""


class Durations:
    """The last `WINDOW` durations of one class, in seconds; infinite for what never ended."""

    def __init__(self) -> None:
        self._recent = array("d")
        self._oldest = 0
        """Its place, once the window is full."""
        self._sorted: Floats | None = None
        self.count = 0

    def add(self, value: float) -> None:
        self._sorted = None
        if self.count < WINDOW:
            self._recent.append(value)
            self.count += 1
        else:
            self._recent[self._oldest] = value
            self._oldest = (self._oldest + 1) % WINDOW

    def ascending(self) -> Floats:
        if self._sorted is None:
            self._sorted = np.sort(np.array(self._recent))
        return self._sorted


class Running:
    """Operations that are still running: operation i, of class `classes[which[i]]`, has taken `elapsed[i]` seconds so far.

    One that has outlived every stored sample (or of whose class none was ever seen) is beyond the evidence. Its chance of
    ending then follows the scale-free rule Pr(T < e + h | T > e) = h / (e + h): as likely as not it doubles its age.
    """

    def __init__(self, classes: Sequence[Durations], which: NDArray[np.intp], elapsed: Floats) -> None:
        self._elapsed = elapsed
        self._which = which
        sizes = [durations.count for durations in classes]
        ends = np.cumsum(sizes)
        samples = np.concatenate([durations.ascending() for durations in classes])
        self._sums = np.concatenate(([0.0], np.cumsum(np.where(np.isfinite(samples), samples, 0.0))))
        # Complex numbers are ordered by real part, then imaginary part: one search covers the samples of all classes.
        self._samples = _keys(np.repeat(np.arange(len(sizes)), sizes), samples)
        self._past = np.searchsorted(self._samples, _keys(which, elapsed), side="right")
        """Index of the first sample of the class that is > e."""
        self._longer = ends[which] - self._past
        """How many samples of the class are > e."""

    def ends_within(self, horizon: float) -> Floats:
        """Pr(T < e + h | T > e) for each operation, in [0, 1]."""
        return self._probability(self._ending(horizon), horizon)

    def arrivals_within(self, horizon: float) -> tuple[Floats, Floats]:
        """(`ends_within`, seconds until the end given that it comes within the horizon) for each operation.

        The second is the mean over the samples that end there; beyond the evidence the median under the scale-free rule;
        where no sample ends there the horizon.
        """
        ending = self._ending(horizon)
        total = self._sums[self._past + ending] - self._sums[self._past]
        mean = np.clip(total / np.maximum(ending, 1) - self._elapsed, 0.0, horizon)
        beyond = self._elapsed * horizon / np.maximum(2 * self._elapsed + horizon, _TINY)
        residual = np.where(self._longer > 0, np.where(ending > 0, mean, horizon), beyond)
        return self._probability(ending, horizon), residual

    def _probability(self, ending: NDArray[np.intp], horizon: float) -> Floats:
        beyond = horizon / np.maximum(self._elapsed + horizon, _TINY)
        return np.where(self._longer > 0, ending / np.maximum(self._longer, 1), beyond)

    def _ending(self, horizon: float) -> NDArray[np.intp]:
        """How many samples of the class are > e and < e + h."""
        before = np.searchsorted(self._samples, _keys(self._which, self._elapsed + horizon), side="left")
        ending: NDArray[np.intp] = np.maximum(before - self._past, 0)
        return ending


def expected_ends(durations: Durations, elapsed: Floats, horizons: Floats) -> Floats:
    """[horizon]: how many of the running operations of one class will have ended, as `Running.ends_within` has it."""
    samples = durations.ascending()
    # In order they are found several times faster.
    elapsed = np.sort(elapsed)
    evident = int(np.searchsorted(elapsed, samples[-1])) if len(samples) else 0
    beyond, elapsed, horizons = elapsed[evident:], elapsed[:evident], horizons[:, None]
    past = samples.searchsorted(elapsed, side="right")
    ending = np.maximum(samples.searchsorted(elapsed + horizons, side="left") - past, 0)
    ends: Floats = (ending / (len(samples) - past)).sum(axis=1)
    if len(beyond):
        ends += (horizons / np.maximum(beyond + horizons, _TINY)).sum(axis=1)
    return ends


_TINY = np.finfo(np.float64).tiny


def _keys(which: NDArray[np.intp], seconds: Floats) -> NDArray[np.complex128]:
    keys = np.empty(len(which), dtype=np.complex128)
    keys.real = which
    keys.imag = seconds
    return keys
