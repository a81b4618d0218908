"""Kill rollouts at random moments, resume them, and compare what they have recorded with a rollout that nobody has killed.

    python scripts/kill_and_resume.py --kills 50 [--seed 0] [section.key=value ...]

A rollout of examples/check.yaml, which is greedy, is killed with SIGKILL, resumed, killed again, until it is complete; then
the next one begins. Of each: every member of every group is there once and has the tokens that it has without kills, every
step was recorded once, every trajectory of the trace ends once and no id occurs twice, the times do not go back, no line is
torn, and `prorsa verify` and `prorsa report` find nothing. Exit status 1 and a line for each thing that does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prorsa.lifecycle import IllegalTransition, Tracker
from prorsa.report.rundir import CONFIG, read_run, read_starts, read_trajectories
from prorsa.rollout.resume import parse_member

ROOT = Path(__file__).resolve().parents[1]
PRORSA = [sys.executable, "-m", "prorsa.cli"]
Tokens = dict[tuple[str, int], tuple[int, ...]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("overrides", nargs="*")
    parsed = parser.parse_args()
    chance = random.Random(parsed.seed)
    with tempfile.TemporaryDirectory(prefix="killed-") as directory:
        return compare(Path(directory), parsed.overrides, parsed.kills, chance)


def compare(directory: Path, overrides: list[str], kills: int, chance: random.Random) -> int:
    begun = time.monotonic()
    whole, _ = finish(directory / "whole", overrides, 0, chance, 0.0)
    seconds = time.monotonic() - begun
    expected = tokens_of(whole)
    problems = list(check(whole, expected))
    killed = runs = 0
    while killed < kills:
        runs += 1
        run, count = finish(directory / f"run{runs}", overrides, kills - killed, chance, seconds)
        killed += count
        found = list(check(run, expected))
        problems += [f"run {runs}: {problem}" for problem in found]
        print(f"run {runs}: {count} kills, {len(read_starts(run))} starts, {len(found)} problems", flush=True)
    for problem in problems:
        print(problem)
    print(f"{killed} kills in {runs} runs of {len(expected)} trajectories: {len(problems)} problems")
    return 1 if problems else 0


def finish(base: Path, overrides: list[str], kills: int, chance: random.Random, seconds: float) -> tuple[Path, int]:
    """Run until it is complete, killed at most so often, each time within the `seconds` that a whole run takes."""
    killed = 0
    while True:
        run = next(iter(base.glob(f"*/{CONFIG}")), None)
        command = ["--resume", str(run.parent)] if run else ["examples/check.yaml", f"run_dir={base}", *overrides]
        process = subprocess.Popen(
            [*PRORSA, "rollout", *command], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            _, errors = process.communicate(timeout=chance.uniform(0, seconds) if killed < kills else None)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            killed += 1
            continue
        if process.returncode != 0:
            raise SystemExit(f"prorsa rollout {' '.join(command)} ended with {process.returncode}: {errors}")
        return next(base.glob(f"*/{CONFIG}")).parent, killed


def tokens_of(run: Path) -> Tokens:
    records = (record for record in read_trajectories(run) if record.dropped is None)
    return {(record.group, parse_member(record.trajectory)[0]): record.response_ids for record in records}


def check(directory: Path, expected: Tokens) -> Iterator[str]:
    """What does not hold of a complete run, a line each."""
    run = read_run(directory)
    yield from run.problems
    done = [record for record in read_trajectories(directory) if record.dropped is None]
    for member, count in Counter((record.group, parse_member(record.trajectory)[0]) for record in done).items():
        if count != 1:
            yield f"member {member} is there {count} times"
    found = tokens_of(directory)
    if found.keys() != expected.keys():
        yield f"members missing: {expected.keys() - found.keys()}, too many: {found.keys() - expected.keys()}"
    yield from (f"member {member} has other tokens" for member in found if found[member] != expected.get(member))
    steps = [json.loads(line) for line in (directory / "steps.jsonl").read_text().splitlines()]
    yield from check_steps(steps, {group for group, _ in expected})
    yield from check_trace(run)
    for command in ("verify", "report", "analyze"):
        ended = subprocess.run(
            [*PRORSA, command, str(directory)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if ended.returncode != 0:
            yield f"prorsa {command} ended with {ended.returncode}: {ended.stdout[-500:]}{ended.stderr[-500:]}"


def check_steps(steps: list[dict[str, Any]], groups: set[str]) -> Iterator[str]:
    numbers = [step["step"] for step in steps]
    if numbers != list(range(1, len(steps) + 1)):
        yield f"steps {numbers}"
    handed_over = [group for step in steps for group in step["groups"]]
    if Counter(handed_over) != Counter(groups):
        yield f"groups handed over: {sorted(handed_over)}"


def check_trace(run: Any) -> Iterator[str]:
    tracker, done, before = Tracker(), 0, 0.0
    for event in run.events:
        try:
            done += tracker.apply(event).after.name == "DONE"
        except IllegalTransition as error:
            yield str(error)
        if event.time < before:
            yield f"the time goes back from {before} to {event.time} with {event}"
        before = max(before, event.time)
    if len(tracker):
        yield f"{len(tracker)} trajectories never end"
    if done != len(run.generated):
        yield f"{done} are done by the trace, and {len(run.generated)} by their records"


if __name__ == "__main__":
    sys.exit(main())
