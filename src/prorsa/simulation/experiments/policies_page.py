"""The page of all policies: tables of what was simulated, and verdicts on the goals, which are decided by rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.page import Table
from prorsa.simulation.experiments.plan import Interval
from prorsa.simulation.experiments.policies import (
    CLOSE,
    POLICIES,
    SECOND,
    Compared,
    Effort,
    Study,
    geometric_mean,
    mean_s,
    p99_s,
)
from prorsa.simulation.experiments.settings import IN_FLIGHT, QUICK, scenario_path, spoken
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.scenario import PolicySection, load_scenario

PAGE = "policy-measured.md"
GOAL = 1.10
"""Over the best static split, geometric mean of the agentic settings."""
NEAR = 1.05
"""Step time over that of the clairvoyant policy, at most."""
TITLES = {
    "colocated": "best cadence",
    "static": "best split",
    "adaptive": "the paper's rule",
    "planned": "planned",
    "clairvoyant": "clairvoyant",
}


@dataclass(frozen=True, slots=True)
class Goal:
    text: str
    outcome: str
    """`met`, `not met` or `out of reach`."""
    found: str

    def line(self) -> str:
        return f"- {self.text}: **{self.outcome}**. {self.found}"


def page(study: Study) -> str:
    """Of a study of all policies that has run."""
    compared = [study.compared(setting) for setting in study.effort.settings]
    parts = [
        "# Policies, measured in simulation",
        _introduction(study.effort),
        "## The goals\n\n" + "\n".join(goal.line() for goal in goals(compared)),
        "## Step times\n\n" + _TIMES,
        times(compared).markdown(),
        "## Ratios\n\n" + _RATIOS,
        ratios(compared).markdown(),
        means(compared).markdown(),
        "## Trajectories and flips\n\n" + _TRAJECTORIES,
        trajectories(compared).markdown(),
        "## How far from the least time\n\n" + _BOUNDS,
        bounds(study, compared).markdown(),
        "## Other loads\n\n" + _LOADS,
        loads(study).markdown(),
        "## What each idea is worth\n\n" + _ABLATION,
        ablation(study).markdown(),
    ]
    return "\n\n".join(parts) + "\n"


def write(study: Study, directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PAGE
    path.write_text(page(study), encoding="utf-8")
    return path


def _introduction(effort: Effort) -> str:
    quick = " --quick" if effort.budget == QUICK else ""
    only = "".join(f" '{pattern}'" for pattern in effort.only)
    command = f"prorsa reproduce --policies all{quick}" + (f" --only{only}" if only else "")
    profiles = {load_scenario(scenario_path(one.scenario_name)).hardware.profile for one in effort.settings}
    seeds = ", ".join(f"{TITLES[name]} {effort.seeds[name]}" for name in POLICIES)
    overlapped = _joined(sorted(set(effort.budget.async_steps.values())))
    in_flight = " and ".join(f"{batches:g} ({spoken(staleness)})" for staleness, batches in IN_FLIGHT.items())
    return (
        f"Written by `{command}`; every number and verdict comes from its runs. Do not edit.\n\n"
        "Everything here is simulated, on profiles derived from measured operators "
        f"({', '.join(sorted(profiles))}); there are no GPUs behind these numbers. Router, switcher, forecasts and policies "
        "are the production code.\n\n"
        f"Seeds: {seeds}; a run with a seed has the same trajectories under every policy. Steps of a run: on-policy "
        f"{_by_task(effort.budget.sync_steps)}, else {overlapped}, with {in_flight} batches in flight. Load: "
        f"{effort.budget.load:g} of the scenarios' on-policy and {effort.budget.load * effort.async_load:g} else, and "
        f"{_joined(effort.loads)} times that below.\n\n"
        "*Best cadence* is colocation with the best of SGLang's default (0) and cadences of "
        f"{_joined(effort.budget.cadences)}, sought on-policy; *best split* the best static one, chosen afterwards among all "
        "eighths of the instances around the best. The other policies start in the better of the two by the first seed, as "
        "if a step before had left them there (the paper's rule, which knows no mixed instances, in the split), and their "
        "mixed instances have that cadence. `clairvoyant` knows every trajectory's script and plans with a model of the "
        "simulator; `planned` plans with `forecast=survival`. "
        f"A baseline that is more than {100 * CLOSE:g} % slower than the other runs with the first seed only, and a split "
        f"with several where it is within {100 * SECOND:g} % of the best."
    )


def _by_task(steps: Mapping[str, int]) -> str:
    """The usual number, and those of the tasks that have another."""
    usual = min(steps.values())
    others = [f"{number} ({task})" for task, number in steps.items() if number != usual]
    return " and ".join([str(usual), *others])


def _joined(values: Sequence[float]) -> str:
    return " and ".join(f"{value:g}" for value in values)


# The goals.


def goals(compared: Sequence[Compared]) -> list[Goal]:
    return [never_below(compared), over_static(compared), near_clairvoyant(compared)]


def never_below(compared: Sequence[Compared]) -> Goal:
    """A setting fails where the whole interval is below 1."""
    found = {one.setting: one.ratio(one.better, "planned") for one in compared}
    below = [f"{setting} {_words(ratio)}" for setting, ratio in found.items() if ratio.high < 1]
    above = sum(ratio.low >= 1 for ratio in found.values())
    worst = min(found.values(), key=lambda ratio: ratio.mean)
    text = (
        f"{len(found) - len(below)} of {len(found)} settings; surely faster in {above}. Least ratio: {_words(worst)}."
    )
    if below:
        text += f" Below 1: {'; '.join(below)}."
    goal = "Never slower than the better of best cadence and best split, within the interval"
    return Goal(goal, "not met" if below else "met", text)


def over_static(compared: Sequence[Compared]) -> Goal:
    """Out of reach where the clairvoyant policy does not get there either."""
    agentic = _agentic(compared)
    planned, clairvoyant = (geometric_mean(agentic, "static", name) for name in ("planned", "clairvoyant"))
    outcome = "met" if planned.mean >= GOAL else "out of reach" if clairvoyant.mean < GOAL else "not met"
    found = f"planned {_words(planned)}, clairvoyant {_words(clairvoyant)}, over {len(agentic)} settings."
    return Goal(f"{GOAL:.2f} over the best split, geometric mean of the agentic settings", outcome, found)


def near_clairvoyant(compared: Sequence[Compared]) -> Goal:
    found = {one.setting: one.ratio("planned", "clairvoyant") for one in compared}
    far = [f"{setting} {_words(ratio)}" for setting, ratio in found.items() if ratio.mean > NEAR]
    text = f"{len(found) - len(far)} of {len(found)} settings."
    if far:
        text += f" Planned over clairvoyant: {'; '.join(far)}."
    goal = f"Step time within {100 * (NEAR - 1):.0f} % of the clairvoyant policy's"
    return Goal(goal, "not met" if far else "met", text)


# The tables.

_TIMES = (
    "Rollout time of a step, seconds, mean over steps and seeds. Of the colocated ones the cadence is named, of the splits "
    "prefill:decode instances."
)
_RATIOS = (
    "Step time of the one over that of the other, seed by seed: geometric mean and its 95 % interval (Student's t of the "
    "logarithms). Above 1 the named one is faster. *Hindsight* is the best of all policies, run by run."
)
_TRAJECTORIES = (
    "Mean and 99th percentile of the time from sampling to reward, seconds, and role switches in a run, those in place "
    "included."
)
_BOUNDS = (
    "The least time that an on-policy step can take follows from the scripts and the profile (`prorsa.simulation.bounds`): "
    "the longest trajectory alone on the cluster, or all work at the best efficiency. Share of a step's time that this is. "
    "Asynchronous steps have no such bound: which trajectories end in one depends on the policy."
)
_LOADS = (
    "On-policy, the first seed only; the split is the best among that of load 1 and its neighbours. Step time, seconds."
)
_ABLATION = (
    "Step time without one idea over that with all, geometric mean over the seeds: above 1 the idea pays. The last rows are "
    "the paper's rule, with its own forecast and with ours."
)


def times(compared: Sequence[Compared]) -> Table:
    header = ["setting", *(TITLES[name] for name in POLICIES)]
    return Table(header, [[str(one.setting), *(_time(one, name) for name in POLICIES)] for one in compared])


def _time(one: Compared, name: str) -> str:
    return f"{mean_s(one.runs[name]):.0f}{_chosen(one.sections[name])}"


PAIRS: dict[str, Callable[[Compared], Interval]] = {
    "planned over best cadence": lambda one: one.ratio("colocated", "planned"),
    "over best split": lambda one: one.ratio("static", "planned"),
    "over the better": lambda one: one.ratio(one.better, "planned"),
    "over the paper's rule": lambda one: one.ratio("adaptive", "planned"),
    "over hindsight": lambda one: one.hindsight("planned"),
    "over clairvoyant": lambda one: one.ratio("clairvoyant", "planned"),
    "clairvoyant over the better": lambda one: one.ratio(one.better, "clairvoyant"),
}


def ratios(compared: Sequence[Compared]) -> Table:
    rows = [[str(one.setting), *(_words(pair(one)) for pair in PAIRS.values())] for one in compared]
    return Table(["setting", *PAIRS], rows)


def means(compared: Sequence[Compared]) -> Table:
    """Geometric means over settings."""
    pairs: dict[str, tuple[str | None, str]] = {
        "planned over best split": ("static", "planned"),
        "planned over the better": (None, "planned"),
        "planned over the paper's rule": ("adaptive", "planned"),
        "planned over clairvoyant": ("clairvoyant", "planned"),
        "clairvoyant over best split": ("static", "clairvoyant"),
        "clairvoyant over the better": (None, "clairvoyant"),
    }
    agentic = _agentic(compared)
    math = [one for one in compared if one not in agentic]
    rows = [
        [name, *(_words(geometric_mean(some, *pair)) if some else "" for some in (agentic, math))]
        for name, pair in pairs.items()
    ]
    return Table(["geometric mean", f"agentic ({len(agentic)})", f"math ({len(math)})"], rows)


def trajectories(compared: Sequence[Compared]) -> Table:
    switching = ("adaptive", "planned", "clairvoyant")
    header = ["setting", *(TITLES[name] for name in POLICIES), *(f"flips, {TITLES[name]}" for name in switching)]
    rows = []
    for one in compared:
        shown = [
            f"{_mean(one.runs[name], lambda run: run.trajectory_mean_s):.0f} / {_mean(one.runs[name], p99_s):.0f}"
            for name in POLICIES
        ]
        flips = [f"{_mean(one.runs[name], lambda run: len(run.flips)):.0f}" for name in switching]
        rows.append([str(one.setting), *shown, *flips])
    return Table(header, rows)


def bounds(study: Study, compared: Sequence[Compared]) -> Table:
    shown = ("colocated", "static", "planned", "clairvoyant")
    rows = []
    for one in compared:
        if one.setting.staleness == "on-policy":
            known = study.bounds(one.setting, sorted(set().union(*(one.runs[name] for name in shown))))
            shares = [fmean(known[seed] / run.rollout_s for seed, run in one.runs[name].items()) for name in shown]
            rows.append([str(one.setting), f"{known[0]:.0f}", *(f"{100 * share:.0f} %" for share in shares)])
    return Table(["setting", "least time, first seed", *(TITLES[name] for name in shown)], rows)


def loads(study: Study) -> Table:
    names = ("colocated", "static", "planned")
    rows = []
    for load in study.effort.loads:
        for setting in study.loaded():
            runs = study.at_load(setting, load)
            better = min(runs["colocated"].rollout_s, runs["static"].rollout_s)
            shown = [f"{runs[name].rollout_s:.0f}" for name in names]
            rows.append([str(setting), f"x{load:g}", *shown, f"{better / runs['planned'].rollout_s:.3f}"])
    return Table(["setting", "load", *(TITLES[name] for name in names), "planned over the better"], rows)


def ablation(study: Study) -> Table:
    settings = study.effort.ablated
    runs = {setting: study.ablated(setting) for setting in settings}
    rows = []
    for name in runs[settings[0]]:
        cells = []
        for setting in settings:
            whole, without = runs[setting]["planned"], runs[setting][name]
            cells.append(f"{fmean(without[seed].rollout_s / whole[seed].rollout_s for seed in whole):.3f}")
        rows.append([name, *cells])
    return Table(["", *(str(setting) for setting in settings)], rows)


def times_table(study: Study, policies: frozenset[str]) -> Table:
    """Of a study of some policies only: step time, trajectories and flips."""
    rows = []
    for setting in study.effort.settings:
        one = study.compared(setting)
        for name in sorted(policies, key=POLICIES.index):
            runs = one.runs[name]
            rows.append(
                [
                    str(setting),
                    f"{TITLES[name]}{_chosen(one.sections[name])}",
                    f"{mean_s(runs):.1f}",
                    f"{_mean(runs, lambda run: run.trajectory_mean_s):.1f}",
                    f"{_mean(runs, p99_s):.0f}",
                    f"{_mean(runs, lambda run: len(run.flips)):.0f}",
                    str(len(runs)),
                ]
            )
    return Table(["setting", "policy", "step, s", "trajectory, s", "p99, s", "flips", "seeds"], rows)


def _chosen(section: PolicySection) -> str:
    return {"colocated": f" ({section.prefill_every})", "static": f" ({section.split})"}.get(section.name, "")


def _mean(runs: Mapping[int, RunOutcome], value: Callable[[RunOutcome], float]) -> float:
    return fmean(value(run) for run in runs.values())


def _agentic(compared: Sequence[Compared]) -> list[Compared]:
    return [one for one in compared if one.setting.task in paper.AGENTIC]


def _words(ratio: Interval) -> str:
    """The mean alone where one run is all there is."""
    return f"{ratio.mean:.3f}" if ratio.low == 0 else f"{ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
