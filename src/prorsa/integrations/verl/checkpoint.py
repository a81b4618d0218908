"""The checkpoint engine "prorsa" of `separate_async`: the trainer's first rank publishes, the rollout side has no part in it.

`rollout.checkpoint_engine.custom_backend_module` names this module, and verl imports it on both sides. Engines read the
checkpoint themselves, so what a rollout worker "receives" is empty (`WIRE_FORMAT` tells `adapter` so).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from prorsa.integrations.verl.loaded import mark
from prorsa.integrations.verl.settings import NAME, Settings
from prorsa.integrations.verl.weights import NamedTensors, publish

WIRE_FORMAT = "published"


@CheckpointEngineRegistry.register(NAME)
class PublishingCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """`run_dir` and `work_dir` come from `rollout.checkpoint_engine.engine_kwargs.prorsa`."""

    wire_format = WIRE_FORMAT

    def __init__(self, run_dir: str, work_dir: str, bucket_size: int, is_master: bool = False) -> None:
        self.settings = Settings(run_dir, work_dir)
        self.is_master = is_master
        mark(self.settings, "checkpoint")

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def prepare(self) -> dict[str, Any]:
        return {}

    def init_process_group(self) -> None: ...

    def finalize(self) -> None: ...

    async def send_weights(self, weights: NamedTensors, global_steps: int | None = None) -> dict[str, float]:
        await publish(weights, global_steps, self.settings, self.is_master)
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        return
        yield
