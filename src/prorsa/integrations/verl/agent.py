"""Our episode as a verl agent loop: it runs in verl's agent-loop worker, with its sandboxes, and calls the router actor.

verl makes one `ProrsaAgentLoop` for a trajectory; what its worker's trajectories share is made once (`Shared`). The reward is
the episode's own, so verl computes none.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from prorsa.assembly import build_environment, build_sandboxes
from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.config import Config
from prorsa.integrations.verl.loaded import mark
from prorsa.integrations.verl.settings import NAME, Settings
from prorsa.lifecycle.events import Event
from prorsa.report.journal import Journal
from prorsa.report.rundir import TRAJECTORIES, read_starts
from prorsa.rollout.episode import Environment, Episode, Launch
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.resume import member_name
from prorsa.rollout.sampler import derive_seed
from prorsa.rollout.tasks.base import Question


class TrajectoryDropped(Exception):
    """The episode has no reward; verl marks its group as failed. The message names the trajectory and why."""


@dataclass(frozen=True, slots=True)
class Shared:
    settings: Settings
    config: Config
    environment: Environment
    router: Any
    """The handle of the router actor."""
    journal: Journal
    """Of the trajectories that this worker plays."""
    restarts: int
    """How often the run was gone on with. verl may ask again for a trajectory that was cut off, under the id that it had."""

    def keep(self, record: TrajectoryRecord) -> None:
        self.journal.add_record(TRAJECTORIES, asdict(record), record.trajectory)


class RouterPorts:
    """The episode's `Ports`: each call goes to the router actor and is answered before the next."""

    def __init__(self, router: Any, launch: Launch, max_staleness: int) -> None:
        self.episode: Episode | None = None
        self._router = router
        self._launch = launch
        self._max_staleness = max_staleness

    async def record(self, event: Event) -> None:
        await self._router.record.remote(event)

    async def generate(self, request: TurnRequest) -> TurnResult:
        turn = self._router.turn.remote(request)
        try:
            result: TurnResult = await turn
        except asyncio.CancelledError:
            # Ray does not tell the actor by itself: the turn would go on for a trajectory that has ended.
            ray.cancel(turn)
            raise
        behind = max(result.versions, default=self._launch.version) - self._launch.version
        if behind > self._max_staleness and self.episode is not None:
            self.episode.drop(f"stale: {behind} weights versions behind, rollout.max_staleness={self._max_staleness}")
        return result


class ProrsaAgentLoop(AgentLoopBase):  # type: ignore[misc]
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """`row` is a row of the data (see `launch.write_questions`) with verl's `uid`, `session_id` and `global_steps`.

        Raises `TrajectoryDropped`.
        """
        shared = await _shared(self)
        launch = plan_launch(row, await shared.router.version.remote(), shared.config.seed, shared.restarts)
        ports = RouterPorts(shared.router, launch, shared.config.rollout.max_staleness)
        ports.episode = Episode(launch, shared.environment, ports, shared.keep)
        return to_output(await ports.episode.run())


def plan_launch(row: dict[str, Any], version: int, seed: int, restarts: int = 0) -> Launch:
    """A held-out question has the same seeds at every evaluation, so that two of them differ by the weights alone."""
    info, uid, member = row["extra_info"], row["uid"], row["session_id"]
    question = Question(info["id"], tuple(row["raw_prompt"]), row["reward_model"]["ground_truth"])
    step = 0 if info["split"] == "test" else int(row["global_steps"])
    return Launch(
        member_name(uid, member, restarts), uid, question, version, derive_seed(seed, question.id, step, member)
    )


def to_output(record: TrajectoryRecord) -> AgentLoopOutput:
    """Raises `TrajectoryDropped`."""
    if record.reward is None:
        raise TrajectoryDropped(f"trajectory {record.trajectory}: {record.dropped}")
    versions = [version for version, mask in zip(record.versions, record.response_mask, strict=True) if mask]
    return AgentLoopOutput(
        prompt_ids=list(record.prompt_ids),
        response_ids=list(record.response_ids),
        response_mask=list(record.response_mask),
        response_logprobs=list(record.logprobs),
        reward_score=record.reward,
        num_turns=record.turns,
        metrics=AgentLoopMetrics(),
        extra_fields={"min_global_steps": min(versions), "max_global_steps": max(versions)},
    )


_sharing = asyncio.Lock()
_made: list[Shared] = []


async def _shared(loop: ProrsaAgentLoop) -> Shared:
    """Made by the first trajectory of this process and never closed, for verl ends its workers without a word: sandboxes
    notice that their parent has gone, and their files lie in the work directory."""
    async with _sharing:
        if not _made:
            settings = Settings.of(loop.rollout_config.custom[NAME])
            config = settings.config()
            # The way of any agent loop to its server; with another router class this would not be our actor.
            _, router = await loop.server_manager._acquire_server(NAME)
            sandboxes = await build_sandboxes(config).__aenter__()
            directory = Path(settings.run_dir)
            journal = Journal(directory, config.recording.memory_mb << 20)
            journal.file(TRAJECTORIES, shared=True)
            restarts = len(read_starts(directory)) - 1
            _made.append(Shared(settings, config, build_environment(config, sandboxes), router, journal, restarts))
            mark(settings, "agent")
        return _made[0]
