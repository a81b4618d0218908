"""How many instances of each role a demand takes (paper, 4.2, Eq. 1).

The paper's two cases, the largest safety margin d where the demand fits the budget and the smallest demand-to-capacity
ratio where it does not, are one rule: among the pairs within the budget, maximise min(n_P / a, n_D / b), where a and b are
the two demands in instances. A pair that reaches 1 + d has exactly the margin d.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-9
"""Two ratios that differ by less than this fraction are equal: the difference is rounding, not demand."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Instances of each role."""

    prefill: int
    decode: int
    mixed: int = 0

    def __str__(self) -> str:
        parts = [f"{self.prefill}:{self.decode}"] if self.prefill or self.decode else []
        return " + ".join([*parts, f"{self.mixed} mixed"] if self.mixed or not parts else parts)

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.mixed


def solve(
    prefill_demand: float,
    decode_demand: float,
    m_p: int,
    m_d: int,
    gpus: int,
    current: Allocation,
    instances: int | None = None,
) -> Allocation:
    """The best allocation within `gpus`, at least one instance of each role.

    `prefill_demand` and `decode_demand` are a and b, in instances: W / (S theta) and (K_now + K_dec) / C. `m_p` and `m_d`
    are the GPUs of an instance. `instances` fixes n_P + n_D, for a cluster that flips instances and neither starts nor
    stops any. No demand at all keeps the current roles; where only one role has demand, the other keeps one instance.

    Equally good allocations are told apart, in this order, by: fewest instances that leave their current role, most GPUs
    in use, most decode. None of these looks at the demand, so that more demand for a role never gives it less, and the
    answer for its own result as `current` is that result: no oscillation.

    Raises ValueError where not even one instance of each role fits.
    """
    _check(prefill_demand, decode_demand, m_p, m_d, gpus)
    prefill, decode = _pairs(m_p, m_d, gpus, instances)
    # Only the demands' proportion matters; this way the ratio that decides is never out of range.
    larger = max(prefill_demand, decode_demand) or 1.0
    ratios = np.minimum(_ratio(prefill, prefill_demand / larger), _ratio(decode, decode_demand / larger))
    best = ratios >= ratios.max() * (1 - ROUNDING)
    prefill, decode = prefill[best], decode[best]
    leaving = np.maximum(current.prefill - prefill, 0) + np.maximum(current.decode - decode, 0)
    used = m_p * prefill + m_d * decode
    first = np.lexsort((prefill, -used, leaving))[0]
    return Allocation(int(prefill[first]), int(decode[first]))


def served(allocation: Allocation, prefill_demand: float, decode_demand: float) -> float:
    """min(n_P / a, n_D / b): how often the demand fits; below 1, the part of it that is served. Infinite without demand."""
    wanted = ((allocation.prefill, prefill_demand), (allocation.decode, decode_demand))
    return min((count / demand for count, demand in wanted if demand > 0), default=inf)


def _pairs(m_p: int, m_d: int, gpus: int, instances: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every n_P, with the one n_D worth a look: the largest that fits, since more is never worse by any criterion."""
    prefill = np.arange(1, (gpus - m_d) // m_p + 1)
    largest = (gpus - m_p * prefill) // m_d
    if instances is None:
        return prefill, largest
    decode = instances - prefill
    fits = (decode >= 1) & (decode <= largest)
    if not fits.any():
        raise ValueError(
            f"{instances} instances of {m_p} (prefill) or {m_d} (decode) GPUs do not fit {gpus} GPUs with one of each role; "
            "use fewer instances or more GPUs"
        )
    return prefill[fits], decode[fits]


def _ratio(count: NDArray[np.int64], demand: float) -> NDArray[np.float64]:
    if demand == 0:
        return np.full(len(count), np.inf)
    with np.errstate(over="ignore"):
        return count / demand


def _check(prefill_demand: float, decode_demand: float, m_p: int, m_d: int, gpus: int) -> None:
    for name, demand in (("prefill", prefill_demand), ("decode", decode_demand)):
        if not 0 <= demand < np.inf:
            raise ValueError(f"{name} demand {demand}: it must be finite and not negative, in instances")
    if m_p < 1 or m_d < 1:
        raise ValueError(f"{m_p} and {m_d} GPUs an instance: both must be 1 or more")
    if gpus < m_p + m_d:
        raise ValueError(
            f"a budget of {gpus} GPUs: one instance of each role takes {m_p + m_d}; give that many or more"
        )
