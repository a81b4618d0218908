"""A sequence in which neighbours are often equal, kept as values with how many of each: the tokens of a turn that arrive
together, and the weights versions of its tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, groupby, repeat
from typing import TypeVar, overload

N = TypeVar("N", int, float)


class Runs(Sequence[N]):
    """Equal to any sequence of the same values. 12 bytes a run, and about 250 for the object."""

    __slots__ = ("_length", "counts", "values")

    def __init__(self, values: array[N], counts: Iterable[int]) -> None:
        """As many of each value as its count says; no count is 0."""
        self.values: array[N] = values
        self.counts = array("i", counts)
        self._length = sum(self.counts)

    @overload
    def __getitem__(self, index: int) -> N: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[N]: ...
    def __getitem__(self, index: int | slice) -> N | Sequence[N]:
        places = range(len(self))[index]
        if isinstance(places, range):
            return tuple(self[place] for place in places)
        if places == self._length - 1:
            return self.values[-1]
        return self.values[bisect_right(list(accumulate(self.counts)), places)]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[N]:
        return chain.from_iterable(map(repeat, self.values, self.counts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Runs({list(zip(self.values, self.counts, strict=True))})"


def runs(values: Sequence[N]) -> Iterable[tuple[N, int]]:
    """(value, how many) of neighbours that are equal."""
    if isinstance(values, Runs):
        return zip(values.values, values.counts, strict=True)
    return ((value, sum(1 for _ in same)) for value, same in groupby(values))


def compact(values: Sequence[float]) -> Runs[float]:
    if isinstance(values, Runs):
        return values
    pairs = list(runs(values))
    return Runs(array("d", [value for value, _ in pairs]), [count for _, count in pairs])
