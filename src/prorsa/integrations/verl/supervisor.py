"""Run a command, and leave nothing of it behind: `python -m prorsa.integrations.verl.supervisor LOG WORK_DIR COMMAND...`.

A trainer is a tree of processes, some in sessions of their own. This process is the reaper of the whole tree
(`PR_SET_CHILD_SUBREAPER`): whatever loses its parent becomes its child. When the command ends, or when standard input
reaches its end because the caller has gone or wants to stop, it ends every descendant, removes WORK_DIR, and exits with the
command's status. It needs nothing but the standard library, so that it starts at once.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GRACE = 3.0
"""Seconds between the request to end and SIGKILL."""


class Stop(Exception):
    """SIGTERM or SIGINT."""


def main(log: str, work_dir: str, command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    with open(log, "ab", buffering=0) as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # If this process is killed, so is the command, and what it has started notices. There is one thread here.
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509
        )
    try:
        code = _wait(child)
    finally:
        end_descendants()
        if os.path.exists(work_dir):
            shutil.rmtree(work_dir)
    return code if code >= 0 else 128 - code


def _wait(child: subprocess.Popen[bytes]) -> int:
    ended = os.pidfd_open(child.pid)
    try:
        readable, _, _ = select.select([ended, sys.stdin], [], [])
    except Stop:
        readable = []
    if ended not in readable:
        child.send_signal(signal.SIGINT)
        if not select.select([ended], [], [], GRACE)[0]:
            child.kill()
    return child.wait()


def _stop(*_: object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise Stop


def end_descendants() -> None:
    """SIGTERM, then after `GRACE` SIGKILL, until no descendant is left."""
    deadline = time.monotonic() + GRACE
    asked: set[int] = set()
    while descendants := list(living_descendants()):
        late = time.monotonic() > deadline
        for pid in descendants:
            if late or pid not in asked:
                asked.add(pid)
                _send(pid, signal.SIGKILL if late else signal.SIGTERM)
        _reap()
        time.sleep(0.05)


def living_descendants() -> Iterator[int]:
    children = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (status := _status(int(entry))) is not None:
            state, parent = status
            if state != "Z" or parent == os.getpid():
                children[parent].append(int(entry))
    waiting = [os.getpid()]
    while waiting:
        for pid in children[waiting.pop()]:
            yield pid
            waiting.append(pid)


def _status(pid: int) -> tuple[str, int] | None:
    """State letter and parent of a process; None if it has gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1])


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _reap() -> None:
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
