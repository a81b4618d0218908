"""A process without descriptors cannot ask an engine, and must not take that for the engine's death."""

from __future__ import annotations

import subprocess
import sys

ASKS = """
import asyncio, os, resource
from prorsa.engines.protocol import OwnLimit
from prorsa.engines.sglang import SGLangEngine

async def main():
    async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as nobody:
        port = nobody.sockets[0].getsockname()[1]
    engine = SGLangEngine("e", f"http://127.0.0.1:{port}", "127.0.0.1", 1)
    assert not await engine.healthy(), "nobody listens there"
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
    for ask in (engine.healthy, engine.load, engine.abort):
        try:
            await ask()
        except OwnLimit:
            continue
        raise AssertionError(ask)
    for descriptor in taken:
        os.close(descriptor)
    assert not await engine.healthy()
    await engine.close()

asyncio.run(main())
"""


def test_without_descriptors_an_engine_is_not_gone() -> None:
    asked = subprocess.run([sys.executable, "-c", ASKS], check=False, capture_output=True, text=True, timeout=60)
    assert (asked.returncode, asked.stderr) == (0, "")
