"""`prorsa analyze`: reads a run directory or a bare trace and shows its characterisation as tables, a page and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from prorsa.report import rundir
from prorsa.report.characterise import (
    CURVE_POINTS,
    MEASURED,
    PARTS,
    BadEvents,
    Cache,
    Characterisation,
    Curve,
    Step,
    StepSpan,
    Trajectories,
    TurnCache,
    Turns,
    characterise,
)
from prorsa.report.legible import plain_text, shortened
from prorsa.report.page import page, section, table, tiles
from prorsa.report.plain import plain, write_plain
from prorsa.report.rundir import Json
from prorsa.report.svg import Chart, Lane, Series, Span, lane_chart, line_chart, number
from prorsa.report.volumes import Distribution, Volume, distribution

PART_COLOURS = dict(zip(PARTS, ("sandbox", "ready", "prefill", "decode", "tool", "reward"), strict=True))
MOST_CELL = 80
"""Characters of a cell on the terminal."""
SPREAD = ("mean", "p50", "p95", "p99", "log sigma")
VOLUME = ("seconds", "full prompts", "uncached", "decode", "full:decode", "uncached:decode")


@dataclass(frozen=True, slots=True)
class Analysis:
    name: str
    described: Characterisation
    problems: tuple[str, ...]
    """What could not be read; everything before it is described."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield plain_text(self.name, style="bold")
        yield plain_text(subtitle(self))
        yield Text(convention(self))
        for problem in self.problems:
            yield plain_text(f"incomplete: {problem}", style="red")
        for title, header, rows in tables(self):
            yield Text(f"\n{title}", style="bold")
            yield _rich_table(header, rows)


def analyse(path: str | Path, window_s: float = 10.0) -> Analysis:
    """Raises FileNotFoundError where there is nothing, `BadEvents` where the events make no sense."""
    path = Path(path)
    problems: list[str] = []
    trace, cache, steps = path, None, list[StepSpan]()
    if path.is_dir():
        trace = path / rundir.TRACE
        if not trace.is_file():
            raise FileNotFoundError(f"{path}: it has no {rundir.TRACE!r}; give a run directory or a trace file")
        cache = read_cache(path, problems)
        steps = read_spans(path)
    elif not path.is_file():
        raise FileNotFoundError(f"{path}: no such run directory or trace")
    try:
        described = characterise(rundir.read_events(trace, problems), cache=cache, steps=steps, window_s=window_s)
    except BadEvents as error:
        raise BadEvents("; ".join(problems) or f"{trace}: {error}") from None
    return Analysis(path.resolve().name, described, tuple(problems))


def read_cache(directory: Path, problems: list[str]) -> Cache | None:
    """None where the run has recorded no turn."""
    return dict(rundir.read_lines(directory / rundir.TURNS, _turn_cache, problems)) or None


def _turn_cache(line: Json) -> tuple[tuple[str, int], TurnCache]:
    counts = accumulate(count for _, count in line["versions"][:-1])
    return (line["trajectory"], line["turn"]), TurnCache(line["cached_tokens"], tuple(counts))


def read_spans(directory: Path) -> list[StepSpan]:
    """The training steps; of a rollout that only evaluated, those."""
    steps = [step for step in rundir.read_steps(directory) if step.seconds > 0]
    chosen = [step for step in steps if step.split == "train"] or steps
    return [StepSpan(step.step, step.time - step.seconds, step.time) for step in chosen]


def to_json(analysis: Analysis) -> Json:
    """Every number of the analysis; `docs/analysis.md` says what each is."""
    described: Json = plain(analysis.described)
    return {
        "name": analysis.name,
        "problems": list(analysis.problems),
        **described,
    }


def write_json(analysis: Analysis, path: str | Path) -> Path:
    return write_plain(to_json(analysis), path)


def write_page(analysis: Analysis, path: str | Path) -> Path:
    path = Path(path)
    path.write_text(render(analysis), encoding="utf-8")
    return path


def subtitle(analysis: Analysis) -> str:
    described = analysis.described
    tasks = ", ".join(f"{count} {task}" for task, count in described.tasks.items())
    return (
        f"{described.total.seconds:.1f} s; {described.sampled} trajectories ({tasks}): {described.done} done, "
        f"{described.dropped} dropped; {described.live_mean:.1f} live on average, {described.live_peak} at most"
    )


def convention(analysis: Analysis) -> str:
    if analysis.described.cache == MEASURED:
        return "Uncached tokens are those that the engines computed."
    return (
        "Uncached tokens are the ideal of an infinite cache of each trajectory's own context: a trace does not say what "
        "was cached, nor when weights changed."
    )


Rows = list[list[str]]


