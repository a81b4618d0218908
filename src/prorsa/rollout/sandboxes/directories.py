"""Directories of code that is not trusted: how much is in one, and how it is removed whatever was done to it.

Nothing here recurses and no path grows, so that neither the depth of a tree nor the length of its paths matters. The code
that wrote the tree must have ended: nobody else changes it meanwhile.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from fcntl import ioctl
from functools import partial
from pathlib import Path

FS_IOC_SETFLAGS = 0x40086602
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
DEEPEST = 64
"""Levels of directories that are looked into; a deeper tree holds too much in any case."""
BLOCK = 512
"""Bytes of a block as the system counts them."""


def holds_more(directory: Path, most_bytes: int, most_files: int) -> bool:
    """Whether a tree takes more bytes on its disk, or has more files and directories. It may change meanwhile."""
    size, count, waiting = 0, 0, [(str(directory), 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    count += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * BLOCK
                    if size > most_bytes or count > most_files or depth > DEEPEST:
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
        except OSError:
            continue  # it is gone, or its owner alone may look into it
    return False


def remove_tree(path: Path, go_on: Callable[[], bool] = lambda: True) -> None:
    """Remove a directory with all that is in it, whatever its permissions, flags, depth and number of files.

    Every directory is moved up to the first level before it is emptied. Raises `OSError` where the system allows no more, and
    where `go_on` answers False between two directories.
    """
    parent = os.open(path.parent, DIRECTORY)
    try:
        _permit(path.name, parent)
        top = os.open(path, DIRECTORY)
        try:
            _empty(top, go_on)
        finally:
            os.close(top)
        _forced(partial(os.rmdir, path.name, dir_fd=parent), path.name, parent)
    finally:
        os.close(parent)


def _empty(top: int, go_on: Callable[[], bool]) -> None:
    prefix, moved = os.urandom(8).hex(), 0
    waiting = _remove_files(top)
    while waiting:
        if not go_on():
            raise OSError("its removal was stopped")
        name = waiting.pop()
        _permit(name, top)
        handle = os.open(name, DIRECTORY, dir_fd=top)
        try:
            for inner in _remove_files(handle):
                moved += 1
                place = f"{prefix}-{moved}"
                _move_up(inner, handle, place, top)
                waiting.append(place)
        finally:
            os.close(handle)
        _forced(partial(os.rmdir, name, dir_fd=top), name, top)


def _remove_files(directory: int) -> list[str]:
    """Remove what is no directory; the names of the directories."""
    inner: list[str] = []
    with os.scandir(directory) as entries:
        listed = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in listed:
        if is_directory:
            inner.append(name)
        else:
            _forced(partial(os.unlink, name, dir_fd=directory), name, directory)
    return inner


def _move_up(name: str, directory: int, place: str, top: int) -> None:
    _permit(name, directory)
    _forced(partial(os.rename, name, place, src_dir_fd=directory, dst_dir_fd=top), name, directory)


def _permit(name: str, parent: int) -> None:
    """Let its owner read and change a directory."""
    if stat.S_IMODE(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode) & 0o700 != 0o700:
        _forced(partial(os.chmod, name, 0o700, dir_fd=parent), name, parent)


def _forced(act: Callable[[], None], name: str, parent: int) -> None:
    """Do it; where it is not permitted, do it again without the flags that make a file or directory unchangeable."""
    try:
        act()
    except PermissionError:
        _clear_flags(parent)
        handle = os.open(name, FILE, dir_fd=parent)
        try:
            _clear_flags(handle)
        finally:
            os.close(handle)
        act()


def _clear_flags(handle: int) -> None:
    ioctl(handle, FS_IOC_SETFLAGS, bytes(8))
