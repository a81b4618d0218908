"""Tensors as checkpoints: what is written, what is left, and what is refused."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from prorsa.engines import weights
from prorsa.engines.weights import MemoryCheckpoints, write_checkpoint

torch = pytest.importorskip("torch", reason="the weights are its tensors (extra `verl`)")

from safetensors.torch import load_file as load_torch_file  # noqa: E402


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "memory"
    directory.mkdir()
    monkeypatch.setattr(weights, "MEMORY", directory)
    return directory


def test_torch_tensors_are_written_as_they_are_read(checkpoint: Path, tmp_path: Path) -> None:
    table = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    write_checkpoint(
        {"embed": table, "head": table, "turned": table.T, "scale": torch.nn.Parameter(torch.ones(2))},
        checkpoint,
        tmp_path,
    )
    written = load_torch_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        "embed": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "head": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "turned": [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]],
        "scale": [1.0, 1.0],
    }
    assert written["embed"].dtype is torch.bfloat16
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads((checkpoint / "config.json").read_text())


def memory_holds(memory: Path) -> list[str]:
    return [str(path) for path in memory.glob("*/*")]


def test_one_checkpoint_stays_in_memory(checkpoint: Path, memory: Path) -> None:
    old = load_file(checkpoint / "model.safetensors")
    new = {name: np.asfortranarray(array + 1) for name, array in old.items()}

    async def main() -> None:
        checkpoints = MemoryCheckpoints()
        await checkpoints.keep(None)
        await checkpoints.write(old, str(checkpoint), 1)
        second = await checkpoints.write(new, str(checkpoint), 2)
        await checkpoints.keep(second)
        assert memory_holds(memory) == [second]
        read = load_file(Path(second) / "model.safetensors")
        assert all(np.array_equal(read[name], new[name]) for name in old)
        await checkpoints.close()

    asyncio.run(main())
    assert list(memory.iterdir()) == []


def test_nothing_is_left_of_a_write_whose_caller_was_cancelled(checkpoint: Path, memory: Path) -> None:
    async def main() -> None:
        checkpoints = MemoryCheckpoints()
        write = asyncio.create_task(checkpoints.write(load_file(checkpoint / "model.safetensors"), str(checkpoint), 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        write.cancel()
        await asyncio.gather(write, return_exceptions=True)
        await checkpoints.close()

    asyncio.run(main())
    assert list(memory.iterdir()) == []


def test_an_update_needs_every_tensor(checkpoint: Path, memory: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match=r"weights 3: 1 tensors of the model .* such as 'model.norm.weight'"):
        asyncio.run(MemoryCheckpoints().write(tensors, str(checkpoint), 3))
    assert list(memory.iterdir()) == []


def test_memory_that_does_not_suffice_is_not_filled(
    checkpoint: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000))
    with pytest.raises(OSError, match=r"weights 1 take \d+ bytes and 1000 are free; give it more"):
        asyncio.run(MemoryCheckpoints().write(load_file(checkpoint / "model.safetensors"), str(checkpoint), 1))


OWNER = """
import asyncio, sys
from pathlib import Path
from safetensors.numpy import load_file
from prorsa.engines import weights

weights.MEMORY, checkpoint = Path(sys.argv[1]), sys.argv[2]
tensors = load_file(checkpoint + "/model.safetensors")
print(asyncio.run(weights.MemoryCheckpoints().write(tensors, checkpoint, 1)), flush=True)
sys.stdin.read()
"""


@contextmanager
def owner(memory: Path, checkpoint: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that has written weights, and its directory."""
    command = [sys.executable, "-c", OWNER, str(memory), str(checkpoint)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip()).parent
        finally:
            process.kill()


def write_once(checkpoint: Path) -> None:
    async def main() -> None:
        checkpoints = MemoryCheckpoints()
        await checkpoints.write(load_file(checkpoint / "model.safetensors"), str(checkpoint), 1)
        await checkpoints.close()

    asyncio.run(main())


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(
    checkpoint: Path, memory: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    with owner(memory, checkpoint) as (_, alive), owner(memory, checkpoint) as (killed, left):
        (memory / f"{weights.PREFIX}link").symlink_to(elsewhere)
        (memory / f"{weights.PREFIX}file").write_text("")
        (memory / f"{weights.PREFIX}just-made").mkdir()
        (memory / "another-program").mkdir()
        before = {*memory.iterdir()}
        write_once(checkpoint)
        assert {*memory.iterdir()} == before, "both owners live"
        killed.kill()
        killed.wait()
        write_once(checkpoint)
        assert before - {*memory.iterdir()} == {left}
        assert (next(alive.iterdir()) / "model.safetensors").is_file()
        assert (elsewhere / "kept").is_file()


def test_what_another_user_left_is_not_touched(checkpoint: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with owner(memory, checkpoint) as (killed, left):
        killed.kill()
        killed.wait()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
            write_once(checkpoint)
            assert left.is_dir()
        write_once(checkpoint)
        assert not left.exists()
