"""Every figure and table of the paper's evaluation: which runs it needs, and what it says of them.

Nothing is claimed that the runs do not show: verdicts come from `verdicts`, and every sentence about a result is chosen by
the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation, fmean, median

from prorsa.report.svg import Bars, Chart, Series, bar_chart, line_chart
from prorsa.report.volumes import Volume
from prorsa.simulation.costs import StepCosts
from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.grid import Job
from prorsa.simulation.experiments.page import Section, Table
from prorsa.simulation.experiments.paper import Range
from prorsa.simulation.experiments.sensitivity import (
    Effect,
    distance,
    moved,
    sensitivity_jobs,
    sensitivity_section,
)
from prorsa.simulation.experiments.settings import (
    ADAPTIVE,
    COLOCATED,
    SETTINGS,
    Lab,
    Setting,
    cadence,
    spoken,
    static,
)
from prorsa.simulation.experiments.verdicts import (
    RATIO_TOLERANCE,
    TIME_TOLERANCE,
    Finding,
    Verdict,
    near,
    span,
    verdict,
    within,
)
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.profile import Profile, load_profile
from prorsa.simulation.scenario import PolicySection
from prorsa.simulation.statistics import BIN_S

MIMO, DEEPSEEK, QWEN = "mimo-v2.5-pro", "deepseek-v3.2", "qwen3-235b"
COLOURS = {"on-policy": "prefill", "2": "decode", "8": "mixed"}
MODEL_COLOURS = dict(zip(paper.MODELS, ("prefill", "decode", "mixed"), strict=True))


@dataclass(frozen=True, slots=True)
class Figure:
    key: str
    jobs: Callable[[Lab], list[Job]]
    section: Callable[[Lab], Section]
    later: Callable[[Lab], list[Job]] = lambda lab: []
    """Jobs that depend on the outcomes of `jobs`."""


def percent(values: Sequence[float]) -> str:
    return f"{span([100 * value for value in values])} %"


def stated(values: Range, form: str = "{:.2f}", unit: str = "") -> str:
    return span([values.low, values.high], form) + unit


# Figures 1, 3, 9, 10 and 11 look at long runs of MiMo under Prorsa.


def long_steps(lab: Lab, task: str) -> int:
    return lab.budget.steps[task] if task == "math" else lab.budget.long_steps


def long_jobs(tasks: Sequence[str], staleness: Sequence[str]) -> Callable[[Lab], list[Job]]:
    def jobs(lab: Lab) -> list[Job]:
        return [
            lab.job(Setting(MIMO, task, stale), ADAPTIVE, steps=long_steps(lab, task))
            for task in tasks
            for stale in staleness
        ]

    return jobs


def long_run(lab: Lab, task: str, staleness: str) -> RunOutcome:
    return lab.outcome(Setting(MIMO, task, staleness), ADAPTIVE, steps=long_steps(lab, task))


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
            verdict(min(math) >= 0.75, min(math) > 0.3),
        ),
        Finding(
            "agentic: prefill done in the first quarter",
            "prefill throughout the step (plot)",
            percent(early),
            verdict(max(early) <= 0.75, max(early) < min(math)),
        ),
        Finding(
            "agentic: prefill over decode tokens, uncached",
            "substantially more prefill",
            span(ratios),
            verdict(min(ratios) >= 2, min(ratios) > 1),
        ),
        Finding(
            "on-policy: token rate in the last fifth of the step over its mean",
            "drops sharply",
            span(tails),
            verdict(max(tails) <= 0.5, max(tails) < 1),
        ),
    ]
    charts = [
        (
            task,
            line_chart(
                [
                    Series(f"{kind}, {spoken(s)}", COLOURS[s], found[task, s].time, values, dashed=kind == "decode")
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
            verdict(means["disaggregated"] < 0.9 * means["colocated"], means["disaggregated"] < means["colocated"]),
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


def _itl_line(name: str, colour: str, outcome: RunOutcome) -> Series:
    bins = [(i * BIN_S / 60, 1000 * s / n) for i, (s, n) in sorted(outcome.statistics.itl_over_time.items()) if n]
    return Series(name, colour, [time for time, _ in bins], [value for _, value in bins])


# Figures 3, 10 and 11


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
            verdict(near(on_policy, paper.STEP_RATIO_SPREAD["on-policy"])),
        ),
        Finding(
            "the same at staleness 8",
            f"up to {paper.STEP_RATIO_SPREAD['8']:.2f}x",
            f"up to {asynchronous:.2f}x",
            verdict(near(asynchronous, paper.STEP_RATIO_SPREAD["8"]), asynchronous > on_policy),
        ),
        Finding(
            "ratio of a step, uncached tokens",
            "axis from 1 to 12 (plot)",
            span(every, "{:.1f}"),
            verdict(within(every, Range(1, 12)), min(every) > 1),
        ),
        Finding(
            "first windows of the first step over its median window",
            "prefill-heavy, then a sharp decline",
            span(declines, "{:.1f}") + "x",
            verdict(min(declines) >= 2, min(declines) > 1),
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


# Figures 5 and 6: the 27 settings


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
    return Section("fig5", "Fig. 5: rollout time", text, findings, [("All settings:", Table(header, rows))], charts)


def _speedup_finding(lab: Lab, row: str, chosen: Sequence[Compared], values: Range) -> Finding:
    agentic = [one for one in chosen if one.setting.task != "math"]
    ours = [one.speedup for one in agentic]
    judged = verdict(within(ours, values), min(ours) > 1)
    worst = max(agentic, key=lambda one: distance(one.speedup, values))
    reason = "" if judged is Verdict.AGREES else moved(lab, worst.setting.model, lambda effect: effect.speedup, values)
    faster = sum(value > 1 for value in ours)
    return Finding(row, stated(values, unit="x"), f"{span(ours)}x; above 1 in {faster} of {len(ours)}", judged, reason)


def _math_finding(chosen: Sequence[Compared]) -> Finding:
    ours = [1 / one.speedup for one in chosen if one.setting.task == "math"]
    slower = sum(value > 1 for value in ours)
    return Finding(
        "math: rollout time over that of colocation",
        f"{stated(paper.MATH_TIME)}; above 1 in most",
        f"{span(ours)}; above 1 in {slower} of {len(ours)}",
        verdict(within(ours, paper.MATH_TIME) and slower > len(ours) / 2, within(ours, paper.MATH_TIME)),
    )


def _fig5_chart(rows: Sequence[Compared]) -> Chart:
    return bar_chart(
        [_short(one.setting) for one in rows],
        [
            Bars("colocated", "mixed", [1.0] * len(rows)),
            Bars("best cadence", "persistence", [one.best_cadence / one.colocated for one in rows]),
            Bars("Prorsa", "prefill", [1 / one.speedup for one in rows]),
        ],
        "time over colocation",
        height=220,
        level=1.0,
    )


def _short(setting: Setting) -> str:
    return f"{setting.task.removesuffix('-agent')}, {setting.staleness}"


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
        [_short(Setting("", task, staleness)) for task, staleness in groups],
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


def _idle_finding(lab: Lab, row: str, ours: Sequence[float], values: Range, model: str, direction: bool) -> Finding:
    judged = verdict(within(ours, values), direction)
    reason = "" if judged is Verdict.AGREES else moved(lab, model, lambda effect: effect.idle, values, "{:.1%}")
    return Finding(row, f"{stated(Range(100 * values.low, 100 * values.high))} %", percent(ours), judged, reason)


# Figure 7


MIMO_SETTINGS = tuple(setting for setting in SETTINGS if setting.model == MIMO)


def fig7_jobs(lab: Lab) -> list[Job]:
    policies = [ADAPTIVE, *(static(split) for split in lab.budget.splits)]
    return [lab.job(setting, policy) for setting in MIMO_SETTINGS for policy in policies]


def fig7(lab: Lab) -> Section:
    times = {
        setting: {split: lab.outcome(setting, static(split)).rollout_s for split in lab.budget.splits}
        for setting in MIMO_SETTINGS
    }
    prorsa = {setting: lab.outcome(setting, ADAPTIVE) for setting in MIMO_SETTINGS}
    best = {setting: min(row, key=lambda split: row[split]) for setting, row in times.items()}
    gains = {setting: times[setting][best[setting]] / prorsa[setting].rollout_s for setting in MIMO_SETTINGS}
    ours = list(gains.values())
    fixed = {task: _best_for_task(times, task) for task in paper.TASKS}
    per_task = [times[s][fixed[s.task]] / prorsa[s].rollout_s for s in MIMO_SETTINGS]
    findings = [
        Finding(
            "gain over the best static split of each task",
            stated(paper.SWITCHING_GAIN, unit="x"),
            f"{span(per_task)}x",
            verdict(within(per_task, paper.SWITCHING_GAIN, 0.05), fmean(per_task) > 1),
            _switching_reason(lab, per_task),
        ),
        Finding(
            "gain over the best static split of each setting",
            "not stated",
            f"{span(ours)}x",
            verdict(min(ours) >= 0.95, fmean(ours) > 1),
        ),
        *(
            Finding(
                f"best static split, {task}",
                paper.BEST_SPLIT[task],
                fixed[task],
                verdict(fixed[task] == paper.BEST_SPLIT[task], _one_apart(fixed[task], paper.BEST_SPLIT[task])),
            )
            for task in paper.TASKS
        ),
    ]
    header = ["task", "staleness", *lab.budget.splits, "Prorsa", "gain over the best", "flips"]
    rows = [
        [
            setting.task,
            setting.staleness,
            *(f"**{time:.0f}**" if split == best[setting] else f"{time:.0f}" for split, time in times[setting].items()),
            f"{prorsa[setting].rollout_s:.0f}",
            f"{gains[setting]:.2f}x",
            str(len(prorsa[setting].flips)),
        ]
        for setting in MIMO_SETTINGS
    ]
    chart = bar_chart(
        [_short(setting) for setting in MIMO_SETTINGS],
        [
            Bars("best static split of the task", "persistence", [1.0] * len(MIMO_SETTINGS)),
            Bars("Prorsa", "prefill", per_task),
        ],
        "speedup",
        level=1.0,
    )
    text = (
        "MiMo-V2.5-Pro, eight instances: Prorsa against every static prefill:decode split, mean rollout seconds of a step. "
        "The paper compares with one split for each task, the best of which we take over all staleness settings. In "
        "direction: one instance apart; a gain on average."
    )
    return Section(
        "fig7",
        "Fig. 7: role switching against static splits",
        text,
        findings,
        [("", Table(header, rows))],
        [("", chart)],
    )


def _best_for_task(times: Mapping[Setting, Mapping[str, float]], task: str) -> str:
    """The split with the smallest mean of times over those of the best split, over the task's settings."""
    rows = [row for setting, row in times.items() if setting.task == task]
    return min(rows[0], key=lambda split: fmean(row[split] / min(row.values()) for row in rows))


