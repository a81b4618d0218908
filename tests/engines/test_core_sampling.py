"""Sampling against the distributions it promises."""

from __future__ import annotations

import numpy as np
import pytest

from prorsa.engines.embedded.sampling import counter_uniform, sample
from prorsa.engines.protocol import SamplingParams

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))


def draw(params: SamplingParams, count: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    """Frequencies of the four tokens, and the log-probability reported for each (nan when never drawn)."""
    rng = np.random.default_rng(7)
    tokens, logprobs = sample(np.tile(LOGITS, (count, 1)), [params] * count, list(range(count)), rng)
    told = np.full(4, np.nan)
    for token, logprob in zip(tokens, logprobs, strict=True):
        told[token] = logprob
    return np.bincount(tokens, minlength=4) / count, told


def expected_at(temperature: float) -> np.ndarray:
    weights = np.exp(LOGITS.astype(np.float64) / temperature)
    return weights / weights.sum()


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_and_logprobs_follow_the_temperature(seed: int | None, temperature: float) -> None:
    frequencies, logprobs = draw(SamplingParams(1, temperature, seed=seed))
    expected = expected_at(temperature)
    assert np.abs(frequencies - expected).max() < 4 * np.sqrt(0.25 / 4000)
    np.testing.assert_allclose(np.exp(logprobs), expected, rtol=1e-5)


def test_top_k_cuts_the_tokens_but_not_the_logprobs() -> None:
    frequencies, logprobs = draw(SamplingParams(1, 1.0, top_k=2))
    assert frequencies[2:].sum() == 0
    assert abs(frequencies[0] - 4 / 7) < 0.04
    np.testing.assert_allclose(np.exp(logprobs[:2]), [0.4, 0.3], rtol=1e-5)


@pytest.mark.parametrize(("top_p", "kept"), [(0.35, 1), (0.65, 2), (0.75, 3), (0.95, 4)])
def test_top_p_keeps_the_fewest_tokens_that_hold_it(top_p: float, kept: int) -> None:
    frequencies, _ = draw(SamplingParams(1, 1.0, top_p=top_p))
    assert np.count_nonzero(frequencies) == kept


def test_greedy_takes_the_best_token_with_its_logprob_at_temperature_one() -> None:
    frequencies, logprobs = draw(SamplingParams(1, 0.0))
    assert frequencies.tolist() == [1, 0, 0, 0]
    assert np.exp(logprobs[0]) == pytest.approx(0.4, rel=1e-5)


def test_a_seeded_row_does_not_depend_on_the_batch_or_the_generator() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 50)).astype(np.float32)
    params = [SamplingParams(1, 1.0, seed=row % 3, top_k=20 if row % 2 else -1) for row in range(8)]
    positions = list(range(100, 108))
    together, _ = sample(logits.copy(), params, positions, rng)
    alone = [
        sample(logits[row : row + 1].copy(), [params[row]], [positions[row]], np.random.default_rng(row))[0][0]
        for row in range(8)
    ]
    assert together == alone


def test_seeded_rows_differ_by_seed_and_by_position() -> None:
    flat = np.zeros((400, 1000), np.float32)
    seeds = [SamplingParams(1, 1.0, seed=seed) for seed in range(400)]
    same = [SamplingParams(1, 1.0, seed=1)] * 400
    rng = np.random.default_rng(0)
    assert len(set(sample(flat.copy(), seeds, [5] * 400, rng)[0])) > 300
    assert len(set(sample(flat.copy(), same, list(range(400)), rng)[0])) > 300


def test_counter_uniform_is_uniform_along_all_axes() -> None:
    line, zeros = np.arange(20_000, dtype=np.uint64), np.zeros(20_000, np.uint64)
    by_seed, by_counter = counter_uniform(line, zeros, 1)[:, 0], counter_uniform(zeros, line, 1)[:, 0]
    by_column = counter_uniform(zeros[:1], zeros[:1], 20_000)[0]
    for points in (by_seed, by_counter, by_column):
        assert 0 < points.min() <= points.max() < 1
        counts = np.bincount((points * 20).astype(int), minlength=20)
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
        assert abs(np.corrcoef(points[:-1], points[1:])[0, 1]) < 0.03


def test_rounding_in_the_logits_does_not_change_a_seeded_token() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(5000, 500)).astype(np.float32)
    rounded = logits * (1 + rng.normal(0, 2e-7, logits.shape)).astype(np.float32)
    params, positions = [SamplingParams(1, 1.0, seed=9)] * 5000, list(range(5000))
    assert sample(logits, params, positions, rng)[0] == sample(rounded, params, positions, rng)[0]


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = np.full((2000, 3), -1e30, np.float32)
    logits[:, 1] = 0.0
    tokens, _ = sample(logits, [SamplingParams(1, 1.0)] * 2000, [0] * 2000, np.random.default_rng(0))
    assert set(tokens) == {1}


def test_every_token_of_a_large_vocabulary_is_drawn_as_often_as_it_should() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=333).astype(np.float32)
    expected = np.exp(logits.astype(np.float64))
    expected /= expected.sum()
    counts = np.zeros(333)
    for _ in range(20):
        tokens, _ = sample(np.tile(logits, (5000, 1)), [SamplingParams(1, 1.0)] * 5000, [0] * 5000, rng)
        counts += np.bincount(tokens, minlength=333)
    common = expected * 100_000 > 20
    pull = (counts - expected * 100_000)[common] / np.sqrt(expected * 100_000)[common]
    assert common.sum() > 200
    assert np.abs(pull).max() < 4.5
    assert abs((pull**2).mean() - 1) < 0.4
