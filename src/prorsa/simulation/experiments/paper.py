"""What the paper states, as data: "Prorsa: Unleashing the Potential of Prefill-Decode Disaggregation in Agentic
Reinforcement Learning", arXiv 2610.16592. Each value names its place there.

Only numbers that the text and the tables state are here. Values that could be read off a figure's bars are not.
"""

from __future__ import annotations

from dataclasses import dataclass

MODELS = ("qwen3-235b", "deepseek-v3.2", "mimo-v2.5-pro")
TASKS = ("math", "coding-agent", "general-agent")
AGENTIC = ("coding-agent", "general-agent")
STALENESS = ("on-policy", "2", "8")


@dataclass(frozen=True, slots=True)
class Range:
    """What the paper reports of several settings: the smallest and the largest value."""

    low: float
    high: float


SPEEDUP = Range(1.11, 4.05)
"""Fig. 5: rollout time of colocation over that of Prorsa, both agentic tasks."""
SPEEDUP_OF = {
    ("deepseek-v3.2", "coding-agent"): Range(2.54, 4.05),
    ("deepseek-v3.2", "general-agent"): Range(2.35, 2.99),
}
"""Section 5.2."""
MATH_TIME = Range(0.86, 1.28)
"""Section 5.2: rollout time of Prorsa over that of colocation, math; above 1 in most settings."""

IDLE = Range(0.0376, 0.5998)
"""Fig. 6: GPU idle ratio under colocation, from interference between prefill and decode across DP ranks, fraction."""
IDLE_OF = {"deepseek-v3.2": Range(0.3621, 0.5998), "mimo-v2.5-pro": Range(0.0376, 0.26)}
"""Sections 3.2, 5.3. For MiMo only "up to 26 %" is stated; its low end is that of all models."""

SWITCHING_GAIN = Range(1.0, 1.44)
"""Fig. 7: rollout time of the best static split over that of Prorsa, MiMo."""
BEST_SPLIT = {"math": "4:4", "coding-agent": "5:3", "general-agent": "3:5"}
"""Section 5.4."""
TRAJECTORY_S = {"coding-agent": 846.0, "general-agent": 216.0}
"""Section 5.4: mean end-to-end trajectory completion time, MiMo, seconds. Its 216 s are Prorsa's in Table 2, staleness 8."""
LIFETIME_RATIO = 3.92
"""Section 5.4: the first of these over the second."""

DOUBLED_DECODE = Range(1.04, 1.09)
"""Section 5.3: speedup from doubling the expert parallelism of decode instances, coding agent, MiMo and Qwen3."""

PREFILL_WAPE = Range(0.0540, 0.1437)
"""Section 5.5, Fig. 8, fraction."""
ADMISSION_WAPE = Range(0.0519, 0.1369)

SWITCH_S = 5.0
"""Appendix C: a role switch, on average, seconds."""

STEP_RATIO_SPREAD = {"on-policy": 1.20, "8": 1.74}
"""Section 3.3, Appendix A: the largest over the smallest prefill:decode token ratio of seven steps; the largest of both
agentic tasks."""

COLOCATED_TRAJECTORY_S = {
    "qwen3-235b": (133.88, 169.14, 176.55),
    "deepseek-v3.2": (713.05, 723.96, 939.54),
    "mimo-v2.5-pro": (253.17, 198.08, 252.36),
}
"""Table 2: mean trajectory completion time, general agent, seconds, by `STALENESS`."""
PRORSA_TRAJECTORY_S = {
    "qwen3-235b": (78.98, 86.96, 80.40),
    "deepseek-v3.2": (119.47, 123.21, 128.12),
    "mimo-v2.5-pro": (195.35, 158.90, 216.42),
}

LENGTHS = {"8K": 8192, "64K": 65536, "256K": 262144, "512K": 524288}
"""Request lengths of Table 1, tokens."""
DECODE_BATCH = 16
"""Requests of a DP rank in Table 1."""
PREFILL_THROUGHPUT = {
    "EP16": (3.24, 2.77, 1.76, 1.29),
    "EP32": (2.78, 2.33, 1.36, 1.02),
    "EP64": (2.22, 1.95, 1.37, 1.0),
}
"""Table 1: throughput of a server, MiMo, by `LENGTHS`; 1 is EP64 at 512K."""
DECODE_THROUGHPUT = {
    "EP16": (1.20, 1.17, 1.10, 1.02),
    "EP32": (1.31, 1.26, 1.14, 1.01),
    "EP64": (1.29, 1.25, 1.13, 1.0),
}
