"""What a reward is to an episode: a judgement that may take time, between `RewardStarted` and `Done`."""

from __future__ import annotations

from typing import Protocol

from prorsa.rollout.tasks.base import Question


class Reward(Protocol):
    async def score(self, question: Question, final_text: str) -> float:
        """The reward for a trajectory whose last model turn says `final_text`."""
        ...
