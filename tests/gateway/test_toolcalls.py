"""Qwen's tool calls, out of what a model wrote."""

from __future__ import annotations

import json

import pytest
from gateway_bench import PYTHON, TOKENIZER
from hypothesis import given
from hypothesis import strategies as st

from prorsa.gateway.toolcalls import Call, Parsed, openai_calls, parse

ONE = '<tool_call>\n{"name": "python", "arguments": {"code": "1+2"}}\n</tool_call>'


def test_text_without_a_call_is_content() -> None:
    assert parse("The answer is 3.") == Parsed("The answer is 3.", ())


def test_calls_and_what_stands_around_them() -> None:
    two = ONE + '\n<tool_call>{"arguments":{"a":[1, 2]},"name":"f"}</tool_call>'
    assert parse("Let me see.\n" + two) == Parsed(
        "Let me see.", (Call("python", '{"code": "1+2"}'), Call("f", '{"a":[1, 2]}'))
    )
    assert parse(ONE + "\nDone.").content == "Done."


def test_arguments_are_kept_as_written() -> None:
    """Not as a JSON library would write them: the next prompt has to give the same tokens."""
    written = '{ "code" : "print(\\"\\u00e4\\")" ,"n":1.0}'
    (call,) = parse(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>').calls
    assert call.arguments == written


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": []}',
        '{"arguments": {}}',
        "[" * 10_000,
    ],
)
def test_a_call_that_cannot_be_understood_is_content(body: str) -> None:
    text = f"x <tool_call>{body}</tool_call>"
    assert parse(text) == Parsed(text, ())
    assert parse(ONE + text) == Parsed(ONE + text, ())


def test_a_call_needs_no_closing_tag_at_the_end_of_the_turn() -> None:
    assert parse(ONE.removesuffix("\n</tool_call>")).calls == (Call("python", '{"code": "1+2"}'),)


def test_a_call_without_arguments_has_none() -> None:
    assert parse('<tool_call>{"name": "f"}</tool_call>').calls == (Call("f", "{}"),)


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=8) | st.lists(st.booleans()), max_size=3))
def test_the_chat_template_writes_a_parsed_call_as_the_model_did(arguments: dict[str, object]) -> None:
    """Then the next request continues the very tokens. The template is the checkpoint's own."""
    written = json.dumps(arguments, ensure_ascii=False)
    turn = f'<tool_call>\n{{"name": "python", "arguments": {written}}}\n</tool_call>'
    calls = openai_calls(parse(turn).calls, "t", 0)
    past = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert f"<|im_start|>assistant\n{turn}<|im_end|>" in TOKENIZER.render_text(past, [PYTHON], False)


def test_ids_of_calls_differ_within_a_run() -> None:
    calls = (Call("f", "{}"), Call("f", "{}"))
    ids = [call["id"] for turn in range(3) for name in ("a", "b") for call in openai_calls(calls, name, turn)]
    assert len(set(ids)) == len(ids)
