"""What clients may send to the embedded server, checked field by field, and SGLang's spelling of roles."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from prorsa.engines.protocol import Bootstrap, Role, SamplingParams

ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "null": Role.MIXED}

_REQUIRED: Any = object()


class BadRequest(Exception):
    """A field of the request is missing or wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked /generate body."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    bootstrap: Bootstrap | None


def role_name(role: Role) -> str:
    return "null" if role is Role.MIXED else role.value


def parse_object(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadRequest(f"body: not valid JSON ({error})") from error
    if not isinstance(body, dict):
        raise BadRequest(f"body: a JSON object is needed, not {type(body).__name__}")
    return body


def field(body: dict[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    """The value of a field. Absent and null mean the default; an integer will do for a float."""
    value = body.get(name)
    if value is None:
        if default is _REQUIRED:
            raise BadRequest(f"{name}: missing")
        return default
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise BadRequest(f"{name}={value!r}: must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def parse_generate(body: dict[str, Any]) -> Asked:
    """Raises `BadRequest`. Fields that the subset does not know are ignored, as SGLang has many."""
    if not field(body, "stream", bool, False):
        raise BadRequest("stream: this server only streams; set it to true")
    return Asked(
        rid=field(body, "rid", str),
        input_ids=_token_ids(body, "input_ids"),
        sampling=_parse_sampling(field(body, "sampling_params", dict)),
        bootstrap=_parse_bootstrap(body),
    )


def parse_role(body: dict[str, Any]) -> Role:
    name = field(body, "new_role", str)
    if name not in ROLES:
        raise BadRequest(f"new_role={name!r}: write one of {', '.join(ROLES)}")
    return ROLES[name]


def parse_version(body: dict[str, Any]) -> int:
    text = field(body, "weight_version", str)
    try:
        return int(text)
    except ValueError:
        raise BadRequest(f"weight_version={text!r}: must be a whole number") from None


def _token_ids(body: dict[str, Any], name: str, default: Any = _REQUIRED) -> list[int]:
    tokens: list[int] = field(body, name, list, default)
    if any(type(token) is not int for token in tokens):
        raise BadRequest(f"{name}: must be a list of token ids")
    return tokens


def _parse_sampling(body: dict[str, Any]) -> SamplingParams:
    stops = _token_ids(body, "stop_token_ids", [])
    sampling = SamplingParams(
        max_new_tokens=field(body, "max_new_tokens", int),
        temperature=field(body, "temperature", float, 1.0),
        top_p=field(body, "top_p", float, 1.0),
        top_k=field(body, "top_k", int, -1),
        stop_token_ids=() if field(body, "ignore_eos", bool, False) else tuple(stops),
        seed=field(body, "sampling_seed", int, None),
    )
    if not 0 <= sampling.temperature < float("inf"):
        raise BadRequest(f"temperature={sampling.temperature}: must be 0 or more, and finite")
    if not 0 < sampling.top_p <= 1:
        raise BadRequest(f"top_p={sampling.top_p}: must be above 0 and at most 1")
    if sampling.top_k < 1 and sampling.top_k != -1:
        raise BadRequest(f"top_k={sampling.top_k}: must be 1 or more, or -1 for no limit")
    return sampling


def _parse_bootstrap(body: dict[str, Any]) -> Bootstrap | None:
    room = field(body, "bootstrap_room", int, None)
    if room is None:
        return None
    if not 0 <= room < 1 << 64:
        raise BadRequest(f"bootstrap_room={room}: must be at least 0 and below 2**64")
    return Bootstrap(field(body, "bootstrap_host", str), field(body, "bootstrap_port", int), room)
