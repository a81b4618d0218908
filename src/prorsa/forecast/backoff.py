"""Statistics kept for every prefix of a conditioning key, so that a class with too few samples falls back to a wider one.

Invariants: a value added under `(a, b, c)` is in the statistics of `(a, b, c)`, `(a, b)`, `(a,)` and `()`, down to the
shortest prefix that is kept. There are at most so many keys, however many names come by: the ones that nothing was added to
for longest are forgotten, and with them the prefixes that no other key has.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Key = tuple[Hashable, ...]
K = TypeVar("K")
T = TypeVar("T")

MOST_KEYS = 16_384
"""Of one `Backoff`; half of them are forgotten when there are more."""

MIN_SAMPLES = 8
"""A class speaks for itself from this many samples on (the paper: "whenever enough samples are available")."""


class Statistic(Protocol):
    @property
    def count(self) -> int:
        """Values that it rests on."""
        ...

    def add(self, value: float) -> None: ...


S = TypeVar("S", bound=Statistic)


def use(known: dict[K, T], key: K, make: Callable[[K], T]) -> T:
    """The value of a key, made where there is none. The keys are in the order in which they were last used."""
    found = known.pop(key, None)
    known[key] = value = make(key) if found is None else found
    return value


def forget_half(known: dict[K, T]) -> None:
    """Those that were used longest ago."""
    for key in list(known)[: len(known) // 2]:
        del known[key]


class Backoff(Generic[S]):
    def __init__(self, make: Callable[[], S], widest: int = 0, most: int | None = None) -> None:
        """`make` creates an empty statistic. No prefix shorter than `widest` is kept: those key parts always condition. At
        most `most` keys are kept, `MOST_KEYS` unless given."""
        self._make = make
        self._widest = widest
        self._most = MOST_KEYS if most is None else most
        self._classes: dict[Key, S] = {}
        self._chains: dict[Key, list[S]] = {}
        """The statistics of all prefixes of a key that was added to."""

    def add(self, key: Key, value: float) -> None:
        for statistic in use(self._chains, key, self._chain):
            statistic.add(value)
        if len(self._chains) > self._most:
            self._forget()

    def find(self, key: Key) -> S | None:
        """The statistic of the longest prefix with `MIN_SAMPLES`, else of the widest class; None where that is empty too."""
        for length in range(len(key), self._widest, -1):
            found = self._classes.get(key[:length])
            if found is not None and found.count >= MIN_SAMPLES:
                return found
        return self._classes.get(key[: self._widest])

    def _chain(self, key: Key) -> list[S]:
        return [self._class(key[:length]) for length in range(self._widest, len(key) + 1)]

    def _forget(self) -> None:
        forget_half(self._chains)
        self._classes = {
            key[: self._widest + index]: statistic
            for key, chain in self._chains.items()
            for index, statistic in enumerate(chain)
        }

    def _class(self, prefix: Key) -> S:
        found = self._classes.get(prefix)
        if found is None:
            found = self._classes[prefix] = self._make()
        return found


class Ema:
    """Exponential moving average (Eq. 9). The paper does not say how it starts: with the plain mean of the first 1/alpha
    values, after which every value has weight alpha."""

    __slots__ = ("_alpha", "count", "value")

    def __init__(self, alpha: float, value: float = 0.0) -> None:
        """`value` stands until the first value was added, and has no weight from then on."""
        self._alpha = alpha
        self.count = 0
        self.value = value

    def add(self, value: float) -> None:
        self.count += 1
        self.value += max(self._alpha, 1.0 / self.count) * (value - self.value)


def load_bucket(concurrency: int) -> int:
    """Concurrent load as a class: 0 for 0 and 1, then one class for each doubling (2-3, 4-7, 8-15, ...)."""
    return max(concurrency, 1).bit_length() - 1


def load_buckets(concurrency: NDArray[np.int32]) -> NDArray[np.int32]:
    """`load_bucket` of each."""
    return (np.frexp(np.maximum(concurrency, 1).astype(np.float64))[1] - 1).astype(np.int32)


def resolve(
    columns: Sequence[NDArray[np.int32]], find: Callable[..., S | None], unknown: S
) -> tuple[list[S], NDArray[np.intp]]:
    """The statistic that each row's class has: (distinct statistics, index into them for each row).

    `columns` are the codes of the conditioning key, one row an operation. `find` is called once for each class that occurs,
    with its codes; where it knows nothing, `unknown` stands in.
    """
    rows = len(columns[0])
    if not rows:
        return [unknown], np.zeros(0, dtype=np.intp)
    code, span = np.zeros(rows, dtype=np.int64), 1
    for column in columns:
        low = int(column.min())
        width = int(column.max()) - low + 1
        code *= width
        code += column
        code -= low
        span *= width
    # A narrow type sorts several times faster.
    code = code.astype(np.min_scalar_type(span))
    order = np.argsort(code, kind="stable")
    ordered = code[order]
    first = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
    statistics: dict[int, tuple[int, S]] = {}
    chosen = []
    for key in zip(*(column[order[first]].tolist() for column in columns), strict=True):
        found = find(*key)
        statistic = unknown if found is None else found
        chosen.append(statistics.setdefault(id(statistic), (len(statistics), statistic))[0])
    which = np.empty(rows, dtype=np.intp)
    which[order] = np.repeat(chosen, np.diff(first, append=rows))
    return [statistic for _, statistic in statistics.values()], which
