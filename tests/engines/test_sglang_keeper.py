"""The keeper of SGLang engines, with children that are no engines: nothing of them is left when it says so, or ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KEEPER = """
import json
from prorsa.engines.sglang_server import keeper

keeper.adopt_orphans()
watch = keeper.Keeper(keeper.start_engine, lambda event: print(json.dumps(event), flush=True))
try:
    watch.run()
finally:
    watch.end()
"""
FAMILY = ["bash", "-c", "sleep 600 & echo $VARIABLE; sleep 600"]
STUBBORN = ["bash", "-c", "trap '' TERM; echo $VARIABLE; while true; do sleep 1; done"]


@contextmanager
def keeper(log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", KEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process, str(log)
        assert process.stdin
        process.stdin.close()
        process.wait(30)


def order(process: subprocess.Popen[str], **command: object) -> None:
    assert process.stdin
    process.stdin.write(json.dumps(command) + "\n")
    process.stdin.flush()


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout
    return dict(json.loads(process.stdout.readline()))


def started(process: subprocess.Popen[str], log: str, arguments: list[str]) -> int:
    order(process, do="run", name="a", arguments=arguments, environment={"VARIABLE": "seen"}, log=log)
    event = told(process)
    assert (event["event"], event["name"]) == ("started", "a")
    deadline = time.monotonic() + 30.0
    while "seen" not in Path(log).read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    return int(str(event["pid"]))


def group_is_gone(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("how", ["stop", "exit"])
def test_an_end_that_is_told_is_the_end_of_all_processes(how: str, tmp_path: Path) -> None:
    with keeper(tmp_path / "log") as (process, log):
        pid = started(process, log, FAMILY)
        assert not group_is_gone(pid)
        if how == "stop":
            order(process, do="stop", name="a")
        else:
            os.kill(pid, 9)
        event = told(process)
        assert event == {"event": "ended", "name": "a", "pid": pid, "status": -15 if how == "stop" else -9}
        assert group_is_gone(pid)


def test_nothing_is_left_when_the_keeper_ends(tmp_path: Path) -> None:
    with keeper(tmp_path / "log") as (process, log):
        pids = [started(process, log, arguments) for arguments in (FAMILY, STUBBORN)]
    assert all(group_is_gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("command", "log_in"), [(["/no/such/program"], "."), (FAMILY, "missing"), ([str(Path(__file__))], ".")]
)
def test_what_cannot_be_started_is_told_and_costs_no_other(command: list[str], log_in: str, tmp_path: Path) -> None:
    with keeper(tmp_path / "log") as (process, log):
        pid = started(process, log, FAMILY)
        order(process, do="run", name="b", arguments=command, environment={}, log=str(tmp_path / log_in / "b.log"))
        event = told(process)
        assert (event["event"], event["name"]) == ("failed", "b")
        assert "Error" in str(event["reason"])
        assert not group_is_gone(pid)


def test_what_hangs_is_killed_without_a_wait(tmp_path: Path) -> None:
    with keeper(tmp_path / "log") as (process, log):
        pid = started(process, log, STUBBORN)
        os.killpg(pid, signal.SIGSTOP)
        order(process, do="kill", name="a")
        assert told(process) == {"event": "ended", "name": "a", "pid": pid, "status": -9}
        assert group_is_gone(pid)
