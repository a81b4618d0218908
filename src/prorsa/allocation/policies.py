"""Who decides the roles: the forecast (`Adaptive`), a fixed split (`Static`), or nobody (`Colocated`, which has none)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from prorsa.allocation.solver import Allocation, served, solve
from prorsa.forecast.work import Work


@dataclass(frozen=True, slots=True)
class Demand:
    """What the next horizon asks for, and what one instance can do (paper, 4.2)."""

    prefill_tokens: float
    """W, full-prompt tokens."""
    prefill_speed: float
    """theta, full-prompt tokens/s of one instance."""
    horizon: float
    """S, seconds."""
    decode_tokens: float
    """K_now + K_dec, KV-cache tokens."""
    decode_capacity: float
    """C, KV-cache tokens of one decode instance."""

    @property
    def prefill_instances(self) -> float:
        """a = W / (S theta)."""
        return self.prefill_tokens / (self.horizon * self.prefill_speed)

    @property
    def decode_instances(self) -> float:
        """b = (K_now + K_dec) / C."""
        return self.decode_tokens / self.decode_capacity


class Moment(StrEnum):
    """When a decision is made."""

    GRID = "grid"
    """Every S seconds."""
    SYNC = "sync"
    """All instances have just got new weights: every request is cancelled and every cache lost, so a flip disturbs nobody."""
    START = "start"
    """Trajectories have been sampled where none was live: a step begins."""


ON_GRID = frozenset({Moment.GRID})


@dataclass(frozen=True, slots=True)
class Situation:
    """All that a policy decides from."""

    demand: Demand
    current: Allocation
    """Instances in service."""
    live: bool
    """Whether any trajectory is."""
    work: Work | None = None
    """None where the forecaster says nothing of it."""
    moment: Moment = Moment.GRID
    relaunch_s: float | None = None
    """Seconds for which an instance that changes its role serves nobody, where it is launched anew and instances of the one
    role give their GPUs to those of the other; None where they flip."""


@dataclass(frozen=True, slots=True)
class Handling:
    """What becomes of the requests in service when roles change."""

    patience: float = 0.0
    """Seconds that an instance which leaves its role may go on with what it serves; then it is cancelled and resent."""
    even_out: bool = False
    """Whether decodes move, by cancel and resend, from fuller instances to emptier ones, such as those that have just joined.
    It holds until the next decision."""


class Policy(Protocol):
    """Whoever implements one inherits from it, for `moments` and `handling`."""

    @property
    def moments(self) -> frozenset[Moment]:
        """When it is asked; at others nothing is forecast and nothing changes."""
        return frozenset(Moment)

    def decide(self, situation: Situation) -> Allocation | None:
        """The roles to have next; None where they are nobody's to change."""
        ...

    def handling(self, situation: Situation, target: Allocation) -> Handling:
        """How requests are treated while the roles become `target`. The paper's way: cancel at once, move nothing else."""
        return Handling()


@dataclass(frozen=True, slots=True)
class Colocated(Policy):
    """Every instance does both stages."""

    moments = ON_GRID

    def decide(self, situation: Situation) -> Allocation | None:
        return None


@dataclass(frozen=True, slots=True)
class Static(Policy):
    """The same split whatever comes."""

    moments = ON_GRID

    prefill: int
    decode: int

    def decide(self, situation: Situation) -> Allocation:
        return Allocation(self.prefill, self.decode)


@dataclass(frozen=True, slots=True)
class Adaptive(Policy):
    """The paper's rule on the forecast demand.

    Where instances flip, none is started or stopped: the decision has as many as `current`, which counts those in service.
    Where they are launched anew it has as many as the GPUs hold, and keeps the roles unless others serve more of the demand,
    and begin to within the horizon. Until then the instances that stay serve no less than now, since no target takes
    instances of the scarcer role.
    """

    moments = ON_GRID

    m_p: int
    m_d: int
    gpus: int

    def decide(self, situation: Situation) -> Allocation:
        """Keeps the current roles where no trajectory is live, and where fewer than two instances are in service."""
        current, demand = situation.current, situation.demand
        if not situation.live or current.total < 2:
            return current
        if situation.relaunch_s is not None:
            return self._regrouped(demand, current, situation.relaunch_s)
        return solve(
            demand.prefill_instances,
            demand.decode_instances,
            self.m_p,
            self.m_d,
            self.gpus,
            current,
            instances=current.total,
        )

    def _regrouped(self, demand: Demand, current: Allocation, relaunch_s: float) -> Allocation:
        wanted = demand.prefill_instances, demand.decode_instances
        target = solve(*wanted, self.m_p, self.m_d, self.gpus, current)
        pays = min(served(target, *wanted), 1.0) > served(current, *wanted) and relaunch_s < demand.horizon
        return target if pays else current
