"""One scenario under one policy, from the first launch to the last batch, in virtual time.

The control plane, the controller, the episodes, the forecaster and the policy are those of production. Simulated are the
engines, the sandboxes, tools and rewards, and the trainer, which only takes time and gives new weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

from prorsa.allocation import Policy, PrefillSpeed
from prorsa.assembly import build_forecaster, build_injection, role_policy
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.manager import HealthLimits
from prorsa.cluster.observers import Decision, Flip, Observer, TurnRecord
from prorsa.cluster.router import Limits
from prorsa.config import ConfigError, split_counts
from prorsa.engines.protocol import Role
from prorsa.forecast import Forecast, Forecaster, Kalman, Persistence, WindowMeter
from prorsa.forecast.injection import Injection
from prorsa.lifecycle import Done, Dropped, Snapshot, Transition
from prorsa.profiles.costs import StepCosts
from prorsa.profiles.instance import ProfileCosts
from prorsa.profiles.profile import Profile
from prorsa.report.comparison import RoleCount
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import StepRecord
from prorsa.report.volumes import Volume
from prorsa.rollout.controller import STALE, Controller, Plan
from prorsa.rollout.sampler import Group, Sampler
from prorsa.simulation import clock
from prorsa.simulation.clairvoyant import Clairvoyant, View
from prorsa.simulation.engines.cluster import SimulatedCluster
from prorsa.simulation.engines.statistics import BIN_S, Statistics
from prorsa.simulation.faults import FaultSchedule, Injector
from prorsa.simulation.foresight import Tables
from prorsa.simulation.outcome import (
    Disturbance,
    FlipRecord,
    ForecastWindow,
    RunOutcome,
    StepOutcome,
)
from prorsa.simulation.scenario import PolicySection, RolloutSection, Scenario
from prorsa.simulation.workloads.environment import simulated_environment
from prorsa.simulation.workloads.launches import Launches
from prorsa.simulation.workloads.models import build_workload
from prorsa.simulation.workloads.pseudo_model import PseudoModel
from prorsa.simulation.workloads.scripts import Workload

PREFILLS_A_RANK = 4
"""Outstanding prefills that the router gives an instance for each of its ranks: enough for the ranks to fill each other's
steps, and few enough that the backlog stays in the ready queue, where the forecast sees it."""
HEALTH_INTERVAL = 60.0
"""Seconds, of a run without faults: nothing fails in it."""
SAMPLE = 64
"""Scripts from which the profiled prefill speed of a workload is worked out."""

Progress = Callable[[int, int], None]
"""Called with (steps done, steps)."""


def run_scenario(
    scenario: Scenario,
    name: str,
    *,
    faults: FaultSchedule | None = None,
    progress: Progress | None = None,
    record_to: Path | None = None,
) -> RunOutcome:
    """Run `scenario.policies[name]` while `faults` happen. `record_to` also writes a run directory, which takes longer.

    Raises `ConfigError` where the cluster cannot be built, and `ConservationError` where the simulation contradicts itself.
    """
    return clock.run(_run(_setting(scenario, name, faults), faults, progress, record_to))


def check_scenario(scenario: Scenario, name: str, faults: FaultSchedule | None = None) -> None:
    """Raises `ConfigError` where `scenario.policies[name]` cannot be built, or `faults` are none for it."""
    _setting(scenario, name, faults)


def _setting(scenario: Scenario, name: str, faults: FaultSchedule | None) -> _Setting:
    setting = _Setting(scenario, name)
    if faults is not None:
        faults.check(setting.roles, name)
    return setting


class _Setting:
    """What a scenario and one of its policies come to."""

    def __init__(self, scenario: Scenario, name: str) -> None:
        if name not in scenario.policies:
            raise ConfigError(f"--policy {name}: the scenario has {', '.join(scenario.policies)}; give some of these")
        self.scenario = scenario
        self.name = name
        self.policy: PolicySection = scenario.policies[name]
        self.prefill = scenario.prefill_profile()
        self.decode = scenario.decode_profile()
        self.workload = build_workload(scenario.workload, scenario.seed)
        self.launches = Launches(self.workload, self.group_size, scenario.seed)
        self.roles = _roles(self.policy, self.prefill, self.decode, scenario.hardware.gpus)

    @property
    def rollout(self) -> RolloutSection:
        return self.scenario.rollout

    @property
    def group_size(self) -> int:
        return self.rollout.group_size

    @property
    def prefill_slots(self) -> int:
        return PREFILLS_A_RANK * self.prefill.ranks

    def groups(self, count: int) -> int:
        return max(1, round(count * self.rollout.load))

    def plan(self, injection: Injection | None) -> Plan:
        in_flight = None if self.rollout.in_flight is None else self.groups(self.rollout.in_flight)
        return Plan(self.groups(self.rollout.groups), injection, self.rollout.max_staleness, in_flight)

    def build_policy(self, view: Callable[[], View]) -> Policy:
        """`view` is of the rollout, once it runs."""
        if self.policy.name == "clairvoyant":
            return Clairvoyant(
                self.launches,
                Tables(ProfileCosts(self.prefill), self.scenario.workload.max_context, self.policy.prefill_every),
                view,
                endless=self.rollout.mode == "async",
                cached=self.scenario.hardware.kv_store,
                ranks=len(self.roles) * self.prefill.ranks,
                report_s=self.scenario.hardware.stream_s,
                mixed=self.policy.planning.mixed,
            )
        prefill = sum(role is Role.PREFILL for role in self.roles.values())
        return role_policy(
            self.policy.name,
            self.policy.planning,
            split=(prefill, len(self.roles) - prefill),
            gpus=(self.prefill.gpus, self.decode.gpus, self.scenario.hardware.gpus),
            costs=ProfileCosts(self.prefill),
            prefill_slots=self.prefill_slots,
            prefill_every=self.policy.prefill_every,
        )


def _roles(policy: PolicySection, prefill: Profile, decode: Profile, gpus: int) -> dict[str, Role]:
    """The instances by name with the roles that they start in. Raises `ConfigError`."""
    unequal = prefill.gpus != decode.gpus or prefill.name != decode.name
    if policy.name in ("adaptive", "planned", "clairvoyant") and unequal:
        raise ConfigError(
            f"policy.name={policy.name} with hardware.decode_profile={decode.name!r}: an instance of {prefill.gpus} GPUs "
            f"cannot become one of {decode.gpus} while it runs; use static splits, or one profile for both roles"
        )
    if policy.name == "colocated" or policy.starts_mixed:
        count = gpus // prefill.gpus
        if count < 1:
            raise ConfigError(
                f"hardware.gpus={gpus}: one instance takes {prefill.gpus}; set it to {prefill.gpus} or more"
            )
        return {f"engine-{index}": Role.MIXED for index in range(count)}
    if policy.split is None:
        count = gpus // prefill.gpus
        n_prefill, n_decode = (count // 2, count - count // 2) if not unequal else (1, 1)
    else:
        n_prefill, n_decode = split_counts(policy.split)
    needed = n_prefill * prefill.gpus + n_decode * decode.gpus
    if n_prefill < 1 or n_decode < 1 or needed > gpus:
        raise ConfigError(
            f"policy.split={policy.split!r} on hardware.gpus={gpus}: {n_prefill} prefill and {n_decode} decode instances "
            f"take {needed} GPUs; give at least one of each within the budget"
        )
    roles = [Role.PREFILL] * n_prefill + [Role.DECODE] * n_decode
    return {f"engine-{index}": role for index, role in enumerate(roles)}


async def _run(
    setting: _Setting, faults: FaultSchedule | None, progress: Progress | None, record_to: Path | None
) -> RunOutcome:
    scenario, rollout = setting.scenario, setting.rollout
    model = PseudoModel(setting.workload, hashed=scenario.hardware.tokens == "hash")
    cluster = SimulatedCluster(
        setting.prefill,
        setting.decode,
        model,
        prefill_every=setting.policy.prefill_every,
        stream_s=scenario.hardware.stream_s,
        kv_store=scenario.hardware.kv_store,
    )
    theta = profiled_speed(setting.prefill, setting.workload, setting.scenario.seed)
    injection = build_injection(setting.rollout)
    scored = _Scored(build_forecaster(setting.policy.forecaster, injection, theta))
    # The other policies do not look at the forecast, so the cheapest one is good enough for them.
    forecaster: Forecaster = scored if setting.policy.name in ("adaptive", "planned") else Persistence()
    watch = _Watch()
    with ExitStack() as stack:
        recorder = None if record_to is None else stack.enter_context(RunRecorder(record_to))
        control = ControlPlane(
            [cluster.start(name, role) for name, role in setting.roles.items()],
            forecaster=forecaster,
            policy=setting.build_policy(
                lambda: View(control.tracker.snapshot(asyncio.get_running_loop().time()), control.version)
            ),
            speed=PrefillSpeed(theta),
            horizon=setting.policy.horizon,
            restarter=cluster,
            observers=[watch] if recorder is None else [watch, recorder],
            limits=Limits(
                prefill_slots=setting.prefill_slots,
                decode_slots=setting.decode.ranks * setting.decode.max_running,
            ),
            health_limits=HealthLimits(interval=HEALTH_INTERVAL) if faults is None else HealthLimits(),
        )
        await control.start()
        try:
            environment = simulated_environment(
                model,
                setting.workload,
                prewarmed=rollout.prewarmed,
                max_context=scenario.workload.max_context,
            )
            sampler = Sampler(setting.launches.questions, setting.group_size, scenario.seed)
            async with (
                Injector(faults, cluster) as injector,
                Controller(control, environment, sampler, setting.plan(injection)) as controller,
            ):
                trainer = _Trainer(control, rollout)
                steps = await _steps(controller, trainer, rollout, watch, recorder, progress)
                # What still runs is dropped when the controller closes: it is no part of the result.
                watch.close(controller.lost)
                disturbance = Disturbance(
                    tuple(injector.happened),
                    cluster.restarts,
                    cluster.ledger.recomputed,
                    cluster.ledger.unread,
                    watch.lost,
                )
        finally:
            # A flip that is going on is let end: nothing of it is lost in virtual time.
            async with control.switcher.lock:
                await control.stop()
        cluster.check()
    return watch.outcome(setting, steps, scored.windows, cluster.statistics, disturbance)


async def _steps(
    controller: Controller,
    trainer: _Trainer,
    rollout: RolloutSection,
    watch: _Watch,
    recorder: RunRecorder | None,
    progress: Progress | None,
) -> list[StepOutcome]:
    now = asyncio.get_running_loop().time
    steps: list[StepOutcome] = []
    start = now()
    try:
        for step in range(1, rollout.steps + 1):
            groups = await controller.batch()
            steps.append(_step(step, start, now(), groups))
            if recorder is not None:
                _record(recorder, steps[-1])
            if progress is not None:
                progress(step, rollout.steps)
            start = now()
            if step < rollout.steps:
                start = await trainer.train(step)
    finally:
        await trainer.close()
    return steps


def _step(step: int, start: float, end: float, groups: Sequence[Group]) -> StepOutcome:
    rewards = [record.reward for group in groups for record in group.records if record.reward is not None]
    return StepOutcome(step, start, end, len(rewards), fmean(rewards))


def _record(recorder: RunRecorder, step: StepOutcome) -> None:
    recorder.step(StepRecord(step.step, step.end, step.rollout_s, step.reward, step.trajectories))


class _Trainer:
    """Takes its time for each batch, then gives every instance new weights."""

    def __init__(self, control: ControlPlane, rollout: RolloutSection) -> None:
        self._control = control
        self._seconds = rollout.train_s
        self._overlaps = rollout.mode == "async"
        self._running: asyncio.Task[None] | None = None

    async def train(self, version: int) -> float:
        """Begin to train; when the next step's rollout begins. Synchronous: when the new weights are there."""
        now = asyncio.get_running_loop().time
        if not self._overlaps:
            await self._train(version)
            return now()
        begun = now()
        if self._running is not None:
            # A trainer that is slower than the rollout holds it up: the step before has to be trained first.
            await self._running
        self._running = asyncio.create_task(self._train(version), name=f"training step {version}")
        return begun

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})

    async def _train(self, version: int) -> None:
        await asyncio.sleep(self._seconds)
        await self._control.update_weights(f"version-{version}", version)


