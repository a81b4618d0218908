"""Starts SGLang engines, watches them and ends with its parent. Runs in the engines' interpreter, as a process of its own.

It reads commands from stdin and writes what happens to stdout, both as a JSON object a line. Beside engines (`start`) it runs
other commands (`run`). Each child is a session of its own (a process group), so that nothing of it is left when it ends.
When stdin ends, every child is killed: a parent that dies by SIGKILL leaves none behind. A child whose keeper dies is killed
by the kernel.

On a CPU the engines are forked from this process, which has imported SGLang once and has a single thread. With a GPU, whose
driver must not be forked, each is a process started anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

STOP_SECONDS = 12.0
"""How long an engine may take to end after SIGTERM before its processes get SIGKILL. SGLang looks every 5 s whether it is to
end."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
Spawn = Callable[[list[str], dict[str, str], int], int]
"""Arguments, environment variables beside ours, and the file descriptor of the log -> process id, also the group's."""


class Keeper:
    def __init__(self, spawn: Spawn, tell: Callable[[dict[str, Any]], None]) -> None:
        self._spawn = spawn
        self._tell = tell
        self._children: dict[int, str] = {}
        self._kill_at: dict[int, float] = {}

    def run(self) -> None:
        """Until stdin ends."""
        woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        commands = sys.stdin.fileno()
        selector.register(commands, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        unread = b""
        while True:
            for key, _ in selector.select(self._patience()):
                if key.fd != commands:
                    os.read(woken, 4096)
                    continue
                piece = os.read(key.fd, 65536)
                if not piece:
                    return
                *lines, unread = (unread + piece).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            self._bury()
            self._kill_late()

    def end(self) -> None:
        for pid in self._children:
            _kill_group(pid)
        for pid in self._children:
            _wait_for_group(pid)

    def _obey(self, command: dict[str, Any]) -> None:
        match command["do"]:
            case "start":
                self._start(command, self._spawn)
            case "run":
                self._start(command, start_process)
            case "stop":
                for pid, name in self._children.items():
                    if name == command["name"] and pid not in self._kill_at:
                        os.kill(pid, signal.SIGTERM)
                        self._kill_at[pid] = time.monotonic() + STOP_SECONDS
            case "kill":
                for pid, name in self._children.items():
                    if name == command["name"]:
                        _kill_group(pid)

    def _start(self, command: dict[str, Any], spawn: Spawn) -> None:
        """What does not start costs the others nothing."""
        try:
            log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                pid = spawn(command["arguments"], command["environment"], log)
            finally:
                os.close(log)
        except (OSError, subprocess.SubprocessError, RuntimeError) as error:
            self._tell({"event": "failed", "name": command["name"], "reason": repr(error)})
            return
        self._children[pid] = command["name"]
        self._tell({"event": "started", "name": command["name"], "pid": pid})

    def _patience(self) -> float | None:
        return max(0.0, min(self._kill_at.values()) - time.monotonic()) if self._kill_at else None

    def _bury(self) -> None:
        for pid in list(self._children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _kill_group(pid)
                _wait_for_group(pid)
                self._kill_at.pop(pid, None)
                name = self._children.pop(pid)
                self._tell({"event": "ended", "name": name, "pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def _kill_late(self) -> None:
        for pid, when in self._kill_at.items():
            if when <= time.monotonic():
                _kill_group(pid)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _wait_for_group(pid: int) -> None:
    """Of processes that were killed: until the last is gone. Its orphans are our children (`adopt_orphans`)."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-pid, 0)


def adopt_orphans() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start_engine(flags: list[str], environment: dict[str, str], log: int) -> int:
    return start_process([sys.executable, "-m", "sglang.launch_server", *flags], environment, log)


def start_process(command: list[str], environment: dict[str, str], log: int) -> int:
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - this process has one thread
    )
    process.returncode = 0  # it is this keeper that waits for it
    return process.pid


def import_engine() -> None:
    """Everything that an engine imports, so that the forked ones need not."""
    # Chosen when the metrics library is imported; every engine then takes a directory of its own.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
    import sglang.srt.disaggregation.decode
    import sglang.srt.disaggregation.mooncake
    import sglang.srt.disaggregation.prefill
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def fork_engine(flags: list[str], environment: dict[str, str], log: int) -> int:
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"cannot fork safely: {[thread.name for thread in threading.enumerate()]} run")
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _become_engine(log)
        os.environ.update(environment)
        _serve(flags)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _become_engine(log: int) -> None:
    os.setsid()
    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 1024)
    random.seed()
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()


def _serve(flags: list[str]) -> None:
    import multiprocessing

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    # SGLang would start its processes anew; forked, they need not import everything again.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None
    run_server(prepare_server_args(flags))


def main() -> None:
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what SGLang prints while it is imported is no event

    def tell(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")

    from sglang.srt.plugins import load_plugins

    from prorsa.engines.sglang_server import plugin

    try:
        load_plugins()
        plugin.verify()
    except (SystemExit, plugin.Unfixed) as error:
        tell({"event": "refused", "reason": str(error)})
        return
    on_cpu = os.environ.get(plugin.DEVICE) == "cpu"
    if on_cpu:
        import_engine()
    adopt_orphans()
    tell({"event": "ready"})
    keeper = Keeper(fork_engine if on_cpu else start_engine, tell)
    try:
        keeper.run()
    finally:
        keeper.end()


if __name__ == "__main__":
    main()
