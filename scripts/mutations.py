"""Do the tests of the twelve promises fail where a promise is broken? Breaks each in a copy of the source and looks.

    python scripts/mutations.py                     # all of them, one after the other; minutes
    python scripts/mutations.py whole-budget ...    # some, by name
    python scripts/mutations.py --list

A mutation is a change of the source text by which one promise no longer holds. Only the tests that should see it run, each
mutation in a copy of its own; first these tests run on the source as it is, where they have to pass. Exits with 1 where a
mutation is caught by no test, and with 2 where it cannot be made: its text has changed, or the tests fail without it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("src", "tests", "scripts", "examples", "docs", "models", "pyproject.toml", "README.md")
TIME_BOUND = 300.0
"""Seconds for the tests of one mutation."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*)?(?: - .*)?$", re.MULTILINE)
UNSHRUNK = """
from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")
"""
"""A plugin of pytest: that an example fails is enough, a smaller one takes minutes to look for."""
PASSES, FAILS = 0, 1
"""What pytest exits with; anything else says nothing of the mutation."""

RANDOM_FAULTS = "tests/cluster/test_random_faults.py"
ROUTER, SWITCHER = "tests/cluster/test_router.py", "tests/cluster/test_switcher.py"
MANAGER, CONTROL = "tests/cluster/test_manager.py", "tests/cluster/test_control.py"
CORE, PROCESSES = "tests/engines/test_core.py", "tests/engines/test_embedded_processes.py"
CONTROLLER, EPISODE = "tests/rollout/test_controller.py", "tests/rollout/test_episode.py"
SOLVER = "tests/allocation/test_solver.py"
TOKENIZER, SIMULATED = "tests/rollout/test_tokenizer.py", "tests/simulation/test_cluster_sim.py"


class Unusable(Exception):
    """The mutation cannot be made or says nothing; the message says why."""


@dataclass(frozen=True)
class Edit:
    """`before`, which stands once in `file` below src/prorsa, becomes `after`."""

    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Mutation:
    name: str
    promise: int
    what: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]
    """Files, or single tests, that should see it."""


def mutation(
    name: str, promise: int, what: str, file: str, before: str, after: str, *tests: str, also: tuple[Edit, ...] = ()
) -> Mutation:
    return Mutation(name, promise, what, (Edit(file, before, after), *also), tests)


