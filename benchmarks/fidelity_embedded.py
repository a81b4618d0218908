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

from fidelity import Batch, Figures, measured_profile, print_header, print_rows, raise_priority, roll_out, simulate

from prorsa.assembly import build_launcher, instance_roles
from prorsa.config import Config, load_config
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import Chunk, Engine, GenerateRequest, Role
from prorsa.profiles.profile import Profile
from prorsa.rollout.sandboxes.pool import SandboxPool
from prorsa.simulation.engines.cluster import SimulatedCluster, SimulatedEngine
from prorsa.simulation.engines.core import Core
from prorsa.simulation.measure import Limits
from prorsa.simulation.workloads.pseudo_model import PseudoModel

CONFIG = Path(__file__).parents[1] / "examples" / "demo.yaml"
CONFIGS = {
    "one mixed engine": ["policy.name=colocated", "cluster.instances=1"],
    "1 prefill, 1 decode": ["policy.name=static", "policy.split='1:1'", "cluster.instances=2"],
    "four engines (the demo)": [],
}
SHOWN = ("rollout", "trajectory", "latency")
CLIENT = "client"


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
        launcher = build_launcher(config, self._directory / "logs" / name)
        assert isinstance(launcher, EmbeddedLauncher)
        self._launchers[name] = launcher
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
        return await measured_profile(
            self._engines["profile"], limits, self._directory / "profile.yaml", config.model.path
        )

    async def batch(self, name: str, seed: int) -> Batch:
        config = self._configs[name].model_copy(update={"seed": seed})
        launcher = self._launchers[name]
        self._place(config, launcher)
        pids = [launcher.pid(instance) for instance in instance_roles(config)]
        return await roll_out(config, self._engines[name], pids, self._pool, self._directory / f"{name} {seed}")

    def _place(self, config: Config, launcher: EmbeddedLauncher) -> None:
        if not self._alone:
            return
        first = 0
        for placement in placements(config, alone=True):
            cores = set(range(first, first + placement.cores))
            first += placement.cores
            for member in placement.members:
                os.sched_setaffinity(0 if member == CLIENT else launcher.pid(member), cores)


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


# The comparison.


async def real_runs(directory: Path, rounds: int, alone: bool) -> tuple[Profile, dict[str, list[Batch]]]:
    batches: dict[str, list[Batch]] = {name: [] for name in CONFIGS}
    async with Machine(directory, alone) as machine:
        profile = await machine.profile()
        for seed in range(rounds + 1):
            for name, several in batches.items():
                several.append(await machine.batch(name, seed))
    return profile, batches


def simulated(batch: Batch, profile: Profile, alone: bool, client_s: float) -> Figures:
    host = Host(placements(batch.config, alone), client_s)
    kv_store = batch.config.cluster.kv_store_tokens > 0
    return simulate(batch, lambda model: SharedCluster(profile, model, host, kv_store))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--keep", help="directory for the runs and the profile; the default is a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(arguments.keep or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        profile, batches = asyncio.run(real_runs(directory, arguments.rounds, arguments.alone))
        print_header()
        for name, (fitted, *tested) in batches.items():
            client_s = fitted.client_s
            pairs = [(batch, simulated(batch, profile, arguments.alone, client_s)) for batch in tested]
            print_rows(name, pairs, SHOWN, client_s)


if __name__ == "__main__":
    main()