def _one_apart(one: str, other: str) -> bool:
    return abs(int(one.split(":")[0]) - int(other.split(":")[0])) <= 1


def _switching_reason(lab: Lab, gains: Sequence[float]) -> str:
    if within(gains, paper.SWITCHING_GAIN, 0.05):
        return ""
    peaks = {task: max(_prorsa(lab, task, s).kv_peak for s in paper.STALENESS) for task in paper.TASKS}
    fullest = ", ".join(f"{task} {peak:.0%}" for task, peak in peaks.items())
    return (
        f"Verified by the runs: the decode instances' KV capacity is used at most to {fullest}. The paper explains its gain "
        "by KV pressure. Conjecture: its runs had more requests in flight for the capacity."
    )


def _prorsa(lab: Lab, task: str, staleness: str) -> RunOutcome:
    return lab.outcome(Setting(MIMO, task, staleness), ADAPTIVE)


# Decode instances of twice the expert parallelism


DOUBLED = {MIMO: ("mimo-v2.5-pro-h200-ep32-decode", 2), QWEN: ("qwen3-235b-h200-ep8-decode", 2)}
"""Profile of decode instances, and how many of the prefill instances' GPUs one takes."""


def _pairs(lab: Lab, model: str) -> list[tuple[str, str]]:
    """(split with equal parallelism, split of the same GPUs with doubled decode instances)"""
    factor = 4 if model == QWEN else 1
    pairs = []
    for split in lab.budget.splits:
        prefill, decode = (factor * int(part) for part in split.split(":"))
        if decode % 2 == 0:
            pairs.append((f"{prefill}:{decode}", f"{prefill}:{decode // 2}"))
    return pairs


