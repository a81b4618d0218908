"""Bodies of requests: read within bounds of size, time and number, and JSON objects or refused.

Invariant: bodies that are being read take `MOST_BYTES` of memory at most, however many clients send some.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from json.scanner import py_make_scanner  # type: ignore[attr-defined]  # not in typeshed
from typing import Any

from aiohttp import web

from prorsa.gateway.errors import ApiError
from prorsa.gateway.work import LARGE, LongWork

READ_SECONDS = 30.0
"""How long a client may take to send its request."""
MOST_BYTES = 1 << 29
"""Of all bodies that are being read."""
MOST_VALUES = 1 << 18
"""Numbers, texts, lists and objects of a body, beside the token ids of a prompt."""


class BodyReader:
    def __init__(self, work: LongWork, max_body_mb: int, most_ids: int) -> None:
        """`work` reads large bodies; `most_ids` is the length of the longest prompt."""
        self._work = work
        self._max_body_mb = max_body_mb
        self._most_values = MOST_VALUES + most_ids
        self._held = 0
        """Bytes that are in memory now."""

    async def json(self, request: web.Request) -> tuple[Any, int]:
        """(the body, its size in bytes). Raises `ApiError` (400, 408, 413, 503)."""
        data = bytearray()
        try:
            async with asyncio.timeout(READ_SECONDS):
                await self._fill(data, request)
            if len(data) < LARGE:
                return json.loads(data), len(data)
            return await self._work.run(len(data), _parsed, data, self._most_values), len(data)
        except TimeoutError:
            raise ApiError(408, f"the request's body did not arrive within {READ_SECONDS:g} s") from None
        except web.RequestPayloadError as error:
            raise ApiError(400, f"the body cannot be read ({' '.join(str(error).split())})") from error
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON ({error})") from error
        finally:
            self._held -= len(data)

    async def object(self, request: web.Request) -> tuple[dict[str, Any], int]:
        body, size = await self.json(request)
        if not isinstance(body, dict):
            raise ApiError(400, f"the body is a JSON {type(body).__name__}; an object is needed")
        return body, size

    async def _fill(self, data: bytearray, request: web.Request) -> None:
        """Not `request.read()`, which keeps the bytes for as long as the request lasts."""
        if (request.content_length or 0) > self._max_body_mb << 20:
            raise self._too_large()
        async for part in request.content.iter_any():
            data += part
            self._held += len(part)
            if len(data) > self._max_body_mb << 20:
                raise self._too_large()
            if self._held > MOST_BYTES:
                raise ApiError(503, "too many large requests are being read; try again later")

    def _too_large(self) -> ApiError:
        remedy = f"the request is larger than gateway.max_body_mb={self._max_body_mb} allows; send less"
        return ApiError(413, remedy, code="too_large")


class _Counting(json.JSONDecoder):
    """Reads as `json.loads` does, at its speed where the text is long and not where its values are many; those are counted.

    A thread that runs this hands Python's lock on between two values.
    """

    def __init__(self, most: int) -> None:
        self._left = self._most = most
        super().__init__(parse_int=self._counted(int), parse_float=self._counted(float))
        for kind in ("parse_string", "parse_array", "parse_object"):
            setattr(self, kind, self._counted(getattr(self, kind)))
        self.scan_once = py_make_scanner(self)

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise ApiError(413, f"the body has more than {self._most} values; send less", code="too_large")
            return read(*args)

        return counting


def _parsed(data: bytearray, most_values: int) -> Any:
    return _Counting(most_values).decode(data.decode(json.detect_encoding(data), "surrogatepass"))
