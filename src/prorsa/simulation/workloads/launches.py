"""Which script every trajectory of a scenario plays: known before anything runs, for the sampler deals them in order."""

from __future__ import annotations

from functools import lru_cache

from prorsa.rollout.sampler import derive_seed
from prorsa.rollout.tasks.base import Question
from prorsa.simulation.workloads.environment import questions
from prorsa.simulation.workloads.scripts import Script, Workload

QUESTIONS = 4096
"""Questions of a workload model that has as many as one likes; rollouts go through them in order."""
REMEMBERED = 16384
"""Scripts kept in memory."""


class Launches:
    """The trajectories of a rollout by group (0, 1, ... as they are dealt) and member."""

    def __init__(self, workload: Workload, group_size: int, seed: int) -> None:
        """`seed` is the scenario's."""
        self.questions: list[Question] = questions(workload, workload.questions or QUESTIONS)
        self.group_size = group_size
        self._workload = workload
        self._seed = seed
        self.script = lru_cache(REMEMBERED)(self._script)

    def question(self, group: int) -> int:
        """Index of the question that the group answers."""
        return group % len(self.questions)

    def sandbox(self, group: int, member: int) -> Script:
        """The script whose sandbox times the trajectory has, where all start in the order in which they are launched."""
        epoch = group // len(self.questions)
        return self._workload.script(self.question(group), epoch * self.group_size + member)

    def _script(self, group: int, member: int) -> Script:
        epoch, index = divmod(group, len(self.questions))
        return self._workload.script(index, derive_seed(self._seed, self.questions[index].id, epoch, member))
