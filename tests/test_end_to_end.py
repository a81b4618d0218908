"""`prorsa rollout` and `prorsa verify` as a user runs them, with flips, a killed engine, Ctrl-C and a killed parent."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prorsa.assembly import build_policy
from prorsa.cluster.observers import replay
from prorsa.config import load_config
from prorsa.lifecycle import Done, Dropped
from prorsa.report.rundir import Run, read_run

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "check.yaml"
PRORSA = [sys.executable, "-m", "prorsa.cli"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `prorsa rollout` with overrides; whatever still runs at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*overrides: str) -> subprocess.Popen[str]:
        command = [*PRORSA, "rollout", str(CONFIG), f"run_dir={tmp_path}", *overrides]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A shell's background jobs start with SIGINT ignored, and children inherit that. There is one thread here.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def prorsa(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PRORSA, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def descendants(pid: int) -> list[int]:
    """Living processes below `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(stat.parent.name)] = int(fields[1])
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def engines_of(process: subprocess.Popen[str]) -> list[int]:
    return [pid for pid in descendants(process.pid) if "embedded.server" in command_line(pid)]


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def run_dir_of(tmp_path: Path) -> Path | None:
    return next((path for path in tmp_path.iterdir() if (path / "trace").is_file()), None)


def finished(tmp_path: Path) -> int:
    """Trajectories that have ended so far."""
    directory = run_dir_of(tmp_path)
    if directory is None or not (directory / "status.json").is_file():
        return 0
    totals = json.loads((directory / "status.json").read_text())["totals"]
    return int(totals.get("done", 0))


def running(pids: list[int]) -> list[int]:
    return [pid for pid in pids if "prorsa" in command_line(pid) or "runner" in command_line(pid)]


def outcome(run: Run) -> tuple[int, int]:
    done = sum(isinstance(event, Done) for event in run.events)
    return done, sum(isinstance(event, Dropped) for event in run.events)


def test_flips_and_a_killed_engine_cost_no_trajectory_and_change_no_token(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    # A wrong split and a short horizon: however fast the machine is, the roles have to change.
    process = start("policy.split='1:3'", "policy.horizon=0.05", "policy.prefill_tokens_per_s=1000")
    wait_for(lambda: finished(tmp_path) >= 10)
    victim = engines_of(process)[-1]
    below = descendants(process.pid)
    os.kill(victim, signal.SIGKILL)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    directory = run_dir_of(tmp_path)
    assert directory is not None
    run = read_run(directory)
    assert run.problems == []
    assert outcome(run) == (6 * 8 * 4, 0)
    assert len([flip for flip in run.flips if flip.failure is None]) >= 3
    assert sum(turn.attempts - 1 for turn in run.turns) >= 1
    assert any(change.state == "dead" for change in run.instances)
    assert (directory / "report.html").stat().st_size > 10_000
    assert running(below) == []
    verify = prorsa("verify", str(directory))
    assert verify.returncode == 0, verify.stdout + verify.stderr
    assert f"{len(run.turns)} turns" in verify.stdout


PROFILE = """
name: test
model: arithmetic
gpu: none
source: a test; not measured
gpus: 1
ranks: 1
grid: grid.csv
chunk: 512
kv_tokens: 8192
kv_bytes: 4096
max_running: 32
network_bytes_per_s: 1.0e+9
store_bytes_per_s: 1.0e+9
flip_s: 0.05
update_s: 1.0
"""
GRID = """phase,tokens,context,attn_ms,dense_ms,moe_ms,moe_skewed_ms,comm_ms
prefill,16,0,1,1,0,0,0
prefill,16,1024,1,1,0,0,0
prefill,512,0,5,5,0,0,0
prefill,512,1024,5,5,0,0,0
decode,1,0,5,1,0,0,0
decode,1,1024,5,1,0,0,0
decode,32,0,60,1,0,0,0
decode,32,1024,60,1,0,0,0
"""


def test_a_policy_that_plans_leaves_a_wrong_split_and_changes_no_token(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "grid.csv").write_text(GRID)
    # By this profile decode takes most of the time, and three instances of four prefill.
    process = start("policy.name=planned", f"policy.profile={tmp_path}/profile.yaml", "policy.split='3:1'")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    directory = run_dir_of(tmp_path)
    assert directory is not None
    run = read_run(directory)
    assert run.problems == []
    assert outcome(run) == (6 * 8 * 4, 0)
    assert any(flip.failure is None for flip in run.flips)
    decisions = [decided.decision for decided in run.decided]
    assert {decision.moment for decision in decisions} >= {"grid", "start"}
    policy = build_policy(load_config(CONFIG, ["policy.name=planned", f"policy.profile={tmp_path}/profile.yaml"]))
    assert [replay(decision, policy) for decision in decisions] == [decision.target for decision in decisions]
    verify = prorsa("verify", str(directory))
    assert verify.returncode == 0, verify.stdout + verify.stderr


def test_ctrl_c_leaves_a_readable_run_and_nothing_else(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("rollout.steps=1000")
    wait_for(lambda: finished(tmp_path) >= 5)
    below = descendants(process.pid)
    assert len(below) > 4
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert running(below) == []
    directory = run_dir_of(tmp_path)
    assert directory is not None
    run = read_run(directory)
    assert run.problems == []
    assert outcome(run)[0] >= 5
    assert (directory / "report.html").is_file()


def test_a_killed_parent_leaves_no_process_and_a_readable_run(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("rollout.steps=1000")
    wait_for(lambda: finished(tmp_path) >= 5)
    below = descendants(process.pid)
    process.kill()
    wait_for(lambda: running(below) == [])
    directory = run_dir_of(tmp_path)
    assert directory is not None
    assert outcome(read_run(directory))[0] >= 5


def test_a_changed_token_is_found(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start("rollout.steps=1", "rollout.groups=2", "policy.name=static", "policy.split='2:2'")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    directory = run_dir_of(tmp_path)
    assert directory is not None
    path = directory / "trajectories.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[3])
    first = record["response_mask"].index(1)
    record["response_ids"][first] += 1
    path.write_text("\n".join([*lines[:3], json.dumps(record), *lines[4:]]) + "\n")
    verify = prorsa("verify", str(directory))
    assert verify.returncode == 1
    assert f"turn {record['trajectory']}.0, token 0: recorded {record['response_ids'][first]}" in verify.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollout", str(CONFIG), "cluster.instances=1"], ["cluster.instances=1", "2 or more"]),
        (["rollout", str(CONFIG), "model.path=nowhere"], ["model.path='nowhere'", "config.json"]),
        (["rollout", "no.yaml"], ["no.yaml", "cannot be read"]),
        (["report", "no-run"], ["no-run", "no run directory"]),
        (["verify", "no-run"], ["no-run"]),
    ],
)
def test_bad_input_is_one_clear_error(arguments: list[str], words: list[str]) -> None:
    result = prorsa(*arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr
