"""One turn behind one request: whose it is, its sampling, its way through the cluster, and what is remembered of it.

Invariants. A turn runs in a task of its own, so that its trajectory is where the lifecycle says however slowly its client
reads. Leaving the context of `Turns.run` before the end cancels it, and waits until its engines are free.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import blake2b
from typing import Protocol

from prorsa.cluster.turns import Listener, TurnFailed, TurnRequest, TurnResult
from prorsa.engines.protocol import SamplingParams, TraceHeaders
from prorsa.gateway.asks import Ask, conversation_key
from prorsa.gateway.errors import ApiError
from prorsa.gateway.output import Output
from prorsa.gateway.toolcalls import openai_calls
from prorsa.gateway.trajectories import OTHER, Context, Lifecycle, Trajectories, Trajectory, key_of
from prorsa.rollout.tokenizer import ChatTokenizer
from prorsa.rollout.toolcalls import Parsed, parse

log = logging.getLogger(__name__)

SEED_BITS = 63
"""What every engine takes."""
GONE = "its client is gone"


class Control(Lifecycle, Protocol):
    """The control plane, as the gateway's turns see it."""

    async def generate(self, request: TurnRequest, listener: Listener | None = None) -> TurnResult: ...


class Running:
    """A turn in service."""

    def __init__(
        self,
        ask: Ask,
        trajectory: Trajectory,
        request: TurnRequest,
        output: Output,
        news: asyncio.Event,
        version: int,
    ) -> None:
        self.ask = ask
        self.trajectory = trajectory.id
        self.name = trajectory.name
        self.number = request.turn
        self.version = version
        """Weights version when it began."""
        self.prompt_ids = tuple(request.input_ids)
        self.output = output
        self.began = asyncio.get_running_loop().time()
        self.news = news
        """Set when a token has come, and at the end."""
        self.refusal: ApiError | None = None
        """What its client is answered where we cancelled it."""
        self.settled = False
        """Whether its trajectory has been told how it ended."""
        self.failure: str | None = None
        """Why it came to nothing, once it has."""
        self.task: asyncio.Task[TurnResult]

    def cancel(self, refusal: ApiError) -> None:
        self.refusal = refusal
        self.task.cancel()

    def outcome(self) -> TurnResult | ApiError:
        """How it ended, once it has."""
        if self.task.cancelled():
            return self.refusal or ApiError(503, "the turn was cancelled")
        error = self.task.exception()
        if error is None:
            return self.task.result()
        if isinstance(error, TurnFailed):
            return ApiError(503, str(error))
        log.error("turn %d of %s failed", self.number, self.trajectory, exc_info=error)
        return ApiError(500, "the gateway failed; its log says how")

    @property
    def result(self) -> TurnResult | None:
        """None until it has ended well."""
        task = self.task
        return task.result() if task.done() and not task.cancelled() and task.exception() is None else None

    def parsed(self) -> Parsed:
        """The whole text and its tool calls, once the turn has ended."""
        return parse(self.output.text) if self.ask.calls else Parsed(self.output.text, ())


