"""The parts of the reproduction page, and their Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prorsa.report.svg import Chart
from prorsa.simulation.experiments.verdicts import Finding


@dataclass(frozen=True, slots=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


@dataclass(slots=True)
class Section:
    """One figure or table of the paper: what it is, the paper beside ours, and what we drew."""

    key: str
    title: str
    text: str
    findings: list[Finding]
    tables: list[Table] = field(default_factory=list)
    charts: list[tuple[str, Chart]] = field(default_factory=list)
    """(title, chart), below one another in one picture"""

    @property
    def picture(self) -> str | None:
        return f"{self.key}.svg" if self.charts else None

    def markdown(self, pictures: str) -> str:
        parts = [f"## {self.title}", f"`prorsa reproduce --only {self.key}`", self.text]
        if self.findings:
            parts.append(findings_table(self.findings).markdown())
        if reasons := reasons_list(self.findings):
            parts.append(reasons)
        if self.picture is not None:
            parts.append(f"![{self.title}]({pictures}/{self.picture})")
        parts += [table.markdown() for table in self.tables]
        return "\n\n".join(parts)


def findings_table(findings: Sequence[Finding]) -> Table:
    rows = [[finding.row, finding.paper, finding.ours, str(finding.verdict)] for finding in findings]
    return Table(["", "paper", "ours", "verdict"], rows)


def reasons_list(findings: Sequence[Finding]) -> str:
    """One point for each reason, with all rows that it is given for."""
    rows: dict[str, list[str]] = {}
    for finding in findings:
        if finding.reason:
            rows.setdefault(finding.reason, []).append(finding.row)
    return "\n".join(f"- {'; '.join(given)}. {reason}" for reason, given in rows.items())
