"""Whatever a client sends is read, or refused with an error for it; it never breaks the gateway."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from gateway_bench import PYTHON, TOKENIZER, configured
from hypothesis import given, settings
from hypothesis import strategies as st

from prorsa.assembly import sampling_params
from prorsa.engines.protocol import SamplingParams
from prorsa.gateway.asks import AskReader, Identity, conversation_key, read_identity
from prorsa.gateway.errors import ApiError

READER = AskReader(TOKENIZER, "arithmetic", sampling_params(configured()))
FIELDS = [
    *("model", "messages", "prompt", "text", "input_ids", "tools", "stop", "stream", "temperature", "top_p", "top_k"),
    *("max_tokens", "max_completion_tokens", "seed", "logprobs", "n", "best_of", "echo", "tool_choice", "prorsa"),
    *("response_format", "stream_options", "sampling_params", "stop_token_ids", "ignore_eos", "role", "content"),
    *("tool_calls", "function", "name", "arguments", "type", "return_token_ids", "return_logprob", "max_new_tokens"),
]
WORDS = ["user", "assistant", "tool", "text", "none", "arithmetic", "\ud800", "{}", "x", ""]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.sampled_from(WORDS) | st.just([1, 2]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(WORDS), "content": VALUES}, optional={"tool_calls": VALUES})


def read(kind: str, body: dict[str, Any]) -> None:
    """Refusals are fine, nothing else is."""
    with contextlib.suppress(ApiError):
        ask = getattr(READER, kind)(body, read_identity({}, body))
        ask.prompt.text.encode()
        assert isinstance(ask.sampling, SamplingParams)
        json.dumps([ask.sampling.temperature, ask.sampling.top_p, ask.sampling.seed], allow_nan=False)


@pytest.mark.parametrize(
    ("kind", "body", "part"),
    [
        ("completions", {"prompt": "a\ud800"}, "half a character"),
        ("chat", {"messages": [{"role": "user", "content": "\udfff"}]}, "half a character"),
        ("completions", {"prompt": [1, 2**31]}, "token ids"),
        ("completions", {"prompt": [1, 100_000]}, "100000"),
        ("generate", {"input_ids": [475]}, "475"),
        ("completions", {"prompt": "a", "temperature": 10**400}, "temperature"),
        ("completions", {"prompt": "a", "temperature": float("nan")}, "temperature"),
        ("completions", {"prompt": "a", "seed": 2**64}, "seed"),
        ("completions", {"prompt": "a", "seed": 2**63}, "seed"),
        ("completions", {"prompt": "a", "seed": -(2**63) - 1}, "seed"),
        ("completions", {"prompt": "a", "seed": 1.0}, "seed"),
        ("completions", {"prompt": "a", "seed": True}, "seed"),
        ("generate", {"text": "a", "sampling_params": {"sampling_seed": 2**63}}, "sampling_seed"),
        ("completions", {"prompt": "a", "max_tokens": 2**80}, "max_tokens"),
    ],
)
def test_what_would_break_something_behind_is_refused(kind: str, body: dict[str, Any], part: str) -> None:
    with pytest.raises(ApiError, match=part) as caught:
        getattr(READER, kind)(body, Identity())
    assert caught.value.status == 400


@settings(max_examples=60)
@given(st.sampled_from(["chat", "completions", "generate"]), BODIES)
def test_any_body_is_read_or_refused(kind: str, body: dict[str, Any]) -> None:
    read(kind, body)


@settings(max_examples=60)
@given(st.lists(MESSAGE, min_size=1, max_size=4), BODIES)
def test_any_chat_is_read_or_refused(messages: list[Any], body: dict[str, Any]) -> None:
    read("chat", {**body, "model": None, "messages": messages})


def test_defaults_are_the_configuration_s_and_fields_go_before_them() -> None:
    plain = READER.completions({"prompt": "x"}, Identity())
    assert (plain.sampling.temperature, plain.sampling.max_new_tokens) == (0.0, 64)
    assert plain.sampling.stop_token_ids == TOKENIZER.eos_ids
    told = READER.chat(
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            "tools": [PYTHON],
            "temperature": 1,
            "top_p": 0.5,
            "top_k": 9,
            "max_completion_tokens": 5,
            "max_tokens": 7,
            "seed": 3,
            "stop": "END",
            "stop_token_ids": [4],
            "user": "somebody",
        },
        Identity(),
    )
    assert told.sampling == SamplingParams(5, 1.0, 0.5, 9, (*TOKENIZER.eos_ids, 4), 3)
    assert (told.stops, told.calls, told.tools) == (("END",), True, ("python",))
    assert told.prompt.text == TOKENIZER.render_text([{"role": "user", "content": "ab"}], [PYTHON])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"role": "user", "content": "a "}, {"role": "user", "content": "a"}, True),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}, False),
        ({"role": "user", "content": "a"}, {"role": "tool", "content": "a"}, False),
    ],
)
def test_conversations_are_compared_by_what_they_say(one: Any, other: Any, same: bool) -> None:
    assert (conversation_key([one]) == conversation_key([other])) == same


def test_a_conversation_has_no_key_before_its_first_answer() -> None:
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    assert READER.chat({"messages": [user]}, Identity()).prompt.conversation is None
    followed = READER.chat({"messages": [user, answer, user]}, Identity()).prompt.conversation
    assert followed == conversation_key([user, {**answer, "tool_calls": []}])
