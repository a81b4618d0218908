"""The gateway over real engine processes, driven by real clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import APIStatusError, OpenAI
from openai_agent import TASK, client_of, session

from prorsa.allocation import Allocation
from prorsa.config import Config, parse_config
from prorsa.gateway.serve import Served, serving
from prorsa.lifecycle import Dropped, ToolStarted
from prorsa.report.rundir import read_run

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
SESSIONS = 16


def config(**gateway: Any) -> Config:
    return parse_config(
        {
            "model": {"path": str(ROOT / "models" / "arithmetic"), "max_context": 1024},
            "policy": {"name": "static", "split": "2:2", "horizon": 0.5},
            "cluster": {"instances": 4, "kv_tokens": 8192},
            "sampling": {"temperature": 0.0, "max_new_tokens": 96},
            "gateway": {"port": 0, **gateway},
        }
    )


async def flipping(served: Served, done: asyncio.Event) -> None:
    targets = [Allocation(3, 1), Allocation(1, 3), Allocation(2, 2)]
    while not done.is_set():
        for target in targets:
            await served.control.switcher.apply(target)
            await asyncio.sleep(0.05)


async def left_behind(served: Served) -> list[tuple[int, int, int]]:
    loads = [await instance.engine.load() for instance in served.control.fleet]
    return [(load.running, load.waiting, load.used_tokens) for load in loads if not load.idle or load.used_tokens]


def test_sixteen_sessions_over_flips_say_what_they_say_without(tmp_path: Path) -> None:
    """Streamed and not, with tools: the same tokens, one trajectory each, and nothing left on any engine."""

    async def main() -> None:
        async with serving(config(), tmp_path) as served, client_of(served.url) as client:
            calm = await asyncio.gather(*(session(client, n, stream=False) for n in range(SESSIONS)))
            assert served.control.status().flips == 0
            done = asyncio.Event()
            flips = asyncio.create_task(flipping(served, done))
            shaken = await asyncio.gather(*(session(client, n, stream=n % 2 == 0) for n in range(SESSIONS)))
            done.set()
            await flips
            assert shaken == calm
            status = served.control.status()
            assert status.flips >= 4
            assert status.failed_flips == 0
            assert status.resends > 0
            assert await left_behind(served) == []
            turns = sum(len(one) for one in calm)
            continued = served.gateway.trajectories.continued
            assert continued.total() == 2 * (turns - SESSIONS), "every further turn was recognised"
            assert len(served.gateway.trajectories) == 2 * SESSIONS

    asyncio.run(main())
    run = read_run(tmp_path)
    assert run.problems == []
    assert not any(isinstance(event, Dropped) for event in run.events)
    assert {event.tool for event in run.events if isinstance(event, ToolStarted)} == {"python"}


def test_openais_client_and_a_client_that_vanishes(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(config(), tmp_path) as served, client_of(served.url) as client:
            assert [model.id async for model in client.models.list()] == ["arithmetic"]
            text = "Compute 7 + 5."
            asked = {"model": "arithmetic", "prompt": text, "max_tokens": 24}
            plain = await client.completions.create(**asked, logprobs=1)
            assert plain.usage is not None
            assert plain.usage.completion_tokens == len(plain.choices[0].logprobs.token_logprobs)  # type: ignore[union-attr,arg-type]
            pieces = [chunk.choices[0].text async for chunk in await client.completions.create(**asked, stream=True)]
            assert "".join(pieces) == plain.choices[0].text
            first, second = [
                await client.completions.create(
                    **asked, temperature=1.0, seed=5, extra_headers={"X-Prorsa-Trajectory": name}
                )
                for name in ("a", "b")
            ]
            assert first.choices[0].text == second.choices[0].text
            tries = [
                await client.completions.create(
                    **asked,
                    temperature=1.0,
                    extra_headers={"X-Prorsa-Trajectory": "best-of-six"},
                    extra_body={"ignore_eos": True},
                )
                for _ in range(6)
            ]
            assert len({one.choices[0].text for one in tries}) == 6
            with pytest.raises(APIStatusError, match="n=2: cannot be served") as caught:
                await client.chat.completions.create(
                    model="arithmetic", messages=[{"role": "user", "content": "x"}], n=2
                )
            assert caught.value.status_code == 400

            finished = served.control.status().turns
            endless = {"text": text, "stream": True, "sampling_params": {"max_new_tokens": 900, "ignore_eos": True}}
            async with aiohttp.ClientSession() as http:
                leaving = [await http.post(served.url + "/generate", json=endless) for _ in range(4)]
                for response in leaving:
                    await response.content.readuntil(b"\n\n")
                    response.close()
            async with asyncio.timeout(10.0):
                while served.control.router.live or await left_behind(served):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert served.control.status().turns == finished, "all four were cancelled long before their 900 tokens"

    asyncio.run(main())


def test_the_command_serves_records_and_ends_in_order(tmp_path: Path) -> None:
    """As a user runs it: the address in a file, the admin token in one that nobody else reads, SIGTERM at the end."""
    command = [sys.executable, "-m", "prorsa.cli", "serve", "examples/serve.yaml", "gateway.port=0", "gateway.log=json"]
    process = subprocess.Popen(
        [*command, f"run_dir={tmp_path}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 30.0
        while not (found := list(tmp_path.glob("serve-*/gateway.json"))) or not found[0].read_text():
            assert process.poll() is None and time.monotonic() < deadline  # noqa: PT018
            time.sleep(0.05)
        address = json.loads(found[0].read_text())
        token = Path(address["admin_token_file"])
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert len(token.read_text()) > 32
        with OpenAI(base_url=address["url"] + "/v1", api_key="none") as client:
            answer = client.chat.completions.create(
                model=address["model"], messages=list(TASK.questions("test", 1, 0)[0].messages), max_tokens=8
            )
            assert answer.usage is not None
        os.kill(process.pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=20.0)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 0, output
    assert address["url"] in output
    run = read_run(found[0].parent)
    assert (run.problems, len(run.turns)) == ([], 1)
    assert (found[0].parent / "report.html").is_file()
    lines = [json.loads(line) for line in (found[0].parent / "prorsa.log").read_text().splitlines()]
    (line,) = [line for line in lines if line["logger"] == "prorsa.gateway.access"]
    assert (line["endpoint"], line["status"], line["output_tokens"]) == (
        "/v1/chat/completions",
        200,
        answer.usage.completion_tokens,
    )
