"""Minutes of faults at once: is anything lost, is a token wrong, does memory grow?

    sudo python benchmarks/soak.py [--seconds 600] [--seed 0]

Two jobs run side by side, and both write to one small disk, a tmpfs that root mounts:

- `prorsa serve` with agents that speak OpenAI's interface, greedily. Every answer is compared with the first answer to the
  same conversation.
- One `prorsa rollout` after the other, greedily, in which some tool calls are replaced by attacks on the machine
  (`sandbox_attacks.py`). `prorsa verify` compares every turn of every rollout with one engine that nothing happened to.

Meanwhile an engine is killed every 15 s, sandboxes are killed, bodies that are too large, broken or never end are sent to
the gateway, and once the disk is full for 20 s. The table at the end says what happened; the exit status is 1 where
anything was lost, wrong or left behind, or where the gateway's memory grew.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from openai_agent import TASK, client_of, converse
from sandbox_attacks import Targets, cases

from prorsa import commands
from prorsa.config import load_config
from prorsa.report.rundir import read_trajectories
from prorsa.rollout.episode import Environment
from prorsa.rollout.sandboxes.base import Sandbox
from prorsa.rollout.tools.base import Tool

ROOT = Path(__file__).parents[1]
PRORSA = [sys.executable, "-m", "prorsa.cli"]
DISK_MB = 192
KILL_EVERY = 15.0
SANDBOX_KILL_EVERY = 5.0
BODY_EVERY = 4.0
SAMPLE_EVERY = 5.0
DISK_FULL = 20.0
"""Seconds for which nothing can be written."""
AGENTS = 8
QUESTIONS = 32
ATTACKS = 0.25
"""Share of the rollouts' tool calls that are replaced by an attack."""
STEPS, GROUPS = 4, 8
"""Of one rollout; a group has four members."""
GROWTH = 1.15
"""Most that the gateway's memory may grow, from the second fifth of the run to its last."""


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """What must not have happened."""
    memory: list[float] = field(default_factory=list)
    """MB of the gateway's process, one sample every `SAMPLE_EVERY`."""
    descriptors: list[int] = field(default_factory=list)
    room: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while something can be written: no run can begin on a full disk."""

    def wrong(self, what: str) -> None:
        self.faults.append(what)
        print(f"WRONG: {what}", flush=True)


# The rollout whose tool calls are hostile; it runs in a process of its own.


class Hostile:
    """A `Tool` in whose place some calls are attacks on this process and on what it records."""

    def __init__(self, tool: Tool, run_dir: Path, seed: int) -> None:
        self.name = tool.name
        self._tool = tool
        self._random = random.Random(seed)
        self._attacks = cases(seed, Targets((os.getpid(),), (str(run_dir), str(run_dir / "trace"), __file__)))

    async def use(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        if self._random.random() < ATTACKS:
            arguments = {"code": next(self._attacks)}
        return await self._tool.use(arguments, sandbox)


def hostile_rollout(run_dir: Path, seed: int) -> None:
    build = commands.build_environment

    def environment(*arguments: Any) -> Environment:
        built = build(*arguments)
        return replace(built, tools={name: Hostile(tool, run_dir, seed) for name, tool in built.tools.items()})

    commands.build_environment = environment
    overrides = [f"rollout.steps={STEPS}", f"rollout.groups={GROUPS}", f"seed={seed}", "sandbox.timeout=2.0"]
    asyncio.run(commands.rollout(load_config(ROOT / "examples" / "check.yaml", overrides), run_dir))


# The two jobs.


@contextmanager
def small_disk() -> Iterator[Path]:
    """A tmpfs of `DISK_MB`. Raises `SystemExit` where this user may not mount one."""
    with tempfile.TemporaryDirectory(prefix="prorsa-soak-") as place:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "prorsa-soak", place]
        if subprocess.run(mount, check=False).returncode:
            raise SystemExit("soak: a small disk is mounted for this, which takes root; run it with sudo")
        try:
            yield Path(place)
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)


@asynccontextmanager
async def serving(disk: Path, tally: Tally) -> AsyncIterator[tuple[str, int]]:
    """The gateway's URL and process id; it is ended in order at the end."""
    overrides = [f"run_dir={disk}", "gateway.port=0", "sampling.temperature=0.0", "policy.horizon=0.5"]
    process = await asyncio.create_subprocess_exec(
        *PRORSA,
        "serve",
        str(ROOT / "examples" / "serve.yaml"),
        *overrides,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    try:
        url = ""
        while not url:
            line = (await process.stdout.readline()).decode()
            if not line:
                raise SystemExit("soak: the gateway did not start")
            url = next((word for word in line.split() if word.startswith("http://")), "")
        drain = asyncio.create_task(process.stdout.read())
        yield url, process.pid
        process.send_signal(signal.SIGTERM)
        await process.wait()
        await drain
        if process.returncode:
            tally.wrong(f"the gateway ended with status {process.returncode}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def agents(url: str, tally: Tally, until: float, seed: int) -> None:
    """Conversations over and over; each answer has to be the first one to the same words."""
    first: dict[str, list[int]] = {}
    draw = random.Random(seed)

    async def agent(number: int) -> None:
        client = client_of(url)
        while time.monotonic() < until:
            question = TASK.questions("test", QUESTIONS, 0)[draw.randrange(QUESTIONS)]
            messages: list[Any] = list(question.messages)
            try:
                said = await converse(client, messages, stream=number % 2 == 0)
            except Exception as error:
                tally.wrong(f"an agent got {type(error).__name__}: {error}")
                continue
            words = question.id
            for message, ids in said:
                expected = first.setdefault(words, ids)
                if ids != expected:
                    tally.wrong(f"an answer of {question.id} has {len(ids)} tokens that differ from {len(expected)}")
                words += json.dumps(message, sort_keys=True)
                tally.counts["turns of agents"] += 1
            tally.counts["conversations"] += 1
        await client.close()

    await asyncio.gather(*(agent(number) for number in range(AGENTS)))


async def rollouts(disk: Path, tally: Tally, until: float, seed: int) -> list[Path]:
    """One rollout after the other; their run directories."""
    done: list[Path] = []
    while time.monotonic() < until:
        await tally.room.wait()
        run_dir = disk / f"rollout-{len(done)}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--rollout", str(run_dir), "--seed", str(seed + len(done)), cwd=ROOT
        )
        tally.counts["rollouts"] += 1
        if await process.wait():
            tally.wrong(f"{run_dir.name} ended with status {process.returncode}")
        done.append(run_dir)
    return done


# What happens to them.


async def kill_engines(tally: Tally, draw: random.Random) -> None:
    while True:
        await asyncio.sleep(KILL_EVERY)
        await kill_one("prorsa.engines.embedded.server", "engines killed", tally, draw)


async def kill_sandboxes(tally: Tally, draw: random.Random) -> None:
    while True:
        await asyncio.sleep(SANDBOX_KILL_EVERY)
        await kill_one("sandboxes/runner.py", "sandboxes killed", tally, draw)


async def kill_one(command: str, what: str, tally: Tally, draw: random.Random) -> None:
    ours = await asyncio.to_thread(descendants, os.getpid(), command)
    if ours:
        os.kill(draw.choice(ours), signal.SIGKILL)
        tally.counts[what] += 1


async def fill_disk(disk: Path, tally: Tally, after: float) -> None:
    """Full for `DISK_FULL` seconds, once."""
    await asyncio.sleep(after)
    filler = disk / "filler"
    end = time.monotonic() + DISK_FULL
    tally.room.clear()
    with filler.open("wb", buffering=0) as file:
        while time.monotonic() < end:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                tally.counts["times that the disk was filled"] += 1
            await asyncio.sleep(0.2)
    filler.unlink()
    tally.room.set()


async def send_bodies(url: str, tally: Tally) -> None:
    """Bodies that no gateway should work on; each is refused, and the gateway goes on answering."""
    chat = {"model": "arithmetic", "max_tokens": 4}
    text = "Compute 7 + 5. "

    def message(content: str) -> bytes:
        return json.dumps(chat | {"messages": [{"role": "user", "content": content}]}).encode()

    bodies: list[tuple[str, bytes, dict[str, str]]] = [
        ("chat/completions", message(text * 70_000), {}),
        ("chat/completions", message("7" * 7_900_000), {}),
        ("chat/completions", message(text * 700_000), {}),
        ("chat/completions", gzip.compress(bytes(200 << 20)), {"Content-Encoding": "gzip"}),
        ("chat/completions", b"\x1f\x8b corrupt", {"Content-Encoding": "gzip"}),
        ("chat/completions", b'{"messages":' + b"[" * 100_000, {}),
        ("completions", json.dumps(chat | {"prompt": "7", "stop_token_ids": [1] * 500_000}).encode(), {}),
        ("../prorsa/events", b'[{"event":"done","trajectory":"nobody","reward":NaN}]', {}),
    ]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as http:
        while True:
            for path, body, headers in bodies:
                await asyncio.sleep(BODY_EVERY)
                asked = {"Content-Type": "application/json"} | headers
                async with http.post(f"{url}/v1/{path}", data=body, headers=asked) as answer:
                    if not 400 <= answer.status < 500:
                        tally.wrong(f"a body of {len(body)} bytes for {path} was answered {answer.status}")
                tally.counts["bodies refused"] += 1
                async with http.get(f"{url}/health") as answer:
                    if answer.status not in (200, 503):
                        tally.wrong(f"/health was {answer.status}")


async def half_open(url: str, tally: Tally) -> None:
    """Connections that begin a request and never end it."""
    host, port = url.removeprefix("http://").split(":")
    while True:
        opened = [socket.create_connection((host, int(port))) for _ in range(50)]
        for connection in opened:
            connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nX-a: ")
            tally.counts["requests that never end"] += 1
        await asyncio.sleep(20.0)
        for connection in opened:
            connection.close()


async def sample(pid: int, tally: Tally) -> None:
    while True:
        await asyncio.sleep(SAMPLE_EVERY)
        memory, descriptors = measured(pid)
        tally.memory.append(memory)
        tally.descriptors.append(descriptors)


def measured(pid: int) -> tuple[float, int]:
    """Resident memory of a process in MB, and its open files."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir(f"/proc/{pid}/fd"))


def descendants(root: int, command: str) -> list[int]:
    """Processes below `root` whose command line has `command`, at any depth."""
    parents: dict[int, int] = {}
    named: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if command in (entry / "cmdline").read_text().replace("\0", " "):
                    named.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile

    def below(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid]
        return pid == root

    return [pid for pid in named if below(pid)]


# The verdict.


def check_rollouts(runs: list[Path], tally: Tally) -> None:
    """Every trajectory recorded once, and every turn equal to one engine without faults."""
    for run_dir in runs:
        names = [record.trajectory for record in read_trajectories(run_dir) if record.dropped is None]
        tally.counts["trajectories of rollouts"] += len(names)
        if len(names) != len(set(names)) or len(names) != STEPS * GROUPS * 4:
            tally.wrong(f"{run_dir.name}: {len(names)} trajectories are recorded, {len(set(names))} of them different")
        verify = [*PRORSA, "verify", str(run_dir)]
        done = subprocess.run(verify, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            tally.wrong(f"{run_dir.name}: {done.stdout}{done.stderr}")
        else:
            tally.counts["turns verified"] += int(done.stdout.split()[0])


def check_memory(tally: Tally) -> None:
    """By the least of each fifth of the run: while a large body is read it is more, and given back a second later."""
    length = max(1, len(tally.memory) // 5)
    least = [min(tally.memory[start : start + length]) for start in range(0, 5 * length, length)]
    print(f"{', '.join(f'{memory:.0f}' for memory in least):>10}  MB of the gateway at least, in each fifth of the run")
    print(f"{max(tally.memory):>10.0f}  MB at most, while large bodies were read")
    print(f"{max(tally.descriptors):>10}  open files of the gateway at most, {tally.descriptors[-1]} at the end")
    if least[-1] > GROWTH * least[1]:
        tally.wrong(f"the gateway's memory grew from {least[1]:.0f} to {least[-1]:.0f} MB")


async def soak(seconds: float, seed: int, disk: Path, tally: Tally) -> list[Path]:
    draw = random.Random(seed)
    until = time.monotonic() + seconds
    tally.room.set()
    async with serving(disk, tally) as (url, pid):
        faults = [
            asyncio.create_task(work)
            for work in (
                kill_engines(tally, draw),
                kill_sandboxes(tally, draw),
                fill_disk(disk, tally, seconds / 3),
                send_bodies(url, tally),
                half_open(url, tally),
                sample(pid, tally),
            )
        ]
        _, runs = await asyncio.gather(agents(url, tally, until, seed), rollouts(disk, tally, until, seed))
        for task in faults:
            task.cancel()
        for error in await asyncio.gather(*faults, return_exceptions=True):
            if isinstance(error, Exception):
                tally.wrong(f"a fault could not be made: {error!r}")
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rollout", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rollout is not None:
        hostile_rollout(asked.rollout, asked.seed)
        return 0
    tally = Tally()
    with small_disk() as disk:
        runs = asyncio.run(soak(asked.seconds, asked.seed, disk, tally))
        left = descendants(os.getpid(), "prorsa")
        if left:
            tally.wrong(f"{len(left)} processes are left")
        check_rollouts(runs, tally)
    for what, count in tally.counts.items():
        print(f"{count:>10}  {what}")
    check_memory(tally)
    print(f"{len(tally.faults):>10}  things that must not have happened")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
