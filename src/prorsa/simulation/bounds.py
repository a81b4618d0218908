"""The least time that a step of a scenario can take, whatever decides the roles: from the scripts and the profile alone.

A step is no shorter than

- the *path* of any of its trajectories, alone on the cluster: its sandbox, the quickest prefill of what no cache can have,
  each token at the quickest decode step there is, its tools and its reward;
- its *work*: all ranks of the cluster, whatever their roles, prefill and decode everything at the best rate of any batch,
  while no more requests decode than there are trajectories, less those that their tools keep away.

Both follow the engines' physics (`prorsa.simulation.engines.core`): in a step a rank prefills or decodes; a step lasts at
least as long as any rank's own part and what all ranks then do together. To add up over ranks and steps of any kind, step
times are bounded from below by functions that are linear in tokens and in context; of those that are tried, each of which
is a bound, the best one counts.

KV-cache capacity, transfers, queues and the dead time of role switches are left out: they can only add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np
from numpy.typing import NDArray

from prorsa.config import ConfigError
from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import Profile
from prorsa.simulation.scenario import Scenario
from prorsa.simulation.workloads.launches import Launches
from prorsa.simulation.workloads.models import build_workload
from prorsa.simulation.workloads.scripts import Script

Floats = NDArray[np.float64]

CONTEXTS = 48
"""Contexts at which the profile is asked."""
CHUNKS = 96
"""Chunk lengths at which it is."""
SHARES = (0.0, 0.5, 0.8, 1.0)
"""Slopes in context that are tried, as parts of that of the largest batch."""
EXACT = 1e-6
"""Relative error of the work bound."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Of one step, seconds."""

    path_s: float
    work_s: float

    @property
    def seconds(self) -> float:
        return max(self.path_s, self.work_s)


def step_bounds(scenario: Scenario) -> list[Bound]:
    """Of each step of a synchronous rollout, in order.

    Asynchronous steps have none: which trajectories end in one is a matter of the policy. Raises `ConfigError` for them, and
    where the two roles have different profiles.
    """
    if scenario.rollout.mode != "sync":
        raise ConfigError("rollout.mode=async: a step has no least time, for any trajectory may end in it; use sync")
    profile = scenario.prefill_profile()
    if profile != scenario.decode_profile():
        raise ConfigError(f"hardware.decode_profile={scenario.hardware.decode_profile!r}: a bound needs one profile")
    rollout = scenario.rollout
    launches = Launches(build_workload(scenario.workload, scenario.seed), rollout.group_size, scenario.seed)
    costs = _Costs(profile, scenario.workload.max_context)
    ranks = scenario.hardware.gpus // profile.gpus * profile.ranks
    groups = max(1, round(rollout.groups * rollout.load))
    return [
        _bound(launches, range(step * groups, (step + 1) * groups), costs, ranks, rollout.prewarmed)
        for step in range(rollout.steps)
    ]


def _bound(launches: Launches, groups: Sequence[int], costs: _Costs, ranks: int, prewarmed: int) -> Bound:
    work = _Work()
    path_s = 0.0
    known: set[int] = set()
    for group in groups:
        members = range(launches.group_size)
        starts = [_sandbox_s(launches.sandbox(group, member), prewarmed) for member in members]
        question = launches.question(group)
        for member in members:
            script = launches.script(group, member)
            # Nobody has the first prompt before one of those who share it has computed it; the others compute its last token.
            away_s = max(starts[member], min(starts) + costs.prefill_s(script.prompt_tokens)) + script.reward_s
            decode_s = 0.0
            for index, (turn, (new, prefix)) in enumerate(zip(script.turns, requests(script), strict=True)):
                if index:
                    away_s += costs.prefill_s(new)
                    work.prefill(new, prefix, costs.chunk)
                elif question in known:
                    work.prefill(1, new - 1, costs.chunk)
                else:
                    known.add(question)
                    work.prefill(new, 0, costs.chunk)
                work.decode(turn.output_tokens - 1, prefix + new)
                away_s += turn.tool_s
                decode_s += (turn.output_tokens - 1) * costs.token_s(prefix + new)
            path_s = max(path_s, away_s + decode_s)
            work.away_s += away_s
    return Bound(path_s, costs.work_s(work, ranks, len(groups) * launches.group_size))


