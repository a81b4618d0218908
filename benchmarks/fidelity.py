"""What the comparisons of a simulation with the run that it simulates share: batches rolled out for real, the same
trajectories simulated on a profile, and the table of both. `fidelity_embedded.py` and `fidelity_sglang.py` are the commands.

A simulation is given the trajectories (their lengths, and how long their tools took) by the trace of the real run.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from prorsa.assembly import build_control, build_environment, build_task, instance_roles
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.observers import TurnRecord
from prorsa.config import Config, dump_config
from prorsa.engines.protocol import Engine
from prorsa.lifecycle import Done, Sampled, read_trace
from prorsa.profiles.profile import Profile
from prorsa.report.measures import inter_token_latencies
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import TRACE, read_run
from prorsa.rollout.controller import Controller, Plan
from prorsa.rollout.sampler import Sampler
from prorsa.rollout.sandboxes.pool import SandboxPool
from prorsa.simulation import clock
from prorsa.simulation.engines.cluster import SimulatedCluster
from prorsa.simulation.measure import Facts, Limits, kv_bytes_of, measure, write_profile
from prorsa.simulation.workloads.environment import questions, simulated_environment
from prorsa.simulation.workloads.pseudo_model import PseudoModel
from prorsa.simulation.workloads.replay import read_workload

FIGURES = {
    "rollout": (1, "rollout, s"),
    "trajectory": (1, "mean trajectory, s"),
    "turn": (1000, "mean turn, ms"),
    "first_token": (1000, "mean time to first token, ms"),
    "latency": (1000, "inter-token latency p50, ms"),
}
"""Field of `Figures` -> (its unit in seconds is 1 / this, words)."""
MakeCluster = Callable[[PseudoModel], SimulatedCluster]
"""Called on the simulation's event loop."""


@dataclass(frozen=True)
class Figures:
    """Of one batch, seconds."""

    rollout: float
    trajectory: float
    """Mean, from sampling to reward."""
    turn: float
    """Mean, from the ready queue to the last token."""
    first_token: float
    """Mean, from the ready queue to the first token."""
    latency: float
    """Inter-token, the median."""


@dataclass(frozen=True)
class Batch:
    """As it was rolled out for real."""

    directory: Path
    config: Config
    figures: Figures
    client_s: float
    """CPU time of this process and of its tools for a turn."""
    others: float
    """Share of the machine that processes had which have no part in the rollout."""


# The real runs.


def raise_priority(pid: int) -> None:
    """Over everything in other sessions: the scheduler shares the cores between sessions first. 0 is this process."""
    (Path("/proc") / (str(pid) if pid else "self") / "autogroup").write_text("-19")


async def measured_profile(engines: Sequence[Engine], limits: Limits, path: Path, model_path: str) -> Profile:
    """As `prorsa profile` does it."""
    measured = await measure(engines, limits, lambda what: None)
    facts = Facts("arithmetic", "CPU", 1, kv_bytes_of(model_path), "this benchmark", 1.0)
    return write_profile(path, measured, limits, facts)


async def roll_out(
    config: Config, engines: Sequence[Engine], pids: Sequence[int], pool: SandboxPool, directory: Path
) -> Batch:
    """As a step of `prorsa rollout`, but its sandboxes are there before it begins and none is started during it: to start
    one takes a core as long as to generate a trajectory does. `pids` are the engines' processes."""
    rollout = config.rollout
    await _fill(pool, rollout.groups * rollout.group_size)
    asked = build_task(config).questions(rollout.split, config.task.train_questions, config.seed)

    async def batch(control: ControlPlane) -> None:
        sampler = Sampler(asked, rollout.group_size, config.seed)
        async with Controller(control, build_environment(config, pool), sampler, Plan(rollout.groups)) as controller:
            await controller.batch()

    return await recorded(config, engines, pids, directory, batch, [worker.process.pid for worker in pool._ready])


