"""The same greedy rollout under each policy, in one run: how long a batch takes, and what a trajectory sees.

    python benchmarks/policies.py [--rounds 3] [--profile PROFILE.yaml] [section.key=value ...]

With the profile of an engine (`prorsa profile --config examples/check.yaml --out PROFILE.yaml`) `planned` is one of them. The
policies take turns, round after round, so that a change of the machine's speed meets them all. On a small machine the
engines share the cores: this measures what the policies cost there, not what they gain on GPUs of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from statistics import median

from prorsa import commands
from prorsa.assembly import new_run_dir
from prorsa.config import load_config
from prorsa.report.measures import inter_token_latencies
from prorsa.report.rundir import Run, read_run

CONFIG = Path(__file__).parents[1] / "examples" / "check.yaml"
POLICIES = {
    "colocated": ["policy.name=colocated"],
    **{f"static {split}": ["policy.name=static", f"policy.split='{split}'"] for split in ("1:3", "2:2", "3:1")},
    "adaptive": ["policy.name=adaptive"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="of an engine; then `planned` takes its turns too")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    policies = dict(POLICIES)
    if arguments.profile is not None:
        policies["planned"] = ["policy.name=planned", f"policy.profile={arguments.profile.absolute()}"]
    runs: dict[str, list[Run]] = {name: [] for name in policies}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(arguments.rounds):
            for name, policy in policies.items():
                config = load_config(CONFIG, [f"run_dir={directory}", *arguments.overrides, *policy])
                run_dir = new_run_dir(config)
                asyncio.run(commands.rollout(config, run_dir))
                runs[name].append(read_run(run_dir))
    baseline = seconds(runs["colocated"])
    print(
        "| policy | s a batch | over colocated | inter-token latency p50, ms | p99, ms | flips | resends | roles at last |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, several in runs.items():
        latencies = [inter_token_latencies(run.turns) for run in several]
        p50, p99 = (
            1000 * median(getattr(latency, key) for latency in latencies) for key in ("overall_p50", "overall_p99")
        )
        flips = median(len(run.flips) for run in several)
        resends = median(sum(turn.attempts - 1 for turn in run.turns) for run in several)
        batch = seconds(several)
        roles = ", ".join(sorted({str(run.decided[-1].decision.current) for run in several}))
        cells = f"{batch:.2f} | {batch / baseline:.2f} | {p50:.1f} | {p99:.1f} | {flips:g} | {resends:g} | {roles}"
        print(f"| {name} | {cells} |")


def seconds(runs: list[Run]) -> float:
    """Of a batch: the median over all but the first, which starts with cold caches."""
    return median(step.seconds for run in runs for step in run.steps[1:])


if __name__ == "__main__":
    main()
