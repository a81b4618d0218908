"""The policy that plans: it takes the roles under which the work ahead gets on best (`docs/policy.md`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np

from prorsa.allocation.costs import EngineCosts
from prorsa.allocation.outlook import Bounds, yields
from prorsa.allocation.policies import ON_GRID, Handling, Moment, Policy, Situation
from prorsa.allocation.solver import Allocation
from prorsa.forecast.work import Work

MIXED_COUNTS = 8
"""Numbers of mixed instances that are compared, about; of prefill and decode instances, all are."""


@dataclass(frozen=True)
class Planned(Policy):
    """Compares what every allocation of the instances in service would yield, the present one included."""

    costs: EngineCosts
    mixed: bool = True
    """Whether instances may become mixed while they run."""
    prefill_slots: float = inf
    """Requests that the router lets an instance prefill at once."""
    prefill_every: int = 0
    """Cadence of mixed instances: one step in so many may prefill; 0 is every one."""
    gain: float = 0.02
    """What other roles must promise more than the present ones, as a fraction."""
    mixed_gain: float = 0.05
    """The same of roles with more mixed instances than now, of which the flow is less sure."""
    even_out: bool = True
    patience: float = 0.0
    at_syncs: bool = True
    """Whether it decides at other moments than those of the grid."""

    @property
    def moments(self) -> frozenset[Moment]:
        return frozenset(Moment) if self.at_syncs else ON_GRID

    def decide(self, situation: Situation) -> Allocation | None:
        """Keeps the roles where no trajectory is live, where there is no choice, and until something is known of the turns.

        Raises ValueError without `Work`.
        """
        current, work = situation.current, situation.work
        if work is None:
            raise ValueError("a plan needs a forecast that says what the work is; use policy.forecast=survival")
        if not situation.live:
            return current
        candidates = _candidates(current, self.mixed)
        if len(candidates) < 2 or not work.token_s:
            return current
        bounds = Bounds(situation.demand.decode_capacity, self.prefill_slots, self.prefill_every, self._evens_out(work))
        found = yields(work, current, candidates, self.costs, bounds)
        gains = (self.mixed_gain if other.mixed > current.mixed else self.gain for other in candidates[1:])
        # The present roles, which are the first, need no gain.
        wanted = 1.0 + np.array([0.0, *gains])
        return candidates[int(np.argmax(found / wanted))]

    def handling(self, situation: Situation, target: Allocation) -> Handling:
        return Handling(self.patience, self._evens_out(situation.work))

    def _evens_out(self, work: Work | None) -> bool:
        """Only where turns have long to go: short ones even out as they end, sooner than a move would pay."""
        return self.even_out and work is not None and work.decoding_left * work.token_s > work.ahead


@lru_cache(maxsize=4)
def _candidates(current: Allocation, mixed: bool) -> tuple[Allocation, ...]:
    """The present roles, then all others that give every instance work: where some decode, others prefill.

    Mostly they are the same as at the last decision; in large fleets it takes a while to make them.
    """
    total = current.total
    if not mixed:
        # What was launched mixed stays so.
        others = [(prefill, current.mixed) for prefill in range(1, total - current.mixed)]
    else:
        others = [
            (prefill, count)
            for count in sorted({*range(0, total, -(-total // MIXED_COUNTS)), current.mixed, total})
            for prefill in range(total - count + 1)
            if (prefill > 0) == (prefill + count < total)
        ]
    present = (current.prefill, current.mixed)
    return (current, *(Allocation(p, total - p - count, count) for p, count in others if (p, count) != present))
