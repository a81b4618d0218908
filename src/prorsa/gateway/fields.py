"""Reading a JSON body field by field: each wrong one is a 400 that names it, its value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from prorsa.gateway.errors import ApiError

T = TypeVar("T")
MOST, MOST_ID = 2**63, 2**31
"""Above any number, and any token id, that makes sense."""
SHOWN = 80
"""Characters of a wrong value that an error repeats."""


def wrong(param: str, value: Any, remedy: str) -> ApiError:
    shown = repr(value)
    return ApiError(400, f"{param}={shown[:SHOWN]}{'...' if len(shown) > SHOWN else ''}: {remedy}", param)


def typed(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """The value of a field; the default where it is absent or null. A whole number is a float too, a bool no number, and no
    float is NaN or infinite."""
    value = body.get(name)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < MOST:
        return kind(value)  # type: ignore[call-arg]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise wrong(name, value, f"must be a {kind.__name__}")
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(name, value, "must be a finite number")
    return value


def number(
    body: Mapping[str, Any], name: str, default: float, low: float, high: float = float("inf"), above: bool = False
) -> float:
    """A float in [low, high], or in (low, high] with `above`."""
    value = typed(body, name, float, default)
    if not (low < value if above else low <= value) or not value <= high:
        raise wrong(name, value, f"must be {'above' if above else 'at least'} {low:g}, and at most {high:g}")
    return value


def whole(body: Mapping[str, Any], name: str, default: int | None, low: int) -> int | None:
    value: int | None = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < MOST:
        raise wrong(name, value, f"must be a whole number of at least {low}, and below 2**63")
    return value


def strings(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A string or a list of strings, none of them empty."""
    value = body.get(name)
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
        raise wrong(name, value, "must be a string or a list of strings, none empty")
    return tuple(listed)


def token_ids(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = body.get(name)
    if value is None:
        return ()
    if not is_token_ids(value):
        raise wrong(name, value, "must be a list of token ids")
    return tuple(value)


def is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < MOST_ID for one in value)
