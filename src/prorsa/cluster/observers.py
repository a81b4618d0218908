"""What the cluster tells whoever watches a run: the recorder, the live progress, a test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from prorsa.allocation import Allocation, Demand, Moment, Policy, Situation
from prorsa.cluster.instances import InstanceState
from prorsa.engines.protocol import FinishReason, Role
from prorsa.forecast.forecast import Forecast
from prorsa.lifecycle import State, Transition


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision of the global manager with everything that it was made from."""

    time: float
    states: dict[State, int]
    """Live trajectories by state, from the snapshot that was forecast from."""
    forecast: Forecast
    demand: Demand
    """The forecast's sums, theta, the horizon and the decode capacity."""
    current: Allocation
    """Instances in service."""
    live: bool
    """Whether any trajectory was live."""
    target: Allocation | None
    """What the policy answered; None leaves the roles as they are."""
    moment: Moment = Moment.GRID
    relaunch_s: float | None = None
    """Where a change of role takes a new process: what the last one took."""

    @property
    def situation(self) -> Situation:
        """What the policy saw."""
        return Situation(self.demand, self.current, self.live, self.forecast.work, self.moment, self.relaunch_s)


def replay(decision: Decision, policy: Policy) -> Allocation | None:
    """What `policy` answers to the inputs of a recorded decision; the same policy answers the same."""
    return policy.decide(decision.situation)


@dataclass(frozen=True, slots=True)
class Flip:
    """One role switch, also one that failed. Times in seconds."""

    time: float
    """When the instance left its pool."""
    instance: str
    before: Role
    after: Role
    cancelled: int
    """Requests that were cancelled and resent elsewhere."""
    drain_s: float
    """From leaving the pool until the engine was idle (or until the flip failed before)."""
    flip_s: float
    """From then until the engine had confirmed its role and served a canary, if any (or until the flip failed)."""
    failure: str | None
    """None: the instance serves in its new role. Else why it was taken out for a restart."""
    relaunched: bool = False
    """Whether it got its new role by a new process."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One finished model turn as the router served it."""

    trajectory: str
    turn: int
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens of the first attempt that were not computed."""
    instances: tuple[tuple[str, str], ...]
    """(prefill, decode) instance of each attempt, in order; twice the same where it is mixed."""
    ready: float
    """When the turn joined the ready queue."""
    arrivals: Sequence[float]
    """When each output token arrived."""
    versions: Sequence[int]
    """The weights version of each output token."""
    finish: FinishReason
    moves: int = 0
    """Of its resends, those that only evened out the instances that decode."""

    @property
    def attempts(self) -> int:
        return len(self.instances)

    @property
    def output_tokens(self) -> int:
        return len(self.arrivals)

    @property
    def first_token(self) -> float | None:
        """When the first output token arrived; None where there was none."""
        return self.arrivals[0] if self.arrivals else None


class Observer(Protocol):
    """Called synchronously, in order; it must be quick and must not call back into the cluster.

    An observer that raises has missed that call and gets the next one; the control plane reports its first error, and raises
    it when it stops.
    """

    def transition(self, transition: Transition) -> None: ...
    def decision(self, decision: Decision) -> None: ...
    def flip(self, flip: Flip) -> None: ...
    def turn(self, turn: TurnRecord) -> None: ...
    def instance(self, time: float, name: str, role: Role, state: InstanceState) -> None: ...


@runtime_checkable
class Keeper(Protocol):
    """An observer that keeps what it observes where there may be no room for it."""

    @property
    def trouble(self) -> str | None:
        """What it cannot keep and why, in one line; None where all is well."""
        ...
