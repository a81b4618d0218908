"""The chat tokenizer: token in, token out is the whole conversation rendered at once (promise 12), as `transformers` does."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorsa.rollout.tasks.arithmetic import PYTHON_TOOL, ArithmeticTask, conversation
from prorsa.rollout.tokenizer import ChatTokenizer, TokenizerError

MODEL = Path(__file__).parents[2] / "models" / "arithmetic"
CHAT = ChatTokenizer(MODEL)
TOOLS = (PYTHON_TOOL,)
NEWLINE = CHAT.encode("\n")


@dataclass
class Conversation:
    question: str
    turns: list[tuple[str, str]]
    """What the assistant writes and what the tool answers."""
    final: str

    def messages(self) -> list[dict[str, Any]]:
        messages = list(conversation(self.question))
        for written, result in self.turns:
            messages += [{"role": "assistant", "content": written}, {"role": "tool", "content": result}]
        return [*messages, {"role": "assistant", "content": self.final}]

    def assembled(self) -> list[int]:
        """The ids as an episode puts them together, up to the last end of turn."""
        ids = CHAT.render(conversation(self.question), TOOLS)
        for written, result in self.turns:
            ids += [*CHAT.encode(written), CHAT.eos_ids[0], *CHAT.tool_turn(result)]
        return [*ids, *CHAT.encode(self.final), CHAT.eos_ids[0]]


def texts() -> st.SearchStrategy[str]:
    """Whatever a model or a tool may write: any text, digits, newlines at the edges, code, tags and special tokens."""
    pieces = [
        "\n",
        " ",
        "37",
        "The answer is",
        "<tool_call>",
        "</tool_response>",
        '{"name": ',
        "{{",
        "<|im_start|>",
        "é",
        "\r",
    ]
    return st.one_of(st.text(), st.lists(st.sampled_from(pieces)).map("".join))


CONVERSATIONS = st.builds(Conversation, texts(), st.lists(st.tuples(texts(), texts()), max_size=4), texts())


@given(CONVERSATIONS)
@settings(deadline=None)
def test_an_assembled_conversation_is_the_conversation_rendered(talk: Conversation) -> None:
    assert talk.assembled() + NEWLINE == CHAT.render(talk.messages(), TOOLS, add_generation_prompt=False)


@given(CONVERSATIONS)
@settings(deadline=None)
def test_rendering_equals_transformers(talk: Conversation) -> None:
    peer = _peer()
    for messages, prompt in ((talk.messages(), False), (talk.messages()[:-1], True)):
        for tools in (TOOLS, None):
            expected = peer.apply_chat_template(
                messages, tools=tools and list(tools), add_generation_prompt=prompt, tokenize=True, return_dict=False
            )
            assert CHAT.render(messages, tools, add_generation_prompt=prompt) == expected


@given(texts())
@settings(deadline=None)
def test_encoding_and_decoding_equal_transformers(text: str) -> None:
    peer = _peer()
    ids = CHAT.encode(text)
    assert ids == peer.encode(text, add_special_tokens=False)
    for skip in (True, False):
        assert CHAT.decode(ids, skip) == peer.decode(ids, skip_special_tokens=skip)


@cache
def _peer() -> Any:
    transformers = pytest.importorskip("transformers", reason="the `verl` extra is not installed")
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@given(st.text())
def test_decoding_gives_back_the_text(text: str) -> None:
    assert CHAT.decode(CHAT.encode(text)) == text


def test_a_structured_call_renders_as_the_text_that_the_model_writes() -> None:
    code = 'print("a\\n<b>", 37*48)'
    structured = {"type": "function", "function": {"name": "python", "arguments": {"code": code}}}
    text = "<tool_call>\n" + json.dumps({"name": "python", "arguments": {"code": code}}) + "\n</tool_call>"
    question = list(conversation("Compute 37 * 48."))
    for content in ("", "First."):
        written = f"{content}\n{text}" if content else text
        assert CHAT.render_text(
            [*question, {"role": "assistant", "content": content, "tool_calls": [structured]}], TOOLS
        ) == CHAT.render_text([*question, {"role": "assistant", "content": written}], TOOLS)


def test_a_tool_turn_written_out() -> None:
    expected = "\n<|im_start|>user\n<tool_response>\n1776\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert CHAT.decode(CHAT.tool_turn("1776"), skip_special_tokens=False) == expected


def test_digits_are_single_tokens_and_turns_end_with_one_token() -> None:
    assert len(CHAT.encode("6864")) == 4
    assert CHAT.encode("48 * 37")[-2:] == CHAT.encode("37")
    assert CHAT.encode("<|im_end|>") == [CHAT.eos_ids[0]]
    assert len(CHAT.encode("<tool_call>")) == 1


def test_first_prompts_are_short() -> None:
    task = ArithmeticTask()
    lengths = [len(CHAT.render(question.messages, task.tools)) for question in task.questions("test", 200, 0)]
    assert min(lengths) >= 80
    assert max(lengths) <= 200


def test_a_template_inside_the_settings_serves_as_well(tmp_path: Path) -> None:
    shutil.copyfile(MODEL / "tokenizer.json", tmp_path / "tokenizer.json")
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": template})
    )
    chat = ChatTokenizer(tmp_path)
    assert chat.render_text([{"role": "user", "content": "Hi"}]) == "<|im_start|>Hi<|im_end|>"
    assert chat.eos_ids == CHAT.eos_ids[:1]


def test_missing_pieces_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: cannot be read"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot be read"):
        ChatTokenizer(tmp_path)
    shutil.copyfile(MODEL / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match="no chat_template"):
        ChatTokenizer(tmp_path)


def test_a_template_that_refuses_is_reported(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system turn, please') }}")
    with pytest.raises(TokenizerError, match="no system turn, please"):
        ChatTokenizer(tmp_path).render(conversation("Compute 1 + 1."), TOOLS)
