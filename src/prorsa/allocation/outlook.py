"""What an allocation would yield: the live work as a fluid that flows through the engines for a while.

Requests wait, are prefilled, decode, and come back after their tools (`Work`); each stage takes from the one before as much
as its instances can do at its present batch (`EngineCosts`). The allocations that are compared flow side by side, as the rows
of arrays. What a role switch costs is in the flow: the instances that change their role do nothing for its dead time, and
what they had in decode waits to be prefilled again.

A yield is useful work, in instance-seconds: each prefill counts what a busy instance takes for it, each decoded token what it
takes at the batch of now. In a steady state that is proportional to turns a second, whatever the weights.

The ranks of a mixed instance step together. Where each has a prompt chunk in one of its steps with probability rho, a step is
a long one with probability 1 - (1 - rho)^ranks, and each decode loses its token in the steps in which its own rank prefills
(paper, 3.2). A cadence of k lets one step in k prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from prorsa.allocation.costs import EngineCosts
from prorsa.allocation.solver import Allocation
from prorsa.forecast.work import Work

Floats = NDArray[np.float64]

STEPS = 60
"""Of the flow; stages that are shorter are smoothed, not lost."""
FILLED = 0.9
"""Of the speed at which all ranks prefill full chunks, what instances reach whose ranks have queues of their own."""
FLIP_COST = 0.1
"""What a flip costs beside its dead time, as a part of that: the caches that it empties."""
VARIED = 1.5
"""(1 + cv^2) / 2 of the prompt tokens that a request adds: agents' tool results have a cv of 1.7 or so."""
BATCHES = np.concatenate(([0.0], np.geomspace(1.0, 4096.0, 37)))
"""Decodes of an instance at which the costs are asked; between them they are interpolated."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What else limits an allocation. KV cache in tokens."""

    kv_tokens: float
    """C, of one instance."""
    prefill_every: int = 1
    """Cadence k of mixed instances."""
    even_out: bool = False
    """Whether decodes move to instances that have become able to decode, by way of another prefill."""


def yields(
    work: Work, current: Allocation, candidates: Sequence[Allocation], costs: EngineCosts, bounds: Bounds
) -> Floats:
    """Useful instance-seconds within `work.ahead` seconds under each of `candidates`, from `current` on."""
    return _Flow(work, current, candidates, costs, bounds).run()


