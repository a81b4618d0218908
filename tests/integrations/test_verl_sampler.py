"""The order in which trajectories are trained."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorsa.integrations.verl.sampler import training_order


def test_short_ones_first_within_a_mini_batch_of_whole_groups() -> None:
    keys = ["a_0_0", "b_0_0", "a_1_0", "b_1_0", "c_0_0", "c_1_0"]
    lengths = [50, 10, 20, 40, 5, 6]
    assert training_order(keys, lengths, ["a", "b", "c"], mini_batch_groups=2) == [1, 2, 3, 0, 4, 5]


@given(st.lists(st.lists(st.integers(1, 500), min_size=1, max_size=5), min_size=1, max_size=8), st.integers(1, 8))
def test_every_trajectory_once_and_groups_never_split(lengths: list[list[int]], mini_batch: int) -> None:
    groups = [f"g{index}" for index in range(len(lengths))]
    keys = [f"g{g}_{member}_0" for g, group in enumerate(lengths) for member in range(len(group))]
    flat = [length for group in lengths for length in group]
    order = training_order(keys, flat, groups, mini_batch)
    assert sorted(order) == list(range(len(keys)))
    position = 0
    for start in range(0, len(groups), mini_batch):
        expected = sum(len(group) for group in lengths[start : start + mini_batch])
        batch = order[position : position + expected]
        assert {keys[i].split("_")[0] for i in batch} == set(groups[start : start + mini_batch])
        assert [flat[i] for i in batch] == sorted(flat[i] for i in batch)
        position += expected