def doubled_jobs(lab: Lab) -> list[Job]:
    jobs = []
    for model, (profile, _) in DOUBLED.items():
        setting = Setting(model, "coding-agent", "on-policy")
        for equal, doubled in _pairs(lab, model):
            jobs.append(lab.job(setting, static(equal)))
            jobs.append(lab.job(setting, static(doubled), f"hardware.decode_profile={profile}"))
    return jobs


def doubled(lab: Lab) -> Section:
    rows, gains = [], []
    for model, (profile, _) in DOUBLED.items():
        setting = Setting(model, "coding-agent", "on-policy")
        pairs = _pairs(lab, model)
        equal = {one: lab.outcome(setting, static(one)).rollout_s for one, _ in pairs}
        twice = {
            one: lab.outcome(setting, static(one), f"hardware.decode_profile={profile}").rollout_s for _, one in pairs
        }
        best, best_twice = min(equal, key=lambda key: equal[key]), min(twice, key=lambda key: twice[key])
        gains.append(equal[best] / twice[best_twice])
        rows.append([model, best, f"{equal[best]:.1f}", best_twice, f"{twice[best_twice]:.1f}", f"{gains[-1]:.2f}x"])
    header = ["model", "best split", "s", "best split, decode EP doubled", "s", "speedup"]
    judged = verdict(within(gains, paper.DOUBLED_DECODE, 0.05), min(gains) > 1)
    finding = Finding(
        "speedup from decode instances of twice the expert parallelism, coding agent",
        stated(paper.DOUBLED_DECODE, unit="x"),
        f"{span(gains)}x",
        judged,
        "" if judged is Verdict.AGREES else _doubled_reason(),
    )
    text = (
        "Instances of different size cannot change their role while they run, so this compares static splits of equal "
        "GPUs, the best with the best."
    )
    return Section(
        "doubled", "Doubled expert parallelism of decode (5.3)", text, [finding], [("", Table(header, rows))]
    )


