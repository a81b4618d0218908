"""The policy that knows the future: what the others are measured against. It exists in simulations only.

It sees the scripts of all trajectories, those too that will be launched, and where each is at the moment. At a decision it
works out (`prorsa.simulation.foresight`) what would become of them under every allocation, from now on, and under every one
for a while and then under one of the best; and takes the first part of the plan under which the step ends first. Where
trajectories are launched all the time it is the plan under which most tokens are made in the time ahead.

Since every allocation that stays is among the plans, and it decides again and again, it does better than the best of them as
far as its model is right. It is no bound in the strict sense: `prorsa.simulation.bounds` has that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prorsa.allocation import Allocation, Handling, Moment, Policy, Situation
from prorsa.lifecycle import Snapshot, State
from prorsa.lifecycle.events import SandboxMode
from prorsa.lifecycle.snapshot import MODES
from prorsa.simulation.foresight import NEVER, Field, Foreseen, Plan, Tables, Turns, foresee, stretches, turns_of
from prorsa.simulation.workloads.launches import Launches
from prorsa.simulation.workloads.scripts import Script

INTERVAL_S = 20.0
"""Decisions on the grid are at least so far apart, seconds."""
FIRST_S = 40.0
"""How long the first part of a plan lasts."""
AHEAD_S = 240.0
"""How far it looks where trajectories are launched all the time."""
BEST = 3
"""Allocations with which plans end."""
SAME = 0.002
"""Plans under which the step ends so nearly at the same time, as a fraction, differ in the mean time of a trajectory only."""
GAIN = 0.005
"""What other roles must promise more than the present ones if these stayed, as a fraction: the model is no better."""
SOON = 0.0005
"""And more than the present ones for a while: the model errs alike for both, and what is put off once is put off again."""
COMPUTED = 0.5
"""Part of a group's first prompts that is computed where half of the ranks are as many as its members or more, as measured
in simulations (the others find the prompt in a cache); with fewer ranks it is proportionally less."""
NEAR = (1, 2, 4, 8)
"""Instances that change their role, where there are too many to try every number."""
FEW = 9
"""Instances of which every split is tried."""
COARSE = 8
"""Parts of the instances in which splits are tried, where there are more."""


@dataclass(frozen=True, slots=True)
class View:
    """The rollout at a moment."""

    snapshot: Snapshot
    version: int
    """Of the weights."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A trajectory: its script, and its turns as the model has them."""

    script: Script
    turns: Turns
    prompts: tuple[int, ...]
    """Of each turn, tokens."""


