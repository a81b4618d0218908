"""How many instances of each role: the effective prefill speed, the solver and the policies."""

from prorsa.allocation.costs import EngineCosts
from prorsa.allocation.planned import Planned
from prorsa.allocation.policies import Adaptive, Colocated, Demand, Handling, Moment, Policy, Situation, Static
from prorsa.allocation.solver import Allocation, solve
from prorsa.allocation.speed import PrefillSpeed

__all__ = [
    "Adaptive",
    "Allocation",
    "Colocated",
    "Demand",
    "EngineCosts",
    "Handling",
    "Moment",
    "Planned",
    "Policy",
    "PrefillSpeed",
    "Situation",
    "Static",
    "solve",
]
