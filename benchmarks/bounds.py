"""What the gateway does under more than it can serve: a crowd of connections, bodies that are too large, names without end.

    ulimit -n 32768; python benchmarks/bounds.py [--connections 10000] [--trajectories 32000]

The server is that of `gateway.py`, engines that answer at once in its own process, with a context of 16,384 tokens. Part one:
connections that never end the head of their request (as many as are given, half of them idle), then one body after the other
of nearly 8 MiB each, while `/health` is asked every 20 ms on a connection of its own. Per body: the answer, how long it took,
the longest time `/health` took, and the CPU time of the server for all of it. Part two: trajectories that each name a task
of their own, and the memory of the server as they come and go. CPU time and memory are as /proc has them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import aiohttp
from gateway import Process, cpu_seconds, rss

SIZE = 8 * 10**6
AT_ONCE = 16
CHAT, COMPLETIONS, EVENTS = "/v1/chat/completions", "/v1/completions", "/prorsa/events"


def chat(*contents: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content} for content in contents]}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", **fields}).encode()


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """(what it is, where it goes, the body)."""
    yield "a text that cannot fit", CHAT, chat("x" * SIZE)
    yield "a text of 250 kB that might", CHAT, chat("12 " * 83_000)
    yield "a text of escapes", CHAT, b'{"messages":[{"role":"user","content":"' + b"\\n" * (SIZE // 2) + b'"}]}'
    yield "many small messages", CHAT, chat(*["a"] * (SIZE // 40))
    yield "80,000 messages", CHAT, chat(*["a"] * 80_000)
    yield "token ids", COMPLETIONS, completion(prompt=[1] * (SIZE // 3))
    yield "empty lists", COMPLETIONS, completion(prompt=[[]] * (SIZE // 4))
    yield "stop ids", COMPLETIONS, completion(stop_token_ids=[700_000] * (SIZE // 8))
    yield "stop strings", COMPLETIONS, completion(stop=[f"{number:06}" for number in range(SIZE // 10)])
    yield "logit_bias", COMPLETIONS, completion(logit_bias=dict.fromkeys(range(SIZE // 14), 1))
    events = [{"event": "sampled", "trajectory": f"t{number}"} for number in range(20_000)]
    yield "20,000 events", EVENTS, json.dumps(events).encode()


async def crowd(host: str, port: int, count: int) -> list[asyncio.StreamWriter]:
    writers = []
    for number in range(count):
        _, writer = await asyncio.open_connection(host, port)
        if number % 2:
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nX-A: ")
        writers.append(writer)
    return writers


async def ask(http: aiohttp.ClientSession, url: str, body: bytes) -> str:
    try:
        async with http.post(url, data=body, timeout=aiohttp.ClientTimeout(120.0)) as response:
            return f"{response.status} {(await response.text())[:60]}"
    except (TimeoutError, aiohttp.ClientError) as error:
        return type(error).__name__


async def longest_health(http: aiohttp.ClientSession, url: str, over: asyncio.Event) -> float:
    longest = 0.0
    while not over.is_set():
        start = perf_counter()
        async with http.get(url + "/health") as response:
            assert response.status == 200
            await response.read()
        longest = max(longest, perf_counter() - start)
        await asyncio.sleep(0.02)
    return longest


async def overload(server: Process, connections: int, only: str) -> None:
    host, _, port = server.said.removeprefix("http://").partition(":")
    print(f"\n{'body':34}{'answer':64}{'s':>7}{'/health, s':>12}{'CPU, s':>8}{'MB':>6}")
    async with aiohttp.ClientSession() as http, aiohttp.ClientSession() as probe:
        for what, path, body in (one for one in bodies() if only in one[0]):
            writers = await crowd(host, int(port), connections)
            over, start, before = asyncio.Event(), perf_counter(), cpu_seconds(server.pid)
            watching = asyncio.create_task(longest_health(probe, server.said, over))
            await asyncio.sleep(0.2)
            answer = await ask(http, server.said + path, body)
            took = perf_counter() - start - 0.2
            over.set()
            health, cpu = await watching, cpu_seconds(server.pid) - before
            print(
                f"{what:34}{answer[:62]!r:64}{took:7.2f}{health:12.3f}{cpu:8.2f}{rss(server.pid) / 1e6:6.0f}",
                flush=True,
            )
            for writer in writers:
                writer.close()


async def grow(server: Process, trajectories: int, _: str) -> None:
    """Each is sampled, asks once, and is done."""

    async def one(number: int) -> None:
        name = f"grown-{number}"
        for kind in ("sampled", "done"):
            event = {"event": kind, "trajectory": name, "task": f"task-{number}"}
            if kind == "done":
                body = {"prompt": f"{number}: ", "max_tokens": 1, "prorsa": {"trajectory": name}}
                async with http.post(server.said + COMPLETIONS, json=body) as response:
                    assert response.status == 200, await response.text()
            async with http.post(server.said + EVENTS, json=event) as response:
                assert response.status == 200, await response.text()

    print(f"\n{'trajectories':>14}{'MB':>8}\n{0:14}{rss(server.pid) / 1e6:8.0f}")
    async with aiohttp.ClientSession() as http:
        for first in range(0, trajectories, trajectories // 8):
            numbers = iter(range(first, first + trajectories // 8))

            async def client(numbers: Iterator[int] = numbers) -> None:
                for number in numbers:
                    await one(number)

            await asyncio.gather(*(client() for _ in range(AT_ONCE)))
            print(f"{first + trajectories // 8:14}{rss(server.pid) / 1e6:8.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--only", metavar="NAME", default="", help="bodies with this in their name alone")
    parser.add_argument("--trajectories", type=int, default=32_000)
    parsed = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, {hard} open files"
    )
    for part, count in ((overload, parsed.connections), (grow, parsed.trajectories)):
        if count:
            server = Process(str(Path(__file__).with_name("gateway.py")), "--serve")
            try:
                asyncio.run(part(server, count, parsed.only))
            finally:
                server.close()


if __name__ == "__main__":
    main()
