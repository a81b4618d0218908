"""Real clients at the address of a gateway over three real SGLang engines, as a user points them there."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gateway_process import GatewayProcess, gateway_process, total
from openai_agent import MODEL_NAME, TASK, client_of, session
from scripted_model import write_scripted
from sglang_bench import LANE, MODEL, PYTHON, START_SECONDS

from prorsa.config import parse_config
from prorsa.engines.sglang_server.launcher import STANDINS
from prorsa.gateway.serve import serving
from prorsa.lifecycle import ToolStarted
from prorsa.report.rundir import read_run

pytestmark = [
    *LANE,
    pytest.mark.skipif(
        find_spec("verifiers") is None or find_spec("minisweagent") is None,
        reason="the clients are not installed here; `make setup` does it",
    ),
]

SESSIONS = 16
FLIPS = 6
CHAT = 'prorsa_requests_total{endpoint="/v1/chat/completions",status="200"}'


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with gateway_process(tmp_path_factory.mktemp("gateway"), MODEL) as process:
        yield process


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the agent's sessions are over embedded engines, other code altogether."""
    config = parse_config(
        {
            "model": {"path": str(MODEL), "max_context": 1536},
            "policy": {"name": "static", "split": "1:1"},
            "cluster": {"instances": 2},
            "sampling": {"temperature": 0.0, "max_new_tokens": 128},
            "gateway": {"port": 0},
        }
    )

    async def main() -> list[Any]:
        async with serving(config, tmp_path_factory.mktemp("embedded")) as served, client_of(served.url) as client:
            return await asyncio.gather(*(session(client, number, stream=False) for number in range(SESSIONS)))

    return asyncio.run(main())


def test_openais_client_notices_no_flip(gateway: GatewayProcess, expected: list[Any]) -> None:
    """Streamed and not, with tools: the tokens of embedded engines, every session one trajectory, and nothing left behind."""

    async def flipping() -> list[dict[str, Any]]:
        flips: list[dict[str, Any]] = []
        for number in range(FLIPS):
            flips += await asyncio.to_thread(gateway.set_roles, *((2, 1), (1, 2))[number % 2])
        return flips

    async def main() -> int:
        flips, rounds = asyncio.create_task(flipping()), 0
        async with client_of(gateway.url) as client:
            while rounds == 0 or not flips.done():
                said = asyncio.gather(*(session(client, n, stream=n % 2 == 0) for n in range(SESSIONS)))
                assert await said == expected
                rounds += 1
        assert [flip["failure"] for flip in await flips] == [None] * FLIPS
        return rounds

    before = gateway.metrics()
    rounds = asyncio.run(main())
    gained = gateway.metrics() - before
    turns = rounds * sum(len(one) for one in expected)
    assert gained[CHAT] == total(gained, "prorsa_turns_total") == turns
    assert gained["prorsa_trajectories_sampled_total"] == rounds * SESSIONS
    assert total(gained, "prorsa_continued_turns_total") == turns - rounds * SESSIONS
    assert total(gained, "prorsa_flips_total") == FLIPS
    assert all(engine["prefills"] == engine["decodes"] == 0 for engine in gateway.engines())


REQUESTS, MOST_TOKENS = 16, 24


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [
        ("sglang", "/generate"),
        ("sglang-oai", "/v1/completions"),
        ("sglang-oai-chat", "/v1/chat/completions"),
    ],
)
def test_sglangs_benchmark_counts_what_the_gateway_counts(
    backend: str, endpoint: str, gateway: GatewayProcess, tmp_path: Path
) -> None:
    options = {
        "backend": backend,
        "base-url": gateway.url,
        "model": MODEL_NAME,
        "tokenizer": str(MODEL),
        "dataset-name": "random-ids",
        "num-prompts": str(REQUESTS),
        "random-input-len": "96",
        "random-output-len": str(MOST_TOKENS),
        "random-range-ratio": "0.5",
        "max-concurrency": "8",
        "warmup-requests": "0",
        "output-file": str(tmp_path / "result.jsonl"),
    }
    before = gateway.metrics()
    flags = [f"--{name}={value}" for name, value in options.items()]
    run([str(PYTHON), "-m", "sglang.bench_serving", *flags], tmp_path, STANDINS)
    gained = gateway.metrics() - before
    result = json.loads((tmp_path / "result.jsonl").read_text())
    assert result["completed"] == REQUESTS
    assert gained[f'prorsa_requests_total{{endpoint="{endpoint}",status="200"}}'] == REQUESTS
    assert total(gained, "prorsa_turns_total") == REQUESTS
    assert gained["prorsa_output_tokens_total"] == result["total_output_tokens"] <= REQUESTS * MOST_TOKENS


