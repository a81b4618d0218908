"""What an allocation would yield: the live work as a fluid that flows through the engines for a while.

Requests wait, are prefilled, decode, and come back after their tools (`Work`); each stage takes from the one before as much
as its instances can do at its present batch (`EngineCosts`). The allocations that are compared flow side by side, as the rows
of arrays. What a role switch costs is in the flow: the instances that change their role do nothing for its dead time, and
what they had in decode waits to be prefilled again; those that change in place go on.

A yield is useful work, in instance-seconds: each prefill counts what a busy instance takes for it, each decoded token what it
takes at the batch of now; a prefill that has to be done again counts once. In a steady state that is proportional to turns a
second, whatever the weights.

The ranks of a mixed instance step together. Where each has a prompt chunk in one of its steps with probability rho, a step is
a long one with probability 1 - (1 - rho)^ranks, and each decode loses its token in the steps in which its own rank prefills
(paper, 3.2). A cadence of k lets one step in k prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from prorsa.allocation.costs import EngineCosts
from prorsa.allocation.solver import Allocation
from prorsa.allocation.transition import staying
from prorsa.forecast.work import Work

Floats = NDArray[np.float64]

STEPS = 60
"""Of the flow; stages that are shorter are smoothed, not lost."""
END = STEPS // 3
"""The last ones of them, whose decodes say what goes on."""
STAYED, RESUMED, FRESH = range(3)
"""Decodes that go on where they are, that go on after they were cancelled, and that have yet to begin."""
FLIP_COST = 0.1
"""What a flip costs beside its dead time, as a part of that: the caches that it empties."""
CROWDED = 4.5
"""How a prefill's latency grows with the share u of full speed at which its instance works: 1 + CROWDED u times what it is
alone, since ranks wait for each other and prompts for their ranks. Fitted, see docs/policy.md."""
LONGEST = 10.0
"""So many times as long as the flow does the yield of decodes at its end go on at most, where turns do."""
CORRECTED = 2.0
"""At most by this factor does what is observed correct the profile."""
BATCHES = np.concatenate(([0.0], np.geomspace(1.0, 4096.0, 37)))
"""Decodes of an instance at which the costs are asked; between them they are interpolated."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What else limits an allocation. KV cache in tokens."""

    kv_tokens: float
    """C, of one instance."""
    prefill_slots: float = inf
    """Requests that the router lets an instance prefill at once."""
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
        self._prefill_s = costs.prefill_s(new, prefix)
        chunks = max(ceil(new / costs.chunk), 1)
        self._alone_s = _alone_s(costs, new, prefix)
        self._beside_s = _beside_s(work, current, costs)
        self._new = new
        self._chunks = chunks
        self._chunk = max(float(costs.chunk), new / chunks)
        self._least = new / chunks
        self._long_s = [costs.prefill_step_s(tokens, prefix, 0.5) for tokens in (self._least, self._chunk)]
        context = work.decoding_context if work.decoding else work.turn_prefix + work.turn_new
        context = max(context, 1.0)
        self._step_s = np.array([costs.decode_step_s(batch, context) for batch in BATCHES])
        self._ranks = costs.ranks
        self._mean_step_s = np.zeros(len(candidates))
        self._every = max(bounds.prefill_every, 1)
        self._even_out = bounds.even_out
        self._slots = bounds.prefill_slots
        self._room = max(bounds.kv_tokens / context, 1.0)
        # Where turns outlast the flow, so does what they yield at its end.
        self._outlasts = min(max(work.decoding_left * work.token_s / work.ahead - 1.0, 0.0), LONGEST)
        decoding = max(work.decoding / max(current.decode + current.mixed, 1), 1.0)
        expected = self._step(np.array([decoding]))[0]
        if work.token_s and work.decoding and not current.mixed:
            # What is observed corrects the profile. Where instances are mixed, it has their prefills in it.
            self._step_s *= min(max(work.token_s / expected, 1.0 / CORRECTED), CORRECTED)
        self._token_s = expected / decoding

    def run(self) -> Floats:
        work, dt, prefill_s = self._work, self._dt, self._prefill_s
        rows = len(self._target)
        working_on, holding = staying(self._current, self._target)
        able = self._current[1] + self._current[2]
        decoders = np.maximum(self._target[:, 1] + self._target[:, 2], 1.0)
        kept = holding / able if able else np.zeros(rows)
        decodes = np.zeros((3, 2, rows))
        decodes[STAYED] = kept * work.decoding * self._target[:, 1:].T / decoders
        # What instances that leave have in decode is cancelled: it has to be prefilled again before it gets any further.
        resumed = (1.0 - kept) * work.decoding
        queued = work.queued + resumed
        useful = -prefill_s * resumed
        away, at_the_end = np.zeros(rows), np.zeros(rows)
        left, output = max(work.decoding_left, 1.0), max(work.turn_output, 1.0)
        length = np.array([left, left, output])[:, None, None]
        back = -np.expm1(-dt / max(work.away, 1e-3))
        slices = len(work.returns)
        flips = min(ceil(self._flip_s / dt), STEPS)
        for step in range(STEPS):
            working = working_on.T if step < flips else self._target.T
            prefill, decode, mixed = working
            if step == flips and self._even_out:
                stay = np.minimum(holding / decoders, 1.0)
                moving = (1.0 - stay) * decodes[STAYED].sum(axis=0)
                decodes[STAYED] *= stay
                queued += moving
                resumed += moving
                useful -= prefill_s * moving
            returning = back * away
            away -= returning
            queued += returning + work.returns[step * slices // STEPS] * slices / STEPS
            if self._even_out:
                # Split and mixed instances even out, too.
                decodes = decodes.sum(axis=1, keepdims=True) * (working[1:] / np.maximum(decode + mixed, 1.0))
            split, both = decodes.sum(axis=0)
            # Prefill: no more than waits, than fits into the decodes' KV cache, and than the instances can do.
            room = np.maximum(decode * self._room - split, 0.0)
            by_split = np.where(decode > 0, np.minimum(prefill * dt / prefill_s, room), 0.0)
            # Of a mixed instance, without the prompts between.
            decode_s = self._step(both / np.maximum(mixed, 1.0))
            between_s = (self._every - 1) * decode_s * (both > 0)
            by_mixed = np.minimum(
                self._fastest(decode_s, between_s) * mixed * dt, np.maximum(mixed * self._room - both, 0.0)
            )
            able_to = by_split + by_mixed
            alone = self._latency(between_s, by_mixed, able_to)
            started = np.minimum(able_to * self._busy(queued, prefill + mixed, able_to / dt, alone), queued)
            to_mixed = np.divide(started * by_mixed, able_to, out=np.zeros(rows), where=able_to > 0)
            placed = np.array([started - to_mixed, to_mixed])
            old = np.divide(resumed, queued, out=np.zeros(rows), where=queued > 0)
            queued -= started
            resumed -= old * started
            # Decode: tokens of each request in this step of the flow.
            tokens = np.empty_like(decodes)
            tokens[:, 0] = np.where(decode > 0, dt / self._step(split / np.maximum(decode, 1.0)), 0.0)
            tokens[:, 1] = self._tokens(decode_s, mixed, to_mixed)
            # Those that were there before others could decode are as many on each instance as they were.
            crowded = dt / self._step(decodes[STAYED].sum(axis=0) / np.maximum(holding, 1.0))
            tokens[STAYED] = np.minimum(tokens[STAYED], crowded)
            ended = decodes * -np.expm1(-tokens / length)
            decoded = self._token_s * (tokens * decodes).sum(axis=(0, 1))
            useful += prefill_s * started + decoded
            at_the_end += decoded * (step >= STEPS - END)
            decodes -= ended
            decodes[RESUMED] += old * placed
            decodes[FRESH] += (1.0 - old) * placed
            away += work.again * ended.sum(axis=(0, 1))
        useful -= FLIP_COST * self._flip_s * (self._target - working_on).sum(axis=1)
        found: Floats = (useful + self._outlasts * at_the_end * STEPS / END) / (1.0 + self._outlasts)
        return found

    def _step(self, decodes: Floats) -> Floats:
        """Seconds of a step of an instance with so many decodes."""
        seconds: Floats = np.interp(decodes, BATCHES, self._step_s)
        return seconds

    def _latency(self, between_s: Floats, by_mixed: Floats, able_to: Floats) -> Floats:
        """Seconds of a prefill alone; on a mixed instance each chunk also waits for its turn in the cadence, `between_s`."""
        waits = (self._chunks - 0.5) * between_s
        share = np.divide(by_mixed, able_to, out=np.zeros(len(able_to)), where=able_to > 0)
        latency: Floats = self._alone_s + share * waits
        return latency

    def _busy(self, queued: Floats, instances: Floats, rate: Floats, alone: Floats) -> Floats:
        """The share of their fastest `rate`, prefills a second, at which instances work with so many requests there.

        A rank does the prompts of its queue one after the other, unless full chunks are quicker. At the share u of that a
        request takes 1 + CROWDED u times what it takes `alone`, and what it takes beside that; as many are there as come in
        that time (Little): solved for u. No more are there than the instances have slots.
        """
        speed = np.minimum(rate, instances * self._ranks / self._alone_s)
        there = np.minimum(queued, self._slots * np.maximum(instances, 1.0))
        there = np.divide(there, speed * alone, out=np.zeros(len(queued)), where=speed > 0)
        least = 1.0 + self._beside_s / alone
        busy = np.minimum((np.sqrt(least**2 + 4.0 * CROWDED * there) - least) / (2.0 * CROWDED), 1.0)
        share: Floats = np.divide(busy * speed, rate, out=np.zeros(len(queued)), where=rate > 0)
        return share

    def _fastest(self, decode_s: Floats, between_s: Floats) -> Floats:
        """Prefills a second of a mixed instance: each rank a full chunk whenever a step may prefill."""
        cycle = between_s + np.maximum(self._long_s[1], decode_s)
        fastest: Floats = self._ranks * self._chunk / (self._new * cycle)
        return fastest

    def _tokens(self, decode_s: Floats, mixed: Floats, prefills: Floats) -> Floats:
        """Tokens of each decode of mixed instances in this step of the flow, in which they do `prefills`."""
        rate = prefills / (np.maximum(mixed, 1.0) * self._dt * self._ranks)
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


def _alone_s(costs: EngineCosts, new: float, prefix: float) -> float:
    """Seconds of a prefill on an instance that has nothing else to do."""
    chunks = max(ceil(new / costs.chunk), 1)
    return chunks * costs.prefill_step_s(new / chunks, prefix, 1 / costs.ranks)


def _beside_s(work: Work, current: Allocation, costs: EngineCosts) -> float:
    """What prefills took of late beyond what they should have at the share of full speed at which the instances worked:
    prefixes that had to be fetched, handovers that waited. 0 where instances are mixed, whose decodes prefills wait for."""
    if current.mixed or not current.prefill or not work.prefilled_rate:
        return 0.0
    new, prefix = max(work.prefilled_new, 1.0), work.prefilled_prefix
    alone = _alone_s(costs, new, prefix)
    fastest = min(1.0 / costs.prefill_s(new, prefix), costs.ranks / alone)
    busy = min(work.prefilled_rate / (current.prefill * fastest), 1.0)
    return max(work.prefilled_s - alone * (1.0 + CROWDED * busy), 0.0)


def _mean(work: Work) -> tuple[float, float]:
    """(new, prefix) tokens of a request, over those that wait and those that come; each of those that decode comes again."""
    coming = sum(work.returns) + work.decoding
    total = work.queued + coming
    if not total:
        return max(work.turn_new, 1.0), work.turn_prefix
    new = (work.queued * work.queued_new + coming * work.turn_new) / total
    prefix = (work.queued * work.queued_prefix + coming * work.turn_prefix) / total
    return max(new, 1.0), prefix
