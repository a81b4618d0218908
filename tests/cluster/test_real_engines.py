"""The control plane over real engine processes: whatever happens to these, greedy tokens are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from real_cluster import BUDGET, ROLES, cluster, in_service, left, trajectory

from prorsa.allocation import Allocation
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import InstanceState
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import Role

TRAJECTORIES = 16


async def generated(control: ControlPlane, share: float) -> None:
    """Wait until this share of all output has been generated; output is the only signal of progress there is."""
    async with asyncio.timeout(60.0):
        while control.status().output_tokens < share * TRAJECTORIES * BUDGET:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


Disturbance = Callable[[ControlPlane, EmbeddedLauncher], Awaitable[None]]


async def undisturbed(control: ControlPlane, launcher: EmbeddedLauncher) -> None:
    await generated(control, 1.0)
    assert control.status().resends == 0


async def flips(control: ControlPlane, launcher: EmbeddedLauncher) -> None:
    targets = Allocation(3, 1), Allocation(1, 3), Allocation(1, 1, 2), Allocation(0, 0, 4), Allocation(2, 2)
    control.router.even_out(True)
    for share, target in zip((0.1, 0.25, 0.4, 0.55, 0.7), targets, strict=True):
        await generated(control, share)
        await control.switcher.apply(target)
        assert control.fleet.in_service == target
    assert [flip.failure for flip in control.flips] == [None] * (1 + 2 + 2 + 2 + 4)
    assert {flip.cancelled for flip in control.flips if flip.after is Role.MIXED} == {0}


async def deaths(control: ControlPlane, launcher: EmbeddedLauncher) -> None:
    for share, role in ((0.1, Role.DECODE), (0.4, Role.PREFILL)):
        await generated(control, share)
        victim = max(control.fleet.pool(role), key=lambda instance: instance.load)
        os.kill(launcher.pid(victim.name), signal.SIGKILL)
        async with asyncio.timeout(60.0):
            while victim.state is InstanceState.ROUTED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await in_service(control)


async def freezes(control: ControlPlane, launcher: EmbeddedLauncher) -> None:
    """Processes that stand still, and run on for a moment when their instance counts as dead."""
    for share, role in ((0.1, Role.DECODE), (0.4, Role.PREFILL)):
        await generated(control, share)
        victim = max(control.fleet.pool(role), key=lambda instance: instance.load)
        pid = launcher.pid(victim.name)
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(60.0):
            while victim.state is InstanceState.ROUTED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    await in_service(control)


async def weight_updates(control: ControlPlane, launcher: EmbeddedLauncher) -> None:
    path = (await control.fleet["e0"].engine.info()).model_path
    for share, version in ((0.2, 1), (0.5, 2)):
        await generated(control, share)
        await control.update_weights(path, version)
        assert control.version == version


@pytest.mark.engine
def test_nothing_that_happens_to_engines_changes_a_token(checkpoint: Path, tmp_path: Path) -> None:
    async def tokens(disturb: Disturbance) -> list[tuple[int, ...]]:
        async with cluster(checkpoint, tmp_path) as (control, launcher):
            turns = [asyncio.create_task(trajectory(control, number)) for number in range(TRAJECTORIES)]
            await disturb(control, launcher)
            results = await asyncio.gather(*turns)
            for result in results:
                assert len(result.token_ids) == len(result.logprobs) == len(result.versions) == BUDGET
            if disturb is not undisturbed:
                assert control.status().resends > 0
            assert await left(control) == [(0, 0, 0)] * len(ROLES)
            return [result.token_ids for result in results]

    async def main() -> None:
        expected = await tokens(undisturbed)
        for disturb in (flips, deaths, freezes, weight_updates):
            assert await tokens(disturb) == expected, disturb.__name__

    asyncio.run(main())
