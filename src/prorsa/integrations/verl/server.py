"""The replica actor: owner of the engine processes, and the place where the trainer's processes find the router actor.

It stays light on purpose (no torch, no verl): engines are reached by URL, so that nothing of a turn passes through here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prorsa.integrations.verl.loaded import mark, refuse
from prorsa.integrations.verl.settings import Settings

ATTACH_SECONDS = 60.0
"""verl makes the router actor right after the replicas; one that has not come by then will not come."""


class ProrsaServer:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._router: Any = None
        self._attached = asyncio.Event()
        mark(settings, "replica")

    async def start(self) -> None:
        pass

    def attach(self, router: Any) -> None:
        """The router actor introduces itself."""
        self._router = router
        self._attached.set()

    async def router(self) -> Any:
        """The handle of the router actor. Raises `NotLoaded` when verl has made another router."""
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                await self._attached.wait()
        except TimeoutError:
            refuse(["router"])
        return self._router
