"""What tests on real engine processes share: a control plane over four of them, and trajectories of one greedy turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from cluster_bench import Keep

from prorsa.allocation import PrefillSpeed
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.manager import HealthLimits
from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import Role, SamplingParams
from prorsa.forecast import LifecycleForecaster
from prorsa.lifecycle.events import Done, RewardStarted, Sampled

BUDGET = 150
ROLES = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]


@asynccontextmanager
async def cluster(checkpoint: Path, log_dir: Path) -> AsyncIterator[tuple[ControlPlane, EmbeddedLauncher]]:
    launcher = EmbeddedLauncher(
        str(checkpoint),
        kv_tokens=4096,
        block_tokens=16,
        prefill_chunk=256,
        max_running=16,
        max_waiting=64,
        kv_store_tokens=16384,
        log_dir=log_dir,
    )
    try:
        engines = await asyncio.gather(*(launcher.start(f"e{i}", role) for i, role in enumerate(ROLES)))
        control = ControlPlane(
            engines,
            forecaster=LifecycleForecaster(None, 1000.0),
            policy=Keep(),
            speed=PrefillSpeed(1000.0),
            horizon=0.5,
            restarter=launcher,
            health_limits=HealthLimits(interval=0.3, timeout=1.0),
        )
        await control.start()
        try:
            yield control, launcher
        finally:
            await control.stop()
    finally:
        await launcher.close()


async def trajectory(control: ControlPlane, number: int, prefix: str = "t") -> TurnResult:
    """The prompt depends on the number alone. It records no end when it is cancelled."""
    now, name = asyncio.get_running_loop().time, f"{prefix}{number}"
    prompt = tuple(int(token) for token in np.random.default_rng(number).integers(1, 300, 20 + 5 * number))
    await control.record(Sampled(now(), name, group="g", task="t"))
    result = await control.generate(TurnRequest(name, 0, prompt, SamplingParams(BUDGET, 0.0)))
    await control.record(RewardStarted(now(), name, len(prompt) + len(result.token_ids)))
    await control.record(Done(now(), name, 1.0, True))
    return result


async def in_service(control: ControlPlane) -> None:
    async with asyncio.timeout(60.0):
        while any(i.state is not InstanceState.ROUTED for i in control.fleet):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def left(control: ControlPlane) -> list[tuple[int, int, int]]:
    """(running, waiting, used tokens) of each engine."""
    loads = [await instance.engine.load() for instance in control.fleet]
    return [(load.running, load.waiting, load.used_tokens) for load in loads]
