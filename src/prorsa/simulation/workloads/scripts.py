"""What a simulated trajectory will do, decided before it starts: its turns, its tools, its sandbox, its reward.

The engines generate the scripted number of tokens, the sandbox and the tools take the scripted time. Whatever depends on
the system (queues, prefill, decode, resends, re-prefills) is not in a script: the simulation works it out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
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
    dropped_tokens: int = 0
    """Tokens at the end of the context, the turn's output included, that are gone before these are appended: the next prompt
    has only what stands before them in common with this turn's context. What follows is another segment of the trajectory."""

    def kept(self, prompt: int) -> int:
        """After a prompt of `prompt` tokens: how much of the context the next prompt begins with."""
        return prompt + self.output_tokens - self.dropped_tokens

    def next(self, prompt: int) -> int:
        """Length of the next prompt."""
        return self.kept(prompt) + self.appended_tokens

    def cached(self, prompt: int) -> int:
        """How much of the next prompt may be in a cache: not the last token that the turn made, which has not been through
        the model, and not the prompt's own last one, which always goes through it."""
        return min(self.kept(prompt), prompt + self.output_tokens - 1, self.next(prompt) - 1)


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

    def prompts(self) -> Iterator[int]:
        """Length of each turn's prompt."""
        return accumulate(self.turns[:-1], lambda prompt, turn: turn.next(prompt), initial=self.prompt_tokens)

    @property
    def longest_context(self) -> int:
        return max(prompt + turn.output_tokens for prompt, turn in zip(self.prompts(), self.turns, strict=True))

    def reshaped(self, prompt_tokens: int, output: Callable[[int], int] = int) -> Script:
        """The same with another first prompt and turns of `output(tokens)`.

        A turn that drops the end of its output drops as many tokens; one that goes further back keeps as many.
        """
        turns, prompt = [], prompt_tokens
        for turn, former in zip(self.turns, self.prompts(), strict=True):
            made = output(turn.output_tokens)
            dropped = min(turn.dropped_tokens, made)
            if turn.dropped_tokens > turn.output_tokens:
                dropped = prompt + made - min(turn.kept(former), prompt)
            turns.append(replace(turn, output_tokens=made, dropped_tokens=dropped))
            prompt = turns[-1].next(prompt)
        return replace(self, prompt_tokens=prompt_tokens, turns=tuple(turns))

    def within(self, max_context: int) -> Script:
        """The script as a context of at most `max_context` tokens lets it run.

        It ends with the turn after which the context would grow by more than half of the tokens that are left (the bound of
        an episode), or after which the next turn would not fit; a first turn that does not fit is cut. Raises ValueError
        where the prompt leaves no room for a turn of two tokens.
        """
        room = max_context - self.prompt_tokens
        first, *later = self.turns
        if room < 2:
            raise ValueError(f"a prompt of {self.prompt_tokens} tokens leaves no room for a turn of 2 in {max_context}")
        turns = [first if first.output_tokens <= room else replace(first, output_tokens=room)]
        left = room - turns[0].output_tokens
        for turn in later:
            grown = turns[-1].appended_tokens - turns[-1].dropped_tokens
            if left < 1 or grown > left // 2 or grown + turn.output_tokens > left:
                break
            left -= grown + turn.output_tokens
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
