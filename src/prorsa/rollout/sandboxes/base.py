"""What an episode knows of a sandbox: where the tools of one trajectory run, with its state kept from call to call.

The two protocols are the seam at which a simulated sandbox, or one on another machine, takes the place of the local
process. No sandbox outlives its trajectory: it exists inside `async with sandboxes.sandbox()` and nowhere else.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from prorsa.lifecycle.events import SandboxMode


class SandboxError(Exception):
    """A sandbox could not be started; the message says why. What code does inside one is a result, never this error."""


class Sandbox(Protocol):
    @property
    def mode(self) -> SandboxMode:
        """Known before `start`: whether a prewarmed one was there, or this one starts cold."""
        ...

    @property
    def image(self) -> str: ...
    @property
    def node_class(self) -> str: ...

    async def start(self) -> None:
        """Return when code can run; at once if prewarmed. Raises `SandboxError`."""
        ...

    async def run(self, code: str) -> str:
        """Run Python code and return what it printed, with the traceback if it raised.

        Whatever the code does ends in a text, a timeout included. Raises `SandboxError` only where a sandbox that the
        previous call had killed cannot be started again.
        """
        ...


class Sandboxes(Protocol):
    def sandbox(self) -> AbstractAsyncContextManager[Sandbox]:
        """One sandbox for one trajectory, not started yet; gone when the block is left, whatever ends it."""
        ...
