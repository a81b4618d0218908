"""The weights that the trainer publishes: what is on disk when the engines are told, and what is left of it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prorsa.config import dump_config, parse_config
from prorsa.integrations.verl import weights
from prorsa.integrations.verl.adapter import ProrsaAdapter
from prorsa.integrations.verl.checkpoint import WIRE_FORMAT, PublishingCheckpointEngine
from prorsa.integrations.verl.settings import Settings


@pytest.fixture
def settings(tmp_path: Path, checkpoint: Path) -> Settings:
    copy = shutil.copytree(checkpoint, tmp_path / "model")
    (copy / "tokenizer.json").write_text("{}")
    (copy / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(dump_config(parse_config({"model": {"path": str(copy)}})))
    return Settings(str(tmp_path), str(tmp_path / "work"))


class FakeRouter:
    """Stands in for the router actor; notes what is on disk at the moment of each update."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, dict[str, torch.Tensor], list[str]]] = []
        self.update_weights = SimpleNamespace(remote=self._update)

    async def _update(self, path: str, version: int) -> None:
        beside = sorted(entry.name for entry in Path(path).parent.iterdir())
        self.updates.append((version, load_file(Path(path) / "model.safetensors"), beside))


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    router = FakeRouter()
    monkeypatch.setattr(weights.ray, "get_actor", lambda name: router if name == "prorsa" else None)
    return router


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((2, 3), value), "b.weight": torch.full((4,), value)}


def test_a_whole_checkpoint_is_there_when_the_engines_are_told(
    settings: Settings, router: FakeRouter, checkpoint: Path
) -> None:
    asyncio.run(weights.publish(tensors(1.0).items(), 3, settings, leader=True))
    [(version, loaded, _)] = router.updates
    assert version == 3
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        "a.weight": [[1.0] * 3] * 2,
        "b.weight": [1.0] * 4,
    }
    [directory] = settings.weights_dir.iterdir()
    assert {path.name for path in directory.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert json.loads((directory / "config.json").read_text()) == json.loads((checkpoint / "config.json").read_text())


def test_the_former_checkpoint_lives_until_every_engine_has_left_it(settings: Settings, router: FakeRouter) -> None:
    for version in (0, 1, 2):
        asyncio.run(weights.publish(tensors(version).items(), version, settings, leader=True))
    assert [beside for _, _, beside in router.updates] == [
        ["version-0"],
        ["version-0", "version-1"],
        ["version-1", "version-2"],
    ]
    assert [path.name for path in settings.weights_dir.iterdir()] == ["version-2"]


def test_a_failed_update_keeps_the_former_checkpoint(settings: Settings, router: FakeRouter) -> None:
    asyncio.run(weights.publish(tensors(0).items(), 0, settings, leader=True))

    async def fail(path: str, version: int) -> None:
        raise RuntimeError("no engine took it")

    router.update_weights = SimpleNamespace(remote=fail)
    with pytest.raises(RuntimeError, match="no engine took it"):
        asyncio.run(weights.publish(tensors(1).items(), 1, settings, leader=True))
    assert (settings.weights_dir / "version-0" / "model.safetensors").is_file()


def test_other_ranks_gather_every_tensor_and_publish_nothing(settings: Settings, router: FakeRouter) -> None:
    gathered: list[str] = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors(1.0).items():
            gathered.append(name)
            yield name, tensor

    asyncio.run(weights.publish(gather(), 1, settings, leader=False))
    assert gathered == ["a.weight", "b.weight"]
    assert router.updates == []
    assert not settings.weights_dir.exists()


def test_a_sync_without_a_version_is_refused(settings: Settings, router: FakeRouter) -> None:
    with pytest.raises(ValueError, match="without a global step"):
        asyncio.run(weights.publish(tensors(1.0).items(), None, settings, leader=True))


def test_the_checkpoint_engine_publishes_once_and_the_rollout_side_has_nothing_to_do(
    settings: Settings, router: FakeRouter
) -> None:
    def engine(is_master: bool) -> PublishingCheckpointEngine:
        return PublishingCheckpointEngine(**settings.mapping(), bucket_size=1, is_master=is_master)

    async def sync() -> None:
        await engine(True).send_weights(tensors(2.0).items(), global_steps=7)
        await engine(False).send_weights(tensors(2.0).items(), global_steps=7)
        received = engine(False).receive_weights(global_steps=7)
        await adapter(settings).update_weights(received, wire_format=WIRE_FORMAT, global_steps=7)

    asyncio.run(sync())
    assert [version for version, _, _ in router.updates] == [7]


def test_the_adapter_of_a_trainer_worker_publishes(settings: Settings, router: FakeRouter) -> None:
    async def gathered() -> AsyncIterator[tuple[str, torch.Tensor]]:
        for item in tensors(2.0).items():
            yield item

    asyncio.run(adapter(settings).update_weights(gathered(), global_steps=4, peft_config=None, base_sync_done=True))
    assert [version for version, _, _ in router.updates] == [4]


def adapter(settings: Settings) -> ProrsaAdapter:
    """Without verl's constructor, which wants verl's whole configuration."""
    made: Any = ProrsaAdapter.__new__(ProrsaAdapter)
    made.settings, made.is_leader_rank = settings, True
    return made


def test_what_a_killed_job_has_left_of_a_version_is_replaced(settings: Settings, router: FakeRouter) -> None:
    for name in ("version-3", "version-3.partial", "version-2"):
        (settings.weights_dir / name).mkdir(parents=True)
        (settings.weights_dir / name / "model.safetensors").write_text("half")
    asyncio.run(weights.publish(tensors(1.0).items(), 3, settings, leader=True))
    assert [version for version, _, _ in router.updates] == [3]
    assert [path.name for path in settings.weights_dir.iterdir()] == ["version-3"]
    assert set(load_file(settings.weights_dir / "version-3" / "model.safetensors")) == {"a.weight", "b.weight"}
