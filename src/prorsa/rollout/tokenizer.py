"""Token ids of conversations, from a checkpoint's own tokenizer and chat template, without `transformers`.

Invariant (token in, token out): for a template whose special tokens delimit the turns, as Qwen's do, the prompt's ids, the
generated ids up to the end-of-turn token, `tool_turn(...)` of the result, the next generated ids, and so on, together are
the ids of the whole conversation rendered at once. `render` gives the same ids as `transformers`' `apply_chat_template`:
a message that spells out a special token, such as `<|im_end|>`, has that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from prorsa.rollout.tasks.base import Message

_MARK = "\x00assistant\x00"
_CONTINUE = "\x00continue\x00 "
"""Stands where a message goes on. Its blank shows whether the template keeps blanks at the end of a message."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of one byte, in vocabularies that fall back to them."""


class TokenizerError(Exception):
    """The checkpoint has no usable tokenizer or chat template; the message names the file and the remedy."""


class ChatTokenizer:
    """Reads a checkpoint directory: `tokenizer.json`, `tokenizer_config.json` and, where they exist, `chat_template.jinja`
    and `generation_config.json`."""

    def __init__(self, path: str | Path) -> None:
        directory = Path(path)
        settings = json.loads(_read(directory / "tokenizer_config.json"))
        _read(directory / "tokenizer.json")
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._special = {key: _text(value) for key, value in settings.items() if key.endswith("_token") and value}
        environment, source = _environment(), _template(directory, settings)
        self._template = environment.from_string(source)
        read = meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
        self.settings = read - {"messages", "tools", "add_generation_prompt", *self._special}
        """Variables that the template reads beside the conversation, such as `enable_thinking`."""
        self.size: int = self._tokenizer.get_vocab_size()
        """Tokens of the vocabulary, special ones included."""
        self.eos_ids = self._eos_ids(directory)
        """The tokens that end a turn, the end-of-turn token first."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens that it spells out become themselves, none are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. The tags of tool calls are kept in either case."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_stream(self, skip_special_tokens: bool = True) -> Callable[[int], str]:
        """A function that takes the ids of one text in order and gives the text that each completes.

        "" for an id that completes no character.
        """
        stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        return lambda token: stream.step(self._tokenizer, token) or ""

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the UTF-8 of a text; it may be part of a character."""
        written = self._tokenizer.id_to_token(token)
        if written is None or token in self._added:
            return (written or "").encode()
        if byte := _BYTE.fullmatch(written):
            return bytes.fromhex(byte[1])
        if self._byte_level and all(character in _BYTES for character in written):
            return bytes(_BYTES[character] for character in written)
        return self.decode([token], skip_special_tokens=False).encode()

    @cached_property
    def _added(self) -> Mapping[int, Any]:
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return added

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        return self.encode(self.render_text(messages, tools, add_generation_prompt))

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """`settings` are for the template, see `ChatTokenizer.settings`. Raises `TokenizerError` when it refuses."""
        try:
            return self._template.render(
                {
                    **(settings or {}),
                    **self._special,
                    "messages": list(messages),
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            # A template may fail in any way at messages that it was not written for.
            raise TokenizerError(f"the chat template refused the messages: {error}") from error

    def render_continued(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation up to the end of the last message's content, which goes on there. Raises `TokenizerError`."""
        *past, last = messages
        marked = {**last, "content": last["content"] + _CONTINUE}
        text, mark, rest = self.render_text([*past, marked], tools, False, settings).rpartition(_CONTINUE.rstrip())
        if not mark:
            raise TokenizerError("the chat template leaves out the last message, which should be continued")
        return text if rest.startswith(" ") else text.rstrip()

    def tool_turn(self, result_text: str) -> list[int]:
        """The ids between an assistant turn's end-of-turn token and the first token of the next assistant turn."""
        messages = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": _MARK},
            {"role": "tool", "content": result_text},
        ]
        end = self._tokenizer.id_to_token(self.eos_ids[0])
        _, _, between = self.render_text(messages).partition(_MARK + end)
        return self.encode(between)

    def _eos_ids(self, directory: Path) -> tuple[int, ...]:
        token = self._special.get("eos_token")
        turn_end = None if token is None else self._tokenizer.token_to_id(token)
        if turn_end is None:
            raise TokenizerError(
                f"{directory}/tokenizer_config.json: eos_token={token!r} is not in the vocabulary; name one"
            )
        generation = directory / "generation_config.json"
        others = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else None
        listed = [] if others is None else others if isinstance(others, list) else [others]
        return tuple(dict.fromkeys([turn_end, *listed]))


def _environment() -> ImmutableSandboxedEnvironment:
    """What checkpoints' templates are written for: trimmed blocks, plain JSON, loop controls, `raise_exception`."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes as: printable ones as themselves, the others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _template(directory: Path, settings: dict[str, Any]) -> str:
    separate = directory / "chat_template.jinja"
    if separate.exists():
        return separate.read_text()
    inline = settings.get("chat_template")
    if not isinstance(inline, str):
        raise TokenizerError(
            f"{directory}: no chat_template.jinja and no chat_template in tokenizer_config.json; add one"
        )
    return inline


def _text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise TokenizerError(
            f"{path}: cannot be read ({error.strerror}); give the directory of a checkpoint"
        ) from error
