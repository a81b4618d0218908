"""verl's router actor, in which the control plane lives: tracker, forecast, allocation, routing, switching and recording.

verl makes it from `rollout.router_config_path` with the replicas it has started. Our episodes talk to it directly: `turn` for
a model turn, `record` for a lifecycle event. Any other agent loop goes verl's way: `acquire_server` gives it this actor as
its server, and each of its calls of `generate` becomes a trajectory of one turn, for verl does not say where a longer one
begins and ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason, SamplingParams
from prorsa.integrations.verl.loaded import mark
from prorsa.integrations.verl.settings import Settings
from prorsa.lifecycle.events import Done, Dropped, Event, RewardStarted, Sampled


@dataclass
class ServedTurn:
    """What verl reads of a server's `TokenOutput`, without importing verl for it."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    extra_fields: dict[str, Any]
    routed_experts: None = None
    num_preempted: int = 0


class ProrsaRouter:
    def __init__(self, servers: Mapping[str, Any], router_kwargs: Mapping[str, Any]) -> None:
        self._settings = Settings.of(router_kwargs)
        self._servers = dict(servers)
        self._plane: Any = None
        self._starting = asyncio.Lock()
        if self._servers:
            mark(self._settings, "router")
            (server,) = self._servers.values()
            server.attach.remote(ray.get_runtime_context().current_actor)
