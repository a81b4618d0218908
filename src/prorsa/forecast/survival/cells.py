"""Rows that are nearly alike, taken together: what is worked out for a cell holds for all of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.durations import Floats

DENSE = 1 << 15
"""Where there could be more cells than so many, they are numbered by sorting; else by counting, which is quicker."""


class Cells:
    """The cells of rows whose integer `columns` are the same."""

    def __init__(self, columns: NDArray[np.intp] | Sequence[NDArray[np.integer | np.bool_]]) -> None:
        rows = np.array(columns, dtype=np.intp)
        code, size = _codes(rows)
        self.cell = _dense(code, size) if size <= DENSE else np.unique(code, return_inverse=True)[1]
        """Of each row."""
        some = np.empty(int(self.cell.max(initial=-1)) + 1, dtype=np.intp)
        some[self.cell] = np.arange(len(code))
        self.columns: NDArray[np.intp] = rows.take(some, axis=1)
        """[column, cell]; the cells are in the order of their columns, the first one foremost."""

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


def _codes(rows: NDArray[np.intp]) -> tuple[NDArray[np.intp], int]:
    """(a number of each row of [column, row], in the order of the columns, how many there could be)."""
    code, size, first = np.zeros(rows.shape[1], dtype=np.intp), 1, 0
    if not len(code):
        return code, size
    for column, low, high in zip(rows, rows.min(axis=1).tolist(), rows.max(axis=1).tolist(), strict=True):
        width = high - low + 1
        code *= width
        code += column
        first = first * width + low
        size *= width
    code -= first
    return code, size


def _dense(code: NDArray[np.intp], size: int) -> NDArray[np.intp]:
    """The codes that occur, of `size` possible ones, numbered anew without gaps."""
    occurs = np.zeros(size, dtype=np.bool_)
    occurs[code] = True
    used = np.flatnonzero(occurs)
    number = np.empty(size, dtype=np.intp)
    number[used] = np.arange(len(used))
    return number.take(code)
