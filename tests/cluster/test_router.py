from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from fake_engine import STOP, FakeEngine, World, reference

from prorsa.cluster.instances import Fleet, Instance
from prorsa.cluster.observers import TurnRecord
from prorsa.cluster.router import Limits, Router
from prorsa.cluster.turns import TurnFailed, TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason, Role, SamplingParams
from prorsa.lifecycle import State, Tracker
from prorsa.lifecycle.events import Event, Sampled
from prorsa.simulation.clock import run


class Cluster:
    """A router over fake engines, with a real tracker behind it."""

    def __init__(self, roles: str = "PPDD", limits: Limits = Limits(), **engine: Any) -> None:  # noqa: B008
        self.world = World()
        self.fleet = Fleet()
        self.tracker = Tracker()
        self.events: list[Event] = []
        self.turns: list[TurnRecord] = []
        self.router = Router(self.fleet, self._apply, self.tracker.decoded, self.turns.append, limits)
        kinds = {"P": Role.PREFILL, "D": Role.DECODE, "M": Role.MIXED}
        counts: Counter[str] = Counter()
        self.engines: dict[str, FakeEngine] = {}
        for letter in roles:
            name = f"{letter.lower()}{counts[letter]}"
            counts[letter] += 1
            self.engines[name] = FakeEngine(name, self.world, kinds[letter], **engine)
            self.fleet.add(Instance(self.engines[name], kinds[letter], self.engines[name].capacity))

    def _apply(self, event: Event) -> None:
        self.tracker.apply(event)
        self.events.append(event)

    def sample(self, trajectory: str) -> None:
        now = asyncio.get_running_loop().time()
        self._apply(Sampled(now, trajectory, group="g", task="t"))

    async def generate(self, request: TurnRequest) -> TurnResult:
        if request.trajectory not in self.tracker:
            self.sample(request.trajectory)
        return await self.router.generate(request)

    def output(self, trajectory: str) -> list[int]:
        """What its live attempt has produced."""
        (attempt,) = [a for a, _ in self.router._live.values() if a.rid.startswith(f"{trajectory}.")]
        return attempt.tokens

    def check_nothing_left(self) -> None:
        assert self.router.live == 0
        assert self.router.waiting == 0
        assert {name: list(engine.legs) for name, engine in self.engines.items() if engine.legs} == {}
        assert [i for i in self.fleet if i.load or i.prefills or i.decodes] == []

    def served(self) -> Counter[str]:
        return Counter(rid for engine in self.engines.values() for rid in engine.served)


def ask(trajectory: str = "t", budget: int = 40, turn: int = 0, prompt: tuple[int, ...] = (5, 6, 7)) -> TurnRequest:
    return TurnRequest(trajectory, turn, prompt, SamplingParams(budget, 0.0, stop_token_ids=(STOP,)))


def check_equals_reference(request: TurnRequest, result: TurnResult) -> None:
    tokens, logprobs = reference(request.input_ids, request.sampling)
    assert result.token_ids == tokens
    assert result.logprobs == logprobs
    assert len(result.versions) == len(tokens)
    assert result.finish is (FinishReason.STOP if tokens[-1] == STOP else FinishReason.LENGTH)


def in_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def wrapper() -> None:
        run(test())

    wrapper.__name__ = test.__name__
    return wrapper


async def until(condition: Callable[[], bool]) -> None:
    """Step through loop time until `condition`; bounded."""
    async with asyncio.timeout(1000):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@in_virtual_time
async def test_undisturbed_turn_equals_reference_and_tells_its_states() -> None:
    cluster = Cluster()
    request = ask()
    result = await cluster.generate(request)
    check_equals_reference(request, result)
    assert result.attempts == 1
    assert result.cached_tokens == 1  # half of the 3 prompt tokens, rounded down
    assert [type(event).__name__ for event in cluster.events] == ["Sampled", "Ready", "PrefillStarted", "DecodeStarted"]
    # 0.1 s of prefill, then one token at once and the others 0.01 s apart.
    assert cluster.turns[0].first_token == pytest.approx(0.1)
    assert cluster.turns[0].arrivals[-1] == pytest.approx(0.1 + 39 * 0.01)
    assert cluster.tracker.snapshot(1.0).tokens.tolist() == [3 + 40]
    cluster.check_nothing_left()


@in_virtual_time
async def test_mixed_instance_serves_both_stages() -> None:
    cluster = Cluster("MM")
    requests = [ask(f"t{i}") for i in range(4)]
    results = await asyncio.gather(*map(cluster.generate, requests))
    for request, result in zip(requests, results, strict=True):
        check_equals_reference(request, result)
    assert sorted(len(engine.served) for engine in cluster.engines.values()) == [2, 2]
    assert cluster.tracker.counts()[State.DECODE] == 4
    cluster.check_nothing_left()


@pytest.mark.parametrize("index", range(12))
def test_cancelled_at_every_token_index_equals_the_uninterrupted_run(index: int) -> None:
    """Index 0 is cancelled during its prefill, on the prefill side; the others on the decode side."""

    async def main() -> None:
        cluster = Cluster()
        request = ask(budget=12)
        turn = asyncio.create_task(cluster.generate(request))
        await until(lambda: cluster.router.live == 1 and len(cluster.output("t")) == index)
        (instance,) = [i for i in cluster.fleet if i.rids and i.role is (Role.DECODE if index else Role.PREFILL)]
        assert await cluster.router.drain(instance, "test") == 1
        result = await turn
        check_equals_reference(request, result)
        assert result.attempts == 2
        cluster.check_nothing_left()

    run(main())


@in_virtual_time
async def test_budget_holds_over_many_resends() -> None:
    cluster = Cluster()
    request = ask(budget=40)
    turn = asyncio.create_task(cluster.generate(request))
    for _ in range(9):
        await asyncio.sleep(0.125)  # 0.1 s of prefill, then the tokens at 0, 0.01 and 0.02 s
        assert await cluster.router.cancel_all("test") == 1
    result = await turn
    check_equals_reference(request, result)
    assert result.attempts == 10
    assert set(cluster.served().values()) == {2}  # both legs of one attempt share its rid, no two attempts do
    cluster.check_nothing_left()


@in_virtual_time
async def test_hopeless_turn_fails_and_says_what_was_tried() -> None:
    cluster = Cluster("PD", Limits(stall_timeout=5.0, max_failures=2))
    cluster.engines["d0"].hung = True
    with pytest.raises(TurnFailed, match=r"3 attempts in a row failed without a token; tried: t\.0\.0 on p0 and d0"):
        await cluster.generate(ask())
    cluster.check_nothing_left()
