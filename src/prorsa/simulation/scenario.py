"""A scenario: which model on which cluster rolls out which workload, under which policies. One YAML file and overrides.

Everything that the paper leaves open (concurrency, group count, batch, train time) is a field here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from prorsa.config import (
    Batches,
    ConfigError,
    ForecastKind,
    PolicyName,
    Positive,
    RolePolicy,
    Seconds,
    Section,
    never_changes,
    read_yaml,
    validated,
)
from prorsa.profiles.profile import NonNegative, Profile, load_profile


class WorkloadSection(Section):
    name: Literal["math", "coding-agent", "general-agent", "requests", "trace"]
    """A model of a task, fixed-length single `requests`, or the trajectories of a recorded `trace`."""
    path: str | None = None
    """A run directory, or a trace file, for `trace`."""
    prompt_tokens: Positive = 2048
    """Of `requests`."""
    output_tokens: Positive = 256
    """Of `requests`."""
    max_context: Positive = 131072
    """Longest prompt plus output of a trajectory; a script that would be longer ends early."""
    tool_times: Annotated[float, Field(gt=0)] = 1.0
    """Multiplies how long every tool runs."""
    output_lengths: Annotated[float, Field(gt=0)] = 1.0
    """Multiplies the tokens of every turn's output."""


class HardwareSection(Section):
    profile: str
    """Name of a shipped profile, or path of one: that of prefill and mixed instances."""
    decode_profile: str | None = None
    """That of decode instances, where their parallelism differs; roles are fixed then."""
    gpus: Positive = 128
    """G: GPUs of the cluster; as many instances as fit."""
    chunk: Positive | None = None
    """Replaces the profile's; so do the next four."""
    expert_imbalance: NonNegative | None = None
    usable_kv_tokens: Positive | None = None
    flip_s: NonNegative | None = None
    kv_tokens: Positive | None = None
    kv_store: bool = True
    """Whether there is a KV store outside the instances. Without one, what an instance has cached is lost with it."""
    stream_s: Seconds = 10.0
    """How often a simulated decode reports the tokens that it has made, seconds; when it ends it always does."""
    tokens: Literal["count", "hash"] = "count"
    """`hash`: every token is a hash of its context, so that lost or repeated tokens would show; slow."""


class PolicySection(RolePolicy):
    name: PolicyName | Literal["clairvoyant"] = "adaptive"
    """Those of a configuration (`prorsa.config.Policy`), and `clairvoyant`, which knows the scripts."""
    forecast: ForecastKind | None = None
    """None: `survival` for `planned`, which needs it, else the paper's."""
    prefill_every: int = Field(default=0, ge=0)
    """Of mixed instances: 0 prefills whenever a prompt waits (SGLang's default); k aligns the prefills of all ranks and lets
    one step in k prefill while any rank decodes."""

    @property
    def forecaster(self) -> ForecastKind:
        return self.forecast or ("survival" if self.name == "planned" else "paper")

    @model_validator(mode="after")
    def _possible(self) -> PolicySection:
        problem = never_changes(self.name, self)
        if problem is not None:
            raise ValueError(problem)
        if self.name == "planned" and self.forecaster != "survival":
            raise ValueError(
                f"policy.forecast={self.forecast}: policy.name=planned needs survival, which alone says what the work is"
            )
        return self


class RolloutSection(Batches):
    groups: Positive = 16
    """Groups in a batch (a step)."""
    group_size: Positive = 32
    """Trajectories of one question that are compared with each other (GRPO); the paper's agentic tasks have 32."""
    steps: Positive = 3
    """Training steps."""
    max_staleness: int = Field(default=0, ge=0)
    """How many weights versions a trajectory may fall behind before it is dropped (async)."""
    in_flight: Positive | None = None
    """Groups that run at once in `async`; None: as many as a batch has."""
    train_s: NonNegative = 60.0
    """What the trainer takes for a step; in `async` the rollout goes on meanwhile."""
    prewarmed: int = Field(default=64, ge=0)
    """Sandboxes kept ready."""
    load: Annotated[float, Field(gt=0)] = 1.0
    """Multiplies `groups` and `in_flight`."""


class Scenario(Section):
    name: str
    seed: int = 0
    hardware: HardwareSection
    workload: WorkloadSection
    rollout: RolloutSection = RolloutSection()
    policies: dict[str, PolicySection] = {"colocated": PolicySection(name="colocated"), "adaptive": PolicySection()}
    """What is compared, by the name that it has in tables. The first one is what the others are compared with."""

    @model_validator(mode="after")
    def _possible(self) -> Scenario:
        if (self.workload.name == "trace") != (self.workload.path is not None):
            raise ValueError(
                f"workload.path={self.workload.path!r}: workload.name=trace needs the path of a run or a trace; "
                "no other workload has one"
            )
        if not self.policies:
            raise ValueError("policies={}: name at least one policy")
        return self

    def prefill_profile(self) -> Profile:
        """The profile of prefill and mixed instances, with what the scenario replaces. Raises `ConfigError`."""
        return load_profile(self.hardware.profile, **self._changes())

    def decode_profile(self) -> Profile:
        name = self.hardware.decode_profile
        return self.prefill_profile() if name is None else load_profile(name, **self._changes())

    def _changes(self) -> dict[str, float]:
        hardware = self.hardware
        changes = {
            "chunk": hardware.chunk,
            "expert_imbalance": hardware.expert_imbalance,
            "usable_kv_tokens": hardware.usable_kv_tokens,
            "flip_s": hardware.flip_s,
            "kv_tokens": hardware.kv_tokens,
        }
        return {name: value for name, value in changes.items() if value is not None}


def load_scenario(path: str | Path, overrides: list[str] | None = None) -> Scenario:
    """Raises `ConfigError` with the key, the value and the remedy."""
    return validated(Scenario, read_yaml(path, overrides, "scenario"))


__all__ = ["ConfigError", "Scenario", "load_scenario"]
