"""The three forms of an answer, as one JSON object or as server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from prorsa.cluster.turns import TurnResult
from prorsa.engines.protocol import FinishReason
from prorsa.gateway.toolcalls import openai_calls
from prorsa.gateway.turns import Running
from prorsa.rollout.tokenizer import ChatTokenizer

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
encoded = msgspec.json.Encoder().encode
"""JSON without blanks, UTF-8."""


class Form(Protocol):
    """How one endpoint answers one turn."""

    def piece(self) -> bytes:
        """Events for what is new since the last call, b"" where nothing is."""
        ...

    def end(self, result: TurnResult) -> bytes:
        """The events that end the stream, with whatever was still held back."""
        ...

    def whole(self, result: TurnResult) -> Json: ...


def event(data: Json) -> bytes:
    return b"data: " + encoded(data) + b"\n\n"


class Logprobs:
    """The log-probabilities of a turn in pieces, one entry for each token. Only the sampled tokens' are known."""

    def __init__(self, running: Running, tokenizer: ChatTokenizer) -> None:
        self._output = running.output
        self._decode = tokenizer.decode
        self._bytes = tokenizer.token_bytes
        self._step = tokenizer.decode_stream(skip_special_tokens=not running.ask.special)
        self._given = 0
        self._offset = 0
        """Characters that the tokens before completed."""

    def chat(self) -> Json:
        entries = [
            {
                "token": self._text(token),
                "logprob": logprob,
                "bytes": list(self._bytes(token)),
                "top_logprobs": [],
            }
            for token, logprob in self._fresh()
        ]
        return {"content": entries, "refusal": None}

    def completions(self) -> Json:
        tokens, offsets, logprobs = [], [], []
        for token, logprob in self._fresh():
            tokens.append(self._text(token))
            logprobs.append(logprob)
            offsets.append(self._offset)
            self._offset += len(self._step(token))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}

    def _text(self, token: int) -> str:
        return self._decode([token], skip_special_tokens=False)

    def _fresh(self) -> Iterator[tuple[int, float]]:
        output, start = self._output, self._given
        self._given = len(output.ids)
        yield from zip(output.ids[start:], output.logprobs[start:], strict=True)


