from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_helpers import greedy, launching, prompt, read, request

from prorsa.engines.protocol import EngineError, Role

pytestmark = pytest.mark.engine

PARENT = """
import asyncio, json, sys
from pathlib import Path
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import Role

async def main():
    launcher = EmbeddedLauncher(sys.argv[1], kv_tokens=1024, block_tokens=16, prefill_chunk=64, max_running=4, max_waiting=4,
                                kv_store_tokens=1024, log_dir=Path(sys.argv[2]))
    engines = await asyncio.gather(launcher.start("a", Role.PREFILL), launcher.start("b", Role.DECODE))
    store = launcher._store
    print(json.dumps({
        "pids": [launcher.pid("a"), launcher.pid("b"), store.process.pid],
        "ports": [engine.bootstrap_port for engine in engines] + [int(engine.url.rpartition(":")[2]) for engine in engines]
                 + [store.ports["port"]],
    }), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_parent_leaves_no_process_and_no_socket(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(checkpoint), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        facts = json.loads(parent.stdout.readline())
        assert all(_alive(pid) for pid in facts["pids"])
        assert all(_listening(port) for port in facts["ports"])
        parent.kill()
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in facts["pids"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in facts["pids"] if _alive(pid)] == []
    assert [port for port in facts["ports"] if _listening(port)] == []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_stop_restart_and_close(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            engine = await launcher.start("a", Role.MIXED)
            expected = (await read(engine, request(prompt(20), greedy(5)))).tokens
            with pytest.raises(EngineError, match="a: is running already"):
                await launcher.start("a", Role.MIXED)
            first = launcher.pid("a")
            os.kill(first, signal.SIGKILL)
            engine = await launcher.restart("a", Role.MIXED)
            assert launcher.pid("a") != first
            assert (await read(engine, request(prompt(20), greedy(5)))).tokens == expected
            last = launcher.pid("a")
            await launcher.stop("a")
            assert not _alive(last)
            with pytest.raises(KeyError):
                launcher.pid("a")

    asyncio.run(main())


def test_a_busy_engine_stops_within_the_bound(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            engine = await launcher.start("a", Role.MIXED)
            stream = engine.generate(request(prompt(20), greedy(1900)))
            await anext(stream)
            pid = launcher.pid("a")
            async with asyncio.timeout(4):
                await launcher.stop("a")
            assert not _alive(pid)
            await stream.aclose()

    asyncio.run(main())


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(tmp_path / "no-model", tmp_path / "logs") as launcher:
            with pytest.raises(EngineError, match=r"(?s)engine a: did not start.*no-model"):
                await launcher.start("a", Role.MIXED)

    asyncio.run(main())


def test_an_idle_engine_uses_no_cpu(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            engine = await launcher.start("a", Role.PREFILL)
            assert await engine.healthy()
            before = _cpu_ticks(launcher.pid("a"))
            await asyncio.sleep(1.0)
            assert _cpu_ticks(launcher.pid("a")) - before <= 2

    asyncio.run(main())


def _cpu_ticks(pid: int) -> int:
    """Hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_an_engine_that_cannot_be_started_is_one_error_and_can_be_started_later(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is gone for a while, also when the KV store is to start first."""

    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            with monkeypatch.context() as away:
                away.setattr(sys, "executable", "/no/such/python")
                for _ in range(2):
                    with pytest.raises(EngineError, match=r"could not be started.*No such file"):
                        await launcher.restart("a", Role.MIXED)
            engine = await launcher.restart("a", Role.MIXED)
            assert len((await read(engine, request(prompt(20), greedy(5)))).tokens) == 5
            os.kill(launcher.pid("a"), signal.SIGSTOP)
            engine = await launcher.restart("a", Role.MIXED)
            assert len((await read(engine, request(prompt(20), greedy(5)))).tokens) == 5

    asyncio.run(main())
