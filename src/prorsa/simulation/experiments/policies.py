"""All policies beside each other, in the settings of the paper's evaluation: which runs that takes, and what they come to.

The baselines are the strong ones: colocation with the cadence that is best, and the static split that is best, chosen
afterwards. Both are sought with one seed: the cadence on-policy for each model and task, the split in every setting, along
its neighbours until none is better. What is compared then runs with several seeds, of which every policy gets the same
trajectories. The others start in the better baseline, as if a step before had left them there, and their mixed instances have
the best cadence; the paper's rule, which knows no mixed instances, starts in the best split.

Runs are spared where they could not change a comparison: further seeds of a baseline that is far behind the other one, and of
splits that are clearly not the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np

from prorsa.config import MIXED, ConfigError, Planning
from prorsa.simulation.bounds import step_bounds
from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.grid import Grid, Job
from prorsa.simulation.experiments.plan import Interval, interval
from prorsa.simulation.experiments.reproduce import longest_first
from prorsa.simulation.experiments.settings import (
    COLOCATED,
    FULL,
    QUICK,
    SETTINGS,
    Budget,
    Lab,
    Setting,
    cadence,
    scenario_path,
    static,
)
from prorsa.simulation.outcome import RunOutcome, StepOutcome
from prorsa.simulation.scenario import PolicySection, load_scenario

POLICIES = ("colocated", "static", "adaptive", "planned", "clairvoyant")
EIGHTHS = range(1, 8)
"""Prefill instances of a static split, in eighths of all."""
FIRST_EIGHTHS = (2, 3, 4, 5)
"""Those that are tried first, on-policy; other settings begin with the best one of these."""
CLOSE = 0.05
"""A baseline that is slower than the other by more than this with the first seed gets no further ones."""
SECOND = 0.015
"""A split that is slower than the best by no more than this with the first seed gets further ones too."""
TURNS_A_SECOND = 2740
"""Of a CPU (docs/benchmarks.md)."""
TURNS = {"math": 5, "coding-agent": 50, "general-agent": 20}
"""Of a trajectory, roughly; one of math costs as much as so many of an agent."""
EFFORT = {"adaptive": 1.2, "planned": 1.5, "clairvoyant": 1.8}
"""What a run under a policy costs, static splits being 1."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much runs."""

    budget: Budget
    settings: tuple[Setting, ...]
    seeds: Mapping[str, int]
    """By policy."""
    async_load: float
    """Of asynchronous settings, which keep more batches alive, as a factor."""
    loads: tuple[float, ...]
    """Other loads, as factors: on-policy, one seed, without the coding agent, which costs the most."""
    ablated: tuple[Setting, ...]
    ablation_seeds: int
    only: tuple[str, ...] = ()
    """The patterns by which settings were chosen."""

    def limited(self, patterns: Sequence[str]) -> Effort:
        """To the settings whose `model/task/staleness` one of the patterns matches; without any, all.

        Raises `ConfigError`.
        """
        if not patterns:
            return self

        for pattern in patterns:
            if not any(fnmatchcase(_path(setting), pattern) for setting in self.settings):
                raise ConfigError(
                    f"--only {pattern}: no setting is like that; write MODEL/TASK/STALENESS with * for any, such as "
                    "'*/math/on-policy'"
                )
        settings, ablated = (
            tuple(one for one in given if any(fnmatchcase(_path(one), pattern) for pattern in patterns))
            for given in (self.settings, self.ablated)
        )
        return replace(self, settings=settings, ablated=ablated, only=tuple(patterns))


def _path(setting: Setting) -> str:
    return f"{setting.model}/{setting.task}/{setting.staleness}"


FULL_EFFORT = Effort(
    # A policy that learns begins the second step with what the first has taught; only math's cost so little.
    budget=replace(FULL, sync_steps=MappingProxyType({**FULL.sync_steps, "math": 2})),
    settings=SETTINGS,
    seeds=MappingProxyType({"colocated": 5, "static": 5, "adaptive": 2, "planned": 5, "clairvoyant": 1}),
    async_load=0.5,
    loads=(0.5, 2.0),
    ablated=(
        Setting("deepseek-v3.2", "general-agent", "on-policy"),
        Setting("mimo-v2.5-pro", "general-agent", "2"),
        Setting("mimo-v2.5-pro", "math", "on-policy"),
        Setting("deepseek-v3.2", "math", "8"),
    ),
    ablation_seeds=1,
)
QUICK_EFFORT = Effort(
    budget=QUICK,
    settings=tuple(s for s in SETTINGS if s.task != "coding-agent" and s.staleness != "2"),
    seeds=MappingProxyType(dict.fromkeys(POLICIES, 2)),
    async_load=1.0,
    loads=(2.0,),
    ablated=(Setting("mimo-v2.5-pro", "general-agent", "8"),),
    ablation_seeds=1,
)


