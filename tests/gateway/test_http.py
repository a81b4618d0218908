"""The endpoints over HTTP, with scripted engines behind the real control plane."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_bench import END, LETTERS, MODEL, PYTHON, TOKEN, TOKENIZER, babble, bench, saying, until

from prorsa.cluster.instances import InstanceState
from prorsa.engines.protocol import EngineGone, EngineInfo, FinishReason, GenerateRequest, Role, SamplingParams
from prorsa.engines.sglang import SGLangEngine
from prorsa.gateway.client import EventRefused, Trajectory
from prorsa.gateway.output import Output

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "1+2"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "What is 1 plus 2?"}
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
DOCS = Path(__file__).parents[2] / "docs" / "gateway.md"


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 20.0))

    return wrapper


async def events(response: aiohttp.ClientResponse) -> list[Any]:
    """The JSON of every server-sent event; the end mark is checked and left out."""
    assert response.headers["Content-Type"].startswith("text/event-stream")
    payloads = [part.removeprefix(b"data: ") for part in (await response.read()).split(b"\n\n") if part]
    assert payloads[-1] == b"[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]


# Answers.


@on_a_loop
async def test_a_chat_answer_has_openais_shape() -> None:
    async with bench(saying("It is 3.")) as gateway:
        answer = await gateway.chat([QUESTION], logprobs=True, return_token_ids=True)
        (choice,) = answer["choices"]
        prompt, ids = TOKENIZER.render([QUESTION]), [*TOKENIZER.encode("It is 3."), END]
        assert answer["object"] == "chat.completion"
        assert choice["message"] == {"role": "assistant", "content": "It is 3."}
        assert choice["finish_reason"] == "stop"
        assert (answer["prompt_token_ids"], choice["token_ids"]) == (prompt, ids)
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * len(ids)
        assert "".join(entry["token"] for entry in choice["logprobs"]["content"]) == "It is 3.<|im_end|>"
        assert answer["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "total_tokens": len(prompt) + len(ids),
            "prompt_tokens_details": {"cached_tokens": 3},
        }


@on_a_loop
async def test_a_streamed_chat_is_the_whole_one_in_pieces() -> None:
    async with bench(saying("One two three. " + CALL)) as gateway:
        whole = await gateway.chat([QUESTION], tools=[PYTHON], name="whole")
        body = {"messages": [QUESTION], "tools": [PYTHON], "stream": True, "stream_options": {"include_usage": True}}
        async with gateway.http.post(gateway.url + CHAT, json={**body, "logprobs": True}) as response:
            chunks = await events(response)
        *pieces, last = chunks
        deltas = [chunk["choices"][0]["delta"] for chunk in pieces]
        message = whole["choices"][0]["message"]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"] == "One two three."
        (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
        assert [call["function"] for call in calls] == [call["function"] for call in message["tool_calls"]]
        assert [chunk["choices"][0]["finish_reason"] for chunk in pieces] == [None] * (len(pieces) - 1) + ["tool_calls"]
        logprobs = [entry for chunk in pieces for entry in chunk["choices"][0]["logprobs"]["content"]]
        assert len(logprobs) == last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert last["choices"] == []
        assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("text", ["a < b <tool", "blanks at the end \n ", "<tool_call>none</tool_call>", "."])
@on_a_loop
async def test_what_a_streamed_chat_held_back_comes_at_its_end(text: str) -> None:
    async with bench(saying(text)) as gateway:
        body = {"messages": [QUESTION], "tools": [PYTHON], "stream": True}
        async with gateway.http.post(gateway.url + CHAT, json=body) as response:
            chunks = await events(response)
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == text


@on_a_loop
async def test_tokens_are_streamed_as_they_come() -> None:
    async with bench(token_s=0.01) as gateway:
        body = {"prompt": "Once", "max_tokens": 30, "stream": True}
        async with gateway.http.post(gateway.url + COMPLETIONS, json=body) as response:
            await response.content.readuntil(b"\n\n")
            assert len(gateway.engines[1].legs) == 1, "the first piece is here while the engine still decodes"
            await response.read()
        await gateway.idle()


@on_a_loop
async def test_without_tools_a_call_is_text() -> None:
    async with bench(saying(CALL)) as gateway:
        for body in ({}, {"tools": [PYTHON], "tool_choice": "none"}):
            choice = (await gateway.chat([QUESTION], **body))["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": CALL}
            assert choice["finish_reason"] == "stop"


@on_a_loop
async def test_a_completion_of_text_or_ids_with_stop_strings() -> None:
    async with bench(lambda context: LETTERS[len(context) % 26], max_requests=2) as gateway:
        prompt = TOKENIZER.encode("Once")
        first = len(prompt)
        expected = "".join("abcdefghijklmnopqrstuvwxyz"[(first + i) % 26] for i in range(12))
        body = {"prompt": "Once", "max_tokens": 12, "logprobs": 1}
        status, answer = await gateway.post(COMPLETIONS, body)
        choice = answer["choices"][0]
        assert (status, choice["text"], choice["finish_reason"]) == (200, expected, "length")
        assert choice["logprobs"]["tokens"] == list(expected)
        assert choice["logprobs"]["text_offset"] == list(range(12))
        _, by_ids = await gateway.post(COMPLETIONS, {**body, "prompt": prompt, "stop": [expected[5:8], "zzz"]})
        assert (by_ids["choices"][0]["text"], by_ids["choices"][0]["finish_reason"]) == (expected[:5], "stop")
        assert by_ids["usage"]["completion_tokens"] == 8
        async with gateway.http.post(
            gateway.url + COMPLETIONS, json={**body, "stop": expected[5:8], "stream": True}
        ) as response:
            assert "".join(chunk["choices"][0]["text"] for chunk in await events(response)) == expected[:5]


@on_a_loop
async def test_our_own_client_of_sglang_drives_the_gateway() -> None:
    """`/generate` speaks the protocol that the engines speak: token ids in, ids and log-probabilities out, as they come."""
    async with bench() as gateway:
        engine = SGLangEngine("gateway", gateway.url, "", 0)
        prompt = tuple(TOKENIZER.encode("Once upon a time"))
        request = GenerateRequest("r", prompt, SamplingParams(20, 0.0))
        chunks = [chunk async for chunk in engine.generate(request)]
        await engine.close()
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        context = list(prompt)
        for token in tokens:
            assert token == babble(context)
            context.append(token)
        assert len(tokens) == sum(len(chunk.logprobs) for chunk in chunks) == 20
        assert chunks[-1].finish is FinishReason.LENGTH
        assert chunks[-1].cached_tokens == 3


@on_a_loop
async def test_generate_answers_as_sglang_does() -> None:
    async with bench(saying("It is 3.")) as gateway:
        text = TOKENIZER.render_text([QUESTION])
        body = {"text": text, "sampling_params": {"max_new_tokens": 30, "temperature": 0}, "return_logprob": True}
        status, answer = await gateway.post("/generate", body)
        ids = [*TOKENIZER.encode("It is 3."), END]
        meta = answer["meta_info"]
        assert (status, answer["text"], answer["output_ids"]) == (200, "It is 3.", ids)
        assert meta["finish_reason"] == {"type": "stop", "matched": END}
        assert meta["output_token_logprobs"] == [[-0.5, token, None] for token in ids]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(TOKENIZER.encode(text)), len(ids))
        body = {"prompt": text, "max_tokens": 7, "ignore_eos": True, "stop_token_ids": [ids[1]]}
        assert (await gateway.post(COMPLETIONS, body))[1]["usage"]["completion_tokens"] == 2
        again = {"input_ids": TOKENIZER.encode(text), "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        assert (await gateway.post("/generate", again))[1]["meta_info"]["finish_reason"] == {
            "type": "length",
            "length": 2,
        }


@on_a_loop
async def test_the_answer_says_whose_it_was_and_a_header_or_a_field_names_it() -> None:
    async with bench() as gateway:
        body: dict[str, Any] = {"prompt": "Once", "max_tokens": 2}
        async with gateway.http.post(gateway.url + COMPLETIONS, json=body) as response:
            assert response.headers["X-Prorsa-Trajectory"] == "auto-1"
        told = {**body, "prorsa": {"trajectory": "run/1", "group": "g", "task": "math"}}
        async with gateway.http.post(gateway.url + COMPLETIONS, json=told) as response:
            assert response.headers["X-Prorsa-Trajectory"] == "run/1"
        headers = {"X-Prorsa-Trajectory": "run/1", "X-Prorsa-Group": "g"}
        async with gateway.http.post(gateway.url + COMPLETIONS, json=body, headers=headers) as response:
            await response.read()
        snapshot = gateway.control.tracker.snapshot(0.0)
        row = snapshot.ids.index("run/1")
        assert (snapshot.names.tasks[snapshot.task[row]], snapshot.turn[row]) == ("math", 2)


@on_a_loop
async def test_the_models_the_health_and_what_is_not_there() -> None:
    async with bench() as gateway:
        status, text = await gateway.get("/v1/models")
        assert (status, [model["id"] for model in json.loads(text)["data"]]) == (200, [MODEL.name])
        status, text = await gateway.get("/health")
        assert status == 200
        assert json.loads(text) == {
            "status": "ok",
            "recording": "ok",
            "can_serve": True,
            "serving": {"prefill": 1, "decode": 1, "mixed": 0},
            "problems": {},
        }
        for path, expected in (("/v2/chat", 404), (CHAT, 405)):
            status, text = await gateway.get(path)
            assert (status, set(json.loads(text)["error"])) == (expected, {"message", "type", "param", "code"})


@on_a_loop
async def test_the_health_tells_when_no_turn_can_be_served() -> None:
    async with bench() as gateway:
        fleet = gateway.control.fleet
        decode = fleet.pool(Role.DECODE)[0]
        gateway.control.router.bury(decode, "it was killed")
        status, text = await gateway.get("/health")
        assert status == 503
        assert json.loads(text) == {
            "status": "unavailable",
            "recording": "ok",
            "can_serve": False,
            "serving": {"prefill": 1, "decode": 0, "mixed": 0},
            "problems": {decode.name: "it was killed"},
        }
        fleet.move(decode, InstanceState.ROUTED)
        assert (await gateway.get("/health"))[0] == 200


# Refusals.


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        (CHAT, b"{", "not JSON"),
        (CHAT, [], "object is needed"),
        (CHAT, {}, "messages=None"),
        (CHAT, {"messages": []}, "at least one"),
        (CHAT, {"messages": ["hi"]}, r"messages\[0\]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "must be text"),
        (CHAT, {"messages": [QUESTION], "n": 2}, "n=2: cannot be served"),
        (CHAT, {"messages": [QUESTION], "temperature": 3}, "temperature=3.0"),
        (CHAT, {"messages": [QUESTION], "temperature": True}, "must be a float"),
        (CHAT, {"messages": [QUESTION], "top_p": 0}, "above 0"),
        (CHAT, {"messages": [QUESTION], "max_tokens": 0}, "max_tokens=0"),
        (CHAT, {"messages": [QUESTION], "presence_penalty": 0.5}, "presence_penalty"),
        (CHAT, {"messages": [QUESTION], "response_format": {"type": "json_object"}}, "response_format"),
        (CHAT, {"messages": [QUESTION], "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": [QUESTION], "tools": [{"type": "x"}]}, r"tools\[0\]"),
        (CHAT, {"messages": [QUESTION], "stop": ["a", ""]}, "none empty"),
        (CHAT, {"messages": [QUESTION], "prorsa": {"trajectory": "a b"}}, "X-Prorsa-Trajectory='a b'"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "one prompt a request"),
        (COMPLETIONS, {"prompt": ""}, "prompt=''"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 5}, "logprobs=5"),
        (COMPLETIONS, {"prompt": "a", "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": [1] * 600}, "600 tokens"),
        ("/generate", {"text": "a", "input_ids": [1]}, "one of the two"),
        ("/generate", {"input_ids": [[1], [2]]}, "list of token ids"),
        ("/generate", {"text": "a", "sampling_params": {"n": 3}}, "n=3"),
        ("/generate", {"text": "a", "sampling_params": {"top_k": 0}}, "top_k=0"),
    ],
)
@on_a_loop
async def test_a_wrong_request_is_a_400_that_says_what_and_how(path: str, body: Any, part: str) -> None:
    async with bench() as gateway:
        status, answer = await gateway.post(path, body)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert re.search(part, answer["error"]["message"]), answer
        assert len(gateway.control.tracker) == 0


@on_a_loop
async def test_another_model_is_not_found() -> None:
    async with bench() as gateway:
        status, answer = await gateway.post(CHAT, {"model": "gpt-9", "messages": [QUESTION]})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


@on_a_loop
async def test_a_request_that_is_too_large_is_refused() -> None:
    async with bench(max_body_mb=1) as gateway:
        status, answer = await gateway.post(CHAT, {"messages": [{"role": "user", "content": "x" * (1 << 20)}]})
        assert (status, answer["error"]["code"]) == (413, "too_large")


@on_a_loop
async def test_beyond_the_bound_on_requests_is_a_429() -> None:
    async with bench(token_s=0.02, max_requests=2) as gateway:
        body = {"prompt": "Once", "max_tokens": 8}
        answers = await asyncio.gather(*(gateway.post(COMPLETIONS, body) for _ in range(3)))
        assert sorted(status for status, _ in answers) == [200, 200, 429]
        assert (await gateway.post(COMPLETIONS, body))[0] == 200, "a place that is free again is given again"


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_an_answer_that_takes_too_long_ends_with_an_error(stream: bool) -> None:
    async with bench(token_s=0.03, request_timeout=0.2) as gateway:
        body = {"prompt": "Once", "max_tokens": 60, "stream": stream}
        async with gateway.http.post(gateway.url + COMPLETIONS, json=body) as response:
            answer = await response.read()
            assert response.status == (200 if stream else 504), "a stream has begun with its status"
        error = json.loads(answer.split(b"data: ")[-1])["error"]
        assert "gateway.request_timeout" in error["message"]
        await gateway.idle()


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_what_goes_wrong_in_the_middle_is_an_error_and_leaves_nothing(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def script(context: list[int]) -> int:
        if len(context) > 8:
            raise ZeroDivisionError("in the model")
        return LETTERS[0]

    async with bench(script) as gateway:
        body = {"prompt": TOKENIZER.encode("abc"), "max_tokens": 60, "stream": stream}
        async with gateway.http.post(gateway.url + COMPLETIONS, json=body) as response:
            answer = await response.read()
            assert response.status == (200 if stream else 500)
        assert "its log says how" in json.loads(answer.split(b"data: ")[-1])["error"]["message"]
        assert "in the model" in caplog.text
        await gateway.idle()


# Clients that leave.


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_vanished_client_leaves_nothing_behind(stream: bool) -> None:
    async with bench(token_s=0.02) as gateway:
        raw = json.dumps({"prompt": "Once", "max_tokens": 60, "stream": stream}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        await until(lambda: gateway.engines[1].legs)
        if stream:
            await reader.readuntil(b"data: ")
        writer.transport.abort()
        await gateway.idle()
        assert len(gateway.engines[1].requests) == 1, "it was cancelled, not resent"
        assert gateway.control.status().output_tokens < 40
        await until(lambda: not gateway.metrics.in_flight)
        assert "prorsa_client_disconnects_total 1" in (await gateway.get("/metrics"))[1]
        assert 'prorsa_trajectories_ended_total{end="dropped"} 1' in (await gateway.get("/metrics"))[1]


def rest_of(client: socket.socket) -> bytes:
    """What is left in a connection that the other side has ended; TimeoutError where it has not."""
    client.settimeout(2.0)
    received = b""
    with client, contextlib.suppress(ConnectionResetError):
        while data := client.recv(1 << 20):
            received += data
    return received


@on_a_loop
async def test_a_client_that_does_not_read_frees_its_engines_and_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long pieces fill the buffers between: of the sockets, and of the server."""
    monkeypatch.setattr(Output, "fresh", lambda self: "x" * 500_000)
    async with bench(token_s=0.01, write_timeout=0.2) as gateway:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(gateway.url.rpartition(":")[2])))
        raw = json.dumps({"prompt": "Once", "max_tokens": 400, "stream": True}).encode()
        client.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        )
        await until(lambda: gateway.engines[1].legs)
        await gateway.idle()
        assert gateway.control.status().output_tokens < 200
        received = await asyncio.to_thread(rest_of, client)
        assert b"[DONE]" not in received
        assert len(received) < 50_000_000, "what waited for it in the gateway is gone"


