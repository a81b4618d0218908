"""Weights on their way from the trainer to the engines: one safetensors checkpoint directory a version.

A directory appears under its final name only when it is complete, and goes when every engine has loaded a later one. So
one is left at the end: the trained model, as a checkpoint that `model.path` can name.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from prorsa.engines.weights import write_checkpoint
from prorsa.integrations.verl.settings import NAME, Settings

if TYPE_CHECKING:
    import torch

NamedTensors = Iterable[tuple[str, "torch.Tensor"]] | AsyncIterable[tuple[str, "torch.Tensor"]]


async def publish(weights: NamedTensors, version: int | None, settings: Settings, leader: bool) -> None:
    """Bring `weights` to every engine as `version`, verl's global step. Returns when they all serve it.

    Every trainer rank calls it and drains `weights`, since gathering a sharded tensor takes all of them; the leader does
    the rest.
    """
    if version is None:
        raise ValueError("verl updated the weights without a global step; Prorsa needs one as their version")
    if not leader:
        async for _ in _each(weights):
            pass
        return
    # A gathered tensor may live only until the next one is asked for.
    tensors = {name: tensor.detach().cpu().clone() async for name, tensor in _each(weights)}
    path = write_version(tensors, settings, version)
    await ray.get_actor(NAME).update_weights.remote(str(path), version)
    remove_others(path)


def write_version(tensors: dict[str, torch.Tensor], settings: Settings, version: int) -> Path:
    """Write them with the configuration and the tokenizer of the model that training began with; the directory."""
    final = settings.weights_dir / f"version-{version}"
    partial = final.with_suffix(".partial")
    # A job that was killed may have left both; no engine of this one has read them.
    for left in (partial, final):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)
    write_checkpoint(tensors, Path(settings.config().model.path), partial)
    return partial.rename(final)


def remove_others(path: Path) -> None:
    """Remove every checkpoint beside `path`."""
    for other in path.parent.iterdir():
        if other != path:
            shutil.rmtree(other)


async def _each(weights: NamedTensors) -> AsyncIterator[tuple[str, torch.Tensor]]:
    if isinstance(weights, AsyncIterable):
        async for item in weights:
            yield item
    else:
        for item in weights:
            yield item
