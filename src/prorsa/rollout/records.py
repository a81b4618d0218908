"""What a finished trajectory leaves behind, and the transcript that grows into it.

Invariant (token in, token out): the context of the next turn is the prompt's ids, then everything that was generated, as
it was generated, and the tool turns in between. Nothing is ever decoded and encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prorsa.cluster.turns import TurnResult
from prorsa.engines.protocol import Tokens
from prorsa.lifecycle import UNKNOWN

NO_LOGPROB = 0.0
NO_VERSION = -1
"""The log-probability and weights version of a token that no model generated."""


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """`response_mask`, `logprobs` and `versions` have one value for every id of `response_ids`."""

    trajectory: str
    group: str
    question: str
    """Id of the question."""
    version: int
    """Weights version when it was sampled."""
    seed: int
    """With which every turn was sampled."""
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    """Everything after the first prompt, tool turns included."""
    response_mask: tuple[int, ...]
    """1 where the model generated the token, else 0."""
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """The weights version that generated each token."""
    reward: float | None
    """None for a dropped trajectory."""
    turns: int
    """Model turns that were finished."""
    dropped: str | None
    """Why it was dropped, None for one that is done."""


class Transcript:
    """The tokens of a trajectory while it runs."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.context: Tokens = self.prompt_ids
        """The prompt and everything after it."""
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.turns = 0
        self.kept = UNKNOWN
        """Of the context, how much the next prompt has in common with the former one, as `TurnRequest.kept`."""

    def __len__(self) -> int:
        """Length of the context, prompt included."""
        return len(self.context)

    def add_turn(self, result: TurnResult) -> None:
        """Raises ValueError when the result's parts differ in length: training on it would be silently wrong."""
        n = len(result.token_ids)
        if not n == len(result.logprobs) == len(result.versions):
            raise ValueError(
                f"a turn came back with {n} tokens, {len(result.logprobs)} logprobs, {len(result.versions)} versions"
            )
        self._add(result.token_ids, [1] * n, result.logprobs, result.versions)
        self.turns += 1

    def add_tool_turn(self, token_ids: Sequence[int]) -> None:
        n = len(token_ids)
        self._add(token_ids, [0] * n, [NO_LOGPROB] * n, [NO_VERSION] * n)

    def _add(self, ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.context = self.context + tuple(ids)
        self.response_ids += ids
        self.response_mask += mask
        self.logprobs += logprobs
        self.versions += versions
