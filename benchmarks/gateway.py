"""What the gateway adds to a request, and how many streams it carries, beside other ways to the same engines.

    OMP_NUM_THREADS=1 python benchmarks/gateway.py [--router PYTHON] [--streams 1000] [--seconds 20]

Part one: engines that answer at once in the gateway's own process, one client at a time, and 64 at once, with answers of one
token: the time a request takes beside a turn that is asked of the control plane directly.

Part two: stand-in engines (`standin.py`), clients, and what is measured, each in a process of its own. A client is an
agent: it streams `/v1/chat/completions`, and each turn of its trajectory sends the conversation so far. The engines give a
token every `interval` seconds, so that a request takes a known time; it is late by what it takes beyond. The same clients
go straight to the engines, through the gateway, and, with `--router`, through sglang-router in front of as many prefill and
decode engines: PYTHON is an interpreter that has it (`pip install sglang-router==0.3.2`, in an environment of its own). CPU
time and memory are those of the process in between, all its threads, as /proc has them; memory is what it has grown by
since it was idle.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, cast
from urllib.request import urlopen

import aiohttp
import standin
import uvloop

from prorsa.allocation import PrefillSpeed, Static
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.router import Limits
from prorsa.cluster.turns import TurnRequest
from prorsa.config import parse_config
from prorsa.engines.protocol import Chunk, Engine, EngineInfo, FinishReason, GenerateRequest, Load, Role, SamplingParams
from prorsa.engines.sglang import SGLangEngine
from prorsa.forecast import LifecycleForecaster
from prorsa.gateway.live import LiveView
from prorsa.gateway.metrics import Metrics
from prorsa.gateway.serve import run_server
from prorsa.gateway.server import Gateway, listening
from prorsa.lifecycle import Done, RewardStarted, Sampled
from prorsa.report.recorder import RunRecorder
from prorsa.rollout.tokenizer import ChatTokenizer

MODEL = Path(__file__).parents[1] / "models" / "arithmetic"
PREFILL, DECODE = 4, 12
PROMPT = "Compute 7 + 5. " * 40
ASKED = 400
"""Requests of one measurement in part one."""
TURNS = 4
"""Of a trajectory in part two."""
TOKENS = 16
"""Of an answer in part two."""
INTERVALS = (0.5, 0.05)
"""Seconds from a token to the next in part two: a load that everybody carries, and one that nobody may."""
START_SECONDS = 60.0
COLUMNS = ("", "requests/s", "first token", "late, ms", "request", "late, ms", "CPU: ms", "us", "% of", "KiB")
UNITS = ("", "", "median", "p99", "median", "p99", "a request", "a token", "a core", "a stream")
WIDTHS = ("<14", ">14", ">13", ">10", ">10", ">10", ">11", ">9", ">8", ">10")
"""Of the table of part two."""


class TrivialEngine:
    """Gives its tokens at once."""

    bootstrap_host, bootstrap_port = "h", 1
    tells_progress = False

    def __init__(self, name: str, role: Role) -> None:
        self.name = name
        self.role = role
        self.roles = frozenset(Role)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self.role is Role.PREFILL:
            yield Chunk((), (), 0, 0, FinishReason.LENGTH)
            return
        last = request.sampling.max_new_tokens - 1
        for index in range(last + 1):
            yield Chunk((40 + index % 50,), (-1.0,), 0, 0, FinishReason.LENGTH if index == last else None)

    async def abort(self, rid: str | None = None) -> None: ...

    async def load(self) -> Load:
        return Load(0, 0, 0, standin.ENOUGH)

    async def info(self) -> EngineInfo:
        return EngineInfo(self.role, 0, "trivial")

    async def switch_role(self, role: Role) -> None: ...

    async def update_weights(self, path: str, version: int) -> None: ...

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None: ...


# The gateway's process.


async def serve(ports: Sequence[int]) -> None:
    """Prints its URL, then answers each line of its input with what a turn costs that is asked of the control plane.

    The engines are those at `ports`; trivial ones where there are none.
    """
    config = parse_config(
        {
            "model": {"path": str(MODEL), "max_context": 16384},
            "cluster": {"kv_tokens": 1 << 20},
            "gateway": {"port": 0, "max_requests": 4000, "idle_timeout": 5.0},
        }
    )
    metrics, live, tokenizer = Metrics(), LiveView("benchmark"), ChatTokenizer(MODEL)
    connector = aiohttp.TCPConnector(limit=0)
    with tempfile.TemporaryDirectory() as run_dir, RunRecorder(run_dir) as recorder:
        async with aiohttp.ClientSession(connector=connector) as http:
            engines: list[Engine] = [
                SGLangEngine(f"e{i}", f"http://127.0.0.1:{port}", "127.0.0.1", 1, http) for i, port in enumerate(ports)
            ]
            roles = [Role.PREFILL] * PREFILL + [Role.DECODE] * DECODE
            control = ControlPlane(
                engines or [TrivialEngine(f"e{i}", role) for i, role in enumerate(roles)],
                forecaster=LifecycleForecaster(None, 1e6),
                policy=Static(PREFILL, DECODE),
                speed=PrefillSpeed(1e6),
                horizon=10.0,
                observers=[recorder, metrics, live],
                limits=Limits(prefill_slots=64, decode_slots=4096),
            )
            await control.start()
            gateway = Gateway(control, config, tokenizer, "arithmetic", "t" * 32, metrics, live)
            async with listening(gateway, "127.0.0.1", 0) as url:
                print(url, flush=True)
                loop = asyncio.get_running_loop()
                while await loop.run_in_executor(None, sys.stdin.readline):
                    print(await _direct(control, tokenizer), flush=True)
            await control.stop()


async def _direct(control: ControlPlane, tokenizer: ChatTokenizer) -> float:
    """Median seconds of a turn of one token, asked of the control plane."""
    now, seconds = asyncio.get_running_loop().time, []
    prompt = tuple(tokenizer.encode(PROMPT))
    for number in range(ASKED):
        name, start = f"direct-{number}", now()
        control.apply(Sampled(start, name, name, "direct"))
        await control.generate(TurnRequest(name, 0, prompt, SamplingParams(1)))
        control.apply(RewardStarted(now(), name, len(prompt) + 1))
        control.apply(Done(now(), name, 0.0, True))
        seconds.append(now() - start)
    return median(seconds)


# Processes, from here.


class Process:
    """One that prints a line when it is ready, and ends with its input."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        self.said = self._line()

    def ask(self) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._line()

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def cpu_seconds(pid: int) -> float:
    """Of all threads, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@dataclass(frozen=True, slots=True)
class Way:
    """Where clients send their requests; `pid` is the process in between, None where there is none."""

    name: str
    urls: tuple[str, ...]
    pid: int | None


@contextmanager
def straight(interval: float) -> Iterator[Way]:
    engines = Process(standin.__file__, f"--engines={DECODE}", "--prefill=0", f"--interval={interval}")
    try:
        yield Way("engines alone", tuple(f"http://127.0.0.1:{port}" for port in json.loads(engines.said)), None)
    finally:
        engines.close()


@contextmanager
def disaggregated(interval: float) -> Iterator[list[int]]:
    engines = Process(
        standin.__file__, f"--engines={PREFILL + DECODE}", f"--prefill={PREFILL}", f"--interval={interval}"
    )
    try:
        yield json.loads(engines.said)
    finally:
        engines.close()


@contextmanager
def through_gateway(interval: float) -> Iterator[Way]:
    with disaggregated(interval) as ports:
        gateway = Process(__file__, "--serve", *map(str, ports))
        try:
            yield Way("gateway", (gateway.said,), gateway.pid)
        finally:
            gateway.close()


@contextmanager
def through_router(python: str, interval: float) -> Iterator[Way]:
    with disaggregated(interval) as ports, tempfile.TemporaryFile() as log:
        own, metrics = free_port(), free_port()
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        command = [python, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--log-level=error"]
        command += ["--host=127.0.0.1", f"--port={own}", "--prometheus-host=127.0.0.1", f"--prometheus-port={metrics}"]
        command += ["--worker-startup-check-interval=1", f"--model-path={MODEL}"]
        for url in urls[:PREFILL]:
            command += ["--prefill", url, "1"]
        for url in urls[PREFILL:]:
            command += ["--decode", url]
        router = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(router, own, log)
            yield Way("sglang-router", (f"http://127.0.0.1:{own}",), router.pid)
        finally:
            router.terminate()
            router.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(router: subprocess.Popen[bytes], port: int, log: Any) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not answers(f"http://127.0.0.1:{port}/readiness"):
        if router.poll() is not None or time.monotonic() > deadline:
            log.seek(0)
            raise SystemExit(f"sglang-router does not serve:\n{log.read().decode()}")
        time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5.0):
            return True
    except OSError:
        return False


# Part one.


async def requests(url: str, http: aiohttp.ClientSession, at_once: int) -> tuple[float, float]:
    """(median seconds of a request, requests/s)."""
    seconds: list[float] = []

    async def client(count: int) -> None:
        for _ in range(count):
            start = perf_counter()
            async with http.post(url + "/v1/completions", json={"prompt": PROMPT, "max_tokens": 1}) as response:
                assert response.status == 200, await response.text()
                await response.json()
            seconds.append(perf_counter() - start)

    start = perf_counter()
    await asyncio.gather(*(client(ASKED // at_once) for _ in range(at_once)))
    return median(seconds), len(seconds) / (perf_counter() - start)


async def overhead() -> None:
    server = Process(__file__, "--serve")
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await requests(server.said, http, 8)
            before = cpu_seconds(server.pid)
            alone, _ = await requests(server.said, http, 1)
            busy, rate = await requests(server.said, http, 64)
            cpu = (cpu_seconds(server.pid) - before) / (2 * ASKED)
            direct = float(server.ask())
    finally:
        server.close()
    print(f"a turn of one token, asked of the control plane   {1000 * direct:8.2f} ms")
    print(f"the same as an HTTP request, one at a time        {1000 * alone:8.2f} ms")
    print(f"64 at once                                        {1000 * busy:8.2f} ms, {rate:.0f} requests/s")
    print(f"CPU time of the gateway's process a request       {1000 * cpu:8.2f} ms\n")


# Part two.


class Client(asyncio.Protocol):
    """One connection, one request at a time. HTTP is as much of it as the answers need that are measured here."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._done: asyncio.Future[None] | None = None
        self.first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"connection lost ({exc}) after {b''.join(self._parts)[-500:]!r}"))

    def data_received(self, data: bytes) -> None:
        if not self.first and b"data: " in data:
            self.first = perf_counter()
        self._parts.append(data)
        if data.endswith(b"0\r\n\r\n") and self._done is not None:
            self._done.set_result(None)

    async def ask(self, body: Any) -> tuple[float, float, bytes]:
        """(seconds to the first token, seconds to the end, the answer)."""
        self._parts, self.first, self._done = [], 0.0, self._loop.create_future()
        written = json.dumps(body).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
        start = perf_counter()
        self.transport.write(head + b"Content-Length: %d\r\n\r\n" % len(written) + written)
        await self._done
        return self.first - start, perf_counter() - start, b"".join(self._parts)


