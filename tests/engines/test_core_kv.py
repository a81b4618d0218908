"""The block pool against a model of it, and the window against plain arrays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prorsa.engines.embedded.kv import BlockPool, Window, extend_hashes

BLOCKS = 6


def hashes_of(tokens: list[int], version: int = 0, block_tokens: int = 2) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, version, block_tokens)
    return hashes


class PoolMachine(RuleBasedStateMachine):
    """Requests take chains of blocks (cached ones first), publish them and give them back."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, layers=1, block_tokens=2, kv_heads=1, head_dim=2)
        self.chains: list[tuple[list[int], list[bytes]]] = []
        self.content: dict[int, bytes] = {}
        """What each block was last published as."""

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=8))
    def take(self, tokens: list[int]) -> None:
        hashes = hashes_of(tokens)
        blocks = self.pool.match(hashes)
        assert [self.content[block] for block in blocks] == hashes[: len(blocks)]
        lacking = len(hashes) - len(blocks)
        if lacking > self.pool.available:
            before = self.pool.held
            with pytest.raises(ValueError, match="are available"):
                self.pool.allocate(lacking)
            assert self.pool.held == before
            self.pool.release(blocks)
            return
        fresh = self.pool.allocate(lacking)
        in_use = {block for chain, _ in self.chains for block in chain} | set(blocks)
        assert in_use.isdisjoint(fresh)
        assert len(set(fresh)) == len(fresh)
        for block in fresh:
            self.content.pop(block, None)
        self.chains.append((blocks + fresh, hashes))

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        chain, hashes = data.draw(st.sampled_from(self.chains))
        for index, hash in enumerate(hashes):
            chain[index] = self.pool.publish(chain[index], hash)
            self.content[chain[index]] = hash
            assert hash in self.pool

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        chain, _ = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        self.pool.release(chain)

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        assert not any(hash in self.pool for hash in self.content.values())
        self.content = {}

    @invariant()
    def accounts_for_every_block(self) -> None:
        references = Counter(block for chain, _ in self.chains for block in chain)
        assert self.pool.held == len(references)
        assert self.pool.available == BLOCKS - len(references)

    def teardown(self) -> None:
        for chain, _ in self.chains:
            self.pool.release(chain)
        assert self.pool.available == BLOCKS
        assert sorted(self.pool.allocate(BLOCKS)) == list(range(BLOCKS))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(2, 1, 2, 1, 2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="more often than it was taken"):
        pool.release(blocks)


def test_eviction_takes_the_oldest_chain_from_its_tail() -> None:
    pool = BlockPool(4, 1, 2, 1, 2)
    old, new = hashes_of([1, 1, 1, 1]), hashes_of([2, 2, 2, 2])
    for hashes in (old, new):
        blocks = pool.allocate(2)
        for block, hash in zip(blocks, hashes, strict=True):
            pool.publish(block, hash)
        pool.release(blocks)
    survivors = []
    for _ in range(4):
        pool.allocate(1)
        survivors.append([hash in pool for hash in (*old, *new)])
    assert survivors == [
        [True, False, True, True],
        [False, False, True, True],
        [False, False, True, False],
        [False, False, False, False],
    ]


def test_a_hash_names_the_whole_prefix_and_the_weights_version() -> None:
    base = hashes_of([1, 2, 3, 4, 5])
    assert len(base) == 2  # the fifth token fills no block
    assert all(len(hash) == 16 for hash in base)
    assert hashes_of([1, 2, 3, 9])[0] == base[0]
    assert hashes_of([1, 2, 3, 9])[1] != base[1]
    assert hashes_of([9, 2, 3, 4])[1] != base[1]
    assert set(hashes_of([1, 2, 3, 4], version=1)).isdisjoint(base)


def test_the_window_holds_what_the_pool_and_the_decodes_gave_it() -> None:
    rng = np.random.default_rng(0)
    pool = BlockPool(40, layers=2, block_tokens=2, kv_heads=3, head_dim=4)
    pool.data[:] = rng.normal(size=pool.data.shape)
    window = Window(2, 3, 4, 2)
    rows: list[np.ndarray] = []  # [layers, 2, kv heads, length, dim]
    for step in range(60):
        if rows and rng.random() < 0.3:
            row = int(rng.integers(len(rows)))
            window.leave(row)
            rows[row] = rows[-1]
            rows.pop()
        else:
            length = int(rng.integers(1, 30))
            blocks = rng.choice(40, -(-length // 2), replace=False).tolist()
            window.join(pool, blocks, length)
            flat = pool.data[blocks].transpose(1, 2, 4, 0, 3, 5).reshape(2, 2, 3, -1, 4)
            rows.append(flat[:, :, :, :length])
        window.grow(step)
        assert window.rows == len(rows)
        for row, expected in enumerate(rows):
            np.testing.assert_array_equal(window.data[:, row, :, :, : expected.shape[3]], expected)
    expected = next(row for row in rows if row.shape[3] >= 4)
    index = next(i for i, row in enumerate(rows) if row is expected)
    window.store(index, 1, pool, 7)
    np.testing.assert_array_equal(pool.data[7], expected[:, :, :, 2:4].transpose(0, 1, 3, 2, 4))


def test_a_row_does_not_inherit_what_was_there_before() -> None:
    pool = BlockPool(4, 1, 2, 1, 2)
    pool.data[:2] = np.nan
    pool.data[2] = 1.0
    window = Window(1, 1, 2, 2)
    window.join(pool, [0, 1], 4)
    window.leave(0)
    window.join(pool, [2], 2)
    assert np.isfinite(window.data[:, 0]).all()
