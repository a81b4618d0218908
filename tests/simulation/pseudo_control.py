"""A control plane that serves turns with the pseudo-model at once, in pieces if told so; it keeps the real tracker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import TypeVar

from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason, GenerateRequest
from prorsa.lifecycle import Tracker
from prorsa.lifecycle import events as e
from prorsa.rollout.controller import Controller, Plan
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.sampler import Sampler
from prorsa.simulation import clock
from prorsa.simulation.workloads.environment import questions, simulated_environment
from prorsa.simulation.workloads.pseudo_model import PseudoModel
from prorsa.simulation.workloads.scripts import Script, Workload

MAX_CONTEXT = 1 << 20
E = TypeVar("E", bound=e.Event)


def of(kind: type[E], events: Iterable[e.Event], trajectory: str | None = None) -> list[E]:
    """The events of a kind, of one trajectory or of all."""
    return [event for event in events if type(event) is kind and trajectory in (None, event.trajectory)]


class Scripts:
    """A workload that is a list of scripts, one for each question. Implements `Workload`."""

    name = "listed"

    def __init__(self, *scripts: Script) -> None:
        self._scripts = scripts
        self.questions = len(scripts)

    def script(self, question: int, seed: int) -> Script:
        return self._scripts[question]


class PseudoControl:
    """Implements `Control`. `resends`: how many times each turn is cut off and resent with the tokens so far."""

    def __init__(self, model: PseudoModel, resends: int = 0) -> None:
        self.version = 0
        self.tracker = Tracker()
        self.events: list[e.Event] = []
        self.requests: list[TurnRequest] = []
        self._model = model
        self._resends = resends
        self._rng = random.Random(0)

    async def record(self, event: e.Event) -> None:
        self.tracker.apply(event)
        self.events.append(event)

    async def generate(self, request: TurnRequest) -> TurnResult:
        self.requests.append(request)
        name = request.trajectory
        await self.record(e.Ready(self._now, name, len(request.input_ids), request.kept))
        tokens: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        for attempt in range(self._resends + 1):
            if attempt:
                await self.record(e.Requeued(self._now, name, len(request.input_ids) + len(tokens)))
            await self.record(e.PrefillStarted(self._now, name, "p0"))
            await self.record(e.DecodeStarted(self._now, name, "d0"))
            rid = f"{name}.{request.turn}.{attempt}"
            stream = self._model.stream(GenerateRequest(rid, request.input_ids + tokens, request.sampling))
            last = attempt == self._resends
            more = stream.take(stream.length if last else self._rng.randrange(stream.length))
            tokens, logprobs = tokens + more[0], logprobs + more[1]
        assert len(tokens) <= request.sampling.max_new_tokens
        return TurnResult(tokens, logprobs, (0,) * len(tokens), FinishReason.STOP, self._resends + 1, 0)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def play(
    workload: Workload,
    groups: int = 1,
    size: int = 1,
    *,
    hashed: bool = False,
    prewarmed: int = 0,
    resends: int = 0,
    seed: int = 0,
    max_context: int = MAX_CONTEXT,
) -> tuple[PseudoControl, list[TrajectoryRecord]]:
    """One synchronous batch on the production controller, and the records of its trajectories."""

    async def main() -> tuple[PseudoControl, list[TrajectoryRecord]]:
        model = PseudoModel(workload, hashed)
        environment = simulated_environment(model, workload, prewarmed=prewarmed, max_context=max_context)
        control = PseudoControl(model, resends)
        sampler = Sampler(questions(workload, groups), size, seed)
        async with Controller(control, environment, sampler, Plan(groups)) as controller:
            batch = await controller.batch()
        return control, [record for group in batch for record in group.records]

    return clock.run(main())
