"""Tensors as checkpoints: what is written, what is left, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch_file

from prorsa.engines import weights
from prorsa.engines.weights import MemoryCheckpoints, write_checkpoint


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