def check(answer: bytes) -> None:
    """That it is whole. Raises AssertionError."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), answer[:500]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    *events, done, nothing = body.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b""), body
    choices = [choice for event in events for choice in json.loads(event[6:])["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == standin.TEXT * TOKENS, body


@dataclass(slots=True)
class Watched:
    """What came within the time that counts."""

    first: list[float]
    """Lateness of first tokens and of ends, seconds."""
    end: list[float]
    counting: bool = False
    over: bool = False


async def agent(number: int, url: str, interval: float, wait: float, watched: Watched) -> None:
    """Trajectories one after another until it is over."""
    host, _, port = url.removeprefix("http://").partition(":")
    _, client = await asyncio.get_running_loop().create_connection(Client, host, int(port))
    await asyncio.sleep(wait)
    trajectory = 0
    while not watched.over:
        messages = [{"role": "user", "content": f"{number}.{trajectory}: {PROMPT}"}]
        for turn in range(TURNS):
            body = {"model": "arithmetic", "messages": messages, "max_tokens": TOKENS, "stream": True, "temperature": 0}
            first, end, answer = await client.ask(body)
            if trajectory == turn == 0:
                check(answer)
            assert answer.startswith(b"HTTP/1.1 200"), answer[:500]
            if watched.counting:
                watched.first.append(first - interval)
                watched.end.append(end - TOKENS * interval)
            if watched.over:
                break
            messages += [
                {"role": "assistant", "content": standin.TEXT * TOKENS},
                {"role": "user", "content": f"Result {turn}: {PROMPT[:150]}"},
            ]
        trajectory += 1
    client.transport.close()


async def load(way: Way, streams: int, interval: float, seconds: float) -> None:
    """Streams begin spread over the time that one takes, run for that time once more, and then count."""
    once = TOKENS * interval
    empty = rss(way.pid) if way.pid else 0
    watched = Watched([], [])
    urls = way.urls
    agents = [
        asyncio.create_task(agent(i, urls[i % len(urls)], interval, once * i / streams, watched))
        for i in range(streams)
    ]
    watching = asyncio.create_task(_watch(way, watched, 2 * once, seconds))
    _, (cpu, took, full) = await asyncio.gather(asyncio.gather(*agents), watching)
    due = streams / once
    answered = len(watched.end)
    (first, late_first), (end, late_end) = map(_cuts, (watched.first, watched.end))
    cells = [way.name, f"{answered / took:.0f} of {due:.0f}"]
    cells += [f"{milliseconds:.1f}" for milliseconds in (first, late_first, end, late_end)]
    if way.pid:
        cells += [f"{1000 * cpu / answered:.2f}", f"{1e6 * cpu / answered / TOKENS:.0f}", f"{100 * cpu / took:.0f}"]
        cells.append(f"{(full - empty) / streams / 1024:.0f}")
    print(row(cells), flush=True)


def row(cells: Sequence[str]) -> str:
    return "".join(f"{cell:{width}}" for cell, width in zip(cells, WIDTHS, strict=False))


async def _watch(way: Way, watched: Watched, wait: float, seconds: float) -> tuple[float, float, int]:
    """(CPU seconds, seconds, RSS) of the time that counts."""
    await asyncio.sleep(wait)
    watched.counting, start, before = True, perf_counter(), cpu_seconds(way.pid) if way.pid else 0.0
    await asyncio.sleep(seconds)
    watched.counting, took = False, perf_counter() - start
    cpu = cpu_seconds(way.pid) - before if way.pid else 0.0
    watched.over = True
    return cpu, took, rss(way.pid) if way.pid else 0


def _cuts(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile, ms."""
    cuts = quantiles(seconds, n=100)
    return 1000 * cuts[49], 1000 * cuts[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", metavar="PYTHON", help="interpreter that has sglang-router; compare with it")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0, help="that count, of each measurement of part two")
    parser.add_argument("--only", metavar="NAME", help="measure this way of part two alone")
    parser.add_argument("--serve", type=int, nargs="*", metavar="PORT", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.serve is not None:
        run_server(serve(parsed.serve))
        return
    assert ChatTokenizer(MODEL).decode([standin.TOKEN]) == standin.TEXT
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}\n")
    if not parsed.only:
        asyncio.run(overhead())
    for interval in INTERVALS:
        print(f"{parsed.streams} streams at once of {TOKENS} tokens, one every {1000 * interval:g} ms")
        print(row(COLUMNS), row(UNITS), sep="\n")
        ways = [straight(interval), through_gateway(interval)]
        if parsed.router:
            ways.append(through_router(parsed.router, interval))
        for opened in ways:
            with opened as way:
                if not parsed.only or parsed.only in way.name:
                    uvloop.run(load(way, parsed.streams, interval, parsed.seconds))
        print()


if __name__ == "__main__":
    main()
