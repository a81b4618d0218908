"""How far a simulation is from the run that it simulates: the embedded engine is profiled (`prorsa profile`), batches of the
main job's workload are rolled out on this machine, and the same trajectories simulated on that profile.

    python benchmarks/fidelity_embedded.py [--rounds 6] [--alone] [--keep DIRECTORY]

The simulation is given the trajectories (their lengths, and how long their tools took), the profile of engines that were
measured one at a time, and one figure that no engine shows: the CPU time that the rollout's own process and its tools take
for a turn (`client`), which the first batch of each configuration tells; that batch is not in the table. On a small machine
engines and client also share the cores: `Host` slows down who computes at the same time as others on the same cores.

`--alone` keeps other work of the machine away as far as the kernel lets it (raised priority, which takes root, and cores of
their own where there are enough). `others` is the share of the machine that other processes had nevertheless.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from prorsa.assembly import build_control, build_environment, build_launcher, build_task, instance_roles
from prorsa.config import Config, dump_config, load_config
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import Chunk, Engine, GenerateRequest, Role
from prorsa.lifecycle import Done, Sampled, read_trace
from prorsa.report.measures import inter_token_latencies
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import TRACE, read_run
from prorsa.rollout.controller import Controller, Plan
from prorsa.rollout.sampler import Sampler
from prorsa.rollout.sandboxes.pool import SandboxPool
from prorsa.simulation import clock
from prorsa.simulation.engines.cluster import SimulatedCluster, SimulatedEngine
from prorsa.simulation.engines.core import Core
from prorsa.simulation.measure import Facts, Limits, kv_bytes_of, measure, write_profile
from prorsa.simulation.profile import Profile
from prorsa.simulation.workloads.environment import questions, simulated_environment
from prorsa.simulation.workloads.pseudo_model import PseudoModel
from prorsa.simulation.workloads.replay import read_workload

CONFIG = Path(__file__).parents[1] / "examples" / "demo.yaml"
CONFIGS = {
    "one mixed engine": ["policy.name=colocated", "cluster.instances=1"],
    "1 prefill, 1 decode": ["policy.name=static", "policy.split='1:1'", "cluster.instances=2"],
    "four engines (the demo)": [],
}
FIGURES = (("rollout", 1, "rollout, s"), ("trajectory", 1, "mean trajectory, s"), ("latency", 1000, "token p50, ms"))
CLIENT = "client"


@dataclass(frozen=True)
class Figures:
    """Seconds."""

    rollout: float
    trajectory: float
    latency: float
    """Inter-token, the median."""


@dataclass(frozen=True)
class Batch:
    directory: Path
    config: Config
    figures: Figures
    client_s: float
    """CPU time of this process and of its tools for a turn."""
    others: float


@dataclass(frozen=True)
class Placement:
    """Which processes share how many cores."""

    cores: int
    members: frozenset[str]
    """Engines, and `client`."""


def placements(config: Config, alone: bool) -> list[Placement]:
    """With `--alone`, a core for each where there are enough; else the kernel chooses."""
    members = [*instance_roles(config), CLIENT]
    cores = os.cpu_count() or 1
    if alone and len(members) <= cores:
        return [Placement(1, frozenset({member})) for member in members]
    return [Placement(cores, frozenset(members))]


# The real runs.


class Machine:
    """The engines of all configurations, started once; those that have nothing to do take no time."""

    def __init__(self, directory: Path, alone: bool) -> None:
        self._directory = directory
        self._alone = alone
        self._stack = AsyncExitStack()
        self._engines: dict[str, list[Engine]] = {}
        self._launchers: dict[str, EmbeddedLauncher] = {}
        self._configs = {name: load_config(CONFIG, ["rollout.steps=1", *changes]) for name, changes in CONFIGS.items()}

    async def __aenter__(self) -> Machine:
        for name, config in self._configs.items():
            self._engines[name] = await self._start(name, config, instance_roles(config))
        config = self._configs["one mixed engine"]
        self._engines["profile"] = await self._start("profile", config, {role.value: role for role in Role})
        rollout = config.rollout
        self._pool = await self._stack.enter_async_context(SandboxPool(rollout.groups * rollout.group_size))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _start(self, name: str, config: Config, roles: dict[str, Role]) -> list[Engine]:
        launcher = self._launchers[name] = build_launcher(config, self._directory / "logs" / name)
        self._stack.push_async_callback(launcher.close)
        engines: list[Engine] = [await launcher.start(*instance) for instance in roles.items()]
        if self._alone:
            for pid in (0, *map(launcher.pid, roles)):
                raise_priority(pid)
        return engines

    async def profile(self) -> Profile:
        config = self._configs["one mixed engine"]
        limits = Limits(config.model.max_context, config.cluster.prefill_chunk, config.cluster.max_running)
        if self._alone:
            # One of the three works at a time, but for a prefill engine beside a decode engine.
            os.sched_setaffinity(0, {1})
            for role in Role:
                os.sched_setaffinity(self._launchers["profile"].pid(role.value), {int(role is Role.PREFILL)})
        measured = await measure(self._engines["profile"], limits, lambda what: None)
        path = self._directory / "profile.yaml"
        kv_bytes = kv_bytes_of(config.model.path)
        return write_profile(path, measured, limits, Facts("arithmetic", "CPU", 1, kv_bytes, "this benchmark", 1.0))

    async def batch(self, name: str, seed: int) -> Batch:
        """As a step of `prorsa rollout`, but its sandboxes are there before it begins and none is started during it: to
        start one takes a core as long as to generate a trajectory does."""
        config = self._configs[name].model_copy(update={"seed": seed})
        directory = self._directory / f"{name} {seed}"
        rollout, launcher = config.rollout, self._launchers[name]
        pids = [launcher.pid(instance) for instance in instance_roles(config)]
        self._place(config, launcher)
        await self._fill_pool(rollout.groups * rollout.group_size)
        task = build_task(config)
        asked = task.questions(rollout.split, config.task.train_questions, seed)
        with RunRecorder(directory, dump_config(config)) as recorder:
            control = build_control(config, self._engines[name], None, [recorder], None)
            await control.start()
            usage = Usage(pids, [worker.process.pid for worker in self._pool._ready])
            plan, sampler = Plan(rollout.groups), Sampler(asked, rollout.group_size, seed)
            async with Controller(control, build_environment(config, self._pool), sampler, plan) as controller:
                await controller.batch()
            usage.stop()
            await control.stop()
        run = read_run(directory)
        latency = inter_token_latencies(run.turns).overall_p50
        figures = Figures(usage.seconds, trajectory_seconds(directory), latency)
        return Batch(directory, config, figures, usage.client / len(run.turns), usage.others)

    async def _fill_pool(self, count: int) -> None:
        self._pool.prewarmed = count
        async with self._pool.sandbox():
            """Whoever takes one wakes the refill."""
        while self._pool.ready < count:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self._pool.prewarmed = 0

    def _place(self, config: Config, launcher: EmbeddedLauncher) -> None:
        if not self._alone:
            return
        first = 0
        for placement in placements(config, alone=True):
            cores = set(range(first, first + placement.cores))
            first += placement.cores
            for member in placement.members:
                os.sched_setaffinity(0 if member == CLIENT else launcher.pid(member), cores)


def raise_priority(pid: int) -> None:
    """Over everything in other sessions: the scheduler shares the cores between sessions first."""
    (Path("/proc") / (str(pid) if pid else "self") / "autogroup").write_text("-19")


class Usage:
    """Of CPU time, from now until `stop`, by when all `sandboxes` have ended."""

    def __init__(self, engines: Sequence[int], sandboxes: Sequence[int]) -> None:
        self._engines = engines
        self._started = sum(map(cpu_seconds, sandboxes))
        self._begun = self._now()

    def stop(self) -> None:
        elapsed, machine, own, children, engines = (
            after - before for after, before in zip(self._now(), self._begun, strict=True)
        )
        # What a child has used counts when it ends, from its start on.
        tools = children - self._started
        self.seconds = elapsed
        self.client = own + tools
        self.others = max(0.0, machine - own - tools - engines) / elapsed / (os.cpu_count() or 1)

    def _now(self) -> tuple[float, ...]:
        user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
        machine = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
        times = os.times()
        return (
            asyncio.get_running_loop().time(),
            machine,
            times.user + times.system,
            times.children_user + times.children_system,
            sum(map(cpu_seconds, self._engines)),
        )


def cpu_seconds(pid: int) -> float:
    """Of a process with one thread; finer than the ticks of its `stat`."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def trajectory_seconds(run_dir: Path) -> float:
    """Mean, from sampling to reward."""
    begun: dict[str, float] = {}
    seconds = []
    for event in read_trace(run_dir / TRACE):
        if isinstance(event, Sampled):
            begun[event.trajectory] = event.time
        elif isinstance(event, Done):
            seconds.append(event.time - begun[event.trajectory])
    return fmean(seconds)


