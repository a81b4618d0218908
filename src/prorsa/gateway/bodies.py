"""Bodies of requests: read within bounds of size and time, and JSON objects or refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from prorsa.gateway.errors import ApiError

READ_SECONDS = 30.0
"""How long a client may take to send its request."""


async def read_json(request: web.Request) -> Any:
    """Raises `ApiError` (400, 408, 413)."""
    try:
        async with asyncio.timeout(READ_SECONDS):
            data = await request.read()
    except TimeoutError:
        raise ApiError(408, f"the request's body did not arrive within {READ_SECONDS:g} s") from None
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError(
            413, "the request is larger than gateway.max_body_mb allows; send less", code="too_large"
        ) from error
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({error})") from error


async def read_body(request: web.Request) -> dict[str, Any]:
    body = await read_json(request)
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}; an object is needed")
    return body