def policies_named(names: Sequence[str]) -> frozenset[str]:
    """`all`, or some of `POLICIES`. Raises `ConfigError`."""
    for name in names:
        if name != "all" and name not in POLICIES:
            raise ConfigError(f"--policies {name}: there is no such policy; give all, or some of {', '.join(POLICIES)}")
    return frozenset(POLICIES if "all" in names else names)


class Study:
    """Runs what the comparison of `policies` takes, and hands out what it has come to."""

    def __init__(self, effort: Effort, lab: Lab, policies: frozenset[str]) -> None:
        self.effort = effort
        self.policies = policies
        self._lab = lab

    def run(self) -> None:
        """Raises `ConfigError` and `ExperimentFailed`."""
        settings = self.effort.settings
        on_policy = list(dict.fromkeys(setting.on_policy for setting in settings))
        needs_cadence = bool(self.policies - {"static", "adaptive"})
        if needs_cadence:
            self._run(self.job(setting, one) for setting in on_policy for one in self._cadences())
        self._seek_splits(on_policy)
        self._seek_splits(settings)
        if needs_cadence:
            self._run(self.job(setting, self.colocated(setting)) for setting in settings)
        self._run([*self._seeds(), *self._loads(), *self._ablations()])

    # Jobs.

    def job(self, setting: Setting, policy: PolicySection, seed: int = 0, load: float = 1.0) -> Job:
        """`load` multiplies that of the effort."""
        if setting.staleness != "on-policy":
            load *= self.effort.async_load
        return self._lab.job(setting, policy, f"seed={seed}", f"rollout.load={self.effort.budget.load * load}")

    def outcome(self, setting: Setting, policy: PolicySection, seed: int = 0, load: float = 1.0) -> RunOutcome:
        """Of a job that has run. Raises KeyError."""
        return self._lab.grid.outcome(self.job(setting, policy, seed, load))

    def _run(self, jobs: Iterable[Job]) -> None:
        self._lab.grid.run(longest_first(jobs))

    def _seek_splits(self, settings: Sequence[Setting]) -> None:
        """Run static splits until none that stands beside the best one of a setting is left."""
        while True:
            jobs = [self.job(one, self.static(one, eighth)) for one in settings for eighth in self._wanted(one)]
            if not jobs:
                return
            self._run(jobs)

    def _wanted(self, setting: Setting) -> list[int]:
        """Eighths that are to be tried next."""
        tried = self._tried(setting)
        if not tried and setting.staleness == "on-policy":
            return list(FIRST_EIGHTHS)
        best = self.eighth(setting) if tried else self.eighth(setting.on_policy)
        return [one for one in (best - 1, best, best + 1) if one in EIGHTHS and one not in tried]

    def _tried(self, setting: Setting) -> list[int]:
        return [one for one in EIGHTHS if self._lab.grid.knows(self.job(setting, self.static(setting, one)))]

    def _seeds(self) -> Iterator[Job]:
        """Of what is compared."""
        for setting in self.effort.settings:
            for name in self.policies:
                for seed in self.seeds(setting, name):
                    for policy in self._candidates(setting, name):
                        yield self.job(setting, policy, seed)

    def _loads(self) -> Iterator[Job]:
        if "planned" not in self.policies:
            return
        for load in self.effort.loads:
            for setting in self.loaded():
                for policy in (*self._near(setting), self.colocated(setting), self.section(setting, "planned")):
                    yield self.job(setting, policy, load=load)

    def _ablations(self) -> Iterator[Job]:
        if "planned" in self.policies:
            for setting in self.effort.ablated:
                for policy in self.ablations(setting).values():
                    for seed in range(self.effort.ablation_seeds):
                        yield self.job(setting, policy, seed)

    # What is compared.

    def static(self, setting: Setting, eighth: int) -> PolicySection:
        count = _instances(setting.scenario_name)
        prefill = min(max(1, round(count * eighth / 8)), count - 1)
        return static(f"{prefill}:{count - prefill}")

    def eighth(self, setting: Setting) -> int:
        """That of the best static split, as far as is known with the first seed."""
        return min(self._tried(setting), key=lambda one: self._time(setting, self.static(setting, one)))

    def colocated(self, setting: Setting) -> PolicySection:
        """With the cadence that is best for the model and the task, on-policy."""
        return min(self._cadences(), key=lambda one: self._time(setting.on_policy, one))

    def section(self, setting: Setting, name: str) -> PolicySection:
        """Of a policy that decides."""
        split, colocated = self.static(setting, self.eighth(setting)), self.colocated(setting)
        if name == "adaptive":
            return PolicySection(name="adaptive", split=split.split)
        mixed = self._time(setting, colocated) < self._time(setting, split)
        told = {"name": name, "split": MIXED if mixed else split.split, "prefill_every": colocated.prefill_every}
        return PolicySection.model_validate(told)

    def ablations(self, setting: Setting) -> dict[str, PolicySection]:
        """`planned` as it is, and without one of its ideas each; and the paper's rule with other forecasts."""
        whole, rule = self.section(setting, "planned"), self.section(setting, "adaptive")

        def planning(changes: dict[str, Any]) -> PolicySection:
            return whole.model_copy(update={"planning": Planning.model_validate(changes)})

        return {
            "planned": whole,
            "no mixed instances": planning({"mixed": False}),
            "decodes stay where they are": planning({"even_out": False}),
            "decides on the grid alone": planning({"at_syncs": False}),
            "patience of 10 s": planning({"patience": 10.0}),
            "any gain is enough": planning({"gain": 0.0, "mixed_gain": 0.0}),
            "mixed instances for 2 % too": planning({"mixed_gain": 0.02}),
            "a gain of 5 %": planning({"gain": 0.05}),
            "starts in the best split": whole.model_copy(update={"split": rule.split}),
            "starts half and half": whole.model_copy(update={"split": None}),
            "the paper's rule": rule,
            "the paper's rule, forecast survival": rule.model_copy(update={"forecast": "survival"}),
        }

    def seeds(self, setting: Setting, name: str) -> range:
        """With which a policy runs in a setting."""
        if name in ("colocated", "static") and self.policies >= {"colocated", "static"}:
            times = {
                "colocated": self._time(setting, self.colocated(setting)),
                "static": self._time(setting, self.static(setting, self.eighth(setting))),
            }
            # The geometric mean over the agentic settings needs their splits with every seed.
            wanted = name == "static" and setting.task in paper.AGENTIC
            if not wanted and times[name] > (1 + CLOSE) * min(times.values()):
                return range(1)
        return range(self.effort.seeds[name])

    def _candidates(self, setting: Setting, name: str) -> list[PolicySection]:
        if name == "colocated":
            return [self.colocated(setting)]
        if name == "static":
            return self._splits(setting)
        return [self.section(setting, name)]

    def _splits(self, setting: Setting) -> list[PolicySection]:
        """The best split with the first seed, and one that is nearly as good."""
        order = sorted(self._tried(setting), key=lambda one: self._time(setting, self.static(setting, one)))
        ranked = [self.static(setting, one) for one in order]
        most = (1 + SECOND) * self._time(setting, ranked[0])
        return [ranked[0], *(one for one in ranked[1:2] if self._time(setting, one) <= most)]

    def loaded(self) -> list[Setting]:
        """Those that run at other loads too."""
        on_policy = [setting for setting in self.effort.settings if setting.staleness == "on-policy"]
        return [setting for setting in on_policy if setting.task != "coding-agent"]

    def _near(self, setting: Setting) -> list[PolicySection]:
        """The best split and its neighbours."""
        best = self.eighth(setting)
        return [self.static(setting, one) for one in (best - 1, best, best + 1) if one in EIGHTHS]

    def _cadences(self) -> list[PolicySection]:
        return [COLOCATED, *(cadence(steps) for steps in self.effort.budget.cadences)]

    def _time(self, setting: Setting, policy: PolicySection) -> float:
        return self.outcome(setting, policy).rollout_s

    # What it has come to.

    def compared(self, setting: Setting) -> Compared:
        """The runs of a setting, each policy's by seed; the static split is the best of those that ran with every seed."""
        runs: dict[str, dict[int, RunOutcome]] = {}
        sections: dict[str, PolicySection] = {}
        for name in sorted(self.policies, key=POLICIES.index):
            seeds = self.seeds(setting, name)
            found = {
                index: {seed: self.outcome(setting, policy, seed) for seed in seeds}
                for index, policy in enumerate(self._candidates(setting, name))
            }
            best = min(found, key=lambda index: mean_s(found[index]))
            runs[name], sections[name] = found[best], self._candidates(setting, name)[best]
        return Compared(setting, sections, runs)

    def bounds(self, setting: Setting, seeds: Iterable[int]) -> dict[int, float]:
        """The least time of a step, by seed; of an on-policy setting."""
        found = {}
        for seed in seeds:
            steps = step_bounds(self.job(setting, COLOCATED, seed).scenario)
            found[seed] = fmean(step.seconds for step in steps)
        return found

    def at_load(self, setting: Setting, load: float) -> dict[str, RunOutcome]:
        """Best cadence, best split and `planned`."""
        splits = [self.outcome(setting, one, load=load) for one in self._near(setting)]
        return {
            "colocated": self.outcome(setting, self.colocated(setting), load=load),
            "static": min(splits, key=lambda outcome: outcome.rollout_s),
            "planned": self.outcome(setting, self.section(setting, "planned"), load=load),
        }

    def ablated(self, setting: Setting) -> dict[str, dict[int, RunOutcome]]:
        return {
            name: {seed: self.outcome(setting, policy, seed) for seed in range(self.effort.ablation_seeds)}
            for name, policy in self.ablations(setting).items()
        }


