"""What a simulated trajectory will do, decided before it starts: its turns, its tools, its sandbox, its reward.

The engines generate the scripted number of tokens, the sandbox and the tools take the scripted time. Whatever depends on
the system (queues, prefill, decode, resends, re-prefills) is not in a script: the simulation works it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TurnScript:
    output_tokens: int
    """Tokens that the model generates, the stop token included; 2 or more."""
    tool: str | None = None
    """The tool that the turn calls; None on the last turn."""
    tool_s: float = 0.0
    """How long the tool runs, seconds."""
    appended_tokens: int = 0
    """Tokens of the tool's result, appended to the context."""


@dataclass(frozen=True, slots=True)
class Script:
    prompt_tokens: int
    """Length of the first prompt, the same for all members of a group."""
    turns: tuple[TurnScript, ...]
    """At least one; every one but the last has a tool."""
    sandbox_cold_s: float = 0.0
    """A cold start of the sandbox, seconds."""
    sandbox_prewarmed_s: float = 0.0
    """The start of a prewarmed one."""
    reward_s: float = 0.0
    reward: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Context length at the end."""
        return self.prompt_tokens + sum(turn.output_tokens + turn.appended_tokens for turn in self.turns)

    def within(self, max_context: int) -> Script:
        """The script as a context of at most `max_context` tokens lets it run.

        It ends with the turn after which the tool's result would take more than half of the tokens that are left (the
        bound of an episode), or after which the next turn would not fit; a first turn that does not fit is cut.
        Raises ValueError where the prompt leaves no room for a turn of two tokens.
        """
        room = max_context - self.prompt_tokens
        first, *later = self.turns
        if room < 2:
            raise ValueError(f"a prompt of {self.prompt_tokens} tokens leaves no room for a turn of 2 in {max_context}")
        turns = [first if first.output_tokens <= room else replace(first, output_tokens=room)]
        left = room - turns[0].output_tokens
        for turn in later:
            appended = turns[-1].appended_tokens
            if appended > left // 2 or appended + turn.output_tokens > left:
                break
            left -= appended + turn.output_tokens
            turns.append(turn)
        if len(turns) == len(self.turns) and turns[0] is first:
            return self
        turns[-1] = TurnScript(turns[-1].output_tokens)
        return replace(self, turns=tuple(turns))


class Workload(Protocol):
    """A distribution of scripts. Deterministic: the same arguments give the same script in any order of calls."""

    @property
    def name(self) -> str:
        """The task name in events, such as `coding-agent`."""
        ...

    @property
    def questions(self) -> int | None:
        """How many different questions there are; None: as many as one likes."""
        ...

    def script(self, question: int, seed: int) -> Script:
        """The trajectory that `seed` samples for a question; members of a group share `question` and its prompt."""
        ...
