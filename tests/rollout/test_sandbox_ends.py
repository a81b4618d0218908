"""No sandbox outlives its trajectory (promise 11), whether that is rewarded or dropped, while the pool goes on."""

from __future__ import annotations

import asyncio

import pytest
from rollouts import QUESTION, ScriptedControl, call, environment, scripted
from test_sandboxes import runners, until

from prorsa.rollout.episode import Episode, Launch
from prorsa.rollout.sandboxes.pool import SandboxPool


@pytest.mark.engine
@pytest.mark.parametrize("dropped", [False, True])
def test_a_sandbox_is_gone_when_its_trajectory_has_ended(dropped: bool) -> None:
    async def main() -> None:
        tool = "import time; time.sleep(60)" if dropped else "37*48"
        control = ScriptedControl(scripted(call(tool), "The answer is 1776."))
        async with SandboxPool(prewarmed=0, timeout=60.0) as pool:
            episode = Episode(Launch("t0", "g0", QUESTION, version=0, seed=0), environment(pool), control)
            playing = asyncio.create_task(episode.run())
            if dropped:
                await until(lambda: len(runners()) == 1)
                episode.drop("stale")
            record = await playing
            assert record.dropped == ("stale" if dropped else None)
            await until(lambda: runners() == [])

    asyncio.run(main())
