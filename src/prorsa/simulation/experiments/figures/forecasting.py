"""Figures 8 and 9: the forecast and what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import correlation, fmean

from prorsa.report.svg import Bars, Chart, Series, bar_chart, line_chart
from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.figures.common import MIMO, judged, long_job, long_jobs, long_run, percent, short
from prorsa.simulation.experiments.grid import Job
from prorsa.simulation.experiments.page import Section, Table
from prorsa.simulation.experiments.paper import Range
from prorsa.simulation.experiments.settings import ADAPTIVE, Lab, Setting, spoken
from prorsa.simulation.experiments.verdicts import RATIO_TOLERANCE, Finding, span, within
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.scenario import PolicySection

FORECAST_SETTINGS = tuple(Setting(MIMO, task, s) for task in paper.AGENTIC for s in paper.STALENESS)
RETURNS = PolicySection(name="adaptive", forecast="decode-returns")


def fig8_jobs(lab: Lab) -> list[Job]:
    returns = [long_job(lab, Setting(MIMO, task, "on-policy"), RETURNS) for task in paper.AGENTIC]
    return long_jobs(paper.AGENTIC, paper.STALENESS)(lab) + returns


def fig8(lab: Lab) -> Section:
    runs = {setting: long_run(lab, setting.task, setting.staleness) for setting in FORECAST_SETTINGS}
    prefill = {name: [run.prefill_wape(name) for run in runs.values()] for name in (None, "persistence", "kalman")}
    admitted = {name: [run.admitted_wape(name) for run in runs.values()] for name in (None, "persistence", "kalman")}
    findings = [
        _wape_finding(lab, "WAPE of the prefill forecast", prefill[None], paper.PREFILL_WAPE, RunOutcome.prefill_wape),
        _wape_finding(
            lab, "WAPE of the decode admissions", admitted[None], paper.ADMISSION_WAPE, RunOutcome.admitted_wape
        ),
    ]
    findings.append(_harder_task(prefill[None], admitted[None]))
    header = ["setting", *(f"{what}, {name or 'forecast'}" for what in ("prefill", "admitted") for name in prefill)]
    rows = [
        [
            f"{setting.task}, {spoken(setting.staleness)}",
            *(f"{100 * values[index]:.1f} %" for table in (prefill, admitted) for values in table.values()),
        ]
        for index, setting in enumerate(FORECAST_SETTINGS)
    ]
    beaten = [
        f"{what} in {sum(a < b for a, b in zip(table[None], table[rival], strict=True))} of {len(runs)} ({rival})"
        for what, table in (("prefill", prefill), ("admissions", admitted))
        for rival in ("persistence", "kalman")
    ]
    text = (
        f"MiMo-V2.5-Pro under Prorsa, {lab.budget.long_steps} steps, windows of ten seconds, beside what persistence (the "
        "next window is like the last) and a Kalman filter say at the same moments. Settings in which the forecast is "
        f"better: {'; '.join(beaten)}."
    )
    charts = [(title, _wape_chart(table)) for title, table in (("Prefill", prefill), ("Decode admissions", admitted))]
    return Section("fig8", "Fig. 8: forecast errors", text, findings, [Table(header, rows)], charts)


def _harder_task(prefill: Sequence[float], admitted: Sequence[float]) -> Finding:
    """The settings come by task."""
    half = len(paper.STALENESS)
    coding, general = (fmean([*prefill[part], *admitted[part]]) for part in (slice(half), slice(half, None)))
    return Finding(
        "mean WAPE, general agent over coding agent",
        "higher",
        f"{general / coding:.2f}x",
        *judged(general > coding),
    )


def _wape_finding(
    lab: Lab, row: str, ours: Sequence[float], values: Range, measure: Callable[[RunOutcome], float]
) -> Finding:
    return Finding(
        row,
        percent([values.low, values.high]),
        percent(ours),
        *judged(
            within(ours, values),
            max(ours) <= values.high * (1 + RATIO_TOLERANCE),
            lambda: _wape_reason(lab, measure),
        ),
    )


def _wape_reason(lab: Lab, measure: Callable[[RunOutcome], float]) -> str:
    words = []
    for task in paper.AGENTIC:
        one_step, returns = (measure(long_run(lab, task, "on-policy", policy)) for policy in (ADAPTIVE, RETURNS))
        words.append(f"{task} {100 * one_step:.1f} % to {100 * returns:.1f} %")
    return (
        "Verified by runs: forecasting also the next requests of trajectories that decode, which the paper's one-step model "
        f"leaves out, changes it on-policy: {'; '.join(words)}. Conjecture: what is left depends on how regular the tools' "
        "durations are, which the paper does not state."
    )


def _wape_chart(table: Mapping[str | None, Sequence[float]]) -> Chart:
    colours = {None: "prefill", "persistence": "persistence", "kalman": "mixed"}
    return bar_chart(
        [short(setting) for setting in FORECAST_SETTINGS],
        [Bars(name or "forecast", colours[name], values) for name, values in table.items()],
        "WAPE",
        height=220,
    )


FIG9_STEPS = 3


def fig9(lab: Lab) -> Section:
    charts, correlations = [], []
    for task in paper.AGENTIC:
        run = long_run(lab, task, "8")
        steps = run.steps[:FIG9_STEPS]
        windows = [window for window in run.forecasts if window.made.time < steps[-1].end]
        made = [window.made.prefill_tokens for window in windows]
        measured = [window.measured.prefill_tokens for window in windows]
        most = max([*made, *measured, 1.0])
        minutes = [window.made.time / 60 for window in windows]
        correlations.append(_correlation(made, measured))
        charts.append(
            (
                task,
                line_chart(
                    [
                        Series("measured", "measured", minutes, [value / most for value in measured]),
                        Series("forecast", "prefill", minutes, [value / most for value in made], dashed=True),
                    ],
                    "time, minutes",
                    "prompt tokens, share of the most",
                    height=220,
                    marks=[step.end / 60 for step in steps],
                ),
            )
        )
    finding = Finding(
        "correlation of forecast and measured prefill load",
        "forecasts align with the load (plot)",
        span(correlations),
        *judged(
            min(correlations) >= 0.9,
            min(correlations) >= 0.5,
            lambda: _wape_reason(lab, RunOutcome.prefill_wape),
        ),
    )
    text = "MiMo-V2.5-Pro under Prorsa, staleness 8, the first three steps; vertical lines mark their ends."
    return Section("fig9", "Fig. 9: forecast and measured load", text, [finding], charts=charts)


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    return correlation(one, other) if len(set(one)) > 1 and len(set(other)) > 1 else 0.0