class Turns:
    def __init__(
        self, control: Control, tokenizer: ChatTokenizer, trajectories: Trajectories, max_context: int, seed: int | None
    ) -> None:
        """A request without a seed gets one by `seed`, its trajectory and the turn, or a new one where that is None. A resend
        has the same."""
        self._control = control
        self._tokenizer = tokenizer
        self._trajectories = trajectories
        self._max_context = max_context
        self._seed = seed

    @asynccontextmanager
    async def run(self, ask: Ask, deadline: float, trace: TraceHeaders = ()) -> AsyncIterator[Running]:
        """`deadline` is on the loop's clock; `trace` is for the engines. Raises `ApiError`."""
        late = ApiError(504, "the answer took longer than gateway.request_timeout; ask for fewer tokens")
        try:
            async with asyncio.timeout_at(deadline):
                trajectory, ids = await self._trajectories.begin(ask.identity, ask.prompt)
        except TimeoutError:
            raise late from None
        sampling = self._sampling(ask, trajectory, len(ids))
        request = TurnRequest(trajectory.id, trajectory.turns, ids, sampling, trace)
        news = asyncio.Event()
        output = Output(
            self._tokenizer.decode_stream(skip_special_tokens=not ask.special),
            request.sampling.stop_token_ids,
            ask.stops,
            asyncio.get_running_loop().time,
            ask.calls,
            news.set,
            ask.keep_stop,
            ask.one_call,
        )
        running = Running(ask, trajectory, request, output, news, self._control.version)
        running.task = asyncio.create_task(self._serve(running, trajectory, request), name=f"turn of {trajectory.id}")
        running.task.add_done_callback(lambda _: self._ended(running, trajectory))
        timer = asyncio.get_running_loop().call_at(deadline, running.cancel, late)
        try:
            yield running
        finally:
            timer.cancel()
            if not running.task.done():
                running.task.cancel()
                await asyncio.wait({running.task})

    async def _serve(self, running: Running, trajectory: Trajectory, request: TurnRequest) -> TurnResult:
        result = await self._control.generate(request, running.output)
        context, tool = self._context(running, result.token_ids), self._tool(running)
        running.settled = True
        tokens = len(running.prompt_ids) + len(result.token_ids)
        self._trajectories.answered(trajectory, tokens, context, tool, running.ask.calls)
        return result

    def _ended(self, running: Running, trajectory: Trajectory) -> None:
        """A callback, for a task that is cancelled before its first step runs nothing of its own."""
        if not running.settled:
            cancelled = running.task.cancelled()
            error = running.refusal or GONE if cancelled else running.task.exception()
            running.failure = str(error)
            self._trajectories.failed(trajectory, running.failure)
        running.news.set()

    def _sampling(self, ask: Ask, trajectory: Trajectory, tokens: int) -> SamplingParams:
        asked = ask.sampling
        seed = self._seed_of(trajectory) if asked.seed is None else asked.seed
        return replace(asked, max_new_tokens=min(asked.max_new_tokens, self._max_context - tokens), seed=seed)

    def _seed_of(self, trajectory: Trajectory) -> int:
        if self._seed is None:
            return secrets.randbits(SEED_BITS)
        turn = f"{self._seed} {trajectory.turns} {trajectory.id}"
        return int.from_bytes(blake2b(turn.encode(), digest_size=8).digest(), "big", signed=True)

    def _tool(self, running: Running) -> str | None:
        calls = running.parsed().calls
        if not calls:
            return None
        return calls[0].name if calls[0].name in running.ask.tools else OTHER

    def _context(self, running: Running, output: Sequence[int]) -> Context:
        """What a request that continues this turn starts with: all that its client has seen.

        That is without the token that ended the turn (but for a chat's end-of-turn token, which the template writes again),
        and without what came at and behind a stop string.
        """
        ask, kept = running.ask, list(output)
        if isinstance(running.output.stopped, int) and not ask.keep_stop and not self._ends_answer(ask, kept[-1]):
            kept.pop()
        # An empty answer is no sign by which to know a trajectory again: its prompt may be another's too.
        distinct = len(kept) > 0
        if ask.prompt.ids is not None:
            return Context(key_of((*running.prompt_ids, *kept)), None, distinct)
        decode = self._tokenizer.decode
        written = decode(kept, skip_special_tokens=False)
        while isinstance(running.output.stopped, str) and kept and not running.output.text.startswith(written):
            kept.pop()
            written = decode(kept, skip_special_tokens=False)
        conversation = None
        if ask.messages:
            parsed = running.parsed()
            calls = openai_calls(parsed.calls, running.trajectory, running.number)
            answer = {"role": "assistant", "content": parsed.content, "tool_calls": calls}
            conversation = conversation_key([*ask.messages, answer])
        ids = array("i", (*running.prompt_ids, *kept))
        return Context((ask.prompt.text + written).encode(), ids, distinct, conversation)

    def _ends_answer(self, ask: Ask, token: int) -> bool:
        return ask.kind == "chat" and token == self._tokenizer.eos_ids[0]
