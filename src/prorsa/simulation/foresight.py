"""What every trajectory will do under given roles, told from the scripts: a fast model of the simulator, for `Clairvoyant`.

All trajectories under all plans that are compared are the rows and columns of arrays. A turn is one stretch of work that is
gone through at an even pace: its prompt work, its output tokens, its tool; the pace is set by how long a decode step and the
wait for a prefill instance take then, and these by how many trajectories decode and how much prompt work comes. So
trajectories do not queue one by one, and within a turn nothing has an order; over many turns that is the same.

Prefill: an instance does the requests that come, each as fast as it would alone, after a wait that is what keeps their number
within what the instances can do. Decode: an instance's ranks share its requests evenly. The ranks of a mixed instance step
together: where a rank has a prompt with probability rho, a step is a long one with probability 1 - (1 - rho)^ranks, and each
decode loses its token in the steps in which its own rank prefills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prorsa.allocation import Allocation, EngineCosts
from prorsa.allocation.transition import staying
from prorsa.simulation.workloads.scripts import Script

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BATCHES = np.concatenate(([0.0, 0.5], np.geomspace(1.0, 512.0, 37)))
"""Decodes of a rank at which the costs are asked; between them they are interpolated."""
CONTEXTS = 33
SPREAD = 0.5
"""How much more the slowest rank decodes than the mean, in square roots of that."""
FULL = 0.97
"""Share of its time that an instance prefills at most: the rest goes while it waits for what comes next."""
MOST = 0.95
"""Utilisation above which waits grow no further: what is too much then waits to be let in."""
NEVER = 1e30
INSTANT = 1e-9
"""Seconds that a stretch takes at least."""
TINY = 1e-12
"""What a sum that may be 0 is divided by then."""
FIRST_DT, LAST_DT, GROWTH = 1.0, 12.0, 0.03
"""Seconds of the model's first steps, of its last ones, and how they grow with the time that has passed."""
ROUNDS = 8
"""In which the first rates are worked out: they depend on each other. Later ones follow from those of the step before."""
EVICT = 16
"""Steps after which rows that have ended under every plan are dropped."""


class Tables:
    """`EngineCosts`, asked once for all: times of arrays of requests, in seconds."""

    def __init__(self, costs: EngineCosts, max_context: int, prefill_every: int = 0) -> None:
        self.ranks = costs.ranks
        self.chunk = costs.chunk
        self.flip_s = costs.flip_s
        self.every = max(prefill_every, 1)
        self._contexts = np.linspace(0.0, max_context, CONTEXTS)
        self._lengths = np.unique(np.linspace(1.0, costs.chunk, 17).round())
        self._decode = np.array(
            [[costs.decode_step_s(batch * costs.ranks, c) for c in self._contexts] for batch in BATCHES]
        )
        self._prefill = np.array([[costs.prefill_step_s(n, c, 0.5) for c in self._contexts] for n in self._lengths])
        self._full = np.array([costs.prefill_step_s(costs.chunk, c, 1.0) for c in self._contexts])

    def decode_s(self, batch: Floats, context: Floats) -> Floats:
        """A step of an instance each of whose ranks decodes `batch` requests."""
        return _bilinear(self._decode, BATCHES, self._contexts, batch, context)

    def chunks(self, new: Floats) -> Floats:
        return np.maximum(np.ceil(new / self.chunk), 1.0)

    def step_s(self, new: Floats, prefix: Floats) -> Floats:
        """A step in which a rank prefills a chunk of such a request."""
        length = new / self.chunks(new)
        return _bilinear(self._prefill, self._lengths, self._contexts, length, prefix + new / 2)

    def busy_s(self, new: Floats, prefix: Floats) -> Floats:
        """What the request takes of an instance all of whose chunks are full."""
        full: Floats = np.interp(prefix + new / 2, self._contexts, self._full)
        return new / self.chunk / self.ranks * full


def _bilinear(table: Floats, xs: Floats, ys: Floats, x: Floats, y: Floats) -> Floats:
    i = np.clip(xs.searchsorted(x, side="right") - 1, 0, len(xs) - 2)
    j = np.clip(ys.searchsorted(y, side="right") - 1, 0, len(ys) - 2)
    right = np.clip((x - xs[i]) / (xs[i + 1] - xs[i]), 0.0, 1.0)
    up = np.clip((y - ys[j]) / (ys[j + 1] - ys[j]), 0.0, 1.0)
    low = table[i, j] * (1 - right) + table[i + 1, j] * right
    high = table[i, j + 1] * (1 - right) + table[i + 1, j + 1] * right
    result: Floats = low * (1 - up) + high * up
    return result


