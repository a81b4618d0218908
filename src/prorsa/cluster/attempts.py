"""One turn of a trajectory as the router serves it, and one attempt to serve it.

A turn has at most one live attempt. Only the attempt collects tokens while it lives; the turn takes them over when the
attempt has ended, so whatever an engine sends later reaches nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from prorsa.cluster.instances import Instance
from prorsa.cluster.placement import prefixes
from prorsa.cluster.turns import Listener, TurnRequest, TurnResult
from prorsa.engines.protocol import Bootstrap, Chunk, EngineError, FinishReason, GenerateRequest


class End(Enum):
    """Why an attempt ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """By us: a drain, a weight update, the caller, the end of the run."""
    MOVED = "moved"
    """By us: another decode instance is emptier."""
    REFUSED = "refused"
    """The engine's queue was full."""
    FAILED = "failed"
    """An engine died, refused for good, aborted by itself or fell silent."""


@dataclass(frozen=True, slots=True)
class Verdict:
    end: End
    reason: str


@dataclass(eq=False, slots=True)
class Attempt:
    """Its legs run on `prefill` and `decode`, which are the same instance where that is mixed."""

    request: GenerateRequest
    prefill: Instance
    decode: Instance
    deliver: Callable[[Sequence[int], Sequence[float]], bool]
    """Told of what is collected; True: the caller has enough."""
    progressed_at: float = 0.0
    started: bool = False
    """Whether decode has: the prefill leg is done or the first token is here, whichever came first."""
    abandoned: bool = False
    """The caller is gone: nothing more may be recorded for the trajectory."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    finish: FinishReason | None = None
    error: Exception | None = None
    """What went wrong on our side, not on an engine's: the caller of the turn gets it."""
    verdict: Verdict | None = None
    """None while it lives."""
    rid: str = field(init=False)
    turn: Turn = field(init=False)
    legs: dict[asyncio.Task[None], Instance] = field(default_factory=dict)
    """Those that are still open."""
    closing: asyncio.Task[None] | None = None
    """Closes the legs of an attempt that did not end by itself."""
    closed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the legs are closed and the books of its instances are cleared."""

    def __post_init__(self) -> None:
        self.rid = self.request.rid

    @property
    def trajectory(self) -> str:
        return self.turn.request.trajectory

    @property
    def mixed(self) -> bool:
        return self.prefill is self.decode

    @property
    def accepts(self) -> bool:
        """Whether a token that arrives now counts.

        An aborted prefill can make its decode emit garbage, so once the attempt has ended only a decode that had
        started before may still add to its output.
        """
        return not self.abandoned and (self.started or self.verdict is None)

    def collect(self, chunk: Chunk, time: float) -> bool:
        """Whether the caller has enough with it."""
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise EngineError(
                f"engine {self.decode.name}: asked {self.rid}; answered {len(chunk.token_ids)} tokens with "
                f"{len(chunk.logprobs)} log-probabilities"
            )
        count = len(chunk.token_ids)
        self.tokens.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.versions.extend([chunk.weights_version] * count)
        self.arrivals.extend([time] * count)
        return self.deliver(chunk.token_ids, chunk.logprobs)


class Turn:
    """The request, what has been generated of it so far, and what was tried."""

    def __init__(self, request: TurnRequest, time: float, listener: Listener | None = None) -> None:
        self.request = request
        self._stops = frozenset(request.sampling.stop_token_ids)
        self._listener = listener
        self._delivered = 0
        self._enough: int | None = None
        """Length of the output with which the listener had enough."""
        self.outcome: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        """What its caller waits for."""
        self.attempt: Attempt | None = None
        """The live one."""
        self.prefixes = prefixes(request)
        self.ready = time
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.arrivals: list[float] = []
        self.cached_tokens = 0
        self.finish: FinishReason | None = None
        self.instances: list[tuple[str, str]] = []
        self.failures = 0
        """Failed attempts since the last one that gave a token."""
        self.moves = 0
        """Attempts that ended because another decode instance was emptier."""
        self.moves_to: Instance | None = None
        """Where the next attempt decodes, if that has room."""
        self.tried: list[str] = []
        """One line for each attempt that did not finish."""

    @property
    def name(self) -> str:
        return f"{self.request.trajectory}.{self.request.turn}"

    @property
    def in_service(self) -> bool:
        return self.attempt is not None and self.attempt.verdict is None

    @property
    def prompt_tokens(self) -> int:
        """Length of what the next attempt has to prefill."""
        return len(self.request.input_ids) + len(self.tokens)

    @property
    def budget(self) -> int:
        """Tokens that may still be generated."""
        return self.request.sampling.max_new_tokens - len(self.tokens)

    def next_request(self, bootstrap: Bootstrap | None) -> GenerateRequest:
        """The next attempt continues from the tokens retained so far, with what is left of the budget."""
        sampling = self.request.sampling
        if self.tokens:
            sampling = replace(sampling, max_new_tokens=self.budget)
        rid = f"{self.name}.{len(self.instances)}"
        context = self.request.input_ids + tuple(self.tokens)
        return GenerateRequest(rid, context, sampling, bootstrap, self.request.trace)

    def deliver(self, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Hand what will be kept to the listener; whether it has enough."""
        if self._listener is None or self._enough is not None:
            return False
        room = self.request.sampling.max_new_tokens - self._delivered
        for token, logprob in zip(tokens[: self._valid(tokens, room)], logprobs, strict=False):
            self._delivered += 1
            if self._listener(token, logprob):
                self._enough = self._delivered
                return True
        return False

    def keep(self, attempt: Attempt, verdict: Verdict) -> None:
        """Take over what an ended attempt has produced, up to the first stop token and within the budget."""
        room = self.budget if self._enough is None else self._enough - len(self.tokens)
        count = self._valid(attempt.tokens, room)
        for output in (attempt.tokens, attempt.logprobs, attempt.versions, attempt.arrivals):
            del output[count:]
        self.tokens += attempt.tokens
        self.logprobs += attempt.logprobs
        self.versions += attempt.versions
        self.arrivals += attempt.arrivals
        if len(self.instances) == 1:
            self.cached_tokens = attempt.cached_tokens
        self.finish = self._finish(attempt.finish)
        self.moves += verdict.end is End.MOVED
        if verdict.end is End.FAILED:
            self.failures = 0 if count else self.failures + 1
        if verdict.end is not End.FINISHED:
            self.tried.append(
                f"{attempt.rid} on {' and '.join(self.instances[-1])} {verdict.end.value}: {verdict.reason}"
            )

    def _valid(self, tokens: Sequence[int], room: int) -> int:
        """How many count: up to the first stop token, and within `room`."""
        count = min(len(tokens), room)
        return next((index + 1 for index in range(count) if tokens[index] in self._stops), count)

    def _finish(self, told: FinishReason | None) -> FinishReason | None:
        """How the turn ended, by its own tokens or by what the engine said; None where it has to go on."""
        if self.tokens and self.tokens[-1] in self._stops:
            return FinishReason.STOP
        if len(self.tokens) == self._enough:
            return FinishReason.STOP
        if self.budget <= 0:
            return FinishReason.LENGTH
        return None if told is FinishReason.ABORT else told