def _doubled_reason() -> str:
    ratios = _decode_ep_ratios()
    return (
        f"Verified from the operator grids: at batch {paper.DECODE_BATCH} a rank, MiMo decodes "
        f"{span(ratios)} times as much a server at EP32 as at EP16 (8K to 512K; paper, Table 1: 1.09 to 0.99). "
        "Communication between more servers is scaled, not measured, in our grids."
    )


# Figures 8 and 9


FORECAST_SETTINGS = tuple(Setting(MIMO, task, s) for task in paper.AGENTIC for s in paper.STALENESS)
RETURNS = PolicySection(name="adaptive", decode_returns=True)


def fig8_jobs(lab: Lab) -> list[Job]:
    return long_jobs(paper.AGENTIC, paper.STALENESS)(lab) + [
        lab.job(Setting(MIMO, task, "on-policy"), RETURNS, steps=long_steps(lab, task)) for task in paper.AGENTIC
    ]


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
    return Section("fig8", "Fig. 8: forecast errors", text, findings, [("", Table(header, rows))], charts)


def _wape_finding(
    lab: Lab, row: str, ours: Sequence[float], values: Range, measure: Callable[[RunOutcome], float]
) -> Finding:
    judged = verdict(within(ours, values), max(ours) <= values.high * (1 + RATIO_TOLERANCE))
    reason = "" if judged is Verdict.AGREES else _wape_reason(lab, measure)
    return Finding(row, percent([values.low, values.high]), percent(ours), judged, reason)


def _wape_reason(lab: Lab, measure: Callable[[RunOutcome], float]) -> str:
    words = []
    for task in paper.AGENTIC:
        setting, steps = Setting(MIMO, task, "on-policy"), long_steps(lab, task)
        one_step, returns = (measure(lab.outcome(setting, policy, steps=steps)) for policy in (ADAPTIVE, RETURNS))
        words.append(f"{task} {one_step:.1%} to {returns:.1%}")
    return (
        "Verified by runs: forecasting also the next requests of trajectories that decode, which the paper's one-step model "
        f"leaves out, changes it on-policy: {'; '.join(words)}. Conjecture: what is left depends on how regular the tools' "
        "durations are, which the paper does not state."
    )


def _wape_chart(table: Mapping[str | None, Sequence[float]]) -> Chart:
    colours = {None: "prefill", "persistence": "persistence", "kalman": "mixed"}
    return bar_chart(
        [_short(setting) for setting in FORECAST_SETTINGS],
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
        verdict(min(correlations) >= 0.9, min(correlations) >= 0.5),
    )
    text = "MiMo-V2.5-Pro under Prorsa, staleness 8, the first three steps; vertical lines mark their ends."
    return Section("fig9", "Fig. 9: forecast and measured load", text, [finding], charts=charts)


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    return correlation(one, other) if len(set(one)) > 1 and len(set(other)) > 1 else 0.0


