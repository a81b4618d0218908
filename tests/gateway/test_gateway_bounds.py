"""More than the gateway can serve: it is refused before it is worked on, and what is served goes on meanwhile."""

from __future__ import annotations

import asyncio
import gzip
import json
import shlex
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_bench import PYTHON, TOKEN, Bench, babble, bench, configured, saying, until
from test_http import ADMIN, CHAT, COMPLETIONS, QUESTION, on_a_loop

from prorsa.config import ConfigError
from prorsa.gateway import bodies, connections, trajectories, work
from prorsa.gateway.connections import most_connections
from prorsa.gateway.errors import ApiError
from prorsa.gateway.fields import short
from prorsa.gateway.work import LongWork

EVENTS = "/prorsa/events"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def connected(gateway: Bench) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = gateway.url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def answer(reader: asyncio.StreamReader) -> tuple[str, Any]:
    """(head, JSON body) of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(int(line[15:]) for line in head.splitlines() if line.lower().startswith("content-length:"))
    return head, json.loads(await reader.readexactly(length))


def message(body: Any) -> str:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


# Connections.


@on_a_loop
async def test_a_head_that_does_not_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    async with bench() as gateway:
        silent, _ = await connected(gateway)
        half, writer = await connected(gateway)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nX-A: ")
        again, second = await connected(gateway)
        second.write(HEALTH)
        head, _ = await answer(again)
        assert head.startswith("HTTP/1.1 200")
        second.write(b"GET /hea")
        assert [await one.read() for one in (silent, half, again)] == [b"", b"", b""]
        await until(lambda: gateway.gateway.connections.open == 0)
        assert (await gateway.get("/health"))[0] == 200


@on_a_loop
async def test_an_answer_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.05)
    async with bench(token_s=0.01) as gateway:
        status, body = await gateway.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 30})
        assert (status, body["usage"]["completion_tokens"]) == (200, 30)


@on_a_loop
async def test_connections_beyond_the_bound_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REFUSED_SECONDS", 0.05)
    async with bench(max_connections=2) as gateway:
        first, second = await connected(gateway), await connected(gateway)
        for asks in (True, False):
            reader, writer = await connected(gateway)
            if asks:
                writer.write(HEALTH)
            head, body = await answer(reader)
            assert head.startswith("HTTP/1.1 503")
            assert "Retry-After: 1" in head
            assert "gateway.max_connections" in message(body)
            assert await reader.read() == b""
        for reader, writer in (first, second):
            writer.write(HEALTH)
            assert (await answer(reader))[1]["status"] == "ok"
        first[1].close()
        await until(lambda: gateway.gateway.connections.open == 1)
        reader, writer = await connected(gateway)
        writer.write(HEALTH)
        assert (await answer(reader))[0].startswith("HTTP/1.1 200")
        assert gateway.gateway.connections.refused == 2


@on_a_loop
async def test_a_burst_beyond_the_bound_leaves_the_gateway_as_it_was() -> None:
    async with bench(max_connections=4) as gateway:
        burst = await asyncio.gather(*(connected(gateway) for _ in range(200)))
        await until(lambda: gateway.gateway.connections.refused == 196)
        for _, writer in burst:
            writer.close()
        await until(lambda: gateway.gateway.connections.open == gateway.gateway.connections.refusing == 0)
        assert (await gateway.get("/health"))[0] == 200


@on_a_loop
async def test_a_client_that_reads_no_answer_is_let_go() -> None:
    """The answer is written as a whole, so nothing but its connection waits for the client."""
    async with bench(write_timeout=0.2) as gateway:
        reader, writer = await connected(gateway)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(3000):
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: gateway.gateway.connections.open == 1)
        await until(lambda: gateway.gateway.connections.open == 0)
        assert not reader.at_eof()
        assert (await gateway.get("/health"))[0] == 200


def test_what_fits_into_the_limit_on_open_files() -> None:
    """224 are kept for the rest, 8 for each of 4 engines, and a request in service has three."""
    config = configured(max_requests=100, max_connections=5000)
    assert most_connections(config, 1024) == 1024 - 256 - 200
    assert most_connections(config, 100_000) == 5000
    assert most_connections(config, 256 + 300) == 100
    with pytest.raises(ConfigError) as refused:
        most_connections(config, 255 + 300)
    said = str(refused.value)
    assert "gateway.max_requests=100" in said
    assert "ulimit -Hn 556" in said
    assert "gateway.max_requests to 99 or less" in said
    with pytest.raises(ConfigError, match="raise it"):
        most_connections(config, 64)


def limited(code: str, *limits: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process with limits of `ulimit`."""
    script = " && ".join((*(f"ulimit {limit}" for limit in limits), f"exec {shlex.join([sys.executable, '-c', code])}"))
    return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, timeout=60.0)


