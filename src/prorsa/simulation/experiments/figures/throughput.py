"""Table 1: throughput by request length and expert parallelism, from the operator grids alone."""

from __future__ import annotations

from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import Profile, load_profile
from prorsa.simulation.experiments import paper
from prorsa.simulation.experiments.figures.common import MIMO, QWEN, judged
from prorsa.simulation.experiments.page import Section
from prorsa.simulation.experiments.settings import Lab
from prorsa.simulation.experiments.verdicts import Finding, near_ratio, same_side

DOUBLED = {MIMO: "mimo-v2.5-pro-h200-ep32-decode", QWEN: "qwen3-235b-h200-ep8-decode"}
"""Profiles of decode instances of twice the expert parallelism."""
STAND_IN = (
    "Conjecture: the profile stands in for MiMo-V2.5-Pro from its public geometry; its kernels were not measured."
)


def prefill_throughput(profile: Profile, length: int) -> float:
    """Tokens a second of one server that prefills prompts of a length."""
    return StepCosts(profile).prefill_speed(length) * profile.gpus_per_server / profile.gpus


def decode_throughput(profile: Profile, length: int) -> float:
    """Tokens a second of one server whose ranks decode `DECODE_BATCH` requests of a length each."""
    costs, batch = StepCosts(profile), paper.DECODE_BATCH
    step = costs.decode_local(batch, length) + costs.shared(False, batch, batch)
    return batch * profile.ranks / step * profile.gpus_per_server / profile.gpus


def decode_ep_ratios() -> list[float]:
    """Decode throughput of a server at EP32 over that at EP16, by length."""
    narrow, wide = _mimo_profiles()
    return [decode_throughput(wide, length) / decode_throughput(narrow, length) for length in paper.LENGTHS.values()]


def _mimo_profiles() -> tuple[Profile, Profile]:
    return load_profile("mimo-v2.5-pro-h200-ep16"), load_profile(DOUBLED[MIMO])


def table1(lab: Lab) -> Section:
    narrow, wide = _mimo_profiles()
    findings = []
    for what, throughput, table in (
        ("prefill", prefill_throughput, paper.PREFILL_THROUGHPUT),
        ("decode", decode_throughput, paper.DECODE_THROUGHPUT),
    ):
        values = [throughput(narrow, length) for length in paper.LENGTHS.values()]
        for name, value, stated_value in list(zip(paper.LENGTHS, values, table["EP16"], strict=True))[1:]:
            ours, theirs = value / values[0], stated_value / table["EP16"][0]
            findings.append(_shape_finding(f"{what}, EP16, {name} over 8K", ours, theirs))
    for name, ours, low, high in zip(
        paper.LENGTHS,
        decode_ep_ratios(),
        paper.DECODE_THROUGHPUT["EP16"],
        paper.DECODE_THROUGHPUT["EP32"],
        strict=True,
    ):
        findings.append(_shape_finding(f"decode, EP32 over EP16, {name}", ours, high / low))
    text = (
        f"Throughput of a server from the operator grids of `{narrow.name}` and `{wide.name}`. The paper normalises by EP64 "
        "at 512K, for which there is no grid that we trust, so each row here is a ratio of two cells of its table. "
        "Prefill at EP32 and both stages at EP64 are left out for the same reason. In direction: on the same side of 1."
    )
    return Section("table1", "Table 1: throughput by length and expert parallelism", text, findings)


def _shape_finding(row: str, ours: float, theirs: float) -> Finding:
    return Finding(
        row,
        f"{theirs:.2f}",
        f"{ours:.2f}",
        *judged(near_ratio(ours, theirs), same_side(ours, theirs), lambda: STAND_IN),
    )
