"""The pseudo-model: which tokens the simulated engines generate, without a network.

A turn has the length that its script says and ends with `STOP`. Every token names the turn that it belongs to, so that
whoever has one knows what its trajectory does next. Counted, all tokens of a turn but the last are the same integer.
Hashed, each also depends on every token before it: a token that is lost, repeated or changed changes all that follow, and
a turn that is resent with its tokens so far continues as if it had not been interrupted.

Nothing here depends on the order of calls: a request always has the same stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from prorsa.engines.protocol import GenerateRequest, Tokens
from prorsa.simulation.workloads.scripts import Script, TurnScript, Workload

STOP = 0
"""The token that ends a turn."""
TURN_BITS = 16
MOST_TURNS = (1 << TURN_BITS) - 1
"""Of a trajectory."""
QUESTION_BITS = 24
HASH_BITS = 32
SCRIPTS = 16384
"""Scripts kept in memory; what was forgotten is worked out again."""
BASE = 0x9E3779B97F4A7C15
"""Of the polynomial hash, modulo 2**64; odd, so that every power of it is invertible."""
WORD = (1 << 64) - 1


class TurnName(NamedTuple):
    """Which turn of which trajectory; the trajectory is the question and the seed that samples its answer."""

    question: int
    seed: int
    turn: int

    @property
    def token(self) -> int:
        """The counted token of the turn; never `STOP`."""
        return (self.seed << QUESTION_BITS | self.question + 1) << TURN_BITS | self.turn

    @classmethod
    def of_token(cls, token: int) -> TurnName:
        above, turn = token >> TURN_BITS, token & (1 << TURN_BITS) - 1
        return cls((above & (1 << QUESTION_BITS) - 1) - 1, above >> QUESTION_BITS, turn)


class Segment(NamedTuple):
    """A stretch of turns each of which extends the context of the one before."""

    number: int
    """0 for the first of the trajectory."""
    kept: int
    """How much of the context before it, it begins with."""
    group: int
    """Equal for contexts that begin with the same whole prompt: above 0 with that of the group, else with its own."""


class Stream(Protocol):
    """The rest of a turn, from the end of a request's context on."""

    length: int
    """Tokens that are left, with the stop token."""

    def take(self, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The next `count` tokens, or what is left, and their log-probabilities."""
        ...


class CountedStream:
    __slots__ = ("_token", "length")

    def __init__(self, token: int, length: int) -> None:
        self._token = token
        self.length = length

    def take(self, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        count = min(count, self.length)
        self.length -= count
        tokens, logprobs = (self._token,) * count, (logprob(self._token),) * count
        if count and not self.length:
            return (*tokens[1:], STOP), (*logprobs[1:], logprob(STOP))
        return tokens, logprobs


class HashedStream:
    __slots__ = ("_high", "_state", "length")

    def __init__(self, token: int, length: int, state: int) -> None:
        """`state` is the hash of the context."""
        self._high = token << HASH_BITS
        self._state = state
        self.length = length

    def take(self, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        count = min(count, self.length)
        self.length -= count
        tokens = []
        for _ in range(count):
            token = self._high | mixed(self._state) >> 64 - HASH_BITS
            self._state = (self._state * BASE + token) & WORD
            tokens.append(token)
        if count and not self.length:
            tokens[-1] = STOP
        return tuple(tokens), tuple(map(logprob, tokens))


class PseudoModel:
    """`hashed`: every token depends on its whole context, which then must be a sequence of real tokens; slow."""

    def __init__(self, workload: Workload, hashed: bool = False) -> None:
        self.hashed = hashed
        self._course = lru_cache(SCRIPTS)(lambda question, seed: _course(workload.script(question, seed)))
        self._segments = lru_cache(SCRIPTS)(
            lambda question, seed: tuple(_segments(self.script(question, seed), TurnName(question, seed, 0)))
        )

    def script(self, question: int, seed: int) -> Script:
        script: Script = self._course(question, seed)[0]
        return script

    def turn(self, name: TurnName) -> TurnScript:
        return self.script(name.question, name.seed).turns[name.turn]

    def forgets_all(self, name: TurnName) -> bool:
        """Whether the next prompt has nothing of the context that the turn ends with."""
        script, starts = self._course(name.question, name.seed)
        turn: TurnScript = script.turns[name.turn]
        return turn.kept(starts[name.turn]) == 0

    def segment(self, request: GenerateRequest) -> Segment:
        """To which the request's turn belongs."""
        name = self._requested(request)
        segment: Segment = self._segments(name.question, name.seed)[name.turn]
        return segment

    def name(self, token: int) -> TurnName:
        """The turn that a generated token, not the stop token, belongs to."""
        return TurnName.of_token(token >> HASH_BITS if self.hashed else token)

    def stream(self, request: GenerateRequest) -> Stream:
        """What is left of the request's turn. Its context says how much there is already.

        Raises ValueError where the context is none that the script leads to: tokens were lost or made up on the way.
        """
        name = self._requested(request)
        script, starts = self._course(name.question, name.seed)
        context = len(request.input_ids)
        left = starts[name.turn] + script.turns[name.turn].output_tokens - context
        if not 0 < left <= script.turns[name.turn].output_tokens:
            raise ValueError(
                f"request {request.rid} has a context of {context} tokens, but turn {name.turn} of its trajectory begins at "
                f"{starts[name.turn]} and generates {script.turns[name.turn].output_tokens}"
            )
        if self.hashed:
            return HashedStream(name.token, left, context_hash(request.input_ids))
        return CountedStream(name.token, left)

    def _requested(self, request: GenerateRequest) -> TurnName:
        seed = request.sampling.seed
        if seed is None:
            raise ValueError(f"request {request.rid} has no sampling.seed; a simulated trajectory is known by it")
        return TurnName(request.input_ids[0] - 1, seed, int(request.rid.split(".")[-2]))


def context_hash(tokens: Tokens) -> int:
    """A polynomial of all tokens, modulo 2**64. It equals the state of a `HashedStream` that has made the last of them."""
    values = np.fromiter((token & WORD for token in tokens), np.uint64, len(tokens))
    powers = _powers(1 << max(len(values) - 1, 1).bit_length())[: len(values)]
    # The leading 1 makes tokens that are zero count.
    return (int(np.dot(values[::-1], powers)) + pow(BASE, len(values), 1 << 64)) & WORD


def mixed(state: int) -> int:
    """A hash of 64 bits in which every bit of `state` has a part (the finaliser of MurmurHash3)."""
    state = (state ^ state >> 33) * 0xFF51AFD7ED558CCD & WORD
    state = (state ^ state >> 33) * 0xC4CEB9FE1A85EC53 & WORD
    return state ^ state >> 33


def logprob(token: int) -> float:
    """Made up, and always the same for a token."""
    return -(1 + token % 1009) / 1009


@lru_cache(32)
def _powers(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """BASE**0 and so on, modulo 2**64."""
    factors = np.full(count, BASE, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _segments(script: Script, name: TurnName) -> Iterator[Segment]:
    """Of each turn of a trajectory, whose first turn has the name."""
    segment = Segment(0, 0, name.question + 1)
    for turn, prompt in zip(script.turns, script.prompts(), strict=True):
        yield segment
        if turn.dropped_tokens:
            number, kept = segment.number + 1, turn.kept(prompt)
            shares = segment.group > 0 and kept >= script.prompt_tokens
            segment = Segment(number, kept, segment.group if shares else -name._replace(turn=number).token)


def _course(script: Script) -> tuple[Script, tuple[int, ...]]:
    """The script, and the length of the context with which each of its turns begins."""
    return script, tuple(script.prompts())
