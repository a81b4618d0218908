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
from math import ceil, expm1, inf

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
ZERO, ONE = np.array(0.0), np.array(1.0)
"""Arrays, as are other constants of the flow: beside a small array, numpy takes them in half the time of a float."""
LEAST = np.array(1e-100)
"""Divides in place of 0; what is divided is 0 then, too."""
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


@dataclass(frozen=True, slots=True)
class _Roles:
    """What follows from the instances that are at work in each role, which changes once, when flips are done.

    [n] for n candidates, or [2, n]: of decode instances, which only decode ("split"), and of mixed ones.
    """

    batches: Floats
    """Instances among which decodes are: split, mixed, and those that were there before; [3, n]."""
    shares: Floats
    """Of all decodes, where they are evened out."""
    room: Floats
    """Decodes that fit into the KV cache."""
    by_split: Floats
    """Prefills in a step of the flow at full speed."""
    by_mixed: Floats
    """The same, times the seconds from one step of a mixed instance that may prefill to the next."""
    by_ranks: Floats
    """Prefills in a step of the flow, split and mixed, where each rank does one after the other."""
    slots: Floats
    """Requests that may be there for prefill at once."""
    prompts: Floats
    """For each prefill of the mixed instances in a step of the flow, the prompts a rank gets in a second."""
    dt: Floats
    """Seconds of a step of the flow in which there is decoding, [3, n] as `batches`; 0 without instances."""


class _Mixed:
    """Steps of mixed instances while they prefill."""

    def __init__(self, costs: EngineCosts, new: float, prefix: float, every: int) -> None:
        chunks = _chunks(costs, new)
        least, most = new / chunks, max(float(costs.chunk), new / chunks)
        # A step in which a rank has between the least and the most tokens of prompts.
        least_s, self.long_s = (costs.prefill_step_s(tokens, prefix, 0.5) for tokens in (least, most))
        slope = (self.long_s - least_s) / (most - least) if most > least else 0.0
        self.prompts = most / new
        """Prompts in the longest step, of each rank."""
        self._full = np.array(new / most)
        self._fixed_s = np.array(least_s - slope * least)
        self._slope = np.array(slope * new / every)
        self._share = np.array(1.0 / every)
        self._minus_every, self._minus_least = np.array(-float(every)), np.array(-LEAST)
        self._ranks = np.array(float(costs.ranks))
        self._mean_s = ZERO

    def with_prompts(self, decode_s: Floats, rate: Floats) -> tuple[Floats, Floats]:
        """The mean seconds of a step, and the part of the steps in which a rank has no prompt, where `rate` prompts come to a
        rank in a second; `decode_s` are the seconds of a step without prompts."""
        # What waits at a rank when a step may prefill, and the chance that anything does, are negative, as `expm1` has them.
        rate = np.minimum(rate * self._minus_every, self._minus_least)
        longer_s = (self._fixed_s - decode_s) * self._share
        # The length of a step and what waits when one may prefill depend on each other; from one step of the flow to the
        # next they change little.
        mean = np.maximum(self._mean_s, decode_s)
        for _ in range(3):
            waiting = rate * mean
            chance = np.minimum(np.expm1(waiting), waiting * self._full)
            # What prompts make a step longer, averaged over the cadence. As the chance is between all that waits and what
            # waits in full chunks, the tokens of a rank are between the least and the most.
            extra_s = np.maximum(waiting / chance * self._slope + longer_s, ZERO)
            free = np.maximum(chance + ONE, ZERO)
            mean = decode_s + (ONE - free**self._ranks) * extra_s
        self._mean_s = mean
        return mean, ONE - (ONE - free) * self._share


