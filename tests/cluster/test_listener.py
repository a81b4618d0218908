"""A turn's listener hears exactly the output that the turn keeps, whatever happens to its attempts."""

from __future__ import annotations

import asyncio

import pytest
from cluster_bench import Cluster, ask, check_equals_reference, in_virtual_time, until
from fake_engine import STOP, reference

from prorsa.cluster.attempts import Turn
from prorsa.cluster.router import Limits
from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason


class Ear:
    def __init__(self, enough: int | None = None) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.enough = enough

    def __call__(self, token: int, logprob: float) -> bool:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        return len(self.tokens) == self.enough


def listen(cluster: Cluster, request: TurnRequest, ear: Ear) -> asyncio.Task[TurnResult]:
    cluster.sample(request.trajectory)
    return asyncio.create_task(cluster.router.generate(request, ear))


@in_virtual_time
async def test_tokens_are_heard_as_they_arrive() -> None:
    cluster, ear, request = Cluster("PD"), Ear(), ask()
    turn = listen(cluster, request, ear)
    await until(lambda: cluster.context("t") == 3 + 5)
    assert tuple(ear.tokens) == reference(request.input_ids, request.sampling)[0][:5]
    result = await turn
    assert (tuple(ear.tokens), tuple(ear.logprobs)) == (result.token_ids, result.logprobs)


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("cancels", [1, 2, 5])
@in_virtual_time
async def test_over_any_number_of_resends_each_token_is_heard_once(cancels: int, late: int) -> None:
    cluster, ear, request = Cluster("PPDD"), Ear(), ask()
    for engine in cluster.engines.values():
        engine.late_tokens = late
    turn = listen(cluster, request, ear)
    for number in range(cancels):
        await until(lambda at=4 + 6 * number: len(ear.tokens) >= at)  # type: ignore[misc]
        await cluster.router.cancel_all("test")
    result = await turn
    check_equals_reference(request, result)
    assert result.attempts == cancels + 1
    assert (tuple(ear.tokens), tuple(ear.logprobs)) == (result.token_ids, result.logprobs)
    cluster.check_nothing_left()


@in_virtual_time
async def test_what_a_cancelled_attempt_gives_too_late_is_not_heard() -> None:
    """The decode is deaf to the abort and goes on."""
    cluster, ear, request = Cluster("PPDD", Limits(cancel_timeout=0.05)), Ear(), ask()
    for engine in cluster.engines.values():
        engine.deaf = True
    turn = listen(cluster, request, ear)
    await until(lambda: len(ear.tokens) == 6)
    await cluster.router.cancel_all("test")
    result = await turn
    check_equals_reference(request, result)
    assert tuple(ear.tokens) == result.token_ids


@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize("enough", [1, 7, 39])
@in_virtual_time
async def test_a_listener_that_has_enough_ends_the_turn_there(enough: int, late: int) -> None:
    cluster, ear, request = Cluster("PD"), Ear(enough), ask()
    for engine in cluster.engines.values():
        engine.late_tokens = late
    result = await listen(cluster, request, ear)
    assert result.token_ids == tuple(ear.tokens) == reference(request.input_ids, request.sampling)[0][:enough]
    assert result.finish is FinishReason.STOP
    assert len(result.versions) == len(result.logprobs) == enough
    assert cluster.turns[0].output_tokens == enough
    cluster.check_nothing_left()


@in_virtual_time
async def test_enough_after_a_resend_counts_from_the_start_of_the_turn() -> None:
    cluster, ear, request = Cluster("PD"), Ear(12), ask()
    turn = listen(cluster, request, ear)
    await until(lambda: len(ear.tokens) == 5)
    await cluster.router.cancel_all("test")
    result = await turn
    assert result.token_ids == tuple(ear.tokens) == reference(request.input_ids, request.sampling)[0][:12]
    assert result.attempts == 2


@in_virtual_time
async def test_nothing_is_heard_beyond_a_stop_token_or_the_budget() -> None:
    for tokens, heard in (([4, 9, STOP, 3], [4, 9, STOP]), ([1, 2, 3, 4], [1, 2, 3])):
        ear = Ear()
        turn = Turn(ask(budget=3), 0.0, ear)
        assert turn.deliver(tokens, [0.0] * len(tokens)) is False
        assert ear.tokens == heard


@in_virtual_time
async def test_after_the_caller_is_cancelled_nothing_is_heard() -> None:
    cluster, ear = Cluster("PD"), Ear()
    cluster.engines["d0"].late_tokens = 5
    turn = listen(cluster, ask(), ear)
    await until(lambda: len(ear.tokens) == 4)
    turn.cancel()
    await asyncio.wait({turn})
    assert len(ear.tokens) == 4
    cluster.check_nothing_left()