def tables(analysis: Analysis) -> Iterator[tuple[str, tuple[str, ...], Rows]]:
    """(title, header, rows) of every table but that of the windows."""
    described = analysis.described
    yield "Trajectories that are done", ("", *SPREAD), _spreads(described.trajectories)
    yield "Model turns", ("", *SPREAD), _spreads(described.turns)
    yield "Correlation within groups, of logarithms", ("", "ICC"), _group_effect(described)
    yield "Where a trajectory's time goes", ("", "mean, s", "share"), _time(described)
    if described.tools:
        yield "Tool times, s", ("tool", "calls", *SPREAD, "share of time"), _tools(described)
    yield "Prefix reuse, tokens", ("", "tokens", "of the prompts"), _reuse(described)
    yield "Prefill and decode tokens by step", ("step", *VOLUME), _steps(described)
    yield (
        f"Prefill : decode in windows of {number(described.window_s)} s",
        ("", "windows", "min", *SPREAD[:3], "max"),
        _window_ratios(described),
    )


def _spreads(values: Trajectories | Turns) -> Rows:
    named = [(one.name, getattr(values, one.name)) for one in fields(values)]
    return [[name.replace("_", " "), *_spread(value)] for name, value in named]


def _spread(values: Distribution) -> list[str]:
    shown = [number(value) for value in (values.mean, values.p50, values.p95, values.p99)]
    return [*shown, f"{values.log_sigma:.2f}"] if values.count else ["-"] * len(SPREAD)


def _group_effect(described: Characterisation) -> Rows:
    effect = described.group_effect
    named = {"turns": effect.turns, "seconds": effect.seconds, "output tokens": effect.output_tokens}
    return [[name, "-" if value is None else f"{value:.2f}"] for name, value in named.items()]


def _time(described: Characterisation) -> Rows:
    rows = [[name, number(part.mean_s), f"{part.share:.1%}"] for name, part in described.time.items()]
    total = sum(part.mean_s for part in described.time.values())
    return [*rows, ["all", number(total), ""]]


def _tools(described: Characterisation) -> Rows:
    return [
        [name, f"{tool.seconds.count}", *_spread(tool.seconds), f"{tool.share:.1%}"]
        for name, tool in described.tools.items()
    ]


def _reuse(described: Characterisation) -> Rows:
    reuse = described.reuse
    rows = [
        ["prefilled, full prompts", number(reuse.prompt_tokens), ""],
        ["of them again, after a cancelled attempt", *_of(reuse.repeated_tokens, reuse.prompt_tokens)],
        ["new since the trajectory's former context", *_of(reuse.ideal_tokens, reuse.prompt_tokens)],
    ]
    if described.cache == MEASURED:
        rows.append(["uncached, measured", *_of(reuse.uncached_tokens, reuse.prompt_tokens)])
    return rows


def _of(part: float, whole: float) -> list[str]:
    return [number(part), f"{part / whole:.1%}" if whole else "-"]


def _steps(described: Characterisation) -> Rows:
    rows = [[f"{step.step}", *_volume(step.volume)] for step in described.steps]
    spread = (described.step_ratio_spread, described.step_uncached_ratio_spread)
    if any(value is not None for value in spread):
        rows.append(["max / min", "", "", "", "", *(_ratio(value) for value in spread)])
    return rows


def _volume(volume: Volume) -> list[str]:
    amounts = (volume.seconds, volume.prompt_tokens, volume.uncached_tokens, volume.decoded_tokens)
    return [*(number(amount) for amount in amounts), _ratio(volume.ratio), _ratio(volume.uncached_ratio)]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _window_ratios(described: Characterisation) -> Rows:
    windows = [window for step in described.steps for window in step.windows]
    return [
        [name, *_range([ratio for ratio in ratios if ratio is not None])]
        for name, ratios in (
            ("full prompts", [window.ratio for window in windows]),
            ("uncached", [window.uncached_ratio for window in windows]),
        )
    ]


def _range(values: list[float]) -> list[str]:
    if not values:
        return ["0", *["-"] * 5]
    spread = distribution(values)
    shown = (min(values), spread.mean, spread.p50, spread.p95, max(values))
    return [f"{len(values)}", *(f"{value:.2f}" for value in shown)]


def _rich_table(header: tuple[str, ...], rows: Rows) -> Table:
    shown = Table(box=None, pad_edge=False)
    for index, cell in enumerate(header):
        shown.add_column(cell, justify="right" if index else "left", style=None if index else "dim")
    for row in rows:
        shown.add_row(*(Text(shortened(cell, MOST_CELL)) for cell in row))
    return shown


def render(analysis: Analysis) -> str:
    """The whole page."""
    body = [
        tiles(list(_figures(analysis))),
        f"<p>{convention(analysis)}</p>",
        *_sections(analysis),
        *(table(title, "", header, rows, unfolded=True) for title, header, rows in tables(analysis)),
        table(
            f"Windows of {number(analysis.described.window_s)} s",
            "Tokens and ratios from each step's start on.",
            ("step", "from, s", *VOLUME),
            _window_rows(analysis.described),
        ),
    ]
    return page(analysis.name, subtitle(analysis), analysis.problems, body)


