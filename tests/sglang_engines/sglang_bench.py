"""What the tests with real SGLang engines share: engines of one session, an independent reference, multi-turn sessions."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prorsa.allocation import Allocation, Policy, PrefillSpeed, Situation
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.manager import HealthLimits
from prorsa.cluster.switcher import Restarter, SwitchLimits
from prorsa.cluster.turns import TurnRequest
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import Bootstrap, Chunk, EngineBusy, GenerateRequest, Role, SamplingParams
from prorsa.engines.sglang import SGLangEngine
from prorsa.engines.sglang_server.flags import EngineFlags
from prorsa.engines.sglang_server.keeper import die_with_parent
from prorsa.engines.sglang_server.launcher import SGLangLauncher
from prorsa.forecast import LifecycleForecaster
from prorsa.lifecycle.events import Done, RewardStarted, Sampled, ToolStarted

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "arithmetic"
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
LANE = [
    pytest.mark.sglang,
    pytest.mark.skipif(not PYTHON.is_file(), reason="SGLang is not installed here; `make sglang` does it"),
]
LONG = pytest.mark.sglang_long
START_SECONDS, TEST_SECONDS, STOP_SECONDS = 600.0, 300.0, 120.0
"""Far more than anything takes, so that a slow machine fails nothing."""
HANG_SECONDS = 15.0
"""More than a step takes on a slow machine."""
P, D = Role.PREFILL, Role.DECODE
VOCABULARY = 460
_numbers = itertools.count(time.time_ns() % 10**12)
"""Of requests and rooms: no test may meet what another left on the shared engines."""


def flags(model: Path = MODEL, **changes: Any) -> EngineFlags:
    settings: dict[str, Any] = {
        "device": "cpu",
        "kv_tokens": 16384,
        "block_tokens": 16,
        "prefill_chunk": 512,
        "max_running": 32,
        "max_waiting": 64,
        **changes,
    }
    return EngineFlags(str(model), **settings)


@asynccontextmanager
async def launching(
    log_dir: Path, of: EngineFlags | None = None, kv_store_dir: Path | None = None
) -> AsyncIterator[SGLangLauncher]:
    launcher = SGLangLauncher(
        str(PYTHON), of or flags(), start_seconds=START_SECONDS, log_dir=log_dir, kv_store_dir=kv_store_dir
    )
    try:
        async with asyncio.timeout(START_SECONDS + TEST_SECONDS):
            yield launcher
    finally:
        await launcher.close()


@dataclass(frozen=True)
class Served:
    """Engines that a process of `prorsa engines launch` owns. Handles belong to an event loop, so each test makes its own."""

    facts: list[dict[str, Any]]

    @asynccontextmanager
    async def engines(self, *roles: Role) -> AsyncIterator[list[SGLangEngine]]:
        """Handles to the engines, idle and in these roles."""
        handles = [SGLangEngine(f["name"], f["url"], "127.0.0.1", f["bootstrap_port"]) for f in self.facts]
        try:
            async with asyncio.timeout(TEST_SECONDS):
                for engine, role in zip(handles, roles, strict=True):
                    await engine.abort()
                    await become(engine, role)
                yield handles
        finally:
            await asyncio.gather(*(engine.close() for engine in handles))


@contextmanager
def launched(directory: Path) -> Iterator[Served]:
    """Three engines, as `prorsa engines launch` starts them."""
    with command("engines launch", directory, "engines.json", f"model.path={MODEL}") as engines:
        yield Served(json.loads(engines.read_text()))


def _alone() -> None:
    """A test run that is killed must not leave the engines. A shell's background jobs start with SIGINT ignored, and children
    inherit that."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def command(words: str, directory: Path, ready: str, *overrides: str) -> Iterator[Path]:
    """`prorsa WORDS` with the example's three engines, once the file `ready` is in its run directory. Gives that file."""
    environment = (f"sglang.python={PYTHON}", "sglang.device=cpu", f"sglang.start_timeout={START_SECONDS}")
    line = [sys.executable, "-m", "prorsa.cli", *words.split(), str(ROOT / "examples" / "sglang.yaml")]
    line += [f"run_dir={directory}", *environment, *overrides]
    directory.mkdir(exist_ok=True)
    output = directory / "output"
    with (
        output.open("w") as log,
        subprocess.Popen(line, stdout=log, stderr=log, cwd=ROOT, preexec_fn=_alone) as process,  # noqa: PLW1509
    ):
        try:
            while not (found := [path for path in directory.glob(f"*/{ready}") if path.read_text().endswith("\n")]):
                assert process.poll() is None, output.read_text()
                time.sleep(0.2)
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            finally:
                process.kill()


async def become(engine: SGLangEngine, role: Role) -> None:
    await idle(engine)
    while (await engine.info()).role is not role:
        try:
            await engine.switch_role(role)
        except EngineBusy:
            await asyncio.sleep(0.05)


async def idle(engine: SGLangEngine) -> None:
    while not (await engine.load()).idle:  # noqa: ASYNC110 - an engine in another process gives no signal
        await asyncio.sleep(0.02)


def greedy(budget: int) -> SamplingParams:
    return SamplingParams(budget, temperature=0.0)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, length))


