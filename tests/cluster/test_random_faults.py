"""Promises 1 to 7 under random schedules of drains, flips, deaths, refusals, broken streams and weight updates."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from cluster_bench import Bench, ask, check_equals_reference
from fake_engine import FakeEngine
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from prorsa.allocation import Allocation
from prorsa.cluster.flips import serves
from prorsa.cluster.turns import TurnResult
from prorsa.engines.protocol import EngineError
from prorsa.lifecycle.events import Done, RewardStarted, Sampled, ToolStarted
from prorsa.simulation.clock import run

TRAJECTORIES, TURNS = 40, 3
ENGINE_FAULTS = (
    "die",
    "break streams",
    "refuse",
    "deaf",
    "late",
    "spoil",
    "noop",
    "fail",
    "hang",
    "update fails",
    "hung",
)
TARGETS = (
    *(Allocation(prefill, 5 - prefill) for prefill in range(1, 5)),
    *(Allocation(prefill, 5 - prefill - mixed, mixed) for mixed in range(1, 4) for prefill in range(1, 5 - mixed)),
    Allocation(0, 0, 5),
)
CLUSTER_ACTS = ("drain", "flip", "even out", "update weights", "cancel a caller")


@dataclass(frozen=True)
class Act:
    after: float
    """Seconds since the act before."""
    what: str
    number: int
    """Which instance, allocation or caller."""


acts = st.lists(
    st.builds(
        Act,
        after=st.floats(0.0, 0.4),
        what=st.sampled_from(ENGINE_FAULTS + CLUSTER_ACTS),
        number=st.integers(0, TRAJECTORIES - 1),
    ),
    min_size=5,
    max_size=40,
)


def strike(engine: FakeEngine, what: str) -> None:
    match what:
        case "die":
            engine.die()
        case "break streams":
            engine.break_streams()
        case "refuse":
            engine.refuse = 5
        case "deaf":
            engine.deaf = True
        case "late":
            engine.late_tokens = 2
        case "spoil":
            engine.spoils_aborted_prefills = True
        case "noop" | "fail" | "hang":
            engine.flip_fault = what
        case "update fails":
            engine.update_fault = "fail"
        case "hung":
            engine.hung = True


class Run:
    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.turns = 0
        self.version = 0
        self.callers = [asyncio.create_task(self.trajectory(i)) for i in range(TRAJECTORIES)]
        self.cancelled: set[int] = set()
        self.hurried: set[int] = set()
        """Those of them that were cancelled more than once."""
        self.background: list[asyncio.Task[object]] = []

    async def trajectory(self, number: int) -> None:
        control, now, name = self.bench.control, asyncio.get_running_loop().time, f"t{number}"
        context = [number, number % 3]
        await control.record(Sampled(now(), name, group="g", task="t", version=control.version))
        for turn in range(TURNS):
            request = ask(name, 10 + 7 * number % 50, turn, tuple(context))
            try:
                result: TurnResult = await control.generate(request)
            finally:
                # When its caller hears of the end, no engine has any of it. A second cancel is not waited for.
                assert number in self.hurried or self.bench.world.live(f"{name}.{turn}") == []
            check_equals_reference(request, result)
            assert list(result.versions) == sorted(result.versions)
            self.turns += 1
            context += [*result.token_ids, 3, 4]
            if turn + 1 < TURNS:
                await control.record(ToolStarted(now(), name, "python", len(context)))
                await asyncio.sleep(0.05)
        await control.record(RewardStarted(now(), name, len(context)))
        await control.record(Done(now(), name, 1.0, True))

    async def act(self, act: Act) -> None:
        await asyncio.sleep(act.after)
        control = self.bench.control
        instance = control.fleet[f"e{act.number % 5}"]
        match act.what:
            case "drain":
                self.background.append(asyncio.create_task(control.router.drain(instance, "test")))
            case "flip":
                target, patience = TARGETS[act.number % len(TARGETS)], act.number % 3 * 0.2
                self.background.append(asyncio.create_task(control.switcher.apply(target, patience)))
            case "even out":
                control.router.even_out(act.number % 3 > 0)
            case "update weights":
                self.version += 1
                self.background.append(asyncio.create_task(self.update(self.version)))
            case "cancel a caller":
                if not self.callers[act.number].done():
                    (self.hurried if act.number in self.cancelled else self.cancelled).add(act.number)
                    self.callers[act.number].cancel()
            case fault:
                strike(self.bench.engine(instance.name), fault)

    async def update(self, version: int) -> None:
        try:
            await self.bench.control.update_weights("/weights", version)
        except EngineError:
            event("a weight update reached no instance")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=acts)
def test_every_turn_ends_equal_to_the_reference_whatever_fails(schedule: list[Act]) -> None:
    async def main() -> None:
        async with Bench("PPDDD") as bench:
            rollout = Run(bench)
            for act in schedule:
                await rollout.act(act)
            ends = await asyncio.gather(*rollout.callers, return_exceptions=True)
            await asyncio.gather(*rollout.background)
            for number, end in enumerate(ends):
                if number in rollout.cancelled:
                    assert isinstance(end, asyncio.CancelledError)
                elif isinstance(end, BaseException):
                    raise end
            assert rollout.turns >= (TRAJECTORIES - len(rollout.cancelled)) * TURNS
            event(f"resends: {bench.control.status().resends // 20 * 20}+")
            async with asyncio.timeout(60.0):
                while "." in bench.roles():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert {bench.engine(instance.name).version for instance in bench.control.fleet} == {bench.control.version}
            assert serves(bench.control.fleet.in_service)

    run(main())
