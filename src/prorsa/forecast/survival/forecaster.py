"""The forecast beyond the paper's: every trajectory's chain of stages, with what is left of each given how far it has got.

From one snapshot, the numbers that are expected to pass through every stage are worked out on a grid of time: turns that end,
tools that return, requests that queue, prefill and decode, and come back, as often as fits. Learnt online are the survival
curves of the turns' lengths, the tools, the starts of sandboxes and the rewards, the chance that a turn is a trajectory's
last, and the speeds of decode and prefill. Task, tool, turn and group condition them as far as there are samples.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from prorsa.forecast.durations import Floats
from prorsa.forecast.forecast import Forecast
from prorsa.forecast.injection import Injection
from prorsa.forecast.measure import Measured, WindowMeter
from prorsa.forecast.survival.learnt import Learnt
from prorsa.forecast.survival.outlook import Outlook
from prorsa.lifecycle.snapshot import Snapshot, Transition

SPREAD = 0.05
"""Weight of the newest error in how much larger errors are than counting noise."""
OUTLIER = 16.0
"""A squared error, in variances, counts so much at most: one weight update must not blow up what comes after."""
IMAGINED = 4
"""So many errors are imagined at first, each twice as large as expected: of long horizons there are few to learn from."""
ON_TIME = 0.05
"""A forecast of the KV cache is judged by a snapshot that is so close to its end, in horizons."""


class SurvivalForecaster:
    """`Forecaster`. Learns from `observe`, and reads a snapshot without changing it.

    One may ask for several horizons; each keeps its own account of its errors.
    """

    def __init__(
        self,
        injection: Injection | None,
        prefill_tokens_per_s: float,
        kv_footprint: Callable[[Floats], Floats] = lambda tokens: tokens,
    ) -> None:
        """As `LifecycleForecaster` takes them."""
        self.learnt = Learnt(injection, prefill_tokens_per_s)
        self._kv_footprint = kv_footprint
        self._prefill_errors: defaultdict[float, _Errors] = defaultdict(_Errors)
        self._kv_errors: defaultdict[float, _Errors] = defaultdict(_Errors)
        self._meter = WindowMeter()
        self._made: list[Forecast] = []
        """Those that have not ended."""

    def observe(self, transition: Transition) -> None:
        self._meter.observe(transition)
        self.learnt.observe(transition)

    def caches_lost(self) -> None:
        self.learnt.contexts.caches_lost()

    def forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        for before, measured in self._meter.finished(snapshot.time):
            self._judge_prefill(before, measured)
        made = Outlook(self.learnt, snapshot, horizon, prefill_instances, self._kv_footprint).forecast()
        self._judge_kv(made)
        made = replace(
            made,
            prefill_sd=made.prefill_sd * self._prefill_errors[horizon].factor,
            kv_sd=made.kv_sd * self._kv_errors[horizon].factor,
        )
        self._meter.open(made)
        self._made.append(made)
        return made

    def _judge_prefill(self, before: Forecast, measured: Measured) -> None:
        arrived = measured.arrived_tokens
        if self.learnt.launches.injection is None:
            # Without a rule nothing is said of trajectories yet to be sampled, so what they bring is no error.
            arrived -= measured.new_arrived_tokens
        self._prefill_errors[before.horizon].add(before.predicted - arrived, before.prefill_sd)

    def _judge_kv(self, now: Forecast) -> None:
        for before in self._made:
            if abs(before.time + before.horizon - now.time) <= ON_TIME * before.horizon:
                self._kv_errors[before.horizon].add(before.kv_end - now.kv_now, before.kv_sd)
        self._made = [before for before in self._made if before.time + before.horizon > now.time]


@dataclass(slots=True)
class _Errors:
    """How much larger than expected errors are."""

    _squared: float = 4.0
    _count: int = IMAGINED

    @property
    def factor(self) -> float:
        return math.sqrt(self._squared)

    def add(self, error: float, deviation: float) -> None:
        """`deviation` is the standard deviation that was announced, this factor included."""
        if deviation > 0.0:
            self._count += 1
            weight = max(SPREAD, 1.0 / self._count)
            self._squared *= 1.0 + weight * (min((error / deviation) ** 2, OUTLIER) - 1.0)