def request(
    ids: tuple[int, ...], budget: int, prefill: SGLangEngine | None, sampling: SamplingParams | None = None
) -> GenerateRequest:
    """Greedy unless told otherwise."""
    number = next(_numbers)
    room = None if prefill is None else Bootstrap(prefill.bootstrap_host, prefill.bootstrap_port, number)
    return GenerateRequest(f"test{number}", ids, sampling or greedy(budget), room)


async def leg(engine: SGLangEngine, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


def tokens(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


async def both(prefill: SGLangEngine, decode: SGLangEngine, asked: GenerateRequest) -> tuple[list[Chunk], list[Chunk]]:
    legs = [asyncio.create_task(leg(engine, asked)) for engine in (prefill, decode)]
    try:
        first, second = await asyncio.gather(*legs)
    finally:
        for task in legs:
            task.cancel()
    return first, second


async def disaggregated(
    prefill: SGLangEngine, decode: SGLangEngine, ids: tuple[int, ...], budget: int
) -> tuple[int, ...]:
    return tokens((await both(prefill, decode, request(ids, budget, prefill)))[1])


@asynccontextmanager
async def reference(model: Path, log_dir: Path) -> AsyncIterator[SGLangEngine]:
    """The embedded engine, other code altogether, with a checkpoint."""
    launcher = EmbeddedLauncher(
        str(model),
        kv_tokens=65536,
        block_tokens=16,
        prefill_chunk=512,
        max_running=32,
        max_waiting=64,
        kv_store_tokens=0,
        log_dir=log_dir,
    )
    try:
        yield await launcher.start("reference", Role.MIXED)
    finally:
        await launcher.close()


async def embedded(model: Path, log_dir: Path, ids: tuple[int, ...], budget: int) -> tuple[int, ...]:
    """What the embedded engine generates."""
    async with reference(model, log_dir) as engine:
        return tokens(await leg(engine, request(ids, budget, None)))


class Keep(Policy):
    """A policy that leaves the roles as they are: the test flips."""

    def decide(self, situation: Situation) -> Allocation | None:
        return situation.current


@asynccontextmanager
async def controlled(
    engines: Sequence[SGLangEngine], restarter: Restarter | None = None
) -> AsyncIterator[ControlPlane]:
    control = ControlPlane(
        engines,
        forecaster=LifecycleForecaster(None, 1000.0),
        policy=Keep(),
        speed=PrefillSpeed(1000.0),
        horizon=0.5,
        restarter=restarter,
        switch_limits=SwitchLimits(canary_timeout=60.0),
        health_limits=HealthLimits.within(HANG_SECONDS, START_SECONDS),
    )
    await control.start()
    try:
        yield control
    finally:
        await control.stop()


SESSIONS, TURNS, BUDGET, TOOL_TOKENS = 16, 5, 96, 24


def session_prompt(number: int) -> tuple[int, ...]:
    return prompt(40 + 7 * (number % SESSIONS), seed=number)


def tool_output(number: int, turn: int) -> tuple[int, ...]:
    return prompt(TOOL_TOKENS, seed=1000 + TURNS * number + turn)


async def session(control: ControlPlane, number: int, turns: int = TURNS) -> list[tuple[int, ...]]:
    """A trajectory of several turns, its tools' output scripted; the output of each turn."""
    now, name, context = asyncio.get_running_loop().time, f"s{number}", session_prompt(number)
    await control.record(Sampled(now(), name, group=name, task="t"))
    outputs = []
    for turn in range(turns):
        if turn:
            await control.record(ToolStarted(now(), name, "tool", len(context)))
            await asyncio.sleep(0.05)
            context += tool_output(number, turn)
        result = await control.generate(TurnRequest(name, turn, context, greedy(BUDGET)))
        assert len(result.token_ids) == len(result.logprobs) == len(result.versions)
        outputs.append(result.token_ids)
        context += result.token_ids
    await control.record(RewardStarted(now(), name, len(context)))
    await control.record(Done(now(), name, 1.0, True))
    return outputs


async def undisturbed(model: Path, log_dir: Path, sessions: int, turns: int = TURNS) -> list[list[tuple[int, ...]]]:
    """The outputs of the sessions by the embedded engine alone, each turn's context from the turns before it."""

    async def one(engine: SGLangEngine, number: int) -> list[tuple[int, ...]]:
        context, outputs = session_prompt(number), []
        for turn in range(turns):
            context += tool_output(number, turn) if turn else ()
            outputs.append(tokens(await leg(engine, request(context, BUDGET, None))))
            context += outputs[-1]
        return outputs

    async with reference(model, log_dir) as engine:
        return list(await asyncio.gather(*(one(engine, number) for number in range(sessions))))


def processes_of(pid: int) -> list[int]:
    """The live processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if fields[0] != "Z" and int(fields[2]) == pid:
                found.append(int(entry.name))
    return found


def scheduler_of(pid: int) -> int:
    """Of an engine: the process that computes."""
    (found,) = [
        process for process in processes_of(pid) if b"scheduler" in Path(f"/proc/{process}/cmdline").read_bytes()
    ]
    return found


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