def test_the_soft_limit_on_open_files_is_raised_to_the_hard_one() -> None:
    code = "from prorsa.engines.descriptors import *; print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    ran = limited(code, "-Sn 100", "-Hn 200")
    assert ran.stdout == "200 (200, 200)\n", ran.stderr


def test_a_server_with_too_few_open_files_is_refused_before_it_starts_engines(tmp_path: Path) -> None:
    """Requests need 3 x 64 open files, the rest 256."""
    config = Path(__file__).parents[2] / "examples" / "serve.yaml"
    arguments = ["serve", str(config), f"run_dir={tmp_path}", "gateway.port=0", "gateway.max_requests=64"]
    ran = limited(f"from prorsa.cli import main; raise SystemExit(main({arguments!r}))", "-Sn 100", "-Hn 447")
    assert ran.returncode == 2
    assert "gateway.max_requests=64: needs 448 open files" in ran.stderr
    assert "gateway.max_requests to 63 or less" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.glob("*/engines")) == []


# Large requests.


@on_a_loop
async def test_a_prompt_that_cannot_fit_is_never_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 tokens of at most 16 bytes (`</tool_response>`) are 8,192 bytes."""
    async with bench() as gateway:

        def fail(_: str) -> list[int]:
            raise AssertionError("encoded")

        monkeypatch.setattr(gateway.gateway.trajectories._tokenizer, "encode", fail)
        for path, body in (
            (CHAT, {"messages": [{"role": "user", "content": "x" * 8192}]}),
            (COMPLETIONS, {"prompt": "x" * 8192}),
            (COMPLETIONS, {"prompt": "x" * 7_000_000}),
            (COMPLETIONS, {"prompt": "\u20ac" * 2731}),
            (COMPLETIONS, {"prompt": [1] * 512}),
            ("/generate", {"input_ids": [1] * 200_000}),
        ):
            status, said = await gateway.post(path, body)
            assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
        monkeypatch.undo()
        assert (await gateway.post(COMPLETIONS, {"prompt": "</tool_response>" * 400, "max_tokens": 1}))[0] == 200
        assert gateway.states() == {"TOOL": 1}


@pytest.mark.parametrize("large", [1, 1 << 30])
@on_a_loop
async def test_a_conversation_is_the_same_where_threads_read_it(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bodies, work):
        monkeypatch.setattr(module, "LARGE", large)
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "1+2"}}\n</tool_call>'
    async with bench(saying(call, "It is 3.")) as gateway:
        messages: list[dict[str, Any]] = [QUESTION]
        for said in (None, "It is 3."):
            body = json.dumps({"messages": messages, "tools": [PYTHON]})
            async with gateway.http.post(gateway.url + CHAT, data=body.encode()) as response:
                assert response.headers["X-Prorsa-Trajectory"] == "auto-1"
                (choice,) = (await response.json())["choices"]
            assert choice["message"]["content"] == said or not said
            messages += [choice["message"], {"role": "tool", "content": "3"}]
        assert gateway.gateway.trajectories.continued == {"prefix": 1}
        assert (await gateway.post(CHAT, b'{"messages": nonsense}'))[0] == 400
        assert (await gateway.post(CHAT, b"[" * 5000))[0] == 400
        assert (await gateway.post(CHAT, {"messages": 7}))[0] == 400


@on_a_loop
async def test_long_work_leaves_the_loop_is_bounded_and_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MOST_WAITING", 1)
    pool, go_on, begun = LongWork(), threading.Event(), []

    def slow(name: str) -> str:
        begun.append(name)
        assert go_on.wait(10.0)
        return name

    tasks = [asyncio.create_task(pool.run(1 << 20, slow, name)) for name in "abc"]
    await until(lambda: len(begun) == 2)
    assert await pool.run(10, str, 7) == "7", "what is small does not wait"
    with pytest.raises(ApiError) as refused:
        await pool.run(1 << 20, slow, "d")
    assert refused.value.status == 503
    finished = asyncio.create_task(pool.finish(1 << 20, slow, "e"))
    tasks[2].cancel()
    await asyncio.wait({tasks[2]})
    again = asyncio.create_task(pool.run(1 << 20, slow, "f"))
    await asyncio.sleep(0)
    go_on.set()
    assert [await task for task in (tasks[0], tasks[1], finished, again)] == ["a", "b", "e", "f"]
    assert "c" not in begun
    pool.close()


@on_a_loop
async def test_a_client_that_leaves_while_its_prompt_is_encoded_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "LARGE", 1)
    go_on, begun = threading.Event(), threading.Event()
    async with bench() as gateway:
        tokenizer = gateway.gateway.trajectories._tokenizer
        encode = tokenizer.encode

        def slow(text: str) -> list[int]:
            begun.set()
            assert go_on.wait(10.0)
            return encode(text)

        monkeypatch.setattr(tokenizer, "encode", slow)
        asking = asyncio.create_task(gateway.chat([QUESTION], name="gone"))
        await until(begun.is_set)
        assert (await gateway.get("/health"))[0] == 200
        asking.cancel()
        await until(lambda: gateway.metrics.in_flight == 0)
        assert len(gateway.gateway.trajectories) == 0
        go_on.set()
        assert (await gateway.chat([QUESTION], name="gone"))["usage"]["completion_tokens"] > 0


@on_a_loop
async def test_bodies_that_are_compressed_or_broken() -> None:
    async with bench() as gateway:
        good = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
        packed = gzip.compress(good)
        assert (await gateway.post(COMPLETIONS, packed, Content_Encoding="gzip"))[0] == 200
        assert (await gateway.post(COMPLETIONS, zlib.compress(good), Content_Encoding="deflate"))[0] == 200
        for encoding, data in (
            ("gzip", b"no gzip at all"),
            ("gzip", packed[:20] + b"\xff\xff\xff" + packed[23:]),
            ("gzip", packed[:-12]),
            ("deflate", b"\x00\x01\x02\x03"),
            ("br", good),
            ("zstd", good),
        ):
            status, body = await gateway.post(COMPLETIONS, data, Content_Encoding=encoding)
            assert status == 400, (encoding, body)
            assert message(body)
        bomb = gzip.compress(b'{"prompt": "' + b"a" * 50_000_000 + b'"}')
        assert (await gateway.post(COMPLETIONS, bomb, Content_Encoding="gzip"))[0] == 413


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 9000 + b"\r\n\r\n",
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X-A: 1\r\n" * 200 + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: +2\r\n\r\n{}",
    ],
)
@on_a_loop
async def test_what_is_no_request_is_told_so_in_the_shape_of_errors(sent: bytes) -> None:
    async with bench() as gateway:
        reader, writer = await connected(gateway)
        writer.write(sent)
        head, body = await answer(reader)
        assert head.split()[1] == "400"
        assert "cannot be read" in message(body)
        assert await reader.read() == b""


@on_a_loop
async def test_a_body_that_does_not_end_is_a_408_and_costs_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "READ_SECONDS", 0.2)
    async with bench() as gateway:
        slow = [await connected(gateway) for _ in range(3)]
        for _, writer in slow:
            writer.write(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{")
        assert (await gateway.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}))[0] == 200
        for reader, _ in slow:
            head, body = await answer(reader)
            assert head.startswith("HTTP/1.1 408")
            assert "did not arrive" in message(body)
        assert gateway.metrics.in_flight == 0


@on_a_loop
async def test_bodies_take_no_more_memory_together_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_BYTES", 150_000)
    async with bench() as gateway:
        half = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n{" + b" " * 90_000
        _, writer = await connected(gateway)
        writer.write(half)
        await until(lambda: gateway.gateway._bodies._held == 90_001)
        small, large = ({"prompt": "a", "max_tokens": 1, "user": "u" * size} for size in (10, 80_000))
        assert (await gateway.post(COMPLETIONS, small))[0] == 200
        assert (await gateway.post(COMPLETIONS, large))[0] == 503
        writer.close()
        await until(lambda: gateway.gateway._bodies._held == 0)
        assert (await gateway.post(COMPLETIONS, large))[0] == 200


# Fields.


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [7] * 1025}, 400, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 33}, 400, "stop"),
        (COMPLETIONS, {"prompt": "a", "stop": "x" * 1025}, 400, "stop"),
        (CHAT, {"messages": [QUESTION], "stop": ["x" * 600, "y" * 600]}, 400, "stop"),
        ("/generate", {"text": "a", "sampling_params": {"stop": ["x"] * 33}}, 400, "stop"),
        ("/generate", {"text": "a", "sampling_params": {"stop_token_ids": [7] * 1025}}, 400, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(100_000)}}, 400, "logit_bias"),
        (COMPLETIONS, {"prompt": "a", "model": "m" * 1_000_000}, 404, "model"),
        (COMPLETIONS, {"prompt": [[]] * 300_000}, 413, "values"),
        (EVENTS, [{"event": "sampled", "trajectory": f"t{i}"} for i in range(1001)], 413, "1001 events"),
        (EVENTS, {"event": "sampled", "trajectory": "t" * 1_000_000}, 400, "trajectory"),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 10**400}, 400, "max_tokens"),
        (COMPLETIONS, {"prompt": "a", "seed": -(10**400)}, 400, "seed"),
        (COMPLETIONS, {"prompt": "a", "temperature": 10**400}, 400, "temperature"),
    ],
)
@on_a_loop
async def test_fields_are_bounded_and_errors_are_short(path: str, body: Any, status: int, named: str) -> None:
    async with bench() as gateway:
        got, said = await gateway.post(path, body)
        assert got == status, said
        assert named in message(said)
        assert len(message(said)) < 300
        assert len(gateway.gateway.trajectories) == 0


@on_a_loop
async def test_bounds_are_not_below_what_is_used() -> None:
    async with bench(saying("One two three.")) as gateway:
        answer = await gateway.chat([QUESTION], stop=["never"] * 31 + ["two"], stop_token_ids=list(range(1000, 2024)))
        assert answer["choices"][0]["message"]["content"] == "One "
        listed = [{"event": "sampled", "trajectory": f"t{i}"} for i in range(1000)]
        assert (await gateway.post(EVENTS, listed))[0] == 200
        gone = {"event": "dropped", "trajectory": "t0"}
        assert (await gateway.post(EVENTS, {**gone, "reason": "r" * 1001}))[0] == 400
        assert (await gateway.post(EVENTS, {**gone, "reason": "r" * 1000}))[0] == 200


def test_a_value_of_whatever_size_is_shown_by_its_beginning() -> None:
    assert short("a" * 10) == repr("a" * 10)
    assert short("a" * 1_000_000) == "'" + "a" * 79 + "..."
    assert short({"type": "json"}) == "{'type': 'json'}"
    for large in ([1] * 1_000_000, {i: i for i in range(1_000_000)}, ["a" * 1_000_000], [[["a" * 1_000_000]]]):
        assert len(short(large)) <= 83


@pytest.mark.parametrize("temperature", [1e-5, 1e-30, 1e-38, 1e-45, 5e-324, 0])
@on_a_loop
async def test_a_temperature_that_engines_cannot_divide_by_is_greedy(temperature: float) -> None:
    async with bench() as gateway:
        body = {"prompt": "a", "temperature": temperature, "max_tokens": 1, "top_p": 1e-45, "top_k": 10**30}
        assert (await gateway.post(COMPLETIONS, body))[0] == 200
        (sampling,) = {request.sampling for engine in gateway.engines for request in engine.requests}
        assert sampling.temperature == (temperature if temperature >= 1e-6 else 0.0)
        assert (sampling.top_p, sampling.top_k) == (1e-6, 2**31 - 1)


@pytest.mark.parametrize("last", ["\u00b2", "1" * 5000, "0", "-1", "1e3", "\u0661", " 1", "", "1.0"])
@on_a_loop
async def test_the_number_of_decisions_is_a_number(last: str) -> None:
    async with bench() as gateway:
        async with gateway.http.get(
            f"{gateway.url}/prorsa/decisions", params={"last": last}, headers=ADMIN
        ) as response:
            assert response.status == 400
            assert "last=" in message(await response.json())
        status, text = await gateway.get("/prorsa/decisions?last=3", Authorization=f"Bearer {TOKEN}")
        assert status == 200
        assert json.loads(text)["made"] >= 0


# What is remembered.


@on_a_loop
async def test_live_trajectories_and_their_tasks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trajectories, "MOST_LIVE", 5)
    monkeypatch.setattr(trajectories, "MOST_TASKS", 3)
    async with bench() as gateway:
        for number in range(5):
            event = {"event": "sampled", "trajectory": f"t{number}", "task": f"task-{number}"}
            assert (await gateway.post(EVENTS, event))[0] == 200
        names = gateway.control.tracker.snapshot(0.0).names
        assert names.tasks == ("task-0", "task-1", "task-2", "other")
        status, body = await gateway.post(EVENTS, {"event": "sampled", "trajectory": "t5"})
        assert (status, "5 trajectories are live" in message(body)) == (429, True)
        assert (await gateway.post(COMPLETIONS, {"prompt": "a"}))[0] == 429
        assert (await gateway.post(EVENTS, {"event": "dropped", "trajectory": "t1"}))[0] == 200
        event = {"event": "sampled", "trajectory": "t5", "task": "task-5"}
        assert (await gateway.post(EVENTS, event))[0] == 200
        assert "task-5" in gateway.control.tracker.snapshot(0.0).names.tasks


@on_a_loop
async def test_contexts_that_were_answered_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(babble) as gateway:
        known = gateway.gateway.trajectories

        async def ask(prompt: str, tokens: int = 4) -> tuple[str, str]:
            """(whose it is, prompt and answer)."""
            body = {"prompt": prompt, "max_tokens": tokens}
            async with gateway.http.post(gateway.url + COMPLETIONS, json=body) as response:
                text = (await response.json())["choices"][0]["text"]
                return response.headers["X-Prorsa-Trajectory"], prompt + text

        first, second = await ask("a" * 100), await ask("b" * 100)
        size = known._bytes // 2
        monkeypatch.setattr(trajectories, "MOST_REMEMBERED", 2 * size + size // 2)
        third = await ask("c" * 100)
        assert known._bytes == 2 * size
        assert len(known) == 3
        assert (await ask(second[1] + "!"))[0] == second[0]
        assert (await ask(third[1] + "!"))[0] == third[0]
        assert (await ask(first[1] + "!"))[0] not in {first[0], second[0], third[0]}
    assert known._bytes == 0


@on_a_loop
async def test_many_clients_at_once_get_no_more_than_the_bound_leaves() -> None:
    """Three times as many connections as may be open: each client ends with its answer or with the 503."""
    async with bench(max_connections=20) as gateway:

        async def client(number: int) -> int:
            async with aiohttp.ClientSession() as http:
                body = {"prompt": f"{number}", "max_tokens": 2}
                async with http.post(gateway.url + COMPLETIONS, json=body) as response:
                    return response.status

        statuses = await asyncio.gather(*(client(number) for number in range(60)))
        assert set(statuses) == {200, 503}
        assert statuses.count(200) >= 20
