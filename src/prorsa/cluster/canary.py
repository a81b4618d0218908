"""Two tokens through an instance that has just flipped, before anybody's request is sent there.

An engine can report its new role and still be unable to hand over KV: its peers may remember where it used to be. The peer of
a canary is an instance in service of the other role, so a cluster of three shows what two would hide. A mixed instance needs
no peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prorsa.cluster.instances import Fleet, Instance
from prorsa.engines.protocol import Bootstrap, Engine, EngineError, GenerateRequest, Role, SamplingParams, Shortage

PROMPT = (1, 1, 1, 1)
SAMPLING = SamplingParams(max_new_tokens=2, temperature=0.0)
"""The first token comes from the prefill instance, the second one shows that decode has its KV."""
PEERS = 2
SHORTAGE_PAUSE = 0.1
"""Seconds until a leg that our own shortage prevented is tried again."""


class Canary:
    """`rooms` numbers the attempts of the cluster. `seconds` bounds one canary."""

    def __init__(self, fleet: Fleet, rooms: Iterator[int], seconds: float) -> None:
        self._fleet = fleet
        self._rooms = rooms
        self._seconds = seconds

    async def send(self, instance: Instance, role: Role) -> None:
        """Raises `EngineError` where the instance does not do its part as `role`. Nothing is sent where it needs a peer and
        none serves.

        A peer may be at fault itself, so a second one is tried where there is one.
        """
        failures = []
        for peer in self._peers(instance, role):
            prefill, decode = (instance, peer) if role is Role.PREFILL else (peer, instance)
            try:
                async with asyncio.timeout(self._seconds):
                    await self._run(prefill.engine, decode.engine)
                return
            except (EngineError, TimeoutError) as error:
                failures.append(f"{peer.name} ({str(error) or f'no answer within {self._seconds} s'})")
        if failures:
            raise EngineError(f"instance {instance.name}: as {role} it failed a canary with {' and '.join(failures)}")

    def _peers(self, instance: Instance, role: Role) -> list[Instance]:
        if role is Role.MIXED:
            return [instance]
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        return sorted(self._fleet.pool(other), key=lambda peer: peer.load)[:PEERS]

    async def _run(self, prefill: Engine, decode: Engine) -> None:
        room = next(self._rooms)
        engines, bootstrap = [decode], None
        if prefill is not decode:
            engines, bootstrap = [prefill, decode], Bootstrap(prefill.bootstrap_host, prefill.bootstrap_port, room)
        request = GenerateRequest(f"canary.{room}.0", PROMPT, SAMPLING, bootstrap)
        legs = [asyncio.create_task(_tokens(engine, request)) for engine in engines]
        try:
            *_, generated = await asyncio.gather(*legs)
        finally:
            for leg in legs:
                leg.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
        if generated != SAMPLING.max_new_tokens:
            raise EngineError(f"engine {decode.name}: {generated} tokens came of {SAMPLING.max_new_tokens}")


async def _tokens(engine: Engine, request: GenerateRequest) -> int:
    while True:
        count = 0
        try:
            async for chunk in engine.generate(request):
                count += len(chunk.token_ids)
            return count
        except Shortage:
            await asyncio.sleep(SHORTAGE_PAUSE)
