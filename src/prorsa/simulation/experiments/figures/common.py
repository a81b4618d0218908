"""What several figures share: names, colours, words, and the long runs of MiMo under Prorsa."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.grid import Job
from prorsa.simulation.experiments.page import Section
from prorsa.simulation.experiments.paper import Range
from prorsa.simulation.experiments.settings import ADAPTIVE, SETTINGS, Lab, Setting
from prorsa.simulation.experiments.verdicts import Verdict, span, verdict
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.scenario import PolicySection

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


def long_steps(lab: Lab, setting: Setting) -> int:
    return lab.budget.steps(setting) if setting.task == "math" else lab.budget.long_steps


def long_job(lab: Lab, setting: Setting, policy: PolicySection = ADAPTIVE) -> Job:
    load = f"rollout.load={lab.budget.long_load}"
    return lab.job(setting, policy, load, steps=long_steps(lab, setting))


def long_jobs(tasks: Sequence[str], staleness: Sequence[str]) -> Callable[[Lab], list[Job]]:
    return lambda lab: [long_job(lab, Setting(MIMO, task, stale)) for task in tasks for stale in staleness]


def long_run(lab: Lab, task: str, staleness: str, policy: PolicySection = ADAPTIVE) -> RunOutcome:
    return lab.grid.outcome(long_job(lab, Setting(MIMO, task, staleness), policy))


WORKLOAD = (
    "Conjecture: the lengths and durations of the paper's tasks are not public; ours are fits to public runs of agents, "
    "which differ threefold among themselves."
)
"""Why the workload may not look like the paper's."""


def judged(agrees: bool, direction: bool = False, reason: Callable[[], str] = lambda: WORKLOAD) -> tuple[Verdict, str]:
    """The verdict of a finding, and the reason where it does not agree."""
    found = verdict(agrees, direction)
    return found, "" if found is Verdict.AGREES else reason()


def short(setting: Setting) -> str:
    return f"{setting.task.removesuffix('-agent')}, {setting.staleness}"


MIMO_SETTINGS = tuple(setting for setting in SETTINGS if setting.model == MIMO)
