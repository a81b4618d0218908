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
    processes_of,
    scheduler_of,
    session,
    undisturbed,
)

from prorsa.allocation import Allocation
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import InstanceState
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


def kill(pid: int) -> None:
    os.killpg(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    """Its HTTP server goes on answering, health checks too."""
    os.kill(scheduler_of(pid), signal.SIGSTOP)


@pytest.mark.parametrize("role", [pytest.param(P, marks=LONG), D])
def test_an_engine_that_is_killed_or_hangs_comes_back_and_no_session_notices(role: str, tmp_path: Path) -> None:
    async def main() -> None:
        expected = await undisturbed(MODEL, tmp_path / "reference", 12)
        async with launching(tmp_path / "engines") as launcher:
            roles = {"a": P, "b": P, "c": D, "d": D}
            engines = await asyncio.gather(*(launcher.start(*instance) for instance in roles.items()))
            async with controlled(engines, launcher) as control:
                for first, disturb in ((0, kill), (6, freeze)):
                    sessions = asyncio.gather(*(session(control, number) for number in range(first, first + 6)))
                    await asyncio.sleep(0.5)
                    victim = max(control.fleet.pool(P if role == P else D), key=lambda instance: instance.load)
                    assert victim.rids or role == P, "a prefill is soon done"
                    former, pid = victim.engine, launcher.pid(victim.name)
                    disturb(pid)
                    assert await sessions == expected[first : first + 6]
                    async with asyncio.timeout(TEST_SECONDS):
                        while victim.engine is former or victim.state is not InstanceState.ROUTED:  # noqa: ASYNC110
                            await asyncio.sleep(0.1)
                    assert processes_of(pid) == []
                    await nothing_left(control, [instance.engine for instance in control.fleet])

    asyncio.run(main())