MUTATIONS = (
    mutation(
        "drops-tokens",
        1,
        "a resend drops the tokens that were retained",
        "cluster/attempts.py",
        "context = self.request.input_ids + tuple(self.tokens)",
        "context = self.request.input_ids",
        ROUTER,
        RANDOM_FAULTS,
    ),
    mutation(
        "seed-without-position",
        1,
        "a sampled token depends on where its request was resent",
        "engines/embedded/sampling.py",
        "np.array(positions, np.uint64)",
        "np.array([p - positions[0] for p in positions], np.uint64)",
        "tests/engines/test_core_sampling.py",
        f"{CORE}::test_aborted_at_any_token_and_resubmitted_it_gives_what_it_would_have",
    ),
    mutation(
        "logprobs-misaligned",
        2,
        "log-probabilities of tokens that are not kept stay",
        "cluster/attempts.py",
        "(attempt.tokens, attempt.logprobs, attempt.versions, attempt.arrivals):",
        "(attempt.tokens, attempt.versions, attempt.arrivals):",
        ROUTER,
        RANDOM_FAULTS,
    ),
    mutation(
        "mask-of-tool-turns",
        2,
        "tool turns are trained on",
        "rollout/records.py",
        "self._add(token_ids, [0] * n,",
        "self._add(token_ids, [1] * n,",
        EPISODE,
    ),
    mutation(
        "whole-budget",
        3,
        "a resend gets the budget of the whole turn",
        "cluster/attempts.py",
        "sampling = replace(sampling, max_new_tokens=self.budget)",
        "sampling = replace(sampling)",
        RANDOM_FAULTS,
    ),
    mutation(
        "late-output",
        4,
        "output that comes after its attempt has ended counts",
        "cluster/attempts.py",
        "return not self.abandoned and (self.started or self.verdict is None)",
        "return True",
        ROUTER,
        RANDOM_FAULTS,
    ),
    mutation(
        "two-attempts",
        4,
        "a turn goes on while legs of its last attempt are open",
        "cluster/router.py",
        "if attempt.legs or closing or attempt.closed.done():",
        "if (attempt.legs and attempt.verdict is None) or attempt.closed.done():",
        ROUTER,
        RANDOM_FAULTS,
    ),
    mutation(
        "no-abort-of-prefill",
        5,
        "a cancel reaches the decode side only",
        "cluster/router.py",
        "if not leg.done() and i.state is not InstanceState.DEAD",
        "if not leg.done() and i.state is not InstanceState.DEAD and i is attempt.decode",
        RANDOM_FAULTS,
    ),
    mutation(
        "no-abort-of-decode",
        5,
        "a cancel reaches the prefill side only",
        "cluster/router.py",
        "if not leg.done() and i.state is not InstanceState.DEAD",
        "if not leg.done() and i.state is not InstanceState.DEAD and i is attempt.prefill",
        RANDOM_FAULTS,
    ),
    mutation(
        "broken-handover-hangs",
        5,
        "a simulated leg does not learn that the other one is gone",
        "simulation/engines/transfer.py",
        "if leg is not None and leg[1] is not job:",
        "if False and leg is not None:",
        "tests/simulation/test_simulated_core.py",
        SIMULATED,
    ),
    mutation(
        "dead-keeps-requests",
        6,
        "what a dead instance served is not sent again",
        "cluster/router.py",
        "        for rid in rids:\n            self._end(self._live[rid], End.FAILED",
        "        for rid in rids[:0]:\n            self._end(self._live[rid], End.FAILED",
        ROUTER,
        RANDOM_FAULTS,
    ),
    mutation(
        "never-buried",
        6,
        "the health watch buries nobody",
        "cluster/manager.py",
        "if failed >= self._health.checks and",
        "if False and failed >= self._health.checks and",
        MANAGER,
    ),
    mutation(
        "restart-once",
        6,
        "a restart that fails is not tried again",
        "cluster/manager.py",
        "await asyncio.sleep(backoff)\n",
        "return\n",
        SWITCHER,
    ),
    mutation(
        "hang-unseen",
        6,
        "an engine whose scheduler stands still is left alone",
        "cluster/manager.py",
        "if silence >= self._health.hang_timeout and",
        "if False and silence >= self._health.hang_timeout and",
        MANAGER,
    ),
    mutation(
        "shortage-is-death",
        6,
        "a lack of descriptors of this process is taken for the engine's death",
        "engines/sglang.py",
        "if isinstance(error, OSError) and error.errno in OUR_SHORTAGES:",
        "if False:",
        "tests/cluster/test_shortage.py",
    ),
    mutation(
        "old-weights",
        6,
        "a restarted engine keeps the weights that it starts with",
        "cluster/switcher.py",
        "if weights.path is not None and info.weights_version != weights.version:",
        "if False and weights.path is not None:",
        CONTROL,
        RANDOM_FAULTS,
        also=(
            Edit(
                "cluster/switcher.py",
                "if info.role is not role or info.weights_version != weights.version:",
                "if info.role is not role:",
            ),
        ),
    ),
    mutation(
        "stays-in-pool",
        7,
        "an instance stays in its pool while it flips",
        "cluster/instances.py",
        "            if instance.state is InstanceState.ROUTED:",
        "            if instance.state not in (InstanceState.DEAD, InstanceState.STOPPED):",
        SWITCHER,
    ),
    mutation(
        "flip-not-verified",
        7,
        "the role that an engine reports after a flip is not compared",
        "cluster/switcher.py",
        "if reported is not role:",
        "if False and reported is not role:",
        SWITCHER,
        MANAGER,
    ),
    mutation(
        "flip-before-idle",
        7,
        "an engine is flipped without waiting until it is idle",
        "cluster/switcher.py",
        "                await self._wait_idle(instance)\n",
        "",
        SWITCHER,
    ),
    mutation(
        "over-budget",
        8,
        "the allocator takes one GPU more than there are",
        "allocation/solver.py",
        "prefill, decode = _pairs(m_p, m_d, gpus, instances)",
        "prefill, decode = _pairs(m_p, m_d, gpus + 1, instances)",
        SOLVER,
        "tests/allocation/test_policies.py",
    ),
    mutation(
        "none-of-a-role",
        8,
        "the allocator may leave a role without an instance",
        "allocation/solver.py",
        "prefill = np.arange(1, (gpus - m_d) // m_p + 1)",
        "prefill = np.arange(0, gpus // m_p + 1)",
        SOLVER,
        "tests/allocation/test_policies.py",
    ),
    mutation(
        "oscillates",
        8,
        "among equally good roles the present ones are not preferred",
        "allocation/solver.py",
        "first = np.lexsort((prefill, -used, leaving))[0]",
        "first = np.lexsort((prefill, -used, -leaving))[0]",
        SOLVER,
        f"{MANAGER}::test_constant_demand_flips_nothing_after_the_first_decision",
    ),
    mutation(
        "hash-without-version",
        9,
        "a KV block is named by its tokens alone, not by the weights",
        "engines/embedded/kv.py",
        'salt=version.to_bytes(16, "little")',
        'salt=b""',
        CORE,
        "tests/engines/test_core_kv.py",
    ),
    mutation(
        "cache-kept",
        9,
        "the prefix cache is kept over a weight update",
        "engines/embedded/core.py",
        "        self._pool.forget_all()\n        self._model = model\n",
        "        self._model = model\n",
        CORE,
    ),
    mutation(
        "store-keeps-versions",
        9,
        "a simulated KV store gives what was computed under other weights",
        "simulation/engines/transfer.py",
        "if own is not None and own[0] == version:",
        "if own is not None:",
        "tests/simulation/test_simulated_core.py",
        SIMULATED,
    ),
    mutation(
        "ends-twice",
        10,
        "a group that lost a member is complete all the same",
        "rollout/controller.py",
        "if group.complete and group.outcome is None:",
        "if len(group.records) == group.size:",
        CONTROLLER,
    ),
    mutation(
        "stale-while-running",
        10,
        "staleness is not counted while a trajectory runs",
        "rollout/controller.py",
        "if version - group.version > most]:",
        "if version - group.version > most and group in self._complete]:",
        CONTROLLER,
    ),
    mutation(
        "stale-while-complete",
        10,
        "staleness is not counted while a complete group waits",
        "rollout/controller.py",
        "if version - group.version > most]:",
        "if version - group.version > most and group not in self._complete]:",
        CONTROLLER,
    ),
    mutation(
        "recorded-with-batch",
        10,
        "a trajectory is not recorded when it ends",
        "rollout/episode.py",
        "        if isinstance(event, events.Done):\n            self._ended(self._result())\n",
        "",
        "tests/test_resume.py::test_what_had_ended_is_on_disk_after_ctrl_c_and_the_run_goes_on",
    ),
    mutation(
        "sandbox-signals",
        11,
        "a sandbox may signal other processes by kill",
        "rollout/sandboxes/runner.py",
        '"kill": to_itself,',
        '"kill": [ALLOW],',
        "tests/rollout/test_sandboxes.py",
    ),
    mutation(
        "sandbox-left",
        11,
        "a sandbox is not closed with its trajectory",
        "rollout/sandboxes/pool.py",
        "        finally:\n            sandbox.close()\n",
        "        finally:\n            pass\n",
        "tests/rollout/test_sandbox_ends.py",
    ),
    mutation(
        "tool-turn-boundary",
        12,
        "a tool turn begins with an end-of-turn token of its own",
        "rollout/tokenizer.py",
        "return self.encode(between)",
        "return self.encode(end + between)",
        TOKENIZER,
        EPISODE,
    ),
    mutation(
        "other-token",
        12,
        "the last token of a turn is kept as another one than was generated",
        "rollout/episode.py",
        "transcript.add_turn(result)\n",
        "transcript.add_turn(replace(result, token_ids=(*result.token_ids[:-1], result.token_ids[-1] ^ 1)))\n",
        EPISODE,
    ),
)


