"""Which instances change their role for a target, and in what order.

Fewest flips, least loaded instances first, never more of a role than is asked for. While requests are served, the instances
that stay in their pools can always serve: one of each stage, or a mixed one. What would break that waits for a second wave,
which needs the first one's instances in their new roles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

from prorsa.allocation import Allocation
from prorsa.cluster.instances import Fleet, Instance
from prorsa.engines.protocol import Role, in_place

Change = tuple[Instance, Role]
Can = Callable[[Instance, Role], bool]


def can_flip(instance: Instance, role: Role) -> bool:
    return role in instance.engine.roles


def changes_in_place(instance: Instance, role: Role) -> bool:
    """Whether the flip disturbs nothing that the instance serves."""
    return can_flip(instance, role) and in_place(instance.role, role)


def serves(allocation: Allocation) -> bool:
    """Whether instances of these roles serve a request from its prompt to its end."""
    return allocation.mixed > 0 or (allocation.prefill > 0 and allocation.decode > 0)


def added(allocation: Allocation, role: Role, count: int) -> Allocation:
    """With so many more instances of `role`."""
    return replace(allocation, **{role: getattr(allocation, role) + count})


def allocation_of(roles: Sequence[Role]) -> Allocation:
    """How many there are of each role."""
    count = Counter(roles)
    return Allocation(count[Role.PREFILL], count[Role.DECODE], count[Role.MIXED])


def surplus(fleet: Fleet, target: Allocation) -> list[Instance]:
    """The instances to stop where the target has fewer: the least loaded of those whose role has too many."""
    leaving = [
        instance
        for role in Role
        for instance in sorted(fleet.pool(role), key=_load)[: max(len(fleet.pool(role)) - getattr(target, role), 0)]
    ]
    return sorted(leaving, key=_load)[: max(fleet.in_service.total - target.total, 0)]


def missing(fleet: Fleet, target: Allocation) -> list[Role]:
    """The roles of the instances to start where the target has more than there are. A dead one is coming back."""
    there = allocation_of([instance.role for instance in fleet])
    lacking = [role for role in Role for _ in range(getattr(target, role) - getattr(there, role))]
    return lacking[: max(target.total - there.total, 0)]


def next_wave(fleet: Fleet, target: Allocation, at_rest: bool = False, can: Can = can_flip) -> list[Change]:
    """The flips to make now to bring the roles in service nearer to `target`; none where it is reached, or cannot be without
    a moment in which nothing is served. `can` says which roles an instance can get.

    `at_rest`: nothing is served now, so that moment does no harm and all flips are made at once.
    """
    changes = _changes(fleet, target, can)
    now = fleet.in_service
    if at_rest or not serves(now):
        return changes
    for count in range(len(changes), 0, -1):
        some, rest = changes[:count], changes[count:]
        # A part of the flips must not leave instances of one stage without the other.
        after = allocation_of([*_staying(fleet, some), *(role for _, role in some)])
        if rest and (after.prefill > 0) is not (after.decode > 0):
            continue
        if wave := _first_wave(fleet, some):
            return wave
    return []


def _changes(fleet: Fleet, target: Allocation, can: Can) -> list[Change]:
    short: dict[Role, int] = {role: getattr(target, role) - len(fleet.pool(role)) for role in Role}
    leaving = [i for role, lack in short.items() for i in sorted(fleet.pool(role), key=_load)[: max(-lack, 0)]]
    changes = []
    for instance in sorted(leaving, key=_load):
        role = next((role for role, lack in short.items() if lack > 0 and can(instance, role)), None)
        if role is not None:
            short[role] -= 1
            changes.append((instance, role))
    return changes


def _first_wave(fleet: Fleet, changes: list[Change]) -> list[Change]:
    """As many of the flips as can be made at once, such that the others can be made after them; none where that is none.

    Two instances at most make a cluster that serves, so no more than two have to wait.
    """
    for waiting in range(min(2, len(changes)) + 1):
        for later in combinations(reversed(changes), waiting):
            wave = [change for change in changes if change not in later]
            staying = _staying(fleet, changes)
            meanwhile = allocation_of([*staying, *(instance.role for instance, _ in later)])
            afterwards = allocation_of([*staying, *(role for _, role in wave)])
            if serves(meanwhile) and (not later or serves(afterwards)):
                return wave
    return []


def _staying(fleet: Fleet, changes: Sequence[Change]) -> list[Role]:
    leaving = {instance.name for instance, _ in changes}
    return [instance.role for role in Role for instance in fleet.pool(role) if instance.name not in leaving]


def _load(instance: Instance) -> int:
    return instance.load
