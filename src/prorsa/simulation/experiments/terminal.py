"""What experiments show on the terminal: which runs are done, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from prorsa.report.legible import legible, plain_text
from prorsa.simulation.experiments import page
from prorsa.simulation.experiments.grid import Job
from prorsa.simulation.experiments.page import Section
from prorsa.simulation.experiments.plan import WORTH, Advice, Interval, Request
from prorsa.simulation.experiments.policies import reckoned_s
from prorsa.simulation.experiments.verdicts import Verdict

COLOURS = {Verdict.AGREES: "green", Verdict.DIRECTION: "yellow", Verdict.DIFFERS: "red"}


class GridProgress:
    """A bar that names the run that ended last; where there is no terminal, a line for each run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("runs", total=None)

    def __call__(self, job: Job, done: int, count: int) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=legible(str(job)), completed=done, total=count)
        else:
            self._console.print(plain_text(f"{done}/{count} {job}"), highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def findings_tables(found: Sequence[Section]) -> list[Table]:
    tables = []
    for section in found:
        if section.findings:
            table = Table(title=plain_text(section.title), title_justify="left")
            for column in ("", "paper", "ours", "verdict"):
                table.add_column(column)
            for finding in section.findings:
                judged = Text(finding.verdict, style=COLOURS[finding.verdict])
                table.add_row(*map(plain_text, (finding.row, finding.paper, finding.ours)), judged)
            tables.append(table)
    return tables


def plain_table(table: page.Table) -> Table:
    shown = Table()
    for column in table.header:
        shown.add_column(plain_text(column))
    for row in table.rows:
        shown.add_row(*map(plain_text, row))
    return shown


def jobs_view(jobs: Sequence[Job]) -> list[str]:
    """Each run with its seed, its load and what it takes, and what all take."""
    lines = []
    for job in jobs:
        rollout = job.scenario.rollout
        told = f"{rollout.mode}, staleness {rollout.max_staleness}, load {rollout.load:g}, seed {job.scenario.seed}"
        lines.append(f"{reckoned_s(job):6.1f} s  {job}, {told}")
    total = sum(map(reckoned_s, jobs))
    return [
        *lines,
        f"{len(jobs)} runs, about {total:.0f} CPU seconds; which they are depends on the first ones' results",
    ]


def advice_view(request: Request, advice: Advice) -> list[RenderableType]:
    tried = Table(title="Rollout time of a step, seconds", title_justify="left")
    for column in ("way", "short trajectories", "whole ones"):
        tried.add_column(column, justify="left" if column == "way" else "right")
    for one in advice.tried:
        style = "bold" if one.way == advice.way else ""
        full = f"{one.full_s:.1f}" if one.full_s else ""
        tried.add_row(plain_text(str(one.way)), f"{one.short_s:.1f}", full, style=style)
    shown: list[RenderableType] = [tried]
    if advice.influences:
        shown.append(_influences(advice))
    return [*shown, *_sentences(request, advice)]


def _influences(advice: Advice) -> Table:
    base = advice.influences[0].base
    title = f"What the gain hangs on, strongest first (short trajectories; as given {base:.2f}x)"
    table = Table(title=title, title_justify="left")
    for column in ("assumption", "gain when it changes", ""):
        table.add_column(column)
    for one in advice.influences:
        gains = ", ".join(f"{name}: {gain:.2f}x" for name, gain in one.gains.items())
        table.add_row(plain_text(one.name), plain_text(gains), "changes the advice" if one.turns else "")
    return table


def _sentences(request: Request, advice: Advice) -> list[str]:
    if advice.splits:
        first = f"Advice: {advice.way}."
        second = f"{_ratio(advice.gain)} the speed of the best colocation ({advice.best_colocated})."
    elif advice.best_split is None:
        first = f"Advice: {advice.way}."
        second = "The cluster has room for one instance, so there is nothing to split."
    else:
        first = f"Advice: stay colocated ({advice.way})."
        second = (
            f"The best split ({advice.best_split}) has {_ratio(advice.gain)} its speed: no gain that is surely above "
            f"{100 * (WORTH - 1):.0f} %."
        )
    plain = "" if advice.way.plain else f" {_ratio(advice.plain_gain)} the speed of colocation without cadence."
    return [
        f"{first} {second}{plain} A step takes {advice.rollout_s:.0f} s.",
        f"Intervals: 95 % over {request.seeds} seeds of the workload. The cost model is 20 to 40 % off in absolute times; "
        "in ratios of runs on the same model most of that cancels, and no interval contains what is left.",
    ]


def _ratio(one: Interval) -> str:
    return f"{one.mean:.2f}x ({one.low:.2f} to {one.high:.2f})"
