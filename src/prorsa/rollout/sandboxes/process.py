"""A sandbox is one Python process: `Worker` is the running interpreter, `ProcessSandbox` what a trajectory holds.

Its memory, CPU time, open files, files, bytes and wall time are bounded; nothing of the parent is inherited. The runner
takes every right away that the kernel lets it: `Worker.enforced` names what is enforced, docs/security.md what that means.
Against code that attacks the kernel itself, run Prorsa inside a VM.

No worker is left behind: its end, whatever caused it, is noticed through a pidfd, and its directory is removed then,
by another process. A directory that cannot be removed is told and left; it keeps nothing and nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prorsa.lifecycle.events import SandboxMode
from prorsa.rollout.sandboxes.base import SandboxError

log = logging.getLogger(__name__)

RUNNER, REMOVAL = (Path(__file__).with_name(name) for name in ("runner.py", "removal.py"))
START_TIMEOUT = 30.0
"""Seconds until an interpreter must have reported; on an idle core it takes about 0.03 s."""
REMOVAL_TIMEOUT = 60.0
"""Seconds after which a directory that is still being removed is left for the next run."""
LOOKS = 0.5
"""Seconds between two looks at the files of a sandbox that has no mounts of its own to bound them."""
CALLS_OF_CPU = 20
"""A worker's CPU time over its life, in calls of full length: a bound for one whose parent hangs."""


@dataclass(frozen=True, slots=True)
class Limits:
    timeout: float = 5.0
    """Wall time of one call, seconds."""
    memory_mb: int = 256
    """Address space, the interpreter's own included."""
    file_mb: int = 4
    """Size of one file."""
    home_mb: int = 64
    """All files together."""
    home_files: int = 4096
    """Files and directories together."""
    output_chars: int = 2000
    """Longest printed text that a call returns; its traceback may take as much again."""


class WorkerEnded(Exception):
    """The interpreter ended during a call; the message says how."""


