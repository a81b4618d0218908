"""What a request asks for, read from the bodies of the three generation endpoints.

What would change the output and cannot be done is refused with the field's name (see `accepted`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Literal

from prorsa.engines.protocol import SamplingParams
from prorsa.gateway import accepted, fields
from prorsa.gateway.errors import ApiError, unknown_model
from prorsa.gateway.fields import wrong
from prorsa.gateway.responses import chat_of
from prorsa.rollout import toolcalls
from prorsa.rollout.tasks.base import Message
from prorsa.rollout.tokenizer import ChatTokenizer, TokenizerError

Json = dict[str, Any]
Kind = Literal["chat", "completions", "generate"]

TRAJECTORY_HEADER, GROUP_HEADER, TASK_HEADER = "X-Prorsa-Trajectory", "X-Prorsa-Group", "X-Prorsa-Task"
TASK = "agent"
"""The task of a trajectory whose client names none."""
MOST_STOP_IDS = 1024
_NAME = re.compile(r"[A-Za-z0-9._:/@=+-]{1,128}")
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is, where the client says."""

    name: str | None = None
    group: str | None = None
    task: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """Either ids or text. Of a chat, `conversation` is the key of the messages up to the last answer, if there is one."""

    ids: tuple[int, ...] | None = None
    text: str = ""
    conversation: bytes | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    kind: Kind
    identity: Identity
    prompt: Prompt
    sampling: SamplingParams
    """Its `max_new_tokens` is what was asked for; the room in the context may be less."""
    stops: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    """Whether a stream ends with a chunk that has the usage."""
    logprobs: bool = False
    token_ids: bool = False
    calls: bool = False
    """Whether tool calls are parsed."""
    tools: tuple[str, ...] = ()
    messages: tuple[Message, ...] = ()
    """Of a chat whose answer is a message of its own."""
    one_call: bool = False
    """Whether the first tool call ends the turn."""
    special: bool = False
    """Whether special tokens are part of the text."""
    keep_stop: bool = False
    """Whether what ends the turn is part of the text."""
    response_to: Json | None = None
    """The body of `/v1/responses` that asked for it, of whose settings the answer tells."""


