"""From logits to tokens: greedy, temperature, top-k and top-p, with log-probabilities.

The log-probability of a token is under the temperature-scaled distribution over the whole vocabulary, before top-k and
top-p cut it: what an RL trainer recomputes. Greedy tokens (temperature 0) get theirs at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prorsa.engines.protocol import SamplingParams

Array = NDArray[np.float32]

SPAN = 64
"""Tokens whose weights are summed before any is looked at alone."""


def sample(
    logits: Array, sampling: Sequence[SamplingParams], positions: Sequence[int], rng: np.random.Generator
) -> tuple[list[int], list[float]]:
    """A token and its log-probability for each row of `logits` [rows, vocabulary], which is overwritten.

    `positions` are the absolute positions of the sampled tokens. A row with a seed depends on the seed, its position and
    its logits only; the others draw from `rng`.
    """
    temperatures = np.array([row.temperature for row in sampling], np.float32)
    greedy = temperatures == 0.0
    logits /= np.where(greedy, np.float32(1.0), temperatures)[:, None]
    logits -= logits.max(axis=-1, keepdims=True)
    tokens = logits.argmax(axis=-1)
    weights = np.exp(logits)
    totals = weights.sum(axis=-1)
    drawn = np.flatnonzero(~greedy).tolist()
    if drawn:
        points = _points([sampling[row] for row in drawn], [positions[row] for row in drawn], rng)
        cut = [i for i, row in enumerate(drawn) if sampling[row].top_p < 1.0 or sampling[row].top_k > 0]
        tokens[drawn] = _draw(weights[drawn], points)
        for i in cut:
            tokens[drawn[i]] = _draw_cut(weights[drawn[i]], sampling[drawn[i]], points[i])
    chosen = logits[np.arange(len(tokens)), tokens] - np.log(totals)
    return tokens.tolist(), chosen.tolist()


def _draw(weights: Array, points: NDArray[np.float64]) -> NDArray[np.intp]:
    """Inverse of the cumulative distribution at `points` in [0, 1), row by row: first the span, then the token in it."""
    rows, size = np.arange(len(weights)), weights.shape[1]
    spans = np.cumsum(np.add.reduceat(weights, np.arange(0, size, SPAN), axis=1), axis=1, dtype=np.float64)
    targets = points * spans[:, -1]
    span = (spans > targets[:, None]).argmax(axis=1)
    columns = span[:, None] * SPAN + np.arange(SPAN)
    inside = np.where(columns < size, weights[rows[:, None], np.minimum(columns, size - 1)], np.float32(0.0))
    cumulative = np.cumsum(inside, axis=1, dtype=np.float64)
    before = np.where(span > 0, spans[rows, span - 1], 0.0)
    # The two sums of a span round differently: stay below this one, so that the token has a weight.
    rest = np.minimum(targets - before, cumulative[:, -1] * (1 - 2.0**-40))
    tokens: NDArray[np.intp] = span * SPAN + (cumulative > rest[:, None]).argmax(axis=1)
    return tokens


def _draw_cut(weights: Array, sampling: SamplingParams, point: float) -> int:
    """As `_draw` among the `top_k` likeliest tokens, and of them the fewest that hold `top_p` of the probability."""
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    cumulative = np.cumsum(weights[order], dtype=np.float64)
    kept = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
    cumulative = cumulative[:kept]
    return int(order[np.searchsorted(cumulative, point * cumulative[-1], side="right")])


def _points(
    sampling: Sequence[SamplingParams], positions: Sequence[int], rng: np.random.Generator
) -> NDArray[np.float64]:
    """A number in [0, 1) for each row."""
    fresh = rng.integers(0, 2**63, len(sampling)).tolist()
    seeds = [new if row.seed is None else row.seed % 2**64 for row, new in zip(sampling, fresh, strict=True)]
    return counter_uniform(np.array(seeds, np.uint64), np.array(positions, np.uint64))


def counter_uniform(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1) that are a function of (seed, counter): the SplitMix64 finaliser over both.

    They are multiples of 2**-32, so that a product with a total in float64 stays below that total.
    """
    mixed = _mix(_mix(seeds + _GOLDEN) + counters * _GOLDEN)
    return (mixed >> np.uint64(32)).astype(np.float64) * 2.0**-32


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
