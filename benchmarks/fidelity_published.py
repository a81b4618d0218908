"""The shipped profiles beside published measurements: SGLang's DeepSeek-V3, the paper's Table 1 and its GPU idle ratios.

    python benchmarks/fidelity_published.py

Nothing is fitted, nothing is asserted. Where the published system is not the profile's, the table says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import Profile, load_profile

GPUS_PER_SERVER = 8
LENGTHS = {"8K": 2**13, "64K": 2**16, "256K": 2**18, "512K": 2**19}
TABLE_1 = {
    "prefill EP16": (3.24, 2.77, 1.76, 1.29),
    "decode EP16": (1.20, 1.17, 1.10, 1.02),
    "decode EP32": (1.31, 1.26, 1.14, 1.01),
}
"""The paper's throughput of a server, MiMo-V2.5-Pro, at `LENGTHS`; prefill and decode have units of their own."""
BATCH = 16
"""Decode requests of a rank, in Table 1 and here wherever ranks decode beside a prefill."""
DECODE_CONTEXT = 2**15
IDLE_RATIOS = {
    "deepseek-v3.2-h200-ep16": "36.21-59.98 %",
    "mimo-v2.5-pro-h200-ep16": "up to 26 %",
    "qwen3-235b-h200-ep4": "3.76-59.98 % over all models",
}
"""The paper's GPU idle ratios under colocation (5.3), over all tasks and staleness settings."""


@dataclass(frozen=True)
class Published:
    """A throughput of DeepSeek-V3 on H100, tokens a second and server of eight (lmsys.org, 5 May 2025)."""

    what: str
    value: float
    ours: Callable[[Profile, StepCosts], float]
    imbalance: float


def prefill_prompts(length: int, count: int) -> Callable[[Profile, StepCosts], float]:
    """Throughput where each rank prefills `count` whole prompts of `length` in one step."""

    def throughput(profile: Profile, costs: StepCosts) -> float:
        tokens = length * count
        # The prompts do not attend to each other.
        seconds = count * costs.prefill_local(length, 0) + costs.shared(True, tokens, tokens)
        return per_server(profile, tokens / seconds)

    return throughput


def decode(batch: int, context: int) -> Callable[[Profile, StepCosts], float]:
    """Throughput where each rank decodes `batch` requests of `context` tokens."""

    def throughput(profile: Profile, costs: StepCosts) -> float:
        return per_server(profile, batch / (costs.decode_local(batch, context) + costs.shared(False, batch, batch)))

    return throughput


def per_server(profile: Profile, rank_rate: float) -> float:
    return rank_rate * profile.ranks * GPUS_PER_SERVER / profile.gpus


PROMPTS = prefill_prompts(4096, 4)
SGLANG = (
    Published("prefill of four 4,096-token prompts a GPU, EP32, experts balanced", 59_337, PROMPTS, 0.0),
    Published("the same under its own expert load, redundant experts rebalanced", 50_302, PROMPTS, 1.0),
    Published("decode of 256 requests a GPU at 2,000 tokens, EP72", 22_282, decode(256, 2000), 0.0),
    Published("the same", 22_282, decode(256, 2000), 1.0),
)


def table(columns: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def sglang() -> Iterator[Sequence[str]]:
    for published in SGLANG:
        profile = load_profile("deepseek-v3-h200-ep16", expert_imbalance=published.imbalance)
        ours = published.ours(profile, StepCosts(profile))
        load = "power law" if published.imbalance else "balanced"
        yield published.what, f"{published.value:,.0f}", load, f"{ours:,.0f}", f"{ours / published.value - 1:+.0%}"


def table_1() -> Iterator[Sequence[str]]:
    """Each stage relative to its EP16 at 8K, since the paper's normalisation is relative too."""
    base: dict[str, float] = {}
    for label, published in TABLE_1.items():
        stage, ep = label.split()
        profile = load_profile("mimo-v2.5-pro-h200-ep16" if ep == "EP16" else "mimo-v2.5-pro-h200-ep32-decode")
        costs = StepCosts(profile)
        if stage == "prefill":
            ours = [costs.prefill_speed(length) for length in LENGTHS.values()]
        else:
            ours = [decode(BATCH, length)(profile, costs) for length in LENGTHS.values()]
        first = base.setdefault(stage, ours[0])
        reference = TABLE_1[f"{stage} EP16"][0]
        pairs = [(value / reference, our / first) for value, our in zip(published, ours, strict=True)]
        # The first pair of EP16 is 1 / 1 by construction.
        errors = [abs(our / value - 1) for value, our in pairs[ep == "EP16" :]]
        error = sum(errors) / len(errors)
        yield label, *(f"{value:.2f} / {our:.2f}" for value, our in pairs), f"{error:.0%}"


def idle() -> Iterator[Sequence[str]]:
    for name, published in IDLE_RATIOS.items():
        profile = load_profile(name)
        costs = StepCosts(profile)
        for prefilling in sorted({1, profile.ranks // 2}):
            shares = [idle_share(profile, costs, prefilling, prefix) for prefix in (0, 2**15, 2**17)]
            ranks = f"{prefilling} of {profile.ranks}"
            yield profile.model, published, ranks, *(f"{share:.1%}" for share in shares)


def idle_share(profile: Profile, costs: StepCosts, prefilling: int, prefix: int) -> float:
    """How much of one step the mean rank waits at the experts, where `prefilling` ranks prefill a chunk after `prefix`
    and the others decode."""
    decoding = profile.ranks - prefilling
    tokens = (prefilling * profile.chunk + decoding * BATCH) / profile.ranks
    slow, fast = costs.prefill_local(profile.chunk, prefix), costs.decode_local(BATCH, DECODE_CONTEXT)
    return decoding * (slow - fast) / profile.ranks / (slow + costs.shared(True, tokens, profile.chunk))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("SGLang's DeepSeek-V3 on H100, tokens/s a server, beside the profile of EP16 on H200\n")
    table(("published", "tokens/s", "our experts", "ours", "difference"), sglang())
    print("Table 1 of the paper, MiMo-V2.5-Pro, throughput relative to EP16 at 8K: the paper / ours\n")
    table(("", *LENGTHS, "mean difference"), table_1())
    print(
        f"GPU idle ratio: the paper's mean over a rollout; ours in one step, the other ranks decoding {BATCH} x 32K\n"
    )
    table(("model", "the paper", "ranks that prefill", "after 0", "after 32K", "after 128K"), idle())


if __name__ == "__main__":
    main()
