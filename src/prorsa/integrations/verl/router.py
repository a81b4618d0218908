"""verl's router actor, in which the control plane lives: tracker, forecast, allocation, routing, switching and recording.

There is one in a run, by name, and it owns the engine processes. `replica` makes it and hands it to verl as the server of its
one replica; verl, told so by `rollout.router_config_path`, then gets the same actor as its router. Our episodes call it
directly: `turn` for a model turn, `record` for a lifecycle event. Any other agent loop goes verl's way: `acquire_server`,
then `generate`; each such call is a trajectory of one turn, for verl does not say where a longer one begins and ends.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from prorsa.assembly import build_injection, running_cluster
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason, SamplingParams
from prorsa.integrations.verl.loaded import mark
from prorsa.integrations.verl.settings import NAME, Settings
from prorsa.lifecycle.events import Done, Dropped, Event, RewardStarted, Sampled
from prorsa.report.journal import RecordingFailed
from prorsa.report.opening import History
from prorsa.report.recorder import RunRecorder, recorder_of
from prorsa.report.rundir import LOGS
from prorsa.rollout.tokenizer import ChatTokenizer

MOST_CALLS = 100_000
"""Calls that Ray lets wait in the actor at a time; every live trajectory has one."""


@dataclass
class ServedTurn:
    """What verl reads of a server's `TokenOutput`; verl itself is not imported into this actor."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    extra_fields: dict[str, Any] = field(default_factory=dict)
    routed_experts: None = None
    num_preempted: int = 0


class ControlRouter:
    """`servers` is verl's and holds nothing that this actor does not know: its one replica is the actor itself."""

    def __init__(self, servers: Mapping[str, Any], router_kwargs: Mapping[str, Any]) -> None:
        self._settings = Settings.of(router_kwargs)
        self._config = self._settings.config()
        self._tokenizer = ChatTokenizer(self._config.model.path)
        self._running = AsyncExitStack()
        self._control: ControlPlane | None = None
        self._recorder: RunRecorder | None = None
        self._in_flight = 0

    async def start(self) -> None:
        """Start the engines and the control plane. A run directory that a job before has left is gone on with.

        Raises `EngineError`, `CannotContinue`.
        """
        recorder = self._recorder = recorder_of(self._config, self._settings.run_dir, COMMAND, _now())
        past = recorder.past_events()
        recorder.history = History()  # everything that the run has recorded: it is needed no more
        self._control = await self._running.enter_async_context(
            running_cluster(
                self._config,
                Path(self._settings.run_dir) / LOGS,
                [recorder],
                build_injection(self._config.rollout),
                past,
            )
        )

    @property
    def control(self) -> ControlPlane:
        if self._control is None:
            raise RuntimeError("the router actor was used before its replica had started it")
        return self._control

    # What our episodes and weight updates call.

    def version(self) -> int:
        return self.control.version

    async def record(self, event: Event) -> None:
        """Take in an event; it happens now, on this actor's clock.

        Raises `IllegalTransition`, and `RecordingFailed` where the run shall stop because it cannot be recorded.
        """
        if self._recorder is not None and self._recorder.gave_up is not None:
            raise RecordingFailed(self._recorder.gave_up)
        await self.control.record(replace(event, time=_now()))

    async def turn(self, request: TurnRequest) -> TurnResult:
        """Raises `TurnFailed`."""
        self._in_flight += 1
        try:
            return await self.control.generate(request)
        finally:
            self._in_flight -= 1

    async def update_weights(self, path: str, version: int) -> None:
        """Raises `EngineError` when no engine took the weights."""
        await self.control.update_weights(path, version)

    # What verl calls of a server.

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **_: Any
    ) -> ServedTurn:
        """One turn of an agent loop that records no events of its own. Raises `TurnFailed`."""
        request = self._request(request_id, prompt_ids, sampling_params)
        now, trajectory = _now(), request.trajectory
        await self.control.record(Sampled(now, trajectory, trajectory, FOREIGN, self.version(), len(prompt_ids)))
        try:
            result = await self.turn(request)
        except BaseException as error:
            await self.control.record(Dropped(_now(), trajectory, f"{type(error).__name__}: {error}"))
            raise
        await self.control.record(RewardStarted(_now(), trajectory, len(prompt_ids) + len(result.token_ids)))
        await self.control.record(Done(_now(), trajectory, 0.0, admitted=True))
        return _served(result, self.version())

    def _request(self, trajectory: str, prompt: Sequence[int], params: Mapping[str, Any]) -> TurnRequest:
        room = self._config.model.max_context - len(prompt)
        asked = params.get("max_tokens") or params.get("max_new_tokens") or room
        seed = params.get("seed")
        sampling = SamplingParams(
            max_new_tokens=min(asked, room),
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            top_k=params.get("top_k", -1),
            stop_token_ids=self._tokenizer.eos_ids,
            # Without one a resend would draw anew.
            seed=secrets.randbits(63) if seed is None else seed,
        )
        return TurnRequest(trajectory, 0, tuple(prompt), sampling)

    # What verl calls of a router (its protocol `RequestLoadBalancer`).

    def acquire_server(self, request_id: str) -> tuple[str, Any]:
        mark(self._settings, "router")
        return NAME, ray.get_runtime_context().current_actor

    def release_server(self, server_id: str) -> None: ...

    def require_acquire_fields(self) -> list[str]:
        return []

    def require_release_fields(self) -> list[str]:
        return []

    def add_servers(self, servers: Mapping[str, Any]) -> None:
        self._refuse_other(servers)

    def remove_servers(self, server_ids: Sequence[str]) -> None:
        self._refuse_other(server_ids)

    def _refuse_other(self, servers: Any) -> None:
        """Elastic replicas (`hybrid_rollout.enable_switch`) would come and go without their engines."""
        raise NotImplementedError(
            f"verl adds or removes the servers {list(servers)}: rollout.name=prorsa has one fixed replica"
        )

    def get_all_servers(self) -> list[str]:
        return [NAME]

    def get_status(self) -> dict[str, Any]:
        return {"servers": {NAME: self._in_flight}, "total_inflight": self._in_flight, "active_servers": 1}

    def get_total_inflight(self) -> int:
        return self._in_flight

    def clear_sticky_cache(self) -> dict[str, Any]:
        return {"cleared_entries": 0, "server_loads": {NAME: self._in_flight}}


COMMAND = "train"
"""Whose run it is, whether `prorsa train` or verl's own command has begun it."""
FOREIGN = "foreign"
"""The task of a trajectory that another agent loop runs."""


ProrsaRouter = ray.remote(name=NAME, get_if_exists=True, num_cpus=0, max_concurrency=MOST_CALLS)(ControlRouter)


def _served(result: TurnResult, version: int) -> ServedTurn:
    versions = result.versions or (version,)
    return ServedTurn(
        token_ids=list(result.token_ids),
        log_probs=list(result.logprobs),
        stop_reason="completed" if result.finish is FinishReason.STOP else "length",
        extra_fields={
            "global_steps": versions[-1],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "num_cached_tokens": result.cached_tokens,
        },
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
