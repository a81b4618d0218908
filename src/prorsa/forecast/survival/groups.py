"""What the members of a group have in common: how long their turns are, and how many.

The trajectories of a group answer one question, so their lengths go together: the intra-class correlation of the logarithm of
their turns is 0.6 to 0.8. What is known of a group is shrunk towards nothing in proportion to how little that is.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.backoff import Ema, forget_half, use
from prorsa.forecast.durations import Floats

T = TypeVar("T")
FORGET = 1 / 4096
"""Weight of the newest value in a variance, and in a mean; a plain mean before the 4096th."""
DOUBT = 256
"""Values from which what groups have in common is taken to be half as much as they seem to have."""
EXACT = 8
"""Turns before this one are a class each; later ones share one up to the next `OCTAVE`-th of an octave."""
OCTAVE = 4
SHRINK = 4.0
"""Turns of all indices together that the chance of one index is shrunk with."""
MOST = 0.999
"""No turn is sure to be the last."""
LITTLE = 0.02
"""Groups whose part of the variance is smaller are taken to have nothing in common."""
MOST_TASKS = 1024
"""That statistics are kept of: 2 KiB each."""
FRAILTY = 1.0
"""Shape (and rate) of the gamma distribution that the groups' inclination to end is taken to have."""


def _known(tasks: dict[str, T], task: str, make: Callable[[str], T]) -> T:
    """What is known of a task, of which half are forgotten when there are more than `MOST_TASKS`."""
    value = use(tasks, task, make)
    if len(tasks) > MOST_TASKS:
        forget_half(tasks)
    return value


class Groups:
    """Numbers of each live group, in columns that are read for all groups at once; 0 where nothing is known.

    A group is known by its code (`lifecycle.snapshot.Names`), which is its row in the columns.
    """

    def __init__(self) -> None:
        self._columns: list[array[float]] = []
        self._size = 0

    def column(self) -> array[float]:
        """A new one, to be written in the rows that are there."""
        column = array("d", [0.0] * self._size)
        self._columns.append(column)
        return column

    def cover(self, size: int) -> None:
        """See that there are rows for the codes below `size`."""
        if size > self._size:
            for column in self._columns:
                column.extend([0.0] * (size - self._size))
            self._size = size

    def forget(self, group: int) -> None:
        """None of it is live any more."""
        for column in self._columns:
            column[group] = 0.0


class GroupLengths:
    """How much longer than others of its class a group's values are, as a factor.

    Logarithms, less the mean of their class, are e = group + rest. The covariance of e with the mean of those that the group
    had before is the groups' part r of the variance; one with n values of mean m is expected at m * n r / (1 + (n - 1) r).
    The mean of e is not 0: the class's mean moves while the first values, the short ones, come in.
    """

    def __init__(self, groups: Groups) -> None:
        self._classes: dict[str, Ema] = {}
        self._counts, self._totals = groups.column(), groups.column()
        """Number and sum of the group's e."""
        self._own, self._squares = Ema(FORGET), Ema(FORGET)
        self._products, self._paired, self._before = Ema(FORGET), Ema(FORGET), Ema(FORGET)
        """Of a value and the mean of those before it in its group, where there are some."""

    def add(self, kind: str, group: int, value: float) -> float:
        """A value of the class `kind`. Returns the factor that stood for the group before."""
        mean = _known(self._classes, kind, lambda _: Ema(FORGET))
        logarithm = math.log(max(value, 1e-9))
        count, total = self._counts[group], self._totals[group]
        shift = self._shift(count, total)
        if mean.count:
            own = logarithm - mean.value
            self._own.add(own)
            self._squares.add(own * own)
            if count:
                self._products.add(own * total / count)
                self._paired.add(own)
                self._before.add(total / count)
            self._counts[group] = count + 1.0
            self._totals[group] = total + own
        mean.add(logarithm)
        return math.exp(shift)

    def factors(self) -> Floats:
        """Of each row of the groups."""
        share, count, total = self.share, np.array(self._counts), np.array(self._totals)
        if share < LITTLE:
            return np.ones(len(count))
        factors: Floats = np.exp((total - count * self._own.value) * share / (1.0 + (count - 1.0) * share))
        return factors

    @property
    def share(self) -> float:
        """r, the part of the variance that is between groups, in [0, 0.95]."""
        variance = self._squares.value - self._own.value**2
        if variance <= 0.0:
            return 0.0
        shared = self._products.value - self._paired.value * self._before.value
        sure = self._products.count / (self._products.count + DOUBT)
        return min(max(sure * shared / variance, 0.0), 0.95)

    def _shift(self, count: float, total: float) -> float:
        share = self.share
        if share < LITTLE:
            return 0.0
        return (total - count * self._own.value) * share / (1.0 + (count - 1.0) * share)