@on_a_loop
async def test_the_end_of_the_gateway_is_an_answer_to_who_waits() -> None:
    async with bench(token_s=0.05) as gateway:
        client = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 60}))
        await until(lambda: gateway.engines[1].legs)
        gateway.gateway.stop()
        status, answer = await client
        assert (status, answer["error"]["message"]) == (503, "the gateway is stopping")


# Events, admin, metrics, page.


@on_a_loop
async def test_the_events_client_tells_the_gateway() -> None:
    async with bench() as gateway:
        told = Trajectory(gateway.url, "run-7/42", group="run-7", task="coding")
        assert await asyncio.to_thread(told.sampled) == "sampled"
        assert await asyncio.to_thread(told.sandbox_starting, image="py") == "sandbox_starting"
        status, _ = await gateway.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 2}, **told.headers)
        assert status == 200
        assert await asyncio.to_thread(told.tool_started, "pytest") == "tool"
        with pytest.raises(EventRefused, match="it is in tool"):
            await asyncio.to_thread(told.tool_started, "pytest")
        assert await asyncio.to_thread(told.reward_started) == "reward"
        assert await asyncio.to_thread(told.done, 1.0) == "done"
        status, answer = await gateway.post(
            "/prorsa/events", [{"event": "sampled", "trajectory": f"t{i}"} for i in range(2)]
        )
        assert (status, [one["state"] for one in answer]) == (200, ["sampled", "sampled"])


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
@on_a_loop
async def test_without_the_token_nothing_of_admin_is_seen_or_done(headers: dict[str, str]) -> None:
    async with bench(roles="PPDD") as gateway:
        for path in ("/prorsa/status", "/prorsa/engines", "/prorsa/decisions"):
            status, text = await gateway.get(path, **headers)
            assert (status, json.loads(text)["error"]["type"]) == (401, "authentication_error")
        for path in ("roles", "engines/e0/flip", "engines/e0/drain", "engines/e0/undrain"):
            assert (await gateway.post(f"/prorsa/{path}", {"role": "decode"}, **headers))[0] == 401
        assert gateway.control.flips == []


