"""A synthetic rollout: a small event-driven model of trajectories and instances that feeds a recorder as a cluster would."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from prorsa.allocation import Adaptive, Allocation, Demand, Situation
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, Flip, TurnRecord
from prorsa.engines.protocol import FinishReason, Role
from prorsa.forecast import LifecycleForecaster
from prorsa.lifecycle import (
    DecodeStarted,
    Done,
    Dropped,
    Event,
    PrefillStarted,
    Ready,
    Requeued,
    RewardStarted,
    Sampled,
    SandboxMode,
    SandboxStarting,
    ToolStarted,
    Tracker,
)
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import StepRecord

CONFIG = "name: synthetic\npolicy:\n  name: adaptive\n  horizon: 1.0\n"


class Synthetic:
    """`groups` groups of 8 in each of `steps` waves on four instances; one flip costs 0.1 s."""

    def __init__(self, recorder: RunRecorder, seed: int, groups: int, steps: int) -> None:
        self.recorder = recorder
        self.random = random.Random(seed)
        self.groups, self.steps = groups, steps
        self.tracker = Tracker()
        self.forecaster = LifecycleForecaster(None, 2000.0)
        self.policy = Adaptive(1, 1, 4)
        self.queue: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = count()
        self.roles = {f"engine-{i}": Role.PREFILL if i < 2 else Role.DECODE for i in range(4)}
        self.free_at = dict.fromkeys(self.roles, 100.0)
        self.live = 0
        self.step = 0
        self.rewards: list[float] = []
        self.step_began = 100.0

    def run(self, until: float = float("inf")) -> None:
        for name, role in self.roles.items():
            self.recorder.instance(100.0, name, role, InstanceState.ROUTED)
        self.at(100.0, self.launch)
        self.at(100.5, self.decide)
        while self.queue and self.queue[0][0] <= until:
            time, _, call = heapq.heappop(self.queue)
            call(time)

    def at(self, time: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self.queue, (time, next(self.order), call))

    def record(self, event: Event) -> None:
        transition = self.tracker.apply(event)
        self.forecaster.observe(transition)
        self.recorder.transition(transition)

    def launch(self, time: float) -> None:
        self.step += 1
        self.step_began = time
        for group in range(self.groups):
            for member in range(8):
                self.live += 1
                name = f"s{self.step}-g{group}-{member}"
                self.at(time + 0.3 * self.random.random(), lambda t, n=name, g=group: self.sample(t, n, g))  # type: ignore[misc]

    def sample(self, time: float, name: str, group: int) -> None:
        self.record(Sampled(time, name, f"s{self.step}-g{group}", "arithmetic", self.step - 1))
        self.record(SandboxStarting(time, name, SandboxMode.PREWARMED, "python", "local"))
        prompt = self.random.randint(60, 140)
        self.at(time + 0.05, lambda t: self.ready(t, name, 0, prompt))

    def ready(self, time: float, name: str, turn: int, prompt: int) -> None:
        self.record(Ready(time, name, prompt))
        self.serve(time, time, name, turn, prompt, ())

    def serve(
        self, time: float, ready: float, name: str, turn: int, prompt: int, resent: tuple[tuple[str, str], ...]
    ) -> None:
        prefills = [instance for instance, role in self.roles.items() if role is Role.PREFILL]
        instance = min(prefills, key=self.free_at.__getitem__)
        start = max(time, self.free_at[instance])
        self.free_at[instance] = start + prompt / 2000
        self.at(start, lambda t: self.record(PrefillStarted(t, name, instance)))
        self.at(self.free_at[instance], lambda t: self.decode(t, ready, name, turn, prompt, instance, resent))

    def decode(
        self,
        time: float,
        ready: float,
        name: str,
        turn: int,
        prompt: int,
        prefill: str,
        resent: tuple[tuple[str, str], ...],
    ) -> None:
        decodes = [instance for instance, role in self.roles.items() if role is Role.DECODE]
        instance = self.random.choice(decodes)
        self.record(DecodeStarted(time, name, instance))
        if not resent and self.random.random() < 0.08:
            self.at(time, lambda t: self.record(Requeued(t, name, prompt)))
            self.at(time, lambda t: self.serve(t, ready, name, turn, prompt, ((prefill, instance),)))
            return
        arrivals = [time]
        for _ in range(self.random.randint(10, 80) - 1):
            arrivals.append(arrivals[-1] + 0.004 + 0.02 * self.random.random() ** 6)
        record = TurnRecord(
            trajectory=name,
            turn=turn,
            prompt_tokens=prompt,
            cached_tokens=0 if turn == 0 else prompt // 2,
            instances=(*resent, (prefill, instance)),
            ready=ready,
            arrivals=tuple(arrivals),
            versions=(self.step - 1,) * len(arrivals),
            finish=FinishReason.STOP,
        )
        self.at(arrivals[-1], lambda t: self.end_turn(t, name, turn, record))

    def end_turn(self, time: float, name: str, turn: int, record: TurnRecord) -> None:
        self.recorder.turn(record)
        context = record.prompt_tokens + record.output_tokens
        if turn < 3 and self.random.random() < 0.6:
            self.record(ToolStarted(time, name, "python", context))
            returned = time + 0.2 + self.random.expovariate(2.0)
            self.at(returned, lambda t: self.ready(t, name, turn + 1, context + self.random.randint(20, 200)))
        elif self.random.random() < 0.02:
            self.record(Dropped(time, name, "staleness bound 1 exceeded"))
            self.end(time)
        else:
            self.record(RewardStarted(time, name, context))
            reward = float(self.random.random() < 0.3 + 0.08 * self.step)
            self.at(time + 0.05, lambda t: self.finish(t, name, reward))

    def finish(self, time: float, name: str, reward: float) -> None:
        self.record(Done(time, name, reward, True))
        self.rewards.append(reward)
        self.end(time)

    def end(self, time: float) -> None:
        self.live -= 1
        if self.live:
            return
        mean = sum(self.rewards) / len(self.rewards)
        self.recorder.step(StepRecord(self.step, time, time - self.step_began, mean, len(self.rewards)))
        self.rewards = []
        if self.step < self.steps:
            self.at(time + 1.5, self.launch)

    def decide(self, time: float) -> None:
        snapshot = self.tracker.snapshot(time)
        roles = list(self.roles.values())
        current = Allocation(roles.count(Role.PREFILL), roles.count(Role.DECODE))
        forecast = self.forecaster.forecast(snapshot, 1.0, [n for n, r in self.roles.items() if r is Role.PREFILL])
        demand = Demand(forecast.prefill_tokens, 2000.0, 1.0, forecast.decode_kv + forecast.admitted_kv, 4096.0)
        target = self.policy.decide(Situation(demand, current, len(snapshot) > 0))
        self.recorder.decision(
            Decision(time, self.tracker.counts(), forecast, demand, current, len(snapshot) > 0, target)
        )
        self.flip(time, Role.PREFILL, Role.DECODE, target.decode - current.decode)
        self.flip(time, Role.DECODE, Role.PREFILL, target.prefill - current.prefill)
        if self.live or self.step < self.steps:
            self.at(time + 1.0, self.decide)

    def flip(self, time: float, before: Role, after: Role, wanted: int) -> None:
        for name in [name for name, role in self.roles.items() if role is before][: max(0, wanted)]:
            self.recorder.instance(time, name, before, InstanceState.DRAINING)
            self.recorder.instance(time + 0.03, name, before, InstanceState.FLIPPING)
            self.recorder.instance(time + 0.1, name, after, InstanceState.ROUTED)
            self.recorder.flip(Flip(time, name, before, after, 2, 0.03, 0.07, None))
            self.roles[name] = after


@pytest.fixture
def synthetic(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a synthetic run and gives its directory; `until` stops it in the middle, unclosed."""

    def write(seed: int = 0, groups: int = 4, steps: int = 2, until: float = float("inf")) -> Path:
        directory = tmp_path / f"run-{seed}-{until}"
        recorder = RunRecorder(directory, CONFIG)
        Synthetic(recorder, seed, groups, steps).run(until)
        if until == float("inf"):
            recorder.close()
        return directory

    return write