@dataclass(frozen=True, slots=True)
class Turns:
    """Stretches of work, one an element. Lengths in tokens, times in seconds."""

    tokens: Floats
    """Output that decode steps make."""
    away_s: Floats
    """In the tool, or in the reward after the last turn."""
    latency_s: Floats
    """Of the prefill, but for what it waits."""
    busy_s: Floats
    """What the prefill takes of an instance."""
    step_s: Floats
    """How long the steps are in which it is prefilled."""
    chunks: Floats
    """How many there are; 0 where nothing is left to prefill."""
    context: Floats
    """Tokens of the prompt."""

    def __len__(self) -> int:
        return len(self.tokens)

    def at(self, index: Ints) -> Turns:
        return Turns(*(getattr(self, name)[index] for name in self.__slots__))


def turns_of(script: Script, tables: Tables, cached: bool, shared: float = 0.0) -> Turns:
    """Of the whole script. `cached`: the context of the turn before need not be computed again, nor the part `shared` of the
    first prompt, which another member of the group has computed."""
    context, known = script.prompt_tokens, shared * script.prompt_tokens
    prompts, prefixes = [], []
    for turn in script.turns:
        prompts.append(context)
        prefixes.append(known if cached else 0)
        known = turn.cached(context)
        context = turn.next(context)
    away = [turn.tool_s for turn in script.turns]
    away[-1] += script.reward_s
    output = np.array([turn.output_tokens - 1.0 for turn in script.turns])
    prompt = np.array(prompts, float)
    return stretches(output, np.array(away), prompt, np.array(prefixes, float), prompt, tables)


def stretches(tokens: Floats, away_s: Floats, prompt: Floats, prefix: Floats, context: Floats, tables: Tables) -> Turns:
    """`prompt` is 0 where nothing is to be prefilled, `context` what the decode begins with."""
    new = np.maximum(prompt - prefix, 0.0)
    asked = new > 0
    step_s = np.where(asked, tables.step_s(np.maximum(new, 1.0), prefix), 0.0)
    chunks = np.where(asked, tables.chunks(new), 0.0)
    return Turns(tokens, away_s, chunks * step_s, tables.busy_s(new, prefix), step_s, chunks, context)


@dataclass(frozen=True, slots=True)
class Plan:
    """Roles to have at once, and others after `until` seconds."""

    first: Allocation
    until: float
    then: Allocation


@dataclass(frozen=True, slots=True)
class Field:
    """The trajectories at a moment, one a row."""

    now: Turns
    """What is left of the stretch that each is in."""
    following: Ints
    """Its next turn in `turns`, and behind its last one."""
    end: Ints
    turns: Turns
    """Of all trajectories, one after the other."""
    group: Ints
    """Numbers from 0 on; those from `live_groups` on wait until another one has ended, and are begun in this order."""
    live_groups: int


@dataclass(frozen=True, slots=True)
class Foreseen:
    """Of each plan. Times from now on, seconds."""

    end_s: Floats
    """When the last trajectory ends; the horizon where some does not."""
    mean_s: Floats
    """Mean time to the end of a trajectory, cut at the horizon."""
    tokens: Floats
    """Output tokens made."""


def foresee(
    field: Field, plans: Sequence[Plan], current: Allocation, tables: Tables, horizon: float = NEVER
) -> Foreseen:
    """What becomes of the trajectories under each of the plans, from the roles `current` on, up to `horizon` seconds."""
    return _Flow(field, plans, current, tables).run(horizon)


