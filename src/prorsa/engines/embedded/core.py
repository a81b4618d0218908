"""The embedded engine without its wire: continuous batching over a paged KV cache, one `step` at a time.

Synchronous and single-threaded: whoever owns an `EngineCore` calls it from one thread, and `step` takes milliseconds.
A request lives on in one of these places, and every way out of them frees its blocks:

    waiting   -> prefilling -> running -> finished          mixed
    waiting   -> prefilling -> held    -> released          prefill (`release` once the KV was handed over)
    reserving -> reserved   -> running -> finished          decode  (`admit` once the KV was imported)

Every rid that was accepted ends with exactly one `Output` whose `finish` is set, except held ones that are released.

Space: a mixed engine starts a request when its prompt fits and each running one can still take a block; when a decode
finds no block, the youngest request is retracted: it gives its blocks back, keeps its tokens and is computed again when
there is room. A decode engine would have to compute a prompt that was imported, so it admits only what fits to its very
last token.

The role says what is accepted. What is here goes on as it began, also where the role has changed meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

import numpy as np

from prorsa.engines.embedded.checkpoint import Array, ModelError, read_config, read_weights
from prorsa.engines.embedded.kv import BlockPool, Window, extend_hashes
from prorsa.engines.embedded.model import Model, Segment
from prorsa.engines.embedded.sampling import sample
from prorsa.engines.protocol import FinishReason, Load, Role, SamplingParams, in_place

Buffer = bytes | bytearray | memoryview


class CoreError(Exception):
    """The engine core refused; the message says what was asked and why not."""


class QueueFull(CoreError):
    """The bounded queue is full. Try elsewhere or later."""


class RequestRefused(CoreError):
    """This request can never be served here: wrong role, or too long for the model's context or the KV pool."""


class NotIdle(CoreError):
    """This change of role waits until no request is on the engine."""


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
    """Prompt tokens that were found in the local prefix cache."""
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
    hashes: list[bytes] = []
    extend_hashes(hashes, input_ids, weights_version, block_tokens)
    return hashes


