"""Text as it arrives: nothing that is given is ever taken back, and stop strings are found wherever they are cut."""

from __future__ import annotations

from collections.abc import Sequence

from gateway_bench import TOKENIZER
from hypothesis import given, settings
from hypothesis import strategies as st

from prorsa.gateway.output import Output
from prorsa.rollout.toolcalls import OPEN, parse

END = 9999


def feed(pieces: Sequence[str], stops: Sequence[str] = (), calls: bool = False) -> tuple[Output, list[str]]:
    """The output after all pieces (or enough), and what was given after each."""
    output = Output(lambda token: pieces[token], (END,), stops, lambda: 0.0, calls)
    given_texts = []
    for token in range(len(pieces)):
        enough = output(token, -1.0)
        given_texts.append(output.fresh())
        if enough:
            break
    return output, given_texts


def test_a_stop_string_is_found_across_pieces_and_cut_off() -> None:
    output, given_texts = feed(["ab", "c", "d", "ef", "never"], ["cde"])
    assert (output.text, output.stopped, given_texts) == ("ab", "cde", ["ab", "", "", ""])
    assert output.ids == [0, 1, 2, 3]


def test_what_was_held_back_in_vain_is_given_later() -> None:
    assert feed(["ab", "c", "d", "x"], ["cde"])[1] == ["ab", "", "", "cdx"]


def test_the_first_stop_string_in_the_text_counts() -> None:
    assert feed(["xxENDyySTOP"], ["STOP", "END"])[0].text == "xx"


def test_a_stop_token_ends_it_and_is_no_text() -> None:
    output = Output(lambda token: "x", (END,), (), lambda: 0.0)
    assert not output(1, -1.0)
    assert not output(END, -1.0)
    assert (output.text, output.stopped, output.ids) == ("x", END, [1, END])


def test_from_a_tool_call_on_text_is_held_back_with_the_blanks_before_it() -> None:
    output, given_texts = feed(["Let me.", "\n", "<tool", "_call>", "{}", " tail"], calls=True)
    assert given_texts == ["Let me.", "", "", "", "", ""]
    assert output.rest() == "\n<tool_call>{} tail"
    assert feed(["a ", "b <", "c"], calls=True)[1] == ["a", " b", " <c"]


@given(st.text("abc<", max_size=40), st.lists(st.integers(1, 4), max_size=40), st.sampled_from(["bca", "cc", "<b"]))
def test_streamed_text_is_the_text_before_the_first_stop_string(text: str, sizes: list[int], stop: str) -> None:
    pieces, at = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[at : at + size])
        at += size
    output, given_texts = feed(pieces, [stop])
    assert output.text == text.partition(stop)[0]
    assert "".join(given_texts) + output.rest() == output.text
    assert isinstance(output.stopped, str) == (stop in text)


@given(st.lists(st.sampled_from(["a", " ", "\n", "<", "<tool_", "call>", OPEN, "x y"]), max_size=12))
def test_streamed_content_never_goes_beyond_the_first_tool_call(pieces: list[str]) -> None:
    output, given_texts = feed(pieces, calls=True)
    before = "".join(pieces).partition(OPEN)[0]
    assert before.startswith("".join(given_texts))
    assert "".join(given_texts) == "".join(given_texts).rstrip()
    assert "".join(given_texts) + output.rest() == "".join(pieces)


@given(st.text(max_size=30))
def test_the_pieces_of_the_tokenizer_are_the_whole_text(text: str) -> None:
    """Characters of several tokens included."""
    ids = TOKENIZER.encode(text)
    step = TOKENIZER.decode_stream()
    assert "".join(map(step, ids)) == TOKENIZER.decode(ids)


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "</tool_call>"}}\n</tool_call>'
FRAGMENTS = st.sampled_from(
    [CALL, CALL[:-12], "<tool_call>", "</tool_call>", "<tool_call>{not}</tool_call>", "say", " ", "\n", "<", "{", "}"]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FRAGMENTS, max_size=6).map("".join), st.lists(st.integers(1, 9), max_size=60))
def test_what_is_streamed_begins_the_content_however_the_text_is_cut(text: str, sizes: list[int]) -> None:
    """So that a streamed answer and a whole one are the same: what is left of the content is given at the end."""
    pieces, at = [], 0
    for size in [*sizes, len(text) or 1]:
        pieces.append(text[at : at + size])
        at += size
    output, given_texts = feed(pieces, calls=True)
    assert output.text == text
    assert parse(output.text).content.startswith("".join(given_texts))