class OpenAI:
    """What chat and text completions have in common."""

    def __init__(self, running: Running, tokenizer: ChatTokenizer, model: str) -> None:
        chat = running.ask.kind == "chat"
        self._running = running
        self._ask = running.ask
        self._logprobs = Logprobs(running, tokenizer)
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{running.trajectory}.{running.number}"
        self._created = int(time.time())
        self._model = model
        self._object = "chat.completion" if chat else "text_completion"
        self._chunk = "chat.completion.chunk" if chat else "text_completion"
        self._ids_given = 0
        self._head = b"data: " + encoded(self._frame(self._chunk))[:-1] + b',"choices":['

    def _frame(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _usage(self, result: TurnResult) -> Json:
        prompt, output = len(self._running.prompt_ids), len(result.token_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
        }

    def _event(self, choice: Json) -> bytes:
        """A chunk; the frame around the choice is written once for all."""
        return self._head + encoded({"index": 0, **choice, **self._new_ids()}) + b"]}\n\n"

    def _new_ids(self) -> Json:
        if not self._ask.token_ids:
            return {}
        start, ids = self._ids_given, self._running.output.ids
        self._ids_given = len(ids)
        return {"token_ids": ids[start:]}

    def _tail(self, result: TurnResult) -> bytes:
        if not self._ask.usage:
            return DONE
        return event({**self._frame(self._chunk), "choices": [], "usage": self._usage(result)}) + DONE

    def _answer(self, choice: Json, result: TurnResult) -> Json:
        prompt_ids = {"prompt_token_ids": list(self._running.prompt_ids)} if self._ask.token_ids else {}
        choices = [{"index": 0, **choice, **self._new_ids()}]
        return {**self._frame(self._object), "choices": choices, "usage": self._usage(result), **prompt_ids}


class ChatForm(OpenAI):
    def __init__(self, running: Running, tokenizer: ChatTokenizer, model: str) -> None:
        super().__init__(running, tokenizer, model)
        self._begun = False
        self._content = ""

    def piece(self) -> bytes:
        text = self._running.output.fresh()
        if not text:
            return b""
        self._content += text
        return self._delta({"content": text}, None)

    def end(self, result: TurnResult) -> bytes:
        parsed = self._running.parsed()
        events = b""
        # What was held back: blanks, the beginning of a tag that became none, and what stands behind the tool calls.
        if rest := parsed.content.removeprefix(self._content):
            events += self._delta({"content": rest}, None)
        if parsed.calls:
            calls = openai_calls(parsed.calls, self._running.trajectory, self._running.number)
            events += self._delta({"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}, None)
        return events + self._delta({}, self._finish(result)) + self._tail(result)

    def whole(self, result: TurnResult) -> Json:
        parsed = self._running.parsed()
        message: Json = {"role": "assistant", "content": parsed.content}
        if parsed.calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = openai_calls(parsed.calls, self._running.trajectory, self._running.number)
        choice: Json = {"message": message, "finish_reason": self._finish(result)}
        choice["logprobs"] = self._logprobs.chat() if self._ask.logprobs else None
        return self._answer(choice, result)

    def _delta(self, delta: Json, finish: str | None) -> bytes:
        first = {} if self._begun else {"role": "assistant"}
        self._begun = True
        logprobs = {"logprobs": self._logprobs.chat()} if self._ask.logprobs else {}
        return self._event({"delta": first | delta, "finish_reason": finish, **logprobs})

    def _finish(self, result: TurnResult) -> str:
        """A turn that its budget cut is told so, whether or not it has calls."""
        called = self._running.parsed().calls and result.finish is not FinishReason.LENGTH
        return "tool_calls" if called else result.finish.value


class CompletionForm(OpenAI):
    def piece(self) -> bytes:
        text = self._running.output.fresh()
        return self._text(text, None) if text else b""

    def end(self, result: TurnResult) -> bytes:
        return self._text(self._running.output.rest(), result.finish.value) + self._tail(result)

    def whole(self, result: TurnResult) -> Json:
        choice: Json = {"text": self._running.output.text, "finish_reason": result.finish.value}
        choice["logprobs"] = self._logprobs.completions() if self._ask.logprobs else None
        return self._answer(choice, result)

    def _text(self, text: str, finish: str | None) -> bytes:
        logprobs = {"logprobs": self._logprobs.completions()} if self._ask.logprobs else {"logprobs": None}
        return self._event({"text": text, "finish_reason": finish, **logprobs})


class GenerateForm:
    """SGLang's `/generate`. Its streams repeat the whole output in each event, as SGLang does by default."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._shown = 0

    def piece(self) -> bytes:
        output = self._running.output
        output.fresh()
        if len(output.ids) == self._shown:
            return b""
        self._shown = len(output.ids)
        return event(self._state(output.text[: len(output.text) - len(output.rest())], None))

    def end(self, result: TurnResult) -> bytes:
        return event(self.whole(result)) + DONE

    def whole(self, result: TurnResult) -> Json:
        return self._state(self._running.output.text, result)

    def _state(self, text: str, result: TurnResult | None) -> Json:
        running, output = self._running, self._running.output
        now = output.last_at if output.last_at is not None else running.began
        meta: Json = {
            "id": f"{running.trajectory}.{running.number}",
            "finish_reason": None if result is None else self._finish(result),
            "prompt_tokens": len(running.prompt_ids),
            "completion_tokens": len(output.ids),
            "e2e_latency": now - running.began,
            "weight_version": str(running.version if result is None or not result.versions else result.versions[-1]),
        }
        if result is not None:
            meta["cached_tokens"] = result.cached_tokens
        if running.ask.logprobs:
            pairs = zip(output.logprobs, output.ids, strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        return {"text": text, "output_ids": output.ids, "meta_info": meta}

    def _finish(self, result: TurnResult) -> Json:
        if result.finish is FinishReason.LENGTH:
            return {"type": "length", "length": len(result.token_ids)}
        return {"type": "stop", "matched": self._running.output.stopped}


def form_of(running: Running, tokenizer: ChatTokenizer, model: str) -> Form:
    match running.ask.kind:
        case "chat":
            return ChatForm(running, tokenizer, model)
        case "completions":
            return CompletionForm(running, tokenizer, model)
        case "generate":
            return GenerateForm(running)
