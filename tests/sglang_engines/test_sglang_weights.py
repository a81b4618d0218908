"""New weights given as tensors: no checkpoint on disk, and every engine has them, also one that was dead meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from sglang_bench import (
    LANE,
    LONG,
    MODEL,
    TEST_SECONDS,
    D,
    P,
    controlled,
    flags,
    launching,
    leg,
    prompt,
    request,
    session,
    tokens,
)

from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import Instance, InstanceState
from prorsa.cluster.turns import TurnRequest
from prorsa.engines.protocol import Role, SamplingParams
from prorsa.engines.weights import write_checkpoint
from prorsa.lifecycle.events import Sampled

pytestmark = LANE

ASKED = [(prompt(60 + 10 * number, seed=50 + number), 40) for number in range(4)]


def noisy_tensors() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    weights = load_file(MODEL / "model.safetensors")
    return {name: (array + rng.normal(0.0, 0.05, array.shape)).astype(array.dtype) for name, array in weights.items()}


async def of_fresh_engine(tensors: dict[str, Any], directory: Path) -> list[tuple[int, ...]]:
    """What an engine generates that starts with these weights."""
    model = directory / "model"
    model.mkdir(parents=True)
    write_checkpoint(tensors, MODEL, model)
    async with launching(directory / "log", flags(model)) as launcher:
        engine = await launcher.start("fresh", Role.MIXED)
        return [tokens(await leg(engine, request(ids, budget, None))) for ids, budget in ASKED]


async def of_cluster(control: ControlPlane, name: str) -> list[tuple[int, ...]]:
    outputs = []
    for number, (ids, budget) in enumerate(ASKED):
        trajectory = f"{name}{number}"
        await control.record(Sampled(asyncio.get_running_loop().time(), trajectory, group="g", task="t"))
        result = await control.generate(TurnRequest(trajectory, 0, ids, SamplingParams(budget, temperature=0.0)))
        assert set(result.versions) == {control.version}
        outputs.append(result.token_ids)
    return outputs


@LONG
def test_tensors_reach_every_engine_and_one_that_restarts(tmp_path: Path) -> None:
    async def main() -> None:
        tensors = noisy_tensors()
        expected = await of_fresh_engine(tensors, tmp_path / "fresh")
        async with launching(tmp_path / "engines") as launcher:
            engines = await asyncio.gather(*(launcher.start(*item) for item in {"a": P, "b": D, "c": D}.items()))
            async with controlled(engines, launcher) as control:
                assert await of_cluster(control, "before") != expected
                sessions = asyncio.gather(*(session(control, number) for number in range(6)))
                await asyncio.sleep(0.5)
                await control.update_weights(tensors, 7)
                assert not sessions.done()
                assert {(await engine.info()).weights_version for engine in engines} == {7}
                await sessions
                assert control.status().resends > 0
                assert await of_cluster(control, "after") == expected

                os.killpg(launcher.pid("c"), signal.SIGKILL)
                await until_back(control.fleet["c"])
                await control.switcher.take_out("b")
                assert await of_cluster(control, "restarted") == expected

    asyncio.run(main())


async def until_back(instance: Instance) -> None:
    """Until it was found dead and is in service again."""
    async with asyncio.timeout(TEST_SECONDS):
        for dead in (True, False):
            while (instance.state is InstanceState.ROUTED) is dead:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
