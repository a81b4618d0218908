"""The control plane over real SGLang engines: whatever happens, greedy tokens are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from sglang_bench import (
    LANE,
    LONG,
    MODEL,
    SESSIONS,
    TEST_SECONDS,
    D,
    P,
    Served,
    controlled,
    launching,
    session,
    undisturbed,
)

from prorsa.allocation import Allocation
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.manager import HealthLimits
from prorsa.engines.sglang import SGLangEngine

pytestmark = LANE

FLIPS = 12
"""At least so many happen while the sessions live."""


async def nothing_left(control: ControlPlane, engines: Sequence[SGLangEngine]) -> None:
    assert control.router.live == control.router.waiting == 0
    async with asyncio.timeout(TEST_SECONDS):
        for engine in engines:
            while not (await engine.load()).idle or (await engine.load()).used_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def test_sessions_do_not_notice_flips(served: Served, tmp_path: Path) -> None:
    async def main() -> None:
        expected = await undisturbed(MODEL, tmp_path, SESSIONS)
        async with served.engines(P, D, D) as engines, controlled(engines) as control:
            sessions = asyncio.gather(*(session(control, number) for number in range(SESSIONS)))
            targets = [Allocation(2, 1), Allocation(1, 2)]
            for target in itertools.cycle(targets):
                await asyncio.sleep(0.1)
                if sessions.done():
                    break
                await control.switcher.apply(target)
                assert control.fleet.in_service == target
            assert await sessions == expected
            assert len(control.flips) >= FLIPS
            assert [flip.failure for flip in control.flips if flip.failure] == []
            assert control.status().resends > 0
            await nothing_left(control, engines)

    asyncio.run(main())


def test_an_update_of_the_weights_leaves_every_session_going(served: Served, tmp_path: Path) -> None:
    async def main() -> None:
        expected = await undisturbed(MODEL, tmp_path, 6)
        async with served.engines(P, D, D) as engines, controlled(engines) as control:
            sessions = asyncio.gather(*(session(control, number) for number in range(6)))
            version = control.version
            await asyncio.sleep(0.5)
            await control.update_weights(str(MODEL), version + 1)
            assert not sessions.done()
            assert await sessions == expected
            assert {(await engine.info()).weights_version for engine in engines} == {version + 1}
            await nothing_left(control, engines)

    asyncio.run(main())


@pytest.mark.parametrize("role", [pytest.param(P, marks=LONG), D])
def test_an_engine_that_is_killed_comes_back_and_no_session_notices(role: str, tmp_path: Path) -> None:
    async def main() -> None:
        expected = await undisturbed(MODEL, tmp_path / "reference", 6)
        async with launching(tmp_path / "engines") as launcher:
            roles = {"a": P, "b": P, "c": D, "d": D}
            engines = await asyncio.gather(*(launcher.start(*instance) for instance in roles.items()))
            async with controlled(engines, launcher) as control:
                sessions = asyncio.gather(*(session(control, number) for number in range(6)))
                await asyncio.sleep(0.5)
                victim = max(control.fleet.pool(P if role == P else D), key=lambda instance: instance.load)
                os.killpg(launcher.pid(victim.name), signal.SIGKILL)
                assert await sessions == expected
                async with asyncio.timeout(TEST_SECONDS):
                    while victim.state is not InstanceState.ROUTED:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                await nothing_left(control, [instance.engine for instance in control.fleet])

    asyncio.run(main())


def schedulers(leader: int) -> list[int]:
    """SGLang's scheduler processes in the process group of an engine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                group = int((entry / "stat").read_text().rpartition(")")[2].split()[2])
                if group == leader and "scheduler" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
    return found


@pytest.mark.sglang_long
def test_an_engine_whose_scheduler_hangs_is_found_though_it_answers(tmp_path: Path) -> None:
    """Its HTTP server goes on and says that all is well; what tells is that its scheduler does not move."""

    async def main() -> None:
        expected = await undisturbed(MODEL, tmp_path / "reference", 6)
        async with launching(tmp_path / "engines") as launcher:
            engines = await asyncio.gather(
                *(launcher.start(*instance) for instance in {"a": P, "b": D, "c": D}.items())
            )
            async with controlled(engines, launcher, HealthLimits(interval=1.0, hang=8.0)) as control:
                sessions = asyncio.gather(*(session(control, number) for number in range(6)))
                await asyncio.sleep(0.5)
                victim = max(control.fleet.pool(D), key=lambda instance: instance.load)
                assert victim.load > 0
                (scheduler,) = schedulers(launcher.pid(victim.name))
                os.kill(scheduler, signal.SIGSTOP)
                begun = asyncio.get_running_loop().time()
                async with asyncio.timeout(TEST_SECONDS):
                    while victim.state is InstanceState.ROUTED:
                        assert await victim.engine.healthy()
                        await asyncio.sleep(0.1)
                assert asyncio.get_running_loop().time() - begun < 20.0
                assert await sessions == expected
                async with asyncio.timeout(TEST_SECONDS):
                    while victim.state is not InstanceState.ROUTED:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                await nothing_left(control, [instance.engine for instance in control.fleet])

    asyncio.run(main())
