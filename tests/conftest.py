"""Fixtures that several rooms share. Its being here also puts this directory on the import path of every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3 checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))