def _figures(analysis: Analysis) -> Iterator[tuple[str, str, str]]:
    described = analysis.described
    total, reuse, done = described.total, described.reuse, described.trajectories
    yield f"{described.done}", f"trajectories done of {described.sampled}", ""
    yield number(done.turns.mean), f"turns a trajectory, 95th percentile {number(done.turns.p95)}", ""
    yield f"{number(done.seconds.mean)} s", f"a trajectory, 95th percentile {number(done.seconds.p95)} s", ""
    yield _ratio(total.ratio), "prefill : decode tokens, by full prompts", ""
    yield _ratio(total.uncached_ratio), f"prefill : decode, uncached ({described.cache})", ""
    yield (
        f"{reuse.share:.0%}",
        f"of the prompt tokens reused; {reuse.ideal_share:.0%} stood in the trajectory's former context",
        "",
    )


def _sections(analysis: Analysis) -> list[str]:
    described = analysis.described
    first = described.steps[0]
    return [
        section(
            f"Cumulative tokens within step {first.step}, normalised",
            normalised_chart(first),
            "Each line by its own total at the end of the step.",
        ),
        section(
            f"Cumulative tokens within step {first.step}",
            absolute_chart(first),
            "A prefill counts when it completes, a decode evenly over its time.",
        ),
        section(
            "Prefill : decode across the steps",
            step_ratio_chart(described) if len(described.steps) > 1 else None,
            f"The largest over the smallest: {_ratio(described.step_ratio_spread)} by full prompts, "
            f"{_ratio(described.step_uncached_ratio_spread)} by uncached tokens.",
        ),
        section(
            f"Prefill : decode in windows of {number(described.window_s)} s",
            window_ratio_chart(described),
            "Windows from each step's start on; dotted lines are the ends of steps. A window without decode has no point.",
        ),
        section(
            "Where a trajectory's time goes", time_chart(described), "Mean seconds of the trajectories that are done."
        ),
    ]


def _amounts(curve: Curve) -> list[tuple[str, str, bool, tuple[float, ...]]]:
    """(name, colour, dashed, tokens so far)."""
    return [
        ("prefill, full prompts", "prefill", False, curve.prompt_tokens),
        ("prefill, uncached", "prefill", True, curve.uncached_tokens),
        ("decode", "decode", False, curve.decoded_tokens),
    ]


def normalised_chart(step: Step) -> Chart | None:
    share = [index / (CURVE_POINTS - 1) for index in range(CURVE_POINTS)]
    series = [
        Series(name, colour, share, [value / amounts[-1] for value in amounts], dashed)
        for name, colour, dashed, amounts in _amounts(step.curve)
        if amounts[-1] > 0
    ]
    return line_chart(series, "share of the step's time", "share of the tokens", y_top=1.0) if series else None


def absolute_chart(step: Step) -> Chart | None:
    seconds = step.curve.seconds
    series = [
        Series(name, colour, *_positive(seconds, amounts), dashed)
        for name, colour, dashed, amounts in _amounts(step.curve)
        if amounts[-1] > 0
    ]
    if not series:
        return None
    return line_chart(
        series, "time since the step's start, s", "tokens so far (log scale)", x_range=(0, seconds[-1]), log=True
    )


def _positive(x: Sequence[float], y: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """What a log scale can show."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if b]
    return [a for a, _ in points], [b for _, b in points]


def step_ratio_chart(described: Characterisation) -> Chart | None:
    steps = [float(step.step) for step in described.steps]
    series = [
        Series("by full prompts", "prefill", *_positive(steps, [step.volume.ratio for step in described.steps])),
        Series("uncached", "decode", *_positive(steps, [step.volume.uncached_ratio for step in described.steps])),
    ]
    return _ratio_chart(series, "step")


def window_ratio_chart(described: Characterisation) -> Chart | None:
    windows = [window for step in described.steps for window in step.windows]
    start = described.total.start
    middles = [(window.start + window.end) / 2 - start for window in windows]
    series = [
        Series("by full prompts", "prefill", *_positive(middles, [window.ratio for window in windows])),
        Series("uncached", "decode", *_positive(middles, [window.uncached_ratio for window in windows])),
    ]
    marks = [step.volume.end - start for step in described.steps]
    return _ratio_chart(series, "time since the start, s", marks)


def _ratio_chart(series: list[Series], label: str, marks: list[float] | None = None) -> Chart | None:
    shown = [Series(one.name, one.colour, one.x, one.y, dots=len(one.x) <= 60) for one in series if len(one.x)]
    if not shown:
        return None
    return line_chart(shown, label, "prefill : decode (log scale)", log=True, whole_x=marks is None, marks=marks or ())


def time_chart(described: Characterisation) -> Chart | None:
    total = sum(part.mean_s for part in described.time.values())
    if not total:
        return None
    spans: list[Span] = []
    at = 0.0
    for name, part in described.time.items():
        title = f"{name}: {number(part.mean_s)} s, {part.share:.1%}"
        spans.append(Span(at, at + part.mean_s, PART_COLOURS[name], title))
        at += part.mean_s
    legend = list(PART_COLOURS.items())
    return lane_chart([Lane("", spans)], legend, "seconds", "", lane_height=44, x_range=(0.0, total))


def _window_rows(described: Characterisation) -> Rows:
    return [
        [f"{step.step}", number(window.start - step.volume.start), *_volume(window)]
        for step in described.steps
        for window in step.windows
    ]