class _Task:
    def __init__(self) -> None:
        size = EXACT + 20 * OCTAVE
        self.turns = array("d", [0.0] * size)
        """Turns of each class that have ended, each with the inclination of its group."""
        self.last = array("d", [0.0] * size)
        """Of these, those that were the last of their trajectory."""
        self.all_turns = self.all_last = 0.0

    def chance(self, place: int) -> float:
        return min((self.last[place] + SHRINK * self.overall) / (self.turns[place] + SHRINK), MOST)

    @property
    def overall(self) -> float:
        """0 where no turn has ended."""
        return (self.all_last + 0.5) / (self.all_turns + 2.0) if self.all_turns else 0.0


_NOTHING = _Task()


class Endings:
    """The chance that a turn is its trajectory's last, by task, turn index and group.

    Every turn that ends is a trial, so that it does not matter that the short trajectories end first. The odds that a group
    ends early are a factor z on the hazard (a gamma frailty): with d ends where c were to be expected, z = (a + d) / (a + c).
    """

    def __init__(self, groups: Groups) -> None:
        self._tasks: dict[str, _Task] = {}
        self._ended, self._expected = groups.column(), groups.column()
        """Ends that the group had, and that were to be expected."""

    def add(self, task: str, group: int, turn: int, last: bool) -> None:
        """Turn `turn`, counted from 0, of a trajectory has ended."""
        counts = _known(self._tasks, task, lambda _: _Task())
        ended, expected = self._ended[group], self._expected[group]
        inclination = (FRAILTY + ended) / (FRAILTY + expected)
        counts.all_turns += 1.0
        place = _place(turn)
        chance = counts.chance(place)
        hazard = -math.log1p(-chance)
        # The end was that many times as likely as in other groups: z times where it seldom comes, once where it always does.
        counts.turns[place] += -math.expm1(-inclination * hazard) / chance
        if last:
            counts.last[place] += 1.0
            counts.all_last += 1.0
        self._ended[group] = ended + last
        # An end, whose chance is 1 - exp(-z * hazard), says of z near 1 as much as one where half of the hazard was to be
        # expected, if that is small, and one if it was sure.
        self._expected[group] = expected + (1.0 - hazard / math.expm1(hazard) if last else hazard)

    def going_on(self, tasks: Sequence[str], turns: int) -> tuple[Floats, Floats]:
        """([task, turn], [group]): the chance that a turn is not the last is exp(the first * the second).

        For the first `turns` turns of each task; it is 1 for a task of which no turn has ended.
        """
        counts = [self._tasks.get(name, _NOTHING) for name in tasks]
        places = _places(turns)
        ended, last = (
            np.array(column)[:, places] for column in zip(*((one.turns, one.last) for one in counts), strict=True)
        )
        shrink = SHRINK * np.array([one.overall for one in counts])
        logarithms = np.log1p(-np.minimum((last + shrink[:, None]) / (ended + SHRINK), MOST))
        return logarithms, (FRAILTY + np.array(self._ended)) / (FRAILTY + np.array(self._expected))


def _place(turn: int) -> int:
    return turn if turn < EXACT else EXACT + min(int(OCTAVE * math.log2(turn / EXACT)), 20 * OCTAVE - 1)


@lru_cache(maxsize=4)
def _places(turns: int) -> NDArray[np.intp]:
    """`_place` of the first ones."""
    return np.array([_place(turn) for turn in range(turns)], dtype=np.intp)
