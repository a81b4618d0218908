"""Figures 1, 2, 3, 10 and 11: what the workload asks for, and what a trajectory sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from prorsa.report.svg import Series, line_chart
from prorsa.report.volumes import Volume
from prorsa.simulation.engines.statistics import BIN_S
from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.figures.common import COLOURS, MIMO, judged, long_run, percent
from prorsa.simulation.experiments.grid import Job
from prorsa.simulation.experiments.page import Section
from prorsa.simulation.experiments.paper import Range
from prorsa.simulation.experiments.settings import ADAPTIVE, COLOCATED, Lab, Setting, spoken
from prorsa.simulation.experiments.verdicts import Finding, near, span, within
from prorsa.simulation.outcome import RunOutcome


@dataclass(frozen=True, slots=True)
class Progression:
    """How the tokens of a step add up: shares of the larger of both totals at shares of the step's time."""

    time: list[float]
    prefill: list[float]
    decode: list[float]
    ratio: float
    """Prefill to decode tokens of the step."""

    def done(self, share: float) -> float:
        """Share of the step's prefill that is done after a share of its time."""
        reached = [value for time, value in zip(self.time, self.prefill, strict=True) if time <= share + 1e-9]
        return (reached[-1] if reached else 0.0) / self.prefill[-1]

    def tail_rate(self, share: float) -> float:
        """Tokens a second in the last part of the step over the mean of the step."""
        total = self.prefill[-1] + self.decode[-1]
        before = next(
            (p + d for t, p, d in zip(self.time, self.prefill, self.decode, strict=True) if t >= 1 - share), total
        )
        return (total - before) / total / share


def progression(outcome: RunOutcome) -> Progression:
    """Of the last step, in uncached tokens: in an asynchronous run the one that carries most over from steps before."""
    step = outcome.steps[-1]
    windows = outcome.step_windows(step)
    prefill = _running([window.uncached_tokens for window in windows])
    decode = _running([window.decoded_tokens for window in windows])
    most = max(prefill[-1], decode[-1])
    length = windows[-1].end - windows[0].start
    return Progression(
        [0.0, *((window.end - windows[0].start) / length for window in windows)],
        [value / most for value in prefill],
        [value / most for value in decode],
        prefill[-1] / max(decode[-1], 1.0),
    )


def _running(values: Sequence[float]) -> list[float]:
    total, sums = 0.0, [0.0]
    for value in values:
        total += value
        sums.append(total)
    return sums


def fig1(lab: Lab) -> Section:
    found = {(task, s): progression(long_run(lab, task, s)) for task in paper.TASKS for s in paper.STALENESS}
    math = [found["math", s].done(0.25) for s in paper.STALENESS]
    agentic = [found[task, s] for task in paper.AGENTIC for s in paper.STALENESS]
    early = [one.done(0.25) for one in agentic]
    tails = [found[task, "on-policy"].tail_rate(0.2) for task in paper.TASKS]
    ratios = [one.ratio for one in agentic]
    findings = [
        Finding(
            "math: prefill done in the first quarter of a step",
            "most (plot)",
            percent(math),
            *judged(min(math) >= 0.75, min(math) > 0.3),
        ),
        Finding(
            "agentic: prefill done in the first quarter",
            "prefill throughout the step (plot)",
            percent(early),
            *judged(max(early) <= 0.75, max(early) < min(math)),
        ),
        Finding(
            "agentic: prefill over decode tokens, uncached",
            "substantially more prefill",
            span(ratios),
            *judged(min(ratios) >= 2, min(ratios) > 1),
        ),
        Finding(
            "on-policy: token rate in the last fifth of the step over its mean",
            "drops sharply",
            span(tails),
            *judged(max(tails) <= 0.5, max(tails) < 1),
        ),
    ]
    charts = [
        (
            task,
            line_chart(
                [
                    Series(f"{kind}, {s}", COLOURS[s], found[task, s].time, values, dashed=kind == "decode")
                    for s in paper.STALENESS
                    for kind, values in (("prefill", found[task, s].prefill), ("decode", found[task, s].decode))
                ],
                "share of the step's time",
                "share of the larger total",
                y_top=1.05,
                height=240,
            ),
        )
        for task in paper.TASKS
    ]
    text = (
        "MiMo-V2.5-Pro under Prorsa, the last step of the run: tokens prefilled (without what a cache had) and decoded "
        "until each moment, as shares of the larger of both totals. The paper gives plots and words here, no numbers; "
        "what we take its words to mean stands in the table."
    )
    return Section("fig1", "Fig. 1: prefill and decode tokens within a step", text, findings, charts=charts)


FIG2 = Setting(MIMO, "coding-agent", "on-policy")


def fig2_jobs(lab: Lab) -> list[Job]:
    return [lab.job(FIG2, COLOCATED), lab.job(FIG2, ADAPTIVE)]


def mean_itl(outcome: RunOutcome) -> float:
    """Mean inter-token latency, seconds."""
    bins = outcome.statistics.itl_over_time.values()
    return sum(seconds for seconds, _ in bins) / max(sum(tokens for _, tokens in bins), 1.0)