TASKS = 4


def test_verifiers_rolls_an_environment_out(gateway: GatewayProcess, expected: list[Any], tmp_path: Path) -> None:
    """Through its own proxy: it sees what the agent sees over embedded engines, and rewards that."""
    here = Path(__file__)
    command = [sys.executable, str(here.with_name("verifiers_program.py")), gateway.url, str(TASKS)]
    before = gateway.metrics()
    traces = printed(run(command, tmp_path, here.parents[1]))
    gained = gateway.metrics() - before
    assert [trace["errors"] for trace in traces] == [[]] * TASKS
    assert [
        [(message["content"] or "", [call["function"] for call in message.get("tool_calls", [])]) for message in said]
        for said in (trace["said"] for trace in traces)
    ] == [[(content, calls) for content, calls, _ in one] for one in expected[:TASKS]]
    questions = TASK.questions("test", TASKS, 0)
    assert [trace["reward"] for trace in traces] == [
        TASK.reward(question, one[-1][0]) for question, one in zip(questions, expected, strict=False)
    ]
    turns = sum(len(one) for one in expected[:TASKS])
    assert gained[CHAT] == turns
    assert gained["prorsa_trajectories_sampled_total"] == TASKS
    assert total(gained, "prorsa_continued_turns_total") == gained["prorsa_tool_seconds_count"] == turns - TASKS


COMMAND = (
    "echo >> lines; [ $(wc -l < lines) = 3 ] && echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && wc -l < lines || true"
)
"""The model says it in every turn. The third one hands in what mini-swe-agent then submits."""


def test_mini_swe_agent_works_on_a_task_in_one_trajectory(tmp_path: Path) -> None:
    call = json.dumps({"name": "bash", "arguments": {"command": COMMAND}})
    model = write_scripted(tmp_path / "scripted", MODEL, "I add a line.\n", "<tool_call>\n", call, "\n</tool_call>")
    program, work = Path(__file__).with_name("mini_swe_program.py"), tmp_path / "work"
    work.mkdir()
    with gateway_process(tmp_path / "run", model) as gateway:
        told = printed(run([sys.executable, str(program), gateway.url, model.name, str(work)], tmp_path))
        samples = gateway.metrics()
    assert told["ended"] == {"exit_status": "Submitted", "submission": "3\n"}
    turns = [message for message in told["messages"] if message["role"] == "assistant"]
    assert [turn["content"] for turn in turns] == ["I add a line."] * 3
    assert samples[CHAT] == total(samples, "prorsa_turns_total") == 3
    assert samples["prorsa_trajectories_sampled_total"] == 1
    assert total(samples, "prorsa_continued_turns_total") == samples["prorsa_tool_seconds_count"] == 2
    recorded = read_run(gateway.run)
    assert recorded.problems == []
    assert [event.tool for event in recorded.events if isinstance(event, ToolStarted)] == ["bash"] * 3


def printed(output: str) -> Any:
    """The JSON in the last line: libraries print before it what they like."""
    return json.loads(output.splitlines()[-1])


def run(command: list[str], home: Path, *imports: Path) -> str:
    """What a client prints. It has a home of its own, and looks for nothing on the network."""
    environment = {
        **os.environ,
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(map(str, imports)),
        "HF_HUB_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_GLOBAL_CONFIG_DIR": str(home / "mini-swe-agent"),
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "MSWEA_SILENT_STARTUP": "1",
    }
    ended = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=START_SECONDS, cwd=home
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