@on_a_loop
async def test_admin_sees_flips_and_drains() -> None:
    async with bench(roles="PPDD") as gateway:

        async def order(path: str, body: Any = None) -> tuple[int, Any]:
            return await gateway.post(f"/prorsa/{path}", body or {}, **ADMIN)

        def roles() -> str:
            return "".join(i.role.value[0] if i.state == "routed" else "." for i in gateway.control.fleet)

        status, answer = await order("engines/e0/flip", {"role": "decode"})
        assert (status, answer["flip"]["after"], roles()) == (200, "decode", "dpdd")
        assert await order("engines/e1/flip", {"role": "decode"}) == (
            409,
            {
                "error": {
                    "message": "instance e1: it is the last prefill instance in service",
                    "type": "conflict_error",
                }
                | {"param": None, "code": None}
            },
        )
        assert (await order("engines/e9/flip", {"role": "decode"}))[0] == 404
        assert (await order("engines/e0/flip", {"role": "both"}))[0] == 400
        assert (await order("roles", {"prefill": 2, "decode": 2}))[0] == 200
        assert sorted(roles()) == ["d", "d", "p", "p"]
        assert (await order("roles", {"prefill": 4, "decode": 0}))[0] == 400
        assert (await order("roles", {"prefill": 1, "decode": 1, "mixed": 2}))[0] == 200
        assert sorted(roles()) == ["d", "m", "m", "p"]
        assert (await order("roles", {"prefill": 1, "decode": 3}))[0] == 200
        assert sorted(roles()) == ["d", "d", "d", "p"]
        assert (await order("roles", {"prefill": 2, "decode": 2}))[0] == 200
        assert (await order("engines/e2/drain"))[0] == 200
        assert roles()[2] == "."
        assert (await order("engines/e2/drain"))[0] == 409
        assert (await order("engines/e2/undrain"))[0] == 200
        assert roles()[2] == "d"
        assert (await order("engines/e2/undrain"))[0] == 409
        _, text = await gateway.get("/prorsa/engines", **ADMIN)
        assert [engine["name"] for engine in json.loads(text)["engines"]] == ["e0", "e1", "e2", "e3"]
        await asyncio.sleep(0.12)
        _, text = await gateway.get("/prorsa/decisions?last=1", **ADMIN)
        shown = json.loads(text)
        assert (len(shown["decisions"]), len(shown["flips"]), shown["made"] >= 2) == (1, 1, True)
        _, text = await gateway.get("/prorsa/status", **ADMIN)
        assert json.loads(text)["flips"] == len(gateway.control.flips) == 7


