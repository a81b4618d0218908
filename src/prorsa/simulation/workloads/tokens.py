"""Token ids that are counted instead of stored: a context of 100,000 tokens costs two integers.

A simulated token carries only which script it belongs to, so a `Span` remembers its first token and its length. It is what
the rollout and the router need of a context (`prorsa.engines.protocol.Tokens`), and nothing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import overload


class Revision(Sequence[int]):
    """`tokens` that take the place of a context's last `dropped` ones.

    As a sequence it is as long as the context becomes longer, 0 where it becomes shorter: the room that it needs.
    """

    __slots__ = ("dropped", "tokens")

    def __init__(self, tokens: Sequence[int], dropped: int) -> None:
        self.tokens = tokens
        self.dropped = dropped

    def __len__(self) -> int:
        return max(len(self.tokens) - self.dropped, 0)

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice, /) -> int | Sequence[int]:
        return self.tokens[-len(self) :][index] if len(self) else ()[index]


class Span(Sequence[int]):
    """`length` tokens, of which the first is known. Every token of it reads as the first one."""

    __slots__ = ("_length", "first")

    def __init__(self, first: int, length: int) -> None:
        if length < 0:
            raise ValueError(f"a span of {length} tokens: it must have 0 or more")
        self.first = first
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return repeat(self.first, self._length)

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> Span: ...
    def __getitem__(self, index: int | slice, /) -> int | Span:
        if isinstance(index, slice):
            return Span(self.first, len(range(*index.indices(self._length))))
        if not -self._length <= index < self._length:
            raise IndexError(f"token {index} of {self._length}")
        return self.first

    def __add__(self, other: Sequence[int], /) -> Span:
        return Span(self.first, self._length + len(other))

    def __hash__(self) -> int:
        return hash((self.first, self._length))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Span) and (self.first, self._length) == (other.first, other._length)
