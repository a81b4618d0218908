"""A prefill instance of two GPUs gives place to two decode instances of one, and they to it, while sessions go on.

On a CPU the GPUs are only counted, and the engines of both roles alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sglang_bench import (
    LANE,
    LONG,
    MODEL,
    PYTHON,
    START_SECONDS,
    TEST_SECONDS,
    D,
    Keep,
    P,
    flags,
    processes_of,
    session,
    undisturbed,
)

from prorsa.allocation import Allocation, PrefillSpeed
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.switcher import Relaunches, SwitchLimits
from prorsa.engines.protocol import EngineError
from prorsa.engines.sglang_server.launcher import SGLangLauncher
from prorsa.forecast import LifecycleForecaster

pytestmark = LANE

COUNT = 8


@asynccontextmanager
async def cluster(directory: Path) -> AsyncIterator[tuple[SGLangLauncher, ControlPlane]]:
    """One prefill and three decode instances on five GPUs."""
    of = flags(gpus_per_prefill=2, gpus_per_decode=1)
    launcher = SGLangLauncher(str(PYTHON), of, start_seconds=START_SECONDS, log_dir=directory, gpus=5)
    try:
        async with asyncio.timeout(START_SECONDS + TEST_SECONDS):
            roles = {"a": P, "b": D, "c": D, "d": D}
            control = ControlPlane(
                await asyncio.gather(*(launcher.start(*instance) for instance in roles.items())),
                forecaster=LifecycleForecaster(None, 1000.0),
                policy=Keep(),
                speed=PrefillSpeed(1000.0),
                horizon=60.0,
                restarter=launcher,
                relaunches=Relaunches(launcher, 1.0),
                switch_limits=SwitchLimits(canary_timeout=60.0),
            )
            await control.start()
            try:
                yield launcher, control
            finally:
                await control.stop()
    finally:
        await launcher.close()


@LONG
def test_instances_give_their_gpus_to_each_other_and_no_session_notices(tmp_path: Path) -> None:
    async def main() -> None:
        expected = await undisturbed(MODEL, tmp_path / "reference", COUNT)
        async with cluster(tmp_path / "engines") as (launcher, control):
            with pytest.raises(EngineError, match="x: as decode it takes 1 GPUs, and 0 of 5 are free"):
                await launcher.start("x", D)
            prefill = control.fleet["a"]
            assert prefill.engine.roles == {P}
            sessions = asyncio.gather(*(session(control, number) for number in range(COUNT)))
            for target in (Allocation(2, 1), Allocation(1, 3)):
                await asyncio.sleep(0.5)
                (flip,) = await control.switcher.apply(target)
                assert (flip.relaunched, flip.failure) == (True, None)
                assert control.switcher.relaunch_s == pytest.approx(flip.drain_s + flip.flip_s)
                assert control.fleet.in_service == target
            assert await sessions == expected
            assert control.status().resends > 0
            assert sorted(i.role for i in control.fleet) == [D, D, D, P]
            groups = [launcher.pid(instance.name) for instance in control.fleet]
            assert all(processes_of(group) for group in groups)

    asyncio.run(main())
