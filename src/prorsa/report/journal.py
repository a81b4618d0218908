"""Files that only grow, line by line, whatever the disk does.

Invariants. A file holds whole lines: what a failed write has left of a line is cut off before anything follows. A record
that cannot be written waits in memory with those behind it, in order, and is tried again until it is written, or lost where
the memory for what waits is used up. A record that is no record (a NaN in the trace) is lost alone. What is lost is known by
file, number and name. A line that was written is with the operating system: it outlives this process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Event, RLock, Thread
from time import monotonic
from typing import Any

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds between two tries to write what waits; the pause grows."""
NAMES_KEPT = 1000
"""Lost records that are named, the latest; the others are counted."""
NAMES_SHOWN = 5
"""Of those, in a message."""
LOST = "lost.jsonl"
"""What is known of lost records: of each file how many so far, and the names of the latest."""

_REMEDIES = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there, or have the quota raised",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (sysctl fs.file-max)",
    errno.EACCES: "make it writable",
    errno.EPERM: "make it writable",
    errno.EROFS: "mount it writable, or use another run_dir",
    errno.ENOENT: "it was removed or renamed; put it back",
    errno.ENOTDIR: "it was replaced; put the directory back",
    errno.ENOMEM: "free memory",
    errno.EIO: "see what the kernel says of the device (dmesg)",
}
PASSING = frozenset(_REMEDIES) - {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS}
"""Error numbers that speak of the machine's state and not of what was asked for."""


class RecordingFailed(Exception):
    """Records could not be written; the message names the path, the cause and the remedy."""


def explain(error: OSError, path: str | Path | None = None) -> str:
    """Path, cause and remedy in one line."""
    where = path if path is not None else error.filename
    cause = error.strerror or str(error)
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}: {cause}" + (f"; {remedy}" if remedy else "") if where is not None else cause


@dataclass(frozen=True, slots=True)
class Waiting:
    """A record on its way to a file."""

    encode: Callable[[], bytes]
    """Its line. Raises ValueError where the record cannot be one."""
    size: int
    """Bytes that it takes in memory, roughly."""
    name: str
    """What it is called where it is lost."""
    wrote: Callable[[], None] = lambda: None
    """Called once, when the line is in the file."""
    lost: Callable[[str], Waiting | None] = lambda why: None
    """What is written in its place where it is lost."""
    after: str | None = None
    """The file whose records must be written before it."""


class Lines:
    """One file. Raises OSError where a line cannot be appended; the file is as it was, or will be before the next line."""

    def __init__(self, path: Path, shared: bool = False) -> None:
        """`shared`: other processes append to it too. The file is made by the first line."""
        self.path = path
        self._shared = shared
        self._file: int | None = None
        self._torn = 0
        """Bytes at the end of the file that are no whole line and are ours to cut off."""

    def open(self) -> None:
        if self._file is None:
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                with self._alone(file):
                    cut_torn_line(file)
            except BaseException:
                os.close(file)
                raise
            self._file = file

    def append(self, line: bytes) -> None:
        self.open()
        assert self._file is not None
        with self._alone(self._file):
            self._mend(self._file)
            try:
                while self._torn < len(line):
                    self._torn += os.write(self._file, line[self._torn :])
            except OSError:
                # If even this fails, it is done before the next line.
                with suppress(OSError):
                    self._mend(self._file)
                raise
            self._torn = 0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _mend(self, file: int) -> None:
        if self._torn:
            os.ftruncate(file, os.fstat(file).st_size - self._torn)
            self._torn = 0

    @contextmanager
    def _alone(self, file: int) -> Iterator[None]:
        if not self._shared:
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


def cut_torn_line(file: int) -> None:
    """Cut off what follows the last newline of an open file: the process that wrote it was killed within the line."""
    size = end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 65536)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)


def dump_line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _no_line(error: Exception) -> bytes:
    raise error