@dataclass(frozen=True)
class Verdict:
    mutation: Mutation
    by: tuple[str, ...]
    """The tests that failed; the run stops after a few."""
    seconds: float

    @property
    def caught(self) -> bool:
        return bool(self.by)


def copy_of(source: Path, target: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.pyc")
    for name in COPIED:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, target / name, ignore=ignore)
        elif path.exists():
            shutil.copy2(path, target / name)


def make(edits: Iterable[Edit], tree: Path) -> None:
    """Change the source below `tree`. Raises `Unusable` where a text is not there exactly once."""
    for edit in edits:
        path = tree / "src/prorsa" / edit.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(edit.before)) != 1:
            raise Unusable(
                f"src/prorsa/{edit.file} has {count} times {edit.before!r}; adapt the mutation to the source"
            )
        path.write_text(text.replace(edit.before, edit.after), encoding="utf-8")


def failures(tree: Path, tests: Sequence[str]) -> tuple[str, ...]:
    """The tests that fail in `tree`, a few of them at most. Raises `Unusable` where they could not be run to an end."""
    command = [sys.executable, "-m", "pytest", *tests, "-q", "-rfE", "--tb=no", "--maxfail=3", "-p", "no:cacheprovider"]
    command += ["-p", "unshrunk", "--hypothesis-seed=0"]
    (tree / "unshrunk.py").write_text(UNSHRUNK, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIME_BOUND, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unusable(f"{' '.join(tests)}: no end within {TIME_BOUND:.0f} s") from None
    if run.returncode not in (PASSES, FAILS):
        raise Unusable(
            f"{' '.join(tests)}: pytest exits with {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
        )
    found = tuple(dict.fromkeys(FAILED.findall(run.stdout)))
    if run.returncode == FAILS and not found:
        raise Unusable(f"{' '.join(tests)}: pytest names no test that failed\n{run.stdout[-2000:]}")
    return found


def check_unchanged(mutations: Sequence[Mutation]) -> None:
    """The tests have to pass on the source as it is, or their failures would say nothing. Raises `Unusable`."""
    for test in dict.fromkeys(test for one in mutations for test in one.tests):
        with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
            copy_of(ROOT, Path(directory))
            if failed := failures(Path(directory), [test]):
                raise Unusable(f"without any mutation, these tests fail: {', '.join(failed)}")


def tried(mutation: Mutation) -> Verdict:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutation-") as directory:
        copy_of(ROOT, Path(directory))
        make(mutation.edits, Path(directory))
        by = failures(Path(directory), mutation.tests)
    return Verdict(mutation, by, time.monotonic() - start)


def row(verdict: Verdict) -> str:
    """A line of a Markdown table."""
    by = ", ".join(f"`{test.removeprefix('tests/')}`" for test in verdict.by)
    return f"| {verdict.mutation.promise} | {verdict.mutation.name} | {verdict.mutation.what} | {by or 'NOT caught'} |"


def chosen(names: Sequence[str]) -> list[Mutation]:
    known = {mutation.name: mutation for mutation in MUTATIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Unusable(f"there is no mutation {', '.join(unknown)}; --list prints all of them")
    return [known[name] for name in names] or list(MUTATIONS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of mutations; default: all")
    parser.add_argument("--list", action="store_true", help="print the mutations and stop")
    parser.add_argument("--skip-unchanged", action="store_true", help="do not run the tests on the source as it is")
    parsed = parser.parse_args(arguments)
    try:
        mutations = chosen(parsed.names)
        if parsed.list:
            print("\n".join(f"{one.promise:2} {one.name}: {one.what}" for one in mutations))
            return 0
        if not parsed.skip_unchanged:
            check_unchanged(mutations)
        print("| promise | mutation | what breaks | caught by |\n|---|---|---|---|")
    except Unusable as error:
        print(f"mutations: {error}", file=sys.stderr)
        return 2
    return judged(mutations)


def judged(mutations: Sequence[Mutation]) -> int:
    """Try them and print a table; what the program exits with."""
    verdicts, unusable = [], 0
    for one in mutations:
        try:
            verdicts.append(tried(one))
            print(row(verdicts[-1]), flush=True)
        except Unusable as error:
            unusable += 1
            print(f"mutations: {one.name}: {error}", file=sys.stderr, flush=True)
    survivors = [verdict.mutation.name for verdict in verdicts if not verdict.caught]
    print(f"\n{len(verdicts) - len(survivors)} of {len(mutations)} caught" + f"; not: {survivors}" * bool(survivors))
    return 2 if unusable else 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
