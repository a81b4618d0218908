"""What the gateway answers when it cannot serve: one exception with an HTTP status, in the shape of OpenAI's errors."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Of the others, those below 500 are wrong requests and the rest are the server's."""


class ApiError(Exception):
    """The message says what was wrong and what to do; `param` names the field of the request, `code` is for programs."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def event(self) -> bytes:
        """For a stream that has begun; in ASCII, whatever the message has."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"

    def response(self) -> web.Response:
        headers = {"Retry-After": "1"} if self.status in (429, 503) else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return web.json_response(self.body(), status=self.status, headers=headers)


def context_full(most: int, problem: str) -> ApiError:
    """The words are those by which clients know that the context is full: some read the code, others the message alone."""
    message = f"This model's maximum context length is {most} tokens. However, {problem}. Please reduce its length."
    return ApiError(400, message, "messages", "context_length_exceeded")


def unknown_model(asked: str, served: str) -> ApiError:
    return ApiError(404, f"model={asked!r}: this gateway serves {served!r}", "model", "model_not_found")
