"""The sample-injection rules: the paper's f (Eq. 4), which says how many trajectories the sampler will launch.

A rule is evaluated with the sampler's present state held fixed. It learns that state from transitions; whoever owns the
rule feeds it each transition once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import Transition
from prorsa.lifecycle.states import State


class Injection(Protocol):
    def observe(self, transition: Transition) -> None: ...

    def launches(self, passed: float, horizon: float) -> float:
        """Expected launches within `horizon` seconds, in which `passed` trajectories (N_pass, may be fractional) are
        rewarded and admitted to training. Never negative; grows with both."""
        ...


class ReplaceOnReward:
    """Each trajectory that passes is replaced by a new one."""

    def observe(self, transition: Transition) -> None:
        """Nothing to learn: the rule has no state."""

    def launches(self, passed: float, horizon: float) -> float:
        return passed


class FixedRate:
    """New trajectories come at a fixed rate, whatever is rewarded."""

    def __init__(self, rate: float) -> None:
        """`rate` is in trajectories a second."""
        self.rate = rate

    def observe(self, transition: Transition) -> None:
        """Nothing to learn: the rate is given."""

    def launches(self, passed: float, horizon: float) -> float:
        return self.rate * horizon


@dataclass(slots=True)
class _Group:
    sampled: int = 0
    live: int = 0
    rewarding: int = 0


class GroupReplenishment:
    """A whole group is launched when the last member of one ends.

    The plug-in estimate: every trajectory in REWARD passes with the same chance rho = passed / (all in REWARD),
    independently. A group ends within the horizon only when all its live members are in REWARD (one-step assumption), so
    one with m of them does with chance rho ** m.
    """

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self._groups: dict[str, _Group] = {}
        self._rewarding = 0
        self._ripe: Counter[int] = Counter()
        """m -> number of groups, fully sampled, whose m live members are all in REWARD."""

    def observe(self, transition: Transition) -> None:
        rewarding = (transition.after is State.REWARD) - (transition.before is State.REWARD)
        sampled, ended = transition.before is None, isinstance(transition.event, e.ENDS)
        if not (rewarding or sampled or ended):
            return
        group = self._groups.setdefault(transition.group, _Group())
        self._count(group, -1)
        group.sampled += sampled
        group.live += sampled - ended
        group.rewarding += rewarding
        self._rewarding += rewarding
        self._count(group, +1)
        # A group that a drop ends may never have been sampled whole; otherwise more members are to come.
        if not group.live and (group.sampled >= self.group_size or transition.after is State.DROPPED):
            del self._groups[transition.group]

    def live(self, group: str) -> int:
        """Members that are sampled and have not ended."""
        return self._groups[group].live if group in self._groups else 0

    def launches(self, passed: float, horizon: float) -> float:
        if not self._rewarding:
            return 0.0
        chance = min(passed / self._rewarding, 1.0)
        return self.group_size * sum(groups * chance**members for members, groups in self._ripe.items())

    def _count(self, group: _Group, sign: int) -> None:
        if group.live and group.live == group.rewarding and group.sampled >= self.group_size:
            self._ripe[group.live] += sign
