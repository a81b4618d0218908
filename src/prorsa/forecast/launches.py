"""How many trajectories the sampler will launch, and when their first requests come (Eq. 2-5)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.backoff import Backoff, Ema
from prorsa.forecast.durations import MOST_CLASSES, Durations, Floats, expected_ends
from prorsa.forecast.injection import Injection
from prorsa.lifecycle import events as e
from prorsa.lifecycle.events import SandboxMode
from prorsa.lifecycle.snapshot import Snapshot, Transition

FORGET = 1 / 256
"""Weight of the newest outcome in p_hat and of the newest delay in d_hat; a plain mean before the 256th."""


class Launches:
    """Learns from `observe`; without a rule (synchronous rollout) nothing is launched."""

    def __init__(self, injection: Injection | None) -> None:
        self.injection = injection
        self._rewards: Backoff[Durations] = Backoff(Durations, most=MOST_CLASSES)
        self._admission = Ema(FORGET, value=1.0)
        self._prewarmed_delay = Ema(FORGET)
        self._any_delay = Ema(FORGET)

    @property
    def admission_rate(self) -> float:
        """p_hat (Eq. 3): the share of rewarded trajectories that are admitted to training; 1 until one was rewarded."""
        return self._admission.value

    @property
    def dispatch_delay(self) -> float:
        """d_hat, seconds from injection to the first request in READY, prewarm hit assumed.

        Where no start was ever a prewarm hit it is the mean over all starts; 0 until one was seen.
        """
        return self._prewarmed_delay.value if self._prewarmed_delay.count else self._any_delay.value

    def observe(self, transition: Transition) -> None:
        if self.injection is not None:
            self.injection.observe(transition)
        event = transition.event
        if isinstance(event, e.Done):
            self._rewards.add((transition.task,), transition.elapsed)
            self._admission.add(float(event.admitted))

    def started(self, transition: Transition) -> None:
        """The first request of a trajectory is READY."""
        delay = transition.event.time - transition.sampled_at
        self._any_delay.add(delay)
        if transition.mode != SandboxMode.COLD:
            self._prewarmed_delay.add(delay)

    def within(self, snapshot: Snapshot, rewarding: NDArray[np.intp], horizons: Floats) -> Floats:
        """Expected launches by the end of each of `horizons`; `rewarding` are the rows in REWARD."""
        if self.injection is None:
            return np.zeros(len(horizons))
        passed = self.admission_rate * self._rewards_within(snapshot, rewarding, horizons)
        return np.array(
            [self.injection.launches(*point) for point in zip(passed.tolist(), horizons.tolist(), strict=True)]
        )

    def _rewards_within(self, snapshot: Snapshot, rows: NDArray[np.intp], horizons: Floats) -> Floats:
        """The sum of q_i (Eq. 2) over `rows` for each of `horizons`."""
        task, taken = snapshot.task[rows], elapsed(snapshot, rows)
        total = np.zeros(len(horizons))
        for code in np.flatnonzero(np.bincount(task)).tolist():
            durations = self._rewards.find((snapshot.names.tasks[code],)) or Durations()
            total += expected_ends(durations, taken[task == code], horizons)
        return total


def elapsed(snapshot: Snapshot, rows: NDArray[np.intp]) -> Floats:
    """Seconds that each of `rows` has been in its state."""
    return np.maximum(snapshot.time - snapshot.since[rows], 0.0)
