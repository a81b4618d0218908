"""Sandboxes for the whole rollout: some prewarmed, the others started cold, only a few of them starting at a time.

No process outlives the pool: it ends through `close`, or through the kernel if this process is killed. Every directory lies
below one root, which is locked while its pool lives. A root without a lock was left behind by a killed process, and the next
pool removes it. Directories are removed in a thread; one that cannot be is told, and stays behind without hindering anybody.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from prorsa.rollout.sandboxes.base import SandboxError
from prorsa.rollout.sandboxes.directories import remove_tree
from prorsa.rollout.sandboxes.process import Limits, ProcessSandbox, Worker

log = logging.getLogger(__name__)

ROOT_PREFIX = "prorsa-sandboxes-"
STARTING = 2
"""Interpreters that start at a time. More would not start sooner on few cores, and would slow whatever else runs there."""

SWEEP_SECONDS = 5.0
"""How long a start waits for what earlier runs left to be removed; the rest of it goes on meanwhile."""

PARTS = {
    "calls": ("system calls on a list of allowed ones (seccomp)", "start processes, signal others and use the network"),
    "files": ("its own directory and Python's library (Landlock)", "use the user's files"),
    "capabilities": ("no capabilities", "use what root may do"),
    "mounts": ("everything else mounted read-only", "tell what files there are by trying their names"),
    "disk": ("a bounded file system in memory", "write more than its bounds for a quarter of a second"),
    "uid": ("a user of its own", "act as the user who runs Prorsa, as far as the other parts allow"),
}
"""What confines a sandbox, by the names in `Worker.enforced`, and what its code can do where the kernel lacks it."""
NEEDED = ("calls", "files", "capabilities")
"""Without one of these, code that is not trusted should not run."""


class Root:
    """A locked directory below the system's temporary one."""

    def __init__(self) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=ROOT_PREFIX))
            # Before it is locked, another pool may take the directory for an abandoned one and remove it.
            with suppress(FileNotFoundError):
                self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._handle, fcntl.LOCK_EX)
                if self.path.exists():
                    # A sandbox that is another user passes through it to its own directory.
                    self.path.chmod(0o711)
                    return
                os.close(self._handle)

    def close(self) -> None:
        os.close(self._handle)


def remove_abandoned_roots(go_on: Callable[[], bool]) -> None:
    """Those that no living pool has locked."""
    for path in Path(tempfile.gettempdir()).glob(f"{ROOT_PREFIX}*"):
        # Gone meanwhile, another user's, or locked by a living pool.
        with suppress(FileNotFoundError, PermissionError, BlockingIOError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path, go_on)
            finally:
                os.close(handle)


def _remove(path: Path, go_on: Callable[[], bool] = lambda: True) -> None:
    """Never raises: what a sandbox left must not hinder a run."""
    try:
        remove_tree(path, go_on)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("the directory %s of a sandbox is left (%s); remove it by hand", path, error)


class SandboxPool:
    """`prewarmed` workers are kept ready and refilled in the background; a trajectory that finds none starts one cold.

    Made on the event loop's thread, as `async with SandboxPool(...) as pool`; it is a `Sandboxes`.
    """

    def __init__(
        self,
        prewarmed: int = 8,
        timeout: float = 5.0,
        memory_mb: int = 256,
        file_mb: int = 4,
        disk_mb: int = 64,
        files: int = 4096,
        output_chars: int = 2000,
    ) -> None:
        self.prewarmed = prewarmed
        self.limits = Limits(timeout, memory_mb, file_mb, disk_mb, files, output_chars)
        self._ready: list[Worker] = []
        self._living: set[Worker] = set()
        self._starting = asyncio.Semaphore(STARTING)
        self._taken = asyncio.Event()
        """Wakes the refill."""
        self._removals: set[asyncio.Task[None]] = set()
        self._closing = False
        self._told = False
        """Whether the log says what is isolated."""
        self._root: Root | None = None
        self._refill: asyncio.Task[None] | None = None

    async def __aenter__(self) -> SandboxPool:
        sweep = self._in_thread(remove_abandoned_roots, lambda: not self._closing)
        await asyncio.wait([sweep], timeout=SWEEP_SECONDS)
        self._root = Root()
        self._refill = asyncio.create_task(self._keep_prewarmed(), name="sandbox-refill")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def ready(self) -> int:
        """Prewarmed sandboxes that wait for a trajectory."""
        return len(self._ready)

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[ProcessSandbox]:
        """A sandbox for one trajectory; it is `start`ed inside the block and gone after it."""
        worker = self._take()
        sandbox = ProcessSandbox(worker, self._start)
        try:
            yield sandbox
        finally:
            sandbox.close()

    async def close(self) -> None:
        """End every sandbox; returns when no process and no directory is left. Trajectories that still run lose theirs."""
        root, self._root = self._root, None
        self._closing = True
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait([self._refill])
        living = list(self._living)
        for worker in living:
            worker.kill()
        for worker in living:
            await worker.ended.wait()
        self._ready.clear()
        if self._removals:
            await asyncio.wait(self._removals)
        if root is not None:
            await asyncio.to_thread(_remove, root.path)
            root.close()

    def _take(self) -> Worker | None:
        self._taken.set()
        while self._ready:
            worker = self._ready.pop()
            if not worker.ended.is_set():
                return worker
        return None

    async def _start(self) -> Worker:
        async with self._starting:
            if self._root is None:
                raise SandboxError("the sandbox pool is closed")
            try:
                worker = Worker(self._root.path, self.limits, self._ended)
            except OSError as error:
                raise SandboxError(f"a sandbox did not start: {error}") from error
            self._living.add(worker)
            await worker.lock_in()
        self._tell_what_is_isolated(worker)
        return worker

    def _ended(self, worker: Worker) -> None:
        self._living.discard(worker)
        try:
            worker.home.rmdir()
        except OSError:
            # There are files in it, perhaps very many.
            self._in_thread(_remove, worker.home)

    def _in_thread(self, work: Callable[..., None], *arguments: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(asyncio.to_thread(work, *arguments))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return task

    def _tell_what_is_isolated(self, worker: Worker) -> None:
        if self._told:
            return
        self._told = True
        log.info("sandboxes are confined by %s", "; ".join(PARTS[part][0] for part in PARTS if part in worker.enforced))
        if gaps := [PARTS[part][1] for part in NEEDED if part not in worker.enforced]:
            log.warning("this machine does not confine the sandboxes: their code can %s", "; ".join(gaps))

    async def _keep_prewarmed(self) -> None:
        while True:
            self._taken.clear()
            try:
                while len(self._ready) < self.prewarmed:
                    self._ready.append(await self._start())
            except SandboxError as error:
                # A trajectory that needs one meets the same error and says so; tried again when one is taken.
                log.warning("%s", error)
            await self._taken.wait()
