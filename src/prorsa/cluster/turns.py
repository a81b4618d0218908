"""What the rollout asks of the cluster and what it gets: one model turn, token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prorsa.engines.protocol import FinishReason, SamplingParams, Tokens, TraceHeaders
from prorsa.lifecycle import UNKNOWN

Listener = Callable[[int, float], bool]
"""Gets each token of a turn's output with its log-probability as it arrives, once and in order; never one that the turn
will not keep. True means enough: the turn ends with this token (STOP) and frees its engines. It must be quick."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    trajectory: str
    turn: int
    """0 for the first model turn of the trajectory."""
    input_ids: Tokens
    sampling: SamplingParams
    """`max_new_tokens` is the budget of the whole turn; it holds over any number of resends."""
    trace: TraceHeaders = ()
    """For its engines, with every attempt."""
    kept: int = UNKNOWN
    """As `Ready.kept`; UNKNOWN where the prompt extends the trajectory's former context."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """`token_ids`, `logprobs` and `versions` have equal lengths, resends included."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """The weights version that produced each token."""
    finish: FinishReason
    """STOP or LENGTH. An aborted attempt is resent, so ABORT never gets here."""
    attempts: int
    """1 when the turn was never cancelled."""
    cached_tokens: int
    """Prompt tokens of the first attempt that were not computed."""


class TurnFailed(Exception):
    """No engine could serve the turn within its bounds; the message says what was tried."""