# Table 1: from the operator grids alone


def no_jobs(lab: Lab) -> list[Job]:
    return []


def prefill_throughput(profile: Profile, length: int) -> float:
    """Tokens a second of one server that prefills prompts of a length."""
    return StepCosts(profile).prefill_speed(length) * profile.gpus_per_server / profile.gpus


def decode_throughput(profile: Profile, length: int) -> float:
    """Tokens a second of one server whose ranks decode `DECODE_BATCH` requests of a length each."""
    costs, batch = StepCosts(profile), paper.DECODE_BATCH
    step = costs.decode_local(batch, length) + costs.shared(False, batch, batch)
    return batch * profile.ranks / step * profile.gpus_per_server / profile.gpus


def _decode_ep_ratios() -> list[float]:
    """Decode throughput of a server at EP32 over that at EP16, by length."""
    narrow, wide = _mimo_profiles()
    return [decode_throughput(wide, length) / decode_throughput(narrow, length) for length in paper.LENGTHS.values()]


def _mimo_profiles() -> tuple[Profile, Profile]:
    return load_profile("mimo-v2.5-pro-h200-ep16"), load_profile(DOUBLED[MIMO][0])


def table1(lab: Lab) -> Section:
    narrow, wide = _mimo_profiles()
    findings = []
    for what, throughput, table in (
        ("prefill", prefill_throughput, paper.PREFILL_THROUGHPUT),
        ("decode", decode_throughput, paper.DECODE_THROUGHPUT),
    ):
        values = [throughput(narrow, length) for length in paper.LENGTHS.values()]
        for name, value, stated_value in zip(paper.LENGTHS, values, table["EP16"], strict=True):
            ours, theirs = value / values[0], stated_value / table["EP16"][0]
            findings.append(_shape_finding(f"{what}, EP16, {name} over 8K", ours, theirs))
    for name, ours, low, high in zip(
        paper.LENGTHS,
        _decode_ep_ratios(),
        paper.DECODE_THROUGHPUT["EP16"],
        paper.DECODE_THROUGHPUT["EP32"],
        strict=True,
    ):
        findings.append(_shape_finding(f"decode, EP32 over EP16, {name}", ours, high / low))
    text = (
        f"Throughput of a server from the operator grids of `{narrow.name}` and `{wide.name}`. The paper normalises by EP64 "
        "at 512K, for which there is no grid that we trust, so each row here is a ratio of two cells of its table. "
        "Prefill at EP32 and both stages at EP64 are left out for the same reason. In direction: on the same side of 1."
    )
    return Section("table1", "Table 1: throughput by length and expert parallelism", text, findings)


def _shape_finding(row: str, ours: float, theirs: float) -> Finding:
    judged = verdict(near(ours, theirs), (ours - 1) * (theirs - 1) > 0)
    reason = (
        ""
        if judged is Verdict.AGREES
        else "Conjecture: the profile stands in for MiMo-V2.5-Pro from its public geometry; its kernels were not measured."
    )
    return Finding(row, f"{theirs:.2f}", f"{ours:.2f}", judged, reason)


# Table 2


def table2_jobs(lab: Lab) -> list[Job]:
    return [lab.job(setting, policy) for setting in _table2_settings() for policy in (COLOCATED, ADAPTIVE)]


def _table2_settings() -> list[Setting]:
    return [setting for setting in SETTINGS if setting.task == "general-agent"]