class Worker:
    """One interpreter process in a session of its own, with its socket and its directory.

    Its parent is the thread that makes it, which therefore has to outlive it.
    """

    def __init__(self, root: Path, limits: Limits, living: set[Worker]) -> None:
        """Start the process in a new directory below `root`. It is in `living` until it has ended. Raises `OSError`."""
        self.limits = limits
        self.home = Path(tempfile.mkdtemp(dir=root))
        self.enforced: frozenset[str] = frozenset()
        """What the kernel enforces of "mounts", "user", "capabilities", "files" (Landlock) and "calls" (seccomp); known
        after `lock_in`."""
        self.dead = asyncio.Event()
        """Set once the process is reaped."""
        self.ended = asyncio.Event()
        """Set once the directory is gone too, or is left for good."""
        self._living = living
        self._writer: asyncio.StreamWriter | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._removal: asyncio.Task[None] | None = None
        try:
            self.process, self._pidfd, self._wire = _launch(self.home, limits)
        except OSError:
            self.home.rmdir()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)
        living.add(self)

    async def lock_in(self) -> None:
        """Wait until the interpreter enforces its limits. Raises `SandboxError`; it is dead then."""
        try:
            async with self._bound(START_TIMEOUT):
                self._reader, self._writer = await asyncio.open_unix_connection(sock=self._wire)
                if self.dead.is_set():
                    self._writer.close()
                verdict, *words = (await self._receive()).split()
        except TimeoutError:
            raise SandboxError(f"a sandbox did not start within {START_TIMEOUT:g} s") from None
        except WorkerEnded as error:
            raise SandboxError(f"a sandbox did not start: its interpreter {error}") from error
        if verdict != "ready":
            raise SandboxError(f"a sandbox did not start: {' '.join(words)}")
        self.enforced = frozenset(words)
        if "mounts" not in self.enforced and not self.dead.is_set():
            self._watcher = asyncio.create_task(self._watch(), name="sandbox-watch")

    async def run(self, code: str) -> str:
        """Raises `TimeoutError` or `WorkerEnded`; the process is dead then, as it is after a cancellation."""
        data = code.encode("utf-8", "replace")
        async with self._bound(self.limits.timeout):
            assert self._writer is not None
            self._writer.write(len(data).to_bytes(4, "big") + data)
            await self._writer.drain()
            result = await self._receive()
        return result  # noqa: RET504 (mypy thinks that `_bound` may swallow an error)

    def kill(self) -> None:
        """Kill it now; `ended` is set soon after."""
        if not self.dead.is_set():
            os.killpg(self.process.pid, signal.SIGKILL)

    @asynccontextmanager
    async def _bound(self, seconds: float) -> AsyncIterator[None]:
        """Whatever goes wrong inside the block, a timeout included, kills the process."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            self.kill()
            raise
        except (OSError, EOFError):
            self.kill()
            await self.dead.wait()
            raise WorkerEnded(_manner(self.process.returncode)) from None
        except BaseException:
            self.kill()
            raise

    async def _receive(self) -> str:
        length = int.from_bytes(await self._reader.readexactly(4), "big")
        # Two texts of `output_chars`, four bytes a character, and their notes. Only a forged frame is longer.
        if length > 8 * self.limits.output_chars + 1024:
            raise EOFError
        return (await self._reader.readexactly(length)).decode("utf-8", "replace")

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.process.wait()
        # A socket that is only just being connected is not ours to close yet: `lock_in` does.
        if self._writer is not None:
            self._writer.close()
        self.dead.set()
        if self._watcher is not None:
            self._watcher.cancel()
        try:
            self.home.rmdir()  # where it had mounts of its own, nothing was ever in it
        except OSError:
            self._removal = asyncio.create_task(self._remove(), name="sandbox-removal")
        else:
            self._end()

    async def _remove(self) -> None:
        try:
            await asyncio.to_thread(remove_tree, self.home)
        except OSError as error:
            log.warning("a sandbox's directory is left, remove it by hand: %s", error)
        finally:
            self._end()

    def _end(self) -> None:
        self._living.discard(self)
        self.ended.set()

    async def _watch(self) -> None:
        """Bound the files and bytes together where no mount does: what is written between two looks comes on top.

        Between calls as well, for code that has answered may still run.
        """
        while await asyncio.to_thread(within, self.home, self.limits):  # noqa: ASYNC110
            await asyncio.sleep(LOOKS)  # another process gives no signal
        log.warning("a sandbox was ended: it wrote more than its bound of files or bytes")
        self.kill()


def _launch(home: Path, limits: Limits) -> tuple[subprocess.Popen[bytes], int, socket.socket]:
    """The process, a pidfd of it, and our end of its standard input, which is a socket."""
    cpu_s = math.ceil(limits.timeout * CALLS_OF_CPU)
    settings = (
        *(os.getpid(), limits.memory_mb, limits.file_mb, cpu_s, limits.output_chars),
        *(limits.home_mb, limits.home_files),
    )
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-u", str(RUNNER), *map(str, settings)],
            stdin=theirs.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=home,
            env={},
            start_new_session=True,
        )
        undo.callback(process.wait)
        undo.callback(process.kill)
        pidfd = os.pidfd_open(process.pid)
        undo.pop_all()
    return process, pidfd, ours


def remove_tree(path: Path) -> None:
    """Remove a directory whatever hostile code left in it. Blocks until it is gone. Raises `OSError`."""
    try:
        removal = subprocess.run(
            [sys.executable, "-I", "-S", str(REMOVAL), str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=REMOVAL_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        raise OSError(f"{path}: not removed within {REMOVAL_TIMEOUT:g} s") from None
    if removal.returncode:
        raise OSError(removal.stderr.decode("utf-8", "replace").strip())


def within(home: Path, limits: Limits) -> bool:
    """Whether the files of a sandbox that may still run are within its bounds. Looks at no more than may be there.

    A directory that cannot be looked into, because of its mode or depth, is none that stays within bounds.
    """
    count = size = 0
    waiting = [str(home)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    with suppress(FileNotFoundError):
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    if count > limits.home_files or size > limits.home_mb << 20:
                        return False
        except FileNotFoundError:
            continue  # removed meanwhile
        except OSError:
            return False
    return True


def _manner(returncode: int) -> str:
    return f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exited with code {returncode}"


class ProcessSandbox:
    """The sandbox of one trajectory: a worker, and a new one after a call that killed it."""

    image = f"python-{platform.python_version()}"
    node_class = f"{platform.machine()}-{os.cpu_count()}"

    def __init__(self, prewarmed: Worker | None, start: Callable[[], Awaitable[Worker]]) -> None:
        self.mode = SandboxMode.COLD if prewarmed is None else SandboxMode.PREWARMED
        self._worker = prewarmed
        self._start = start

    @property
    def enforced(self) -> frozenset[str]:
        """As `Worker.enforced`; empty while no worker runs."""
        return frozenset() if self._worker is None else self._worker.enforced

    async def start(self) -> None:
        if self._worker is None:
            self._worker = await self._start()

    async def run(self, code: str) -> str:
        await self.start()
        assert self._worker is not None
        worker, self._worker = self._worker, None
        try:
            result = await worker.run(code)
        except TimeoutError:
            return f"TimeoutError: no result within {worker.limits.timeout:g} s. {LOST}"
        except WorkerEnded as ended:
            return f"The interpreter {ended}. {LOST}"
        self._worker = worker
        return result

    def close(self) -> None:
        if self._worker is not None:
            self._worker.kill()


LOST = "It was restarted: its variables and files are lost."
