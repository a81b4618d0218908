"""What every format is read into: trajectories of turns, in tokens and seconds, with what nobody recorded left open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prorsa.lifecycle.events import SandboxMode
from prorsa.simulation.workloads.recordings.fields import MOST_S


@dataclass(slots=True)
class Turn:
    """One call of the model."""

    prompt: int
    """Full prompt, tokens; 1 or more."""
    output: int
    """Tokens; 0 for one that was broken off before its first."""
    kept: int | None = None
    """How many tokens the prompt has in common with the context before it; None: nobody recorded that."""
    tool: str | None = None
    """What the turn calls, or who answers it."""
    tool_s: float | None = None
    """From the turn's end to the next turn's start."""
    llm_s: float | None = None
    """From the turn's start to its last token."""
    ttft_s: float | None = None
    step_s: float | None = None
    """From the turn's start to the next turn's start."""


@dataclass(slots=True)
class Trajectory:
    where: str
    """File and line, for errors."""
    name: str | None
    """None where the recording names none."""
    turns: list[Turn]
    group: str | None = None
    """None: one of its own, or that of the others of its name."""
    task: str = "trace"
    start: float = 0.0
    """Seconds on a clock that all trajectories of the recording share."""
    reward: float = 0.0
    reward_s: float | None = None
    sandbox: tuple[SandboxMode, float] | None = None
    """How it started, and how long that took, seconds."""


@dataclass(frozen=True, slots=True)
class Message:
    """Of a conversation that was recorded as text."""

    role: str
    text: str


@dataclass(slots=True)
class Conversation:
    """Turns one after another that were recorded as text. Lengths are guessed: `characters` of them are a token."""

    characters: float
    turns: list[Turn] = field(default_factory=list)
    context: list[Message] = field(default_factory=list)
    """What the next prompt begins with unless it is said."""

    def hear(self, *messages: Message) -> None:
        """Somebody other than the model adds to the context."""
        self.context += messages

    def speak(self, answer: Message, prompt: Sequence[Message] | None = None) -> Turn:
        """The model answers, to `prompt` where the recording has it, else to the context."""
        kept = None
        if prompt is not None:
            common = common_prefix(self.context, prompt)
            if self.turns and common < len(self.context):
                kept = self._tokens(prompt[:common])
            self.context = list(prompt)
        turn = Turn(max(1, self._tokens(self.context)), self._tokens([answer]), kept)
        self.context.append(answer)
        self.turns.append(turn)
        return turn

    def _tokens(self, messages: Sequence[Message]) -> int:
        return sum(tokens_of(message.text, self.characters) for message in messages)


def tokens_of(text: str, characters: float) -> int:
    """A guess: one token at least, whatever the text, for what stands around it."""
    return 1 + round(len(text) / characters)


def gap(earlier: float | None, later: float | None) -> float | None:
    """Seconds between two moments of which either may be unknown. Clocks go back: never less than 0.

    A gap of more than `MOST_S` was no tool's: its length counts as unknown.
    """
    if earlier is None or later is None or later - earlier > MOST_S:
        return None
    return max(later - earlier, 0.0)


def common_prefix(before: Sequence[object], after: Sequence[object]) -> int:
    """How many items both begin with."""
    pairs = zip(before, after, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(before), len(after)))
