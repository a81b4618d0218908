"""What the gateway adds to a request, and how many streams it carries: trivial engines behind the real control plane.

    OMP_NUM_THREADS=1 python benchmarks/gateway.py [--streams 1000] [--interval 0.1] [--tokens 50]

The gateway, its control plane and engines that give a token whenever it is due run in one process; clients in another.
Part one is one client at a time, and 64 at once, with answers of one token: the time a request takes beside a turn that
is asked of the control plane directly. Part two opens streams at once, each due a token every `interval` seconds: how late
the tokens come, what they cost in CPU time, and what the process grows by for each stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import Any

import aiohttp

from prorsa.allocation import PrefillSpeed, Static
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.router import Limits
from prorsa.cluster.turns import TurnRequest
from prorsa.config import parse_config
from prorsa.engines.protocol import Chunk, EngineInfo, FinishReason, GenerateRequest, Load, Role, SamplingParams
from prorsa.forecast import LifecycleForecaster
from prorsa.gateway.live import LiveView
from prorsa.gateway.metrics import Metrics
from prorsa.gateway.server import Gateway, listening
from prorsa.lifecycle import Done, RewardStarted, Sampled
from prorsa.report.recorder import RunRecorder
from prorsa.rollout.tokenizer import ChatTokenizer

MODEL = Path(__file__).parents[1] / "models" / "arithmetic"
ROLES = [Role.PREFILL] * 4 + [Role.DECODE] * 12
PROMPT = "Compute 7 + 5. " * 40
ASKED = 400
"""Requests of one measurement in part one."""
ENOUGH = 1 << 30


class TrivialEngine:
    """Gives a token every `interval` seconds, at once where that is 0."""

    bootstrap_host, bootstrap_port = "h", 1

    def __init__(self, name: str, role: Role, interval: float) -> None:
        self.name = name
        self.role = role
        self.interval = interval

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self.role is Role.PREFILL:
            yield Chunk((), (), 0, 0, FinishReason.LENGTH)
            return
        loop, last = asyncio.get_running_loop(), request.sampling.max_new_tokens - 1
        due = loop.time()
        for index in range(last + 1):
            due += self.interval
            if (seconds := due - loop.time()) > 0:
                await asyncio.sleep(seconds)
            yield Chunk((40 + index % 50,), (-1.0,), 0, 0, FinishReason.LENGTH if index == last else None)

    async def abort(self, rid: str | None = None) -> None: ...

    async def load(self) -> Load:
        return Load(0, 0, 0, ENOUGH)

    async def info(self) -> EngineInfo:
        return EngineInfo(self.role, 0, "trivial")

    async def switch_role(self, role: Role) -> None: ...

    async def update_weights(self, path: str, version: int) -> None: ...

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None: ...


async def serve(interval: float) -> None:
    """The process under measurement: prints its URL, then answers each line of its input with its CPU time and memory."""
    config = parse_config(
        {
            "model": {"path": str(MODEL), "max_context": 16384},
            "cluster": {"kv_tokens": 1 << 20},
            "gateway": {"port": 0, "max_requests": 20_000, "idle_timeout": 5.0},
        }
    )
    engines = [TrivialEngine(f"e{i}", role, interval) for i, role in enumerate(ROLES)]
    metrics, live, tokenizer = Metrics(), LiveView("benchmark"), ChatTokenizer(MODEL)
    with tempfile.TemporaryDirectory() as run_dir, RunRecorder(run_dir) as recorder:
        control = ControlPlane(
            engines,
            forecaster=LifecycleForecaster(None, 1e6),
            policy=Static(4, 12),
            speed=PrefillSpeed(1e6),
            horizon=2.0,
            observers=[recorder, metrics, live],
            limits=Limits(prefill_slots=64, decode_slots=4096),
        )
        await control.start()
        gateway = Gateway(control, config, tokenizer, "arithmetic", "t" * 32, metrics, live)
        async with listening(gateway, "127.0.0.1", 0) as url:
            print(url, flush=True)
            loop = asyncio.get_running_loop()
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                direct = await _direct(control, tokenizer) if line.strip() == "direct" else 0.0
                usage = resource.getrusage(resource.RUSAGE_SELF)
                print(json.dumps({"cpu": usage.ru_utime + usage.ru_stime, "rss": _rss(), "direct": direct}), flush=True)
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


def _rss() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Server:
    """The other process, from here."""

    def __init__(self, interval: float) -> None:
        command = [sys.executable, __file__, "--serve", str(interval)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    async def ask(self, line: str = "") -> dict[str, float]:
        return await asyncio.to_thread(self._ask, line)

    def _ask(self, line: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate()


async def requests(server: Server, http: aiohttp.ClientSession, at_once: int) -> tuple[float, float]:
    """(median seconds of a request, requests/s)."""
    seconds: list[float] = []

    async def client(count: int) -> None:
        for _ in range(count):
            start = perf_counter()
            await _post(server.url, http, {"prompt": PROMPT, "max_tokens": 1})
            seconds.append(perf_counter() - start)

    start = perf_counter()
    await asyncio.gather(*(client(ASKED // at_once) for _ in range(at_once)))
    return median(seconds), len(seconds) / (perf_counter() - start)


async def _post(url: str, http: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
    async with http.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def stream(url: str, http: aiohttp.ClientSession, tokens: int, interval: float) -> list[float]:
    """How late each token came, seconds after the moment that the first one and the interval let expect."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "stream": True, "return_token_ids": True}
    late: list[float] = []
    first, seen, buffer = 0.0, 0, b""
    async with http.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for data in response.content.iter_any():
            now = perf_counter()
            *events, buffer = (buffer + data).split(b"\n\n")
            for event in events:
                if event != b"data: [DONE]":
                    count = len(json.loads(event[6:])["choices"][0]["token_ids"])
                    first = first or now
                    late += [now - first - (seen + i) * interval for i in range(count)]
                    seen += count
    assert seen == tokens, f"{seen} tokens of {tokens}"
    earliest = min(late)  # the first token may itself have been late
    return [seconds - earliest for seconds in late]