# The simulation.


class Host:
    """Cores that processes share: who computes is slowed down as the cores are shared out among all that do."""

    def __init__(self, places: Sequence[Placement], client_s: float) -> None:
        self._places = places
        self._client_s = client_s
        self._client_until = 0.0
        self.cluster: SharedCluster

    async def client(self) -> None:
        """The client's work for a turn, one after another."""
        now = asyncio.get_running_loop().time()
        self._client_until = max(now, self._client_until) + self._client_s * self.slowdown(CLIENT)
        await asyncio.sleep(self._client_until - now)

    def slowdown(self, who: str) -> float:
        place = next(place for place in self._places if who in place.members)
        return max(1.0, (1 + sum(self._works(member) for member in place.members - {who})) / place.cores)

    def _works(self, member: str) -> bool:
        if member == CLIENT:
            return self._client_until > asyncio.get_running_loop().time()
        return self.cluster.engines[member].core.step_s > 0


class SharedCore(Core):
    host: Host
    engine: str

    def _begin_decodes(self, now: float, steps: int) -> None:
        # What others do changes soon.
        super()._begin_decodes(now, min(steps, 4))

    def _set_steps(self, steps: int, now: float, slowest: float, last: float, own: float, last_own: float) -> None:
        factor = self.host.slowdown(self.engine)
        self._shared *= factor
        super()._set_steps(steps, now, factor * slowest, factor * last, factor * own, factor * last_own)


