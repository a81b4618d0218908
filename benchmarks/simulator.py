"""How fast the simulator is: beside Dynamo's replay, with more trajectories, and on a cluster of the paper's size.

    python benchmarks/simulator.py peers [--dynamo PYTHON]
    python benchmarks/simulator.py growth [--live 256 512 1024 2048 4096] [--scenario deepseek-v3.2-general-agent]
    python benchmarks/simulator.py paper [--live 512 2048] [--scenario deepseek-v3.2-general-agent]

`peers` has two loads. Requests: 20,000 of 2,048 prompt and 256 output tokens, 8 a second, on one mixed instance and on one
prefill and one decode instance. Sessions: 512 at once, of 20 turns with 512 output tokens each and 3 s between them, on 16
instances; prompts have 1,024 tokens, and ours grow with the session, Dynamo's do not. PYTHON is that of an environment with
`ai-dynamo==1.4.0`. `growth` and `paper` are rollouts of a shipped scenario.

All times are CPU seconds of the simulation without the start of the program (Dynamo's: what a replay takes more than one of
a single request), because other work on the machine stretches those of the clock. `peers` gives the least of `--repeat`
runs.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
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

from prorsa.allocation import Colocated, PrefillSpeed, Static
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.manager import HealthLimits
from prorsa.cluster.router import Limits
from prorsa.cluster.turns import TurnRequest
from prorsa.engines.protocol import Bootstrap, Engine, FinishReason, GenerateRequest, Role, SamplingParams
from prorsa.forecast import LifecycleForecaster
from prorsa.lifecycle.events import Done, RewardStarted, Sampled
from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import load_profile
from prorsa.rollout.controller import Controller, Plan
from prorsa.rollout.sampler import Sampler
from prorsa.simulation import clock, scenario
from prorsa.simulation.engines.cluster import SimulatedCluster, SimulatedEngine
from prorsa.simulation.engines.core import Core, StepTimes
from prorsa.simulation.engines.ranks import Job
from prorsa.simulation.engines.statistics import Ledger, Statistics
from prorsa.simulation.run import run_scenario
from prorsa.simulation.workloads.environment import questions, simulated_environment
from prorsa.simulation.workloads.models import RequestsWorkload
from prorsa.simulation.workloads.pseudo_model import STOP, PseudoModel
from prorsa.simulation.workloads.scripts import Script, TurnScript, Workload
from prorsa.simulation.workloads.tokens import Span

REQUESTS, PROMPT, OUTPUT, RATE = 20_000, 2048, 256, 8.0
"""The last three: tokens, tokens, requests a second."""
SESSIONS, TURNS = 512, 20
TURN = TurnScript(512, "tool", 3.0, 512)
SPEED = 100_000.0
"""Profiled prefill speed, tokens/s; no decision depends on it, as the policies here are fixed."""
SCENARIOS = Path(scenario.__file__).parent / "scenarios"
KV_BLOCKS = 65_536
"""Of a Dynamo worker, 64 tokens each."""

Layout = tuple[int, int, int]
"""Mixed, prefill and decode instances."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("peers", "growth", "paper"))
    parser.add_argument("--dynamo", metavar="PYTHON", help="interpreter of an environment with ai-dynamo")
    parser.add_argument("--profiles", nargs="+", default=["qwen3-235b-h200-ep4", "deepseek-v3.2-h200-ep16"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--live", type=int, nargs="+", help="trajectories that run at once")
    parser.add_argument("--scenario", default="deepseek-v3.2-general-agent")
    parser.add_argument("--policy", default="adaptive")
    arguments = parser.parse_args()
    match arguments.what:
        case "peers":
            peers(arguments)
        case "growth":
            rollouts(arguments.live or [256, 512, 1024, 2048, 4096], 1, arguments.scenario, arguments.policy)
        case "paper":
            rollouts(arguments.live or [512, 2048], 3, arguments.scenario, arguments.policy)


def peers(arguments: argparse.Namespace) -> None:
    print("| simulator | load | instances | turns | CPU s | turns/CPU s |")
    print("|---|---|---|---|---|---|")

    def row(name: str, load: str, layout: Layout, turns: int, measure: Callable[[Layout], float]) -> None:
        seconds = min(measure(layout) for _ in range(arguments.repeat))
        mixed, prefill, decode = layout
        instances = f"{mixed} mixed" if mixed else f"{prefill} prefill, {decode} decode"
        print(f"| {name} | {load} | {instances} | {turns:,} | {seconds:.2f} | {turns / seconds:,.0f} |", flush=True)

    for layout in ((1, 0, 0), (0, 1, 1)):
        for profile in arguments.profiles:
            if layout == (1, 0, 0):
                row(
                    f"Prorsa, model of an engine, {profile}",
                    "requests",
                    layout,
                    REQUESTS,
                    partial(model_alone, profile),
                )
            for name, run in (("engines alone", engines_alone), ("control plane", control_plane)):
                row(f"Prorsa, {name}, {profile}", "requests", layout, REQUESTS, partial(simulate, run, profile))
        if arguments.dynamo:
            row("Dynamo replay", "requests", layout, REQUESTS, partial(replay_requests, arguments.dynamo))
    for layout in ((16, 0, 0), (0, 8, 8)):
        for profile in arguments.profiles:
            row(
                f"Prorsa, rollout, {profile}", "sessions", layout, SESSIONS * TURNS, partial(simulate, rollout, profile)
            )
        if arguments.dynamo:
            row("Dynamo replay", "sessions", layout, SESSIONS * TURNS, partial(replay_sessions, arguments.dynamo))


# Ours.


def simulate(run: Callable[[str, Layout], Coroutine[Any, Any, None]], profile: str, layout: Layout) -> float:
    gc.collect()
    start = time.process_time()
    clock.run(run(profile, layout))
    return time.process_time() - start


def world(
    profile: str, layout: Layout, workload: Workload
) -> tuple[SimulatedCluster, list[SimulatedEngine], PseudoModel]:
    loaded, model = load_profile(profile), PseudoModel(workload)
    cluster = SimulatedCluster(loaded, loaded, model)
    roles = [
        role for role, count in zip((Role.MIXED, Role.PREFILL, Role.DECODE), layout, strict=True) for _ in range(count)
    ]
    return cluster, [cluster.start(f"engine-{index}", role) for index, role in enumerate(roles)], model


def plane(cluster: SimulatedCluster, engines: list[SimulatedEngine], layout: Layout) -> ControlPlane:
    profile = cluster.prefill
    _, prefill, decode = layout
    return ControlPlane(
        engines,
        forecaster=LifecycleForecaster(None, SPEED),
        policy=Static(prefill, decode) if prefill else Colocated(),
        speed=PrefillSpeed(SPEED),
        horizon=10.0,
        limits=Limits(prefill_slots=4 * profile.ranks, decode_slots=profile.ranks * profile.max_running),
        health_limits=HealthLimits(interval=60.0),
    )


def sampling(request: int) -> SamplingParams:
    return SamplingParams(OUTPUT, stop_token_ids=(STOP,), seed=request)


def arrival_times() -> list[float]:
    """The gaps between them are exponential."""
    times: list[float] = np.cumsum(np.random.default_rng(0).exponential(1 / RATE, REQUESTS)).tolist()
    return times


async def arrivals(serve: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    """Serve each request when it comes."""
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as running:
        for request, at in enumerate(arrival_times()):
            await asyncio.sleep(at - loop.time())
            running.create_task(serve(request))


def model_alone(profile: str, layout: Layout) -> float:
    """What a simulated engine is without the event loop and its protocol: a list of requests, as the peers have it."""
    loaded, statistics, ledger, ended = load_profile(profile), Statistics(), Ledger(), []

    def report(job: Job, finish: FinishReason | None) -> None:
        if finish is not None:
            ledger.streamed += core.generated(job)
            ended.append(job)

    core = Core(
        loaded,
        StepTimes(StepCosts(loaded)),
        Role.MIXED,
        version=0,
        store=None,
        statistics=statistics,
        ledger=ledger,
        changed=lambda: None,
        prefill_every=0,
        stream_s=math.inf,
    )
    gc.collect()
    start = time.process_time()
    for number, at in enumerate(arrival_times()):
        core.advance(at)
        job = Job(
            trajectory=f"r{number}",
            question=number,
            prompt=PROMPT,
            target=OUTPUT,
            first_prompt=PROMPT,
            report=report,
            handover=None,
        )
        core.prefill(job, at)
    while core.due < math.inf:
        core.advance(core.due)
    seconds = time.process_time() - start
    core.check()
    ledger.check(statistics, 0, 0, 0)
    if len(ended) != REQUESTS or statistics.decoded_tokens != REQUESTS * OUTPUT:
        raise SystemExit(f"{len(ended)} of {REQUESTS} requests ended, with {statistics.decoded_tokens} tokens")
    return seconds


async def engines_alone(profile: str, layout: Layout) -> None:
    """The requests go straight to the engines."""
    cluster, engines, _ = world(profile, layout, RequestsWorkload(PROMPT, OUTPUT))
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

    await arrivals(serve)
    check(cluster, REQUESTS * OUTPUT)


async def control_plane(profile: str, layout: Layout) -> None:
    """Each request is a trajectory of one turn, with its events, forecasts and decisions."""
    cluster, engines, _ = world(profile, layout, RequestsWorkload(PROMPT, OUTPUT))
    control = plane(cluster, engines, layout)
    now = asyncio.get_running_loop().time

    async def serve(number: int) -> None:
        name = f"r{number}"
        await control.record(Sampled(now(), name, name, "requests"))
        result = await control.generate(TurnRequest(name, 0, Span(number + 1, PROMPT), sampling(number)))
        await control.record(RewardStarted(now(), name, PROMPT + len(result.token_ids)))
        await control.record(Done(now(), name, 1.0, True))

    await control.start()
    await arrivals(serve)
    await control.stop()
    check(cluster, REQUESTS * OUTPUT)


class Sessions:
    """Implements `Workload`."""

    name = "sessions"
    questions: int | None = None

    def script(self, question: int, seed: int) -> Script:
        return Script(2 * TURN.appended_tokens, (TURN,) * (TURNS - 1) + (TurnScript(TURN.output_tokens),))


async def rollout(profile: str, layout: Layout) -> None:
    """The whole of production: controller, episodes, tools and control plane."""
    workload = Sessions()
    cluster, engines, model = world(profile, layout, workload)
    control = plane(cluster, engines, layout)
    environment = simulated_environment(model, workload, prewarmed=SESSIONS, max_context=1 << 17)
    await control.start()
    sampler = Sampler(questions(workload, SESSIONS), 1, 0)
    async with Controller(control, environment, sampler, Plan(SESSIONS)) as controller:
        await controller.batch()
    await control.stop()
    check(cluster, SESSIONS * TURNS * TURN.output_tokens)


def check(cluster: SimulatedCluster, tokens: int) -> None:
    cluster.check()
    made = cluster.statistics.decoded_tokens
    if made != tokens:
        raise SystemExit(f"{made} tokens were decoded, the load has {tokens}")


# Dynamo's.


def replay_requests(python: str, layout: Layout) -> float:
    load = ["--input-tokens", PROMPT, "--output-tokens", OUTPUT, "--request-rate", RATE]
    return replay(python, layout, REQUESTS, load)


def replay_sessions(python: str, layout: Layout) -> float:
    load = ["--input-tokens", 2 * TURN.appended_tokens, "--output-tokens", TURN.output_tokens]
    load += [
        "--turns-per-session",
        TURNS,
        "--inter-turn-delay-ms",
        1000 * TURN.tool_s,
        "--replay-concurrency",
        SESSIONS,
    ]
    return replay(python, layout, SESSIONS, load)


def replay(python: str, layout: Layout, requests: int, load: list[Any]) -> float:
    def seconds(count: int) -> float:
        with tempfile.TemporaryDirectory() as directory:
            command = [python, "-m", "dynamo.replay", "--replay-mode", "offline", "--request-count", count, *load]
            command += [*workers(layout), "--report-json", Path(directory) / "report.json"]
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "DYN_LOG": "error"}
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(list(map(str, command)), env=environment, capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return seconds(requests) - min(seconds(1) for _ in range(3))


def workers(layout: Layout) -> list[str]:
    mixed, prefill, decode = layout
    blocks = {"num_gpu_blocks": KV_BLOCKS}
    if mixed:
        return ["--num-workers", str(mixed), "--extra-engine-args", json.dumps(blocks)]
    return [
        *(
            "--prefill-engine-args",
            json.dumps({"worker_type": "prefill"} | blocks),
            "--num-prefill-workers",
            str(prefill),
        ),
        *("--decode-engine-args", json.dumps({"worker_type": "decode"} | blocks), "--num-decode-workers", str(decode)),
    ]


# Growth.


def rollouts(live: list[int], steps: int, name: str, policy: str) -> None:
    path = SCENARIOS / f"{name}.yaml"
    group = scenario.load_scenario(path).rollout.group_size
    print(f"{name}, {policy}:\n")
    print("| trajectories at once | steps | turns | virtual time, s | CPU time, s | CPU time a turn, us |")
    print("|---|---|---|---|---|---|")
    for count in live:
        chosen = scenario.load_scenario(path, [f"rollout.groups={count // group}", f"rollout.steps={steps}"])
        gc.collect()
        start = time.process_time()
        outcome = run_scenario(chosen, policy)
        seconds = time.process_time() - start
        cells = f"{outcome.live_max:,} | {steps} | {outcome.turns:,} | {outcome.seconds:,.0f}"
        print(f"| {cells} | {seconds:.1f} | {seconds / outcome.turns * 1e6:.0f} |", flush=True)


if __name__ == "__main__":
    main()
