"""Figures 5 and 6 and Table 2: the 27 settings under colocation and under Prorsa."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from prorsa.report.svg import Bars, Chart, bar_chart
from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.figures.common import (
    DEEPSEEK,
    MIMO,
    MODEL_COLOURS,
    QWEN,
    judged,
    percent,
    short,
    stated,
)
from prorsa.simulation.experiments.grid import Job
from prorsa.simulation.experiments.page import Section, Table
from prorsa.simulation.experiments.paper import Range
from prorsa.simulation.experiments.sensitivity import Effect, distance, moved
from prorsa.simulation.experiments.settings import ADAPTIVE, COLOCATED, SETTINGS, Lab, Setting, cadence, spoken
from prorsa.simulation.experiments.verdicts import (
    RATIO_TOLERANCE,
    TIME_TOLERANCE,
    Finding,
    near,
    near_ratio,
    span,
    within,
    within_gains,
)


def fig5_jobs(lab: Lab) -> list[Job]:
    jobs = [lab.job(setting, policy) for setting in SETTINGS for policy in (COLOCATED, ADAPTIVE)]
    seeking = [setting for setting in SETTINGS if setting.staleness == "on-policy"]
    return jobs + [lab.job(setting, cadence(k)) for setting in seeking for k in lab.budget.cadences]


def fig5_later(lab: Lab) -> list[Job]:
    return [lab.job(setting, lab.best_cadence(setting.model, setting.task)) for setting in SETTINGS]


@dataclass(frozen=True, slots=True)
class Compared:
    """Rollout times of one setting, seconds."""

    setting: Setting
    colocated: float
    best_cadence: float
    """0 cadence, where that is faster, is a cadence too."""
    prorsa: float

    @property
    def speedup(self) -> float:
        return self.colocated / self.prorsa

    @property
    def stronger_speedup(self) -> float:
        return min(self.best_cadence, self.colocated) / self.prorsa


def compared(lab: Lab, setting: Setting) -> Compared:
    best = lab.best_cadence(setting.model, setting.task)
    times = (lab.outcome(setting, policy).rollout_s for policy in (COLOCATED, best, ADAPTIVE))
    return Compared(setting, *times)


def fig5(lab: Lab) -> Section:
    all_compared = [compared(lab, setting) for setting in SETTINGS]
    findings = [_speedup_finding(lab, "speedup over colocation, agentic", all_compared, paper.SPEEDUP)]
    for (model, task), values in paper.SPEEDUP_OF.items():
        chosen = [one for one in all_compared if (one.setting.model, one.setting.task) == (model, task)]
        findings.append(_speedup_finding(lab, f"{model}, {task}", chosen, values))
    findings.append(_math_finding(all_compared))
    rows = [
        [
            one.setting.model,
            one.setting.task,
            one.setting.staleness,
            f"{one.colocated:.1f}",
            f"{one.best_cadence:.1f} (1 in {lab.best_cadence(one.setting.model, one.setting.task).prefill_every})",
            f"{one.prorsa:.1f}",
            f"{one.speedup:.2f}x",
            f"{one.stronger_speedup:.2f}x",
        ]
        for one in all_compared
    ]
    header = [
        "model",
        "task",
        "staleness",
        "colocated, s",
        "best cadence, s",
        "Prorsa, s",
        "speedup",
        "over the stronger",
    ]
    agentic = [one for one in all_compared if one.setting.task != "math"]
    lost = [one for one in agentic if one.stronger_speedup < 1]
    text = (
        "Mean rollout time of a step. The paper's baseline is colocation as SGLang runs it by default: whenever a prompt "
        "waits, prefill it. The stronger baseline aligns the prefills of all ranks and lets one step in k prefill; k is the "
        f"best of {', '.join(map(str, lab.budget.cadences))} on-policy. Over the stronger of both, Prorsa's speedup on the "
        f"agentic tasks is {span([one.stronger_speedup for one in agentic])}x; it is slower in {len(lost)} of "
        f"{len(agentic)} settings."
    )
    charts = [
        (model, _fig5_chart([one for one in all_compared if one.setting.model == model])) for model in paper.MODELS
    ]
    return Section("fig5", "Fig. 5: rollout time", text, findings, [Table(header, rows)], charts)


def _speedup_finding(lab: Lab, row: str, chosen: Sequence[Compared], values: Range) -> Finding:
    agentic = [one for one in chosen if one.setting.task != "math"]
    ours = [one.speedup for one in agentic]
    worst = max(agentic, key=lambda one: distance(one.speedup, values)).setting.model
    faster = sum(value > 1 for value in ours)
    return Finding(
        row,
        stated(values, unit="x"),
        f"{span(ours)}x; above 1 in {faster} of {len(ours)}",
        *judged(
            within_gains(ours, values), min(ours) > 1, lambda: moved(lab, worst, lambda effect: effect.speedup, values)
        ),
    )


def _math_finding(chosen: Sequence[Compared]) -> Finding:
    ours = [1 / one.speedup for one in chosen if one.setting.task == "math"]
    slower = sum(value > 1 for value in ours)
    return Finding(
        "math: rollout time over that of colocation",
        f"{stated(paper.MATH_TIME)}; above 1 in most",
        f"{span(ours)}; above 1 in {slower} of {len(ours)}",
        *judged(
            within(ours, paper.MATH_TIME) and slower > len(ours) / 2,
            within(ours, paper.MATH_TIME),
            lambda: (
                "Conjecture: it hangs on how long the answers are and how many run at once; ours are those of a reasoning "
                "model of 8B parameters, cut at 32.5k tokens."
            ),
        ),
    )


def _fig5_chart(rows: Sequence[Compared]) -> Chart:
    return bar_chart(
        [short(one.setting) for one in rows],
        [
            Bars("colocated", "mixed", [1.0] * len(rows)),
            Bars("best cadence", "persistence", [one.best_cadence / one.colocated for one in rows]),
            Bars("Prorsa", "prefill", [1 / one.speedup for one in rows]),
        ],
        "time over colocation",
        height=220,
        level=1.0,
    )


def fig6_jobs(lab: Lab) -> list[Job]:
    return [lab.job(setting, COLOCATED) for setting in SETTINGS]


def fig6(lab: Lab) -> Section:
    idle = {setting: lab.outcome(setting, COLOCATED).idle_share for setting in SETTINGS}
    findings = [_idle_finding(lab, "all settings", list(idle.values()), paper.IDLE, QWEN, direction=False)]
    others = [value for setting, value in idle.items() if setting.model != DEEPSEEK and setting.task != "math"]
    for model, values in paper.IDLE_OF.items():
        ours = [value for setting, value in idle.items() if setting.model == model]
        agentic = [value for setting, value in idle.items() if setting.model == model and setting.task != "math"]
        direction = min(agentic) > max(others) if model == DEEPSEEK else max(agentic) < values.high
        findings.append(_idle_finding(lab, model, ours, values, model, direction))
    groups = [(task, staleness) for task in paper.TASKS for staleness in paper.STALENESS]
    chart = bar_chart(
        [short(Setting("", task, staleness)) for task, staleness in groups],
        [
            Bars(model, MODEL_COLOURS[model], [idle[Setting(model, *group)] for group in groups])
            for model in paper.MODELS
        ],
        "idle share",
    )
    text = (
        "Share of the engines' time in steps that GPUs wait at the barrier, in steps where some DP ranks prefill and "
        "others decode, under colocation without cadence. As in the paper, other waiting at the barrier does not count. "
        "In direction: DeepSeek-V3.2 (16 DP ranks) idles the most on the agentic tasks, MiMo no more than the paper's."
    )
    return Section("fig6", "Fig. 6: GPUs idle from interference under colocation", text, findings, [], [("", chart)])


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _idle_finding(lab: Lab, row: str, ours: Sequence[float], values: Range, model: str, direction: bool) -> Finding:
    return Finding(
        row,
        f"{stated(Range(100 * values.low, 100 * values.high))} %",
        percent(ours),
        *judged(within(ours, values), direction, lambda: moved(lab, model, lambda effect: effect.idle, values, _share)),
    )


def table2_jobs(lab: Lab) -> list[Job]:
    return [lab.job(setting, policy) for setting in _table2_settings() for policy in (COLOCATED, ADAPTIVE)]


def _table2_settings() -> list[Setting]:
    return [setting for setting in SETTINGS if setting.task == "general-agent"]


def table2(lab: Lab) -> Section:
    findings = [finding for setting in _table2_settings() for finding in _completion_findings(lab, setting)]
    text = (
        "Mean time from sampling until the reward, general agent, finished trajectories. Under colocation without cadence. "
        "A time agrees or does not; a ratio agrees in direction where trajectories are shorter under Prorsa."
    )
    return Section("table2", "Table 2: trajectory completion times", text, [*findings, _lifetime_finding(lab)])


def _completion_findings(lab: Lab, setting: Setting) -> list[Finding]:
    """Of one column of the table: both times, and their ratio."""
    model, column = setting.model, paper.STALENESS.index(setting.staleness)
    theirs = paper.COLOCATED_TRAJECTORY_S[model][column], paper.PRORSA_TRAJECTORY_S[model][column]
    ours = tuple(lab.outcome(setting, policy).trajectory_mean_s for policy in (COLOCATED, ADAPTIVE))

    def time(index: int, name: str, metric: Callable[[Effect], float]) -> Finding:
        target = Range(theirs[index] / (1 + TIME_TOLERANCE), theirs[index] * (1 + TIME_TOLERANCE))
        return Finding(
            f"{model}, {spoken(setting.staleness)}, {name}, s",
            f"{theirs[index]:.0f}",
            f"{ours[index]:.0f}",
            *judged(
                near(ours[index], theirs[index], TIME_TOLERANCE),
                reason=lambda: moved(lab, model, metric, target, "{:.0f} s".format),
            ),
        )

    our_ratio, ratio = ours[0] / ours[1], theirs[0] / theirs[1]
    target = Range(ratio / (1 + RATIO_TOLERANCE), ratio * (1 + RATIO_TOLERANCE))
    return [
        time(0, "colocated", lambda effect: effect.colocated_s),
        time(1, "Prorsa", lambda effect: effect.prorsa_s),
        Finding(
            f"{model}, {spoken(setting.staleness)}, colocated over Prorsa",
            f"{ratio:.2f}x",
            f"{our_ratio:.2f}x",
            *judged(
                near_ratio(our_ratio, ratio),
                our_ratio > 1,
                lambda: moved(lab, model, lambda effect: effect.colocated_s / effect.prorsa_s, target),
            ),
        ),
    ]


def _lifetime_finding(lab: Lab) -> Finding:
    coding, general = (
        fmean(lab.outcome(Setting(MIMO, task, s), ADAPTIVE).trajectory_mean_s for s in paper.STALENESS)
        for task in paper.AGENTIC
    )
    return Finding(
        "MiMo, Prorsa: coding agent over general agent",
        f"{paper.LIFETIME_RATIO:.2f}x ({paper.TRAJECTORY_S['coding-agent']:.0f} s)",
        f"{coding / general:.2f}x ({coding:.0f} s)",
        *judged(near(coding / general, paper.LIFETIME_RATIO), coding > general),
    )
