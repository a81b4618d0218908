"""The processes of SGLang engines: started, ended, dead, and refused where they would run unfixed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from sglang_bench import (
    LANE,
    LONG,
    MODEL,
    PYTHON,
    ROOT,
    START_SECONDS,
    TEST_SECONDS,
    D,
    P,
    flags,
    launching,
    processes_of,
)

from prorsa.engines.protocol import EngineError, Role

pytestmark = LANE

PARENT = """
import asyncio, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from sglang_bench import launching, D, P

async def main():
    async with launching(Path(sys.argv[1])) as launcher:
        await asyncio.gather(launcher.start("a", P), launcher.start("b", D), launcher.start("c", D))
        print(json.dumps([launcher.pid(name) for name in "abc"]), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_killed_parent_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path), str(Path(__file__).parent)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        groups = json.loads(parent.stdout.readline())
        assert all(len(processes_of(group)) >= 3 for group in groups), "a server, a scheduler, a detokenizer"
        parent.kill()
    deadline = time.monotonic() + TEST_SECONDS
    while any(processes_of(group) for group in groups) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [processes_of(group) for group in groups] == [[], [], []]


def test_stop_and_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def left_behind() -> list[Path]:
        return list(tmp_path.glob("prorsa-*/sglang_loads_*"))

    async def main() -> None:
        async with launching(tmp_path) as launcher:
            engine, *_ = await asyncio.gather(launcher.start("a", P), launcher.start("b", D), launcher.start("c", D))
            with pytest.raises(EngineError, match="a: is running already"):
                await launcher.start("a", P)
            first = launcher.pid("a")
            os.kill(first, signal.SIGKILL)
            engine = await launcher.restart("a", D)
            assert (await engine.info()).role is D
            last = launcher.pid("a")
            assert processes_of(first) == []
            assert len(left_behind()) == 4, "a file of every engine that was started"
            await launcher.stop("a")
            assert processes_of(last) == []
            with pytest.raises(KeyError):
                launcher.pid("a")

            # What keeps them dies, and they with it: each comes back under another.
            assert launcher._keeper is not None
            launcher._keeper.result()._process.kill()
            engine, _ = await asyncio.gather(launcher.restart("b", P), launcher.restart("c", D))
            assert (await engine.info()).role is P

    asyncio.run(main())
    assert left_behind() == []


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(tmp_path / "logs", flags(tmp_path / "no-model")) as launcher:
            with pytest.raises(EngineError, match=r"(?s)engine a: ended with status.*no-model"):
                await launcher.start("a", P)
            with pytest.raises(KeyError):
                launcher.pid("a")

    asyncio.run(main())


@LONG
def test_an_idle_engine_uses_hardly_any_cpu(tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(tmp_path) as launcher:
            await launcher.start("a", Role.PREFILL)
            await asyncio.sleep(2.0)
            before = cpu_seconds(launcher.pid("a"))
            await asyncio.sleep(4.0)
            assert cpu_seconds(launcher.pid("a")) - before < 0.8

    asyncio.run(main())


def cpu_seconds(group: int) -> float:
    ticks = 0
    for pid in processes_of(group):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_engines_do_not_start_without_the_fixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang lets a user switch plugins off, and would say nothing."""
    monkeypatch.setenv("SGLANG_PLUGINS", "some-other")

    async def main() -> None:
        async with launching(tmp_path) as launcher:
            with pytest.raises(EngineError, match="without the fix 'leaking-decode'"):
                await launcher.start("a", P)

    asyncio.run(main())


@LONG
@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ("sglang.version.__version__ = '0.5.24'", "the fixes are for SGLang 0.5.23, this is 0.5.24"),
        ("del sglang.srt.disaggregation.role_switch._reject_reason", "_reject_reason"),
        ("HookRegistry.apply_hooks = lambda: None", "without the fix 'leaking-decode'"),
        ("os.environ['PRORSA_SGLANG_FIXES'] = 'moved-pears'", "there is no fix 'moved-pears'"),
    ],
)
def test_a_process_that_may_flip_ends_where_a_fix_is_missing(prepare: str, message: str) -> None:
    code = f"""
import os, sys
import sglang.version
import sglang.srt.disaggregation.role_switch
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
{prepare}
sys.argv.append("--enable-pd-role-switch")
load_plugins()
print("it started")
"""
    standins = ROOT / "src" / "prorsa" / "engines" / "sglang_server" / "cpu_standins"
    environment = {
        **os.environ,
        "PYTHONPATH": str(standins),
        "SGLANG_USE_CPU_ENGINE": "1",
        "PRORSA_SGLANG_DEVICE": "cpu",
    }
    command = [str(PYTHON), "-c", code]
    ended = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=START_SECONDS, cwd=MODEL
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert message in ended.stderr
