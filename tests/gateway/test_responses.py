"""OpenAI's Responses interface, by OpenAI's own client and as openai-agents and Codex use it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_bench import PYTHON, TOKENIZER, bench, saying
from openai import AsyncOpenAI, BadRequestError

from prorsa.engines.protocol import SamplingParams
from prorsa.gateway.asks import AskReader, Identity
from prorsa.gateway.errors import ApiError

READER = AskReader(TOKENIZER, "arithmetic", SamplingParams(32))
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(37*48)"}}\n</tool_call>'
TOOL = {"type": "function", **PYTHON["function"], "strict": False}
QUESTION = "Compute 37 * 48."


def read(**body: Any) -> Any:
    return READER.responses(body, Identity())


def chat(messages: list[dict[str, Any]], **body: Any) -> Any:
    return READER.chat({"messages": messages, **body}, Identity())


def test_the_prompt_is_that_of_the_same_chat() -> None:
    call = {"name": "python", "arguments": '{"code": "print(37*48)"}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", **call},
        {"type": "function_call", "call_id": "c2", **call},
        {"type": "function_call_output", "call_id": "c1", "output": "1776"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "1776"}]},
        {"type": "function_call", "call_id": "c3", **call},
        {"type": "function_call_output", "call_id": "c3", "output": "1776"},
        {"role": "developer", "content": "Answer."},
    ]
    calls = [{"id": f"c{n}", "type": "function", "function": call} for n in (1, 2, 3)]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You compute."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "c1", "content": "1776"},
        {"role": "tool", "tool_call_id": "c2", "content": "1776"},
        {"role": "assistant", "content": "", "tool_calls": calls[2:]},
        {"role": "tool", "tool_call_id": "c3", "content": "1776"},
        {"role": "developer", "content": "Answer."},
    ]
    ours = read(input=items, instructions="You compute.", tools=[TOOL], max_output_tokens=7, temperature=0.5)
    theirs = chat(messages, tools=[PYTHON], max_completion_tokens=7, temperature=0.5)
    assert ours.prompt == theirs.prompt
    assert ours.sampling == theirs.sampling
    assert (ours.calls, ours.tools) == (True, ("python",))
    assert read(input=QUESTION).prompt == chat([{"role": "user", "content": QUESTION}]).prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": 3}, "input"),
        ({"reasoning": {"effort": "high"}}, "reasoning_effort"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"truncation": "auto"}, "truncation"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**{"input": QUESTION, **body})
    assert (refused.value.status, refused.value.param) == (400, param)


def test_what_changes_nothing_is_taken() -> None:
    taken = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "metadata": {},
    }
    assert read(input=QUESTION, **taken).prompt == read(input=QUESTION).prompt


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_an_agent_with_a_tool_is_one_trajectory() -> None:
    async def main() -> None:
        async with bench(saying(CALL, "The answer is 1776.")) as served:
            client = client_of(served.url)
            items: list[Any] = [{"role": "user", "content": QUESTION}]
            first = await client.responses.create(model="arithmetic", input=items, tools=[TOOL])  # type: ignore[list-item]
            (called,) = first.output
            assert called.type == "function_call"
            assert (called.name, json.loads(called.arguments)) == ("python", {"code": "print(37*48)"})
            assert first.status == "completed"
            items += [called.model_dump(exclude_none=True)]
            items += [{"type": "function_call_output", "call_id": called.call_id, "output": "1776"}]
            second = await client.responses.create(model="arithmetic", input=items, tools=[TOOL])  # type: ignore[list-item]
            assert second.output_text == "The answer is 1776."
            assert second.usage is not None
            assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens
            assert second.id.removesuffix(".1") == first.id.removesuffix(".0")
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize("answer", ["The answer is 1776.", CALL, f"Let me see.\n{CALL}", ""])
def test_a_stream_is_the_whole_response_in_pieces(answer: str) -> None:
    async def main() -> None:
        async with bench(saying(answer)) as served:
            client = client_of(served.url)
            whole = await client.responses.create(model="arithmetic", input=QUESTION, tools=[TOOL])  # type: ignore[list-item]
            async with client.responses.stream(model="arithmetic", input=QUESTION, tools=[TOOL]) as stream:  # type: ignore[list-item]
                events = [event async for event in stream]
                final = await stream.get_final_response()
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert text == whole.output_text == final.output_text

            def said(output: Any) -> list[Any]:
                return [(i.name, i.arguments) if i.type == "function_call" else i.content[0].text for i in output]

            assert said(final.output) == said(whole.output)
            assert [event.sequence_number for event in events if hasattr(event, "sequence_number")][-1] > 2
            assert events[0].type == "response.created"
            assert events[-1].type == "response.completed"
            await client.close()

    asyncio.run(main())


def test_a_response_that_its_budget_cut_is_incomplete() -> None:
    async def main() -> None:
        async with bench(saying("The answer is 1776.")) as served:
            client = client_of(served.url)
            cut = await client.responses.create(model="arithmetic", input=QUESTION, max_output_tokens=3)
            assert cut.status == "incomplete"
            assert cut.incomplete_details is not None
            assert cut.incomplete_details.reason == "max_output_tokens"
            with pytest.raises(BadRequestError, match="nothing is stored"):
                await client.responses.create(model="arithmetic", input=QUESTION, previous_response_id="resp_1")
            await client.close()

    asyncio.run(main())
