"""The one thing that the cluster and the rollout know of an inference engine.

Tokens in, tokens out. An `Engine` is a handle to one instance: the SGLang-protocol client, which drives both the embedded
engine and real SGLang, and the simulated engine implement it. Under prefill-decode disaggregation a turn has two legs
with the same `rid` and `Bootstrap`: one on a prefill instance, which computes the KV cache and hands it over, and one on
a decode instance, which streams the tokens (the first of them was sampled by the prefill instance).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    """Both stages on one engine, the colocated baseline (SGLang calls it "null")."""


ALL_ROLES = frozenset(Role)
SPLIT_ROLES = frozenset({Role.PREFILL, Role.DECODE})


def in_place(before: Role, after: Role) -> bool:
    """Whether an engine that can have both roles changes between them while it serves, and goes on with what it has: a mixed
    one can do all that others do, and a decode engine can also end what a mixed one has begun."""
    return after is Role.MIXED or (before, after) == (Role.MIXED, Role.DECODE)


class Tokens(Protocol):
    """Token ids of a context. A tuple is one; a simulation may count where it need not store."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def __getitem__(self, index: int, /) -> int: ...
    def __add__(self, other: tuple[int, ...], /) -> Tokens: ...
    def __hash__(self) -> int: ...


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


LEAST = 1e-6
"""A lower temperature is greedy, as SGLang has it, and a lower `top_p` leaves the likeliest token as this one does: engines
compute with 32 bits, in which much smaller numbers are 0 or make infinities."""
MOST_K = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Numbers are brought into the range that engines compute with, where that changes no output."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Signed, of 64 bits. With a seed, the token at an absolute position depends on the context's logits, the seed and that
    position alone, so that a resent request samples what the uninterrupted one would have. Two turns with equal contexts need
    two seeds to differ."""

    def __post_init__(self) -> None:
        if 0.0 < self.temperature < LEAST:
            object.__setattr__(self, "temperature", 0.0)
        if 0.0 < self.top_p < LEAST:
            object.__setattr__(self, "top_p", LEAST)
        if self.top_k > MOST_K:
            object.__setattr__(self, "top_k", MOST_K)


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Where the decode side meets the prefill side: the prefill instance's host and port, and a room for this attempt."""

    host: str
    port: int
    room: int


TraceHeaders = tuple[tuple[str, str], ...]
"""HTTP headers that say which trace a request is part of: `traceparent` and `tracestate` of W3C Trace Context."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    rid: str
    """Unique for each attempt; both legs of one attempt share it."""
    input_ids: Tokens
    sampling: SamplingParams
    bootstrap: Bootstrap | None = None
    """None on a mixed engine."""
    trace: TraceHeaders = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one leg's stream: NEW tokens only. The last chunk carries `finish`; it may have no tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Same length as `token_ids`: log-probability of each token under the sampled distribution's temperature."""
    weights_version: int
    cached_tokens: int = 0
    """Prompt tokens that were not computed on the prefill side (radix cache or KV store); known from the first chunk on."""
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Load:
    running: int
    waiting: int
    """Every request accepted but not running: queues, prefill bootstrap and in-flight, decode prealloc and transfer."""
    used_tokens: int
    """KV tokens held by live requests (cached, evictable blocks excluded)."""
    max_tokens: int
    """KV tokens that the pool holds."""
    mark: float | None = None
    """Changes at least once a second or at each step while the engine's scheduler lives, busy or idle. None: it does not
    tell."""

    @property
    def idle(self) -> bool:
        return self.running == 0 and self.waiting == 0


@dataclass(frozen=True, slots=True)
class EngineInfo:
    role: Role
    weights_version: int
    model_path: str


class EngineError(Exception):
    """An engine refused or failed; the message names the engine, what was asked and what it answered."""


class EngineGone(EngineError):
    """The engine does not answer, or broke off a stream: dead or unreachable. The request can be resent elsewhere."""


class EngineBusy(EngineError):
    """The engine's bounded queue is full, or it is not idle when it has to be. Try elsewhere or later."""


class Shortage(EngineBusy):
    """This process or its machine lacks what a connection takes: descriptors, ports, memory. It says nothing about the
    engine. Try again later."""


class Engine(Protocol):
    """One inference engine instance.

    `name` identifies it in events and records; `bootstrap_host` and `bootstrap_port` are where decode sides meet it when it
    is a prefill instance.
    """

    @property
    def name(self) -> str: ...
    @property
    def bootstrap_host(self) -> str: ...
    @property
    def bootstrap_port(self) -> int: ...
    @property
    def roles(self) -> frozenset[Role]:
        """Those that it can have without a restart."""
        ...

    @property
    def tells_progress(self) -> bool:
        """Whether its load says if its scheduler lives (`Load.mark`)."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Stream one leg. Ends after the chunk with `finish`. Closing the iterator early cancels the leg.

        On a prefill instance the stream is a single chunk, which comes when the KV cache has been handed over.
        Raises `EngineBusy` before the first chunk, `EngineGone` at any time.
        """
        ...

    async def abort(self, rid: str | None = None) -> None:
        """Abort one request, or all (`rid=None`). Their streams end with `FinishReason.ABORT` and the tokens so far."""
        ...

    async def load(self) -> Load: ...

    async def info(self) -> EngineInfo: ...

    async def switch_role(self, role: Role) -> None:
        """Become `role`, weights resident. Raises `EngineBusy` when not idle, unless the role changes `in_place`, and
        `EngineError` when the flip failed or the role is none of `roles`."""
        ...

    async def update_weights(self, path: str, version: int) -> None:
        """Load the checkpoint at `path`. Aborts live requests; KV of other versions is never read again."""
        ...

    async def healthy(self) -> bool:
        """Raises `Shortage` where it could not be asked."""
        ...

    async def close(self) -> None:
        """Release the client's own resources. The engine itself lives on."""
        ...
