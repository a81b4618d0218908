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
        rows = [sampling[row] for row in drawn]
        noise = _noise(rows, [positions[row] for row in drawn], rng, weights.shape[1])
        tokens[drawn] = (_cut(weights[drawn], rows) / noise).argmax(axis=-1)
    chosen = logits[np.arange(len(tokens)), tokens] - np.log(totals)
    return tokens.tolist(), chosen.tolist()


def _cut(weights: Array, sampling: Sequence[SamplingParams]) -> Array:
    """Set to zero what is not among a row's `top_k` likeliest tokens, or of them the fewest that hold `top_p`."""
    for row, params in zip(weights, sampling, strict=True):
        if params.top_k <= 0 and params.top_p >= 1.0:
            continue
        order = np.argsort(-row, kind="stable")
        kept = len(order) if params.top_k <= 0 else min(params.top_k, len(order))
        cumulative = np.cumsum(row[order[:kept]], dtype=np.float64)
        kept = min(kept, int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1)
        row[order[kept:]] = 0.0
    return weights


def _noise(
    sampling: Sequence[SamplingParams], positions: Sequence[int], rng: np.random.Generator, size: int
) -> NDArray[np.float64]:
    """Exponential noise [rows, size]: the token with the largest weight / noise is a draw by the weights.

    Two engines that round a logit differently then pick the same token but for a near-tie, where drawing by the cumulative
    distribution would shift every boundary between tokens.
    """
    fresh = rng.integers(0, 2**63, len(sampling)).tolist()
    seeds = [new if row.seed is None else row.seed % 2**64 for row, new in zip(sampling, fresh, strict=True)]
    return -np.log(counter_uniform(np.array(seeds, np.uint64), np.array(positions, np.uint64), size))


def counter_uniform(seeds: NDArray[np.uint64], counters: NDArray[np.uint64], size: int) -> NDArray[np.float64]:
    """Uniform numbers in (0, 1) [rows, size], a function of (seed, counter, column): the SplitMix64 finaliser over them."""
    start = _mix(_mix(seeds + _GOLDEN) + counters * _GOLDEN)
    mixed = _mix(start[:, None] + np.arange(1, size + 1, dtype=np.uint64) * _GOLDEN)
    return ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
