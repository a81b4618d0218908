"""A gateway over scripted engines: the real control plane, tokenizer and HTTP server; only the model is made up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from prorsa.allocation import Allocation, Policy, PrefillSpeed, Situation
from prorsa.cluster.control import ControlPlane
from prorsa.config import Config, parse_config
from prorsa.engines.protocol import ALL_ROLES, Chunk, EngineBusy, EngineInfo, FinishReason, GenerateRequest, Load, Role
from prorsa.forecast import LifecycleForecaster
from prorsa.gateway.live import LiveView
from prorsa.gateway.metrics import Metrics
from prorsa.gateway.server import Gateway, listening
from prorsa.gateway.traces import Traces
from prorsa.rollout.tokenizer import ChatTokenizer

MODEL = Path(__file__).parents[2] / "models" / "arithmetic"
TOKENIZER = ChatTokenizer(MODEL)
TOKEN = "an-admin-token-for-tests"
END = TOKENIZER.eos_ids[0]
LETTERS = [token for letter in "abcdefghijklmnopqrstuvwxyz" for token in TOKENIZER.encode(letter)]
Script = Callable[[list[int]], int]
"""The next token after a context: a resend goes on where the last attempt stopped."""

PYTHON = {
    "type": "function",
    "function": {"name": "python", "description": "Run it", "parameters": {"type": "object", "properties": {}}},
}


def babble(context: list[int]) -> int:
    """Printable nonsense that depends on the whole context and never ends."""
    return LETTERS[hash(tuple(context)) % len(LETTERS)]


def saying(*answers: str) -> Script:
    """The n-th answer to a prompt with n - 1 assistant turns before it, ended as the chat template ends one; then END.

    A prompt that is no chat is answered with END."""
    written = [[*TOKENIZER.encode(answer), END] for answer in answers]
    begin = TOKENIZER.encode("<|im_start|>assistant\n")

    def script(context: list[int]) -> int:
        starts = [i for i in range(len(context)) if context[i : i + len(begin)] == begin]
        if not starts:
            return END
        answer = written[min(len(starts), len(written)) - 1]
        done = len(context) - starts[-1] - len(begin)
        return answer[done] if done < len(answer) else END

    return script


class Keep(Policy):
    def decide(self, situation: Situation) -> Allocation | None:
        return situation.current


class ScriptedEngine:
    """Of any role. The prefill leg ends at once; the decode leg gives a token every `token_s` seconds."""

    bootstrap_host, bootstrap_port = "h", 1
    tells_progress = False
    roles = ALL_ROLES

    def __init__(self, name: str, role: Role, script: Script, token_s: float) -> None:
        self.name = name
        self.role = role
        self.script = script
        self.token_s = token_s
        self.requests: list[GenerateRequest] = []
        self.legs: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        aborted = self.legs[request.rid] = asyncio.Event()
        try:
            self.requests.append(request)
            if self.role is Role.PREFILL:
                yield Chunk((), (), 0, 3, FinishReason.LENGTH)
                return
            context, budget = list(request.input_ids), request.sampling.max_new_tokens
            for index in range(budget):
                await asyncio.sleep(self.token_s)
                if aborted.is_set():
                    yield Chunk((), (), 0, 0, FinishReason.ABORT)
                    return
                token = self.script(context)
                context.append(token)
                stop = token in request.sampling.stop_token_ids
                finish = FinishReason.STOP if stop else FinishReason.LENGTH if index + 1 == budget else None
                yield Chunk((token,), (-0.5,), 0, 0, finish)
                if finish is not None:
                    return
        finally:
            del self.legs[request.rid]

    async def abort(self, rid: str | None = None) -> None:
        for name, aborted in self.legs.items():
            if rid in (None, name):
                aborted.set()

    async def load(self) -> Load:
        return Load(len(self.legs), 0, 0, 1_000_000)

    async def info(self) -> EngineInfo:
        return EngineInfo(self.role, 0, "m")

    async def switch_role(self, role: Role) -> None:
        if self.legs:
            raise EngineBusy("not idle")
        self.role = role

    async def update_weights(self, path: str, version: int) -> None: ...

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None: ...


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


@dataclass
class Bench:
    engines: list[ScriptedEngine]
    control: ControlPlane
    gateway: Gateway
    metrics: Metrics
    url: str
    http: aiohttp.ClientSession

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        async with self.http.post(self.url + path, data=data, headers=named) as response:
            return response.status, await response.json()

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        async with self.http.get(self.url + path, headers=headers) as response:
            return response.status, await response.text()

    async def chat(self, messages: Sequence[dict[str, Any]], name: str | None = None, **body: Any) -> dict[str, Any]:
        headers = {"X-Prorsa-Trajectory": name} if name else {}
        status, answer = await self.post("/v1/chat/completions", {"messages": list(messages), **body}, **headers)
        assert status == 200, answer
        return dict(answer)

    def states(self) -> dict[str, int]:
        return {state.name: count for state, count in self.control.tracker.counts().items() if count}

    async def idle(self) -> None:
        """Wait until nothing is left on any engine or in the router."""
        router = self.control.router
        await until(lambda: not (router.live or router.waiting or any(engine.legs for engine in self.engines)))
        assert [i for i in self.control.fleet if i.load or i.rids] == []


def configured(**gateway: Any) -> Config:
    data = {"model": {"path": str(MODEL), "max_context": 512}, "sampling": {"max_new_tokens": 64, "temperature": 0.0}}
    return parse_config(data | {"gateway": {"port": 0, **gateway}})


def control_over(engines: Sequence[ScriptedEngine], *observers: Any, horizon: float = 30.0) -> ControlPlane:
    return ControlPlane(
        engines,
        forecaster=LifecycleForecaster(None, 1000.0),
        policy=Keep(),
        speed=PrefillSpeed(1000.0),
        horizon=horizon,
        observers=observers,
    )


@asynccontextmanager
async def bench(
    script: Script = babble,
    roles: str = "PD",
    token_s: float = 0.0,
    traces: Traces | None = None,
    api_key: str | None = None,
    **gateway: Any,
) -> AsyncIterator[Bench]:
    config, kinds = configured(**gateway), {"P": Role.PREFILL, "D": Role.DECODE, "M": Role.MIXED}
    engines = [ScriptedEngine(f"e{i}", kinds[letter], script, token_s) for i, letter in enumerate(roles)]
    metrics, live = Metrics(), LiveView("test")
    control = control_over(engines, metrics, live, *([] if traces is None else [traces]), horizon=0.05)
    await control.start()
    front = Gateway(control, config, TOKENIZER, "arithmetic", TOKEN, metrics, live, traces, api_key)
    try:
        async with listening(front, "127.0.0.1", 0) as url, aiohttp.ClientSession() as http:
            yield Bench(engines, control, front, metrics, url, http)
    finally:
        await control.stop()
    assert control.tracker.counts() == dict.fromkeys(control.tracker.counts(), 0), "every trajectory has ended"
