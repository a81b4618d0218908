"""What a policy that plans has to know of the engines: how long their work takes."""

from __future__ import annotations

from typing import Protocol


class EngineCosts(Protocol):
    """Of one instance. All times are in seconds; numbers of requests and tokens may be fractional, as means are."""

    @property
    def ranks(self) -> int:
        """Attention data-parallel ranks, which step together."""
        ...

    @property
    def chunk(self) -> int:
        """Prompt tokens that a rank prefills in one step."""
        ...

    @property
    def flip_s(self) -> float:
        """Dead time of a role switch after the drain."""
        ...

    def prefill_s(self, new: float, prefix: float) -> float:
        """What a request with `new` prompt tokens to compute after `prefix` cached ones takes of a busy instance, whose ranks
        all prefill such requests in full chunks: the instance does one over this in a second."""
        ...

    def prefill_step_s(self, tokens: float, prefix: float, share: float) -> float:
        """One step of an instance of which the part `share` of the ranks prefills `tokens` each, after `prefix`."""
        ...

    def decode_step_s(self, decodes: float, context: float) -> float:
        """One step of an instance that decodes `decodes` requests of `context` tokens each, spread evenly over its ranks: the
        time between two tokens of each."""
        ...
