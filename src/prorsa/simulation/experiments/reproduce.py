"""The paper's evaluation, run again in simulation: its figures and tables, the paper's value beside ours, on one page."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path

from prorsa.config import ConfigError
from prorsa.report.svg import stack, style
from prorsa.simulation.experiments.figures import FIGURES
from prorsa.simulation.experiments.figures.common import Figure
from prorsa.simulation.experiments.grid import Grid, Job, Progress
from prorsa.simulation.experiments.page import Section, Table
from prorsa.simulation.experiments.settings import FULL, IN_FLIGHT, Budget, Lab, scenario_path, shipped_scenarios
from prorsa.simulation.experiments.verdicts import RATIO_TOLERANCE, TIME_TOLERANCE, Verdict
from prorsa.simulation.scenario import load_scenario

PAGE = "reproduction.md"
PICTURES = "reproduction"
TURNS = {"math": 1, "coding-agent": 50, "general-agent": 20}
"""Turns of a trajectory, roughly: what a run takes is about proportional to its turns."""


def figures_named(names: Sequence[str]) -> list[Figure]:
    """All of them where no name is given. Raises `ConfigError`."""
    known = {figure.key: figure for figure in FIGURES}
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name}: there is no such figure; give some of {', '.join(known)}")
    return [figure for figure in FIGURES if not names or figure.key in names]


def pool(workers: int) -> ProcessPoolExecutor:
    """Its processes end with this one, however that ends."""
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin_worker)


def _begin_worker() -> None:
    # A run that ends in the middle of a role switch warns of it; in a simulation that is of no interest.
    logging.getLogger("prorsa").setLevel(logging.ERROR)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker has one"
    parent.join()
    os._exit(1)  # in the middle of its run, of which nobody wants the outcome any more


def reproduce(figures: Sequence[Figure], budget: Budget, kept: Path, progress: Progress, workers: int) -> list[Section]:
    """Run what the figures need and `kept` has not. Raises `ConfigError` and `ExperimentFailed`."""
    with pool(workers) as executor:
        return sections(figures, Lab(budget, Grid(executor, kept, progress)))


def sections(figures: Sequence[Figure], lab: Lab) -> list[Section]:
    lab.grid.run(longest_first(job for figure in figures for job in figure.jobs(lab)))
    lab.grid.run(longest_first(job for figure in figures for job in figure.later(lab)))
    return [figure.section(lab) for figure in figures]


def longest_first(jobs: Iterable[Job]) -> list[Job]:
    """So that no worker is left with a long one at the end."""

    def turns(job: Job) -> float:
        rollout = job.scenario.rollout
        trajectories = rollout.steps * rollout.groups * rollout.group_size * rollout.load
        return trajectories * TURNS.get(job.scenario.workload.name, 1)

    return sorted(jobs, key=turns, reverse=True)


def write_page(found: Sequence[Section], budget: Budget, directory: Path) -> Path:
    """The page of all figures with its pictures beside it."""
    pictures = directory / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for section in found:
        if section.picture is not None:
            svg = stack(section.charts).svg(style())
            (pictures / section.picture).write_text(svg + "\n", encoding="utf-8")
    path = directory / PAGE
    path.write_text(page(found, budget), encoding="utf-8")
    return path


def page(found: Sequence[Section], budget: Budget) -> str:
    command = "prorsa reproduce" if budget == FULL else "prorsa reproduce --quick"
    parts = [
        "# The paper, reproduced in simulation",
        f"Written by `{command}`; every number, verdict and reason below comes from its runs. Do not edit.",
        _introduction(budget),
        _verdicts(found),
        _disagreements(found),
        *(section.markdown(PICTURES) for section in found),
        _choices(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(budget: Budget) -> str:
    sync, overlapped = (
        ", ".join(f"{task} {count}" for task, count in steps.items())
        for steps in (budget.sync_steps, budget.async_steps)
    )
    return (
        "The controller, the router, the role switcher, the forecast and the allocation are the production code on a virtual "
        "clock; engines, sandboxes, tools and the trainer are simulated, the engines from measured operator times. There "
        "are no GPUs behind these numbers.\n\n"
        "The cost model is 20 to 40 % off in absolute terms; much of that cancels in ratios. So a ratio or a share *agrees* "
        f"within {100 * RATIO_TOLERANCE:.0f} % of the paper's, a time within {100 * TIME_TOLERANCE:.0f} %; what *agrees in "
        "direction* means stands with each figure. Where nothing else is said, it is being on the same side of 1.\n\n"
        f"Steps of a run: on-policy {sync}; else {overlapped}; {budget.long_steps} where steps are compared with each "
        f"other. Load: {budget.load:g} of that of the scenarios, {budget.long_load:g} in the latter runs.\n\n"
        "The same settings under every policy, seed by seed: [policy-measured.md](policy-measured.md), by "
        "`prorsa reproduce --policies all`."
    )


def _verdicts(found: Sequence[Section]) -> str:
    rows = []
    for section in found:
        counts = Counter(finding.verdict for finding in section.findings)
        if counts:
            rows.append([section.title, *(str(counts[verdict]) for verdict in Verdict)])
    return Table(["", *(str(verdict) for verdict in Verdict)], rows).markdown()


def _disagreements(found: Sequence[Section]) -> str:
    lines = [
        f"- {section.title}: {finding.row}: {finding.ours} (paper: {finding.paper})"
        for section in found
        for finding in section.findings
        if finding.verdict is Verdict.DIFFERS
    ]
    if not lines:
        return "Nothing contradicts the paper."
    return "## What does not agree\n\nThe reasons, as far as they are known, stand with the figures.\n\n" + "\n".join(
        lines
    )


def _choices() -> str:
    spoken = " and ".join(f"{batches:g} (staleness {staleness})" for staleness, batches in IN_FLIGHT.items())
    header = ["scenario", "profile", "groups x size", "train, s", "prewarmed", "longest context"]
    rows = []
    for name in shipped_scenarios():
        scenario = load_scenario(scenario_path(name))
        rollout = scenario.rollout
        rows.append(
            [
                name,
                scenario.hardware.profile,
                f"{rollout.groups} x {rollout.group_size}",
                f"{rollout.train_s:g}",
                str(rollout.prewarmed),
                str(scenario.workload.max_context),
            ]
        )
    return (
        "## What we had to choose\n\nThe paper states the models, their parallelism, the 128 GPUs, the group sizes and the "
        f"chunk sizes. The rest is ours. Asynchronous rollout keeps {spoken} batches in flight.\n\n"
        + Table(header, rows).markdown()
    )
