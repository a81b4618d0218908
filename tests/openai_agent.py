"""An agent that solves arithmetic with a Python tool over OpenAI's client, as plain as agents come."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from prorsa.rollout.tasks.arithmetic import ArithmeticTask

MODEL_NAME = "arithmetic"
TASK = ArithmeticTask()
MOST_TURNS = 6

Said = tuple[dict[str, Any], list[int]]
"""A message of the model and its token ids."""


def client_of(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)


async def session(client: AsyncOpenAI, number: int, stream: bool) -> list[Any]:
    """The agent on a question: content, calls and token ids of every answer."""
    messages: list[Any] = list(TASK.questions("test", number + 1, 0)[number].messages)
    said = await converse(client, messages, stream)
    return [
        (message["content"], [call["function"] for call in message.get("tool_calls", [])], ids) for message, ids in said
    ]


async def converse(client: AsyncOpenAI, messages: list[Any], stream: bool) -> list[Said]:
    """Until an answer without a tool call. What is said and what the tool returns is added to `messages`."""
    said: list[Said] = []
    for _ in range(MOST_TURNS):
        message, ids = await (streamed if stream else whole)(client, messages)
        said.append((message, ids))
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            try:
                result = str(eval(json.loads(call["function"]["arguments"])["code"].removeprefix("print"), {}))
            except Exception as error:
                result = type(error).__name__
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return said


async def whole(client: AsyncOpenAI, messages: list[Any]) -> Said:
    answer = await client.chat.completions.create(
        model=MODEL_NAME, messages=messages, tools=list(TASK.tools), extra_body={"return_token_ids": True}
    )
    choice = answer.choices[0]
    assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
    return choice.message.model_dump(exclude_none=True) | {"content": choice.message.content or ""}, choice.token_ids


async def streamed(client: AsyncOpenAI, messages: list[Any]) -> Said:
    stream = await client.chat.completions.create(
        model=MODEL_NAME,
        messages=messages,
        tools=list(TASK.tools),
        stream=True,
        extra_body={"return_token_ids": True},
    )
    content, calls, ids = "", [], []
    async for chunk in stream:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        ids += chunk.choices[0].token_ids
        calls += [call.model_dump(include={"id", "type", "function"}) for call in delta.tool_calls or []]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return message | ({"tool_calls": calls} if calls else {}), ids
