"""The draws of our SGLang engines: their noise against the embedded engine's, their frequencies against the probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from prorsa.engines.embedded.sampling import counter_uniform

torch = pytest.importorskip("torch", reason="SGLang's engines draw with torch (extra `verl`)")

from prorsa.engines.sglang_server.draws import cut, draw, uniform  # noqa: E402

PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
EXTREMES = [0, 1, -1, 7, 2**31, 2**62 + 3, 2**63 - 1, -(2**63)]
CHI_SQUARE_5 = 20.515
"""With five degrees of freedom one sample of a thousand is above it."""
WHOLE = 1 << 30
"""SGLang's top-k of a request that asks for none."""


def splitmix64(state: int) -> int:
    """The output of the generator SplitMix64 for a state, in Python's whole numbers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
    return state ^ state >> 31


def test_the_noise_is_that_of_the_embedded_engine() -> None:
    positions = list(range(5, 5 + len(EXTREMES)))
    ours = uniform(torch.tensor(EXTREMES), torch.tensor(positions), 50).numpy()
    theirs = counter_uniform(
        np.array([seed % 2**64 for seed in EXTREMES], np.uint64), np.array(positions, np.uint64), 50
    )
    assert (ours == theirs).all()
    assert ours.min() > 0
    assert ours.max() < 1


def test_the_noise_of_seed_zero_at_position_zero_is_splitmix64() -> None:
    # Published first output for the state 0.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mix(value: int) -> int:
        return splitmix64((value - golden) & mask)

    start = mix(mix(golden))
    expected = [((mix((start + column * golden) & mask) >> 12) + 0.5) / 2**52 for column in (1, 2, 3)]
    assert uniform(torch.tensor([0]), torch.tensor([0]), 3)[0].tolist() == expected


@pytest.mark.parametrize("vary", ["seeds", "positions", "both"])
def test_draws_follow_the_probabilities(vary: str) -> None:
    count = 20_000
    line, fixed = torch.arange(count), torch.full((count,), 9)
    seeds, positions = (line if vary != "positions" else fixed), (line if vary != "seeds" else fixed)
    drawn = draw(PROBS.expand(count, -1), seeds, positions)
    counts = np.bincount(drawn.numpy(), minlength=6)
    expected = PROBS.numpy().astype(np.float64) * count
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_5


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, 1), (2**32, 0), (1, -1)])
def test_neighbours_draw_independently(step: tuple[int, int]) -> None:
    """Pairs of a seed and position with a neighbour's: each of four pairs of two equally likely tokens as often."""
    count = 20_000
    fair = torch.full((count, 2), 0.5)
    seeds, positions = torch.arange(count) * 3, torch.arange(count) % 1000 + 10
    first = draw(fair, seeds, positions)
    second = draw(fair, seeds + step[0], positions + step[1])
    counts = np.bincount((2 * first + second).numpy(), minlength=4)
    assert ((counts - count / 4) ** 2 / (count / 4)).sum() < 16.27, "three degrees of freedom, one of a thousand"


def cut_row(top_k: int = WHOLE, top_p: float = 1.0, min_p: float = 0.0) -> list[bool]:
    shuffled = PROBS[[3, 0, 5, 1, 2, 4]]
    kept = cut(shuffled[None], torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))[0]
    assert (kept[kept > 0] == shuffled[kept > 0]).all()
    back: list[bool] = (kept > 0)[[1, 3, 4, 0, 5, 2]].tolist()
    return back


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, 6),
        ({"top_k": 1}, 1),
        ({"top_k": 4}, 4),
        ({"top_p": 0.35}, 1),
        ({"top_p": 0.65}, 2),
        ({"top_p": 0.9}, 4),
        ({"min_p": 0.2}, 4),
        ({"min_p": 0.5}, 2),
        ({"top_k": 3, "top_p": 0.95, "min_p": 0.5}, 2),
    ],
)
def test_what_is_unlikely_is_cut(asked: dict[str, float], kept: int) -> None:
    assert cut_row(**asked) == [True] * kept + [False] * (6 - kept)  # type: ignore[arg-type]


def test_a_row_draws_the_same_whatever_else_is_in_its_batch() -> None:
    """A request with a top-k or a min-p beside it must not change the draw of one without."""
    probs = torch.softmax(torch.randn(64, 5000, generator=torch.Generator().manual_seed(1)), dim=-1)
    seeds, positions = torch.arange(64), torch.arange(64) + 100
    alone = draw(probs, seeds, positions)
    top_ks, top_ps, min_ps = torch.full((64,), WHOLE), torch.ones(64), torch.zeros(64)
    top_ks[::4], top_ps[1::4], min_ps[2::4] = 1, 0.5, 0.9
    mixed = draw(cut(probs, top_ks, top_ps, min_ps), seeds, positions)
    assert (alone[3::4] == mixed[3::4]).all()
    assert (mixed[::4] == probs[::4].argmax(-1)).all(), "greedy"
    backwards = draw(cut(probs, top_ks, top_ps, min_ps).flip(0), seeds.flip(0), positions.flip(0)).flip(0)
    assert (mixed == backwards).all()
