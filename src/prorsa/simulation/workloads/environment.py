"""What surrounds the model in a simulation: questions, tokenizer, sandboxes, tools and rewards that follow the scripts.

Everything takes the time that the script of its trajectory says, on the clock of the event loop, and does nothing else. The
episodes that use them are those of production. A text of the model is the name of the turn that generated it
(`QUESTION SEED TURN`), and so is what a tool returns: whoever gets one finds the script by it.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from prorsa.cluster.turns import TurnResult
from prorsa.engines.protocol import SamplingParams
from prorsa.lifecycle.events import UNKNOWN, SandboxMode
from prorsa.rollout.episode import Bounds, Environment
from prorsa.rollout.records import Transcript
from prorsa.rollout.sandboxes.base import Sandbox
from prorsa.rollout.tasks.base import Message, Question, Split, ToolCall
from prorsa.simulation.workloads.pseudo_model import STOP, WORD, PseudoModel, TurnName, mixed
from prorsa.simulation.workloads.scripts import Script, Workload
from prorsa.simulation.workloads.tokens import Revision, Span

NODE_CLASS = "simulated"


def simulated_environment(model: PseudoModel, workload: Workload, *, prewarmed: int, max_context: int) -> Environment:
    """What the episodes of a simulated rollout have in common.

    Its scripts must fit into `max_context` tokens, and each tool result into half of what is left then (the bound of an
    episode): `build_workload` sees to it.
    """
    return Environment(
        task=SimulatedTask(model, workload),
        tokenizer=SimulatedTokenizer(model),
        sandboxes=SimulatedSandboxes(workload, prewarmed),
        tools=AnyTool(model),
        reward=SimulatedReward(model),
        bounds=Bounds(SamplingParams(max_new_tokens=max_context), max_turns=sys.maxsize, max_context=max_context),
        transcript=HashedTranscript if model.hashed else CountedTranscript,
    )


def questions(workload: Workload, count: int) -> list[Question]:
    """The first `count` questions of a workload, or as many as it has."""
    most = count if workload.questions is None else min(count, workload.questions)
    return [Question(f"{workload.name}-{index}", _conversation(index), "") for index in range(most)]


class CountedTranscript(Transcript):
    """Keeps the length of the context and the number of turns, and no token."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        super().__init__(())
        self.context = prompt_ids if isinstance(prompt_ids, Span) else tuple(prompt_ids)

    def add_turn(self, result: TurnResult) -> None:
        self.context = self.context + result.token_ids
        self.turns += 1

    def add_tool_turn(self, token_ids: Sequence[int]) -> None:
        assert isinstance(self.context, Span)
        self.kept = UNKNOWN
        if isinstance(token_ids, Revision):
            self.kept = len(self.context) - token_ids.dropped
            self.context = self.context[: self.kept]
            token_ids = token_ids.tokens
        self.context = self.context + token_ids


class HashedTranscript(Transcript):
    """Where a segment begins, what the context has lost is lost here too."""

    def add_tool_turn(self, token_ids: Sequence[int]) -> None:
        self.kept = UNKNOWN
        if isinstance(token_ids, Revision):
            self.kept = len(self) - token_ids.dropped
            self.context = tuple(self.context)[: self.kept]
            self.prompt_ids = self.prompt_ids[: self.kept]
            for column in (self.response_ids, self.response_mask, self.logprobs, self.versions):
                del column[self.kept - len(self.prompt_ids) :]
            token_ids = token_ids.tokens
        super().add_tool_turn(token_ids)


class SimulatedTask:
    """Implements `Task`."""

    tools: tuple[dict[str, Any], ...] = ()

    def __init__(self, model: PseudoModel, workload: Workload) -> None:
        self.name = workload.name
        self._model = model
        self._workload = workload

    def questions(self, split: Split, n: int, seed: int) -> list[Question]:
        return questions(self._workload, n)

    def reward(self, question: Question, final_text: str) -> float:
        return _script(self._model, final_text).reward

    def parse_tool_call(self, text: str) -> ToolCall | None:
        tool = self._model.turn(_parse(text)).tool
        return None if tool is None else ToolCall(tool, {"turn": text})


