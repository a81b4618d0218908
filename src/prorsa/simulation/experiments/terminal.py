"""What experiments show on the terminal: which runs are done, and what was found."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from prorsa.simulation.experiments.grid import Job
from prorsa.simulation.experiments.page import Section
from prorsa.simulation.experiments.verdicts import Verdict

COLOURS = {Verdict.AGREES: "green", Verdict.DIRECTION: "yellow", Verdict.DIFFERS: "red"}


class GridProgress:
    """A bar that names the run that ended last; where there is no terminal, a line for each run."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("runs", total=None)

    def __call__(self, job: Job, done: int, count: int) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=str(job), completed=done, total=count)
        else:
            self._console.print(f"{done}/{count} {job}", highlight=False, soft_wrap=True)

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
            table = Table(title=section.title, title_justify="left")
            for column in ("", "paper", "ours", "verdict"):
                table.add_column(column)
            for finding in section.findings:
                judged = f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]"
                table.add_row(finding.row, finding.paper, finding.ours, judged)
            tables.append(table)
    return tables
