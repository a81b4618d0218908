from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fake_engine import STOP, FakeEngine, FakeRestarter, World, reference

from prorsa.allocation import Policy, PrefillSpeed, Static
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, Flip, TurnRecord
from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.protocol import Role, SamplingParams
from prorsa.forecast.forecast import Forecast
from prorsa.lifecycle import Snapshot, State, Transition
from prorsa.lifecycle.events import Done, RewardStarted, Sampled
from prorsa.simulation.clock import run


class Present:
    """Forecasts that nothing new comes: the ready queue, the prefills and the decodes as they are."""

    def __init__(self) -> None:
        self.observed: list[Transition] = []

    def observe(self, transition: Transition) -> None:
        self.observed.append(transition)

    def forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        def tokens(state: State) -> float:
            return float(snapshot.tokens[snapshot.state == state].sum())

        ready, inflight = tokens(State.READY), tokens(State.PREFILL)
        return Forecast(
            time=snapshot.time,
            horizon=horizon,
            sampler=0.0,
            startup=0.0,
            ready=ready,
            tool=0.0,
            inflight=inflight,
            bias=1.0,
            prefill_tokens=ready + inflight,
            admitted_tokens=ready + inflight,
            admitted_kv=0.0,
            decode_kv=tokens(State.DECODE),
        )


class Notes:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.transitions: list[Transition] = []
        self.decisions: list[Decision] = []
        self.flips: list[Flip] = []
        self.turns: list[TurnRecord] = []
        self.instances: list[tuple[float, str, Role, InstanceState]] = []

    def transition(self, transition: Transition) -> None:
        self.transitions.append(transition)

    def decision(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def flip(self, flip: Flip) -> None:
        self.flips.append(flip)

    def turn(self, turn: TurnRecord) -> None:
        self.turns.append(turn)

    def instance(self, time: float, name: str, role: Role, state: InstanceState) -> None:
        self.instances.append((time, name, role, state))


class Bench:
    """A control plane over fake engines."""

    def __init__(self, roles: str = "PPDD", policy: Policy | None = None, **engine: Any) -> None:
        self.world = World()
        kinds = {"P": Role.PREFILL, "D": Role.DECODE, "M": Role.MIXED}
        self.engines = [
            FakeEngine(f"e{index}", self.world, kinds[letter], **engine) for index, letter in enumerate(roles)
        ]
        self.restarter = FakeRestarter(self.world)
        self.notes = Notes()
        self.forecaster = Present()
        self.policy = policy or Static(roles.count("P"), roles.count("D"))
        self.control = ControlPlane(
            self.engines,
            forecaster=self.forecaster,
            policy=self.policy,
            speed=PrefillSpeed(100.0),
            horizon=1.0,
            restarter=self.restarter,
            observers=[self.notes],
        )

    async def trajectory(self, name: str, prompt: tuple[int, ...] = (1, 2, 3), budget: int = 50) -> TurnResult:
        now = asyncio.get_running_loop().time
        await self.control.record(Sampled(now(), name, group="g", task="t"))
        request = TurnRequest(name, 0, prompt, SamplingParams(budget, 0.0, stop_token_ids=(STOP,)))
        result = await self.control.generate(request)
        assert (result.token_ids, result.logprobs) == reference(prompt, request.sampling)
        assert len(result.versions) == len(result.token_ids)
        await self.control.record(RewardStarted(now(), name, len(prompt) + len(result.token_ids)))
        await self.control.record(Done(now(), name, 1.0, True))
        return result


def test_a_run_is_observed_and_counted() -> None:
    async def main() -> None:
        bench = Bench()
        await bench.control.start()
        await asyncio.gather(*(bench.trajectory(f"t{i}", (i, i)) for i in range(20)))
        status = bench.control.status()
        assert (status.turns, status.resends, status.waiting) == (20, 0, 0)
        assert status.output_tokens == sum(turn.output_tokens for turn in bench.notes.turns)
        assert len(bench.notes.transitions) == 20 * 6 == len(bench.forecaster.observed)
        await bench.control.stop()

    run(main())
