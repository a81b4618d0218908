"""Which fields a request may have. Any other is refused by name, unless it is null.

A field is done; or it can only have the values that change nothing; or it never changes the output and is let pass.
docs/gateway.md has the same as a table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from prorsa.gateway.fields import wrong


@dataclass(frozen=True, slots=True)
class Accepted:
    done: frozenset[str]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values that can be served, the usual one first."""
    passed: frozenset[str] = frozenset()

    def check(self, body: Mapping[str, Any], where: str = "") -> None:
        """`where` stands before the names of fields in errors. Raises `ApiError` (400)."""
        for name, value in body.items():
            if value is None or name in self.done or name in self.passed:
                continue
            allowed = self.only.get(name)
            if allowed is None:
                near = get_close_matches(name, self.done, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise wrong(where + name, value, f"is unknown or cannot be served here; leave it out{hint}")
            if not any(_same(value, one) for one in allowed):
                raise wrong(
                    where + name, value, f"cannot be served; leave it out or set it to {json.dumps(allowed[0])}"
                )


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


_SAMPLING = frozenset(
    ["temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "no_stop_trim"]
)
_OPENAI = _SAMPLING | frozenset(
    [
        "model",
        "max_tokens",
        "seed",
        "stream",
        "stream_options",
        "logprobs",
        "return_token_ids",
        "prorsa",
        "include_stop_str_in_output",
    ]
)
_ONLY_SAMPLING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "min_new_tokens": (0,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "logit_bias": ({},),
}
_ONLY_OPENAI: dict[str, tuple[Any, ...]] = {
    **_ONLY_SAMPLING,
    "best_of": (1,),
    "echo": (False,),
    "add_special_tokens": (False,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "return_tokens_as_token_ids": (False,),
}
_PASSED = frozenset(
    [
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "rid",
        "priority",
        "cache_salt",
        "extra_key",
        "spaces_between_special_tokens",
    ]
)

CHAT = Accepted(
    _OPENAI
    | frozenset(
        [
            "messages",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "max_completion_tokens",
            "chat_template_kwargs",
            "reasoning_effort",
            "add_generation_prompt",
            "continue_final_message",
        ]
    ),
    {
        **_ONLY_OPENAI,
        "top_logprobs": (0,),
        "functions": ([],),
        "function_call": ("auto", "none"),
        "modalities": (["text"],),
        "separate_reasoning": (False,),
    },
    _PASSED,
)
COMPLETIONS = Accepted(_OPENAI | {"prompt"}, {**_ONLY_OPENAI, "suffix": ("",)}, _PASSED)
GENERATE = Accepted(
    frozenset({"text", "input_ids", "sampling_params", "stream", "return_logprob", "prorsa"}),
    {
        "logprob_start_len": (-1,),
        "top_logprobs_num": (0,),
        "return_text_in_logprobs": (False,),
        "return_hidden_states": (False,),
        "return_routed_experts": (False,),
    },
    frozenset({"rid", "priority", "extra_key", "log_metrics", "custom_labels"}),
)
SAMPLING_PARAMS = Accepted(
    _SAMPLING | {"max_new_tokens", "sampling_seed"}, _ONLY_SAMPLING, frozenset({"spaces_between_special_tokens"})
)
STREAM_OPTIONS = Accepted(
    frozenset({"include_usage"}), {"continuous_usage_stats": (False,)}, frozenset({"include_obfuscation"})
)
PRORSA = Accepted(frozenset({"trajectory", "group", "task"}))
UNSHOWN = ("function_call", "audio", "refusal")
"""Parts of a message that no chat template shows; the others are the template's to show."""
_EVENT = frozenset({"event", "trajectory"})
EVENTS = {
    "sampled": Accepted(_EVENT | {"group", "task", "prompt_tokens"}),
    "sandbox_starting": Accepted(_EVENT | {"mode", "image", "node_class"}),
    "tool_started": Accepted(_EVENT | {"tool"}),
    "reward_started": Accepted(_EVENT),
    "done": Accepted(_EVENT | {"reward", "admitted"}),
    "dropped": Accepted(_EVENT | {"reason"}),
}
ROLES = Accepted(frozenset({"prefill", "decode", "mixed"}))
FLIP = Accepted(frozenset({"role"}))
