"""Many simulated runs over a pool of processes, each kept as soon as it is done, so that an interrupted grid goes on.

A job is one policy on one scenario. A run is deterministic, so what a job gives depends on nothing but the job and the
code: its result is kept under a hash of both, and equal jobs of different figures run once.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, as_completed
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path

from prorsa.profiles.profile import load_profile
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.run import run_scenario
from prorsa.simulation.scenario import PolicySection, Scenario

NOT_IN_A_RUN = {"experiments", "integrations", "cli.py", "commands.py"}
"""Parts of the package that no result depends on."""


@dataclass(frozen=True)
class Job:
    scenario: Scenario
    policy: PolicySection

    def __str__(self) -> str:
        policy = self.policy
        words = {"static": f"static {policy.split}", "colocated": f"colocated, cadence {policy.prefill_every}"}
        return f"{self.scenario.name}, {words.get(policy.name, policy.name)}"

    @cached_property
    def key(self) -> str:
        """The same for equal jobs under equal code, and for nothing else."""
        # What other policies the scenario names is of no consequence to this one.
        scenario = self.scenario.model_dump(mode="json", exclude={"policies"})
        parts = [json.dumps([scenario, self.policy.model_dump(mode="json")], sort_keys=True), code_version()]
        return hashlib.blake2b("\n".join(parts + _contents(self.scenario)).encode(), digest_size=16).hexdigest()

    def __hash__(self) -> int:
        return hash(self.key)


def _contents(scenario: Scenario) -> list[str]:
    """Hashes of the files that the scenario names."""
    paths = [] if scenario.workload.path is None else [Path(scenario.workload.path)]
    for name in (scenario.hardware.profile, scenario.hardware.decode_profile):
        if name is not None and Path(name).is_file():
            paths += [Path(name), Path(name).parent / load_profile(name).grid]
    return [_digest(file) for path in paths for file in sorted(path.rglob("*") if path.is_dir() else [path])]


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes() if file.is_file() else b"", digest_size=16).hexdigest()


@cache
def code_version() -> str:
    """Hash of everything in the package that a result may depend on."""
    root = Path(str(files("prorsa")))
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(root.rglob("*")):
        parts = file.relative_to(root).parts
        if file.suffix in (".py", ".yaml", ".csv") and not NOT_IN_A_RUN & set(parts):
            found.update("/".join(parts).encode() + file.read_bytes())
    return found.hexdigest()


class ExperimentFailed(Exception):
    """Some jobs failed; the message names each with its scenario and its error. The others are kept."""


def simulate(job: Job) -> RunOutcome:
    policy = job.policy.name
    return run_scenario(job.scenario.model_copy(update={"policies": {policy: job.policy}}), policy)


Progress = Callable[[Job, int, int], None]
"""The job that is done, how many are, of how many."""


class Grid:
    """Runs jobs and remembers their outcomes, in memory and, with `kept`, in that directory."""

    def __init__(
        self,
        executor: Executor,
        kept: Path | None = None,
        progress: Progress | None = None,
        runner: Callable[[Job], RunOutcome] = simulate,
    ) -> None:
        self._executor = executor
        self._kept = kept
        self._progress = progress
        self._runner = runner
        self._outcomes: dict[str, RunOutcome] = {}

    def outcome(self, job: Job) -> RunOutcome:
        """Of a job that has run. Raises KeyError."""
        return self._outcomes[job.key]

    def knows(self, job: Job) -> bool:
        """Whether the job has run, here or in an interrupted process."""
        return self._known(job.key)

    def run(self, jobs: Iterable[Job]) -> None:
        """Run the jobs that no earlier call, here or in an interrupted process, has run.

        Raises `ExperimentFailed` when all others are done.
        """
        wanted = {job.key: job for job in jobs}
        missing = {key: job for key, job in wanted.items() if not self._known(key)}
        running = {self._executor.submit(self._runner, job): job for job in missing.values()}
        failures: list[tuple[Job, BaseException]] = []
        done = len(wanted) - len(missing)
        try:
            for future in as_completed(running):
                job, done = running[future], done + 1
                error = self._keep(job, future)
                if error is not None:
                    failures.append((job, error))
                if self._progress is not None:
                    self._progress(job, done, len(wanted))
        finally:
            for future in running:
                future.cancel()
        if failures:
            kept = "; the others are kept and will not run again" if self._kept is not None else ""
            raise ExperimentFailed(f"{len(failures)} runs failed{kept}\n{explained(failures)}") from failures[0][1]

    def _known(self, key: str) -> bool:
        if key not in self._outcomes and self._kept is not None and (path := self._path(key)).is_file():
            with path.open("rb") as file:
                self._outcomes[key] = pickle.load(file)
        return key in self._outcomes

    def _keep(self, job: Job, future: Future[RunOutcome]) -> BaseException | None:
        if (error := future.exception()) is not None:
            return error
        self._outcomes[job.key] = outcome = future.result()
        if self._kept is not None:
            path = self._path(job.key)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Written aside and moved, so that an interruption leaves a whole file or none.
            aside = path.with_suffix(f".{os.getpid()}")
            aside.write_bytes(pickle.dumps(outcome))
            aside.replace(path)
        return None

    def _path(self, key: str) -> Path:
        assert self._kept is not None
        return self._kept / f"{key}.pickle"


def explained(failures: Sequence[tuple[Job, BaseException]]) -> str:
    return "\n".join(sorted(f"{job}: {type(error).__name__}: {error}" for job, error in failures))
