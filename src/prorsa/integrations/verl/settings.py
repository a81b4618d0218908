"""What every process of a training run has to know: two directories. All else stands in the run's `config.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prorsa.config import Config, load_config

NAME = "prorsa"
"""`rollout.name`, the name of our checkpoint engine and agent loop, and the router actor's name in Ray."""


@dataclass(frozen=True, slots=True)
class Settings:
    run_dir: str
    """Where the run's records go, absolute."""
    work_dir: str
    """Removed at the end of the run: the data in verl's form, Ray's files, sandboxes."""

    @classmethod
    def of(cls, mapping: Mapping[str, Any]) -> Settings:
        return cls(**{key: str(mapping[key]) for key in ("run_dir", "work_dir")})

    def mapping(self) -> dict[str, str]:
        return asdict(self)

    def config(self) -> Config:
        return load_config(self.config_path)

    @property
    def config_path(self) -> Path:
        return Path(self.run_dir) / "config.yaml"

    @property
    def weights_dir(self) -> Path:
        """One checkpoint, that of the newest version."""
        return Path(self.run_dir) / "weights"
