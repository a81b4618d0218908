"""`--resume RUN`: the configuration that a run was begun with, and what of it may change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prorsa.config import Config, ConfigError, load_config
from prorsa.report.rundir import CONFIG

FREE = ("rollout.steps", "cluster.", "policy.", "sglang.", "sandbox.prewarmed", "recording.")
"""Keys, or beginnings of keys, that say how trajectories are made and not what they are."""
FREE_IN_TRAINING = (*FREE, "train.save_every", "train.test_every", "train.overrides")


def resumed_config(run_dir: Path, overrides: list[str], free: tuple[str, ...]) -> Config:
    """The configuration of a run that goes on. Raises `ConfigError`, which names every key that may not differ."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise ConfigError(f"--resume {run_dir}: it has no {CONFIG}; give the directory of a run, or start a new one")
    begun, now = load_config(path), load_config(path, overrides)
    before, after = dict(_leaves(begun.model_dump())), dict(_leaves(now.model_dump()))
    problems = [
        f"{key}={after[key]!r}: the run was begun with {before[key]!r}; leave it out, or start a new run"
        for key in before
        if before[key] != after[key] and not key.startswith(free)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return now


def _leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
