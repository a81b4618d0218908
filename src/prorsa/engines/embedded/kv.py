"""Where the keys and values live: a pool of blocks that share prefixes, and the window that decodes read.

Invariants of the pool: a block is exactly one of free, cached (no reference, but its content can be found by hash) and
held (one reference or more); a hash names at most one block; `free + cached + held` is the pool. Only full blocks get a
hash, and a hash chains the blocks before it, so a block is written once and copy-on-write is never needed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], version: int, block_tokens: int) -> None:
    """Append what `hashes` lacks of the chained hashes (16 bytes each) of the full blocks of `tokens`."""
    for index in range(len(hashes), len(tokens) // block_tokens):
        previous = hashes[-1] if hashes else b""
        block = np.asarray(tokens[index * block_tokens : (index + 1) * block_tokens], np.int64)
        digest = hashlib.blake2b(previous, digest_size=16, salt=version.to_bytes(16, "little"))
        digest.update(block.tobytes())
        hashes.append(digest.digest())


class BlockPool:
    """Reference-counted blocks, one contiguous float32 piece each: `data[block]` is [layers, 2, tokens, kv heads, dim]."""

    def __init__(self, blocks: int, layers: int, block_tokens: int, kv_heads: int, head_dim: int) -> None:
        self.data: Array = np.zeros((blocks, layers, 2, block_tokens, kv_heads, head_dim), np.float32)
        self._references = [0] * blocks
        self._hashes: list[bytes | None] = [None] * blocks
        self._blocks: dict[bytes, int] = {}
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Unreferenced blocks with a hash, the least recently used first."""

    def __len__(self) -> int:
        return len(self._references)

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._blocks

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        return len(self) - self.available

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting the least recently used cached ones. ValueError beyond `available`."""
        if count > self.available:
            raise ValueError(f"{count} blocks asked for; {self.available} of {len(self)} are available")
        return [self._take() for _ in range(count)]

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        hash = self._hashes[block]
        assert hash is not None
        del self._blocks[hash]
        self._hashes[block] = None

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest known leading run of `hashes`, with a reference more each."""
        blocks = []
        for hash in hashes:
            block = self._blocks.get(hash)
            if block is None:
                break
            self._retain(block)
            blocks.append(block)
        return blocks

    def _retain(self, block: int) -> None:
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference of each block of a chain. The tail becomes the older, so that it is evicted first."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def publish(self, block: int, hash: bytes) -> int:
        """Make a full, held block findable. The block to go on with: another one when the same content was published
        before, in which case the reference moves there."""
        known = self._blocks.setdefault(hash, block)
        if known == block:
            self._hashes[block] = hash
            return block
        self._retain(known)
        self.release([block])
        return known

    def forget_all(self) -> None:
        """Empty the prefix cache: no hash is known any more."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._blocks.clear()
        self._hashes = [None] * len(self)


class Window:
    """The keys and values of the running batch, dense: `data[layer]` is [rows, 2, kv heads, span, dim].

    Attention reads it in place, with no gather a step. A decode step writes new positions here only; a block is copied to
    the pool when it is full. Rows are always 0 .. `rows` - 1: `leave` moves the last row into the gap.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, block_tokens: int) -> None:
        self.rows = 0
        self._block_tokens = block_tokens
        self.data: Array = np.zeros((layers, 0, 2, kv_heads, 0, head_dim), np.float32)

    def join(self, pool: BlockPool, blocks: Sequence[int], length: int) -> None:
        """Append a row with the first `length` positions of a chain of blocks."""
        self._reserve(self.rows + 1, len(blocks) * self._block_tokens)
        layers, _, _, kv_heads, span, dim = self.data.shape
        row = self.data[:, self.rows]
        paged = row.reshape(layers, 2, kv_heads, span // self._block_tokens, self._block_tokens, dim)
        paged[:, :, :, : len(blocks)] = pool.data[np.asarray(blocks)].transpose(1, 2, 4, 0, 3, 5)
        # What a former row left beyond must not be NaN: a masked position still meets a zero weight.
        row[:, :, :, length:] = 0.0
        self.rows += 1

    def leave(self, row: int) -> None:
        """Remove a row; the last row takes its place."""
        self.rows -= 1
        if row != self.rows:
            self.data[:, row] = self.data[:, self.rows]

    def grow(self, span: int) -> None:
        """Have room for positions below `span`."""
        self._reserve(self.rows, span)

    def store(self, row: int, index: int, pool: BlockPool, block: int) -> None:
        """Copy the full block at `index` of a row to the pool."""
        start = index * self._block_tokens
        pool.data[block] = self.data[:, row, :, :, start : start + self._block_tokens].transpose(0, 1, 3, 2, 4)

    def clear(self) -> None:
        """Drop every row and the memory."""
        self.rows = 0
        self._resize(0, 0)

    def _reserve(self, rows: int, span: int) -> None:
        _, old_rows, _, _, old_span, _ = self.data.shape
        if rows > old_rows:
            rows = max(rows, 2 * old_rows)
        if span > old_span:
            step = 4 * self._block_tokens
            span = -(-max(span, old_span * 3 // 2) // step) * step
        if rows > old_rows or span > old_span:
            self._resize(max(rows, old_rows), max(span, old_span))

    def _resize(self, rows: int, span: int) -> None:
        layers, _, _, kv_heads, old_span, dim = self.data.shape
        old = self.data[:, : self.rows]
        self.data = np.zeros((layers, rows, 2, kv_heads, span, dim), np.float32)
        if self.rows:
            self.data[:, : self.rows, :, :, :old_span] = old
