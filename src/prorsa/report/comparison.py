"""Several policies side by side on the same workload: the outcome of each, the table, the JSON and the page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from prorsa.forecast import Forecast, Measured
from prorsa.report.charts import ADMITTED, PREFILL, TIME, forecast_chart
from prorsa.report.legible import plain_text
from prorsa.report.measures import Errors, Window, forecast_errors
from prorsa.report.page import page, section, table, tiles
from prorsa.report.plain import plain, write_plain
from prorsa.report.rundir import Json
from prorsa.report.svg import Bars, Chart, Series, bar_chart, line_chart, number
from prorsa.report.volumes import Distribution, Volume, ratio_spread, total

COLOURS = ("persistence", "prefill", "decode", "tool", "mixed", "reward", "sandbox", "dropped", "measured")
"""Of the policies in charts, in their order and then from the start again."""
MOST_BARS = 12
"""Steps whose rollout times are drawn as bars; more are drawn as lines."""

Points = tuple[tuple[float, float], ...]
"""(time in seconds, value), in the order of time."""


@dataclass(frozen=True, slots=True)
class RoleCount:
    """Instances in service by role, from `time` until the next count."""

    time: float
    prefill: int
    decode: int
    mixed: int


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a schedule. `target` is what it struck; None where there was nothing of the kind to strike."""

    time: float
    kind: str
    target: str | None


@dataclass(frozen=True, slots=True)
class Toll:
    """What became of a run under a schedule of faults, or of the one that it is held against, which had none."""

    faults: tuple[Fault, ...]
    restarts: int
    """Instances that were started anew."""
    recomputed_tokens: int
    """Prompt tokens that were computed for requests that were sent again; flips and weight updates resend too."""
    unread_tokens: int
    """Generated, and lost before anybody had them."""
    lost: int
    """Trajectories that were dropped for anything but staleness."""
    slowdown: float
    """Mean rollout time of a step, over that of the run without faults."""


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What one policy made of the workload. Times are seconds of the run, shares are fractions."""

    name: str
    step_s: tuple[float, ...]
    """What the rollout of each step took."""
    trajectory_s: Distribution
    """From sampled until done, of the trajectories that are done."""
    done: int
    dropped: int
    replaced_groups: int
    """Groups that had to be sampled anew since a member was dropped."""
    output_tokens: int
    output_tokens_per_s: float
    interference_idle: float
    """Share of the engines' time that ranks waited for another one's prefill while they decoded."""
    imbalance_idle: float
    """Share of the engines' time that ranks waited at the barrier for any other reason."""
    itl_p50: float
    """Inter-token latency, weighted by tokens."""
    itl_p99: float
    itl_over_time: Points
    """Mean inter-token latency of a bin, at its middle."""
    roles: tuple[RoleCount, ...]
    flips: int
    resends: int
    """Attempts that were cancelled and resent."""
    windows: tuple[Window, ...]
    """Forecast, persistence and what happened; empty where nothing was forecast."""
    step_volumes: tuple[Volume, ...]
    window_volumes: tuple[Volume, ...]
    """In equal windows, of 10 s by default."""
    kv_use: Points
    """Share of the decode instances' KV capacity that was in use."""
    toll: Toll | None = None
    """None where no schedule of faults was asked for."""

    @property
    def rollout_s(self) -> float:
        """Mean over the steps."""
        return fmean(self.step_s) if self.step_s else math.nan

    @property
    def errors(self) -> Errors | None:
        """None where nothing was forecast."""
        return forecast_errors(self.windows) if self.windows else None

    @property
    def ratio(self) -> float | None:
        """Prefill to decode tokens over all steps, by full prompts."""
        return total(self.step_volumes, 0.0, sum(self.step_s)).ratio

    @property
    def uncached_ratio(self) -> float | None:
        return total(self.step_volumes, 0.0, sum(self.step_s)).uncached_ratio

    @property
    def ratio_spread(self) -> float | None:
        """The largest ratio of a step over the smallest, by full prompts."""
        return ratio_spread(volume.ratio for volume in self.step_volumes)

    @property
    def kv_mean(self) -> float | None:
        return fmean(share for _, share in self.kv_use) if self.kv_use else None

    @property
    def kv_peak(self) -> float | None:
        return max((share for _, share in self.kv_use), default=None)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Prints as a table. The first outcome is what the others are compared with."""

    name: str
    outcomes: tuple[PolicyOutcome, ...]
    """One or more."""
    notes: tuple[str, ...] = ()
    """What a reader should know of the scenario."""

    def speed_up(self, outcome: PolicyOutcome) -> float:
        """How many times faster a step's rollout is than under the first policy, on the mean."""
        return self.outcomes[0].rollout_s / outcome.rollout_s if outcome.rollout_s else math.nan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield plain_text(self.name, style="bold")
        for note in self.notes:
            yield plain_text(note, style="dim")
        shown = Table(box=None, pad_edge=False)
        shown.add_column(style="dim")
        for outcome in self.outcomes:
            shown.add_column(plain_text(outcome.name), justify="right")
        for row in figures(self):
            shown.add_row(*map(Text, row))
        yield shown


