"""What a rollout that was cut off still has to do, from what it has left. A pure function of its records.

A member of a group is named GROUP.MEMBER, and GROUP.MEMBER.N where the run was cut off N times while it ran: an id is never
used again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prorsa.lifecycle.events import Dropped, Event, Sampled
from prorsa.rollout.records import TrajectoryRecord

CUT_OFF = "the run was cut off"
"""Why the trajectories were dropped that were live when a run was killed."""
ENDED = "the rollout ended"
"""Why those were that were live when it was stopped in order."""
CANCELLED = "cancelled"
NOT_RECORDED = "its events could not be recorded"
"""Why one seems to have been dropped whose events are missing in the trace."""
_NOT_ITS_FAULT = (CUT_OFF, ENDED, CANCELLED, NOT_RECORDED)
"""A member that was dropped so is started again; any other drop has lost its group."""


def member_name(group: str, member: int, restarts: int = 0) -> str:
    return f"{group}.{member}.{restarts}" if restarts else f"{group}.{member}"


def parse_member(trajectory: str) -> tuple[int, int]:
    """(member, restarts). ValueError where it is no name of a member."""
    _, member, *restarts = trajectory.split(".")
    return int(member), int(restarts[0]) if restarts else 0


@dataclass(slots=True)
class GroupLeft:
    """A group that has not ended."""

    number: int
    """Groups are numbered from 0 as they are dealt."""
    version: int
    """Weights version when its first member was sampled."""
    records: list[TrajectoryRecord] = field(default_factory=list)
    """Of the members that are done, in the order in which they were."""
    restarts: dict[int, int] = field(default_factory=dict)
    """Member -> how often it was started, of those that are not done but were."""


@dataclass(frozen=True, slots=True)
class Left:
    dealt: int
    """Groups so far."""
    groups: list[GroupLeft]
    """Those that have not ended: complete ones first, in the order in which they were completed."""


def left(
    events: Iterable[Event], records: Sequence[TrajectoryRecord], handed_over: Iterable[str], group_size: int
) -> Left:
    """`handed_over` are the ids of groups that a batch had."""
    groups: dict[str, GroupLeft] = {}
    of: dict[str, str] = {}
    lost = set(handed_over)
    for event in events:
        if isinstance(event, Sampled):
            of[event.trajectory] = event.group
            _started(groups, event.trajectory, event.group, event.version)
        elif isinstance(event, Dropped) and event.reason not in _NOT_ITS_FAULT:
            lost.add(of[event.trajectory])
    for record in records:
        _started(groups, record.trajectory, record.group, record.version)
    dealt = max((group.number for group in groups.values()), default=-1) + 1
    for name in lost:
        groups.pop(name, None)
    completed: list[GroupLeft] = []
    for record in records:
        group = groups.get(record.group)
        member, _ = parse_member(record.trajectory)
        if group is not None and record.dropped is None and group.restarts.pop(member, None) is not None:
            group.records.append(record)
            if len(group.records) == group_size:
                completed.append(group)
    return Left(dealt, completed + [group for group in groups.values() if len(group.records) < group_size])


def _started(groups: dict[str, GroupLeft], trajectory: str, group: str, version: int) -> None:
    one = groups.setdefault(group, GroupLeft(int(group[1:]), version))
    member, restarts = parse_member(trajectory)
    one.restarts[member] = max(restarts + 1, one.restarts.get(member, 0))
