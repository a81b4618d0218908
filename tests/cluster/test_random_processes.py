"""Promises 1, 3, 4, 6 and 7 on real engine processes under random, seeded acts: signals, flips, weight updates, cancels."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from real_cluster import BUDGET, ROLES, cluster, in_service, left, trajectory

from prorsa.allocation import Allocation
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.turns import TurnResult
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import EngineError

TRAJECTORIES = 24
ACTS = ("kill", "stop", "flip", "flip", "update weights", "cancel a caller")
TARGETS = (Allocation(3, 1), Allocation(1, 3), Allocation(1, 1, 2), Allocation(0, 0, 4), Allocation(2, 2))


class Rollout:
    """Its trajectories, and what is done to them and to the engines meanwhile."""

    def __init__(self, control: ControlPlane, launcher: EmbeddedLauncher, path: str, chance: random.Random) -> None:
        self.control = control
        self.launcher = launcher
        self.path = path
        self.chance = chance
        self.callers = [asyncio.create_task(trajectory(control, number, "u")) for number in range(TRAJECTORIES)]
        self.cancelled: set[int] = set()
        self.going_on: list[asyncio.Task[object]] = []

    async def act(self, what: str) -> None:
        # One that is dead has no process until it is restarted.
        name = self.chance.choice([i.name for i in self.control.fleet if i.state is not InstanceState.DEAD])
        match what:
            case "kill":
                self.signal(self.launcher.pid(name), signal.SIGKILL)
            case "stop":
                self.going_on.append(
                    asyncio.create_task(self.stop(self.launcher.pid(name), self.chance.uniform(0.1, 1.0)))
                )
            case "flip":
                target = self.chance.choice(TARGETS)
                self.going_on.append(asyncio.create_task(self.control.switcher.apply(target)))
            case "update weights":
                self.going_on.append(asyncio.create_task(self.update(self.control.version + 1)))
            case "cancel a caller":
                number = self.chance.randrange(TRAJECTORIES)
                if not self.callers[number].done():
                    self.cancelled.add(number)
                    self.callers[number].cancel()

    def signal(self, pid: int, number: int) -> None:
        """The process may have gone already; its number is not used again so soon."""
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    async def stop(self, pid: int, seconds: float) -> None:
        self.signal(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.signal(pid, signal.SIGCONT)

    async def update(self, version: int) -> None:
        """The same weights under a new version: tokens stay what they were."""
        try:
            await self.control.update_weights(self.path, version)
        except EngineError as error:
            assert "reached no instance" in str(error)  # noqa: PT017

    def check(self, ends: list[TurnResult | BaseException], expected: list[tuple[int, ...]]) -> None:
        for number, end in enumerate(ends):
            if number in self.cancelled:
                assert isinstance(end, asyncio.CancelledError)
            elif isinstance(end, BaseException):
                raise end
            else:
                assert end.token_ids == expected[number], f"trajectory {number} after {end.attempts} attempts"
                assert len(end.logprobs) == len(end.versions) == BUDGET
                assert list(end.versions) == sorted(end.versions)


@pytest.mark.engine
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_happens_to_processes_changes_no_token_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, seed: int
) -> None:
    async def main() -> None:
        async with cluster(checkpoint, tmp_path) as (control, launcher):
            undisturbed = await asyncio.gather(*(trajectory(control, number) for number in range(TRAJECTORIES)))
            path = (await control.fleet["e0"].engine.info()).model_path
            chance = random.Random(seed)
            rollout = Rollout(control, launcher, path, chance)
            # Every act happens at some share of the output, so that a faster machine tries the same.
            whole = TRAJECTORIES * BUDGET
            for index, what in enumerate(chance.sample(ACTS, len(ACTS)) + chance.choices(ACTS, k=4)):
                await produced(control, rollout, whole + whole * 0.08 * (index + 1))
                await rollout.act(what)
            ends = await asyncio.gather(*rollout.callers, return_exceptions=True)
            await asyncio.gather(*rollout.going_on)
            rollout.check(ends, [result.token_ids for result in undisturbed])
            assert control.status().resends > 0
            await in_service(control)
            assert await left(control) == [(0, 0, 0)] * len(ROLES)
            assert (control.router.live, control.router.waiting) == (0, 0)
            assert [instance for instance in control.fleet if instance.rids or instance.load] == []
            infos = [await instance.engine.info() for instance in control.fleet]
            assert {info.weights_version for info in infos} == {control.version}
            assert [info.role for info in infos] == [instance.role for instance in control.fleet]

    asyncio.run(main())


async def produced(control: ControlPlane, rollout: Rollout, tokens: float) -> None:
    """Wait until so much output was generated in all, or the rollout is over; output is the only signal of progress."""
    async with asyncio.timeout(120.0):
        while control.status().output_tokens < tokens and not all(  # noqa: ASYNC110
            caller.done() for caller in rollout.callers
        ):
            await asyncio.sleep(0.002)
