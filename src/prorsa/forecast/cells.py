"""Rows that are nearly alike, taken together: what is worked out for a cell holds for all of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.durations import Floats

DENSE = 1 << 20
"""Cells that are numbered by counting; where there could be more, by sorting."""


class Cells:
    """The cells of rows whose integer `columns` are the same."""

    def __init__(self, columns: Sequence[NDArray[np.integer]]) -> None:
        code, radices = np.zeros(len(columns[0]), dtype=np.int64), []
        for column in columns:
            low = int(column.min()) if len(column) else 0
            width = int(column.max()) - low + 1 if len(column) else 1
            code = code * width + (column - low)
            radices.append((low, width))
        span = int(np.prod([width for _, width in radices]))
        if span <= max(DENSE, 4 * len(code)):
            counts = np.bincount(code, minlength=1)
            used = np.flatnonzero(counts)
            number = np.zeros(len(counts), dtype=np.intp)
            number[used] = np.arange(len(used))
            self.cell = number[code]
        else:
            used, self.cell = np.unique(code, return_inverse=True)
        self.columns: list[NDArray[np.int64]] = []
        """Of each cell."""
        for low, width in reversed(radices):
            used, digit = np.divmod(used, width)
            self.columns.insert(0, digit + low)

    def __len__(self) -> int:
        return len(self.columns[0])

    def sums(self, values: Floats | None = None) -> Floats:
        """The sum of a row's value over each cell; without values the number of its rows."""
        return np.bincount(self.cell, values, minlength=len(self)).astype(np.float64)
