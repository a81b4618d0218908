"""Runs on real engines that are killed, or whose disk fills up, and go on; and what `--resume` refuses."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prorsa.config import dump_config, load_config
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import StepRecord, read_run, read_trajectories

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "check.yaml"
PRORSA = [sys.executable, "-m", "prorsa.cli"]
SMALL = ("rollout.groups=4", "rollout.steps=2", "cluster.instances=2")
MEMBERS = 4 * 4 * 2


def prorsa(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [*PRORSA, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.engine
def test_a_rollout_that_is_killed_at_random_moments_is_in_the_end_the_one_that_was_not() -> None:
    script = [sys.executable, "scripts/kill_and_resume.py", "--kills", "4", *SMALL]
    ended = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"of {MEMBERS} trajectories: 0 problems" in ended.stdout


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*overrides: str) -> subprocess.Popen[str]:
        command = [*PRORSA, "rollout", str(CONFIG), f"run_dir={tmp_path}", *SMALL, *overrides]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def recorded(tmp_path: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in tmp_path.glob("*/trajectories.jsonl"))


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def fill_disk(process: subprocess.Popen[str], tmp_path: Path, full: bool) -> None:
    """No file of the process grows beyond what the smallest of those that it writes has."""
    size = min(path.stat().st_size for path in tmp_path.glob("*/t*")) if full else resource.RLIM_INFINITY
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def check_complete(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert run.problems == []
    assert [step.step for step in run.steps] == [1, 2]
    assert len(run.generated) == len({(r.group, r.seed) for r in read_trajectories(run_dir)}) == MEMBERS
    verified = prorsa("verify", run_dir)
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.engine
def test_a_full_disk_that_is_freed_costs_nothing(rollout: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = rollout()
    wait_for(lambda: recorded(tmp_path) >= 3)
    fill_disk(process, tmp_path, True)
    [run_dir] = tmp_path.iterdir()
    assert process.stdout is not None
    shown = ""
    while "recording fails" not in shown:
        shown = process.stdout.readline()
        assert shown, "it ended without a word of the disk"
    assert f"{run_dir}/" in shown
    assert "File too large; raise the limit of a file's size" in shown
    fill_disk(process, tmp_path, False)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    assert "recording goes on" in output
    check_complete(run_dir)


@pytest.mark.engine
def test_a_full_disk_stops_the_run_in_its_time_and_what_was_recorded_is_gone_on_with(
    rollout: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = rollout("recording.give_up_after=0.5")
    wait_for(lambda: recorded(tmp_path) >= 3)
    fill_disk(process, tmp_path, True)
    _, errors = process.communicate(timeout=120)
    [run_dir] = tmp_path.iterdir()
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert errors.splitlines()[-1].endswith(
        f"(it has failed for 0.5 s); the run was stopped, go on with `prorsa rollout --resume {run_dir}`"
    )
    assert recorded(tmp_path) >= 3
    resumed = prorsa("rollout", "--resume", run_dir)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    lost = [problem for problem in read_run(run_dir).problems if "records are missing" not in problem]
    assert lost == []
    assert len(read_run(run_dir).generated) == MEMBERS


@pytest.mark.engine
def test_what_had_ended_is_on_disk_after_ctrl_c_and_the_run_goes_on(
    rollout: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = rollout()
    wait_for(lambda: recorded(tmp_path) >= 5)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 130
    [run_dir] = tmp_path.iterdir()
    assert len(read_run(run_dir).generated) == recorded(tmp_path) >= 5
    assert prorsa("verify", run_dir).returncode == 0
    assert prorsa("rollout", "--resume", run_dir).returncode == 0
    check_complete(run_dir)
    again = prorsa("rollout", "--resume", run_dir)
    assert (again.returncode, again.stdout) == (0, f"{run_dir}: complete, 2 steps are recorded\n")


def test_what_resume_refuses(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    with RunRecorder(tmp_path / "run", dump_config(config), command="rollout") as recorder:
        busy = prorsa("rollout", "--resume", tmp_path / "run")
        recorder.step(StepRecord(1, 1.0, 1.0, 1.0, 0))
    assert (busy.returncode, busy.stderr) == (
        2,
        f"prorsa: {tmp_path / 'run'}: a process writes this run; wait for its end, or end it\n",
    )
    changed = prorsa("rollout", "--resume", tmp_path / "run", "seed=3", "rollout.groups=4", "cluster.instances=2")
    assert changed.returncode == 2
    assert changed.stderr.splitlines() == [
        "prorsa: seed=3: the run was begun with 0; leave it out, or start a new run",
        "rollout.groups=4: the run was begun with 8; leave it out, or start a new run",
    ]
    other = prorsa("train", "--resume", tmp_path / "run")
    assert other.returncode == 2
    assert (
        other.stderr == f"prorsa: {tmp_path / 'run'}: a run of `prorsa rollout`; `prorsa train` cannot go on with it\n"
    )
    both = prorsa("rollout", CONFIG, "--resume", tmp_path / "run")
    assert (both.returncode, "leave the file out" in both.stderr) == (2, True)
    none = prorsa("rollout", "--resume", tmp_path)
    assert (none.returncode, "it has no config.yaml" in none.stderr) == (2, True)
    damaged = tmp_path / "run" / "trajectories.jsonl"
    damaged.write_text('{"no": "record"}\n{}\n')
    refused = prorsa("rollout", "--resume", tmp_path / "run")
    assert refused.returncode == 2
    assert f"{damaged}, line 1: " in refused.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["ended"]


def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = prorsa("rollout", CONFIG, f"run_dir={tmp_path / 'file'}")
    assert ended.returncode == 2
    assert (
        ended.stderr
        == f"prorsa: run_dir='{tmp_path / 'file'}': no directory can be made there (Not a directory); give another\n"
    )
