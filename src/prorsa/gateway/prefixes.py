"""Which known context a prompt starts with: the longest of them, found in one pass over the prompt.

A running checksum over the prompt is looked up at every length that some context has, and a hit is compared byte by byte.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from typing import Generic, TypeVar
from zlib import crc32

T = TypeVar("T")


class PrefixIndex(Generic[T]):
    """Contexts (bytes) and what each belongs to. One context may belong to several; the one added first is found."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._counts: Counter[int] = Counter()
        self._owners: dict[tuple[int, int], dict[T, bytes]] = {}

    def __len__(self) -> int:
        return self._counts.total()

    def add(self, context: bytes, owner: T) -> None:
        length = len(context)
        self._owners.setdefault((length, crc32(context)), {})[owner] = context
        if not self._counts[length]:
            insort(self._lengths, length)
        self._counts[length] += 1

    def remove(self, context: bytes, owner: T) -> None:
        length = len(context)
        key = length, crc32(context)
        owners = self._owners[key]
        del owners[owner]
        if not owners:
            del self._owners[key]
        self._counts[length] -= 1
        if not self._counts[length]:
            del self._counts[length]
            del self._lengths[bisect_right(self._lengths, length) - 1]

    def find(self, prompt: bytes) -> T | None:
        """Whose context the prompt starts with and goes beyond; the longest one's."""
        view, checksum, at = memoryview(prompt), 0, 0
        hits: list[tuple[int, int]] = []
        for length in self._lengths:
            if length >= len(prompt):
                break
            checksum = crc32(view[at:length], checksum)
            at = length
            if (length, checksum) in self._owners:
                hits.append((length, checksum))
        for key in reversed(hits):
            for owner, context in self._owners[key].items():
                if prompt.startswith(context):
                    return owner
        return None