class _Flow:
    def __init__(
        self, work: Work, current: Allocation, candidates: Sequence[Allocation], costs: EngineCosts, bounds: Bounds
    ) -> None:
        self._work = work
        self._dt = work.ahead / STEPS
        self._flip_s = costs.flip_s
        self._current = np.array([current.prefill, current.decode, current.mixed], dtype=np.float64)
        self._target = np.array([[c.prefill, c.decode, c.mixed] for c in candidates], dtype=np.float64)
        new, prefix = _mean(work)
        self._prefill_s = costs.prefill_s(new, prefix) / FILLED
        chunks = max(ceil(new / costs.chunk), 1)
        self._alone_s = chunks * costs.prefill_step_s(new / chunks, prefix, 1 / costs.ranks)
        self._new = new
        self._chunk = max(float(costs.chunk), new / chunks)
        self._least = new / chunks
        self._long_s = [costs.prefill_step_s(tokens, prefix, 0.5) for tokens in (self._least, self._chunk)]
        context = work.decoding_context if work.decoding else work.turn_prefix + work.turn_new
        self._context = max(context, 1.0)
        self._step_s = np.array([costs.decode_step_s(batch, self._context) for batch in BATCHES])
        self._ranks = costs.ranks
        self._mean_step_s = np.zeros(len(candidates))
        self._every = max(bounds.prefill_every, 1)
        self._even_out = bounds.even_out
        self._room = max(bounds.kv_tokens / self._context, 1.0)
        decoding = work.decoding / max(current.decode + current.mixed, 1)
        self._token_s = self._step(np.array([max(decoding, 1.0)]))[0] / max(decoding, 1.0)

    def run(self) -> Floats:
        work, dt = self._work, self._dt
        rows = len(self._target)
        staying = np.minimum(self._target, self._current)
        # What instances that leave have in decode is cancelled and waits for a prefill.
        able = self._current[1] + self._current[2]
        holding = staying[:, 1] + staying[:, 2]
        kept = holding / able if able else np.zeros(rows)
        queued = np.full(rows, work.queued) + (1 - kept) * work.decoding
        # Of those in decode: the ones that have begun by now, and the ones that begin later, in split and in mixed instances.
        decoders = np.maximum(self._target[:, 1] + self._target[:, 2], 1.0)
        share = self._target[:, 2] / decoders
        old = kept * work.decoding
        old_mixed, old_split = share * old, (1 - share) * old
        new_split, new_mixed = np.zeros(rows), np.zeros(rows)
        away = np.zeros(rows)
        useful = np.zeros(rows)
        left = max(work.decoding_left, 1.0)
        output = max(work.turn_output, 1.0)
        back = 1.0 - np.exp(-dt / max(work.away, 1e-3))
        slices = len(work.returns)
        flips = min(ceil(self._flip_s / dt), STEPS)
        for step in range(STEPS):
            working = staying if step < flips else self._target
            if step == flips and self._even_out:
                queued += (1.0 - np.minimum(holding / decoders, 1.0)) * (old_split + old_mixed)
                old_split *= np.minimum(holding / decoders, 1.0)
                old_mixed *= np.minimum(holding / decoders, 1.0)
            prefill, decode, mixed = working.T
            returning = back * away
            away -= returning
            queued += returning + work.returns[step * slices // STEPS] * slices / STEPS
            # Prefill: no more than waits, than fits into the decodes' KV cache, and than the instances can do.
            split, both = old_split + new_split, old_mixed + new_mixed
            room = np.maximum(decode * self._room - split, 0.0)
            by_split = np.where(decode > 0, np.minimum(prefill * dt / self._prefill_s, room), 0.0)
            fastest = self._fastest(both, mixed) * mixed * dt
            by_mixed = np.minimum(fastest, np.maximum(mixed * self._room - both, 0.0))
            able_to = by_split + by_mixed
            started = np.minimum(able_to * self._busy(queued, able_to / dt), queued)
            part = np.divide(by_mixed, able_to, out=np.zeros(rows), where=able_to > 0)
            to_mixed = started * part
            to_split = started - to_mixed
            queued -= started
            # Decode: tokens in this step of the flow, of each request that decodes.
            tokens_split = np.where(decode > 0, dt / self._step(split / np.maximum(decode, 1.0)), 0.0)
            tokens_mixed = self._tokens(both, mixed, to_mixed)
            # Those that were there before others could decode are as many on each instance as they were.
            crowded = dt / self._step((old_split + old_mixed) / np.maximum(holding, 1.0))
            tokens_old_split, tokens_old_mixed = np.minimum(tokens_split, crowded), np.minimum(tokens_mixed, crowded)
            ended_split, ended_mixed = (1.0 - np.exp(-tokens / output) for tokens in (tokens_split, tokens_mixed))
            over_split, over_mixed = (1.0 - np.exp(-tokens / left) for tokens in (tokens_old_split, tokens_old_mixed))
            ended = ended_split * new_split + ended_mixed * new_mixed + over_split * old_split + over_mixed * old_mixed
            decoded = tokens_split * new_split + tokens_mixed * new_mixed
            decoded += tokens_old_split * old_split + tokens_old_mixed * old_mixed
            old_split -= over_split * old_split
            old_mixed -= over_mixed * old_mixed
            new_split += to_split - ended_split * new_split
            new_mixed += to_mixed - ended_mixed * new_mixed
            away += work.again * ended
            useful += started * self._prefill_s + decoded * self._token_s
        return useful - FLIP_COST * self._flip_s * (self._current - staying).sum(axis=1)

    def _step(self, decodes: Floats) -> Floats:
        """Seconds of a step of an instance with so many decodes."""
        seconds: Floats = np.interp(decodes, BATCHES, self._step_s)
        return seconds

    def _busy(self, queued: Floats, rate: Floats) -> Floats:
        """The share u of their fastest `rate`, prefills a second, at which instances work with so many requests there.

        A request takes 1 + VARIED u / (1 - u) times what it takes alone, for each rank has a queue of its own (M/G/1), and as
        many are there as come in that time (Little); solved for u.
        """
        there = np.divide(queued, rate * self._alone_s, out=np.zeros(len(queued)), where=rate > 0)
        root = np.sqrt((1.0 + there) ** 2 + 4.0 * (VARIED - 1.0) * there)
        busy: Floats = (root - 1.0 - there) / (2.0 * (VARIED - 1.0))
        return busy

    def _fastest(self, decodes: Floats, mixed: Floats) -> Floats:
        """Prefills a second of a mixed instance: each rank a full chunk whenever a step may prefill."""
        decode_s = self._step(decodes / np.maximum(mixed, 1.0))
        cycle = (self._every - 1) * decode_s * (decodes > 0) + np.maximum(self._long_s[1], decode_s)
        fastest: Floats = FILLED * self._ranks * self._chunk / (self._new * cycle)
        return fastest

    def _tokens(self, decodes: Floats, mixed: Floats, prefills: Floats) -> Floats:
        """Tokens of each decode of mixed instances in this step of the flow, in which they do `prefills`."""
        engines = np.maximum(mixed, 1.0)
        decode_s = self._step(decodes / engines)
        rate = prefills / (engines * self._dt * self._ranks)
        # The length of a step and what waits when one may prefill depend on each other; from one step of the flow to the
        # next they change little.
        mean = np.maximum(self._mean_step_s, decode_s)
        for _ in range(3):
            waiting = rate * mean * self._every
            full = waiting * self._new / self._chunk
            chance = np.minimum(np.maximum(-np.expm1(-np.maximum(waiting, full)), full), 1.0)
            tokens = np.divide(waiting * self._new, chance, out=np.full(len(chance), self._least), where=chance > 0)
            long_s = np.maximum(np.interp(tokens, (self._least, self._chunk), self._long_s), decode_s)
            share = (1.0 - (1.0 - chance) ** self._ranks) / self._every
            mean = decode_s + share * (long_s - decode_s)
        self._mean_step_s = mean
        lost = chance / self._every
        return np.where(mixed > 0, self._dt / mean * (1.0 - lost), 0.0)


def _mean(work: Work) -> tuple[float, float]:
    """(new, prefix) tokens of a request, over those that wait and those that come; each of those that decode comes again."""
    coming = sum(work.returns) + work.decoding
    total = work.queued + coming
    if not total:
        return max(work.turn_new, 1.0), work.turn_prefix
    new = (work.queued * work.queued_new + coming * work.turn_new) / total
    prefix = (work.queued * work.queued_prefix + coming * work.turn_prefix) / total
    return max(new, 1.0), prefix