class SharedEngine(SimulatedEngine):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        if self.core.role is not Role.DECODE:
            await self._cluster.host.client()
        async with aclosing(super().generate(request)) as stream:
            async for chunk in stream:
                yield chunk


class SharedCluster(SimulatedCluster):
    def __init__(self, profile: Profile, model: PseudoModel, host: Host, kv_store: bool) -> None:
        # A mixed embedded engine decodes once between two chunks of prompts.
        super().__init__(profile, profile, model, prefill_every=1, stream_s=1.0, kv_store=kv_store)
        self.host = host
        host.cluster = self

    def start(self, name: str, role: Role) -> SimulatedEngine:
        engine = self.engines[name] = SharedEngine(name, role, self)
        return engine

    def core(self, engine: SimulatedEngine, role: Role, version: int) -> Core:
        core = super().core(engine, role, version)
        core.__class__ = SharedCore
        core.host, core.engine = self.host, engine.name
        return core


def simulate(batch: Batch, profile: Profile, host: Host) -> Figures:
    return clock.run(_simulate(batch, profile, host))


async def _simulate(batch: Batch, profile: Profile, host: Host) -> Figures:
    config = batch.config
    rollout, max_context = config.rollout, config.model.max_context
    workload = read_workload(batch.directory, config.seed, max_context)
    model = PseudoModel(workload)
    cluster = SharedCluster(profile, model, host, config.cluster.kv_store_tokens > 0)
    engines = [cluster.start(*instance) for instance in instance_roles(config).items()]
    with tempfile.TemporaryDirectory() as directory, RunRecorder(directory) as recorder:
        control = build_control(config, engines, cluster, [recorder], None)
        await control.start()
        prewarmed = rollout.groups * rollout.group_size
        environment = simulated_environment(model, workload, prewarmed=prewarmed, max_context=max_context)
        sampler = Sampler(questions(workload, workload.questions), rollout.group_size, config.seed)
        start = asyncio.get_running_loop().time()
        async with Controller(control, environment, sampler, Plan(rollout.groups)) as controller:
            await controller.batch()
            seconds = asyncio.get_running_loop().time() - start
        await control.stop()
        cluster.check()
        recorder.close()
        return Figures(seconds, trajectory_seconds(Path(directory)), cluster.statistics.itl.percentile(0.5))


# The comparison.


async def roll_out(directory: Path, rounds: int, alone: bool) -> tuple[Profile, dict[str, list[Batch]]]:
    batches: dict[str, list[Batch]] = {name: [] for name in CONFIGS}
    async with Machine(directory, alone) as machine:
        profile = await machine.profile()
        for seed in range(rounds + 1):
            for name, several in batches.items():
                several.append(await machine.batch(name, seed))
    return profile, batches


def compare(profile: Profile, batches: dict[str, list[Batch]], alone: bool) -> None:
    print("| | | real | simulated | difference | each batch | client, ms a turn | others |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (fitted, *tested) in batches.items():
        pairs = [
            (batch.figures, simulate(batch, profile, Host(placements(batch.config, alone), fitted.client_s)))
            for batch in tested
        ]
        others = f"{fmean(batch.others for batch in tested):.0%}"
        for key, unit, words in FIGURES:
            reals, simulated = ([unit * getattr(pair[side], key) for pair in pairs] for side in (0, 1))
            ratios = [s / r for r, s in zip(reals, simulated, strict=True)]
            print(
                f"| {name} | {words} | {median(reals):.2f} | {median(simulated):.2f} | {median(ratios) - 1:+.1%} "
                f"| {min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%} | {1000 * fitted.client_s:.1f} | {others} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--keep", help="directory for the runs and the profile; the default is a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(arguments.keep or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        profile, batches = asyncio.run(roll_out(directory, arguments.rounds, arguments.alone))
        compare(profile, batches, arguments.alone)


if __name__ == "__main__":
    main()
