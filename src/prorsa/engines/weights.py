"""Weights on their way to engines of this machine: tensors written as a checkpoint, on disk or in memory.

SGLang's own ways to take tensors need a process group, or PyTorch's shared memory, and leave nothing for an engine that
starts later. A checkpoint in memory costs no more (`docs/sglang.md`), any engine reads it, and so does one that is restarted.

Invariant: a directory of checkpoints in memory is empty until its owner has locked it (flock), and the lock lasts as long as
the owner, however that ends. So one that is not empty and can be locked has no owner any more.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

DESCRIPTIONS = (".json", ".jinja", ".txt")
"""Suffixes of the files that belong to a checkpoint and are not weights."""
INDEX = ".index.json"
MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""
PREFIX = "prorsa-weights-"
"""Begins the name of a directory there."""

NamedTensors = Mapping[str, Any]
"""NumPy arrays, or PyTorch tensors on any device, under the names that they have in a checkpoint of the model."""

logger = logging.getLogger(__name__)


def write_checkpoint(tensors: NamedTensors, model: Path, directory: Path) -> None:
    """Write them to `directory`, which exists, with the configuration and the tokenizer of the checkpoint `model`."""
    path, metadata = directory / "model.safetensors", {"format": "pt"}
    if all(isinstance(tensor, np.ndarray) for tensor in tensors.values()):
        save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, path, metadata)
    else:
        from safetensors.torch import save_file as save_torch_file

        save_torch_file(_on_cpu(tensors), path, metadata)
    for file in model.iterdir():
        if file.suffix in DESCRIPTIONS and not file.name.endswith(INDEX):
            shutil.copyfile(file, directory / file.name)


def _on_cpu(tensors: NamedTensors) -> dict[str, Any]:
    """On the CPU, contiguous, and each in memory of its own: tied weights are one tensor with two names."""
    moved: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        moved[name] = tensor.detach().cpu().contiguous()
        place = moved[name].untyped_storage().data_ptr()
        if place in seen:
            moved[name] = moved[name].clone()
        seen.add(place)
    return moved


@dataclass(frozen=True, slots=True)
class _Root:
    """A directory that is ours."""

    path: Path
    lock: int
    """The descriptor by which it is locked."""

    def remove(self) -> None:
        self.path.rmdir()
        os.close(self.lock)


class MemoryCheckpoints:
    """Checkpoints in memory. One is kept until there are newer weights, for engines that are restarted."""

    def __init__(self) -> None:
        self._root: _Root | None = None
        self._writing: asyncio.Task[str] | None = None

    async def write(self, tensors: NamedTensors, model: str, version: int) -> str:
        """The path of a new checkpoint of the tensors; `model` is one of the same model.

        They are not copied before they are written, so they must not change meanwhile. Raises ValueError where the model has
        weights that they lack, and OSError where the memory does not suffice.
        """
        # A thread cannot be cancelled.
        self._writing = asyncio.create_task(asyncio.to_thread(self._write, tensors, Path(model), version))
        return await asyncio.shield(self._writing)

    async def keep(self, path: str | None) -> None:
        """Remove all but this one."""
        if self._root is not None:
            await asyncio.to_thread(_remove_others, self._root.path, path)

    async def close(self) -> None:
        if self._writing is not None:
            await asyncio.wait([self._writing])
        await self.keep(None)
        if self._root is not None:
            self._root.remove()
            self._root = None

    def _write(self, tensors: NamedTensors, model: Path, version: int) -> str:
        missing = _names(model) - tensors.keys()
        if missing:
            raise ValueError(
                f"weights {version}: {len(missing)} tensors of the model {model} are missing, such as {min(missing)!r}; "
                f"an update needs all of them"
            )
        if self._root is None:
            self._root = _new_root(MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir()))
        root = self._root.path
        needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(root).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"weights {version} take {needed} bytes and {free} are free; give it more (docker run --shm-size) or write a "
                f"checkpoint to disk",
                str(root.parent),
            )
        directory = Path(tempfile.mkdtemp(prefix=f"version-{version}-", dir=root))
        write_checkpoint(tensors, model, directory)
        return str(directory)


def _new_root(parent: Path) -> _Root:
    _remove_ownerless(parent)
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return _Root(path, lock)


def _remove_ownerless(parent: Path) -> None:
    """What processes of this user have left that were killed."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, a link, or just removed: not for us
        try:
            if os.fstat(directory).st_uid == os.geteuid():
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.listdir(directory):
                    logger.info("removing %s: the process that made it is gone", path)
                    shutil.rmtree(path)
        except BlockingIOError:
            continue  # its owner lives
        finally:
            os.close(directory)


def _remove_others(root: Path, path: str | None) -> None:
    for directory in root.iterdir():
        if str(directory) != path:
            shutil.rmtree(directory)


def _names(model: Path) -> set[str]:
    """Of the weights in the checkpoint's files."""
    names: set[str] = set()
    for file in model.glob("*.safetensors"):
        with safe_open(file, "numpy") as weights:
            names.update(weights.keys())
    return names