async def recorded(
    config: Config,
    engines: Sequence[Engine],
    pids: Sequence[int],
    directory: Path,
    work: Callable[[ControlPlane], Awaitable[object]],
    sandboxes: Sequence[int] = (),
) -> Batch:
    """Whatever `work` asks of the control plane; by its end all `sandboxes` (their processes) have ended."""
    with RunRecorder(directory, dump_config(config)) as recorder:
        control = build_control(config, engines, None, [recorder], None)
        await control.start()
        usage = _Usage(pids, sandboxes)
        await work(control)
        usage.stop()
        await control.stop()
    turns = read_run(directory).turns
    figures = _figures(directory, turns, usage.seconds, inter_token_latencies(turns).overall_p50)
    return Batch(directory, config, figures, usage.client / len(turns), usage.others)


async def _fill(pool: SandboxPool, count: int) -> None:
    pool.prewarmed = count
    async with pool.sandbox():
        """Whoever takes one wakes the refill."""
    while pool.ready < count:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    pool.prewarmed = 0


class _Usage:
    """Of CPU time, from now until `stop`, by when all `sandboxes` have ended."""

    def __init__(self, engines: Sequence[int], sandboxes: Sequence[int]) -> None:
        self._engines = engines
        self._started = sum(map(_cpu_seconds, sandboxes))
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
            sum(map(_cpu_seconds, self._engines)),
        )


def _cpu_seconds(pid: int) -> float:
    """Of all threads that live; finer than the ticks of the process's `stat`."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _figures(directory: Path, turns: Sequence[TurnRecord], seconds: float, latency: float) -> Figures:
    return Figures(
        rollout=seconds,
        trajectory=_trajectory_seconds(directory),
        turn=fmean(turn.arrivals[-1] - turn.ready for turn in turns),
        first_token=fmean(turn.arrivals[0] - turn.ready for turn in turns),
        latency=latency,
    )


def _trajectory_seconds(directory: Path) -> float:
    begun: dict[str, float] = {}
    seconds = []
    for event in read_trace(directory / TRACE):
        if isinstance(event, Sampled):
            begun[event.trajectory] = event.time
        elif isinstance(event, Done):
            seconds.append(event.time - begun[event.trajectory])
    return fmean(seconds)


# The simulation.


def simulate(batch: Batch, make_cluster: MakeCluster) -> Figures:
    """The trajectories of a batch again."""
    return clock.run(_simulate(batch, make_cluster))


async def _simulate(batch: Batch, make_cluster: MakeCluster) -> Figures:
    config = batch.config
    rollout, max_context = config.rollout, config.model.max_context
    workload = read_workload(batch.directory, config.seed, max_context)
    model = PseudoModel(workload)
    cluster = make_cluster(model)
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
        turns = read_run(directory).turns
        return _figures(Path(directory), turns, seconds, cluster.statistics.itl.percentile(0.5))


# The comparison.


def print_header() -> None:
    print("| | | real | simulated | difference | each batch | client, ms a turn | others |")
    print("|---|---|---|---|---|---|---|---|")


def print_rows(
    name: str, pairs: Sequence[tuple[Batch, Figures]], shown: Iterable[str], client_s: float | None = None
) -> None:
    """Medians over batches and their simulations."""
    others = f"{fmean(batch.others for batch, _ in pairs):.0%}"
    client = fmean(batch.client_s for batch, _ in pairs) if client_s is None else client_s
    for figure in shown:
        unit, words = FIGURES[figure]
        reals = [unit * getattr(batch.figures, figure) for batch, _ in pairs]
        simulated = [unit * getattr(figures, figure) for _, figures in pairs]
        ratios = [s / r for r, s in zip(reals, simulated, strict=True)]
        print(
            f"| {name} | {words} | {median(reals):.2f} | {median(simulated):.2f} | {median(ratios) - 1:+.1%} "
            f"| {min(ratios) - 1:+.0%} to {max(ratios) - 1:+.0%} | {1000 * client:.1f} | {others} |"
        )
