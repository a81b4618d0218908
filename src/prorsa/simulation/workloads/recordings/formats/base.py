"""What a format is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prorsa.simulation.workloads.recordings.files import Record
from prorsa.simulation.workloads.recordings.model import Trajectory

CHARACTERS = 4.0
"""Characters that are taken for a token where a recording has text and no counts."""

KINDS = (".gz", ".bz2", ".xz", ".json", ".jsonl", ".traj", ".csv")


@dataclass(frozen=True, slots=True)
class Source:
    """A file that is being read."""

    path: Path
    characters: float = CHARACTERS

    @property
    def stem(self) -> str:
        """The file's name without what says its kind: what a recording is called that does not name itself."""
        name = self.path
        while name.suffix in KINDS:
            name = name.with_suffix("")
        return name.name


@dataclass(frozen=True, slots=True)
class Format:
    name: str
    words: str
    """What it is, for a list of formats."""
    recognises: Callable[[dict[str, Any]], bool]
    """Whether a record is of this format."""
    read: Callable[[Iterator[Record], Source], Iterator[Trajectory]]
    """Raises `Wrong`, best through `located`."""
