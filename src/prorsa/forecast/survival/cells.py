"""Rows that are nearly alike, taken together: what is worked out for a cell holds for all of its rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.durations import Floats

DENSE = 1 << 15
"""Where there could be more cells than so many, they are numbered by sorting; else by counting, which is quicker."""


class Cells:
    """The cells of rows whose integer `columns` are the same."""

    def __init__(self, columns: Sequence[NDArray[np.integer]]) -> None:
        code, radices = np.zeros(len(columns[0]), dtype=np.int64), []
        for column in columns:
            low = int(column.min()) if len(column) else 0
            width = int(column.max()) - low + 1 if len(column) else 1
            code *= width
            code += column
            code -= low
            radices.append((low, width))
        if math.prod(width for _, width in radices) <= DENSE:
            counts = np.bincount(code)
            used = np.flatnonzero(counts)
            number = np.empty(len(counts), dtype=np.intp)
            number[used] = np.arange(len(used))
            self.cell: NDArray[np.intp] = number[code]
        else:
            used, self.cell = np.unique(code, return_inverse=True)
        """Of each row."""
        self.columns: list[NDArray[np.intp]] = []
        """Of each cell."""
        for low, width in reversed(radices):
            used, digit = np.divmod(used, width)
            self.columns.insert(0, digit + low)

    def __len__(self) -> int:
        return len(self.columns[0])

    @cached_property
    def count(self) -> Floats:
        """[cell]: the number of rows."""
        return np.bincount(self.cell, minlength=len(self)).astype(np.float64)

    def sums(self, values: Floats) -> Floats:
        """[cell]: the sum of the rows' values."""
        return np.bincount(self.cell, values, len(self)).astype(np.float64, copy=False)

    def means(self, values: Floats) -> Floats:
        """[cell]."""
        means: Floats = self.sums(values) / self.count
        return means

    def pairs(self) -> Iterator[tuple[int, int]]:
        """The first two columns."""
        return zip(self.columns[0].tolist(), self.columns[1].tolist(), strict=True)