def requests(script: Script) -> Iterator[tuple[int, int]]:
    """(new tokens, tokens before them that a cache may have) of each turn's prompt. The last token that a turn made has not
    been through the model, so it is among the new ones of the next."""
    context, cached = script.prompt_tokens, 0
    for turn in script.turns:
        yield context - cached, cached
        cached = turn.cached(context)
        context = turn.next(context)


def _sandbox_s(script: Script, prewarmed: int) -> float:
    return min(script.sandbox_prewarmed_s, script.sandbox_cold_s) if prewarmed else script.sandbox_cold_s


@dataclass(slots=True)
class _Work:
    """Sums over the requests of a step."""

    new: float = 0.0
    """Prompt tokens that have to be computed."""
    prefixes: float = 0.0
    """Summed over these: the tokens before the chunk that each is in."""
    decoded: float = 0.0
    """Output tokens that decode steps make."""
    contexts: float = 0.0
    """Summed over these: the context."""
    away_s: float = 0.0
    """Summed over the trajectories: seconds in which they do not decode."""

    def prefill(self, new: int, prefix: int, chunk: int) -> None:
        self.new += new
        self.prefixes += new * prefix + max(new * (new - chunk) / 2, 0.0)

    def decode(self, tokens: int, context: int) -> None:
        """The first of them follows the one that the prefill has made."""
        self.decoded += tokens
        self.contexts += tokens * context + tokens * (tokens + 1) / 2


class _Costs:
    """Of a profile, from below, seconds."""

    def __init__(self, profile: Profile, max_context: int) -> None:
        costs = StepCosts(profile)
        self.chunk = profile.chunk
        self._contexts = np.unique(np.linspace(0, max_context, CONTEXTS).astype(int))
        self._batches = np.arange(1, profile.max_running + 1)
        self._chunks = np.unique(np.linspace(1, profile.chunk, CHUNKS).astype(int))
        self._decode = _table(costs.decode_local, self._batches, self._contexts)
        self._prefill = _table(costs.prefill_local, self._chunks, self._contexts)
        self._lines = {
            extending: _lines(costs, extending, tokens)
            for extending, tokens in ((True, self._chunks), (False, self._batches))
        }
        self._token_s = self._quickest_tokens(costs, profile.ranks)
        self._steps_s = self._quickest_chunks(costs, profile.ranks)

    def _quickest_tokens(self, costs: StepCosts, ranks: int) -> Floats:
        """Of a decode step of a request with each of the contexts, in any batch: others in it may have less."""
        shared = np.array([costs.shared(False, batch / ranks, batch) for batch in self._batches.tolist()])
        least = np.minimum.accumulate(self._decode[:, ::-1], axis=1)[:, ::-1]
        # In a batch of B the mean context is at least a B-th of that of the request; the point of the table below it counts.
        at = self._contexts.searchsorted(self._contexts[None, :] / self._batches[:, None], side="right") - 1
        quickest: Floats = (np.take_along_axis(least, at, axis=1) + shared[:, None]).min(axis=0)
        return quickest

    def _quickest_chunks(self, costs: StepCosts, ranks: int) -> tuple[float, float]:
        """(of a step that prefills, of each token of one) at the least."""
        shared = np.array([costs.shared(True, tokens / ranks, tokens) for tokens in self._chunks.tolist()])
        steps = self._prefill.min(axis=1) + shared
        return float(steps.min()), float((steps / self._chunks).min())

    def prefill_s(self, new: int) -> float:
        """The quickest prefill of so many tokens."""
        step_s, token_s = self._steps_s
        return max(ceil(new / self.chunk) * step_s, new * token_s)

    def token_s(self, context: int) -> float:
        """The quickest decode step of a request with that context or more."""
        return float(self._token_s[self._contexts.searchsorted(context, side="right") - 1])

    def work_s(self, work: _Work, ranks: int, trajectories: int) -> float:
        """The least time in which `ranks` ranks do the work, while `trajectories` live."""
        bound = 0.0
        for share in SHARES:
            decode_s, per_context = _without_context(self._decode, self._batches, self._contexts, share)
            prefill_s, per_prefix = _without_context(self._prefill, self._chunks, self._contexts, share)
            for long_line in self._lines[True]:
                chunk_s = prefill_s + long_line.at(self._chunks)
                prompts_s = work.new * float((chunk_s / self._chunks).min()) + per_prefix * work.prefixes
                for line in self._lines[False]:
                    step_s = decode_s + np.minimum(long_line.at(self._batches), line.at(self._batches))
                    if min(chunk_s.min(), step_s.min()) > 0:
                        busy_s = prompts_s + per_context * work.contexts
                        rates = _Rates(self._batches, step_s)
                        bound = max(bound, _least_time(work, busy_s, rates, ranks, trajectories, bound))
        return bound


