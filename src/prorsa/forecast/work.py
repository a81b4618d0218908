"""Where the live trajectories are and what comes next for them: what a model of the engines' yield starts from."""

from __future__ import annotations

from dataclasses import dataclass

SLICES = 6
"""Parts into which `Work.returns` divides the time ahead."""
AHEAD = 3.0
"""How far that reaches, in horizons S: far enough for what a role switch costs to be earned back."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests and trajectories are expected numbers and may be fractional; tokens of a request are means.

    `new` prompt tokens are those that have to be computed, the `prefix` before them is in a cache: of a trajectory that goes
    on, its former context, unless the weights have changed since.
    """

    queued: float
    """Requests in READY and PREFILL."""
    queued_new: float
    queued_prefix: float
    decoding: float
    """Trajectories in DECODE."""
    decoding_left: float
    """Output tokens that the turn of such a trajectory has still to make: of memoryless turns of which as many would end
    within a horizon, for the real mean is that of a few long ones; or that, if it is less."""
    decoding_ends: float
    """The part of these turns that ends with a token, within a horizon."""
    decoding_context: float
    """Tokens of context that it has."""
    returns: tuple[float, ...]
    """Requests that come from trajectories that are neither queued nor decoding now (in a tool, starting, yet to be
    sampled), in `SLICES` consecutive parts of the next `ahead` seconds."""
    ahead: float
    """Seconds, `AHEAD` horizons."""
    turn_new: float
    """Of a request that is to come; so are the next two."""
    turn_prefix: float
    turn_output: float
    """Output tokens of its turn, as `decoding_left`."""
    again: float
    """Probability that a turn which ends now is followed by another request of its trajectory within `ahead` seconds."""
    away: float
    """Seconds from the end of the turn to that request, where it comes."""
    token_s: float = 0.0
    """Seconds between two tokens of a decode that waits for no prompts of its instance, as observed of late; 0 until any was.
    It corrects what a profile says, and so does the rest: means over the last few hundred prefills."""
    prefilled_s: float = 0.0
    """Seconds from the placement of a request to its first token: the fetch of its prefix and the handover are in it."""
    prefilled_rate: float = 0.0
    """Prefills a second, of all instances."""
    prefilled_new: float = 0.0
    prefilled_prefix: float = 0.0
