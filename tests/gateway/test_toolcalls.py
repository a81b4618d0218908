"""Qwen's tool calls, out of what a model wrote."""

from __future__ import annotations

import json

import pytest
from gateway_bench import PYTHON, TOKENIZER
from hypothesis import given
from hypothesis import strategies as st

from prorsa.gateway.toolcalls import openai_calls
from prorsa.rollout.toolcalls import CLOSE, OPEN, Call, Parsed, first_call_end, parse

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
        '{"a":' * 10_000,
        '{"name": "", "arguments": {}}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "f", "arguments": {"x": "\\udfff"}}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": -Infinity}}',
        '{"name": "f", "arguments": {"x": 1e999}}',
        '{"name": "f", "arguments": {"x": 1, "x": 2}}',
        '{"name": "f", "arguments": {}, "arguments": {"x": 1}}',
        '{"name": "f", "arguments": {}, "parameters": {"x": 1}}',
        '{"name": "f", "x": 1}',
        '{"name": "f", "arguments": {}} and more',
    ],
)
def test_a_call_that_cannot_be_understood_is_content(body: str) -> None:
    text = f"x <tool_call>{body}</tool_call>"
    assert parse(text) == Parsed(text, ())
    assert parse(ONE + text + ONE) == Parsed(text, (Call("python", '{"code": "1+2"}'),) * 2), (
        "its good neighbours are calls"
    )


def test_a_call_needs_no_closing_tag_at_the_end_of_the_turn() -> None:
    assert parse(ONE.removesuffix("\n</tool_call>")).calls == (Call("python", '{"code": "1+2"}'),)


@pytest.mark.parametrize("body", ['{"name": "f"}', '{"name": "f", "arguments": null}', '{"parameters":{}, "name":"f"}'])
def test_a_call_without_arguments_has_none(body: str) -> None:
    assert parse(f"<tool_call>{body}</tool_call>").calls == (Call("f", "{}"),)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name":"f","parameters":{"x":1}}</tool_call>', '{"x":1}'),
        ('<tool_call>{"name":"f","arguments":{"x":"</tool_call>"}}</tool_call>', '{"x":"</tool_call>"}'),
        ('<tool_call>{"name":"f","arguments":{"arguments": {"x": {}}}}</tool_call>', '{"arguments": {"x": {}}}'),
        ('<tool_call>{"name":"arguments","arguments":{"x":true}}</tool_call>', '{"x":true}'),
        ('<tool_call>{"name":"f","\\u0061rguments":{"x": 1}}</tool_call>', '{"x": 1}'),
        ('<tool_call>\n {"id":"7","type":"function","name":"f","arguments":{"x":1.0}}\n</tool_c', '{"x":1.0}'),
    ],
)
def test_no_argument_is_lost(text: str, arguments: str) -> None:
    assert parse(text) == Parsed("", (Call("f" if '"f"' in text else "arguments", arguments),))


def test_a_call_that_is_not_closed_ends_at_the_next() -> None:
    two = '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}'
    assert [call.name for call in parse(two).calls] == ["f", "g"]
    assert first_call_end(two) == two.rindex(OPEN) - 1 + len("\n")
    assert first_call_end('<tool_call>{"name": "f"}') is None, "its end is not known before the text's"


PIECES = [
    OPEN,
    CLOSE,
    ONE,
    '{"name": "f", ',
    '"arguments": ',
    "{}",
    "}",
    '"',
    "\\",
    "x",
    " ",
    "\n",
    "NaN",
    "\ud83d",
    "[",
    ",",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=14))
def test_every_character_is_in_the_content_or_in_a_call(pieces: list[str]) -> None:
    """In its order, but for the blanks around calls; each good call comes out, whatever stands beside it."""
    text = "".join(pieces)
    parsed = parse(text)
    rest = "".join(parsed.content.split())
    left = 0
    for character in "".join(text.split()):
        left += left < len(rest) and rest[left] == character
    assert left == len(rest), "the content is what stands in the text"
    assert len(parsed.calls) >= pieces.count(ONE) * (not {'"', "\\"} & set("".join(pieces).replace(ONE, "")))
    for call in parsed.calls:
        assert isinstance(json.loads(call.arguments), dict)
        (call.name + call.arguments).encode()
    if not parsed.calls:
        assert parsed.content == text


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