@dataclass(frozen=True, slots=True)
class _Line:
    slope: float
    intercept: float

    def at(self, x: NDArray[np.int64]) -> Floats:
        return np.asarray(self.intercept + self.slope * x, dtype=np.float64)


def _table(costs: Callable[[float, float], float], tokens: NDArray[np.int64], contexts: NDArray[np.int64]) -> Floats:
    return np.array([[costs(float(t), float(c)) for c in contexts] for t in tokens])


def _without_context(
    table: Floats, tokens: NDArray[np.int64], contexts: NDArray[np.int64], share: float
) -> tuple[Floats, float]:
    """(f, k) with table >= f(tokens) + k * tokens * context."""
    slope = share * max(float(table[-1, -1] - table[-1, 0]), 0.0) / float(tokens[-1] * contexts[-1])
    least: Floats = (table - slope * tokens[:, None] * contexts[None, :]).min(axis=1)
    return least, slope


def _lines(costs: StepCosts, extending: bool, tokens: NDArray[np.int64]) -> list[_Line]:
    """Lines in the mean of the ranks' tokens under what a step adds for all of them, whatever the most of a rank is."""
    points = [0.0, *map(float, tokens)]
    most = np.array([costs.shared(extending, 0.0, x) for x in points]) - costs.shared(extending, 0.0, 0.0)
    least = np.minimum.accumulate(most[::-1])[::-1]
    shared = [costs.shared(extending, x, 0.0) + float(more) for x, more in zip(points, least, strict=True)]
    hull: list[tuple[float, float]] = []
    for x, y in zip(points, shared, strict=True):
        while len(hull) > 1 and _slope(hull[-2], (x, y)) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append((x, y))
    return [_Line(_slope(a, b), a[1] - _slope(a, b) * a[0]) for a, b in pairwise(hull)]


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


class _Rates:
    """Tokens a second of a rank that decodes, by its batch: at most, where batches alternate too."""

    def __init__(self, batches: NDArray[np.int64], step_s: Floats) -> None:
        hull = [(0.0, 0.0)]
        for point in zip(batches.astype(float), batches / step_s, strict=True):
            while len(hull) > 1 and _slope(hull[-2], point) >= _slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(point)
        # A larger batch that makes less is no reason to have it.
        best = max(range(len(hull)), key=lambda index: hull[index][1])
        self._batches, self._rates = np.array(hull[: best + 1]).T

    def at(self, batch: float) -> float:
        return float(np.interp(batch, self._batches, self._rates))


def _least_time(work: _Work, busy_s: float, rates: _Rates, ranks: int, trajectories: int, known_s: float) -> float:
    """The least time, not below `known_s`, that leaves `ranks` enough besides `busy_s` rank-seconds to make all tokens."""

    def possible(time: float) -> bool:
        left = ranks * time - busy_s
        decoding = trajectories * time - work.away_s
        if not work.decoded:
            return left >= 0
        return left > 0 and decoding > 0 and left * rates.at(decoding / left) >= work.decoded

    if possible(known_s):
        return known_s
    low, high = known_s, max(2 * known_s, 1.0)
    while not possible(high):
        low, high = high, 2 * high
    while high - low > EXACT * high:
        middle = (low + high) / 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low
