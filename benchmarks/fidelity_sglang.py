"""How far a simulation is from the run that it simulates: a real SGLang engine on this machine's CPU is profiled (`prorsa
profile`), trajectories of several turns are rolled out on it, and the same trajectories simulated on that profile.

    python benchmarks/fidelity_sglang.py [--rounds 4] [--keep DIRECTORY]

The simulation is given the trajectories (their lengths, and how long their tools took) and the profile; nothing is fitted to
the runs. The engine's scheduler, which computes, has a core of its own; the engine's other processes, the rollout's and its
tools share the next one. Both have raised priority, which takes root. `others` is the share of the machine that other
processes had nevertheless.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sglang_engines"))
from fidelity import (
    Batch,
    Figures,
    measured_profile,
    print_header,
    print_rows,
    raise_priority,
    recorded,
    roll_out,
    simulate,
)
from sglang_bench import SESSIONS, session

from prorsa.assembly import build_launcher, instance_roles
from prorsa.cluster.control import ControlPlane
from prorsa.config import load_config
from prorsa.engines.sglang_server.launcher import SGLangLauncher
from prorsa.profiles.profile import Profile
from prorsa.rollout.sandboxes.pool import SandboxPool
from prorsa.simulation.engines.cluster import SimulatedCluster
from prorsa.simulation.measure import Limits

CONFIG = Path(__file__).parents[1] / "examples" / "sglang.yaml"
MIXED = ["policy.name=colocated", "cluster.instances=1", "rollout.steps=1", "cluster.max_running=16"]
TASKS = {"16 of the task": MIXED, "32 of the task": [*MIXED, "rollout.groups=8"]}
"""Rollouts of the configuration's task; the second one wants twice as many slots as the engine has."""
SCRIPTED = {"16 scripted": [*MIXED, f"rollout.groups={SESSIONS}", "rollout.group_size=1"]}
"""Longer ones, whose tools do nothing: `sglang_bench.session`."""
MAX_CONTEXT = 1024
"""Tokens up to which the engine is measured; these trajectories stay below."""
SHOWN = ("rollout", "trajectory", "turn", "first_token", "latency")


def engine_processes(leader: int) -> dict[int, str]:
    """The processes of an engine, which are one group, by id, and how they call themselves."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and os.getpgid(int(entry.name)) == leader:
            found[int(entry.name)] = (entry / "cmdline").read_text()
    return found


def place(engines: Sequence[int]) -> None:
    """The scheduler of each engine on a core of its own, the rest of the engines and this process on the next one."""
    schedulers = [pid for leader in engines for pid, name in engine_processes(leader).items() if "scheduler" in name]
    others = [0, *(pid for leader in engines for pid in engine_processes(leader) if pid not in schedulers)]
    cores = os.cpu_count() or 1
    for pid in [*schedulers, *others]:
        core = min(schedulers.index(pid) if pid in schedulers else len(schedulers), cores - 1)
        for task in Path(f"/proc/{pid or 'self'}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})
    for leader in (0, *engines):
        raise_priority(leader)


async def real_runs(directory: Path, rounds: int) -> tuple[Profile, dict[str, list[Batch]]]:
    configs = {name: load_config(CONFIG, changes) for name, changes in (TASKS | SCRIPTED).items()}
    batches: dict[str, list[Batch]] = {name: [] for name in configs}
    config = next(iter(configs.values()))
    launcher = build_launcher(config, directory / "logs")
    assert isinstance(launcher, SGLangLauncher)
    try:
        roles = instance_roles(config)
        engines = [await launcher.start(*instance) for instance in roles.items()]
        leaders = [launcher.pid(name) for name in roles]
        place(leaders)
        limits = Limits(MAX_CONTEXT, config.cluster.prefill_chunk, config.cluster.max_running, rounds=3)
        profile = await measured_profile(engines, limits, directory / "profile.yaml", config.model.path)
        pids = [pid for leader in leaders for pid in engine_processes(leader)]
        async with SandboxPool(max(c.rollout.groups * c.rollout.group_size for c in configs.values())) as pool:
            for seed in range(rounds):
                for name, unseeded in configs.items():
                    config, run_dir = unseeded.model_copy(update={"seed": seed}), directory / f"{name} {seed}"
                    if name in TASKS:
                        batch = await roll_out(config, engines, pids, pool, run_dir)
                    else:
                        batch = await recorded(config, engines, pids, run_dir, partial(scripted, seed))
                    batches[name].append(batch)
    finally:
        await launcher.close()
    return profile, batches


async def scripted(seed: int, control: ControlPlane) -> None:
    await asyncio.gather(*(session(control, number) for number in range(seed * SESSIONS, (seed + 1) * SESSIONS)))


def simulated(batch: Batch, profile: Profile) -> Figures:
    # SGLang prefills whatever waits before it decodes again.
    return simulate(batch, lambda model: SimulatedCluster(profile, profile, model, stream_s=1.0, kv_store=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--keep", help="directory for the runs and the profile; the default is a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(arguments.keep or temporary)
        directory.mkdir(parents=True, exist_ok=True)
        profile, batches = asyncio.run(real_runs(directory, arguments.rounds))
        print_header()
        for name, several in batches.items():
            print_rows(name, [(batch, simulated(batch, profile)) for batch in several], SHOWN)


if __name__ == "__main__":
    main()
