"""verl's weight adapter: a trainer worker holds it in `sync`, a rollout worker in `separate_async`."""

from __future__ import annotations

import os
from typing import Any

from verl.workers.rollout.base import BaseRollout

from prorsa.integrations.verl.checkpoint import WIRE_FORMAT
from prorsa.integrations.verl.loaded import mark
from prorsa.integrations.verl.settings import NAME, Settings
from prorsa.integrations.verl.weights import NamedTensors, publish


class ProrsaAdapter(BaseRollout):  # type: ignore[misc]
    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, *args: Any, replica_rank: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.settings = Settings.of(self.config.custom[NAME])
        self.replica_rank = replica_rank
        self.is_leader_rank = os.environ.get("RANK", "0") == "0"
        mark(self.settings, "adapter")

    async def update_weights(
        self,
        weights: NamedTensors,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        if wire_format == WIRE_FORMAT:
            async for _ in weights:  # type: ignore[union-attr]
                pass
            return
        await publish(weights, global_steps, self.settings, self.is_leader_rank)

    async def resume(self, tags: list[str]) -> None:
        """The engines keep their memory while the trainer works, so there is nothing to take back."""

    async def release(self) -> None:
        """As `resume`."""