class SimulatedTokenizer:
    """Implements `Tokenizer`."""

    eos_ids = (STOP,)

    def __init__(self, model: PseudoModel) -> None:
        self._model = model
        self._prompt = lru_cache(256)(self._make_prompt)

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> Sequence[int]:
        """The first token is the question's index + 1."""
        question = int(messages[-1]["content"])
        _rendered.set(question)
        return self._prompt(question)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, self._model.name(ids[0])))

    def tool_turn(self, result_text: str) -> Sequence[int]:
        if not result_text:
            return ()
        name = _parse(result_text)
        turn = self._model.turn(name)
        if not turn.dropped_tokens:
            return self._tokens(name.token, turn.appended_tokens)
        tokens = self._tokens(name.token, turn.appended_tokens)
        if self._model.hashed and self._model.forgets_all(name):
            # A context's first token is its question, whatever else of it is gone.
            tokens = (name.question + 1, *tokens[1:])
        return Revision(tokens, turn.dropped_tokens)

    def _make_prompt(self, question: int) -> Sequence[int]:
        # The members of a group have the same prompt, so any seed tells how long it is.
        return self._tokens(question + 1, self._model.script(question, 0).prompt_tokens)

    def _tokens(self, first: int, count: int) -> Sequence[int]:
        """`count` tokens that nobody generated, the first of which is `first`."""
        if not self._model.hashed:
            return Span(first, count)
        return tuple(first if index == 0 else mixed(first * 31 + index & WORD) or 1 for index in range(count))


_rendered: ContextVar[int] = ContextVar("rendered")
"""The question whose prompt the current task has rendered last: an episode does so before it takes its sandbox."""


class SimulatedSandboxes:
    """Implements `Sandboxes`: `prewarmed` are ready at first, and each that is taken is replaced after a cold start.

    A sandbox is not told whose it is. The n-th one of a question takes the times that the script with seed n has.
    """

    def __init__(self, workload: Workload, prewarmed: int) -> None:
        self.ready = prewarmed
        """Prewarmed sandboxes that wait for a trajectory."""
        self._workload = workload
        self._taken: Counter[int] = Counter()

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[Sandbox]:
        question = _rendered.get()
        script = self._workload.script(question, self._taken[question])
        self._taken[question] += 1
        if not self.ready:
            yield SimulatedSandbox(SandboxMode.COLD, self._workload.name, script.sandbox_cold_s)
            return
        self.ready -= 1
        asyncio.get_running_loop().call_later(script.sandbox_cold_s, self._replace)
        yield SimulatedSandbox(SandboxMode.PREWARMED, self._workload.name, script.sandbox_prewarmed_s)

    def _replace(self) -> None:
        self.ready += 1


class SimulatedSandbox:
    """Implements `Sandbox`."""

    node_class = NODE_CLASS

    def __init__(self, mode: SandboxMode, image: str, start_s: float) -> None:
        self.mode = mode
        self.image = image
        self._start_s = start_s

    async def start(self) -> None:
        await _pass(self._start_s)

    async def run(self, code: str) -> str:
        raise NotImplementedError("a simulated sandbox runs no code; its tools take the time that their scripts say")


class SimulatedTool:
    """Implements `Tool`."""

    def __init__(self, name: str, model: PseudoModel) -> None:
        self.name = name
        self._model = model

    async def use(self, arguments: Mapping[str, Any], sandbox: Sandbox) -> str:
        turn: str = arguments["turn"]
        await _pass(self._model.turn(_parse(turn)).tool_s)
        return turn


class AnyTool(dict[str, SimulatedTool]):
    """The tools by name; every name that a script has is one."""

    def __init__(self, model: PseudoModel) -> None:
        super().__init__()
        self._model = model

    def __missing__(self, name: str) -> SimulatedTool:
        return self.setdefault(name, SimulatedTool(name, self._model))

    def get(self, name: str, default: Any = None) -> SimulatedTool:
        return self[name]


class SimulatedReward:
    """Implements `Reward`."""

    def __init__(self, model: PseudoModel) -> None:
        self._model = model

    async def score(self, question: Question, final_text: str) -> float:
        script = _script(self._model, final_text)
        await _pass(script.reward_s)
        return script.reward


async def _pass(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


def _conversation(question: int) -> tuple[Message, ...]:
    return ({"role": "user", "content": str(question)},)


def _parse(text: str) -> TurnName:
    question, seed, turn = text.split()
    return TurnName(int(question), int(seed), int(turn))


def _script(model: PseudoModel, text: str) -> Script:
    name = _parse(text)
    return model.script(name.question, name.seed)
