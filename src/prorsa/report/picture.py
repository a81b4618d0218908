"""A picture of a run in one SVG file: the roles over time above the forecast demand that they follow."""

from __future__ import annotations

from pathlib import Path

from prorsa.report import charts
from prorsa.report.rundir import read_run
from prorsa.report.svg import stack, style


def write_picture(run_dir: str | Path, path: str | Path) -> Path:
    """Raises FileNotFoundError where there is no run, ValueError where it has nothing to draw."""
    drawn = charts.prepare(read_run(run_dir))
    titled = [
        ("Roles over time", charts.roles_chart(drawn)),
        ("Prefill tokens, forecast and measured", charts.prefill_forecast_chart(drawn)),
        ("Tokens admitted to decode, forecast and measured", charts.admissions_forecast_chart(drawn)),
    ]
    present = [(title, chart) for title, chart in titled if chart is not None]
    if not present:
        raise ValueError(f"{run_dir}: neither roles nor forecasts are recorded there; give a run that got further")
    path = Path(path)
    path.write_text(stack(present).svg(style()), encoding="utf-8")
    return path