class Stage(Enum):
    """Where a request is; see the picture above."""

    WAITING = auto()
    PREFILLING = auto()
    RUNNING = auto()
    HELD = auto()
    RESERVING = auto()
    RESERVED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """A request on the engine. RUNNING means `computed == len(tokens) - 1`: the last token is the next decode's input."""

    rid: str
    tokens: list[int]
    """The prompt, then what was generated."""
    prompt_tokens: int
    sampling: SamplingParams
    arrival: int
    stage: Stage
    handover: bool = False
    """Whether another engine decodes it."""
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Of the leading full blocks of `tokens`, as far as they were needed."""
    computed: int = 0
    """Leading tokens whose KV is here."""
    cached_tokens: int | None = None
    """Set when it first starts."""
    missing: set[int] = field(default_factory=set)
    """RESERVED: blocks that were not imported yet."""
    unsent: list[tuple[int, float]] = field(default_factory=list)
    """Tokens, with log-probabilities, that no output carried yet."""

    def finish(self) -> FinishReason | None:
        """Why generation ends after the last token, if it does."""
        if self.tokens[-1] in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if len(self.tokens) - self.prompt_tokens >= self.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None


class EngineCore:
    """One engine.

    `kv_tokens` is the size of the KV pool, `block_tokens` the length of its blocks, `prefill_chunk` the most prompt tokens
    that a step computes. `max_running` bounds the requests that are prefilling, reserved or running, `max_waiting` those
    that wait. Raises `ModelError` when the checkpoint cannot be served.
    """

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
        config = read_config(model_path)
        self.model_path = model_path
        self.role = role
        self.weights_version = weights_version
        self.block_tokens = block_tokens
        self._config = config
        self._model = Model(config, read_weights(model_path, config))
        self._pool = BlockPool(kv_tokens // block_tokens, config.layers, block_tokens, config.kv_heads, config.head_dim)
        self._window = Window(config.layers, config.kv_heads, config.head_dim, block_tokens)
        self._prefill_chunk = prefill_chunk
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._rng = np.random.default_rng()
        self._arrivals = count()
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        """WAITING, or RESERVING on a decode engine. First come, first served; a retracted request goes in front."""
        self._prefilling: list[Request] = []
        self._admitted: list[Request] = []
        """RUNNING from the next step on, which tells their first token."""
        self._running: list[Request] = []
        """The decode batch, in the order of the window's rows."""
        self._aborted: list[Output] = []

    @property
    def max_context(self) -> int:
        """Longest prompt plus output of a request, tokens."""
        return self._config.context

    @property
    def block_nbytes(self) -> int:
        """Size of one block: float32 [layers, 2, block_tokens, kv heads, head dim]."""
        return int(self._pool.data[0].nbytes)

    # Prefill and mixed roles

    def submit(self, rid: str, input_ids: Sequence[int], sampling: SamplingParams, *, handover: bool = False) -> None:
        """Queue a request. `handover` (always on a prefill engine, never elsewhere): compute the KV, sample the first
        token, and hold the blocks until `release`. Raises `QueueFull`, `RequestRefused`."""
        if self.role is Role.DECODE or handover is not (self.role is Role.PREFILL):
            kind = "a request to hand over" if handover else "a whole request"
            raise RequestRefused(f"request {rid}: {kind} cannot be submitted to a {self.role} engine")
        self._enqueue(self._request(rid, input_ids, sampling, Stage.WAITING, handover))

    def export_block(self, rid: str, index: int) -> memoryview:
        """Raw KV of one prompt block of a request (bytes, valid until `step`, `release` or `abort`). Raises
        `UnknownRequest`, or `CoreError` when it is not computed."""
        request = self._find(rid, Stage.WAITING, Stage.PREFILLING, Stage.HELD)
        done = min(request.computed, request.prompt_tokens)
        if not 0 <= index < self._blocks(done) or min((index + 1) * self.block_tokens, request.prompt_tokens) > done:
            raise CoreError(
                f"request {rid}: block {index} is not computed; {done} of {request.prompt_tokens} prompt tokens are"
            )
        return self.block_data(request.blocks[index])

    def release(self, rid: str) -> None:
        """The KV of a held request was handed over: forget it (full blocks stay cached). Raises `UnknownRequest`."""
        self._drop(self._find(rid, Stage.HELD))

    # Decode role

    def reserve(self, rid: str, input_ids: Sequence[int], sampling: SamplingParams) -> Reservation | None:
        """Allocate the blocks of a prompt. None when there is no room now: a later `step` lists it in `reserved`.
        Raises `QueueFull`, `RequestRefused`."""
        if self.role is not Role.DECODE:
            raise RequestRefused(
                f"request {rid}: blocks can only be reserved on a decode engine; this one is {self.role}"
            )
        request = self._request(rid, input_ids, sampling, Stage.RESERVING)
        if not self._waiting and self._has_room(request):
            self._requests[rid] = request
            return self._grant(request)
        self._enqueue(request)
        return None

    def import_block(self, rid: str, index: int, data: Buffer) -> None:
        """Fill one reserved block. Raises `UnknownRequest`, or `CoreError` for a wrong size or index."""
        request = self._find(rid, Stage.RESERVED)
        if index not in request.missing:
            raise CoreError(f"request {rid}: block {index} is not awaited; {sorted(request.missing)} are")
        self._fill(request.blocks[index], data)
        request.missing.remove(index)

    def admit(self, rid: str, first_token: int, first_logprob: float) -> None:
        """All blocks are there: join the decode batch. The next `step` tells the first token. Raises `UnknownRequest`, or
        `CoreError` when blocks are missing."""
        request = self._find(rid, Stage.RESERVED)
        if request.missing:
            raise CoreError(f"request {rid}: blocks {sorted(request.missing)} were not imported")
        request.stage = Stage.RUNNING
        request.computed = request.prompt_tokens
        for index in range(request.prompt_tokens // self.block_tokens):
            self._publish(request, index)
        self._append(request, first_token, first_logprob)
        self._admitted.append(request)

    # KV store

    def missing_hashes(self, input_ids: Sequence[int]) -> list[bytes]:
        """Hashes of the blocks that a prefill of `input_ids` could reuse but that are not in the local prefix cache, in
        order. Fetch a leading run of them from the store and pass it to `import_prefix` just before `submit`."""
        # The last token is always computed, for its logits.
        hashes = block_hashes(input_ids[:-1], self.weights_version, self.block_tokens)
        known = next((index for index, hash in enumerate(hashes) if hash not in self._pool), len(hashes))
        return hashes[known:]

    def import_prefix(self, hashes: Sequence[bytes], blocks: Sequence[Buffer]) -> int:
        """Put blocks, both sequences in chain order, into the local prefix cache; the number that fitted. Raises
        `CoreError` for a block of a wrong size."""
        taken = self._pool.allocate(min(len(hashes), self._pool.available))
        try:
            for index, (hash, data) in enumerate(zip(hashes[: len(taken)], blocks[: len(taken)], strict=True)):
                self._fill(taken[index], data)
                taken[index] = self._pool.publish(taken[index], hash)
        finally:
            self._pool.release(taken)
        return len(taken)

    def block_data(self, block: int) -> memoryview:
        """Raw bytes of a block that the latest step reported in `filled`."""
        return memoryview(self._pool.data[block]).cast("B")

    def cached_block(self, hash: bytes) -> memoryview | None:
        """Raw bytes of a block in the prefix cache, valid until `step`; None when it is not there."""
        blocks = self._pool.match([hash])
        self._pool.release(blocks)
        return self.block_data(blocks[0]) if blocks else None

    # All roles

    def abort(self, rid: str) -> bool:
        """Drop one request; the next `step` outputs it with `FinishReason.ABORT`. False when it is not here."""
        request = self._requests.get(rid)
        if request is None:
            return False
        self._aborted.append(self._output(request, FinishReason.ABORT))
        self._drop(request)
        return True

    def abort_all(self) -> list[str]:
        """Abort every request; their rids."""
        rids = list(self._requests)
        for rid in rids:
            self.abort(rid)
        return rids

    def has_work(self) -> bool:
        """Whether `step` would do or report anything now."""
        return bool(
            self._aborted
            or self._admitted
            or self._running
            or self._prefilling
            or (self._waiting and self._has_room(self._waiting[0]))
        )

    def step(self) -> StepOutput:
        """One iteration: one decode step for the running batch, then at most `prefill_chunk` prompt tokens."""
        step = StepOutput(outputs=self._aborted)
        self._aborted = []
        self._decode(step)
        self._join_admitted(step)
        self._grant_waiting(step)
        self._prefill(step)
        return step

    def set_role(self, role: Role) -> None:
        """Become `role`; weights and prefix cache stay, and requests too where the role changes `in_place`: it says what is
        accepted, not what is done. Raises `NotIdle`."""
        if self._requests and not in_place(self.role, role):
            raise NotIdle(f"role {self.role} cannot become {role}: {len(self._requests)} requests are on the engine")
        self.role = role
        if not self._requests:
            self._window.clear()

    def load_weights(self, path: str, version: int) -> None:
        """Replace the weights by the checkpoint at `path`: aborts every request and empties the prefix cache. Raises
        `ModelError` before anything changed when the checkpoint does not fit the model."""
        config = read_config(path)
        if config != self._config:
            raise ModelError(f"{path}: {config} differs from the running model {self._config}; load the same shapes")
        model = Model(config, read_weights(path, config))
        self.abort_all()
        self._pool.forget_all()
        self._model = model
        self.model_path = path
        self.weights_version = version

    def load(self) -> Load:
        running = len(self._prefilling) + len(self._admitted) + len(self._running)
        return Load(
            running=running,
            waiting=len(self._requests) - running,
            used_tokens=self._pool.held * self.block_tokens,
            max_tokens=len(self._pool) * self.block_tokens,
        )

    # Requests

    def _request(
        self, rid: str, input_ids: Sequence[int], sampling: SamplingParams, stage: Stage, handover: bool = False
    ) -> Request:
        if rid in self._requests:
            raise RequestRefused(f"request {rid}: it is on the engine already")
        if not input_ids or not 0 <= min(input_ids) <= max(input_ids) < self._config.vocabulary:
            raise RequestRefused(
                f"request {rid}: input_ids must be tokens in [0, {self._config.vocabulary}), at least one"
            )
        if sampling.max_new_tokens < 1:
            raise RequestRefused(f"request {rid}: max_new_tokens is {sampling.max_new_tokens}; at least 1 is needed")
        request = Request(rid, list(input_ids), len(input_ids), sampling, next(self._arrivals), stage, handover)
        total = len(input_ids) + sampling.max_new_tokens
        if total > self.max_context:
            raise RequestRefused(
                f"request {rid}: {len(input_ids)} prompt + {sampling.max_new_tokens} new tokens exceed the context of "
                f"{self.max_context}"
            )
        if self._most_blocks(request) > len(self._pool):
            raise RequestRefused(
                f"request {rid}: {len(input_ids)} prompt + {sampling.max_new_tokens} new tokens need "
                f"{self._most_blocks(request)} KV blocks of {self.block_tokens}; the pool has {len(self._pool)}"
            )
        return request

    def _enqueue(self, request: Request) -> None:
        if len(self._waiting) >= self._max_waiting:
            raise QueueFull(f"request {request.rid}: {len(self._waiting)} requests wait already, which is the bound")
        self._waiting.append(request)
        self._requests[request.rid] = request

    def _find(self, rid: str, *stages: Stage) -> Request:
        request = self._requests.get(rid)
        if request is None:
            raise UnknownRequest(f"request {rid}: not on the engine")
        if request.stage not in stages:
            raise CoreError(f"request {rid}: it is {request.stage.name}, not {' or '.join(s.name for s in stages)}")
        return request

    def _drop(self, request: Request) -> None:
        """Take a request off the engine."""
        self._unplace(request)
        del self._requests[request.rid]

    def _unplace(self, request: Request) -> None:
        """Take a request out of its queue or batch, and its blocks from it."""
        if request.stage in (Stage.WAITING, Stage.RESERVING):
            self._waiting.remove(request)
        elif request in self._prefilling:
            self._prefilling.remove(request)
        elif request in self._admitted:
            self._admitted.remove(request)
        elif request in self._running:
            row = self._running.index(request)
            self._window.leave(row)
            self._running[row] = self._running[-1]
            self._running.pop()
        self._pool.release(request.blocks)
        request.blocks = []

    def _append(self, request: Request, token: int, logprob: float) -> None:
        request.tokens.append(token)
        request.unsent.append((token, logprob))

    def _output(self, request: Request, finish: FinishReason | None) -> Output:
        tokens, logprobs = zip(*request.unsent, strict=True) if request.unsent else ((), ())
        request.unsent = []
        return Output(
            rid=request.rid,
            token_ids=tokens,
            logprobs=logprobs,
            finish=finish,
            cached_tokens=request.cached_tokens or 0,
            prefilled=min(request.computed, request.prompt_tokens),
            weights_version=self.weights_version,
        )

    def _tell(self, request: Request, step: StepOutput) -> bool:
        """Output the new tokens of a request, and drop it when it is finished. Whether it goes on."""
        finish = request.finish()
        step.outputs.append(self._output(request, finish))
        if finish is not None:
            self._drop(request)
        return finish is None

    # Blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _most_blocks(self, request: Request) -> int:
        """Blocks that a request holds at most here. The KV of the last token is never computed."""
        new = 1 if request.handover else request.sampling.max_new_tokens
        return self._blocks(request.prompt_tokens + new - 1)

    def _has_room(self, request: Request) -> bool:
        """Whether a waiting request can start now."""
        active = [r for r in self._requests.values() if r.stage in (Stage.PREFILLING, Stage.RESERVED, Stage.RUNNING)]
        if len(active) >= self._max_running:
            return False
        if request.stage is Stage.RESERVING:
            holders = [r for r in self._requests.values() if r.blocks]
            return sum(map(self._most_blocks, holders)) + self._most_blocks(request) <= len(self._pool)
        cached = self._pool.match(self._reusable(request))
        lacking = self._blocks(len(request.tokens)) - len(cached)
        growth = 0 if self.role is Role.PREFILL else len(active)
        fits = lacking + growth <= self._pool.available
        self._pool.release(cached)
        return fits

    def _reusable(self, request: Request) -> list[bytes]:
        """Hashes of the blocks that a prefill need not compute. The last token is always computed, for its logits."""
        extend_hashes(request.hashes, request.tokens, self.weights_version, self.block_tokens)
        return request.hashes[: (len(request.tokens) - 1) // self.block_tokens]

    def _fill(self, block: int, data: Buffer) -> None:
        raw = np.frombuffer(data, np.uint8)
        if raw.nbytes != self.block_nbytes:
            raise CoreError(
                f"a KV block has {self.block_nbytes} bytes, not {raw.nbytes}; do both engines run one model?"
            )
        self._pool.data[block].reshape(-1).view(np.uint8)[:] = raw

    def _publish(self, request: Request, index: int) -> bool:
        """Enter a full block into the prefix cache. Whether its content was new there."""
        extend_hashes(request.hashes, request.tokens, self.weights_version, self.block_tokens)
        hash = request.hashes[index]
        new = hash not in self._pool
        request.blocks[index] = self._pool.publish(request.blocks[index], hash)
        return new

    def _computed(self, request: Request, index: int, step: StepOutput) -> None:
        """A block of a request became full."""
        if self._publish(request, index):
            step.filled.append(Filled(request.hashes[index], request.blocks[index]))

    # Prefill

    def _prefill(self, step: StepOutput) -> None:
        chosen = self._choose()
        if not chosen:
            return
        segments = [
            Segment(r.tokens[r.computed : r.computed + size], r.computed, r.blocks, r.computed + size == len(r.tokens))
            for r, size in chosen
        ]
        logits = self._model.prefill(segments, self._pool)
        for request, size in chosen:
            first = request.computed // self.block_tokens
            request.computed += size
            for index in range(first, request.computed // self.block_tokens):
                self._computed(request, index, step)
        complete = [request for request, _ in chosen if request.computed == len(request.tokens)]
        if complete:
            self._sample(complete, logits)
        for request, _ in chosen:
            if request.handover:
                if request in complete:
                    self._prefilling.remove(request)
                    request.stage = Stage.HELD
                step.outputs.append(self._output(request, None))
            elif request in complete and self._tell(request, step):
                self._prefilling.remove(request)
                self._join(request)

    def _choose(self) -> list[tuple[Request, int]]:
        """What to prefill in this step: requests, started where there is room, each with a number of tokens."""
        chosen = []
        budget = self._prefill_chunk
        underway: set[bytes] = set()
        for request in self._candidates(underway):
            size = min(budget, len(request.tokens) - request.computed)
            chosen.append((request, size))
            underway.update(request.hashes[request.computed // self.block_tokens :])
            budget -= size
            if budget == 0:
                break
        return chosen

    def _candidates(self, underway: set[bytes]) -> Iterator[Request]:
        yield from list(self._prefilling)
        while self._waiting and self._waiting[0].stage is Stage.WAITING and self._has_room(self._waiting[0]):
            # What another request computes in this very step is found in the cache by the next one.
            if any(hash in underway for hash in self._reusable(self._waiting[0]) if hash not in self._pool):
                return
            yield self._start(self._waiting.popleft())

    def _start(self, request: Request) -> Request:
        request.stage = Stage.PREFILLING
        request.blocks = self._pool.match(self._reusable(request))
        request.computed = len(request.blocks) * self.block_tokens
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        request.blocks += self._pool.allocate(self._blocks(len(request.tokens)) - len(request.blocks))
        self._prefilling.append(request)
        return request

    # Decode

    def _decode(self, step: StepOutput) -> None:
        self._secure_blocks()
        batch = list(self._running)
        if not batch:
            return
        positions = [request.computed for request in batch]
        self._window.grow(max(positions) + 1)
        logits = self._model.decode([request.tokens[-1] for request in batch], positions, self._window)
        for row, request in enumerate(batch):
            index, offset = divmod(request.computed, self.block_tokens)
            request.computed += 1
            if offset == self.block_tokens - 1:
                self._window.store(row, index, self._pool, request.blocks[index])
                self._computed(request, index, step)
        self._sample(batch, logits)
        for request in batch:
            self._tell(request, step)

    def _secure_blocks(self) -> None:
        """Let every running request have a block for its next position, the oldest first."""
        needy = [r for r in self._running if r.computed == len(r.blocks) * self.block_tokens]
        for request in sorted(needy, key=lambda r: r.arrival):
            while request.stage is Stage.RUNNING and not self._pool.available:
                own = [r for r in self._prefilling if not r.handover]
                self._retract(max(own + self._running, key=lambda r: r.arrival))
            if request.stage is Stage.RUNNING:
                request.blocks += self._pool.allocate(1)

    def _retract(self, request: Request) -> None:
        """Put a request back in front of the queue, with its tokens but without its blocks."""
        self._unplace(request)
        request.stage = Stage.WAITING
        request.computed = 0
        self._waiting.appendleft(request)

    def _sample(self, requests: Sequence[Request], logits: Array) -> None:
        sampling = [request.sampling for request in requests]
        tokens, logprobs = sample(logits, sampling, [len(request.tokens) for request in requests], self._rng)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            self._append(request, token, logprob)

    def _join(self, request: Request) -> None:
        request.stage = Stage.RUNNING
        self._window.join(self._pool, request.blocks, request.computed)
        self._running.append(request)

    def _join_admitted(self, step: StepOutput) -> None:
        for request in list(self._admitted):
            if self._tell(request, step):
                self._admitted.remove(request)
                self._join(request)

    def _grant_waiting(self, step: StepOutput) -> None:
        while self._waiting and self._waiting[0].stage is Stage.RESERVING and self._has_room(self._waiting[0]):
            request = self._waiting.popleft()
            step.reserved.append((request.rid, self._grant(request)))

    def _grant(self, request: Request) -> Reservation:
        request.stage = Stage.RESERVED
        extend_hashes(request.hashes, request.tokens, self.weights_version, self.block_tokens)
        request.blocks = self._pool.match(request.hashes)
        first, total = len(request.blocks), self._blocks(request.prompt_tokens)
        request.cached_tokens = first * self.block_tokens
        request.blocks += self._pool.allocate(total - first)
        request.missing = set(range(first, total))
        return Reservation(first, total)