class Clairvoyant(Policy):
    def __init__(
        self,
        launches: Launches,
        tables: Tables,
        view: Callable[[], View],
        *,
        endless: bool,
        cached: bool,
        ranks: int,
        report_s: float,
        mixed: bool,
    ) -> None:
        """`endless`: trajectories are launched all the time. `cached`: what one instance has computed another need not.
        `ranks`: of all instances together. `report_s`: how often a decode tells of its tokens, seconds. `mixed`: whether
        instances may become mixed."""
        self._launches = launches
        self._tables = tables
        self._view = view
        self._endless = endless
        self._cached = cached
        self._shared = 1.0 - COMPUTED * min(1.0, ranks / 2 / launches.group_size)
        self._report_s = report_s
        self._mixed = mixed
        self._known: dict[tuple[int, int], _Known] = {}
        self._version: int | None = None
        self._synced = 0.0
        """When the weights changed last, as far as it was seen."""
        self._warm: set[str] = set()
        """Trajectories that have a cache under these weights."""
        self._decided: float | None = None

    def decide(self, situation: Situation) -> Allocation:
        current, view = situation.current, self._view()
        self._learn(view)
        now = view.snapshot.time
        early = self._decided is not None and now < self._decided + INTERVAL_S - 1e-6
        if not situation.live or current.total < 2 or (situation.moment is Moment.GRID and early):
            return current
        self._decided = now
        return self._best(self._field(view.snapshot), current)

    def handling(self, situation: Situation, target: Allocation) -> Handling:
        return Handling(even_out=True)

    # What it knows of the present.

    def _learn(self, view: View) -> None:
        """Who has a cache: a request that decodes under the present weights was prefilled under them."""
        snapshot = view.snapshot
        if view.version != self._version:
            if self._version is not None:
                self._synced = snapshot.time
            self._version = view.version
            self._warm.clear()
        for row in np.nonzero((snapshot.since >= self._synced) & (snapshot.state >= State.DECODE))[0].tolist():
            self._warm.add(snapshot.ids[row])

    def _trajectory(self, group: int, member: int) -> _Known:
        known = self._known.get((group, member))
        if known is None:
            script = self._launches.script(group, member)
            turns = turns_of(script, self._tables, self._cached, self._shared)
            known = _Known(script, turns, tuple(int(tokens) for tokens in turns.context))
            self._known[group, member] = known
        return known

    def _field(self, snapshot: Snapshot) -> Field:
        """The live trajectories, and where they are launched all the time the groups that come next."""
        rows, numbers = _Rows(self._tables), sorted({_named(name)[0] for name in snapshot.ids})
        order = {number: index for index, number in enumerate(numbers)}
        for row, name in enumerate(snapshot.ids):
            group, member = _named(name)
            rows.add(self._trajectory(group, member), order[group])
            self._place(rows, snapshot, row)
        if self._endless:
            first = numbers[-1] + 1
            for group in range(first, first + max(2, len(numbers) // 2)):
                for member in range(self._launches.group_size):
                    known = self._trajectory(group, member)
                    rows.add(known, len(numbers) + group - first)
                    rows.first(known.script.sandbox_prewarmed_s, self._shared)
        return rows.field(len(numbers))

    def _place(self, rows: _Rows, snapshot: Snapshot, row: int) -> None:
        """Say what is left of the stretch that a live trajectory is in."""
        known, state, turn = rows.last, State(snapshot.state[row]), int(snapshot.turn[row])
        elapsed = snapshot.time - float(snapshot.since[row])
        script = known.script
        cold = snapshot.ids[row] not in self._warm and self._version not in (None, 0)
        match state:
            case State.SAMPLED:
                rows.first(script.sandbox_prewarmed_s, self._shared)
            case State.SANDBOX_STARTING:
                was_cold = MODES[snapshot.mode[row]] is SandboxMode.COLD
                start_s = script.sandbox_cold_s if was_cold else script.sandbox_prewarmed_s
                rows.first(max(start_s - elapsed, 0.0), self._shared)
            case State.READY | State.PREFILL:
                prompt = int(snapshot.tokens[row])
                made = prompt - known.prompts[turn]
                rows.request(turn, made, prompt, 0 if cold else None, before_s=0.0)
            case State.DECODE:
                made = int(snapshot.tokens[row]) - known.prompts[turn]
                unseen = (elapsed % self._report_s) / rows.token_s
                rows.decode(turn, made + unseen, int(snapshot.tokens[row]))
            case State.TOOL:
                left_s = max(script.turns[turn - 1].tool_s - elapsed, 0.0)
                if cold:
                    rows.request(turn, 0, known.prompts[turn], 0, before_s=left_s)
                else:
                    rows.left(away_s=left_s, following=turn)
            case _:
                rows.left(away_s=max(script.reward_s - elapsed, 0.0), following=len(known.turns))

    # The choice.

    def _best(self, field: Field, current: Allocation) -> Allocation:
        allocations = self._candidates(current)
        constant = self._foresee(field, [Plan(one, NEVER, one) for one in allocations], current)
        order = self._order(constant)
        last = [allocations[index] for index in order[:BEST]]
        plans = [Plan(one, NEVER, one) for one in last]
        plans += [Plan(one, FIRST_S, then) for one in allocations for then in last if then != one]
        found = self._foresee(field, plans, current)
        best = self._order(found)[0]
        if plans[best].first == current:
            return current
        stays = self._foresee(field, [Plan(current, NEVER, current)], current)
        put_off = [index for index, plan in enumerate(plans) if plan.first == current]
        reasons = [
            self._gain(found, best, stays, 0) > GAIN,
            *(self._gain(found, best, found, i) > SOON for i in put_off),
        ]
        return plans[best].first if all(reasons) else current

    def _foresee(self, field: Field, plans: Sequence[Plan], current: Allocation) -> Foreseen:
        return foresee(field, plans, current, self._tables, AHEAD_S if self._endless else NEVER)

    def _order(self, found: Foreseen) -> list[int]:
        """Of the plans, the best first."""
        if self._endless:
            return [int(index) for index in np.argsort(-found.tokens, kind="stable")]
        classes = np.floor(np.log(np.maximum(found.end_s, 1e-3) / max(float(found.end_s.min()), 1e-3)) / SAME)
        return [int(index) for index in np.lexsort((found.mean_s, classes))]

    def _gain(self, found: Foreseen, index: int, others: Foreseen, other: int) -> float:
        """Of a plan over another, as a fraction."""
        if self._endless:
            return float(found.tokens[index] / max(others.tokens[other], 1.0)) - 1
        sooner = float(others.end_s[other] / found.end_s[index]) - 1
        quicker = float(others.mean_s[other] / found.mean_s[index]) - 1
        return max(sooner, quicker if sooner > -SAME else sooner)

    def _candidates(self, current: Allocation) -> list[Allocation]:
        """The present roles, every split (where there are many, those near the present one and some of the others), and
        colocation."""
        total = current.total
        if total <= FEW:
            splits = set(range(1, total))
        else:
            splits = {round(total * part / COARSE) for part in range(1, COARSE)}
            splits |= {current.prefill + sign * step for step in NEAR for sign in (1, -1)}
        found = [Allocation(prefill, total - prefill) for prefill in sorted(splits) if 0 < prefill < total]
        if self._mixed:
            found.append(Allocation(0, 0, total))
        return found if current in found else [*found, current]


def _named(trajectory: str) -> tuple[int, int]:
    """(group, member) of an id that the sampler gives."""
    group, member = trajectory[1:].split(".")
    return int(group), int(member)


class _Rows:
    """Trajectories, added one by one, to the arrays of a `Field`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self.token_s = float(tables.decode_s(np.ones(1), np.array([16384.0]))[0])
        """A decode step, roughly."""
        self.last: _Known
        self._known: list[_Known] = []
        self._groups: list[int] = []
        self._first = 0
        self._end: list[int] = []
        self._following: list[int] = []
        self._left: list[tuple[float, float, float, float, float]] = []
        """Tokens, seconds away, prompt, prefix, context."""

    def add(self, known: _Known, group: int) -> None:
        """Say with one of the next three what is left of its stretch."""
        if self._end:
            self._first = self._end[-1]
        self.last = known
        self._known.append(known)
        self._groups.append(group)
        self._end.append(self._first + len(known.turns))

    def left(self, *, away_s: float, following: int) -> None:
        """Nothing but to wait; `following` is the turn after that."""
        self._following.append(self._first + following)
        self._left.append((0.0, away_s, 0.0, 0.0, 0.0))

    def first(self, start_s: float, shared: float) -> None:
        """Its sandbox, and then the first turn."""
        prompt = self.last.prompts[0]
        self.request(0, 0, prompt, round(shared * prompt), before_s=start_s)

    def request(self, turn: int, made: int, prompt: int, prefix: int | None, *, before_s: float) -> None:
        """To prefill `prompt`, of which the turn has made the tokens `made`, and then the rest of the turn; `prefix` tokens
        are cached, None: as many as can be. `before_s`: what it waits before that."""
        turns = self.last.turns
        if prefix is None:
            former = 0 if turn == 0 else self.last.script.turns[turn - 1].cached(self.last.prompts[turn - 1])
            prefix = prompt - 1 if made else former
        self._following.append(self._first + turn + 1)
        tokens = max(float(turns.tokens[turn]) - made, 0.0)
        self._left.append((tokens, before_s + float(turns.away_s[turn]), prompt, prefix, prompt))

    def decode(self, turn: int, made: float, context: int) -> None:
        """To make the rest of the turn's tokens."""
        turns = self.last.turns
        self._following.append(self._first + turn + 1)
        tokens = max(float(turns.tokens[turn]) + 1.0 - made, 0.0)
        self._left.append((tokens, float(turns.away_s[turn]), 0.0, 0.0, context))

    def field(self, live_groups: int) -> Field:
        tokens, away_s, prompt, prefix, context = np.array(self._left, dtype=np.float64).T
        return Field(
            stretches(tokens, away_s, prompt, prefix, context, self._tables),
            np.array(self._following),
            np.array(self._end),
            Turns(*(np.concatenate([getattr(known.turns, name) for known in self._known]) for name in Turns.__slots__)),
            np.array(self._groups),
            live_groups,
        )
