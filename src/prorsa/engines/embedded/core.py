"""The embedded engine without its wire: continuous batching over a paged KV cache, one `step` at a time.

Synchronous and single-threaded: whoever owns an `EngineCore` calls it from one thread, and `step` takes milliseconds.
A request lives on in one of these places, and every way out of them frees its blocks:

    waiting   -> prefilling -> running -> finished          mixed
    waiting   -> prefilling -> held    -> released          prefill (`release` once the KV was handed over)
    reserving -> reserved   -> running -> finished          decode  (`admit` once the KV was imported)

Every rid that was accepted ends with exactly one `Output` whose `finish` is set, except held ones that are released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prorsa.engines.protocol import FinishReason, Load, Role, SamplingParams


class CoreError(Exception):
    """The engine core refused; the message says what was asked and why not."""


class QueueFull(CoreError):
    """The bounded queue is full. Try elsewhere or later."""


class RequestRefused(CoreError):
    """This request can never be served here: wrong role, or too long for the model's context or the KV pool."""


class NotIdle(CoreError):
    """The role can only change while no request is on the engine."""


class UnknownRequest(CoreError):
    """No such request (any more): it may have been aborted."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks allocated for a prompt on a decode engine."""

    first_missing_block: int
    """Blocks before this one are in the local prefix cache already; those from it on must be imported."""
    n_blocks: int
    """Blocks of the whole prompt; the last may be partly filled."""


@dataclass(frozen=True, slots=True)
class Output:
    """What one step did for one request."""

    rid: str
    token_ids: tuple[int, ...]
    """New tokens only."""
    logprobs: tuple[float, ...]
    finish: FinishReason | None
    """Set on the last output of a request. A held request (prefill role) keeps None: it ends with `release`."""
    cached_tokens: int
    """Prompt tokens that were not computed here."""
    prefilled: int
    """Prompt tokens whose KV is complete: blocks below `prefilled // block_tokens` can be exported, all of them when it
    is the whole prompt (which is the step that samples the first token)."""
    weights_version: int


@dataclass(frozen=True, slots=True)
class Filled:
    """A block that became full by computing here (never one that was imported): worth writing through to the store."""

    hash: bytes
    block: int
    """For `EngineCore.block_data`, until the next call of `step`."""


@dataclass(slots=True)
class StepOutput:
    outputs: list[Output] = field(default_factory=list)
    reserved: list[tuple[str, Reservation]] = field(default_factory=list)
    """Reservations that had to wait for space and are ready now."""
    filled: list[Filled] = field(default_factory=list)


def block_hashes(input_ids: Sequence[int], weights_version: int, block_tokens: int) -> list[bytes]:
    """Chained hashes of the full blocks of `input_ids`: 16 bytes each, naming the block and everything before it."""
    raise NotImplementedError


class EngineCore:
    """One engine. `block_tokens` is the KV block length, `kv_tokens` the pool's size, `prefill_chunk` the most prompt
    tokens a step computes, `max_running` bounds the requests that compute at once, `max_waiting` those that wait."""

    block_tokens: int
    block_nbytes: int
    """Size of one block: float32 [layers, 2, block_tokens, kv_heads, head_dim]."""
    role: Role
    weights_version: int
    model_path: str
    max_context: int

    def __init__(
        self,
        model_path: str,
        role: Role,
        *,
        kv_tokens: int,
        block_tokens: int = 16,
        prefill_chunk: int = 512,
        max_running: int = 32,
        max_waiting: int = 256,
        weights_version: int = 0,
    ) -> None:
        raise NotImplementedError

    # Prefill and mixed roles

    def submit(
        self, rid: str, input_ids: Sequence[int], sampling: SamplingParams, *, handover: bool = False
    ) -> None:
        """Queue a request. `handover` (prefill role only, and always there): compute the KV, sample the first token, and hold
        the blocks until `release`. Raises `QueueFull`, `RequestRefused`."""
        raise NotImplementedError

    def export_block(self, rid: str, index: int) -> memoryview:
        """Raw KV of one prompt block of a request (bytes view, valid until `step`, `release` or `abort`). Raises
        `UnknownRequest`, or `CoreError` when it is not computed yet."""
        raise NotImplementedError

    def release(self, rid: str) -> None:
        """The KV of a held request was handed over: forget it (full blocks stay cached). Raises `UnknownRequest`."""
        raise NotImplementedError

    # Decode role

    def reserve(self, rid: str, input_ids: Sequence[int], sampling: SamplingParams) -> Reservation | None:
        """Allocate the blocks of a prompt. None when there is no room now: a later `step` lists it in `reserved`.
        Raises `QueueFull`, `RequestRefused`."""
        raise NotImplementedError

    def import_block(self, rid: str, index: int, data: bytes | bytearray | memoryview) -> None:
        """Fill one reserved block. Raises `UnknownRequest`, or `CoreError` for a wrong size or index."""
        raise NotImplementedError

    def admit(self, rid: str, first_token: int, first_logprob: float) -> None:
        """All blocks are there: join the decode batch. The next `step` emits the first token. Raises `UnknownRequest`, or
        `CoreError` when blocks are missing."""
        raise NotImplementedError

    # KV store

    def missing_hashes(self, input_ids: Sequence[int]) -> list[bytes]:
        """Hashes of the blocks that a prefill of `input_ids` could reuse but that are not in the local prefix cache, in
        order. Fetch a leading run of them from the store and pass it to `import_prefix` just before `submit`."""
        raise NotImplementedError

    def import_prefix(self, hashes: Sequence[bytes], blocks: Sequence[bytes | bytearray | memoryview]) -> int:
        """Put blocks into the local prefix cache; the number that fitted. Both sequences are in chain order."""
        raise NotImplementedError

    def block_data(self, block: int) -> memoryview:
        """Raw bytes of a block that the latest step reported in `filled`."""
        raise NotImplementedError

    # All roles

    def abort(self, rid: str) -> bool:
        """Drop one request; the next `step` outputs it with `FinishReason.ABORT`. False when it is not here."""
        raise NotImplementedError

    def abort_all(self) -> list[str]:
        """Abort every request; their rids."""
        raise NotImplementedError

    def step(self) -> StepOutput:
        """One iteration: at most `prefill_chunk` prompt tokens, then one decode step for the running batch."""
        raise NotImplementedError

    def has_work(self) -> bool:
        """Whether `step` would do or report anything now."""
        raise NotImplementedError

    def set_role(self, role: Role) -> None:
        """Become `role`; weights and prefix cache stay. Raises `NotIdle`."""
        raise NotImplementedError

    def load_weights(self, path: str, version: int) -> None:
        """Replace the weights by the checkpoint at `path`: aborts every request and empties the prefix cache. Raises
        `ModelError` before anything changed when the checkpoint does not fit the model."""
        raise NotImplementedError

    def load(self) -> Load:
        raise NotImplementedError
