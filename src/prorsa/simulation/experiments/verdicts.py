"""Whether what we found agrees with what the paper says. Decided by rule, so that no prose can claim what a run denies.

The cost model is stated to be 20 to 40 % off in absolute terms, and better in ratios. So a ratio, a share or a percentage
agrees within 20 % of the paper's, and a time within 40 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from prorsa.simulation.experiments.paper import Range

RATIO_TOLERANCE = 0.2
TIME_TOLERANCE = 0.4


class Verdict(StrEnum):
    AGREES = "agrees"
    DIRECTION = "agrees in direction"
    DIFFERS = "does not agree"


def verdict(agrees: bool, direction: bool = False) -> Verdict:
    if agrees:
        return Verdict.AGREES
    return Verdict.DIRECTION if direction else Verdict.DIFFERS


def near(ours: float, paper: float, tolerance: float = RATIO_TOLERANCE) -> bool:
    """Within a factor of 1 + tolerance, either way."""
    return paper / (1 + tolerance) <= ours <= paper * (1 + tolerance)


def within(ours: Sequence[float], paper: Range, tolerance: float = RATIO_TOLERANCE) -> bool:
    """Whether all of ours lie in the paper's range, its ends moved by the tolerance."""
    return all(paper.low / (1 + tolerance) <= value <= paper.high * (1 + tolerance) for value in ours)


def same_side(ours: float, paper: float) -> bool:
    """Whether both ratios say that the same of two things is larger."""
    return (ours - 1) * (paper - 1) > 0


def near_ratio(ours: float, paper: float) -> bool:
    """Near, and on the same side of 1: a gain is no agreement with a loss, however small both are."""
    return near(ours, paper) and same_side(ours, paper)


def within_gains(ours: Sequence[float], paper: Range, tolerance: float = RATIO_TOLERANCE) -> bool:
    """Within a range of which every value is a gain, and gains themselves."""
    return within(ours, paper, tolerance) and min(ours) > 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One value of the paper beside ours."""

    row: str
    paper: str
    ours: str
    verdict: Verdict
    reason: str = ""
    """Why it does not agree: verified by a run, or marked as a conjecture. Empty where it agrees."""


def span(values: Sequence[float], form: str = "{:.2f}") -> str:
    """`low to high`, or the value where it is but one."""
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low} to {high}"
