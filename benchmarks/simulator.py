"""How fast the simulator is: beside Dynamo's replay, with more trajectories, and on a cluster of the paper's size.

    python benchmarks/simulator.py peers [--dynamo PYTHON] [--requests 20000]
    python benchmarks/simulator.py growth [--live 256 512 1024 2048 4096]
    python benchmarks/simulator.py paper [--live 512 2048]

`peers`: requests of 2,048 prompt and 256 output tokens, 8 a second, on one mixed instance and on one prefill and one decode
instance. PYTHON is that of an environment with `ai-dynamo==1.4.0`. `growth` and `paper` are rollouts of a shipped scenario.

All times are CPU seconds of the simulation without the start of the program (Dynamo's: what a replay takes more than one of
a single request), because other work on the machine stretches those of the clock. `peers` gives the least of `--repeat`
runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prorsa.allocation import Colocated, Policy, PrefillSpeed, Static
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.manager import HealthLimits
from prorsa.cluster.router import Limits
from prorsa.cluster.turns import TurnRequest
from prorsa.engines.protocol import Bootstrap, Engine, GenerateRequest, Role, SamplingParams
from prorsa.forecast import LifecycleForecaster
from prorsa.lifecycle.events import Done, RewardStarted, Sampled
from prorsa.simulation import clock, scenario
from prorsa.simulation.cluster import SimulatedCluster
from prorsa.simulation.model import STOP, PseudoModel
from prorsa.simulation.profile import load_profile
from prorsa.simulation.run import run_scenario
from prorsa.simulation.tokens import Span
from prorsa.simulation.workloads import RequestsWorkload

PROMPT, OUTPUT, RATE = 2048, 256, 8.0
"""Tokens, tokens, requests a second."""
SPEED = 100_000.0
"""Profiled prefill speed, tokens/s; no decision depends on it, as the policies here are fixed."""
SCENARIO = Path(scenario.__file__).parent / "scenarios" / "deepseek-v3.2-coding-agent.yaml"
GROUP = 32
DYNAMO = ("--input-tokens", str(PROMPT), "--output-tokens", str(OUTPUT), "--request-rate", str(RATE))
DYNAMO_LAYOUT = {
    "mixed": ("--num-workers", "1"),
    "1P1D": (
        *("--prefill-engine-args", json.dumps({"worker_type": "prefill", "num_gpu_blocks": 16384})),
        *("--decode-engine-args", json.dumps({"worker_type": "decode", "num_gpu_blocks": 16384})),
        *("--num-prefill-workers", "1", "--num-decode-workers", "1"),
    ),
}
LAYOUT = {"mixed": (Role.MIXED,), "1P1D": (Role.PREFILL, Role.DECODE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("peers", "growth", "paper"))
    parser.add_argument("--dynamo", metavar="PYTHON", help="interpreter of an environment with ai-dynamo")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--profiles", nargs="+", default=["qwen3-235b-h200-ep4", "deepseek-v3.2-h200-ep16"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--live", type=int, nargs="+", help="trajectories that run at once")
    parser.add_argument("--policy", default="adaptive")
    arguments = parser.parse_args()
    match arguments.what:
        case "peers":
            peers(arguments)
        case "growth":
            rollouts(arguments.live or [256, 512, 1024, 2048, 4096], steps=1, policy=arguments.policy)
        case "paper":
            rollouts(arguments.live or [512, 2048], steps=3, policy=arguments.policy)


def peers(arguments: argparse.Namespace) -> None:
    requests = arguments.requests
    ways: dict[str, Callable[[str], float]] = {}
    for profile in arguments.profiles:
        ways[f"Prorsa, engines alone, {profile}"] = partial(simulate, engines_alone, profile, requests)
        ways[f"Prorsa, control plane, {profile}"] = partial(simulate, control_plane, profile, requests)
    if arguments.dynamo:
        ways["Dynamo replay"] = partial(replay, arguments.dynamo, requests)
    print(f"{requests:,} requests:\n")
    print("| simulator | instances | CPU s | requests/CPU s |")
    print("|---|---|---|---|")
    for layout in LAYOUT:
        for name, measure in ways.items():
            seconds = min(measure(layout) for _ in range(arguments.repeat))
            print(f"| {name} | {layout} | {seconds:.2f} | {requests / seconds:,.0f} |", flush=True)


def simulate(
    run: Callable[[str, str, int], Coroutine[Any, Any, None]], profile: str, requests: int, layout: str
) -> float:
    gc.collect()
    start = time.process_time()
    clock.run(run(profile, layout, requests))
    return time.process_time() - start


def world(layout: str, profile: str) -> tuple[SimulatedCluster, list[Engine]]:
    loaded = load_profile(profile)
    cluster = SimulatedCluster(loaded, loaded, PseudoModel(RequestsWorkload(PROMPT, OUTPUT)))
    return cluster, [cluster.start(f"engine-{index}", role) for index, role in enumerate(LAYOUT[layout])]


def sampling(request: int) -> SamplingParams:
    return SamplingParams(OUTPUT, stop_token_ids=(STOP,), seed=request)


async def arrivals(requests: int, serve: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Serve each request when it comes; the gaps between them are exponential."""
    times = np.cumsum(np.random.default_rng(0).exponential(1 / RATE, requests))
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as running:
        for request, at in enumerate(times.tolist()):
            await asyncio.sleep(at - loop.time())
            running.create_task(serve(request))