@on_a_loop
async def test_a_page_of_another_site_may_not_ask() -> None:
    async with bench() as gateway:
        status, answer = await gateway.post(COMPLETIONS, {"prompt": "Once"}, Sec_Fetch_Site="cross-site")
        assert (status, answer["error"]["type"]) == (403, "permission_error")
        assert gateway.control.status().turns == 0


@on_a_loop
async def test_an_engine_that_died_while_it_was_out_is_not_put_back() -> None:
    async with bench(roles="PDD") as gateway:
        assert (await gateway.post("/prorsa/engines/e1/drain", {}, **ADMIN))[0] == 200

        async def gone() -> EngineInfo:
            raise EngineGone("engine e1: no answer")

        gateway.engines[1].info = gone  # type: ignore[method-assign]
        status, answer = await gateway.post("/prorsa/engines/e1/undrain", {}, **ADMIN)
        assert (status, answer["error"]["message"]) == (502, "engine e1: no answer")
        assert gateway.control.fleet["e1"].state == "dead"


@on_a_loop
async def test_a_drain_resends_what_the_engine_served() -> None:
    async with bench(roles="PDD", token_s=0.01) as gateway:
        client = asyncio.create_task(gateway.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 40}))
        await until(lambda: gateway.control.status().output_tokens >= 5)
        busy = next(engine.name for engine in gateway.engines[1:] if engine.legs)
        assert (await gateway.post(f"/prorsa/engines/{busy}/drain", {}, **ADMIN))[1]["resent"] == 1
        _, answer = await client
        context = TOKENIZER.encode("Once")
        for _ in range(40):
            context.append(babble(context))
        assert answer["choices"][0]["text"] == TOKENIZER.decode(context[-40:])
        assert gateway.control.status().resends == 1


