"""What happens to a trajectory, one small immutable record an event.

`time` is in seconds on the clock of the event loop that runs the rollout (monotonic or virtual), never a wall clock.
Every token count is a FULL length: a cached prefix counts (paper, B.1).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

UNKNOWN = -1
"""Of `Ready.kept`: nobody compared the prompt with the context before it."""


class SandboxMode(StrEnum):
    PREWARMED = "prewarmed"
    COLD = "cold"


@dataclass(frozen=True, slots=True)
class Event:
    time: float
    trajectory: str


@dataclass(frozen=True, slots=True)
class Sampled(Event):
    """The injection decision: the trajectory exists from here. `version` is the weights version at that moment."""

    group: str
    task: str
    version: int = 0
    prompt_tokens: int = 0
    """Length of the first prompt where it is known already, else 0."""


@dataclass(frozen=True, slots=True)
class SandboxStarting(Event):
    mode: SandboxMode
    image: str
    node_class: str


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """The request joined the ready queue: THE prefill request arrival (paper, 4.1.1)."""

    tokens: int
    """Full prompt length of the request."""
    kept: int = UNKNOWN
    """How many tokens the prompt has in common with the trajectory's former context, from the start of both on. UNKNOWN: it
    extends that context, or where it is shorter, has nothing in common with it."""

    def extends(self, context: int) -> int:
        """How much of a former context of `context` tokens the prompt starts with. ValueError where it cannot be."""
        if self.kept == UNKNOWN:
            return context if self.tokens >= context else 0
        if not 0 <= self.kept <= min(context, self.tokens):
            raise ValueError(f"it keeps {self.kept} tokens of {context} in a prompt of {self.tokens}")
        return self.kept


@dataclass(frozen=True, slots=True)
class PrefillStarted(Event):
    instance: str


@dataclass(frozen=True, slots=True)
class DecodeStarted(Event):
    """Prefill completion, which is the decode admission."""

    instance: str


@dataclass(frozen=True, slots=True)
class Requeued(Event):
    """A cancelled attempt: the request is READY again with the tokens that it had already produced."""

    tokens: int
    """Full prompt length of the resent request: the first prompt plus the retained tokens."""


@dataclass(frozen=True, slots=True)
class ToolStarted(Event):
    tool: str
    tokens: int
    """Context length after decode, the turn's output included."""


@dataclass(frozen=True, slots=True)
class RewardStarted(Event):
    tokens: int
    """Context length after the last turn."""


@dataclass(frozen=True, slots=True)
class Done(Event):
    reward: float
    admitted: bool
    """Whether the trajectory passed the criteria for admission to training (p_hat, Eq. 3)."""


@dataclass(frozen=True, slots=True)
class Dropped(Event):
    reason: str


ENDS = (Done, Dropped)
"""A trajectory ends with one of these."""
