"""A run's events in one file: every event is one line, written out at once, so that a killed run leaves a readable trace.

Format, version 1 (UTF-8 text):

    prorsa-trace 1                          first line: the mark and the version
    ["S",0.5,"t-1","g-1","arithmetic",3,0]  one JSON array for each event: its kind, then its fields in the order in which
    ["R",0.75,0,57]                         `events.py` declares them (time, trajectory, ...)

The kinds are the letters of `KINDS`. Times are exact (the shortest decimal that gives the same float). A name is a string
where it occurs for the first time in the file, which gives it the next code from 0, and that code from then on: in the
second event above, 0 is "t-1". A name that has not occurred for long may be a string again, with a new code from then on.
`Ready.kept` is left out where it is UNKNOWN. A line counts once its newline is there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, get_type_hints

from prorsa.lifecycle import events as e
from prorsa.lifecycle.codes import NameCodes

MARK = "prorsa-trace"
VERSION = 1
HEADER = f"{MARK} {VERSION}\n".encode()
LARGEST = 1 << 53
"""Of a count: a float has every whole number up to it."""

KINDS: dict[str, type[e.Event]] = {
    "S": e.Sampled,
    "B": e.SandboxStarting,
    "R": e.Ready,
    "P": e.PrefillStarted,
    "D": e.DecodeStarted,
    "Q": e.Requeued,
    "T": e.ToolStarted,
    "W": e.RewardStarted,
    "E": e.Done,
    "X": e.Dropped,
}
"""Kind letter -> event. Append, never change a letter."""

_LETTERS = {kind: letter for letter, kind in KINDS.items()}


def _typed_fields(kind: type[e.Event]) -> tuple[tuple[str, type], ...]:
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in fields(kind))


_FIELDS = {kind: _typed_fields(kind) for kind in KINDS.values()}


class TraceError(Exception):
    """A trace that cannot be read (further); the message names the file, the line and the remedy."""

    def __init__(self, path: Path, line: int, problem: str, remedy: str) -> None:
        super().__init__(f"{path}, line {line}: {problem}; {remedy}")
        self.path = path
        self.line = line


class TraceCoder:
    """Turns events into lines. A name has its code once `wrote` was told of the line in which it occurs for the first time,
    so a line that could not be written takes the meaning of no other one with it.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        """`names` are those that the file has already, by their codes."""
        self._codes = NameCodes(names)
        self._new: list[str] = []

    def line(self, event: e.Event) -> bytes:
        """ValueError on a NaN."""
        kind, new = type(event), dict[str, int]()
        record: list[Any] = [_LETTERS[kind]]
        for name, type_ in _FIELDS[kind]:
            value = getattr(event, name)
            record.append(self._coded(value, new) if issubclass(type_, str) else value)
        if isinstance(event, e.Ready) and event.kept == e.UNKNOWN:
            record.pop()
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self._new = list(new)
        return line

    def wrote(self) -> None:
        """The last line is in the file."""
        for name in self._new:
            self._codes.add(name)
        self._new = []

    def _coded(self, name: str, new: dict[str, int]) -> str | int:
        code = new.get(name)
        if code is None:
            code = self._codes.get(name)
        if code is not None:
            return code
        new[name] = self._codes.next + len(new)
        return name


class TraceWriter:
    """Writes a new trace; an existing file is never overwritten (FileExistsError)."""

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "xb")  # noqa: SIM115 - closed by close()
        self._coder = TraceCoder()
        self._file.write(HEADER)
        self._file.flush()

    def write(self, event: e.Event) -> None:
        """Append the event and hand it to the operating system, where it outlives this process. ValueError on a NaN."""
        self._file.write(self._coder.line(event))
        self._file.flush()
        self._coder.wrote()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_trace(path: str | Path, names: list[str] | None = None) -> Iterator[e.Event]:
    """The events in the order in which they were written. `names` is filled with the names by their codes.

    Raises `TraceError` for a foreign file, another version, a damaged line and a cut-off end, in the last two cases after
    everything before the damage was yielded.
    """
    path = Path(path)
    with open(path, "rb") as file:
        _check_header(path, file)
        names = [] if names is None else names
        for number, line in enumerate(file, start=2):
            if not line.endswith(b"\n"):
                raise TraceError(path, number, "the file ends within this line", "the events before it are whole")
            try:
                event = _parse(line, names)
            except (ValueError, LookupError, TypeError) as error:
                problem = f"not a version-{VERSION} event ({error})"
                raise TraceError(path, number, problem, "the events before it are whole") from error
            yield event


def _check_header(path: Path, file: BinaryIO) -> None:
    header = file.readline(256)
    mark, _, version = header.rstrip(b"\n").partition(b" ")
    if mark != MARK.encode():
        remedy = "give the `trace` file of a run, or make one with `prorsa trace`"
        raise TraceError(path, 1, f"not a trace, it does not start with {MARK!r}", remedy)
    if not header.endswith(b"\n"):
        raise TraceError(path, 1, "the file ends within its first line", "it holds no event")
    if version != str(VERSION).encode():
        found = version.decode("utf-8", "replace")
        raise TraceError(path, 1, f"trace version {found!r}, this Prorsa reads {VERSION}", "read it with the other one")


def _parse(line: bytes, names: list[str]) -> e.Event:
    letter, *values = json.loads(line)
    kind = KINDS[letter]
    typed = _FIELDS[kind]
    if kind is e.Ready and len(values) == len(typed) - 1:
        values.append(e.UNKNOWN)
    if len(values) != len(typed):
        raise ValueError(f"{len(values)} fields for {kind.__name__}, which has {len(typed)}")
    return kind(*(_field(value, name, type_, names) for value, (name, type_) in zip(values, typed, strict=True)))


def _field(value: Any, name: str, type_: type, names: list[str]) -> Any:
    if issubclass(type_, str):
        return type_(_decoded(value, names))
    if type_ is float and type(value) is int:
        return float(value)
    if type(value) is not type_:
        raise TypeError(f"{name} is {value!r}, not {type_.__name__}")
    if isinstance(value, int | float) and not abs(value) <= (LARGEST if type_ is int else sys.float_info.max):
        raise ValueError(f"{name} is {value!r}: no such number can be")
    return value


def _decoded(value: Any, names: list[str]) -> str:
    if isinstance(value, str):
        names.append(value)
        return value
    if type(value) is not int or not 0 <= value < len(names):
        raise ValueError(f"name code {value!r} of {len(names)}")
    return names[value]
