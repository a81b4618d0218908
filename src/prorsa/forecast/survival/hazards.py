"""How long things take or get, learnt online as hazards: what is left of an operation that has gone so far.

Values (seconds or tokens) are counted in logarithmic bins, by class. What still runs counts too, as far as it has got: a
class of which mostly the short ones have ended is not taken to be short (the product-limit estimate of Kaplan and Meier). In
each bin a class is shrunk towards the class around it, in proportion to how few of its values get that far, and the widest
class towards what it is in the octave before, so that what has got further than anything yet goes on as it did. Where nothing
is known, a prior that is free of scale has it that what has got somewhere gets twice as far.

What began longer ago counts less, by the time of its beginning and not of its end: in a window of ends, the long ones are too
many while the number of operations shrinks, and beside what still runs they count twice.

A key is a tuple; the class of a key lies in the classes of its prefixes, and all lie in that of `()`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.backoff import Key, forget_half, use
from prorsa.forecast.durations import Floats

Indices = NDArray[np.intp]

OCTAVE = 4
"""Bins in which a value doubles."""
LEAST = -7
"""The first bin ends just above 2 ** LEAST and holds everything below."""
MOST = 18
"""The last one ends at 2 ** MOST: three days, or a quarter of a million tokens."""
BINS = OCTAVE * (MOST - LEAST)
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
WIDEST = 1
"""The row of the class that all others lie in."""
MOST_KEYS = 4096
"""When there are more, the half of them that nothing was added to for longest is forgotten: 800 bytes each."""
BLOCK = 512
"""Operations that are worked out in one go: what that takes stays in a fast cache, and on pages that are there already."""


@dataclass(frozen=True, slots=True)
class Level:
    """Classes of operations: keys of one length."""

    names: Sequence[Hashable]
    """[class]: the last part of its key."""
    around: Indices
    """[class]: the one of the level before that it lies in, whose key is the rest; 0 in the first level."""
    which: Indices
    """[operation]: its class."""


class Hazards:
    """The values of all classes. `add` is O(length of the key)."""

    def __init__(self) -> None:
        self._inner: list[dict[Hashable, int]] = [{}, {}]
        """The rows of the classes in that of each row, by the last part of their keys. Row 0 is that of all classes of which
        nothing is known, `WIDEST` that of `()`."""
        self._chains: dict[Key, tuple[int, ...]] = {}
        self._ended = array("d", [0.0] * 2 * (BINS + 1))
        """Row by row the weight of the values in each bin, and behind them that of those that never ended."""
        self._since: float | None = None
        """What begins then has weight 1."""

    def add(self, key: Key, value: float, began: float) -> None:
        """What began at `began` came to its end with `value`; infinite where it never will."""
        chain = use(self._chains, key, self._chain)
        cell = BINS if value == math.inf else bin_of(value)
        ended, weight = self._ended, self._weight(began)
        for row in chain:
            ended[row * (BINS + 1) + cell] += weight
        if len(self._chains) > MOST_KEYS:
            self._forget()

    def weights(self, began: Floats, time: float) -> Floats:
        """What operations count at `time` that began then."""
        weights: Floats = np.exp2((began - time) / HALF_LIFE)
        return weights

    def curves(
        self, levels: Sequence[Level], reached: Floats, weight: Floats, time: float, upto: float = math.inf
    ) -> list[Curves]:
        """The survival curves of each level's classes at `time`, each level in the one before it, the first in that of `()`.

        Operations that count `weight[i]` still run and have got as far as `reached[i]`. Of values beyond `upto`, and of what
        is `left`, the curves may not be asked where it is given: there are none.
        """
        width = bin_of(upto) + 1
        # The classes of all levels are one behind another; where each level begins.
        firsts = list(accumulate((len(level.names) for level in levels), initial=1))
        # All is weighed as of when the weights began, rather than as of now.
        now = self._weight(time)
        ended = np.frombuffer(self._ended).reshape(-1, BINS + 1).take(self._rows(levels), axis=0)
        # What runs has been at risk for the part of its bin that lies behind it.
        bins, parts = np.divmod(np.minimum(_places(reached), width - _TINY), 1.0)
        weight = now * weight
        running, ahead = _counted(levels, firsts, bins.astype(np.intp), (weight, weight * (1.0 - parts)), width)
        risk = _at_risk(ended, running, ahead)
        hazards = np.empty_like(risk)
        hazards[0] = _widest(ended[0, :width], risk[0], now * PRIOR)
        risk[1:] += now * SHRINK
        around = 0
        for level, first in zip(levels, firsts, strict=False):
            own = slice(first, first + len(level.names))
            shared = hazards.take(around + level.around, axis=0)
            shared *= now * SHRINK
            shared += ended[own, :width]
            np.divide(shared, risk[own], out=hazards[own])
            around = first
        whole = Curves.of(hazards)
        return [whole.part(*bounds) for bounds in pairwise(firsts)]

    def _forget(self) -> None:
        """Half of the keys, and the rows that no other one has."""
        forget_half(self._chains)
        chains, rows = self._chains, np.array(self._ended).reshape(-1, BINS + 1)
        self._inner, self._ended = [{}, {}], self._ended[: 2 * (BINS + 1)]
        self._chains = {key: self._chain(key) for key in chains}
        kept = np.zeros((len(self._inner), BINS + 1))
        for key, chain in self._chains.items():
            kept[list(chain)] = rows[list(chains[key])]
        self._ended = array("d", kept.ravel())

    def _chain(self, key: Key) -> tuple[int, ...]:
        """The rows of all classes that the key is in, the widest first. They are made where they are not there."""
        chain = [WIDEST]
        for part in key:
            inner = self._inner[chain[-1]]
            row = inner.get(part)
            if row is None:
                row = inner[part] = len(self._inner)
                self._inner.append({})
                self._ended.extend([0.0] * (BINS + 1))
            chain.append(row)
        return tuple(chain)

    def _rows(self, levels: Sequence[Level]) -> list[int]:
        """Of the widest class and those of all levels."""
        before = [WIDEST]
        rows = [*before]
        for level in levels:
            inner = [self._inner[row] for row in before]
            before = [
                inner[around].get(name, 0) for name, around in zip(level.names, level.around.tolist(), strict=True)
            ]
            rows += before
        return rows

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

    def __init__(self, survival: Floats, heights: Floats, slopes: Floats) -> None:
        self._survival = survival
        """[key, edge]."""
        self._heights, self._slopes = heights, slopes
        """[key, edge] each: what the curve is from one edge to the next as height + slope * place, see `_places`."""

    @classmethod
    def of(cls, hazards: Floats) -> Curves:
        """Of hazards [key, bin]."""
        survival = np.empty((len(hazards), hazards.shape[1] + 1))
        survival[:, 0] = 1.0
        np.subtract(1.0, hazards, out=survival[:, 1:])
        np.multiply.accumulate(survival, axis=1, out=survival)
        # Beyond the last edge it stays what it is.
        slopes = np.empty_like(survival)
        np.subtract(survival[:, 1:], survival[:, :-1], out=slopes[:, :-1])
        slopes[:, -1] = 0.0
        heights = slopes * _NUMBERS[: slopes.shape[1]]
        return cls(survival, np.subtract(survival, heights, out=heights), slopes)

    def part(self, first: int, last: int) -> Curves:
        """Those of the keys from `first` on and before `last`."""
        return Curves(self._survival[first:last], self._heights[first:last], self._slopes[first:last])

    def beyond(self, which: Indices, value: Floats) -> Floats:
        """Pr(value > x) for x = `value`; the curve of row i is that of key `which[i]`, columns are further values."""
        return self._at(which, _places(value))

    def _at(self, which: Indices, places: Floats, out: Floats | None = None) -> Floats:
        """`beyond` of `places`, which are used up."""
        edge = places.astype(np.intp)
        start = which * self._survival.shape[1]
        edge += start if edge.ndim == 1 else start[:, None]
        places *= self._slopes.take(edge)
        beyond: Floats = np.add(places, self._heights.take(edge), out=out)
        return beyond

    def course(self, which: Indices, reached: Floats, ahead: Floats) -> tuple[Floats, Floats]:
        """([operation, k]: Pr(value > `reached` + `ahead`), [operation]: Pr(value > `reached`), never 0).

        `ahead` [operation or 1, k] begins with 0. The first over the second is the chance of those that got to `reached`.
        """
        course = np.empty((len(which), ahead.shape[1]))
        for first in range(0, len(which), BLOCK):
            some = slice(first, first + BLOCK)
            value = reached[some, None] + (ahead if len(ahead) == 1 else ahead[some])
            self._at(which[some], _places(value, out=value), out=course[some])
        # Where hardly any gets to `reached`, it goes on for ever.
        return course, np.maximum(course[:, 0], _TINY)

    def kernel(self, which: Indices, reached: Floats, step: Floats, steps: int) -> Floats:
        """[operation, j]: those that start at any moment of a `step` and get to `reached` end j steps later."""
        course, alive = self.course(which, reached, step[:, None] * np.maximum(np.arange(steps + 1) - 0.5, 0.0))
        kernel: Floats = (course[:, :-1] - course[:, 1:]) / alive[:, None]
        return kernel

    def within(self, which: Indices, limit: float) -> tuple[Floats, Floats]:
        """(Pr(value < `limit`), expected value of such a one) of those that begin."""
        end = np.full(len(which), limit)
        beyond = self.beyond(which, end)
        area = self._areas[which, 0] - self._area(which, end, beyond)
        chance = 1.0 - beyond
        return chance, np.clip((area - limit * beyond) / np.maximum(chance, _TINY), 0.0, limit)

    @cached_property
    def _areas(self) -> Floats:
        """[key, edge]: the area under the curve from there on."""
        areas = np.zeros_like(self._survival)
        np.add(self._survival[:, 1:], self._survival[:, :-1], out=areas[:, :-1])
        areas[:, :-1] *= _HALF_WIDTHS
        return _tails(areas)

    def left(self, which: Indices, reached: Floats) -> Floats:
        """Expected value minus `reached`, of those that get there."""
        alive = np.maximum(self.beyond(which, reached), _TINY)
        left: Floats = self._area(which, reached, alive) / alive
        return left

    def _area(self, which: Indices, value: Floats, beyond: Floats) -> Floats:
        """The area under the curves from `value` on, where they are `beyond`."""
        edge = bins_of(value) + 1
        rest = EDGES.take(edge) - value
        edge += which * self._survival.shape[1]
        rest *= (beyond + self._survival.take(edge)) / 2
        area: Floats = np.maximum(rest, 0.0) + self._areas.take(edge)
        return area


def bin_of(value: float) -> int:
    if value <= EDGE_1:
        return 0
    return min(int((math.log2(value) - LEAST) * OCTAVE), BINS - 1) if value < math.inf else BINS - 1


def bins_of(value: Floats) -> Indices:
    """`bin_of` each."""
    return np.minimum(_places(value), BINS - 1).astype(np.intp)


def _places(value: Floats, out: Floats | None = None) -> Floats:
    """How many bins below the values there are, with the part of their own: 0 to `BINS`."""
    places: Floats = np.clip(value, 2.0**LEAST, 2.0**MOST, out=out)
    np.log2(places, out=places)
    places -= LEAST
    places *= OCTAVE
    return places


def _counted(
    levels: Sequence[Level], firsts: Sequence[int], bins: Indices, weights: Sequence[Floats], width: int
) -> list[Floats]:
    """[class, bin] of each of the `weights`: the sum over what runs, in its classes of all levels."""
    cells = np.concatenate(
        [bins, *((level.which + first) * width + bins for level, first in zip(levels, firsts, strict=False))]
    )
    return [
        np.bincount(cells, np.tile(weight, len(levels) + 1), firsts[-1] * width)
        .reshape(-1, width)
        .astype(np.float64, copy=False)
        for weight in weights
    ]


def _at_risk(ended: Floats, running: Floats, ahead: Floats) -> Floats:
    """[class, bin] from what ended in each bin, the last one being that of what never does, and what runs.

    What runs in a bin has the part `ahead` of it before it. `running` has the first bins only, and so has the result.
    """
    width = running.shape[1]
    risk = _tails(ended[:, :width] + running)
    risk -= ahead
    risk += ended[:, width:].sum(axis=1, keepdims=True)
    return risk


def _widest(ended: Floats, risk: Floats, prior: float) -> Floats:
    """The hazards [bin] of the widest class: where nothing has got to yet, things go on as in the octave before."""
    before = (_octave_before(ended) + prior * PRIOR_HAZARD) / (_octave_before(risk) + prior)
    hazards: Floats = (ended + prior * before) / (risk + prior)
    return hazards


def _octave_before(values: Floats) -> Floats:
    """[bin]: the sum of the values in the octave before each bin."""
    sums = np.zeros_like(values)
    np.add.accumulate(values[:-1], out=sums[1:])
    return np.append(sums[:OCTAVE], sums[OCTAVE:] - sums[:-OCTAVE])


def _tails(values: Floats) -> Floats:
    """The sums of each column and those behind it."""
    tails: Floats = np.add.accumulate(values[:, ::-1], axis=1)[:, ::-1]
    return tails


EDGE_1 = float(EDGES[1])
_NUMBERS: Floats = np.arange(BINS + 1.0)
_HALF_WIDTHS: Floats = (EDGES[1:] - EDGES[:-1]) / 2
_TINY = 1e-12
