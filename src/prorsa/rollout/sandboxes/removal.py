"""Remove directories that hostile code has filled: `python removal.py [--behind] PATH...`, a program of its own.

Neither depth, count, modes nor flags stop it: each directory that is met is moved up to the top first, so that no path has
more than two names and nothing recurses. What is left all the same is told on standard error, and the exit status is 1.
The code that filled the directories has to have ended.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
from contextlib import suppress

READ_FLAGS, WRITE_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS and FS_IOC_SETFLAGS
HOLDING = 0x10 | 0x20  # immutable and append-only
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove(path: str) -> list[str]:
    """What could not be removed, with the reason; nothing where `path` is gone."""
    left: list[str] = []
    try:
        top = open_freed(path, None)
    except FileNotFoundError:
        return left
    except OSError as error:
        return [f"{path}: {error}"]
    try:
        moved = _empty(top, top, 0, left, path)
        done = 0
        while done < moved:
            # Emptying one may move more to the top, behind it.
            name = _moved(done)
            try:
                handle = open_freed(name, top)
                try:
                    moved = _empty(handle, top, moved, left, path)
                finally:
                    os.close(handle)
                os.rmdir(name, dir_fd=top)
            except OSError as error:
                left.append(f"{path}/{name}: {error}")
            done += 1
    finally:
        os.close(top)
    if not left:
        os.rmdir(path)
    return left


def _moved(number: int) -> str:
    return f".prorsa-removal-{os.getpid()}-{number}"


def _empty(handle: int, top: int, moved: int, left: list[str], path: str) -> int:
    """Remove the files in a directory and move its directories to the top; how many have been moved altogether."""
    with os.scandir(handle) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        try:
            if is_directory:
                os.close(open_freed(name, handle))
                os.rename(name, _moved(moved), src_dir_fd=handle, dst_dir_fd=top)
                moved += 1
            else:
                _unlink(name, handle)
        except OSError as error:
            left.append(f"{path}: {name!r}: {error}")
    return moved


def open_freed(name: str, parent: int | None) -> int:
    """A directory's descriptor, once its mode and flags keep nobody out."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        raise NotADirectoryError(f"{name} is no directory")
    with suppress(PermissionError):  # it is immutable, perhaps
        os.chmod(name, 0o700, dir_fd=parent)
    handle = os.open(name, DIRECTORY, dir_fd=parent)
    _free(handle)
    os.fchmod(handle, 0o700)
    return handle


def _unlink(name: str, parent: int) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except PermissionError:
        handle = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=parent)
        _free(handle)
        os.close(handle)
        os.unlink(name, dir_fd=parent)


def _free(handle: int) -> None:
    """Take the flags away that keep something from being changed, where the file system has any."""
    try:
        (flags,) = struct.unpack("l", fcntl.ioctl(handle, READ_FLAGS, bytes(8)))
    except OSError:
        return
    if flags & HOLDING:
        fcntl.ioctl(handle, WRITE_FLAGS, struct.pack("l", flags & ~HOLDING))


if __name__ == "__main__":
    paths = sys.argv[1:]
    if paths[0] == "--behind":
        # Whoever asked waits for nothing, and the system's first process takes note of the end.
        if os.fork():
            os._exit(0)
        paths = paths[1:]
    troubles = [trouble for path in paths for trouble in remove(path)]
    print("\n".join(troubles[:8]), file=sys.stderr)
    sys.exit(bool(troubles))
