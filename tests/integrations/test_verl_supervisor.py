"""Whatever ends a supervised command, its whole tree of processes and its work directory are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MODULE = "prorsa.integrations.verl.supervisor"
TREE = """
import os, subprocess, sys, time
print("up", flush=True)
# A grandchild in a session of its own that nobody waits for and that ignores SIGTERM.
ignore = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]], start_new_session=True)"
subprocess.run([sys.executable, "-c", child, ignore, sys.argv[1]])
"""


class Supervised:
    """A supervisor of `code`, which may start the tree above; its processes are known by a mark in their arguments."""

    def __init__(self, directory: Path, code: str) -> None:
        self.log, self.work = directory / "log", directory / "work"
        self.mark = f"mark-of-{directory}"
        self.work.mkdir()
        (self.work / "file").touch()
        self.process = subprocess.Popen(
            [sys.executable, "-m", MODULE, self.log, self.work, sys.executable, "-c", code, self.mark],
            stdin=subprocess.PIPE,
        )

    def living(self) -> list[int]:
        """Every process with the mark but the supervisor."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != self.process.pid:
                try:
                    arguments = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if self.mark.encode() in arguments:
                    found.append(int(entry.name))
        return found

    def wait_for(self, text: str) -> None:
        self._until(lambda: self.log.exists() and text in self.log.read_text())

    def wait_until_nothing_lives(self) -> None:
        self._until(lambda: not self.living())

    def status(self) -> int:
        return self.process.wait(20)

    @staticmethod
    def _until(true: object) -> None:
        deadline = time.monotonic() + 20
        while not true():  # type: ignore[operator]
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_status_and_the_output_of_the_command(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert supervised.status() == 3
    assert sorted(supervised.log.read_text().split()) == ["err", "out"]
    assert not supervised.work.exists()


def test_a_command_killed_by_a_signal(tmp_path: Path) -> None:
    assert Supervised(tmp_path, "import os; os.kill(os.getpid(), 9)").status() == 128 + signal.SIGKILL


def test_orphans_in_other_sessions_end_with_the_command(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, TREE)
    assert supervised.status() == 0
    assert supervised.living() == []
    assert not supervised.work.exists()


@pytest.mark.parametrize("how", ["caller ends", "SIGTERM"])
def test_it_ends_a_running_tree(tmp_path: Path, how: str) -> None:
    supervised = Supervised(tmp_path, TREE + "time.sleep(600)")
    supervised.wait_for("ready")
    assert len(supervised.living()) == 2
    assert supervised.process.stdin is not None
    if how == "SIGTERM":
        supervised.process.terminate()
    else:
        # A caller that is killed has its end closed by the kernel.
        supervised.process.stdin.close()
    assert supervised.status() != 0
    assert supervised.living() == []
    assert not supervised.work.exists()


def test_the_command_does_not_outlive_a_killed_supervisor(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "import time; print('ready', flush=True); time.sleep(600)")
    supervised.wait_for("ready")
    os.kill(supervised.process.pid, signal.SIGKILL)
    supervised.status()
    supervised.wait_until_nothing_lives()
