"""Foreign files as records: JSON lines, one JSON document, or CSV with a header; compressed or not.

A record knows where it stands, for errors. Blank lines, a byte order mark and either end of line are read over.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prorsa.config import ConfigError
from prorsa.simulation.workloads.recordings.fields import shown

REMEDY = "give JSON lines, a JSON document or CSV"
MOST_LINE = 1 << 28
"""Characters of a line, or of a file that is one JSON document."""
_OPENERS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\x00": lzma.open}
_UNREADABLE = {
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -d"),
    b"PK\x03\x04": ("zip", "unzip"),
    b"PAR1": ("parquet", "pandas"),
}


class Record(NamedTuple):
    where: str
    values: dict[str, Any]


def read_records(path: Path) -> Iterator[Record]:
    """Raises `ConfigError`."""
    with _opened(path) as file:
        first = _first_line(path, file)
        file.seek(0)
        if first[:1] not in ("{", "["):
            yield from _rows(path, file)
        elif _is_json(first):
            yield from _lines(path, file)
        else:
            yield from _document(path, file)


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    try:
        with open(path, "rb") as file:
            start = file.read(8)
        for mark, (name, tool) in _UNREADABLE.items():
            if start.startswith(mark):
                raise ConfigError(f"{path}: a {name} file; unpack it first ({tool})")
        unpack = next((opener for mark, opener in _OPENERS.items() if start.startswith(mark)), open)
        with unpack(path, "rb") as packed, io.TextIOWrapper(packed, "utf-8-sig", newline="") as text:  # type: ignore[operator]
            yield text
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, lzma.LZMAError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: cannot be read ({reason}); give a file of UTF-8 text, compressed or not") from error


def _first_line(path: Path, file: io.TextIOWrapper) -> str:
    """The first that is not blank."""
    while line := file.readline(MOST_LINE):
        if line.strip():
            return line.strip()
    raise ConfigError(f"{path}: is empty; give a recording")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _lines(path: Path, file: io.TextIOWrapper) -> Iterator[Record]:
    number = 0
    while line := file.readline(MOST_LINE):
        number += 1
        if line.strip():
            yield from _objects(f"{path}, line {number}", _parsed(f"{path}, line {number}", line))


def _document(path: Path, file: io.TextIOWrapper) -> Iterator[Record]:
    text = file.read(MOST_LINE)
    if file.read(1):
        raise ConfigError(f"{path}: one JSON document of more than {MOST_LINE} characters; write an object a line")
    # Broken JSON lines end up here too: the line that is broken says more than what follows the first.
    yield from _objects(str(path), _parsed(str(path), text))


def _parsed(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f", line {error.lineno}" if "line" not in where.rsplit(",", 1)[-1] else ""
        raise ConfigError(f"{where}{line}: no JSON ({error.msg} at column {error.colno}); mend the file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: no JSON ({error}); mend the file") from error


def _objects(where: str, value: Any) -> Iterator[Record]:
    if isinstance(value, dict):
        yield Record(where, value)
    elif isinstance(value, list):
        for index, item in enumerate(value, start=1):
            if not isinstance(item, dict):
                raise ConfigError(f"{where}, entry {index}: {shown(item)} is no JSON object; mend the file")
            yield Record(f"{where}, entry {index}", item)
    else:
        raise ConfigError(f"{where}: {shown(value)} is no JSON object; mend the file")


def _rows(path: Path, file: io.TextIOWrapper) -> Iterator[Record]:
    rows = csv.reader(file, strict=True)
    try:
        header = [cell.strip() for cell in next((row for row in rows if any(row)), [])]
        if len(header) < 2 or len(set(header)) < len(header):
            raise ConfigError(
                f"{path}, line {rows.line_num}: {shown(','.join(header))} is neither JSON nor a CSV header; {REMEDY}"
            )
        for row in rows:
            if not any(cell.strip() for cell in row):
                continue
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(header):
                raise ConfigError(f"{where}: {len(row)} values under a header of {len(header)}; mend the file")
            yield Record(where, dict(zip(header, row, strict=True)))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {rows.line_num}: no CSV ({error}); mend the file") from error
