"""Which trajectories there are to run: questions in order, each for one group, dealt member by member.

Deterministic in its arguments: the n-th group has the same question and seeds in every run, so a run can be replayed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prorsa.rollout.episode import Launch
from prorsa.rollout.records import TrajectoryRecord
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

    def deal(self, version: int) -> tuple[Group, Launch]:
        """The next member of the open group. A group that is full or has ended gives way to a new one."""
        group = self._open
        if group is None or group.outcome is not None or group.launched == group.size:
            group = self._open = self._next_group(version)
        member = group.launched
        group.launched += 1
        seed = derive_seed(self._seed, group.question.id, group.epoch, member)
        return group, Launch(f"{group.id}.{member}", group.id, group.question, version, seed)

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