def table2(lab: Lab) -> Section:
    findings = []
    for setting in _table2_settings():
        column = paper.STALENESS.index(setting.staleness)
        theirs = paper.COLOCATED_TRAJECTORY_S[setting.model][column], paper.PRORSA_TRAJECTORY_S[setting.model][column]
        ours = tuple(lab.outcome(setting, policy).trajectory_mean_s for policy in (COLOCATED, ADAPTIVE))
        for name, paper_s, our_s in zip(("colocated", "Prorsa"), theirs, ours, strict=True):
            agrees = near(our_s, paper_s, TIME_TOLERANCE)
            direction = ours[0] > ours[1]
            reason = "" if agrees else _trajectory_reason(lab, setting.model, name, paper_s)
            row = f"{setting.model}, {spoken(setting.staleness)}, {name}, s"
            findings.append(Finding(row, f"{paper_s:.0f}", f"{our_s:.0f}", verdict(agrees, direction), reason))
        findings.append(
            Finding(
                f"{setting.model}, {spoken(setting.staleness)}, colocated over Prorsa",
                f"{theirs[0] / theirs[1]:.2f}x",
                f"{ours[0] / ours[1]:.2f}x",
                verdict(near(ours[0] / ours[1], theirs[0] / theirs[1]), ours[0] > ours[1]),
            )
        )
    findings.append(_lifetime_finding(lab))
    text = (
        "Mean time from sampling until the reward, general agent, finished trajectories. Under colocation without cadence. "
        "In direction: shorter under Prorsa."
    )
    return Section("table2", "Table 2: trajectory completion times", text, findings)


def _trajectory_reason(lab: Lab, model: str, name: str, target: float) -> str:
    def metric(effect: Effect) -> float:
        return effect.colocated_s if name == "colocated" else effect.prorsa_s

    return moved(lab, model, metric, Range(target / (1 + TIME_TOLERANCE), target * (1 + TIME_TOLERANCE)), "{:.0f} s")


def _lifetime_finding(lab: Lab) -> Finding:
    coding, general = (
        fmean(_prorsa(lab, task, s).trajectory_mean_s for s in paper.STALENESS) for task in paper.AGENTIC
    )
    return Finding(
        "MiMo, Prorsa: coding agent over general agent",
        f"{paper.LIFETIME_RATIO:.2f}x ({paper.TRAJECTORY_S['coding-agent']:.0f} s)",
        f"{coding / general:.2f}x ({coding:.0f} s)",
        verdict(near(coding / general, paper.LIFETIME_RATIO), coding > general),
    )


# Role switches


def switch_jobs(lab: Lab) -> list[Job]:
    return [lab.job(setting, ADAPTIVE) for setting in MIMO_SETTINGS]


def switch(lab: Lab) -> Section:
    flips = [flip for setting in MIMO_SETTINGS for flip in lab.outcome(setting, ADAPTIVE).flips]
    dead = lab.job(MIMO_SETTINGS[0], ADAPTIVE).scenario.prefill_profile().flip_s
    if not flips:
        ours, judged = "no role was switched", Verdict.DIFFERS
    else:
        mean = fmean(flip.seconds for flip in flips)
        ours, judged = f"{mean:.1f}", verdict(near(mean, paper.SWITCH_S))
    finding = Finding("a role switch on average, s", f"{paper.SWITCH_S:.0f}", ours, judged)
    drained = fmean([flip.drain_s for flip in flips] or [0.0])
    cancelled = fmean([flip.cancelled for flip in flips] or [0.0])
    text = (
        f"MiMo-V2.5-Pro, all nine settings, {len(flips)} switches. The dead time of {dead:g} s is an assumption of the "
        f"profile, not a result; before it, draining took {drained:.2f} s on average, and {cancelled:.1f} requests were "
        "cancelled and resent. What a shorter or longer dead time does to the rollout stands under Sensitivity."
    )
    return Section("switch", "Role switches (Appendix C)", text, [finding])


FIGURES = (
    Figure("fig1", long_jobs(paper.TASKS, paper.STALENESS), fig1),
    Figure("fig2", fig2_jobs, fig2),
    Figure("fig3", long_jobs(paper.AGENTIC, paper.STALENESS), fig3),
    Figure("fig5", lambda lab: fig5_jobs(lab) + sensitivity_jobs(lab), fig5, fig5_later),
    Figure("fig6", lambda lab: fig6_jobs(lab) + sensitivity_jobs(lab), fig6),
    Figure("fig7", fig7_jobs, fig7),
    Figure("doubled", doubled_jobs, doubled),
    Figure("fig8", fig8_jobs, fig8),
    Figure("fig9", long_jobs(paper.AGENTIC, ("8",)), fig9),
    Figure("table1", no_jobs, table1),
    Figure("table2", lambda lab: table2_jobs(lab) + switch_jobs(lab) + sensitivity_jobs(lab), table2),
    Figure("switch", switch_jobs, switch),
    Figure("sensitivity", sensitivity_jobs, sensitivity_section),
)
