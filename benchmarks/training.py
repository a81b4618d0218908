"""What the demo's training does for the reward on held-out questions: before and after, at several seeds.

    python benchmarks/training.py [--seeds 0 1 2] [section.key=value ...]

Each seed is one `prorsa train examples/demo.yaml`, sampled at the rollout temperature before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import time
from pathlib import Path

from prorsa import commands
from prorsa.assembly import new_run_dir
from prorsa.config import load_config
from prorsa.report.rundir import Run, read_run

COLUMNS = ["seed", "steps", "held-out before", "after", "first batch", "last batch"]
COLUMNS += ["flips", "resends", "trajectories", "dropped", "seconds"]
CONFIG = Path(__file__).parents[1] / "examples" / "demo.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    arguments = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("|" + "---|" * len(COLUMNS))
    for seed in arguments.seeds:
        config = load_config(CONFIG, [f"seed={seed}", *arguments.overrides])
        run_dir, start = new_run_dir(config), time.monotonic()
        asyncio.run(commands.train(config, run_dir))
        print(row(seed, read_run(run_dir), time.monotonic() - start), flush=True)


def row(seed: int, run: Run, seconds: float) -> str:
    train = [step for step in run.steps if step.split == "train"]
    test = [step for step in run.steps if step.split == "test"]
    ends = [type(event).__name__ for event in run.events]
    cells = [
        str(seed),
        str(len(train)),
        *(f"{step.reward:.3f}" for step in (test[0], test[-1], train[0], train[-1])),
        str(sum(flip.failure is None for flip in run.flips)),
        str(sum(turn.attempts - 1 for turn in run.turns)),
        str(ends.count("Done")),
        str(ends.count("Dropped")),
        f"{seconds:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