@on_a_loop
async def test_the_metrics_are_those_of_the_documentation() -> None:
    async with bench(saying("It is 3.")) as gateway:
        first = await gateway.chat([QUESTION])
        past = [QUESTION, first["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
        await gateway.chat(past)
        await gateway.post(CHAT, {"n": 4})
        await asyncio.sleep(0.12)
        _, text = await gateway.get("/metrics")
    families = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    documented = dict(re.findall(r"^\| `(prorsa_\w+)` \| (\w+) \|", DOCS.read_text(), re.MULTILINE))
    assert families == documented
    lines = text.splitlines()
    for line in (
        'prorsa_requests_total{endpoint="/v1/chat/completions",status="200"} 2',
        'prorsa_requests_total{endpoint="/v1/chat/completions",status="400"} 1',
        'prorsa_turns_total{finish="stop"} 2',
        'prorsa_continued_turns_total{by="prefix"} 1',
        "prorsa_trajectories_sampled_total 1",
        'prorsa_trajectories{state="tool"} 1',
        'prorsa_engine{engine="e0",role="prefill",state="routed"} 1',
        "prorsa_first_token_seconds_count 2",
        'prorsa_first_token_seconds_bucket{le="+Inf"} 2',
        "prorsa_tool_seconds_count 1",
        'prorsa_target_instances{role="prefill"} 1',
    ):
        assert line in lines
    assert all(re.fullmatch(r'#.*|\w+(\{(\w+="[^"]*",?)+\})? [-+0-9.e]+', line) for line in lines)


@on_a_loop
async def test_the_page_shows_roles_and_forecast_and_loads_nothing() -> None:
    async with bench(roles="PPDD") as gateway:
        await gateway.chat([QUESTION])
        await gateway.control.switcher.flip("e0", gateway.control.fleet["e2"].role)
        await asyncio.sleep(0.2)
        _, page = await gateway.get("/")
    for part in ("Roles", "Forecast against now", "Queue", "e3", "role flips"):
        assert part in page
    assert page.count("<svg") == 3
    assert not re.search(r'(src|href)="|url\(|@import', page)
