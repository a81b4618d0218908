"""Forecasters that look at past windows only; the lifecycle forecaster must beat them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prorsa.forecast.forecast import Forecast
from prorsa.forecast.measure import Measured, WindowMeter
from prorsa.lifecycle.snapshot import Snapshot, Transition


class _Windowed:
    """What the baselines share: measuring the windows, and the observed parts of the snapshot.

    Until the first window is over, they answer with the observed backlog. Predicted parts stay 0.
    """

    def __init__(self) -> None:
        self._meter = WindowMeter()

    def observe(self, transition: Transition) -> None:
        self._meter.observe(transition)

    def caches_lost(self) -> None:
        """Of no consequence: all volumes are full prompt lengths."""

    def forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        for _, measured in self._meter.finished(snapshot.time):
            self._learn(measured)
        made = Forecast.of_backlog(snapshot, horizon)
        if (following := self._next()) is not None:
            prefill, admitted = following
            made = replace(made, prefill_tokens=prefill, admitted_tokens=admitted, admitted_kv=admitted)
        self._meter.open(made)
        return made

    def _learn(self, measured: Measured) -> None:
        raise NotImplementedError

    def _next(self) -> tuple[float, float] | None:
        """(prefill tokens, admitted tokens) of the next window; None while no window is over."""
        raise NotImplementedError


class Persistence(_Windowed):
    """The next window is like the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Measured | None = None

    def _learn(self, measured: Measured) -> None:
        self._last = measured

    def _next(self) -> tuple[float, float] | None:
        return (self._last.prefill_tokens, self._last.admitted_tokens) if self._last else None


class Kalman(_Windowed):
    """A local linear trend through the measured windows, one filter for each of the two demands."""

    def __init__(self) -> None:
        super().__init__()
        self._prefill = LocalTrend()
        self._admitted = LocalTrend()

    def _learn(self, measured: Measured) -> None:
        self._prefill.update(measured.prefill_tokens)
        self._admitted.update(measured.admitted_tokens)

    def _next(self) -> tuple[float, float] | None:
        prefill, admitted = self._prefill.next(), self._admitted.next()
        return None if prefill is None or admitted is None else (max(prefill, 0.0), max(admitted, 0.0))


class LocalTrend:
    """Kalman filter of level and slope, with noise that adapts.

    State (level, slope): level' = level + slope + noise, slope' = slope + noise, measured = level + noise. The variances
    of the two state noises, relative to that of the measurement, are not known, so one filter runs for each pair of a
    small grid (a slope noise of 0 with a slope of 0 is the local level model). The answer is that of the filter with the
    highest likelihood, where old innovations are forgotten and the measurement variance is its best estimate.
    """

    LEVEL = (0.01, 0.1, 1.0, 10.0)
    SLOPE = (0.0, 0.01, 0.1)
    FORGET = 0.05
    """Weight of the newest innovation in the likelihood."""

    def __init__(self) -> None:
        level, slope = np.meshgrid(self.LEVEL, self.SLOPE)
        self._level_noise, self._slope_noise = level.ravel(), slope.ravel()
        count = len(self._level_noise)
        self._level, self._slope = np.zeros(count), np.zeros(count)
        # Covariance of (level, slope) in units of the measurement variance.
        self._ll, self._ls, self._ss = np.ones(count), np.zeros(count), self._slope_noise.copy()
        self._squared, self._logs = np.zeros(count), np.zeros(count)
        self._seen = 0

    def update(self, measured: float) -> None:
        self._seen += 1
        if self._seen == 1:
            self._level[:] = measured
            return
        ll = self._ll + 2 * self._ls + self._ss + self._level_noise
        ls = self._ls + self._ss
        ss = self._ss + self._slope_noise
        level = self._level + self._slope
        variance = ll + 1.0
        innovation = measured - level
        self._level = level + ll / variance * innovation
        self._slope = self._slope + ls / variance * innovation
        self._ll, self._ls, self._ss = ll / variance, ls / variance, ss - ls * ls / variance
        weight = max(self.FORGET, 1.0 / (self._seen - 1))
        self._squared += weight * (innovation**2 / variance - self._squared)
        self._logs += weight * (np.log(variance) - self._logs)

    def next(self) -> float | None:
        """The next value; None before the first was seen."""
        if not self._seen:
            return None
        surprise = np.log(np.maximum(self._squared, np.finfo(np.float64).tiny)) + self._logs
        best = int(np.argmin(surprise))
        return float(self._level[best] + self._slope[best])
