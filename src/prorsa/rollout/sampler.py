"""Which trajectories there are to run: questions in order, each for one group, dealt member by member.

Deterministic in its arguments: the n-th group has the same question and seeds in every run, so a run can be replayed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prorsa.rollout.episode import Launch
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.resume import Left, member_name, parse_member
from prorsa.rollout.tasks.base import Question


class Outcome(StrEnum):
    TRAINED = "trained"
    """Complete, and handed over in a batch."""
    DROPPED = "dropped"
    REPLACED = "replaced"
    """Dropped, and the rule launches others in its place."""


@dataclass(slots=True, eq=False)
class Group:
    """The trajectories of one question that are compared with each other. It ends exactly once."""

    id: str
    question: Question
    size: int
    version: int
    """Weights version when its first member was sampled."""
    epoch: int
    """How often its question was asked before."""
    launched: int = 0
    records: list[TrajectoryRecord] = field(default_factory=list)
    """Of the members that have ended, in that order."""
    outcome: Outcome | None = None
    reason: str | None = None
    """Why it was dropped or replaced."""

    @property
    def live(self) -> int:
        return self.launched - len(self.records)

    @property
    def complete(self) -> bool:
        """Every member was rewarded."""
        return len(self.records) == self.size and all(record.dropped is None for record in self.records)

    def end(self, outcome: Outcome, reason: str | None = None) -> None:
        if self.outcome is not None:
            raise RuntimeError(f"group {self.id} ended as {self.outcome} and cannot end again as {outcome}")
        self.outcome, self.reason = outcome, reason


class Sampler:
    def __init__(self, questions: Sequence[Question], group_size: int, seed: int) -> None:
        """`questions` are asked in order, and from the first again after the last."""
        self.group_size = group_size
        self._questions = questions
        self._seed = seed
        self._groups = 0
        self._open: Group | None = None
        self._again: deque[tuple[Group, int, int]] = deque()
        """(group, member, restarts) of the members that a resumed run has still to start."""

    def resume(self, left: Left) -> list[Group]:
        """Go on where a run was cut off: the groups that have not ended, whose missing members are dealt first."""
        self._groups = left.dealt
        groups = []
        for one in left.groups:
            epoch, index = divmod(one.number, len(self._questions))
            group = Group(f"g{one.number}", self._questions[index], self.group_size, one.version, epoch)
            group.records += one.records
            group.launched = len(one.records)
            groups.append(group)
            done = {parse_member(record.trajectory)[0] for record in one.records}
            missing = (member for member in range(self.group_size) if member not in done)
            self._again += [(group, member, one.restarts.get(member, 0)) for member in missing]
        return groups

    def deal(self, version: int) -> tuple[Group, Launch]:
        """The next member of the open group. A group that is full or has ended gives way to a new one."""
        while self._again:
            cut_off, member, restarts = self._again.popleft()
            if cut_off.outcome is None:
                return cut_off, self._launch(cut_off, member, version, restarts)
        group = self._open
        if group is None or group.outcome is not None or group.launched == group.size:
            group = self._open = self._next_group(version)
        return group, self._launch(group, group.launched, version)

    def _launch(self, group: Group, member: int, version: int, restarts: int = 0) -> Launch:
        group.launched += 1
        seed = derive_seed(self._seed, group.question.id, group.epoch, member)
        return Launch(member_name(group.id, member, restarts), group.id, group.question, version, seed)

    def _next_group(self, version: int) -> Group:
        number = self._groups
        self._groups += 1
        epoch, index = divmod(number, len(self._questions))
        return Group(f"g{number}", self._questions[index], self.group_size, version, epoch)


def derive_seed(run_seed: int, question: str, epoch: int, member: int) -> int:
    """A 31-bit seed; `epoch` counts how often the question was asked before.

    All turns of a trajectory have it: a context only grows, so no position is drawn twice. Seeds that are equal by chance do
    harm within a group alone: with eight members in one of 77 million."""
    digest = hashlib.blake2b(f"{run_seed}/{question}/{epoch}/{member}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
