from __future__ import annotations

import asyncio

import pytest
from cluster_bench import Bench, in_virtual_time, until

from prorsa.cluster.instances import InstanceState
from prorsa.engines.protocol import Role


def canaries(bench: Bench, name: str) -> list[str]:
    return [request.rid for request in bench.engine(name).served if request.rid.startswith("canary")]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@in_virtual_time
async def test_a_flipped_instance_serves_a_canary_before_it_is_routed(role: Role) -> None:
    async with Bench("PPDD", canary_timeout=5.0) as bench:
        name = "e1" if role is Role.DECODE else "e2"
        flipping = asyncio.create_task(bench.control.switcher.flip(name, role))
        await until(lambda: canaries(bench, name) != [])
        assert bench.control.fleet[name].state is InstanceState.FLIPPING
        flip = await flipping
        assert flip.failure is None
        # 0.5 s for the flip, 0.1 s of prefill, two tokens of 0.01 s each.
        assert flip.flip_s == pytest.approx(0.62, abs=0.02)
        peer = "e0" if role is Role.DECODE else "e3"
        assert canaries(bench, name) == canaries(bench, peer)
        assert len(canaries(bench, name)) == 1


@in_virtual_time
async def test_an_instance_that_fails_its_canaries_is_restarted() -> None:
    async with Bench("PDDD", canary_timeout=2.0) as bench:
        bench.engine("e1").hung = True
        flip = await bench.control.switcher.flip("e1", Role.PREFILL)
        assert flip.failure == (
            "instance e1: as prefill it failed a canary with e2 (no answer within 2.0 s) and e3 (no answer within 2.0 s)"
        )
        await until(lambda: bench.roles() == "PDDD")
        assert bench.restarter.restarted == [("e1", Role.DECODE)]


@in_virtual_time
async def test_a_peer_at_fault_does_not_condemn_the_flipped_instance() -> None:
    async with Bench("PDDD", canary_timeout=2.0) as bench:
        bench.engine("e2").hung = True
        flip = await bench.control.switcher.flip("e1", Role.PREFILL)
        assert flip.failure is None
        assert len(canaries(bench, "e3")) == 1
        bench.engine("e2").hung = False
