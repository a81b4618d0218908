"""What really happened in the window of a forecast, counted the way the forecast counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prorsa.forecast.forecast import Forecast
from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import Transition
from prorsa.lifecycle.states import State


@dataclass(frozen=True, slots=True)
class Measured:
    """All volumes are full prompt lengths in tokens."""

    prefill_tokens: float
    """The backlog at the window's start plus `arrived_tokens`; compares with `Forecast.prefill_tokens`."""
    admitted_tokens: float
    """Decode admissions inside the window; compares with `Forecast.admitted_tokens`."""
    arrived_tokens: float
    """Prefill request arrivals inside the window; compares with `Forecast.bias * Forecast.predicted`."""
    new_arrived_tokens: float
    """Of `arrived_tokens`, those of trajectories that were sampled inside the window."""
    new_admitted_tokens: float
    """Of `admitted_tokens`, those of trajectories that were sampled inside the window."""


@dataclass(slots=True)
class _Window:
    forecast: Forecast
    end: float
    arrived: int = 0
    admitted: int = 0
    new_arrived: int = 0
    new_admitted: int = 0
    resent: set[str] = field(default_factory=set)
    """Trajectories in a turn that was cancelled in this window while it was decoding."""

    def observe(self, transition: Transition) -> None:
        event = transition.event
        new = transition.sampled_at >= self.forecast.time
        if isinstance(event, e.Ready):
            self.arrived += transition.tokens
            self.new_arrived += new * transition.tokens
        elif isinstance(event, e.DecodeStarted):
            if event.trajectory not in self.resent:
                self.admitted += transition.tokens
                self.new_admitted += new * transition.tokens
        elif isinstance(event, e.Requeued) and transition.before is State.DECODE:
            self.resent.add(event.trajectory)
        elif isinstance(event, e.ToolStarted):
            self.resent.discard(event.trajectory)

    def measured(self) -> Measured:
        return Measured(
            prefill_tokens=self.forecast.backlog + self.arrived,
            admitted_tokens=self.admitted,
            arrived_tokens=self.arrived,
            new_arrived_tokens=self.new_arrived,
            new_admitted_tokens=self.new_admitted,
        )


class WindowMeter:
    """Counts arrivals and admissions in the windows that were opened.

    A window holds the transitions observed after it was opened and timed before its end. A request that is cancelled and
    resent inside it counts neither as an arrival nor, if it was decoding already, as an admission: a resend follows from
    the decision (or a weight update), not from the demand that was to be forecast.
    """

    def __init__(self) -> None:
        self._open: list[_Window] = []

    def open(self, forecast: Forecast) -> None:
        """Start counting for the window of `forecast`. Call it right after the snapshot that the forecast was made from."""
        self._open.append(_Window(forecast, forecast.time + forecast.horizon))

    def observe(self, transition: Transition) -> None:
        for window in self._open:
            if transition.event.time < window.end:
                window.observe(transition)

    def finished(self, time: float) -> list[tuple[Forecast, Measured]]:
        """Close and return the windows that ended by `time`, oldest first."""
        over = [window for window in self._open if window.end <= time]
        self._open = [window for window in self._open if window.end > time]
        return [(window.forecast, window.measured()) for window in over]


def wape(forecasts: Sequence[float], measured: Sequence[float]) -> float:
    """Weighted absolute percentage error as a fraction: the sum of absolute errors over the sum of measured values.

    With nothing measured it is 0 if nothing was forecast either, else infinite. Raises `ValueError` on unequal lengths.
    """
    error = sum(abs(forecast - real) for forecast, real in zip(forecasts, measured, strict=True))
    total = sum(measured)
    if total:
        return error / total
    return float("inf") if error else 0.0
