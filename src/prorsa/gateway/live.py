"""The page `/`: what the engines are and were, and what the forecast said against what came, drawn anew at each look."""

from __future__ import annotations

from collections import deque

from prorsa.cluster.control import Status
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, Flip, TurnRecord
from prorsa.engines.protocol import Role
from prorsa.forecast import WindowMeter
from prorsa.lifecycle import Transition
from prorsa.report.legible import escape
from prorsa.report.page import page, section, tiles
from prorsa.report.svg import Chart, Lane, Series, Span, lane_chart, line_chart, number

SHOWN_SECONDS = 300.0
"""How far the charts look back."""
MOST_POINTS = 600
MOST_CHANGES = 4096
REFRESH = 2
"""Seconds between two looks."""
TIME = "seconds ago"


class LiveView:
    """An `Observer` that keeps the last minutes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._meter = WindowMeter()
        self._decisions: deque[Decision] = deque(maxlen=MOST_POINTS)
        self._windows: deque[tuple[float, float, float]] = deque(maxlen=MOST_POINTS)
        """(time, forecast prefill tokens, measured ones) of each window that is over."""
        self._changes: dict[str, deque[tuple[float, str]]] = {}
        """Instance -> when it became what."""
        self._queue: deque[tuple[float, float]] = deque(maxlen=MOST_POINTS)

    def transition(self, transition: Transition) -> None:
        self._meter.observe(transition)

    def decision(self, decision: Decision) -> None:
        for forecast, measured in self._meter.finished(decision.time):
            self._windows.append((forecast.time, forecast.prefill_tokens, measured.prefill_tokens))
        self._meter.open(decision.forecast)
        self._decisions.append(decision)
        self._queue.append((decision.time, float(decision.forecast.ready)))

    def flip(self, flip: Flip) -> None:
        """Seen as changes of its instance."""

    def turn(self, turn: TurnRecord) -> None:
        """Counted by the cluster's status."""

    def instance(self, time: float, name: str, role: Role, state: InstanceState) -> None:
        known = {InstanceState.ROUTED: role.value, InstanceState.DEAD: "dead", InstanceState.STOPPED: "dead"}
        self._changes.setdefault(name, deque(maxlen=MOST_CHANGES)).append((time, known.get(state, "flipping")))

    def render(self, status: Status, in_flight: int) -> str:
        live = sum(status.states.values())
        roles = ", ".join(
            f"{i.name} {i.role if i.state is InstanceState.ROUTED else i.state}" for i in status.instances
        )
        figures = [
            (str(live), "trajectories live", ""),
            (str(in_flight), "requests in service", ""),
            (str(status.waiting), "turns in the ready queue", ""),
            (number(status.turns), f"turns served, {status.resends} resent", ""),
            (number(status.output_tokens), "tokens generated", ""),
            (str(status.flips), f"role flips, {status.failed_flips} failed", ""),
        ]
        body = [
            f'<meta http-equiv="refresh" content="{REFRESH}">',
            tiles(figures),
            section("Roles", self._roles(status.time), "What every engine did in the last minutes."),
            section(
                "Forecast against now",
                self._forecast(status.time),
                "Prompt tokens to prefill in each window: as forecast at its start, and as they came.",
            ),
            section("Queue", self._waiting(status.time), "Prompt tokens in the ready queue at each decision."),
        ]
        problems = [f"{i.name}: {i.problem}" for i in status.instances if i.problem]
        body += [f'<p class="problem">{escape(problem)}</p>' for problem in (*problems, *status.errors)]
        return page(self._name, roles, [], body)

    def _roles(self, now: float) -> Chart | None:
        if not self._changes:
            return None
        start = max(now - SHOWN_SECONDS, min(changes[0][0] for changes in self._changes.values()))
        lanes, used = [], set()
        for name, changes in self._changes.items():
            spans = []
            ends = [time for time, _ in list(changes)[1:]] + [now]
            for (begin, what), end in zip(changes, ends, strict=True):
                if end > start:
                    used.add(what)
                    spans.append(Span(max(begin, start) - now, end - now, what, f"{name}: {what}"))
            lanes.append(Lane(name, spans))
        legend = [(what, what) for what in ("prefill", "decode", "mixed", "flipping", "dead") if what in used]
        x_range = start - now, 0.0
        height = 30 if len(lanes) <= 16 else 12
        return lane_chart(lanes, legend, TIME, "engine", lane_height=height, x_range=x_range)

    def _forecast(self, now: float) -> Chart | None:
        windows = [window for window in self._windows if window[0] > now - SHOWN_SECONDS]
        if not windows:
            return None
        forecasts = [(d.time, d.forecast.prefill_tokens) for d in self._decisions if d.time > now - SHOWN_SECONDS]
        series = [
            Series("measured", "measured", [time - now for time, _, _ in windows], [came for _, _, came in windows]),
            Series("forecast", "prefill", [time - now for time, _ in forecasts], [told for _, told in forecasts]),
        ]
        return line_chart(series, TIME, "tokens", height=220)

    def _waiting(self, now: float) -> Chart | None:
        points = [(time - now, tokens) for time, tokens in self._queue if time > now - SHOWN_SECONDS]
        if not points:
            return None
        return line_chart(
            [Series("waiting", "ready", [x for x, _ in points], [y for _, y in points])], TIME, "tokens", height=180
        )
