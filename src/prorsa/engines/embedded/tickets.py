"""One request on the embedded server, between the core, which produces tokens, and the HTTP response, which takes them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from prorsa.engines.embedded.requests import Asked
from prorsa.engines.embedded.transfer import Handover, Pull
from prorsa.engines.protocol import FinishReason


@dataclass(slots=True)
class Ticket:
    """Ends once: `finish` is set by the last `put` and never changes."""

    asked: Asked
    weights_version: int
    news: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: list[int] = field(default_factory=list)
    """Produced and not yet taken; so are `logprobs`."""
    logprobs: list[float] = field(default_factory=list)
    taken: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    message: str = "aborted"
    """Why, if it was aborted."""
    in_core: bool = False
    handover: Handover | None = None
    """On a prefill engine."""
    awaited: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the decode side has room for the KV, or never will."""
    pull: Pull | None = None
    """On a decode engine."""

    def put(self, tokens: Sequence[int], logprobs: Sequence[float], finish: FinishReason | None) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.finish = finish
        if tokens or finish is not None:
            self.news.set()
        if finish is not None:
            self.awaited.set()

    def part(self, reason: str) -> None:
        """Leave the other leg, if there is one that still needs this one."""
        if self.pull is not None:
            self.pull.give_up()
        if self.handover is not None:
            self.handover.withdraw(reason)

    def take(self) -> bytes:
        """The next server-sent event, in the form of SGLang's incremental streaming."""
        self.news.clear()
        self.taken += len(self.tokens)
        pairs = zip(self.logprobs, self.tokens, strict=True)
        meta = {
            "id": self.asked.rid,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": len(self.asked.input_ids),
            "completion_tokens": self.taken,
            "cached_tokens": self.cached_tokens,
            "weight_version": str(self.weights_version),
            "output_token_logprobs": [(logprob, token, None) for logprob, token in pairs],
        }
        message = json.dumps({"output_ids": self.tokens, "meta_info": meta}, separators=(",", ":"))
        self.tokens, self.logprobs = [], []
        return b"data: " + message.encode() + b"\n\n"

    def _finish_reason(self) -> dict[str, str] | None:
        if self.finish is FinishReason.ABORT:
            return {"type": "abort", "message": self.message}
        return None if self.finish is None else {"type": self.finish.value}
