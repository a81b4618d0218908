"""How many instances of each role: the effective prefill speed, the solver and the policies."""

from prorsa.allocation.policies import Adaptive, Colocated, Demand, Moment, Policy, Situation, Static
from prorsa.allocation.solver import Allocation, solve
from prorsa.allocation.speed import PrefillSpeed

__all__ = [
    "Adaptive",
    "Allocation",
    "Colocated",
    "Demand",
    "Moment",
    "Policy",
    "PrefillSpeed",
    "Situation",
    "Static",
    "solve",
]
