"""OpenAI's Responses interface as a way to ask for a chat: Codex and the openai-agents SDK speak it.

A request carries its whole conversation in `input`. Nothing is stored, so that `previous_response_id` and `conversation` are
refused by name; what is computed elsewhere (hosted tools, images, files, reasoning items) is refused too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prorsa.gateway import accepted, fields
from prorsa.gateway.fields import wrong

Json = dict[str, Any]

AS_IN_CHAT = (
    "model temperature top_p top_k seed stop stream tool_choice parallel_tool_calls chat_template_kwargs prorsa"
    " ignore_eos stop_token_ids skip_special_tokens"
)
"""Names of the fields that a chat has too, where they mean the same."""
TEXTS = ("input_text", "output_text", "text")


def chat_of(body: Json) -> Json:
    """The body of the chat that a body of `/v1/responses` asks for. Raises `ApiError` (400)."""
    for name in ("previous_response_id", "conversation"):
        if body.get(name) is not None:
            raise wrong(name, body[name], "nothing is stored here; send the whole conversation as input")
    accepted.RESPONSES.check(body)
    chat: Json = {name: body[name] for name in AS_IN_CHAT.split() if name in body}
    chat["max_completion_tokens"] = body.get("max_output_tokens")
    if body.get("tools"):
        chat["tools"] = [_tool(tool, index) for index, tool in enumerate(_list(body["tools"], "tools"))]
    reasoning = fields.typed(body, "reasoning", dict, {})
    accepted.REASONING.check(reasoning, "reasoning.")
    chat["reasoning_effort"] = reasoning.get("effort")
    chat["messages"] = list(_messages(body))
    return chat


def _messages(body: Json) -> Iterator[Json]:
    """The conversation as a chat has it: an answer and its calls, which are items of their own here, are one message."""
    if body.get("instructions") is not None:
        yield {"role": "system", "content": _string(body["instructions"], "instructions")}
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(given, "input")
    answer: Json | None = None
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise wrong(where, item, "must be an object")
        kind = item.get("type", "message")
        if kind == "function_call":
            answer = answer or {"role": "assistant", "content": ""}
            answer.setdefault("tool_calls", []).append(_call(item, where))
            continue
        # A message of the assistant begins an answer, and the calls behind it belong to it.
        if answer is not None:
            yield answer
        answer = None
        if kind == "message" and item.get("role") == "assistant":
            answer = {"role": "assistant", "content": _text(item.get("content"), f"{where}.content")}
        elif kind == "message":
            yield {"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")}
        elif kind == "function_call_output":
            content = _text(item.get("output"), f"{where}.output")
            yield {"role": "tool", "tool_call_id": _string(item.get("call_id"), f"{where}.call_id"), "content": content}
        else:
            raise wrong(f"{where}.type", kind, "cannot be served; message, function_call and function_call_output can")
    if answer is not None:
        yield answer


def _call(item: Json, where: str) -> Json:
    called = {name: _string(item.get(name), f"{where}.{name}") for name in ("name", "arguments")}
    return {"id": _string(item.get("call_id"), f"{where}.call_id"), "type": "function", "function": called}


def _tool(tool: Any, index: int) -> Json:
    """A chat puts into an object `function` what stands beside the type here."""
    where = f"tools[{index}]"
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise wrong(where, tool, "only tools of type function can be served")
    function = {name: value for name, value in tool.items() if name not in ("type", "strict") and value is not None}
    return {"type": "function", "function": function}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = _list(content, where)
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in TEXTS or not isinstance(part.get("text"), str):
            raise wrong(where, part, f"must be text, a part of type {', '.join(TEXTS)}")
    return "".join(part["text"] for part in parts)


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(where, value, "must be a text or a list")
    return value


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise wrong(where, value, "must be a string")
    return value
