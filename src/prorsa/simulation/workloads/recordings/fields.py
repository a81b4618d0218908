"""Values of foreign records, checked: a wrong one is an error that names the field and the value.

Numbers may be whole floats (`512.0`, as pandas writes them), and in CSV files text. `true` is no number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]

MOST_TOKENS = 100_000_000
"""Of a prompt or an output: no model has a context as long."""
MOST_S = 86_400.0
"""Of a single duration: a day."""
MOST_TIME = 1e11
"""Of a time stamp, seconds."""
MOST_NAME = 1000
"""Characters."""
SHOWN = 60
"""Characters of a value in an error."""

MISSING = object()
_TIME = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s*(Z|UTC|[+-]\d\d:?\d\d(?::?\d\d(?:\.\d+)?)?)?", re.ASCII
)


class Wrong(Exception):
    """A value that cannot be; the message names the field, the value and the remedy."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Puts the place before the message of a `Wrong` that is raised inside."""
    try:
        yield
    except Wrong as error:
        raise Wrong(f"{where}: {error}") from None


def shown(value: Any) -> str:
    """A value in an error: plain ASCII, on one line, not too long."""
    text = ascii(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def at(record: Mapping[str, Any], key: str) -> Any:
    """The value at `key`, of which dots lead into objects; MISSING where there is none, or null."""
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return MISSING if value is None or value == "" else value


def tokens(record: Mapping[str, Any], key: str, least: int = 0, named: str = "") -> int:
    """`named` is what the field is called in errors, where not `key`."""
    value, name = at(record, key), named or key
    if value is MISSING:
        raise Wrong(f"{name} is missing; give the number of tokens")
    number = _number(value)
    if number is None or number != int(number) or not least <= number <= MOST_TOKENS:
        raise Wrong(
            f"{name}={shown(value)}: not a number of tokens; write a whole number from {least} to {MOST_TOKENS}"
        )
    return int(number)


def maybe_tokens(record: Mapping[str, Any], key: str) -> int | None:
    return None if at(record, key) is MISSING else tokens(record, key)


def maybe_seconds(record: Mapping[str, Any], key: str, unit: float = 1.0) -> float | None:
    """A duration, of `unit` seconds; None where there is none."""
    value = at(record, key)
    if value is MISSING:
        return None
    number = _number(value)
    if number is None or not 0 <= number * unit <= MOST_S:
        raise Wrong(f"{key}={shown(value)}: not a duration; write a number from 0 to {MOST_S / unit:.0f}, or null")
    return number * unit


def maybe_number(record: Mapping[str, Any], key: str) -> float | None:
    """A finite number, or a boolean as 0 or 1."""
    value = at(record, key)
    if value is MISSING:
        return None
    number = float(value) if isinstance(value, bool) else _number(value)
    if number is None or abs(number) > MOST_TIME:
        raise Wrong(f"{key}={shown(value)}: not a number; write one, or null")
    return number


def maybe_time(record: Mapping[str, Any], key: str, unit: float = 1.0) -> float | None:
    """A moment on some clock, seconds: a number of `unit` seconds, or a date and time of ISO 8601, in UTC by default."""
    value = at(record, key)
    if value is MISSING:
        return None
    number = _number(value)
    seconds = number * unit if number is not None else _date(value) if isinstance(value, str) else None
    if seconds is None or abs(seconds) > MOST_TIME:
        raise Wrong(f"{key}={shown(value)}: not a time; write a number, or a date as 2026-01-31T23:59:59.5Z")
    return seconds


def time(record: Mapping[str, Any], key: str, unit: float = 1.0) -> float:
    found = maybe_time(record, key, unit)
    if found is None:
        raise Wrong(f"{key} is missing; give the time at which the request came")
    return found


def maybe_name(record: Mapping[str, Any], key: str) -> str | None:
    """Text, or a number as text: 7, 7.0 and "7" are the same name."""
    value = at(record, key)
    if value is MISSING:
        return None
    number = None if isinstance(value, str) else _number(value)
    if number is not None and number == int(number):
        value = str(int(number))
    if not isinstance(value, str):
        raise Wrong(f"{key}={shown(value)}: not a name; write text or a whole number")
    if len(value) > MOST_NAME:
        raise Wrong(f"{key}={shown(value)}: a name of {len(value)} characters; shorten it to {MOST_NAME}")
    return value


def listed(record: Mapping[str, Any], key: str) -> list[Json]:
    """A list of objects; empty where there is none."""
    value = at(record, key)
    if value is MISSING:
        return []
    if not isinstance(value, list):
        raise Wrong(f"{key}={shown(value)}: not a list; write one of objects")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise Wrong(f"{key}[{index}]={shown(item)}: not an object; write one")
    return value


def text(value: Any) -> str:
    """Of a message's content: text, a list of parts, or what a tool was called with."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(text, value))
    if isinstance(value, Mapping):
        return "".join(text(part) for key, part in value.items() if key not in _MARKS)
    return "" if value is None or isinstance(value, bool) else str(value)


_MARKS = {"type", "id", "tool_use_id", "tool_call_id", "signature", "cache_control", "index", "image_url", "source"}
"""Keys of a message's parts that are no text of it."""


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        # Very long integers cannot be floats.
        number = float(value)
    except (ValueError, OverflowError):
        return None
    plain = not isinstance(value, str) or (value.isascii() and "_" not in value)
    return number if math.isfinite(number) and plain else None


def _date(value: str) -> float | None:
    found = _TIME.fullmatch(value.strip())
    if found is None:
        return None
    day, clock, fraction, zone = found.groups()
    zone = {None: "+00:00", "Z": "+00:00", "UTC": "+00:00"}.get(zone, zone)
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}{zone}")
        whole = (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds()
    except (ValueError, OverflowError):
        return None
    return whole + (float(f"0.{fraction}") if fraction else 0.0)
