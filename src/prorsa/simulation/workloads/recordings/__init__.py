"""Recordings of other projects as traces of ours (docs/recordings.md says what of each format is exact and what is guessed).

A format is a module of `formats`; a file is of the first format that knows one of its first records, or of the one that is
asked for. Whatever is wrong with a value is one error with its place, and no trace is left behind then.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from prorsa.config import ConfigError
from prorsa.lifecycle import Event, TraceWriter
from prorsa.report.legible import legible
from prorsa.simulation.workloads.pseudo_model import MOST_TURNS
from prorsa.simulation.workloads.recordings.events import events_of
from prorsa.simulation.workloads.recordings.fields import Wrong, shown
from prorsa.simulation.workloads.recordings.files import Record, read_records
from prorsa.simulation.workloads.recordings.formats import (
    claudecode,
    minisweagent,
    openhands,
    otel,
    requests,
    sharegpt,
    sweagent,
    turns,
    verifiers,
)
from prorsa.simulation.workloads.recordings.formats.base import CHARACTERS, Format, Source
from prorsa.simulation.workloads.recordings.model import Trajectory

__all__ = ["CHARACTERS", "FORMATS", "Converted", "convert", "convert_files", "read_recordings"]

FORMATS = {
    one.name: one
    for one in (
        turns.FORMAT,
        *requests.FORMATS,
        claudecode.FORMAT,
        otel.FORMAT,
        verifiers.FORMAT,
        minisweagent.FORMAT,
        sweagent.FORMAT,
        openhands.FORMAT,
        sharegpt.FORMAT,
    )
}
"""By name, in the order in which a file is compared with them."""
LOOKED_AT = 50
"""Records by which a file's format is known: some begin with others than those that say it."""


@dataclass(frozen=True, slots=True)
class Converted:
    events: int
    trajectories: int
    empty: int
    """Recordings without a turn of the model, which are left out."""
    formats: tuple[str, ...]


def convert_files(
    paths: Sequence[str | Path], target: str | Path, format_name: str | None = None, characters: float = CHARACTERS
) -> Converted:
    """Write recordings as one new trace. Raises `ConfigError` with one line, and has written nothing then."""
    try:
        _check_target(Path(target))
        found, formats, empty = read_recordings(paths, format_name, characters)
        return Converted(_write(found, Path(target)), len(found), empty, formats)
    except ConfigError as error:
        # Names of files may have ends of lines.
        raise ConfigError(legible(str(error))) from error


def _write(found: Sequence[Trajectory], target: Path) -> int:
    """Beside the target, which is renamed to when it is whole; how many events there are."""
    count = 0
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name[:100]}.", dir=target.parent) as directory:
            written = Path(directory) / "trace"
            with TraceWriter(written) as writer:
                for event in convert(found):
                    writer.write(event)
                    count += 1
            _check_target(target)
            os.rename(written, target)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}; give the path of a file that can be made") from error
    return count


def _check_target(target: Path) -> None:
    if os.path.lexists(target):
        raise ConfigError(
            f"{target}: exists already and is never overwritten; give the path of a new file, or remove it"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"{target}: there is no directory {target.parent}; make it, or give another path")


def convert(trajectories: Sequence[Trajectory]) -> Iterator[Event]:
    """Their events, in the order of their times.

    Several recordings of one name are several attempts at one question: a group, unless they say theirs.
    """
    called = [one.name or Path(one.where).name for one in trajectories]
    named = zip(_names(called), called, trajectories, strict=True)
    return events_of((name, one.group or question, one) for name, question, one in named)


def _names(wanted: Sequence[str]) -> Iterator[str]:
    """Each as it is, but for those that were there before: `NAME#2` and so on, whichever nobody has."""
    taken, counts = set(wanted), Counter[str]()
    for name in wanted:
        counts[name] += 1
        if counts[name] == 1:
            yield name
            continue
        while (other := f"{name}#{counts[name]}") in taken:
            counts[name] += 1
        taken.add(other)
        yield other


def read_recordings(
    paths: Iterable[str | Path], format_name: str | None = None, characters: float = CHARACTERS
) -> tuple[list[Trajectory], tuple[str, ...], int]:
    """The trajectories of all files, their formats, and how many recordings have no turn. Raises `ConfigError`."""
    found: list[Trajectory] = []
    formats: dict[str, None] = {}
    empty = 0
    for path in map(Path, paths):
        chosen, records = _recognised(path, read_records(path), format_name)
        formats[chosen.name] = None
        try:
            for trajectory in chosen.read(records, Source(path, characters)):
                _check(trajectory)
                found += [trajectory] if trajectory.turns else []
                empty += not trajectory.turns
        except Wrong as error:
            raise ConfigError(str(error)) from None
        except RecursionError:
            raise ConfigError(f"{path}: a value is nested too deeply; mend the file") from None
    if not found:
        raise ConfigError(f"{', '.join(map(str, paths))}: no turn of a model is recorded there; {_known()}")
    return found, tuple(formats), empty


def _check(trajectory: Trajectory) -> None:
    if len(trajectory.turns) > MOST_TURNS:
        raise Wrong(
            f"{trajectory.where}: a trajectory of {len(trajectory.turns)} turns; split it, {MOST_TURNS} are the most"
        )


def _recognised(path: Path, records: Iterator[Record], name: str | None) -> tuple[Format, Iterator[Record]]:
    first = list(islice(records, LOOKED_AT))
    whole = chain(first, records)
    if name is not None:
        if name not in FORMATS:
            raise ConfigError(f"--format={name}: there is no such format; {_known()}")
        return FORMATS[name], whole
    for one in FORMATS.values():
        if any(one.recognises(record.values) for record in first):
            return one, whole
    keys = ", ".join(first[0].values) if first else ""
    raise ConfigError(f"{path}: a record with {shown(keys)} is of no format that can be read; {_known()}")


def _known() -> str:
    return f"give one of {', '.join(FORMATS)} (docs/recordings.md says what each is)"
