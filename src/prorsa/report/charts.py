"""The charts of a run. Every x axis of time starts at the run's first event."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from prorsa.forecast import Forecast, Measured
from prorsa.lifecycle import Dropped, State
from prorsa.report.measures import (
    Latencies,
    Replay,
    RoleSpan,
    Stay,
    Window,
    cumulative_tokens,
    inter_token_latencies,
    replay,
    rewards_by_order,
    role_spans,
)
from prorsa.report.rundir import Run, StepRecord
from prorsa.report.svg import Chart, Lane, Series, Span, lane_chart, line_chart, number
from prorsa.report.volumes import Floats

MOST_LANES = 150
"""Trajectories in the timeline; of more, evenly spaced ones are shown."""
MOST_POINTS = 500
"""Points of a cumulative line."""

TIME = "time since the start, s"
ROLE_COLOURS = ("prefill", "decode", "mixed", "flipping", "dead")
STATE_COLOURS = {
    State.SAMPLED: "sampled",
    State.SANDBOX_STARTING: "sandbox",
    State.READY: "ready",
    State.PREFILL: "prefill",
    State.DECODE: "decode",
    State.TOOL: "tool",
    State.REWARD: "reward",
}


@dataclass(frozen=True, slots=True)
class Drawn:
    """A run with what its charts need, computed once."""

    run: Run
    replayed: Replay
    spans: list[RoleSpan]
    latencies: Latencies
    start: float
    end: float

    @property
    def x_range(self) -> tuple[float, float]:
        return 0.0, max(self.end - self.start, 1e-3)

    @property
    def marks(self) -> list[float]:
        """Ends of the training steps."""
        return [step.time - self.start for step in self.run.steps if step.split == "train"]


def prepare(run: Run) -> Drawn:
    replayed = replay(run)
    times = [change.time for change in run.instances] + [flip.time for flip in run.flips]
    start = min([*times, replayed.start]) if run.events else min(times, default=0.0)
    end = max([*times, replayed.end])
    return Drawn(
        run=run,
        replayed=replayed,
        spans=role_spans(run, end),
        latencies=inter_token_latencies(run.turns),
        start=start,
        end=end,
    )


def reward_chart(drawn: Drawn) -> Chart | None:
    """Over the steps where the run has any, else over time."""
    steps = drawn.run.steps
    if steps:
        series = [
            Series(f"mean reward, {split}", colour, *_by_step(steps, split), dots=True)
            for split, colour in (("train", "prefill"), ("test", "decode"))
            if any(step.split == split for step in steps)
        ]
        return line_chart(series, "step", "mean reward", y_top=_reward_top(series), whole_x=True)
    times, rewards = rewards_by_order(drawn.replayed)
    if not len(times):
        return None
    series = [Series("mean reward of a tenth of the trajectories", "prefill", times - drawn.start, rewards, dots=True)]
    return line_chart(series, TIME, "mean reward", x_range=drawn.x_range, y_top=_reward_top(series))


def _by_step(steps: Sequence[StepRecord], split: str) -> tuple[list[float], list[float]]:
    chosen = [step for step in steps if step.split == split]
    return [float(step.step) for step in chosen], [step.reward for step in chosen]


def _reward_top(series: Sequence[Series]) -> float | None:
    """Rewards are mostly fractions: show the whole way to 1."""
    highest = max((value for one in series for value in one.y), default=1.0)
    return 1.05 if highest <= 1.0 else None


def roles_chart(drawn: Drawn) -> Chart | None:
    if not drawn.spans:
        return None
    names = list(dict.fromkeys(span.instance for span in drawn.spans))
    lanes = [
        Lane(name, [_role_bar(span, drawn.start) for span in drawn.spans if span.instance == name]) for name in names
    ]
    used = {span.what for span in drawn.spans}
    legend = [(what, what) for what in ROLE_COLOURS if what in used]
    return lane_chart(
        lanes,
        legend,
        TIME,
        "instance",
        lane_height=30 if len(lanes) <= 16 else 12,
        x_range=drawn.x_range,
        marks=drawn.marks,
    )


def _role_bar(span: RoleSpan, start: float) -> Span:
    title = f"{span.instance}: {span.what} for {span.end - span.start:.2f} s from {span.start - start:.2f} s"
    return Span(span.start - start, span.end - start, span.what, title)


def share_chart(drawn: Drawn) -> Chart | None:
    """The split that the demand asks for, and the one that there was. Where nothing is asked for, the line has no point."""
    decisions = [decided.decision for decided in drawn.run.decided]
    shares = [
        (
            decision.time - drawn.start,
            decision.demand.prefill_instances / (decision.demand.prefill_instances + decision.demand.decode_instances),
            decision.current.prefill / (decision.current.prefill + decision.current.decode),
        )
        for decision in decisions
        if decision.current.total > decision.current.mixed
        and decision.demand.prefill_instances + decision.demand.decode_instances > 0
    ]
    if not shares:
        return None
    x, asked, given = (list(column) for column in zip(*shares, strict=True))
    series = [
        Series("of the demand", "prefill", x, asked, dashed=True),
        Series("of the instances, when it was decided", "measured", x, given),
    ]
    return line_chart(series, TIME, "prefill share", height=220, x_range=drawn.x_range, y_top=1.0, marks=drawn.marks)


def prefill_forecast_chart(drawn: Drawn) -> Chart | None:
    return forecast_chart(drawn.replayed.windows, PREFILL, drawn.start, drawn.x_range, drawn.marks)


def admissions_forecast_chart(drawn: Drawn) -> Chart | None:
    return forecast_chart(drawn.replayed.windows, ADMITTED, drawn.start, drawn.x_range, drawn.marks)


@dataclass(frozen=True, slots=True)
class Volumes:
    """One of the two volumes that are forecast."""

    colour: str
    of: Callable[[Forecast | Measured], float]


PREFILL = Volumes("prefill", attrgetter("prefill_tokens"))
ADMITTED = Volumes("decode", attrgetter("admitted_tokens"))


def forecast_chart(
    windows: Sequence[Window],
    volumes: Volumes,
    start: float,
    x_range: tuple[float, float] | None = None,
    marks: Sequence[float] = (),
) -> Chart | None:
    """Forecast, persistence and what happened. `start` is where the x axis has its 0."""
    if not windows:
        return None
    x = [window.forecast.time - start for window in windows]
    few = len(windows) <= 60
    forecast = [volumes.of(window.forecast) for window in windows]
    persistence = [volumes.of(window.persistence) for window in windows]
    measured = [volumes.of(window.measured) for window in windows]
    series = [
        Series("persistence", "persistence", x, persistence, dashed=True),
        Series("measured", "measured", x, measured, dots=few),
        Series("forecast", volumes.colour, x, forecast, dots=few),
    ]
    label = f"tokens in the next {number(windows[-1].forecast.horizon)} s"
    return line_chart(series, TIME, label, x_range=x_range, marks=marks)


def tokens_chart(drawn: Drawn) -> Chart | None:
    if not drawn.run.turns:
        return None
    cumulative = cumulative_tokens(drawn.run.turns)
    series = [
        _thinned(Series(name, colour, points[0] - drawn.start, points[1], dashed=dashed))
        for name, colour, points, dashed in (
            ("prefill, full prompts", "prefill", cumulative.prompt, False),
            ("prefill, computed (not cached)", "prefill", cumulative.computed, True),
            ("decode", "decode", cumulative.decoded, False),
        )
    ]
    return line_chart(series, TIME, "tokens so far", x_range=drawn.x_range, marks=drawn.marks)


def _thinned(series: Series) -> Series:
    count = len(series.x)
    if count <= MOST_POINTS:
        return series
    kept = np.linspace(0, count - 1, MOST_POINTS).astype(int)
    x: Floats = np.asarray(series.x)[kept]
    y: Floats = np.asarray(series.y)[kept]
    return Series(series.name, series.colour, x, y, series.dashed, series.dots)


def latency_chart(drawn: Drawn) -> Chart | None:
    latencies = drawn.latencies
    if not len(latencies.times):
        return None
    x = latencies.times - drawn.start
    series = [
        Series("99th percentile", "decode", x, 1000 * latencies.p99),
        Series("median", "prefill", x, 1000 * latencies.p50),
    ]
    return line_chart(series, TIME, "ms (log scale)", x_range=drawn.x_range, log=True, marks=drawn.marks)


def timeline_chart(drawn: Drawn) -> Chart | None:
    names = list(drawn.replayed.stays)
    if not names:
        return None
    if len(names) > MOST_LANES:
        names = [names[index] for index in np.linspace(0, len(names) - 1, MOST_LANES).astype(int)]
    lanes = [Lane(name, _trajectory_bars(drawn, name)) for name in names]
    legend = [(state.name.lower().replace("_", " "), colour) for state, colour in STATE_COLOURS.items()]
    return lane_chart(
        lanes,
        [*legend, ("dropped", "dropped")],
        TIME,
        "trajectories, in the order of sampling",
        lane_height=max(4.0, min(14.0, 600 / len(lanes))),
        x_range=drawn.x_range,
        marks=drawn.marks,
    )


def _trajectory_bars(drawn: Drawn, name: str) -> list[Span]:
    bars = [_stay_bar(stay, name, drawn.start) for stay in drawn.replayed.stays[name] if stay.end > stay.start]
    end = drawn.replayed.ends.get(name)
    if isinstance(end, Dropped):
        at = end.time - drawn.start
        bars.append(Span(at, at + 0.006 * drawn.x_range[1], "dropped", f"{name}: dropped, {end.reason}"))
    return bars


def _stay_bar(stay: Stay, name: str, start: float) -> Span:
    what = stay.state.name.lower().replace("_", " ")
    title = f"{name}: {what} for {stay.end - stay.start:.3f} s from {stay.start - start:.2f} s"
    return Span(stay.start - start, stay.end - start, STATE_COLOURS[stay.state], title)
