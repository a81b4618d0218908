"""How long things take or get, learnt online as hazards: what is left of an operation that has gone so far.

Values (seconds or tokens) are counted in logarithmic bins, by class. What still runs counts too, as far as it has got: a
class of which mostly the short ones have ended is not taken to be short (the product-limit estimate of Kaplan and Meier). In
each bin a class is shrunk towards the class around it, in proportion to how few of its values get that far, and the widest
class towards a prior that is free of scale: what has got somewhere is expected to get twice as far.

What began longer ago counts less, by the time of its beginning and not of its end: in a window of ends, the long ones are too
many while the number of operations shrinks, and beside what still runs they count twice.

A key is a tuple; the class of a key lies in the classes of its prefixes, and all lie in that of `()`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.backoff import Key
from prorsa.forecast.durations import Floats

Indices = NDArray[np.intp]

OCTAVE = 4
"""Bins in which a value doubles."""
LEAST = -7
"""The first bin ends just above 2 ** LEAST and holds everything below."""
BINS = 100
"""The last one ends at 2 ** 18: three days, or a quarter of a million tokens."""
EDGES: Floats = 2.0 ** (LEAST + np.arange(BINS + 1) / OCTAVE)
EDGES[0] = 0.0
HALF_LIFE = 1800.0
"""Seconds in which what began earlier counts half."""
HALVINGS = 64
"""The weights are rewritten after so many half-lives, before they outgrow a float."""
SHRINK = 8.0
"""Values of the class around it that a class is worth nothing without."""
PRIOR = 1.0
"""The same for the widest class and the scale-free prior."""
PRIOR_HAZARD = 1.0 - 2.0 ** (-2.0 / OCTAVE)


class Hazards:
    """The values of all classes. `add` is O(length of the key)."""

    def __init__(self) -> None:
        self._rows: dict[Key, int] = {}
        self._chains: dict[Key, tuple[int, ...]] = {}
        self._ended = array("d")
        """Row by row the weight of the values in each bin, and behind them that of those that never ended."""
        self._since: float | None = None
        """What begins then has weight 1."""

    def add(self, key: Key, value: float, began: float) -> None:
        """What began at `began` came to its end with `value`; infinite where it never will."""
        chain = self._chains.get(key)
        if chain is None:
            chain = self._chains[key] = tuple(self._row(key[:length]) for length in range(len(key) + 1))
        cell = BINS if value == math.inf else bin_of(value)
        ended, weight = self._ended, self._weight(began)
        for row in chain:
            ended[row * (BINS + 1) + cell] += weight

    def weights(self, began: Floats, time: float) -> Floats:
        """What operations count at `time` that began then."""
        weights: Floats = 2.0 ** ((began - time) / HALF_LIFE)
        return weights

    def curves(self, keys: Sequence[Key], which: Indices, reached: Floats, weight: Floats, time: float) -> Curves:
        """The survival curves of `keys` at `time`. There is one key at least, and all have the same length.

        Operations of class `keys[which[i]]` that count `weight[i]` still run and have reached `reached[i]`.
        """
        cells = bins_of(reached)
        scale = 1.0 / self._weight(time)
        hazards: Floats = np.full((1, BINS), PRIOR_HAZARD)
        around = np.zeros(len(keys), dtype=np.intp)
        for length in range(len(keys[0]) + 1):
            prefixes: dict[Key, int] = {}
            mine = np.array([prefixes.setdefault(key[:length], len(prefixes)) for key in keys], dtype=np.intp)
            parents = np.zeros(len(prefixes), dtype=np.intp)
            parents[mine] = around
            size = len(prefixes) * BINS
            running = np.bincount(mine[which] * BINS + cells, weight, size).astype(np.float64).reshape(-1, BINS)
            shrink = SHRINK if length else PRIOR
            hazards = _shrunk(scale * self._counts(list(prefixes)), running, hazards[parents], shrink)
            around = mine
        return Curves(hazards[around])

    def _counts(self, prefixes: Sequence[Key]) -> Floats:
        """[class, bin] with the weight of what never ended in the last column."""
        counts = np.zeros((len(prefixes), BINS + 1))
        known = [(index, row) for index, prefix in enumerate(prefixes) if (row := self._rows.get(prefix)) is not None]
        if known:
            ended = np.frombuffer(self._ended).reshape(-1, BINS + 1)
            counts[[index for index, _ in known]] = ended[[row for _, row in known]]
        return counts

    def _row(self, prefix: Key) -> int:
        row = self._rows.get(prefix)
        if row is None:
            row = self._rows[prefix] = len(self._rows)
            self._ended.extend([0.0] * (BINS + 1))
        return row

    def _weight(self, began: float) -> float:
        if self._since is None:
            self._since = began
        halvings = (began - self._since) / HALF_LIFE
        while halvings > HALVINGS:
            self._ended = array("d", [value * 2.0**-HALVINGS for value in self._ended])
            self._since += HALVINGS * HALF_LIFE
            halvings -= HALVINGS
        return math.exp2(halvings)


class Curves:
    """Survival curves, one for each of the keys that they were asked for: Pr(value > x)."""

    def __init__(self, hazards: Floats) -> None:
        self._survival = np.concatenate((np.ones((len(hazards), 1)), np.cumprod(1.0 - hazards, axis=1)), axis=1)
        self._flat = self._survival.ravel()
        self._steps = np.diff(self._survival, axis=1, append=0.0).ravel()
        self._steps[BINS :: BINS + 1] = 0.0

    def beyond(self, which: Indices, value: Floats) -> Floats:
        """Pr(value > x) for x = `value`; the curve of row i is that of key `which[i]`, columns are further values."""
        place = np.log2(np.maximum(value, EDGES[1] / 2))
        place -= LEAST
        place *= OCTAVE
        np.clip(place, 0.0, BINS, out=place)
        edge = place.astype(np.intp)
        place -= edge
        edge += which * (BINS + 1) if value.ndim == 1 else (which * (BINS + 1))[:, None]
        place *= self._steps[edge]
        place += self._flat[edge]
        beyond: Floats = place
        return beyond

    def ends(self, which: Indices, reached: Floats, step: Floats, steps: int) -> Floats:
        """[operation, k]: Pr(it ends between `reached` + k * `step` and one step later | it got to `reached`)."""
        return self._between(which, reached[:, None] + step[:, None] * np.arange(steps + 1))

    def kernel(self, which: Indices, reached: Floats, step: Floats, steps: int) -> Floats:
        """[operation, j]: the same for operations that start at any moment of a step: the chance to end j steps later."""
        return self._between(which, reached[:, None] + step[:, None] * np.maximum(np.arange(steps + 1) - 0.5, 0.0))

    def within(self, which: Indices, limit: float) -> tuple[Floats, Floats]:
        """(Pr(value < `limit`), expected value of such a one) of those that begin."""
        whole, end = np.zeros(len(which)), np.full(len(which), limit)
        beyond = self.beyond(which, end)
        area = self.left(which, whole) - beyond * self.left(which, end)
        chance = 1.0 - beyond
        return chance, np.clip((area - limit * beyond) / np.maximum(chance, _TINY), 0.0, limit)

    def _between(self, which: Indices, points: Floats) -> Floats:
        beyond = self.beyond(which, points)
        beyond /= np.maximum(beyond[:, :1], _TINY)
        ends: Floats = beyond[:, :-1] - beyond[:, 1:]
        return ends

    def left(self, which: Indices, reached: Floats) -> Floats:
        """Expected value minus `reached`, of those that get there."""
        widths = np.diff(EDGES)
        areas = widths * (self._survival[:, 1:] + self._survival[:, :-1]) / 2
        after = np.cumsum(areas[:, ::-1], axis=1)[:, ::-1]
        after = np.concatenate((after, np.zeros((len(after), 1))), axis=1)
        cell = bins_of(reached)
        alive = np.maximum(self.beyond(which, reached), _TINY)
        rest = (EDGES[cell + 1] - reached) * (alive + self._survival[which, cell + 1]) / 2
        left: Floats = (np.maximum(rest, 0.0) + after[which, cell + 1]) / alive
        return left


def bin_of(value: float) -> int:
    return min(max(int((math.log2(value) - LEAST) * OCTAVE), 0), BINS - 1) if value > EDGE_1 else 0


def bins_of(value: Floats) -> Indices:
    """`bin_of` each."""
    places = (np.log2(np.maximum(value, EDGE_1 / 2)) - LEAST) * OCTAVE
    bins: Indices = np.clip(places, 0, BINS - 1).astype(np.intp)
    return bins


def _shrunk(counts: Floats, running: Floats, around: Floats, shrink: float) -> Floats:
    """Hazards [class, bin] from what ended and what runs in each bin, and the hazards of the classes around."""
    ended, never = counts[:, :BINS], counts[:, BINS:]
    later = np.cumsum((ended + running)[:, ::-1], axis=1)[:, ::-1] + never
    # Those that run in the bin have been at risk for half of it.
    risk = later - 0.5 * running
    hazards: Floats = (ended + shrink * around) / (risk + shrink)
    return hazards


EDGE_1 = float(EDGES[1])
_TINY = 1e-12