async def overhead() -> None:
    server = Server(0.0)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await requests(server, http, 8)
            before = await server.ask()
            alone, _ = await requests(server, http, 1)
            busy, rate = await requests(server, http, 64)
            after = await server.ask("direct")
    finally:
        server.close()
    # What `direct` itself took is in `after`.
    cpu = (after["cpu"] - before["cpu"] - ASKED * after["direct"]) / (2 * ASKED)
    direct = after["direct"]
    print(f"a turn of one token, asked of the control plane   {1000 * direct:8.2f} ms")
    print(
        f"the same as an HTTP request, one at a time        {1000 * alone:8.2f} ms, {1000 * (alone - direct):.2f} ms more"
    )
    print(f"64 at once                                        {1000 * busy:8.2f} ms, {rate:.0f} requests/s")
    print(f"CPU time of the gateway's process a request       {1000 * cpu:8.2f} ms")


async def streams(count: int, tokens: int, interval: float) -> None:
    server = Server(interval)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            await asyncio.gather(*(stream(server.url, http, 2, interval) for _ in range(8)))
            before = await server.ask()
            start = perf_counter()
            running = [asyncio.create_task(stream(server.url, http, tokens, interval)) for _ in range(count)]
            await asyncio.sleep(0.6 * tokens * interval)
            during = await server.ask()
            late = [seconds for task in running for seconds in await task]
            took = perf_counter() - start
            after = await server.ask()
    finally:
        server.close()
    cuts: Sequence[float] = quantiles(late, n=100)
    print(
        f"\n{count} streams of {tokens} tokens, one every {1000 * interval:g} ms: {count / interval:.0f} tokens/s due"
    )
    print(f"all done after                                    {took:8.2f} s, {tokens * interval:.2f} s are due")
    print(
        f"lateness of a token                               {1000 * cuts[49]:8.2f} ms median, {1000 * cuts[98]:.1f} ms p99"
    )
    print(f"mean rate                                         {len(late) / took:8.0f} tokens/s")
    cpu = (after["cpu"] - before["cpu"]) / len(late)
    print(f"CPU time of the gateway's process a token         {1e6 * cpu:8.1f} us, engines and control plane included")
    print(
        f"memory a stream                                   {(during['rss'] - before['rss']) / count / 1024:8.1f} KiB"
    )
    assert fmean(late) >= 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=50, help="of a stream")
    parser.add_argument("--interval", type=float, default=0.1, help="seconds from a token to the next")
    parser.add_argument("--serve", type=float, metavar="INTERVAL", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.serve is not None:
        asyncio.run(serve(parsed.serve))
        return
    load = os.getloadavg()[0]
    print(
        f"{os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}; {len(ROLES)} trivial engines\n"
    )
    asyncio.run(overhead())
    asyncio.run(streams(parsed.streams, parsed.tokens, parsed.interval))


if __name__ == "__main__":
    main()
