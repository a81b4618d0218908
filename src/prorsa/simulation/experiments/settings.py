"""The settings of the paper's evaluation as scenarios, and how much of them a reproduction runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from prorsa.config import find_yaml, shipped
from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.grid import Grid, Job
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.scenario import PolicySection, load_scenario

SCENARIOS = files("prorsa.simulation") / "scenarios"

ADAPTIVE = PolicySection(name="adaptive")
COLOCATED = PolicySection(name="colocated")
STALENESS = {
    "on-policy": ("rollout.mode=sync", "rollout.max_staleness=0"),
    "2": ("rollout.mode=async", "rollout.max_staleness=2"),
    "8": ("rollout.mode=async", "rollout.max_staleness=8"),
}
"""The overrides of each of the paper's staleness settings."""
IN_FLIGHT = {"2": 1.5, "8": 2.0}
"""Groups that live at once under asynchronous rollout, in batches. The paper speaks of over-dispatch and gives no number."""


def cadence(steps: int) -> PolicySection:
    """Colocation whose ranks prefill together, at most one step in `steps` while any decodes."""
    return PolicySection(name="colocated", prefill_every=steps)


def static(split: str) -> PolicySection:
    return PolicySection(name="static", split=split)


@dataclass(frozen=True, slots=True)
class Setting:
    model: str
    task: str
    staleness: str

    def __str__(self) -> str:
        return f"{self.model}, {self.task}, {spoken(self.staleness)}"

    @property
    def scenario_name(self) -> str:
        return f"{self.model}-{self.task}"

    @property
    def on_policy(self) -> Setting:
        """Of the same model and task."""
        return replace(self, staleness="on-policy")


def spoken(staleness: str) -> str:
    return staleness if staleness == "on-policy" else f"staleness {staleness}"


@dataclass(frozen=True, slots=True)
class Budget:
    """How much runs. The code is the same for every budget."""

    sync_steps: Mapping[str, int]
    """Training steps of an on-policy run, by task: its steps are alike."""
    async_steps: Mapping[str, int]
    """Of any other."""
    long_steps: int
    """Of the runs that show how the workload changes across steps."""
    load: float
    """Of the scenarios' trajectories."""
    long_load: float
    """The same, of the runs with `long_steps`."""
    cadences: tuple[int, ...]
    """What the best cadence is sought among."""
    splits: tuple[str, ...]
    """Static prefill:decode splits of eight instances."""

    def steps(self, setting: Setting) -> int:
        return (self.sync_steps if setting.staleness == "on-policy" else self.async_steps)[setting.task]


FULL = Budget(
    sync_steps=MappingProxyType({"math": 1, "coding-agent": 1, "general-agent": 1}),
    async_steps=MappingProxyType({"math": 2, "coding-agent": 2, "general-agent": 2}),
    long_steps=7,
    load=1.0,
    long_load=0.5,
    cadences=(4, 16),
    splits=tuple(f"{prefill}:{8 - prefill}" for prefill in range(2, 6)),
)
QUICK = Budget(
    sync_steps=MappingProxyType({"math": 1, "coding-agent": 1, "general-agent": 1}),
    async_steps=MappingProxyType({"math": 1, "coding-agent": 1, "general-agent": 1}),
    long_steps=3,
    load=0.0625,
    long_load=0.0625,
    cadences=(16,),
    splits=("3:5", "4:4", "5:3"),
)


def scenario_path(name: str) -> Path:
    """Of a scenario that comes with Prorsa, by its name, or of any by its path. Raises `ConfigError`."""
    return find_yaml(name, SCENARIOS, "scenario")


def shipped_scenarios() -> list[str]:
    """Names of the scenarios that come with Prorsa."""
    return shipped(SCENARIOS)


SETTINGS = tuple(
    Setting(model, task, staleness) for model in paper.MODELS for task in paper.TASKS for staleness in paper.STALENESS
)


class Lab:
    """Makes the jobs of a reproduction and hands out their outcomes."""

    def __init__(self, budget: Budget, grid: Grid) -> None:
        self.budget = budget
        self.grid = grid
        self._jobs: dict[tuple[Setting, PolicySection, tuple[str, ...], int | None], Job] = {}

    def job(self, setting: Setting, policy: PolicySection, *overrides: str, steps: int | None = None) -> Job:
        """Raises `ConfigError`."""
        asked = (setting, policy, overrides, steps)
        if asked not in self._jobs:
            changes = [*self._overrides(setting, steps), *overrides]
            self._jobs[asked] = Job(load_scenario(scenario_path(setting.scenario_name), changes), policy)
        return self._jobs[asked]

    def outcome(self, setting: Setting, policy: PolicySection, *overrides: str, steps: int | None = None) -> RunOutcome:
        """Of a job that has run. Raises KeyError."""
        return self.grid.outcome(self.job(setting, policy, *overrides, steps=steps))

    def best_cadence(self, model: str, task: str) -> PolicySection:
        """The one with the shortest on-policy rollout, sought among the budget's."""
        setting = Setting(model, task, "on-policy")
        return min((cadence(k) for k in self.budget.cadences), key=lambda one: self.outcome(setting, one).rollout_s)

    def _overrides(self, setting: Setting, steps: int | None) -> tuple[str, ...]:
        steps = steps or self.budget.steps(setting)
        overrides = (f"rollout.steps={steps}", f"rollout.load={self.budget.load}", *STALENESS[setting.staleness])
        if setting.staleness not in IN_FLIGHT:
            return overrides
        batch = load_scenario(scenario_path(setting.scenario_name)).rollout.groups
        return (*overrides, f"rollout.in_flight={round(IN_FLIGHT[setting.staleness] * batch)}")
