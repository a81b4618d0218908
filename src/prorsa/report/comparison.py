"""Several policies side by side on the same workload: the outcome of each, the table, the JSON and the page."""

from __future__ import annotations

from dataclasses import dataclass

from prorsa.report.measures import Errors, Window, forecast_errors
from prorsa.report.volumes import Distribution, Volume

Points = tuple[tuple[float, float], ...]
"""(time in seconds, value), in the order of time."""


@dataclass(frozen=True, slots=True)
class RoleCount:
    """Instances in service by role, from `time` until the next count."""

    time: float
    prefill: int
    decode: int
    mixed: int


@dataclass(frozen=True, slots=True)
class PolicyOutcome:
    """What one policy made of the workload. Times are seconds of the run, shares are fractions."""

    name: str
    step_s: tuple[float, ...]
    """What the rollout of each step took."""
    trajectory_s: Distribution
    """From sampled until done, of the trajectories that are done."""
    done: int
    dropped: int
    replaced_groups: int
    """Groups that had to be sampled anew since a member was dropped."""
    output_tokens: int
    output_tokens_per_s: float
    interference_idle: float
    """Share of the engines' time that ranks waited for another one's prefill while they decoded."""
    imbalance_idle: float
    """Share of the engines' time that ranks waited at the barrier for any other reason."""
    itl_p50: float
    """Inter-token latency, weighted by tokens."""
    itl_p99: float
    itl_over_time: Points
    """Mean inter-token latency of a bin, at its middle."""
    roles: tuple[RoleCount, ...]
    flips: int
    resends: int
    """Attempts that were cancelled and resent."""
    windows: tuple[Window, ...]
    """Forecast, persistence and what happened; empty where nothing was forecast."""
    step_volumes: tuple[Volume, ...]
    window_volumes: tuple[Volume, ...]
    """In equal windows, of 10 s by default."""
    kv_use: Points
    """Share of the decode instances' KV capacity that was in use."""

    @property
    def rollout_s(self) -> float:
        """Over all steps."""
        return sum(self.step_s)

    @property
    def errors(self) -> Errors:
        return forecast_errors(self.windows)