def profiled_speed(profile: Profile, workload: Workload, seed: int) -> float:
    """theta before any busy interval, full-prompt tokens/s of an instance: the profile's speed on this workload's requests.

    A request's prefix is what the trajectory's former context leaves cached.
    """
    full = new = requests = 0
    for index in range(SAMPLE):
        script = workload.script(index % (workload.questions or SAMPLE), seed + index)
        context, cached = script.prompt_tokens, 0
        for turn in script.turns:
            full += context
            new += context - cached
            requests += 1
            cached = min(context, turn.kept(context))
            context = turn.next(context)
    speed = StepCosts(profile).prefill_speed(full // requests, (full - new) // requests)
    return speed * full / new


class _Scored:
    """A forecaster with baselines beside it that see the same snapshots. Only the first one's answer counts."""

    def __init__(self, inner: Forecaster) -> None:
        self._inner = inner
        self._baselines: dict[str, Forecaster] = {"persistence": Persistence(), "kalman": Kalman()}
        self._meter = WindowMeter()
        self._others: list[dict[str, Forecast]] = []
        self.windows: list[ForecastWindow] = []

    def observe(self, transition: Transition) -> None:
        self._meter.observe(transition)
        self._inner.observe(transition)
        for baseline in self._baselines.values():
            baseline.observe(transition)

    def caches_lost(self) -> None:
        for forecaster in (self._inner, *self._baselines.values()):
            forecaster.caches_lost()

    def forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        for made, measured in self._meter.finished(snapshot.time):
            self.windows.append(ForecastWindow(made, measured, self._others.pop(0)))
        answer = self._inner.forecast(snapshot, horizon, prefill_instances)
        self._meter.open(answer)
        self._others.append(
            {
                name: baseline.forecast(snapshot, horizon, prefill_instances)
                for name, baseline in self._baselines.items()
            }
        )
        return answer


class _Watch(Observer):
    """Counts what the outcome needs and keeps nothing of a trajectory that has ended but its length."""

    def __init__(self) -> None:
        self._open = True
        self._roles: list[RoleCount] = []
        self._instances: dict[str, tuple[Role, InstanceState]] = {}
        self._flips: list[FlipRecord] = []
        self._trajectory_s: list[float] = []
        self._turns = self._resends = self._dropped = self._live = self._live_max = 0
        self._kv_use: list[tuple[float, float]] = []
        self._end = 0.0
        self._lost_groups = 0
        self.lost = 0
        """Trajectories that were dropped for anything but staleness."""

    def close(self, lost_groups: int) -> None:
        """What comes now is no part of the run."""
        self._open = False
        self._lost_groups = lost_groups
        self._end = asyncio.get_running_loop().time()

    def transition(self, transition: Transition) -> None:
        if not self._open:
            return
        event = transition.event
        if transition.before is None:
            self._live += 1
            self._live_max = max(self._live_max, self._live)
        elif isinstance(event, Done):
            self._live -= 1
            self._trajectory_s.append(event.time - transition.sampled_at)
        elif isinstance(event, Dropped):
            self._live -= 1
            self._dropped += 1
            self.lost += not event.reason.startswith(STALE)

    def decision(self, decision: Decision) -> None:
        if decision.current.decode:
            capacity = decision.current.decode * decision.demand.decode_capacity
            self._kv_use.append((decision.time, decision.forecast.decode_kv / capacity))

    def flip(self, flip: Flip) -> None:
        self._flips.append(FlipRecord(flip.time, flip.drain_s + flip.flip_s, flip.drain_s, flip.cancelled))

    def turn(self, turn: TurnRecord) -> None:
        if not self._open:
            return
        self._turns += 1
        self._resends += turn.attempts - 1

    def instance(self, time: float, name: str, role: Role, state: InstanceState) -> None:
        self._instances[name] = (role, state)
        routed = [role for role, state in self._instances.values() if state is InstanceState.ROUTED]
        count = RoleCount(time, routed.count(Role.PREFILL), routed.count(Role.DECODE), routed.count(Role.MIXED))
        if self._roles and self._roles[-1].time == time:
            self._roles.pop()
        self._roles.append(count)

    def outcome(
        self,
        setting: _Setting,
        steps: list[StepOutcome],
        forecasts: list[ForecastWindow],
        statistics: Statistics,
        disturbance: Disturbance,
    ) -> RunOutcome:
        return RunOutcome(
            policy=setting.name,
            steps=steps,
            trajectory_s=self._trajectory_s,
            statistics=statistics,
            tokens=_volumes(statistics),
            forecasts=forecasts,
            roles=self._roles,
            flips=self._flips,
            turns=self._turns,
            resends=self._resends,
            done=len(self._trajectory_s),
            dropped=self._dropped,
            lost_groups=self._lost_groups,
            live_max=self._live_max,
            kv_use=self._kv_use,
            seconds=self._end,
            instances=len(setting.roles),
            gpus=setting.scenario.hardware.gpus,
            disturbance=disturbance,
        )


def _volumes(statistics: Statistics) -> list[Volume]:
    """In consecutive bins from the start of the run."""
    prompts, decoded = statistics.prompts_over_time, statistics.itl_over_time
    volumes = []
    for index in range(1 + max([*prompts, *decoded], default=-1)):
        full, computed = prompts.get(index, (0, 0))
        _, tokens = decoded.get(index, (0.0, 0.0))
        volumes.append(Volume(index * BIN_S, (index + 1) * BIN_S, full, computed, tokens))
    return volumes
