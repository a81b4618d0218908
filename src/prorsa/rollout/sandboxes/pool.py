"""Sandboxes for the whole rollout: some prewarmed, the others started cold, only a few of them starting at a time.

Nothing outlives the pool. Every process ends with it: through `close`, or through the kernel if this process is killed.
Every directory lies below one root, which is locked while its pool lives. A root without a lock was left behind by a
killed process, and the next pool removes it.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from prorsa.rollout.sandboxes.base import SandboxError
from prorsa.rollout.sandboxes.process import REMOVAL, Limits, ProcessSandbox, Worker

log = logging.getLogger(__name__)

ROOT_PREFIX = "prorsa-sandboxes-"
STARTING = 2
"""Interpreters that start at a time. More would not start sooner on few cores, and would slow whatever else runs there."""

SWEPT = 64
"""Roots of earlier runs that one run removes."""

CONSEQUENCES = {
    "files": "use the user's files (no Landlock)",
    "calls": "start processes, signal others and use the network (no seccomp)",
    "mounts": "see which files exist, and write to the disk up to a bound that is looked at twice a second (no mounts)",
    "capabilities": "use the privileges of the user (capabilities kept)",
}
"""Of what a kernel may lack, by the names in `Worker.enforced`. A uid of its own is for root alone."""


class Root:
    """A locked directory below the system's temporary one. Roots that were left behind are removed meanwhile."""

    def __init__(self) -> None:
        _remove_abandoned_roots()
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=ROOT_PREFIX))
            # Before it is locked, another pool may take the directory for an abandoned one and remove it.
            with suppress(FileNotFoundError):
                self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._handle, fcntl.LOCK_EX)
                if self.path.exists():
                    # The uid of a sandbox that root starts has to come through.
                    self.path.chmod(0o711)
                    return
                os.close(self._handle)

    def close(self) -> None:
        try:
            self.path.rmdir()
        except OSError as error:
            log.warning("a directory of sandboxes is left for the next run: %s", error)
        os.close(self._handle)


def _remove_abandoned_roots() -> None:
    """Start to remove them in a process that holds their locks. Neither their number nor their state costs this run."""
    handles: dict[str, int] = {}
    for path in Path(tempfile.gettempdir()).glob(f"{ROOT_PREFIX}*"):
        if len(handles) == SWEPT:
            break
        # Gone meanwhile, another user's, or locked by a living pool.
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(handle).st_uid != os.geteuid():
                    raise PermissionError
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(handle)
                raise
            handles[str(path)] = handle
    try:
        if handles:
            _remove_behind(handles)
    finally:
        for handle in handles.values():
            os.close(handle)


def _remove_behind(roots: dict[str, int]) -> None:
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", str(REMOVAL), "--behind", *roots],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[*roots.values()],
            start_new_session=True,
            timeout=5.0,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("directories that earlier runs left are not removed: %s", error)


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
        output_chars: int = 2000,
        home_mb: int = 64,
        home_files: int = 4096,
    ) -> None:
        self.prewarmed = prewarmed
        self.limits = Limits(timeout, memory_mb, file_mb, home_mb, home_files, output_chars)
        self._ready: list[Worker] = []
        self._living: set[Worker] = set()
        self._starting = asyncio.Semaphore(STARTING)
        self._taken = asyncio.Event()
        """Wakes the refill."""
        self._told = False
        self._root: Root | None = None
        self._refill: asyncio.Task[None] | None = None

    async def __aenter__(self) -> SandboxPool:
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
        """End every sandbox; no process is left then, and no directory that can be removed. What still runs loses its own."""
        root, self._root = self._root, None
        if self._refill is not None:
            self._refill.cancel()
            await asyncio.wait([self._refill])
        living = list(self._living)
        for worker in living:
            worker.kill()
        for worker in living:
            await worker.ended.wait()
        self._ready.clear()
        if root is not None:
            root.close()

    def _take(self) -> Worker | None:
        self._taken.set()
        while self._ready:
            worker = self._ready.pop()
            if not worker.dead.is_set():
                return worker
        return None

    async def _start(self) -> Worker:
        async with self._starting:
            if self._root is None:
                raise SandboxError("the sandbox pool is closed")
            try:
                worker = Worker(self._root.path, self.limits, self._living)
            except OSError as error:
                raise SandboxError(f"a sandbox did not start: {error}") from error
            await worker.lock_in()
        self._warn_of_gaps(worker)
        return worker

    def _warn_of_gaps(self, worker: Worker) -> None:
        """Once, with the first sandbox."""
        if self._told:
            return
        self._told = True
        log.info("sandboxes are confined by: %s", ", ".join(sorted(worker.enforced)) or "nothing")
        gaps = [CONSEQUENCES[part] for part in CONSEQUENCES if part not in worker.enforced]
        if gaps:
            text = f"this kernel does not fully confine the sandboxes: their code can {'; '.join(gaps)}"
            log.warning("%s", text)
            print(f"prorsa: {text}", file=sys.stderr)

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
