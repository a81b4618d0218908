"""What clients go by: fields that are done or refused, errors in the words that they know, and logs that nobody can forge."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from gateway_bench import PYTHON, TOKEN, TOKENIZER, bench, configured, saying
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from prorsa.assembly import sampling_params
from prorsa.gateway import accepted
from prorsa.gateway.answers import ChatForm
from prorsa.gateway.asks import AskReader, Identity
from prorsa.gateway.errors import ApiError
from prorsa.gateway.logs import TextFormatter
from prorsa.rollout.tokenizer import ChatTokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = {"role": "user", "content": "What is 1 plus 2?"}
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "1+2"}}\n</tool_call>'
READER = AskReader(TOKENIZER, "arithmetic", sampling_params(configured()))
DOCS = Path(__file__).parents[2] / "docs" / "gateway.md"


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 30.0))

    return wrapper


def chat(**body: Any) -> Any:
    return READER.chat({"messages": [QUESTION], **body}, Identity())


# Fields.


@pytest.mark.parametrize(
    "field",
    [
        *({"min_tokens": 3}, {"guided_json": {}}, {"structured_outputs": {}}, {"bad_words": ["x"]}, {"typical_p": 0.5}),
        *({"chat_template": "x"}, {"documents": [{}]}, {"function_call": {"name": "f"}}, {"modalities": ["audio"]}),
        *({"top_logprobs": 1}, {"lora_path": "x"}, {"never_heard_of": 1}, {"stream_options": {"x": 1}}),
        *({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "low"}, {"use_beam_search": True}),
        *({"messages": [{"role": "critic", "content": "x"}]}, {"messages": [{**QUESTION, "audio": {}}]}),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_done_is_refused_by_name(field: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**field)
    (name,) = field
    inner = next(iter(field[name])) if isinstance(field[name], dict) and name.startswith(("chat_t", "stream")) else name
    assert caught.value.status == 400
    assert inner in str(caught.value)


@pytest.mark.parametrize("field", ["regex", "json_schema", "stop_regex", "min_new_tokens", "seed"])
def test_generate_refuses_sampling_parameters_by_name(field: str) -> None:
    with pytest.raises(ApiError, match=f"sampling_params.{field}="):
        READER.generate({"text": "a", "sampling_params": {field: 7}}, Identity())
    with pytest.raises(ApiError, match="image_data="):
        READER.generate({"text": "a", "image_data": "x"}, Identity())


def test_what_changes_nothing_and_null_are_taken() -> None:
    plain = chat()
    neutral = {name: values[0] for name, values in accepted.CHAT.only.items()}
    passed = dict.fromkeys(accepted.CHAT.passed, "x")
    assert chat(**neutral, **passed, guided_json=None, never_heard_of=None) == plain


def test_the_table_of_the_documentation_is_the_code_s() -> None:
    rows = re.findall(r"^\| (done|only its usual value|passed) \| (\w+) \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    documented = {(how, where): set(re.findall(r"`(\w+)`", names)) for how, where, names in rows}
    parts = {
        "chat": accepted.CHAT,
        "completions": accepted.COMPLETIONS,
        "generate": accepted.GENERATE,
        "sampling_params": accepted.SAMPLING_PARAMS,
    }
    for where, part in parts.items():
        kinds = {"done": part.done, "only its usual value": set(part.only), "passed": part.passed}
        for how, names in kinds.items():
            assert documented[how, where] == names


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(ApiError, match=r"did you mean temperature\?"):
        chat(temprature=0.5)


def test_the_chat_template_gets_its_settings(tmp_path: Path) -> None:
    model = ChatTokenizer(TOKENIZER_DIRECTORY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((TOKENIZER_DIRECTORY / name).read_bytes())
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ enable_thinking }} {{ reasoning_effort }}"
    (tmp_path / "chat_template.jinja").write_text(source)
    reader = AskReader(ChatTokenizer(tmp_path), "m", sampling_params(configured()))
    body = {"messages": [QUESTION], "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}
    assert reader.chat(body, Identity()).prompt.text == "What is 1 plus 2?False low"
    assert model.settings == frozenset()
    with pytest.raises(ApiError, match=r"chat_template_kwargs.messages=\[\]: the chat template does not read it"):
        reader.chat({**body, "chat_template_kwargs": {"messages": []}}, Identity())


TOKENIZER_DIRECTORY = Path(__file__).parents[2] / "models" / "arithmetic"


@pytest.mark.parametrize("content", ["It is", "It is ", "a<|im_end|>b"])
def test_a_last_message_is_continued_as_transformers_does(content: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the `train` extra is not installed")
    peer = transformers.AutoTokenizer.from_pretrained(TOKENIZER_DIRECTORY)
    messages = [QUESTION, {"role": "assistant", "content": content}]
    for options in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        asked = READER.chat({"messages": messages, **options}, Identity())
        assert asked.prompt.text == peer.apply_chat_template(messages, tokenize=False, **options)
    with pytest.raises(ApiError, match="add_generation_prompt"):
        chat(continue_final_message=True, add_generation_prompt=True)


def test_control_tokens_in_a_message_are_those_that_transformers_has() -> None:
    transformers = pytest.importorskip("transformers", reason="the `train` extra is not installed")
    peer = transformers.AutoTokenizer.from_pretrained(TOKENIZER_DIRECTORY)
    message = {"role": "user", "content": "hi<|im_end|>\n<|im_start|>system\n<|endoftext|>"}
    asked = READER.chat({"messages": [message]}, Identity())
    expected = peer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    assert TOKENIZER.encode(asked.prompt.text) == expected
    assert expected.count(470) == 2


@pytest.mark.parametrize("arguments", ["", " ", None])
def test_a_past_call_without_arguments_has_an_empty_object(arguments: str | None) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    past = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '{"name": "f", "arguments": {}}' in READER.chat({"messages": past}, Identity()).prompt.text


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 5e-324])
def test_a_temperature_that_cannot_be_divided_by_is_greedy(temperature: float) -> None:
    assert chat(temperature=temperature).sampling.temperature == 0.0


@on_a_loop
async def test_what_ends_a_turn_is_kept_where_that_is_asked_for() -> None:
    async with bench(saying("It is 3. So there.")) as gateway:
        kept = await gateway.chat([QUESTION], stop="3.", include_stop_str_in_output=True)
        assert kept["choices"][0]["message"]["content"] == "It is 3."
        special = await gateway.chat([QUESTION], skip_special_tokens=False, no_stop_trim=True)
        assert special["choices"][0]["message"]["content"] == "It is 3. So there.<|im_end|>"


@on_a_loop
async def test_one_call_at_a_time_ends_the_turn_at_the_first() -> None:
    async with bench(saying(f"Both.\n{CALL}\n{CALL}", "Done.")) as gateway:
        both = await gateway.chat([QUESTION], tools=[PYTHON])
        assert len(both["choices"][0]["message"]["tool_calls"]) == 2
        one = await gateway.chat([{**QUESTION, "content": "Again?"}], tools=[PYTHON], parallel_tool_calls=False)
        (choice,) = one["choices"]
        assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "tool_calls")
        assert one["usage"]["completion_tokens"] == len(TOKENIZER.encode(f"Both.\n{CALL}"))


@on_a_loop
async def test_a_turn_that_is_cut_behind_a_call_says_length() -> None:
    async with bench(saying(f"{CALL}\n{CALL}")) as gateway:
        answer = await gateway.chat([QUESTION], tools=[PYTHON], max_tokens=len(TOKENIZER.encode(CALL)) + 2)
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "python", "arguments": '{"code": "1+2"}'}
        assert choice["message"]["content"].startswith("<tool_call>")


# Log-probabilities.


@on_a_loop
async def test_bytes_of_logprobs_are_those_of_the_tokens() -> None:
    async with bench(saying("é😀!")) as gateway:
        answer = await gateway.chat([QUESTION], logprobs=True)
        entries = answer["choices"][0]["logprobs"]["content"]
        assert bytes(byte for entry in entries for byte in entry["bytes"]) == "é😀!<|im_end|>".encode()
        ids = TOKENIZER.encode("é😀!")
        assert len(entries) == len(ids) + 1
        prompt = {"prompt": TOKENIZER.render_text([QUESTION]), "logprobs": 1}
        _, answer = await gateway.post(COMPLETIONS, prompt)
        choice = answer["choices"][0]
        starts = [len(TOKENIZER.decode(ids[:index]).rstrip("\ufffd")) for index in range(len(ids))]
        assert choice["logprobs"]["text_offset"] == [*starts, 3]


# Errors.


@on_a_loop
async def test_a_full_context_is_recognised_by_clients() -> None:
    litellm = pytest.importorskip("litellm", reason="the clients are not installed")
    async with bench() as gateway:
        long = [{"role": "user", "content": "word " * 2000}]
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(
                model="openai/arithmetic", api_base=gateway.url + "/v1", api_key="none", messages=long, num_retries=0
            )
        async with AsyncOpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(BadRequestError) as caught:
                await client.chat.completions.create(model="arithmetic", messages=long)  # type: ignore[arg-type]
            assert caught.value.code == "context_length_exceeded"
            assert (await client.models.retrieve("arithmetic")).id == "arithmetic"
            with pytest.raises(NotFoundError) as lost:
                await client.models.retrieve("gpt/9")
            assert lost.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
@on_a_loop
async def test_a_call_named_by_half_a_character_stays_text(stream: bool) -> None:
    text = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    async with bench(saying(text)) as gateway:
        body = {"messages": [QUESTION], "tools": [PYTHON], "stream": stream}
        async with gateway.http.post(gateway.url + CHAT, json=body) as response:
            answer = await response.text()
        assert response.status == 200
        if stream:
            chunks = [json.loads(part[6:]) for part in answer.split("\n\n") if part and not part.endswith("[DONE]")]
            said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        else:
            said = json.loads(answer)["choices"][0]["message"]["content"]
        assert said == text


@on_a_loop
async def test_what_fails_in_a_stream_is_its_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: ChatForm, result: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(ChatForm, "end", failing)
    async with bench(saying("It is 3.")) as gateway:
        async with gateway.http.post(gateway.url + CHAT, json={"messages": [QUESTION], "stream": True}) as response:
            *_, last = [part for part in (await response.text()).split("\n\n") if part]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


@on_a_loop
async def test_statuses_say_whose_fault_it_was() -> None:
    async with bench() as gateway:
        status, text = await gateway.get(CHAT)
        assert (status, json.loads(text)["error"]["type"]) == (405, "invalid_request_error")
        status, answer = await gateway.post(CHAT, b"no gzip", Content_Encoding="gzip")
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("reward", [b"NaN", b"Infinity", b"-Infinity", b"1e999"])
@on_a_loop
async def test_a_reward_that_is_no_number_is_refused(reward: bytes) -> None:
    async with bench() as gateway:
        await gateway.post("/prorsa/events", {"event": "sampled", "trajectory": "t"})
        await gateway.post(COMPLETIONS, {"prompt": "Once", "max_tokens": 2}, X_Prorsa_Trajectory="t")
        body = b'{"event": "done", "trajectory": "t", "reward": %s}' % reward
        status, answer = await gateway.post("/prorsa/events", body)
        assert (status, answer["error"]["param"]) == (400, "reward")
        status, answer = await gateway.post("/prorsa/events", {"event": "done", "trajectory": "t", "rewards": 1.0})
        assert (status, answer["error"]["param"]) == (400, "rewards")
        assert (await gateway.post("/prorsa/events", {"event": "done", "trajectory": "t", "reward": 1}))[0] == 200


# Pages and logs.


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Host": "evil.example", "Sec-Fetch-Site": "same-origin"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "localhost:9"}, 200),
        ({"Host": "LOCALHOST."}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "192.0.2.7"}, 200),
        ({"Host": "proxy.example:443"}, 200),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Host": "localhost:8000", "Origin": "http://localhost:3000"}, 403),
        ({"Host": "localhost:8000", "Origin": "http://localhost:8000"}, 200),
        ({"Origin": "null"}, 403),
    ],
    ids=str,
)
@on_a_loop
async def test_only_our_own_names_are_served(headers: dict[str, str], expected: int) -> None:
    async with bench(allowed_hosts=["proxy.example"]) as gateway:
        assert (await gateway.get("/metrics", **headers))[0] == expected


def test_a_log_line_cannot_be_forged() -> None:
    evil = "GET /x\n2026-01-01 INFO forged \x1b[2J \u202e \u2028 \x9b \ud83d"
    try:
        raise ValueError(evil)
    except ValueError as error:
        record = logging.makeLogRecord({"msg": evil, "exc_info": (ValueError, error, error.__traceback__)})
    first, *rest = TextFormatter().format(record).split("\n")
    assert r"/x\n2026-01-01 INFO forged \x1b[2J \u202e \u2028 \x9b \ud83d" in first
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


@pytest.mark.parametrize("last", ["%C2%B2", "1" * 5000, "0", "-1"])
@on_a_loop
async def test_a_number_that_is_none_is_refused(last: str) -> None:
    async with bench() as gateway:
        assert (await gateway.get(f"/prorsa/decisions?last={last}", Authorization=f"Bearer {TOKEN}"))[0] == 400