def figures(comparison: Comparison) -> Iterator[list[str]]:
    """What is compared, a row each: its name, then a cell for every outcome."""
    outcomes = comparison.outcomes
    seconds = [outcome.trajectory_s for outcome in outcomes]
    yield ["rollout of a step, s", *(_number(outcome.rollout_s) for outcome in outcomes)]
    yield ["speed-up", *(_times(comparison.speed_up(outcome)) for outcome in outcomes)]
    yield ["trajectory mean, s", *(_number(one.mean) for one in seconds)]
    yield ["trajectory p50, s", *(_number(one.p50) for one in seconds)]
    yield ["trajectory p99, s", *(_number(one.p99) for one in seconds)]
    yield ["output tokens/s", *(_number(outcome.output_tokens_per_s) for outcome in outcomes)]
    yield ["idle by interference", *(_share(outcome.interference_idle) for outcome in outcomes)]
    yield ["idle at the barrier otherwise", *(_share(outcome.imbalance_idle) for outcome in outcomes)]
    yield ["inter-token latency p50, ms", *(_number(1000 * outcome.itl_p50) for outcome in outcomes)]
    yield ["inter-token latency p99, ms", *(_number(1000 * outcome.itl_p99) for outcome in outcomes)]
    yield ["role flips", *(f"{outcome.flips}" for outcome in outcomes)]
    yield ["cancelled and resent", *(f"{outcome.resends}" for outcome in outcomes)]
    yield ["WAPE of prefill", *(_wape(outcome, "prefill") for outcome in outcomes)]
    yield ["  of persistence", *(_wape(outcome, "persistence_prefill") for outcome in outcomes)]
    yield ["WAPE of decode admissions", *(_wape(outcome, "admitted") for outcome in outcomes)]
    yield ["  of persistence", *(_wape(outcome, "persistence_admitted") for outcome in outcomes)]
    yield ["prefill:decode, full prompts", *(_number(outcome.ratio) for outcome in outcomes)]
    yield ["  largest step over smallest", *(_number(outcome.ratio_spread) for outcome in outcomes)]
    yield ["prefill:decode, uncached", *(_number(outcome.uncached_ratio) for outcome in outcomes)]
    yield ["KV use of decode, mean", *(_share(outcome.kv_mean) for outcome in outcomes)]
    yield ["KV use of decode, peak", *(_share(outcome.kv_peak) for outcome in outcomes)]
    yield ["trajectories done", *(f"{outcome.done}" for outcome in outcomes)]
    yield ["trajectories dropped", *(f"{outcome.dropped}" for outcome in outcomes)]
    yield ["groups replaced", *(f"{outcome.replaced_groups}" for outcome in outcomes)]
    if any(outcome.toll is not None for outcome in outcomes):
        yield from _tolls([outcome.toll for outcome in outcomes])


def _tolls(tolls: Sequence[Toll | None]) -> Iterator[list[str]]:
    kinds = dict.fromkeys(fault.kind for toll in tolls if toll is not None for fault in toll.faults)

    def row(name: str, cell: Callable[[Toll], str]) -> list[str]:
        return [name, *("-" if toll is None else cell(toll) for toll in tolls)]

    yield row("rollout of a step, against no faults", lambda toll: _times(toll.slowdown))
    for kind in kinds:
        yield row(f"faults: {kind}", lambda toll, kind=kind: _struck(toll, kind))  # type: ignore[misc]
    yield row("instances started anew", lambda toll: f"{toll.restarts}")
    yield row("prompt tokens computed for resends", lambda toll: f"{toll.recomputed_tokens}")
    yield row("tokens generated and lost", lambda toll: f"{toll.unread_tokens}")
    yield row("trajectories lost", lambda toll: f"{toll.lost}")