class _Flow:
    def __init__(self, field: Field, plans: Sequence[Plan], current: Allocation, tables: Tables) -> None:
        self._field = field
        self._tables = tables
        self._current = _counts([current])
        self._first = _counts([plan.first for plan in plans])
        self._then = _counts([plan.then for plan in plans])
        self._until = np.array([plan.until for plan in plans])
        count, now = len(plans), field.now
        shape = (count, len(now))
        waiting = field.group >= field.live_groups
        self._tokens = np.broadcast_to(np.where(waiting, 0.0, now.tokens), shape).copy()
        away = np.where(waiting, NEVER, now.away_s + now.latency_s)
        self._away = np.broadcast_to(away, shape).copy()
        self._busy = np.broadcast_to(now.busy_s, shape).copy()
        self._asks = np.broadcast_to((now.chunks > 0).astype(float), shape).copy()
        self._chunks = np.broadcast_to(now.chunks, shape).copy()
        self._step = np.broadcast_to(now.step_s, shape).copy()
        self._context = np.broadcast_to(now.context, shape).copy()
        self._left = np.ones(shape)
        """Part of its stretch that each has before it."""
        self._following = np.broadcast_to(field.following, shape).copy()
        self._end = field.end
        self._row = np.arange(len(now))
        self._members = np.broadcast_to(np.bincount(field.group), (count, int(field.group.max()) + 1)).copy()
        self._begun = np.full(count, field.live_groups)
        self._ended = np.full(shape, np.nan)
        self._token_s = np.full(count, 0.02)
        self._wait_s, self._chunk_wait_s = np.zeros(count), np.zeros(count)
        """What each request waits for, and each of its chunks."""
        self._mean_step_s = self._token_s.copy()
        self._made = np.zeros(count)

    def run(self, horizon: float) -> Foreseen:
        time, steps = 0.0, 0
        for _ in range(ROUNDS):
            self._rates(self._roles(time))
        while time < horizon and self._row.size:
            dt = min(FIRST_DT + GROWTH * time, LAST_DT, horizon - time)
            pace = self._rates(self._roles(time))
            self._made += dt * self._decoding / self._token_s
            self._left -= dt * pace
            self._pass_on(pace, time + dt)
            time, steps = time + dt, steps + 1
            if steps % EVICT == 0:
                self._evict()
        ended = np.where(np.isnan(self._ended), min(time, horizon), self._ended)[
            :, self._field.group < self._field.live_groups
        ]
        return Foreseen(ended.max(axis=1), ended.mean(axis=1), self._made)

    def _roles(self, time: float) -> Floats:
        """Instances of each role that are in service, a row a plan."""
        second = time >= self._until
        flipping = np.where(second, time < self._until + self._tables.flip_s, time < self._tables.flip_s)
        before = np.where(second[:, None], self._first, self._current)
        roles = np.where(second[:, None], self._then, self._first)
        return np.where(flipping[:, None], staying(before, roles)[0], roles)

    def _rates(self, roles: Floats) -> Floats:
        """The part of its stretch that each trajectory does in a second; sets the paces that this comes from."""
        tables = self._tables
        prefill, decode, mixed = roles.T
        total = self._tokens * self._token_s[:, None] + self._away
        total += self._asks * self._wait_s[:, None] + self._chunks * self._chunk_wait_s[:, None]
        pace: Floats = 1.0 / np.maximum(total, INSTANT)
        tokens = np.einsum("kn,kn->k", self._tokens, pace)
        context = self._context + self._tokens * (1.0 - self._left)
        context = np.einsum("kn,kn,kn->k", self._tokens, pace, context) / np.maximum(tokens, TINY)
        asked = np.einsum("kn,kn->k", self._asks, pace)
        busy = np.einsum("kn,kn->k", self._busy, pace)
        chunks = np.einsum("kn,kn->k", self._chunks, pace)
        step_s = np.einsum("kn,kn->k", self._step, pace) / np.maximum(asked, TINY)
        relief = np.einsum("kn,kn,kn->k", self._busy * self._asks, pace, pace)
        self._decoding = tokens * self._token_s
        engines = np.maximum(decode + mixed, 0.5)
        batch = self._decoding / (engines * tables.ranks)
        decode_s = tables.decode_s(batch + SPREAD * np.sqrt(batch), context)
        # Mixed instances.
        both = mixed > 0
        rate = chunks / (np.maximum(mixed, 1.0) * tables.ranks)
        chance = np.minimum(-np.expm1(-rate * self._mean_step_s * tables.every), MOST)
        long_s = np.maximum(step_s, decode_s)
        share = (1.0 - (1.0 - chance) ** tables.ranks) / tables.every
        self._mean_step_s = np.where(both, decode_s + share * (long_s - decode_s), decode_s)
        token_s = np.where(both, self._mean_step_s / (1.0 - chance / tables.every), decode_s)
        # Half way, as a factor: the more is prefilled, the slower are decodes, and the less is there to prefill.
        self._token_s = np.sqrt(self._token_s * token_s)
        cycle_s = (tables.every - 1) * decode_s + long_s
        able = FULL * np.where(both, mixed * long_s / cycle_s, prefill)
        # What a request waits for: until a step may begin, for others before it, and, where there are too many, to be let in.
        used = np.minimum(busy / np.maximum(able, INSTANT), MOST)
        servers = np.maximum(np.where(both, mixed, prefill), 1.0) * tables.ranks
        queue_s = step_s * used ** (np.sqrt(2.0 * (servers + 1.0)) - 1.0) / (servers * (1.0 - used))
        self._chunk_wait_s = np.where(both & (self._decoding > 0), (tables.every - 1) * decode_s, 0.0)
        # A step of an instance begins with whoever has come; with arrivals at random one goes on for this part of the time.
        coming = np.minimum(chunks / np.maximum(prefill, 1.0) * step_s, 50.0)
        stepping = coming * np.exp(coming) / (1.0 + coming * np.exp(coming))
        split_s = stepping * step_s / 2.0 + decode_s / 2.0
        least = np.where(both, tables.every * self._mean_step_s / 2.0 - self._chunk_wait_s, split_s) + queue_s
        # Newton's step from too short a wait, and from too long a one a step that does not go too far back.
        excess = (busy - able) / np.maximum(relief, TINY) / np.where(busy < able, able / np.maximum(busy, TINY), 1.0)
        self._wait_s = np.maximum(self._wait_s + excess, least)
        return pace

    def _pass_on(self, pace: Floats, time: float) -> None:
        """Those that are through with their stretch begin their next turns, with the time that they have over."""
        plan, row = np.nonzero(self._left <= 0)
        over = -self._left[plan, row] / pace[plan, row]
        while plan.size:
            following = self._following[plan, row]
            ends = following >= self._end[row]
            self._finish(plan[ends], row[ends], time - over[ends])
            plan, row, over, following = plan[~ends], row[~ends], over[~ends], following[~ends]
            self._following[plan, row] = following + 1
            self._load(plan, row, following)
            left = 1.0 - over / self._total(plan, row)
            self._left[plan, row] = left
            plan, row, left = plan[left <= 0], row[left <= 0], left[left <= 0]
            over = -left * self._total(plan, row)

    def _total(self, plan: Ints, row: Ints) -> Floats:
        """Seconds that the stretch takes as a whole."""
        tokens_s = self._tokens[plan, row] * self._token_s[plan]
        waits_s = self._asks[plan, row] * self._wait_s[plan] + self._chunks[plan, row] * self._chunk_wait_s[plan]
        total: Floats = tokens_s + self._away[plan, row] + waits_s
        least: Floats = np.maximum(total, INSTANT)
        return least

    def _load(self, plan: Ints, row: Ints, turn: Ints) -> None:
        turns = self._field.turns
        self._tokens[plan, row] = turns.tokens[turn]
        self._away[plan, row] = turns.away_s[turn] + turns.latency_s[turn]
        self._busy[plan, row] = turns.busy_s[turn]
        self._asks[plan, row] = 1.0
        self._chunks[plan, row] = turns.chunks[turn]
        self._step[plan, row] = turns.step_s[turn]
        self._context[plan, row] = turns.context[turn]

    def _finish(self, plan: Ints, row: Ints, times: Floats) -> None:
        for array in (self._tokens, self._busy, self._asks, self._chunks, self._step):
            array[plan, row] = 0.0
        self._away[plan, row] = NEVER
        self._left[plan, row] = 1.0
        self._ended[plan, self._row[row]] = times
        group = self._field.group[self._row[row]]
        np.subtract.at(self._members, (plan, group), 1)
        if self._members.shape[1] > self._field.live_groups:
            for one in np.unique(plan):
                self._replenish(int(one))

    def _replenish(self, plan: int) -> None:
        """As many groups begin as have ended."""
        ended = int((self._members[plan, : self._begun[plan]] == 0).sum())
        while self._begun[plan] < min(self._field.live_groups + ended, self._members.shape[1]):
            self._begin(plan)

    def _begin(self, plan: int) -> None:
        """The next group that waits."""
        rows = np.nonzero(self._field.group[self._row] == self._begun[plan])[0]
        self._begun[plan] += 1
        kept = self._row[rows]
        now = self._field.now
        self._tokens[plan, rows] = now.tokens[kept]
        self._away[plan, rows] = now.away_s[kept] + now.latency_s[kept]

    def _evict(self) -> None:
        """Drop the rows that have ended under every plan."""
        live = np.isnan(self._ended[:, self._row]).any(axis=0)
        if live.mean() > 0.8:
            return
        for name in ("_tokens", "_away", "_busy", "_asks", "_chunks", "_step", "_context", "_left", "_following"):
            setattr(self, name, np.ascontiguousarray(getattr(self, name)[:, live]))
        self._row, self._end = self._row[live], self._end[live]


def _counts(allocations: Sequence[Allocation]) -> Floats:
    return np.array([[one.prefill, one.decode, one.mixed] for one in allocations], dtype=np.float64)
