"""Proof that verl really uses each of our extension points.

verl reports a failing plugin at DEBUG level only, and an extension point that its configuration does not name is simply the
stock one. So each of ours leaves a mark when verl constructs it, and a run without all its marks is stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prorsa.integrations.verl.settings import Settings


class NotLoaded(Exception):
    """verl runs without one of our extension points; the message names each one and the remedy."""


REMEDIES = {
    "plugin": "entry point prorsa of the group verl.plugins: install prorsa in verl's environment and leave "
    "VERL_USE_EXTERNAL_PLUGINS unset",
    "replica": "rollout replica: set actor_rollout_ref.rollout.name=prorsa",
    "router": "router class: set actor_rollout_ref.rollout.router_config_path",
    "adapter": "weight adapter: set actor_rollout_ref.rollout.name=prorsa and mode=async",
    "checkpoint": "checkpoint engine: set actor_rollout_ref.rollout.checkpoint_engine.backend=prorsa and "
    "custom_backend_module=prorsa.integrations.verl.checkpoint",
    "sampler": "replay buffer: set trainer.v1.sampler.custom_sampler.path=pkg://prorsa.integrations.verl.sampler and name",
    "agent": "agent loop: set actor_rollout_ref.rollout.agent.agent_loop_config_path and default_agent_loop=prorsa",
}
"""Extension point -> what it is and what makes verl load it. `prorsa train` sets all of them."""


def mark(settings: Settings, point: str) -> None:
    """Leave the mark of an extension point that verl has just constructed."""
    with open(_marks(settings), "a") as file:
        file.write(f"{point}\n")


def forget(settings: Settings) -> None:
    """Remove the marks that a job before has left."""
    _marks(settings).unlink(missing_ok=True)


def require(settings: Settings, points: Iterable[str]) -> None:
    """Raise `NotLoaded` unless verl has constructed all of `points`."""
    marks = _marks(settings)
    found = marks.read_text().split() if marks.exists() else []
    refuse([point for point in points if point not in found])


def refuse(missing: Iterable[str]) -> None:
    """Raise `NotLoaded` if there is any of `missing`."""
    problems = [f"verl has not loaded Prorsa's {REMEDIES[point]}" for point in missing]
    if problems:
        raise NotLoaded("\n".join(problems))


def expected(mode: str) -> tuple[str, ...]:
    """The extension points that a run of `train.mode` uses, apart from those that the driver itself checks."""
    common = ("replica", "router", "adapter", "sampler", "agent")
    return common if mode == "sync" else (*common, "checkpoint")


def _marks(settings: Settings) -> Path:
    return Path(settings.run_dir) / "loaded.txt"