def _struck(toll: Toll, kind: str) -> str:
    happened = [fault for fault in toll.faults if fault.kind == kind]
    missed = sum(fault.target is None for fault in happened)
    return f"{len(happened) - missed}" + f" (+{missed} without target)" * bool(missed)


def _wape(outcome: PolicyOutcome, name: str) -> str:
    errors = outcome.errors
    return "-" if errors is None else _share(getattr(errors, name))


def _number(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else number(value)


def _times(value: float) -> str:
    return f"{value:.2f}x" if math.isfinite(value) else "-"


def _share(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.1%}"


def to_json(comparison: Comparison) -> Json:
    """Every number; `docs/analysis.md` says what each is."""
    return {
        "name": comparison.name,
        "notes": list(comparison.notes),
        "outcomes": [
            {
                **_outcome(outcome),
                "windows": [_window(window) for window in outcome.windows],
                "speed_up": plain(comparison.speed_up(outcome)),
            }
            for outcome in comparison.outcomes
        ],
    }


def _outcome(outcome: PolicyOutcome) -> Json:
    said: Json = plain(outcome)
    if outcome.toll is None:
        del said["toll"]
    return said


def _window(window: Window) -> Json:
    said: dict[str, Forecast | Measured] = {
        "forecast": window.forecast,
        "persistence": window.persistence,
        "measured": window.measured,
    }
    return {
        "time": window.forecast.time,
        "horizon": window.forecast.horizon,
        "prefill": {name: PREFILL.of(one) for name, one in said.items()},
        "admitted": {name: ADMITTED.of(one) for name, one in said.items()},
    }


def write_json(comparison: Comparison, path: str | Path) -> Path:
    return write_plain(to_json(comparison), path)


def write_page(comparison: Comparison, path: str | Path) -> Path:
    path = Path(path)
    path.write_text(render(comparison), encoding="utf-8")
    return path


def render(comparison: Comparison) -> str:
    """The whole page."""
    header = ["", *(outcome.name for outcome in comparison.outcomes)]
    best = max(comparison.outcomes, key=comparison.speed_up)
    words = f"{best.name} against {comparison.outcomes[0].name}: rollout of a step, mean"
    body = [
        tiles([(_times(comparison.speed_up(best)), words, "")]),
        table("Figures", "", header, list(figures(comparison)), unfolded=True),
        *_sections(comparison),
        *(part for outcome in comparison.outcomes if outcome.flips for part in _followed(outcome)),
    ]
    return page(comparison.name, "; ".join(comparison.notes), (), body)


def _sections(comparison: Comparison) -> list[str]:
    outcomes = comparison.outcomes
    return [
        section(
            "Speed-up",
            speed_up_chart(comparison),
            f"Mean rollout time of a step under {outcomes[0].name}, over that of each policy.",
        ),
        section("Rollout time by step", step_chart(outcomes), "What the rollout of each step took."),
        section(
            "Idle at the barrier",
            idle_chart(outcomes),
            "Share of the engines' time that ranks wait before the experts: for another rank's prefill while they decode "
            "(interference), or for any other reason.",
        ),
        section(
            "Inter-token latency",
            _over_time(outcomes, [outcome.itl_over_time for outcome in outcomes], "ms", 1000),
            "Mean latency of the tokens that were decoded at that time.",
        ),
        section(
            "KV use of decode",
            _over_time(outcomes, [outcome.kv_use for outcome in outcomes], "share of the capacity"),
            "Share of the decode instances' KV capacity that was in use.",
        ),
        section(
            "Prefill : decode over time, full prompts",
            _over_time(outcomes, [_ratios(outcome, uncached=False) for outcome in outcomes], "ratio (log)", log=True),
            "In equal windows of time. A window without decode has no point.",
        ),
        section(
            "Prefill : decode over time, uncached",
            _over_time(outcomes, [_ratios(outcome, uncached=True) for outcome in outcomes], "ratio (log)", log=True),
            "The same by the tokens that no cache had.",
        ),
    ]


def _followed(outcome: PolicyOutcome) -> list[str]:
    """The sections of a policy that changes roles."""
    errors = outcome.errors
    start = outcome.windows[0].forecast.time if outcome.windows else 0.0
    said = (
        ("", "")
        if errors is None
        else (
            f" WAPE {errors.prefill:.1%}, of persistence {errors.persistence_prefill:.1%}.",
            f" WAPE {errors.admitted:.1%}, of persistence {errors.persistence_admitted:.1%}.",
        )
    )
    return [
        section(f"{outcome.name}: roles over time", roles_chart(outcome), "Instances in service, by role."),
        section(
            f"{outcome.name}: prefill forecast against what happened",
            forecast_chart(outcome.windows, PREFILL, start),
            f"Prompt tokens to prefill in each window.{said[0]}",
        ),
        section(
            f"{outcome.name}: decode admission forecast against what happened",
            forecast_chart(outcome.windows, ADMITTED, start),
            f"Prompt tokens of the requests that enter decode in each window.{said[1]}",
        ),
    ]


def speed_up_chart(comparison: Comparison) -> Chart:
    names = [outcome.name for outcome in comparison.outcomes]
    values = [comparison.speed_up(outcome) for outcome in comparison.outcomes]
    return bar_chart(names, [Bars("speed-up", "prefill", [_finite(value) for value in values])], "times", level=1.0)


def step_chart(outcomes: Sequence[PolicyOutcome]) -> Chart | None:
    steps = max(len(outcome.step_s) for outcome in outcomes)
    if not steps:
        return None
    if steps > MOST_BARS:
        series = [
            Series(outcome.name, _colour(index), range(1, len(outcome.step_s) + 1), outcome.step_s)
            for index, outcome in enumerate(outcomes)
        ]
        return line_chart(series, "step", "seconds", whole_x=True)
    bars = [
        Bars(outcome.name, _colour(index), [*outcome.step_s, *[None] * (steps - len(outcome.step_s))])
        for index, outcome in enumerate(outcomes)
    ]
    return bar_chart([f"step {step + 1}" for step in range(steps)], bars, "seconds")


def idle_chart(outcomes: Sequence[PolicyOutcome]) -> Chart:
    bars = [
        Bars("interference", "dropped", [_finite(outcome.interference_idle) for outcome in outcomes]),
        Bars("otherwise", "persistence", [_finite(outcome.imbalance_idle) for outcome in outcomes]),
    ]
    return bar_chart([outcome.name for outcome in outcomes], bars, "share of the time")


def roles_chart(outcome: PolicyOutcome) -> Chart | None:
    if not outcome.roles:
        return None
    end = max([outcome.roles[-1].time, *(volume.end for volume in outcome.window_volumes[-1:])])
    series = [
        Series(role, role, *_stairs([(count.time, getattr(count, role)) for count in outcome.roles], end))
        for role in ("prefill", "decode", "mixed")
        if any(getattr(count, role) for count in outcome.roles)
    ]
    return line_chart(series, TIME, "instances", height=220)


def _stairs(points: Sequence[tuple[float, float]], end: float) -> tuple[list[float], list[float]]:
    """A line that keeps each value until the next one."""
    x = [points[0][0], *(time for time, _ in points[1:] for _ in range(2)), end]
    y = [value for _, value in points for _ in range(2)]
    return x, y


def _ratios(outcome: PolicyOutcome, uncached: bool) -> Points:
    rated = [
        ((volume.start + volume.end) / 2, volume.uncached_ratio if uncached else volume.ratio)
        for volume in outcome.window_volumes
    ]
    return tuple((time, ratio) for time, ratio in rated if ratio)


def _over_time(
    outcomes: Sequence[PolicyOutcome], lines: Sequence[Points], label: str, scale: float = 1, log: bool = False
) -> Chart | None:
    series = [
        Series(outcome.name, _colour(index), [time for time, _ in points], [scale * value for _, value in points])
        for index, (outcome, points) in enumerate(zip(outcomes, lines, strict=True))
        if points
    ]
    return line_chart(series, TIME, label, log=log) if series else None


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