@cache
def _instances(scenario_name: str) -> int:
    scenario = load_scenario(scenario_path(scenario_name))
    return scenario.hardware.gpus // scenario.prefill_profile().gpus


def mean_s(runs: Mapping[int, RunOutcome]) -> float:
    """Of a step."""
    return fmean(run.rollout_s for run in runs.values())


@dataclass(frozen=True)
class Compared:
    """The runs of one setting."""

    setting: Setting
    sections: dict[str, PolicySection]
    """By policy."""
    runs: dict[str, dict[int, RunOutcome]]
    """By policy and seed."""

    @property
    def better(self) -> str:
        """The better of the two baselines, by the seeds that both have."""
        both = set(self.runs["colocated"]) & set(self.runs["static"])
        return min(("static", "colocated"), key=lambda name: fmean(self.runs[name][seed].rollout_s for seed in both))

    def ratios(self, slower: str, faster: str) -> dict[int, float]:
        """Step time of the one over that of the other, by seed."""
        seeds = sorted(set(self.runs[slower]) & set(self.runs[faster]))
        return {seed: self.runs[slower][seed].rollout_s / self.runs[faster][seed].rollout_s for seed in seeds}

    def ratio(self, slower: str, faster: str) -> Interval:
        return interval(list(self.ratios(slower, faster).values()))

    def hindsight(self, name: str) -> Interval:
        """Step time of the best of all policies, run by run, over that of this one."""
        seeds = sorted(set.intersection(*(set(runs) for runs in self.runs.values())))
        return interval(
            [
                min(runs[seed].rollout_s for runs in self.runs.values()) / self.runs[name][seed].rollout_s
                for seed in seeds
            ]
        )