class AskReader:
    """Reads bodies for one model. `defaults` stand where the client says nothing; raises `ApiError` (400, 404)."""

    def __init__(self, tokenizer: ChatTokenizer, model: str, defaults: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._defaults = defaults
        self._parses_arguments = _escapes_arguments(tokenizer)

    def chat(self, body: Json, identity: Identity) -> Ask:
        self._check(body, accepted.CHAT)
        messages = tuple(self._message(message, index) for index, message in enumerate(_list(body, "messages")))
        if not messages:
            raise wrong("messages", [], "must have at least one message")
        tools = _list(body, "tools") if body.get("tools") is not None else []
        names = tuple(_tool_name(tool, index) for index, tool in enumerate(tools))
        if body.get("tool_choice") not in (None, "auto", "none"):
            raise wrong(
                "tool_choice", body["tool_choice"], 'cannot be served; leave it out or set it to "auto" or "none"'
            )
        text, answers = self._rendered(body, messages, tools)
        limit = fields.whole(body, "max_completion_tokens", None, 1) or fields.whole(body, "max_tokens", None, 1)
        calls = bool(tools) and body.get("tool_choice") != "none"
        return Ask(
            kind="chat",
            identity=identity,
            prompt=Prompt(text=_whole_text(text, "messages"), conversation=_key_of_past(messages) if answers else None),
            sampling=self._sampling(body, limit),
            logprobs=fields.typed(body, "logprobs", bool, False),
            calls=calls,
            one_call=calls and not fields.typed(body, "parallel_tool_calls", bool, True),
            tools=names,
            messages=messages if answers else (),
            **_common(body),
        )

    def responses(self, body: Json, identity: Identity) -> Ask:
        return replace(self.chat(chat_of(body), identity), response_to=body)

    def _rendered(self, body: Json, messages: tuple[Message, ...], tools: list[Any]) -> tuple[str, bool]:
        """The prompt, and whether its answer is a message of its own."""
        settings = self._settings(body)
        continued = fields.typed(body, "continue_final_message", bool, False)
        prompted = fields.typed(body, "add_generation_prompt", bool, not continued)
        if continued and prompted:
            raise wrong("add_generation_prompt", True, "set it to false where continue_final_message is true")
        try:
            if continued:
                return self._tokenizer.render_continued(messages, tools, settings), False
            return self._tokenizer.render_text(messages, tools, prompted, settings), prompted
        except TokenizerError as error:
            raise ApiError(400, str(error), "messages") from error

    def _settings(self, body: Json) -> Json:
        """For the chat template, which has to read them."""
        given = fields.typed(body, "chat_template_kwargs", dict, {})
        settings = {name: value for name, value in given.items() if value is not None}
        told = {f"chat_template_kwargs.{name}": name for name in settings}
        if body.get("reasoning_effort") is not None:
            settings["reasoning_effort"] = fields.typed(body, "reasoning_effort", str, "")
            told["reasoning_effort"] = "reasoning_effort"
        for param, name in told.items():
            if name not in self._tokenizer.settings:
                read = ", ".join(sorted(self._tokenizer.settings)) or "none"
                raise wrong(
                    param, settings[name], f"the chat template does not read it (it reads {read}); leave it out"
                )
        return settings

    def completions(self, body: Json, identity: Identity) -> Ask:
        self._check(body, accepted.COMPLETIONS)
        given = body.get("prompt")
        if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
            given = given[0]  # a batch of one
        if isinstance(given, str) and given:
            prompt = Prompt(text=_whole_text(given, "prompt"))
        elif given and fields.is_token_ids(given):
            prompt = Prompt(ids=self._known(given, "prompt"))
        else:
            raise wrong("prompt", given, "must be a text or a list of token ids, one prompt a request")
        logprobs = fields.whole(body, "logprobs", None, 0)
        if logprobs is not None and logprobs > 1:
            raise wrong("logprobs", logprobs, "only the sampled tokens' log-probabilities are known; set it to 1 or 0")
        limit = fields.whole(body, "max_tokens", None, 1)
        return Ask(
            kind="completions",
            identity=identity,
            prompt=prompt,
            sampling=self._sampling(body, limit),
            logprobs=logprobs is not None,
            **_common(body),
        )

    def generate(self, body: Json, identity: Identity) -> Ask:
        params = fields.typed(body, "sampling_params", dict, {})
        accepted.GENERATE.check(body)
        accepted.SAMPLING_PARAMS.check(params, "sampling_params.")
        ids, text = fields.token_ids(body, "input_ids"), fields.typed(body, "text", str, "")
        if bool(ids) == bool(text):
            raise ApiError(400, "give input_ids or text, one of the two and one prompt a request", "input_ids")
        limit = fields.whole(params, "max_new_tokens", None, 1)
        sampling = self._sampling(params, limit, "sampling_seed")
        return Ask(
            kind="generate",
            identity=identity,
            prompt=Prompt(ids=self._known(ids, "input_ids") or None, text=_whole_text(text, "text")),
            sampling=sampling,
            stops=fields.strings(params, "stop"),
            stream=fields.typed(body, "stream", bool, False),
            logprobs=fields.typed(body, "return_logprob", bool, False),
            **_text_options(params),
        )

    def _check(self, body: Json, allowed: accepted.Accepted) -> None:
        model = fields.typed(body, "model", str, self._model)
        if model != self._model:
            raise unknown_model(fields.short(model), self._model)
        allowed.check(body)

    def _sampling(self, body: Json, limit: int | None, seed: str = "seed") -> SamplingParams:
        """`seed` is what the endpoint calls it."""
        defaults = self._defaults
        top_k = fields.typed(body, "top_k", int, defaults.top_k)
        if top_k != -1 and top_k < 1:
            raise wrong("top_k", top_k, "must be at least 1, or -1 for the whole vocabulary")
        stops = fields.token_ids(body, "stop_token_ids", MOST_STOP_IDS)
        if not fields.typed(body, "ignore_eos", bool, False):
            stops = (*self._tokenizer.eos_ids, *stops)
        return SamplingParams(
            max_new_tokens=limit or defaults.max_new_tokens,
            temperature=fields.number(body, "temperature", defaults.temperature, 0.0, 2.0),
            top_p=fields.number(body, "top_p", defaults.top_p, 0.0, 1.0, above=True),
            top_k=top_k,
            stop_token_ids=stops,
            seed=fields.whole(body, seed, None, -fields.MOST),
        )

    def _known(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        """An id that the vocabulary has not would fail in an engine."""
        highest = max(ids, default=0)
        if highest >= self._tokenizer.size:
            raise wrong(param, highest, f"the vocabulary has {self._tokenizer.size} tokens")
        return tuple(ids)

    def _message(self, message: Any, index: int) -> Message:
        """As chat templates take it: text content, and the arguments of tool calls as the template wants them."""
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong(where, message, "must be an object with a role")
        if message["role"] not in ROLES:
            raise wrong(f"{where}.role", message["role"], f"must be {', '.join(ROLES[:-1])} or {ROLES[-1]}")
        for part in accepted.UNSHOWN:
            if message.get(part) is not None:
                raise wrong(f"{where}.{part}", message[part], "cannot be served; leave it out")
        role = "system" if message["role"] == "developer" else message["role"]
        clean: Message = {**message, "role": role, "content": _content(message.get("content"), where)}
        if message.get("tool_calls"):
            clean["tool_calls"] = [self._call(call, where) for call in _list(message, "tool_calls")]
        return clean

    def _call(self, call: Any, where: str) -> Json:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong(f"{where}.tool_calls", call, "each must have a function with a name")
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = "{}"  # how some clients write that there are none
        if not isinstance(arguments, str | dict):
            raise wrong(f"{where}.tool_calls", arguments, "the arguments must be JSON, as a string")
        if isinstance(arguments, str) and self._parses_arguments:
            try:
                arguments = toolcalls.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise wrong(f"{where}.tool_calls", arguments, f"the arguments are no JSON ({error})") from error
        return {**call, "function": {**function, "arguments": arguments}}


def read_identity(headers: Mapping[str, str], body: Json) -> Identity:
    """From the headers, or from the body's object `prorsa`."""
    told = fields.typed(body, "prorsa", dict, {})
    accepted.PRORSA.check(told, "prorsa.")
    return Identity(
        _name(headers.get(TRAJECTORY_HEADER), told.get("trajectory"), TRAJECTORY_HEADER),
        _name(headers.get(GROUP_HEADER), told.get("group"), GROUP_HEADER),
        _name(headers.get(TASK_HEADER), told.get("task"), TASK_HEADER),
    )


def checked_name(value: Any, param: str) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise wrong(param, value, "must be 1 to 128 of the characters A-Z a-z 0-9 . _ : / @ = + -")
    return value


def conversation_key(messages: Sequence[Message]) -> bytes:
    """Equal for conversations that say the same, however blanks and the JSON of tool calls are written."""
    return blake2b(json.dumps([_gist(message) for message in messages]).encode(), digest_size=16).digest()


def _key_of_past(messages: Sequence[Message]) -> bytes | None:
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    return conversation_key(messages[: answers[-1] + 1]) if answers else None


def _gist(message: Message) -> list[Any]:
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return [message["role"], message["content"].strip(), [[c["name"], _plain(c["arguments"])] for c in calls]]


def _plain(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return json.dumps(arguments, sort_keys=True)
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _common(body: Json) -> Json:
    options = fields.typed(body, "stream_options", dict, {})
    accepted.STREAM_OPTIONS.check(options, "stream_options.")
    return {
        "stops": fields.strings(body, "stop"),
        "stream": fields.typed(body, "stream", bool, False),
        "usage": fields.typed(options, "include_usage", bool, False),
        "token_ids": fields.typed(body, "return_token_ids", bool, False),
        **_text_options(body),
    }


def _text_options(body: Json) -> Json:
    keep = [fields.typed(body, name, bool, False) for name in ("include_stop_str_in_output", "no_stop_trim")]
    return {"special": not fields.typed(body, "skip_special_tokens", bool, True), "keep_stop": any(keep)}


def _whole_text(text: str, param: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise wrong(param, text, f"has half a character (a lone surrogate) at {error.start}") from None
    return text


def _list(body: Json, name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise wrong(name, value, "must be a list")
    return value


def _tool_name(tool: Any, index: int) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(f"tools[{index}]", tool, "must be an object with a function that has a name")
    return str(function["name"])


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    raise wrong(f"{where}.content", content, "must be text")


def _name(header: str | None, field: Any, param: str) -> str | None:
    value = header if header is not None else field
    return None if value is None else checked_name(value, param)


def _escapes_arguments(tokenizer: ChatTokenizer) -> bool:
    """Whether the chat template would write the arguments of a past tool call as a JSON string if it were given one."""
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    past: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        return '{"a": 1}' not in tokenizer.render_text(past, None, False)
    except TokenizerError:
        return True  # it cannot take a string at all