class Journal:
    """The files of one directory. Its methods may be called from any thread, and raise nothing that a disk can do."""

    def __init__(
        self,
        directory: Path,
        memory: int,
        *,
        give_up_after: float | None = None,
        also: Callable[[], None] = lambda: None,
    ) -> None:
        """`memory` in bytes is for all that waits. `give_up_after` is how long, in seconds, nothing could be written before
        `gave_up` says so; None: never. `also` is called whenever writing is tried again; it raises OSError where it fails."""
        self.directory = directory
        self.lost: Counter[str] = Counter()
        """Records by file."""
        self.gave_up: str | None = None
        """Why, once writing has failed for too long, or the memory for what waits is used up."""
        self.on_give_up: Callable[[], object] = lambda: None
        """Called once, from any thread."""
        self.on_recovery: Callable[[], object] = lambda: None
        """Called whenever everything that waited is written, from any thread."""
        self._memory = memory
        self._give_up_after = give_up_after
        self._also = also
        self._files: dict[str, Lines] = {}
        self._waiting: dict[str, deque[Waiting]] = {}
        self._held = 0
        self._names: deque[tuple[str, str]] = deque(maxlen=NAMES_KEPT)
        """(file, record) of what was lost."""
        self._told: Counter[str] = Counter()
        """Losses that stand in `LOST`."""
        self._fault: str | None = None
        self._since = 0.0
        self.lock = RLock()
        self._closing = Event()
        self._retrying: Thread | None = None

    @property
    def patient(self) -> bool:
        return self._give_up_after is not None

    @property
    def failing(self) -> bool:
        return self._fault is not None

    @property
    def trouble(self) -> str | None:
        """What is wrong in one line, or None: a fault that lasts, or records that were lost before."""
        with self.lock:
            return "; ".join(part for part in (self._fault, self._tally()) if part) or None

    def file(self, name: str, shared: bool = False) -> Lines:
        """Raises OSError where it cannot be opened."""
        lines = self._files[name] = Lines(self.directory / name, shared)
        lines.open()
        return lines

    def add(self, name: str, record: Waiting) -> None:
        with self.lock:
            if self._waiting.get(name) or self._waiting.get(record.after or ""):
                self._hold(name, record)
                return
            try:
                self._write(name, record)
            except OSError as error:
                self.failed(self.directory / name, error)
                self._hold(name, record)

    def add_record(self, name: str, record: dict[str, Any], called: str, after: str | None = None) -> None:
        """A record that is a JSON object, and what it is called where it is lost; `after` as `Waiting` has it."""
        try:
            line = dump_line(record)
        except (ValueError, TypeError) as error:
            self.add(name, Waiting(partial(_no_line, error), 0, called))
            return
        self.add(name, Waiting(lambda: line, len(line), called, after=after))

    def lose(self, name: str, called: str) -> None:
        """Count a record that is not written."""
        with self.lock:
            self.lost[name] += 1
            self._names.append((name, called))

    def failed(self, path: Path, error: OSError) -> None:
        """Writing has failed: begin to try again."""
        with self.lock:
            fresh = self._fault is None
            self._fault = explain(error, path)
            if fresh:
                self._since = monotonic()
                logger.error("recording fails, records wait in memory: %s", self._fault)
            if self._retrying is None and not self._closing.is_set():
                self._retrying = Thread(target=self._retry, name="recording", daemon=True)
                self._retrying.start()

    def close(self) -> None:
        """Try once more. Raises `RecordingFailed` where records are lost, or the directory cannot be written still."""
        self._closing.set()
        if self._retrying is not None:
            self._retrying.join()
        if self._catch_up():
            self._fault = None
        with self.lock:
            for name, waiting in self._waiting.items():
                for record in waiting:
                    self.lose(name, record.name)
                waiting.clear()
            self._tell_losses()
            for file in self._files.values():
                file.close()
            if self.trouble is not None:
                raise RecordingFailed(self.trouble)

    # Writing.

    def _write(self, name: str, record: Waiting) -> None:
        file = self._files.get(name) or self.file(name)
        try:
            line = record.encode()
        except (ValueError, TypeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            logger.error("%s: the record %s cannot be written and is left out: %s", file.path, record.name, why)
            self.lose(name, record.name)
            self._tell_losses()
            instead = record.lost(why)
            if instead is not None:
                self._write(name, instead)
            return
        file.append(line)
        record.wrote()

    def _hold(self, name: str, record: Waiting) -> None:
        if self._held + record.size > self._memory:
            self._give_up("the memory for records that wait is used up")
            self.lose(name, record.name)
            instead = record.lost("the disk could not take it")
            if instead is None:
                return
            record = instead
        self._waiting.setdefault(name, deque()).append(record)
        self._held += record.size

    def _tell_losses(self) -> None:
        with suppress(OSError):  # it is told again with the next loss, and at the end
            for name, count in self.lost.items():
                if count > self._told[name]:
                    names = [record for file, record in self._names if file == name]
                    line = {"file": name, "lost": count, "records": names}
                    (self._files.get(LOST) or self.file(LOST, shared=True)).append(dump_line(line))
                    self._told[name] = count

    # Trying again.

    def _retry(self) -> None:
        pause = FIRST_PAUSE
        while not self._closing.wait(pause):
            if self._catch_up() and self._recovered():
                break
            if self._give_up_after is not None and monotonic() - self._since > self._give_up_after:
                self._give_up(f"it has failed for {self._give_up_after:g} s")
            pause = min(2 * pause, LONGEST_PAUSE)
        with suppress(OSError):
            self._also()

    def _recovered(self) -> bool:
        with self.lock:
            if any(self._waiting.values()):
                return False
            self._fault = self._retrying = None
            logger.warning("recording goes on%s", f"; {tally}" if (tally := self._tally()) else "")
            self._tell_losses()
            self.on_recovery()
            return True

    def _catch_up(self) -> bool:
        """Whether everything that waited is written. A file that cannot be written keeps no other one waiting."""
        failure: str | None = None
        for name in [*self._waiting, *self._waiting]:  # twice: a record may wait for one of another file
            try:
                while self._write_next(name):
                    pass
            except OSError as error:
                failure = explain(error, self.directory / name)
        try:
            self._also()
        except OSError as error:
            failure = failure or explain(error)
        if failure is not None:
            self._fault = failure
        return failure is None

    def _write_next(self, name: str) -> bool:
        """The lock is let go between two records, so that new ones need not wait long."""
        with self.lock:
            waiting = self._waiting[name]
            if not waiting or self._waiting.get(waiting[0].after or ""):
                return False
            self._write(name, waiting[0])
            self._held -= waiting.popleft().size
            return True

    def _give_up(self, why: str) -> None:
        if self.gave_up is None and self._give_up_after is not None:
            self.gave_up = f"{self._fault} ({why})"
            self.on_give_up()

    def _tally(self) -> str:
        waiting = sum(map(len, self._waiting.values()))
        parts = [f"{waiting} records wait in memory"] if waiting else []
        if self.lost:
            of = ", ".join(f"{count} of {name}" for name, count in self.lost.items())
            more = ", ..." if self.lost.total() > NAMES_SHOWN else ""
            parts.append(f"lost: {of} ({', '.join(record for _, record in islice(self._names, NAMES_SHOWN))}{more})")
        return "; ".join(parts)
