"""What a tool is to an episode: arguments from the model in, text for the model out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from prorsa.rollout.sandboxes.base import Sandbox


class Tool(Protocol):
    @property
    def name(self) -> str: ...

    async def use(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        """Whatever is wrong with the arguments or goes wrong in the sandbox is told in the text, never raised."""
        ...
