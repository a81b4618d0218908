"""The exact-answer reward: the task compares the final text with its question's answer, at once."""

from __future__ import annotations

from prorsa.rollout.tasks.base import Question, Task


class ExactReward:
    """Implements `Reward`."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def score(self, question: Question, final_text: str) -> float:
        return self._task.reward(question, final_text)