def geometric_mean(compared: Sequence[Compared], slower: str | None, faster: str) -> Interval:
    """Of the ratios of settings, with the seeds that all have; None for `slower` is the better baseline of each."""
    by_setting = [one.ratios(slower or one.better, faster) for one in compared]
    seeds = sorted(set.intersection(*(set(ratios) for ratios in by_setting)))
    return interval([math.exp(fmean(math.log(ratios[seed]) for ratios in by_setting)) for seed in seeds])


def p99_s(run: RunOutcome) -> float:
    """Of the trajectories."""
    return float(np.percentile(run.trajectory_s, 99))


def reckoned_s(job: Job) -> float:
    """CPU seconds that a run will take, roughly."""
    rollout = job.scenario.rollout
    groups = rollout.steps * rollout.groups + (rollout.in_flight or 0) / 2
    turns = groups * rollout.group_size * rollout.load * TURNS.get(job.scenario.workload.name, 1)
    return turns / TURNS_A_SECOND * EFFORT.get(job.policy.name, 1.0)


def rehearsed(effort: Effort, policies: frozenset[str]) -> list[Job]:
    """The jobs that a study runs where 3:5 is the best split everywhere and colocation is as good.

    Which runs there are depends on what the first ones give, so this is near, not exact. Raises `ConfigError`.
    """
    seen: list[Job] = []

    def made_up(job: Job) -> RunOutcome:
        seen.append(job)
        parts = [int(part) for part in (job.policy.split or "3:5").split(":")]
        seconds = 1.0 + abs(parts[0] / sum(parts) - 3 / 8)
        return RunOutcome.of_steps([StepOutcome(1, 0.0, seconds, 0, 0.0)])

    with ThreadPoolExecutor(1) as executor:
        Study(effort, Lab(effort.budget, Grid(executor, runner=made_up)), policies).run()
    return seen
