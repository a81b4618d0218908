"""What the tests of the cluster share: a router alone and a whole control plane over fake engines."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fake_engine import STOP, FakeEngine, FakeRestarter, World, reference

from prorsa.allocation import Allocation, Moment, Policy, PrefillSpeed, Situation
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import Fleet, Instance, InstanceState
from prorsa.cluster.manager import HealthLimits
from prorsa.cluster.observers import Decision, Flip, TurnRecord
from prorsa.cluster.router import Limits, Router
from prorsa.cluster.switcher import SwitchLimits
from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason, Role, SamplingParams
from prorsa.forecast import Forecaster, LifecycleForecaster
from prorsa.lifecycle import Tracker, Transition
from prorsa.lifecycle.events import Done, Event, RewardStarted, Sampled
from prorsa.simulation.clock import run

ROLES = {"P": Role.PREFILL, "D": Role.DECODE, "M": Role.MIXED}


class Cluster:
    """A router over fake engines, with a real tracker behind it."""

    def __init__(self, roles: str = "PPDD", limits: Limits | None = None, **engine: Any) -> None:
        self.world = World()
        self.fleet = Fleet()
        self.tracker = Tracker()
        self.events: list[Event] = []
        self.turns: list[TurnRecord] = []
        self.router = Router(self.fleet, self.apply, self.tracker.decoded, self.turns.append, limits or Limits())
        counts: Counter[str] = Counter()
        self.engines: dict[str, FakeEngine] = {}
        for letter in roles:
            name = f"{letter.lower()}{counts[letter]}"
            counts[letter] += 1
            self.engines[name] = FakeEngine(name, self.world, ROLES[letter], **engine)
            self.fleet.add(Instance(self.engines[name], ROLES[letter], self.engines[name].capacity))
        self.world.given_up = lambda name: self.fleet[name].state is InstanceState.DEAD

    def apply(self, event: Event) -> None:
        self.tracker.apply(event)
        self.events.append(event)

    def sample(self, trajectory: str) -> None:
        now = asyncio.get_running_loop().time()
        self.apply(Sampled(now, trajectory, group="g", task="t"))

    async def generate(self, request: TurnRequest) -> TurnResult:
        if request.trajectory not in self.tracker:
            self.sample(request.trajectory)
        return await self.router.generate(request)

    def context(self, trajectory: str) -> int:
        """Prompt and output tokens of the trajectory so far, as the tracker knows them; 0 before it is sampled."""
        if trajectory not in self.tracker:
            return 0
        snapshot = self.tracker.snapshot(0.0)
        return int(snapshot.tokens[snapshot.ids.index(trajectory)])

    def check_nothing_left(self) -> None:
        assert self.world.wrong == []
        assert self.router.live == 0
        assert self.router.waiting == 0
        assert {name: list(engine.legs) for name, engine in self.engines.items() if engine.legs} == {}
        assert [i for i in self.fleet if i.load or i.prefills or i.decodes] == []

    def served(self) -> Counter[str]:
        return Counter(rid for engine in self.engines.values() for rid in engine.served)


def ask(trajectory: str = "t", budget: int = 40, turn: int = 0, prompt: tuple[int, ...] = (5, 6, 7)) -> TurnRequest:
    return TurnRequest(trajectory, turn, prompt, SamplingParams(budget, 0.0, stop_token_ids=(STOP,)))


def check_equals_reference(request: TurnRequest, result: TurnResult) -> None:
    tokens, logprobs = reference(request.input_ids, request.sampling)
    assert result.token_ids == tokens
    assert result.logprobs == logprobs
    assert len(result.versions) == len(tokens)
    assert result.finish is (FinishReason.STOP if tokens[-1] == STOP else FinishReason.LENGTH)


def in_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        run(test(*args, **kwargs))

    return wrapper


async def until(condition: Callable[[], bool]) -> None:
    """Step through loop time until `condition`; bounded."""
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Keep(Policy):
    """A policy that is content with what there is."""

    moments = frozenset({Moment.GRID})

    def decide(self, situation: Situation) -> Allocation | None:
        return situation.current


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
    """A control plane over fake engines e0, e1, ...; use it as a context: leaving it stops it and checks what is left."""

    def __init__(
        self,
        roles: str = "PPDD",
        policy: Policy | None = None,
        forecaster: Forecaster | None = None,
        canary_timeout: float | None = None,
        restart_within: float = math.inf,
        **engine: Any,
    ) -> None:
        self.world = World()
        self.engines = {
            f"e{index}": FakeEngine(f"e{index}", self.world, ROLES[letter], **engine)
            for index, letter in enumerate(roles)
        }
        self.restarter = FakeRestarter(self.world, **engine)
        self.notes = Notes()
        self.forecaster = forecaster or LifecycleForecaster(None, 100.0)
        self.policy = policy or Keep()
        self.control = ControlPlane(
            list(self.engines.values()),
            forecaster=self.forecaster,
            policy=self.policy,
            speed=PrefillSpeed(100.0),
            horizon=1.0,
            restarter=self.restarter,
            observers=[self.notes],
            limits=Limits(cancel_timeout=1.0, stall_timeout=20.0),
            switch_limits=SwitchLimits(idle_timeout=3.0, flip_timeout=5.0, canary_timeout=canary_timeout),
            health_limits=HealthLimits(interval=1.0, timeout=2.0, hang_timeout=10.0, restart_within=restart_within),
        )
        self.world.given_up = lambda name: self.control.fleet[name].state is InstanceState.DEAD

    async def __aenter__(self) -> Bench:
        await self.control.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.control.stop()
        self.check_nothing_left()

    def engine(self, name: str) -> FakeEngine:
        """The present engine of an instance, restarted ones included."""
        return self.restarter.engines.get(name, self.engines[name])

    def roles(self) -> str:
        """The routed roles in order of the instances; a dot for one that is not in service."""
        return "".join(
            instance.role.value[0].upper() if instance.state is InstanceState.ROUTED else "."
            for instance in self.control.fleet
        )

    def check_nothing_left(self) -> None:
        assert self.world.wrong == []
        assert (self.control.router.live, self.control.router.waiting) == (0, 0)
        engines = [*self.engines.values(), *self.restarter.engines.values()]
        assert [(engine.name, list(engine.legs)) for engine in engines if engine.legs] == []
        assert [instance for instance in self.control.fleet if instance.rids or instance.load] == []

    async def trajectory(self, name: str, prompt: tuple[int, ...] = (1, 2, 3), budget: int = 50) -> TurnResult:
        """One turn from sampling to reward, checked against the reference."""
        now = asyncio.get_running_loop().time
        await self.control.record(Sampled(now(), name, group="g", task="t"))
        request = ask(name, budget, prompt=prompt)
        result = await self.control.generate(request)
        check_equals_reference(request, result)
        await self.control.record(RewardStarted(now(), name, len(prompt) + len(result.token_ids)))
        await self.control.record(Done(now(), name, 1.0, True))
        return result

    def trajectories(self, count: int, budget: int = 50) -> list[asyncio.Task[TurnResult]]:
        """`count` trajectories with different prompts, running."""
        return [asyncio.create_task(self.trajectory(f"t{i}", (i, i, i), budget)) for i in range(count)]