async def engines_alone(profile: str, layout: str, requests: int) -> None:
    """The requests go straight to the engines."""
    cluster, engines = world(layout, profile)
    host = engines[0].bootstrap_host

    async def leg(engine: Engine, request: GenerateRequest) -> None:
        async for _ in engine.generate(request):
            pass

    async def serve(number: int) -> None:
        bootstrap = None if len(engines) == 1 else Bootstrap(host, 1, number)
        request = GenerateRequest(f"r{number}.0.0", Span(number + 1, PROMPT), sampling(number), bootstrap)
        prefills = [asyncio.create_task(leg(engine, request)) for engine in engines[:-1]]
        await leg(engines[-1], request)
        for prefill in prefills:
            await prefill

    await arrivals(requests, serve)
    _check(cluster, requests)


async def control_plane(profile: str, layout: str, requests: int) -> None:
    """Each request is a trajectory of one turn: the path of production, with its events, forecasts and decisions."""
    cluster, engines = world(layout, profile)
    loaded = cluster.prefill
    policy: Policy = Colocated() if layout == "mixed" else Static(1, 1)
    control = ControlPlane(
        engines,
        forecaster=LifecycleForecaster(None, SPEED),
        policy=policy,
        speed=PrefillSpeed(SPEED),
        horizon=10.0,
        limits=Limits(prefill_slots=4 * loaded.ranks, decode_slots=loaded.ranks * loaded.max_running),
        health_limits=HealthLimits(interval=60.0),
    )
    now = asyncio.get_running_loop().time

    async def serve(number: int) -> None:
        name = f"r{number}"
        await control.record(Sampled(now(), name, name, "requests"))
        result = await control.generate(TurnRequest(name, 0, Span(number + 1, PROMPT), sampling(number)))
        await control.record(RewardStarted(now(), name, PROMPT + len(result.token_ids)))
        await control.record(Done(now(), name, 1.0, True))

    await control.start()
    await arrivals(requests, serve)
    await control.stop()
    _check(cluster, requests)


def _check(cluster: SimulatedCluster, requests: int) -> None:
    cluster.check()
    assert cluster.statistics.decoded_tokens == requests * OUTPUT


def replay(python: str, requests: int, layout: str) -> float:
    return _replay(python, requests, layout) - min(_replay(python, 1, layout) for _ in range(3))


def _replay(python: str, requests: int, layout: str) -> float:
    with tempfile.TemporaryDirectory() as directory:
        command = [python, "-m", "dynamo.replay", *DYNAMO, "--request-count", str(requests), *DYNAMO_LAYOUT[layout]]
        command += ["--replay-mode", "offline", "--report-json", str(Path(directory) / "report.json")]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "DYN_LOG": "warn"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=environment, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rollouts(live: list[int], steps: int, policy: str) -> None:
    print("| trajectories at once | steps | turns | virtual time, s | CPU time, s | CPU time a turn, us |")
    print("|---|---|---|---|---|---|")
    for count in live:
        chosen = scenario.load_scenario(SCENARIO, [f"rollout.groups={count // GROUP}", f"rollout.steps={steps}"])
        gc.collect()
        start = time.process_time()
        outcome = run_scenario(chosen, policy)
        seconds = time.process_time() - start
        cells = f"{outcome.live_max:,} | {steps} | {outcome.turns:,} | {outcome.seconds:,.0f}"
        print(f"| {cells} | {seconds:.1f} | {seconds / outcome.turns * 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
