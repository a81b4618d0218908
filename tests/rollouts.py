"""A control plane and sandboxes for tests of the rollout: they keep the real tracker, and do what a script says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason, SamplingParams
from prorsa.lifecycle import Tracker
from prorsa.lifecycle import events as e
from prorsa.rollout.episode import Bounds, Environment
from prorsa.rollout.rewards.exact import ExactReward
from prorsa.rollout.sandboxes.base import SandboxError, Sandboxes
from prorsa.rollout.tasks.arithmetic import ArithmeticTask
from prorsa.rollout.tasks.base import Question
from prorsa.rollout.tokenizer import ChatTokenizer
from prorsa.rollout.tools.python import PythonTool

CHAT = ChatTokenizer(Path(__file__).parents[1] / "models" / "arithmetic")
TASK = ArithmeticTask()
QUESTION = Question("q0", ({"role": "user", "content": "Compute 37 * 48."},), "1776")

Script = Callable[[TurnRequest], Awaitable[str]]
"""What the model writes in a turn; it may take its time, or raise."""


def call(code: str) -> str:
    return f'<tool_call>\n{{"name": "python", "arguments": {{"code": "{code}"}}}}\n</tool_call>'


def scripted(*texts: str) -> Script:
    """The same texts for every trajectory, one a turn."""

    async def script(request: TurnRequest) -> str:
        return texts[request.turn]

    return script


class ScriptedControl:
    """Implements `Control`: records to a real tracker, and serves turns as the router does, by a script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.version = 0
        self.tracker = Tracker()
        self.events: list[e.Event] = []
        self.requests: list[TurnRequest] = []

    async def record(self, event: e.Event) -> None:
        self.tracker.apply(event)
        self.events.append(event)

    async def generate(self, request: TurnRequest) -> TurnResult:
        self.requests.append(request)
        name, now = request.trajectory, asyncio.get_running_loop().time
        await self.record(e.Ready(now(), name, len(request.input_ids)))
        await asyncio.sleep(0)
        await self.record(e.PrefillStarted(now(), name, "p0"))
        await asyncio.sleep(0)
        await self.record(e.DecodeStarted(now(), name, "d0"))
        text = await self.script(request)
        ids = [*CHAT.encode(text), CHAT.eos_ids[0]]
        most = request.sampling.max_new_tokens
        finish = FinishReason.STOP if len(ids) <= most else FinishReason.LENGTH
        ids = ids[:most]
        self.tracker.decoded(name, len(ids))
        versions = (self.version,) * len(ids)
        return TurnResult(tuple(ids), tuple(-0.5 - i for i in range(len(ids))), versions, finish, 1, 0)

    def of(self, kind: type[e.Event]) -> list[e.Event]:
        return [event for event in self.events if type(event) is kind]


class ScriptedSandbox:
    """Implements `Sandbox`."""

    mode, image, node_class = e.SandboxMode.COLD, "python", "test"

    def __init__(self, start_s: float, run_s: float, broken: bool, output: str | None) -> None:
        self.start_s, self.run_s, self.broken, self.output = start_s, run_s, broken, output

    async def start(self) -> None:
        await asyncio.sleep(self.start_s)
        if self.broken:
            raise SandboxError("a sandbox did not start: no space")

    async def run(self, code: str) -> str:
        await asyncio.sleep(self.run_s)
        return f"ran {code}" if self.output is None else self.output


class ScriptedSandboxes:
    """Implements `Sandboxes`; counts those in use."""

    def __init__(
        self, start_s: float = 0.0, run_s: float = 0.0, broken: bool = False, output: str | None = None
    ) -> None:
        self.details = start_s, run_s, broken, output
        self.used = 0

    @asynccontextmanager
    async def sandbox(self) -> AsyncIterator[ScriptedSandbox]:
        self.used += 1
        try:
            yield ScriptedSandbox(*self.details)
        finally:
            self.used -= 1


def environment(
    sandboxes: Sandboxes, max_turns: int = 4, max_context: int = 1024, max_new_tokens: int = 128
) -> Environment:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    tool = PythonTool()
    bounds = Bounds(sampling, max_turns, max_context)
    return Environment(TASK, CHAT, sandboxes, {tool.name: tool}, ExactReward(TASK), bounds)
