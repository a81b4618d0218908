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


@dataclass(slots=True)
class _Window:
    forecast: Forecast
    end: float
    arrived: int = 0
    admitted: int = 0
    resent: set[str] = field(default_factory=set)


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
        event = transition.event
        if isinstance(event, e.Ready):
            for window in self._open:
                if event.time < window.end:
                    window.arrived += transition.tokens
        elif isinstance(event, e.DecodeStarted):
            for window in self._open:
                if event.time < window.end and event.trajectory not in window.resent:
                    window.admitted += transition.tokens_before
        elif isinstance(event, e.Requeued) and transition.before is State.DECODE:
            for window in self._open:
                window.resent.add(event.trajectory)
        elif isinstance(event, e.ToolStarted):
            # The resent turn is over; the next admission of this trajectory is demand again.
            for window in self._open:
                window.resent.discard(event.trajectory)

    def finished(self, time: float) -> list[tuple[Forecast, Measured]]:
        """Close and return the windows that ended by `time`, oldest first."""
        over = [window for window in self._open if window.end <= time]
        self._open = [window for window in self._open if window.end > time]
        return [(window.forecast, _measured(window)) for window in over]


def _measured(window: _Window) -> Measured:
    return Measured(window.forecast.backlog + window.arrived, window.admitted, window.arrived)


def wape(forecasts: Sequence[float], measured: Sequence[float]) -> float:
    """Weighted absolute percentage error as a fraction: the sum of absolute errors over the sum of measured values.

    With nothing measured it is 0 if nothing was forecast either, else infinite. Raises `ValueError` on unequal lengths.
    """
    error = sum(abs(forecast - real) for forecast, real in zip(forecasts, measured, strict=True))
    total = sum(measured)
    if total:
        return error / total
    return float("inf") if error else 0.0