def fig2(lab: Lab) -> Section:
    outcomes = {"colocated": lab.outcome(FIG2, COLOCATED), "disaggregated": lab.outcome(FIG2, ADAPTIVE)}
    means = {name: 1000 * mean_itl(outcome) for name, outcome in outcomes.items()}
    findings = [
        Finding(
            "mean inter-token latency, ms, disaggregated against colocated",
            "significantly lower; plot up to 80 ms",
            f"{means['disaggregated']:.1f} against {means['colocated']:.1f}",
            *judged(
                means["disaggregated"] < 0.9 * means["colocated"],
                means["disaggregated"] < means["colocated"],
                lambda: _latency_reason(outcomes["colocated"]),
            ),
        )
    ]
    chart = line_chart(
        [
            _itl_line(name, colour, outcomes[name])
            for name, colour in (("colocated", "mixed"), ("disaggregated", "decode"))
        ],
        "time, minutes",
        "mean inter-token latency, ms",
    )
    text = f"{FIG2}: mean inter-token latency in windows of ten seconds."
    return Section("fig2", "Fig. 2: inter-token latency", text, findings, charts=[("Inter-token latency", chart)])


def _latency_reason(colocated: RunOutcome) -> str:
    return (
        f"Verified by the run: under colocation GPUs wait for {100 * colocated.idle_share:.1f} % of the time in steps "
        "because of another rank's prefill, which is what disaggregation can win back; against that, fewer instances decode, "
        "so their batches are larger. Conjecture: the paper's runs had more prefill for each decode."
    )


def _itl_line(name: str, colour: str, outcome: RunOutcome) -> Series:
    bins = [(i * BIN_S / 60, 1000 * s / n) for i, (s, n) in sorted(outcome.statistics.itl_over_time.items()) if n]
    return Series(name, colour, [time for time, _ in bins], [value for _, value in bins])


def step_ratios(outcome: RunOutcome) -> list[float]:
    """Uncached prefill to decode tokens of each step."""
    volumes = [outcome.step_tokens(step) for step in outcome.steps]
    return [volume.uncached_ratio for volume in volumes if volume.uncached_ratio is not None]


def window_ratios(windows: Sequence[Volume]) -> list[tuple[float, float]]:
    """(minutes, uncached prefill to decode tokens) of the windows in which anything was decoded."""
    return [(window.start / 60, window.uncached_ratio) for window in windows if window.uncached_ratio is not None]


def fig3(lab: Lab) -> Section:
    runs = {(task, s): long_run(lab, task, s) for task in paper.AGENTIC for s in paper.STALENESS}
    steps = {key: step_ratios(run) for key, run in runs.items()}
    windows = {key: window_ratios(run.step_windows(run.steps[0])) for key, run in runs.items()}
    spread = {key: max(values) / min(values) for key, values in steps.items()}
    starts, middles = zip(*(_start_and_middle(values) for values in windows.values()), strict=True)
    on_policy = max(spread[task, "on-policy"] for task in paper.AGENTIC)
    asynchronous = max(spread[task, "8"] for task in paper.AGENTIC)
    every = [value for values in steps.values() for value in values]
    declines = [start / middle for start, middle in zip(starts, middles, strict=True)]
    findings = [
        Finding(
            "largest over smallest ratio of the steps, on-policy",
            f"up to {paper.STEP_RATIO_SPREAD['on-policy']:.2f}x",
            f"up to {on_policy:.2f}x",
            *judged(near(on_policy, paper.STEP_RATIO_SPREAD["on-policy"])),
        ),
        Finding(
            "the same at staleness 8",
            f"up to {paper.STEP_RATIO_SPREAD['8']:.2f}x",
            f"up to {asynchronous:.2f}x",
            *judged(near(asynchronous, paper.STEP_RATIO_SPREAD["8"]), asynchronous > on_policy),
        ),
        Finding(
            "ratio of a step, uncached tokens",
            "axis from 1 to 12 (plot)",
            span(every, "{:.1f}"),
            *judged(within(every, Range(1, 12)), min(every) > 1),
        ),
        Finding(
            "first windows of the first step over its median window",
            "prefill-heavy, then a sharp decline",
            span(declines, "{:.1f}") + "x",
            *judged(min(declines) >= 2, min(declines) > 1),
        ),
    ]
    charts = [
        (
            f"{task}: ratio of each step",
            line_chart(
                [
                    Series(spoken(s), COLOURS[s], list(range(1, len(steps[task, s]) + 1)), steps[task, s], dots=True)
                    for s in paper.STALENESS
                ],
                "training step",
                "prefill : decode tokens",
                height=220,
                whole_x=True,
            ),
        )
        for task in paper.AGENTIC
    ] + [
        (
            f"{task}: ratio in windows of 10 s, first step",
            line_chart(
                [
                    Series(spoken(s), COLOURS[s], [t for t, _ in windows[task, s]], [v for _, v in windows[task, s]])
                    for s in paper.STALENESS
                ],
                "time, minutes",
                "prefill : decode tokens",
                height=220,
            ),
        )
        for task in paper.AGENTIC
    ]
    text = (
        f"MiMo-V2.5-Pro under Prorsa, {lab.budget.long_steps} steps. Prefill counts the tokens that no cache had: by full "
        f"prompts the ratio of a step is {span([_full_ratio(run) for run in runs.values()], '{:.0f}')} here, far from the "
        "paper's axes, which are of the other kind."
    )
    return Section(
        "fig3", "Fig. 3, 10 and 11: prefill:decode ratio across and within steps", text, findings, charts=charts
    )


def _full_ratio(outcome: RunOutcome) -> float:
    volumes = [outcome.step_tokens(step) for step in outcome.steps]
    return sum(volume.prompt_tokens for volume in volumes) / max(sum(volume.decoded_tokens for volume in volumes), 1)


def _start_and_middle(windows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Largest ratio of the first tenth of the windows, and the median of all."""
    ratios = [value for _, value in windows]
    return max(ratios[: max(1, len(ratios) // 10)]), max(median(ratios), 1e-9)