class _Flow:
    """The flow for n candidates side by side. Decodes are [kind, place, n]: STAYED, RESUMED, FRESH; on split instances, on
    mixed ones.

    The arrays are small, so that a step of the flow costs what its calls to numpy cost: what stays the same from step to step
    is computed before (`_Roles`).
    """

    def __init__(
        self, work: Work, current: Allocation, candidates: Sequence[Allocation], costs: EngineCosts, bounds: Bounds
    ) -> None:
        self._work = work
        self._dt = work.ahead / STEPS
        self._flip_s = costs.flip_s
        self._current = np.array([current.prefill, current.decode, current.mixed], dtype=np.float64)
        self._target = np.array([(c.prefill, c.decode, c.mixed) for c in candidates], dtype=np.float64)
        self._any_mixed = bool(current.mixed or self._target[:, 2].any())
        new, prefix = _mean(work)
        self._prefill_s = costs.prefill_s(new, prefix)
        self._chunks = _chunks(costs, new)
        self._alone_s = _alone_s(costs, new, prefix)
        self._beside_s = _beside_s(work, current, costs)
        context = work.decoding_context if work.decoding else work.turn_prefix + work.turn_new
        context = max(context, 1.0)
        self._step_s = np.array([costs.decode_step_s(batch, context) for batch in BATCHES])
        self._ranks = costs.ranks
        # Of the turns that have ended: in a step of the flow this part comes back or never does, and that one comes back.
        back = -expm1(-self._dt / max(work.away, 1e-3))
        self._still_away, self._again = np.array(1.0 - back), np.array(back * work.again)
        # Requests that come in a step of the flow from elsewhere.
        self._returns = [np.array(requests * len(work.returns) / STEPS) for requests in work.returns]
        self._every = max(bounds.prefill_every, 1)
        self._mixed = _Mixed(costs, new, prefix, self._every)
        self._even_out = bounds.even_out
        self._slots = bounds.prefill_slots
        self._room = max(bounds.kv_tokens / context, 1.0)
        # Where turns outlast the flow, so does what they yield at its end.
        self._outlasts = min(max(work.decoding_left * work.token_s / work.ahead - 1.0, 0.0), LONGEST)
        decoding = max(work.decoding / max(current.decode + current.mixed, 1), 1.0)
        expected = float(self._step(np.array([decoding]))[0])
        if work.token_s and work.decoding and not current.mixed:
            # What is observed corrects the profile. Where instances are mixed, it has their prefills in it.
            self._step_s *= min(max(work.token_s / expected, 1.0 / CORRECTED), CORRECTED)
        self._token_s = expected / decoding
        self._begin()

    def _begin(self) -> None:
        """The state before the first step."""
        work, rows = self._work, len(self._target)
        self._working_on, self._holding = staying(self._current, self._target)
        able = self._current[1] + self._current[2]
        self._decoders = np.maximum(self._target[:, 1] + self._target[:, 2], 1.0)
        kept = self._holding / able if able else np.zeros(rows)
        self._decodes = np.zeros((3, 2, rows))
        self._decodes[STAYED] = kept * work.decoding * self._target[:, 1:].T / self._decoders
        # What instances that leave have in decode is cancelled: it has to be prefilled again before it gets any further.
        self._redone = (1.0 - kept) * work.decoding
        # Those wait, to become RESUMED, and others, to become FRESH.
        self._queue = np.array([self._redone, np.full(rows, work.queued)])
        # Turns that have ended and whose next request has yet to come, if it does.
        self._away = np.zeros(rows)
        # What has been done so far: prefills, and tokens of each decode.
        self._prefilled, self._decoded = np.zeros(rows), np.zeros((3, 2, rows))

    def run(self) -> Floats:
        # The part of each kind that ends with a token, negative, as `expm1` has it.
        per_token = np.empty_like(self._decodes)
        per_token[:FRESH], per_token[FRESH] = -self._work.decoding_ends, -1.0 / max(self._work.turn_output, 1.0)
        stayed, resumed, fresh = self._decodes
        resumed_and_fresh = self._decodes[RESUMED:]
        # Decodes on split and on mixed instances, and of those that stayed on either.
        there = np.empty((3, len(self._target)))
        on_each, on_either = there[:2], there[2]
        flips = min(ceil(self._flip_s / self._dt), STEPS)
        roles = self._roles(self._working_on)
        for step in range(STEPS):
            if step == flips:
                roles = self._roles(self._target)
                if self._even_out:
                    self._move()
            if step == STEPS - END:
                decoded_before = self._decoded.copy()
            self._come(step)
            if self._even_out:
                # Split and mixed instances even out, too.
                np.multiply((self._decodes[:, 0] + self._decodes[:, 1])[:, None], roles.shares, out=self._decodes)
            np.add(stayed, resumed, out=on_each)
            on_each += fresh
            np.add(stayed[0], stayed[1], out=on_either)
            step_s = self._step(there / roles.batches)
            placed = self._prefill(roles, on_each, step_s[1])
            tokens = self._tokens(roles, step_s, placed)
            self._decoded += tokens * self._decodes
            tokens *= per_token
            ended = self._decodes * np.expm1(tokens)
            self._decodes += ended
            self._away -= ended.sum(axis=(0, 1))
            resumed_and_fresh += placed
        at_the_end = self._token_s * (self._decoded - decoded_before).sum(axis=(0, 1))
        useful = self._prefill_s * (self._prefilled - self._redone) + self._token_s * self._decoded.sum(axis=(0, 1))
        useful -= FLIP_COST * self._flip_s * (self._target - self._working_on).sum(axis=1)
        found: Floats = (useful + self._outlasts * at_the_end * STEPS / END) / (1.0 + self._outlasts)
        return found

    def _roles(self, instances: Floats) -> _Roles:
        """While so many `instances` are at work, [n, 3]."""
        prefill, decode, mixed = instances.T
        decoders, prefillers = np.array([decode, mixed]), prefill + mixed
        return _Roles(
            batches=np.maximum([decode, mixed, self._holding], 1.0),
            shares=decoders / np.maximum(decode + mixed, 1.0),
            room=decoders * self._room,
            by_split=prefill * (self._dt / self._prefill_s),
            by_mixed=mixed * (self._dt * self._ranks * self._mixed.prompts),
            by_ranks=prefillers * (self._ranks * self._dt / self._alone_s),
            slots=self._slots * np.maximum(prefillers, 1.0),
            prompts=1.0 / (np.maximum(mixed, 1.0) * (self._dt * self._ranks)),
            dt=np.where([decode > 0, mixed > 0, mixed >= 0], self._dt, 0.0),
        )

    def _move(self) -> None:
        """Decodes move to the instances that have become able to decode, by way of another prefill."""
        stay = np.minimum(self._holding / self._decoders, 1.0)
        moving = (1.0 - stay) * self._decodes[STAYED].sum(axis=0)
        self._decodes[STAYED] *= stay
        self._queue[0] += moving
        self._redone += moving

    def _come(self, step: int) -> None:
        """Requests come: the next ones of turns that have ended, and those of trajectories elsewhere."""
        fresh = self._queue[1]
        fresh += self._away * self._again
        fresh += self._returns[step * len(self._returns) // STEPS]
        self._away *= self._still_away

    def _step(self, decodes: Floats) -> Floats:
        """Seconds of a step of an instance with so many decodes."""
        seconds: Floats = np.interp(decodes, BATCHES, self._step_s)
        return seconds

    def _prefill(self, roles: _Roles, there: Floats, decode_s: Floats) -> Floats:
        """Takes from the queue what is prefilled in this step of the flow: [kind, place, n], kinds RESUMED and FRESH.

        It is no more than waits, than fits into the KV cache beside the decodes that are `there`, and than the instances can
        do. `decode_s` are the seconds of a mixed instance's step without prompts.
        """
        between_s = (self._every - 1) * decode_s * (there[1] > 0) if self._every > 1 else ZERO
        able_to = np.maximum(roles.room - there, ZERO)
        by_split, by_mixed = able_to
        np.minimum(by_split, roles.by_split, out=by_split)
        if self._any_mixed:
            # Each rank a full chunk whenever a step may prefill.
            cycle_s = between_s + np.maximum(decode_s, self._mixed.long_s)
            np.minimum(by_mixed, roles.by_mixed / cycle_s, out=by_mixed)
        fastest = by_split + by_mixed
        places = able_to / np.maximum(fastest, LEAST)
        # Each chunk on a mixed instance also waits for its turn in the cadence.
        alone_s = self._alone_s + places[1] * ((self._chunks - 0.5) * between_s) if self._every > 1 else self._alone_s
        fastest = np.minimum(fastest, roles.by_ranks)
        queued = self._queue[0] + self._queue[1]
        there_are = np.minimum(queued, roles.slots) / np.maximum(fastest, LEAST)
        started = np.minimum(self._busy(there_are, alone_s) * fastest, queued)
        self._prefilled += started
        taken = self._queue * (started / np.maximum(queued, LEAST))
        self._queue -= taken
        placed: Floats = taken[:, None] * places
        return placed

    def _busy(self, there_are: Floats, alone_s: Floats | float) -> Floats:
        """The share of their fastest at which instances work with so many requests there: `there_are` for each prefill that
        they could do in a step of the flow.

        A rank does the prompts of its queue one after the other, unless full chunks are quicker. At the share u of that a
        request takes 1 + CROWDED u times what it takes alone, `alone_s`, and what it takes beside that; as many are there as
        come in that time (Little): u ((1 + CROWDED u) alone_s + beside_s) = there_are dt, solved for u.
        """
        half = (1.0 + self._beside_s / alone_s) / (2.0 * CROWDED)
        busy: Floats = np.minimum(np.sqrt(there_are * (self._dt / (CROWDED * alone_s)) + half * half) - half, ONE)
        return busy

    def _tokens(self, roles: _Roles, step_s: Floats, placed: Floats) -> Floats:
        """Tokens of each decode in this step of the flow, [kind, place, n], while prefills are `placed`.

        `step_s` are the seconds of steps without prompts: of split and mixed instances, and of those that had decodes before.
        """
        if self._any_mixed:
            prefills = placed[0, 1] + placed[1, 1]
            step_s[1], free = self._mixed.with_prompts(step_s[1], prefills * roles.prompts)
        progress = roles.dt / step_s
        if self._any_mixed:
            # A decode loses its token where its own rank prefills.
            progress[1] *= free
        tokens = np.empty_like(self._decodes)
        # Those that were there before others could decode are as many on each instance as they were.
        np.minimum(progress[:2], progress[2], out=tokens[STAYED])
        tokens[RESUMED:] = progress[:2]
        return tokens


def _chunks(costs: EngineCosts, new: float) -> int:
    """In which a prefill is done."""
    return max(ceil(new / costs.chunk), 1)


def _alone_s(costs: EngineCosts, new: float, prefix: float) -> float:
    """Seconds of a prefill on an instance that has nothing else to do."""
    chunks = _chunks(costs, new)
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
