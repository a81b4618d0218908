"""What a simulated run leaves: plain figures, small enough to send between processes and to keep by the hundred.

Times are seconds of the run's virtual clock, volumes are tokens. `full` counts whole prompts, `uncached` what was computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prorsa.forecast import Forecast, Measured, wape
from prorsa.report.comparison import RoleCount
from prorsa.report.volumes import Volume, total
from prorsa.simulation.engines.cluster import Statistics


@dataclass(frozen=True, slots=True)
class StepOutcome:
    step: int
    start: float
    end: float
    """When its batch was handed over."""
    trajectories: int
    reward: float

    @property
    def rollout_s(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ForecastWindow:
    """One window of S seconds: what was forecast at its start, by whom, and what happened."""

    made: Forecast
    measured: Measured
    baselines: dict[str, Forecast]


@dataclass(frozen=True, slots=True)
class FlipRecord:
    time: float
    seconds: float
    """From leaving one pool until serving in the other."""
    drain_s: float
    cancelled: int


@dataclass(frozen=True, slots=True)
class FaultRecord:
    time: float
    kind: str
    target: str | None
    """What it struck; None where there was nothing of the kind to strike."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What happened to a run and what it cost. Flips and weight updates cancel and resend too."""

    faults: tuple[FaultRecord, ...] = ()
    restarts: int = 0
    """Engines that were started anew."""
    recomputed_tokens: int = 0
    """Prompt tokens that were computed for requests that were sent again."""
    unread_tokens: int = 0
    """Generated, and lost before anybody had them."""
    lost: int = 0
    """Trajectories that were dropped for anything but staleness."""


@dataclass(slots=True)
class RunOutcome:
    policy: str
    """The policy's name in the scenario."""
    steps: list[StepOutcome]
    trajectory_s: list[float]
    """From sampling to the end of the reward, of every trajectory that is done."""
    statistics: Statistics
    tokens: list[Volume]
    """In bins of `BIN_S` seconds from 0 on: prompts when their prefill was done, resends included, output when decoded."""
    forecasts: list[ForecastWindow]
    """Of the policies that follow a forecast; the others have none."""
    roles: list[RoleCount]
    """After each change."""
    flips: list[FlipRecord]
    turns: int
    resends: int
    done: int
    dropped: int
    """Trajectories; those that still ran at the end of the run are not counted."""
    lost_groups: int
    live_max: int
    kv_use: list[tuple[float, float]]
    """(time, share of the decode instances' KV capacity that their decodes took), at each decision."""
    seconds: float
    """Length of the run."""
    instances: int
    gpus: int
    disturbance: Disturbance = Disturbance()

    @classmethod
    def of_steps(cls, steps: list[StepOutcome]) -> RunOutcome:
        """Of which nothing but the steps is known."""
        return cls(
            policy="",
            steps=steps,
            trajectory_s=[],
            statistics=Statistics(),
            tokens=[],
            forecasts=[],
            roles=[],
            flips=[],
            turns=0,
            resends=0,
            done=0,
            dropped=0,
            lost_groups=0,
            live_max=0,
            kv_use=[],
            seconds=0.0,
            instances=0,
            gpus=0,
        )

    @property
    def rollout_s(self) -> float:
        """Mean over the steps: the paper's rollout time."""
        return float(np.mean([step.rollout_s for step in self.steps]))

    @property
    def kv_peak(self) -> float:
        return max((share for _, share in self.kv_use), default=0.0)

    @property
    def idle_share(self) -> float:
        """Share of the engines' busy time that GPUs wait because another rank prefills while they would decode (Fig. 6)."""
        return self.statistics.interference_s / self.statistics.step_s if self.statistics.step_s else 0.0

    @property
    def trajectory_mean_s(self) -> float:
        return float(np.mean(self.trajectory_s)) if self.trajectory_s else float("nan")

    def prefill_wape(self, baseline: str | None = None) -> float:
        """WAPE of the prefill forecast as a fraction (Fig. 8), or that of a baseline on the same windows."""
        made = [self._made(window, baseline).prefill_tokens for window in self.forecasts]
        return wape(made, [window.measured.prefill_tokens for window in self.forecasts])

    def admitted_wape(self, baseline: str | None = None) -> float:
        """The same for the decode admissions."""
        made = [self._made(window, baseline).admitted_tokens for window in self.forecasts]
        return wape(made, [window.measured.admitted_tokens for window in self.forecasts])

    @staticmethod
    def _made(window: ForecastWindow, baseline: str | None) -> Forecast:
        return window.made if baseline is None else window.baselines[baseline]

    def step_windows(self, step: StepOutcome) -> list[Volume]:
        """The token windows that begin within the step."""
        return [window for window in self.tokens if step.start <= window.start < step.end]

    def step_tokens(self, step: StepOutcome) -> Volume:
        return total(self.step_windows(step), step.start, step.end)
