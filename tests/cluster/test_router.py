from __future__ import annotations

import asyncio

import pytest
from cluster_bench import Cluster, ask, check_equals_reference, in_virtual_time, until
from fake_engine import STOP, VOCABULARY, Model

from prorsa.cluster.attempts import Attempt, End, Turn, Verdict
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.router import Limits
from prorsa.cluster.turns import TurnFailed, TurnRequest, TurnResult
from prorsa.engines.protocol import Chunk, FinishReason, Role, SamplingParams
from prorsa.lifecycle import IllegalTransition, State
from prorsa.lifecycle.events import DecodeStarted, PrefillStarted, Ready, Requeued, ToolStarted


def names(cluster: Cluster) -> list[str]:
    return [type(event).__name__ for event in cluster.events]


# One turn.


@in_virtual_time
async def test_undisturbed_turn_equals_reference_and_tells_its_states() -> None:
    cluster = Cluster()
    request = ask()
    result = await cluster.generate(request)
    check_equals_reference(request, result)
    assert result.attempts == 1
    assert result.cached_tokens == 1  # half of the 3 prompt tokens, rounded down
    assert names(cluster) == ["Sampled", "Ready", "PrefillStarted", "DecodeStarted"]
    # 0.1 s of prefill, then one token at once and the others 0.01 s apart.
    assert cluster.turns[0].first_token == pytest.approx(0.1)
    assert cluster.turns[0].arrivals[-1] == pytest.approx(0.1 + 39 * 0.01)
    assert cluster.context("t") == 3 + 40
    cluster.check_nothing_left()


@in_virtual_time
async def test_mixed_instances_serve_both_stages_and_share_the_work() -> None:
    cluster = Cluster("MM")
    requests = [ask(f"t{i}", prompt=(i,)) for i in range(4)]
    results = await asyncio.gather(*map(cluster.generate, requests))
    for request, result in zip(requests, results, strict=True):
        check_equals_reference(request, result)
    assert sorted(len(engine.served) for engine in cluster.engines.values()) == [2, 2]
    assert cluster.tracker.counts()[State.DECODE] == 4
    cluster.check_nothing_left()


@pytest.mark.parametrize(
    ("outstanding", "decoding", "expected"),
    [
        # Prompt tokens that wait for p0 and m0, KV tokens reserved on d0 and m0: the shorter wait, then the emptier cache.
        ((100, 30), (0, 50), "m0"),
        ((30, 100), (50, 0), "p0"),
        ((0, 0), (60, 50), "m0"),
        ((0, 0), (50, 60), "p0"),
    ],
)
@in_virtual_time
async def test_a_turn_goes_over_a_pair_or_through_a_mixed_instance_by_load(
    outstanding: tuple[int, int], decoding: tuple[int, int], expected: str
) -> None:
    cluster = Cluster("PDM")
    for names, tokens in ((("p0", "m0"), outstanding), (("d0", "m0"), decoding)):
        for name, count in zip(names, tokens, strict=True):
            (cluster.fleet[name].begin_prefill if tokens is outstanding else cluster.fleet[name].begin_decode)(
                "x", count
            )
    await cluster.generate(ask())
    assert next(name for name, engine in cluster.engines.items() if engine.served) == expected


@in_virtual_time
async def test_a_turn_waits_where_its_prefix_is_as_long_as_a_prefill_anew_would_take() -> None:
    cluster = Cluster("PDM")
    cluster.fleet["p0"].begin_prefill("x", 1)
    await cluster.generate(ask())
    cluster.fleet["p0"].end_prefill("x")
    cluster.apply(ToolStarted(asyncio.get_running_loop().time(), "t", "python", 43))
    cluster.fleet["m0"].begin_prefill("x", 49)
    await cluster.router.generate(ask(turn=1, prompt=(5,) * 50))
    assert [turn.instances for turn in cluster.turns] == [(("m0", "m0"),), (("m0", "m0"),)]


@in_virtual_time
async def test_a_full_mixed_instance_leaves_turns_to_the_pairs_and_the_other_way_round() -> None:
    cluster = Cluster("PDM", Limits(prefill_slots=1))
    requests = [ask(f"t{i}", prompt=(i,)) for i in range(2)]
    await asyncio.gather(*map(cluster.generate, requests))
    assert {turn.instances[0] for turn in cluster.turns} == {("p0", "d0"), ("m0", "m0")}
    cluster.check_nothing_left()


# Evening out.


async def on_one_instance(cluster: Cluster, count: int) -> list[asyncio.Task[TurnResult]]:
    """So many turns that decode on the first of two instances; the second one has just come into service."""
    second = list(cluster.fleet)[-1]
    cluster.fleet.move(second, InstanceState.FLIPPING)
    requests = [ask(f"t{i}", 90, prompt=(11 * i,) * (i + 1)) for i in range(count)]
    turns = [asyncio.create_task(cluster.generate(request)) for request in requests]
    await until(lambda: cluster.tracker.counts()[State.DECODE] == count)
    cluster.fleet.move(second, InstanceState.ROUTED)
    return turns


@pytest.mark.parametrize("roles", ["PDD", "MM"])
@in_virtual_time
async def test_decodes_move_to_an_emptier_instance_and_keep_every_token(roles: str) -> None:
    cluster = Cluster(roles, Limits(prefill_slots=10))
    turns = await on_one_instance(cluster, 8)
    first, second = list(cluster.fleet)[-2:]
    cluster.router.even_out(True)
    await until(lambda: second.decodes == 3)
    assert first.decodes <= 5
    results = await asyncio.gather(*turns)
    for index, result in enumerate(results):
        check_equals_reference(ask(f"t{index}", 90, prompt=(11 * index,) * (index + 1)), result)
    records = {turn.trajectory: turn for turn in cluster.turns}
    assert {name for name, turn in records.items() if turn.moves} >= {"t0", "t1", "t2"}
    for turn in records.values():
        assert turn.attempts == 1 + turn.moves
        assert [decode for _, decode in turn.instances] == [first.name, second.name][: turn.attempts]
    cluster.check_nothing_left()


@in_virtual_time
async def test_decodes_move_no_faster_than_prefill_has_room_and_only_while_nothing_waits() -> None:
    cluster = Cluster("PDD", Limits(prefill_slots=1))
    turns = await on_one_instance(cluster, 8)
    waiting = asyncio.create_task(cluster.generate(ask("busy", 5, prompt=(7,) * 9)))
    queued = asyncio.create_task(cluster.generate(ask("queued", 5, prompt=(8,) * 9)))
    await asyncio.sleep(0)
    assert cluster.router.waiting == 1
    cluster.router.even_out(True)
    most = 0
    while not all(turn.done() for turn in turns):
        requeued = sum(isinstance(event, Requeued) for event in cluster.events)
        launched = sum(isinstance(event, PrefillStarted) for event in cluster.events) - 10
        most = max(most, requeued - launched)
        if cluster.router.waiting and not queued.done():
            assert requeued == 0
        await asyncio.sleep(0.01)
    assert most <= 1
    assert sum(turn.moves for turn in cluster.turns) > 1
    await asyncio.gather(waiting, queued, *turns)
    cluster.check_nothing_left()


@in_virtual_time
async def test_decodes_stay_where_nobody_wants_them_evened_out() -> None:
    cluster = Cluster("PDD", Limits(prefill_slots=10))
    turns = await on_one_instance(cluster, 8)
    cluster.router.even_out(False)
    await asyncio.gather(*turns)
    assert {turn.attempts for turn in cluster.turns} == {1}


@in_virtual_time
async def test_decodes_leave_instances_that_nobody_prefills_for_and_move_to_none_of_them() -> None:
    cluster = Cluster("PDDM", Limits(prefill_slots=10))
    prefill, fuller, emptier, mixed = cluster.fleet
    for instance in (emptier, mixed):
        cluster.fleet.move(instance, InstanceState.FLIPPING)
    turns = [asyncio.create_task(cluster.generate(ask(f"t{i}", 90, prompt=(11 * i,)))) for i in range(8)]
    await until(lambda: fuller.decodes == 8)
    cluster.fleet.move(prefill, InstanceState.FLIPPING)
    for instance in (emptier, mixed):
        cluster.fleet.move(instance, InstanceState.ROUTED)
    cluster.router.even_out(True)
    results = await asyncio.gather(*turns)
    for index, result in enumerate(results):
        check_equals_reference(ask(f"t{index}", 90, prompt=(11 * index,)), result)
    places = {decode for turn in cluster.turns for _, decode in turn.instances}
    assert places == {fuller.name, mixed.name}
    cluster.check_nothing_left()


@in_virtual_time
async def test_a_turn_that_moves_goes_elsewhere_when_its_place_is_gone() -> None:
    cluster = Cluster("PDD", Limits(prefill_slots=1))
    turns = await on_one_instance(cluster, 8)
    cluster.router.even_out(True)
    cluster.router.bury(list(cluster.fleet)[-1], "test")
    results = await asyncio.gather(*turns)
    assert [len(result.token_ids) > 0 for result in results] == [True] * 8
    assert sum(turn.moves for turn in cluster.turns) == 1
    cluster.check_nothing_left()


@in_virtual_time
async def test_a_turn_of_an_unknown_trajectory_is_refused_and_leaves_nothing() -> None:
    cluster = Cluster()
    with pytest.raises(IllegalTransition):
        await cluster.router.generate(ask("never sampled"))
    cluster.check_nothing_left()


@in_virtual_time
async def test_an_error_while_recording_reaches_the_caller_and_closes_both_legs() -> None:
    """The trajectory is dropped behind the router's back: its next event is illegal."""
    cluster = Cluster()
    turn = asyncio.create_task(cluster.generate(ask()))
    await until(lambda: cluster.router.live == 1)
    cluster.tracker._remove("t", 0, State.DROPPED)
    with pytest.raises(IllegalTransition):
        await turn
    cluster.check_nothing_left()


# Cancel and resend.


@pytest.mark.parametrize("index", range(12))
@in_virtual_time
async def test_cancelled_at_every_token_index_equals_the_uninterrupted_run(index: int) -> None:
    """Index 0 is cancelled during its prefill, on the prefill side; the others on the decode side."""
    cluster = Cluster()
    request = ask(budget=12)
    turn = asyncio.create_task(cluster.generate(request))
    await until(lambda: cluster.router.live == 1 and cluster.context("t") - 3 == index)
    (instance,) = [i for i in cluster.fleet if i.rids and i.role is (Role.DECODE if index else Role.PREFILL)]
    assert await cluster.router.drain(instance, "test") == 1
    result = await turn
    check_equals_reference(request, result)
    assert result.attempts == 2
    requeued = [event for event in cluster.events if isinstance(event, Requeued)]
    assert [event.tokens for event in requeued] == [3 + index]
    cluster.check_nothing_left()


@pytest.mark.parametrize("steps", range(10))
@in_virtual_time
async def test_cancelled_at_any_step_of_its_start_equals_the_uninterrupted_run(steps: int) -> None:
    cluster = Cluster()
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    for _ in range(steps):
        await asyncio.sleep(0)
    await cluster.router.cancel_all("test")
    check_equals_reference(request, await turn)
    cluster.check_nothing_left()


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
    served = [request.rid for engine in cluster.engines.values() for request in engine.served]
    assert sorted(served) == sorted([f"t.0.{attempt}" for attempt in range(10)] * 2)
    for engine in cluster.engines.values():
        for request_ in engine.served:
            assert len(request_.input_ids) + request_.sampling.max_new_tokens == 3 + 40
    cluster.check_nothing_left()


@in_virtual_time
async def test_a_cancel_during_prefill_aborts_both_legs() -> None:
    cluster = Cluster("PD")
    turn = asyncio.create_task(cluster.generate(ask()))
    await until(lambda: all(engine.legs for engine in cluster.engines.values()))
    await cluster.router.cancel_all("test")
    assert sorted(cluster.world.aborts) == [("d0", "t.0.0"), ("p0", "t.0.0")]
    await turn
    cluster.check_nothing_left()


@in_virtual_time
async def test_tokens_that_come_before_the_abort_is_confirmed_are_kept() -> None:
    cluster = Cluster("PD")
    cluster.engines["d0"].late_tokens = 3
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await until(lambda: cluster.context("t") == 3 + 5)
    await cluster.router.cancel_all("test")
    assert cluster.context("t") == 3 + 8
    check_equals_reference(request, await turn)


@in_virtual_time
async def test_output_after_the_bound_is_discarded() -> None:
    """The engine ignores aborts: its stream is closed after 0.5 s, with 50 tokens more; nothing later counts."""
    cluster = Cluster("PD", Limits(cancel_timeout=0.5))
    cluster.engines["d0"].deaf = True
    request = ask(budget=500)
    turn = asyncio.create_task(cluster.generate(request))
    await until(lambda: cluster.context("t") == 3 + 5)
    await cluster.router.cancel_all("test")
    assert cluster.context("t") == pytest.approx(3 + 5 + 50, abs=1)
    assert "t.0.0" not in cluster.engines["d0"].legs
    check_equals_reference(request, await turn)
    cluster.check_nothing_left()


@in_virtual_time
async def test_garbage_of_a_decode_whose_prefill_was_aborted_is_discarded() -> None:
    cluster = Cluster("PD")
    cluster.engines["d0"].spoils_aborted_prefills = True
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await until(lambda: bool(cluster.engines["d0"].legs))
    await cluster.router.cancel_all("test")
    check_equals_reference(request, await turn)


@pytest.mark.parametrize("prompt", [(5, 6, 7), (11, 29, 11)])
@in_virtual_time
async def test_retained_tokens_that_complete_the_turn_are_not_resent(prompt: tuple[int, ...]) -> None:
    """The last token arrives, its finish does not: one prompt ends by the budget, the other by a stop token."""
    cluster = Cluster("PD")
    cluster.engines["d0"].finish_apart = True
    model = Model(prompt)
    first_twelve = [model.step()[0] for _ in range(12)]
    stop = STOP if prompt == (5, 6, 7) else first_twelve[6]
    request = TurnRequest("t", 0, prompt, SamplingParams(12, 0.0, stop_token_ids=(stop,)))
    turn = asyncio.create_task(cluster.generate(request))
    length = 12 if stop == STOP else first_twelve.index(stop) + 1
    await until(lambda: cluster.context("t") == 3 + length)
    await cluster.router.cancel_all("test")
    result = await turn
    assert result.token_ids == tuple(first_twelve[:length])
    assert result.finish is (FinishReason.LENGTH if stop == STOP else FinishReason.STOP)
    assert result.attempts == 1
    assert "Requeued" not in names(cluster)


@in_virtual_time
async def test_output_beyond_a_stop_token_or_the_budget_is_not_kept() -> None:
    """An engine that is a step ahead of its own finish."""

    def kept(tokens: list[int]) -> tuple[list[int], list[float], FinishReason | None]:
        turn = Turn(TurnRequest("t", 0, (1, 2), SamplingParams(5, stop_token_ids=(0, 9))), 0.0)
        cluster = Cluster("PD")
        attempt = Attempt(turn.next_request(None), cluster.fleet["p0"], cluster.fleet["d0"], turn.deliver)
        turn.instances.append(("p0", "d0"))
        attempt.collect(Chunk(tuple(tokens), tuple(-float(token) for token in tokens), 0), 1.0)
        turn.keep(attempt, Verdict(End.CANCELLED, "test"))
        assert len(turn.tokens) == len(turn.versions) == len(turn.arrivals)
        return turn.tokens, turn.logprobs, turn.finish

    assert kept([4, 3]) == ([4, 3], [-4.0, -3.0], None)
    assert kept([4, 9, 3]) == ([4, 9], [-4.0, -9.0], FinishReason.STOP)
    assert kept([4, 3, 4, 3, 4, 3]) == ([4, 3, 4, 3, 4], [-4.0, -3.0, -4.0, -3.0, -4.0], FinishReason.LENGTH)
    assert kept([4, 3, 4, 3, 9, 9]) == ([4, 3, 4, 3, 9], [-4.0, -3.0, -4.0, -3.0, -9.0], FinishReason.STOP)


@in_virtual_time
async def test_versions_are_kept_for_each_token() -> None:
    cluster = Cluster("PD")
    turn = asyncio.create_task(cluster.generate(ask(budget=20)))
    await until(lambda: cluster.context("t") == 3 + 7)
    await cluster.router.cancel_all("test")
    for engine in cluster.engines.values():
        engine.version = 3
    result = await turn
    assert result.versions == (0,) * 7 + (3,) * 13
    assert cluster.turns[0].versions == result.versions


@in_virtual_time
async def test_an_abort_that_the_engine_does_by_itself_is_resent() -> None:
    cluster = Cluster("PD")
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await until(lambda: cluster.context("t") == 3 + 4)
    await cluster.engines["d0"].abort()
    result = await turn
    check_equals_reference(request, result)
    assert result.attempts == 2


@in_virtual_time
async def test_a_turn_survives_that_somebody_cancels_its_legs() -> None:
    cluster = Cluster("PD")
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await until(lambda: cluster.context("t") == 3 + 4)
    for task in asyncio.all_tasks():
        if task.get_name().startswith("t.0.0 on"):
            task.cancel()
    result = await turn
    check_equals_reference(request, result)
    assert result.attempts == 2
    cluster.check_nothing_left()


@pytest.mark.parametrize("state", ["queue", "prefill", "decode"])
@in_virtual_time
async def test_a_cancelled_caller_leaves_nothing_behind(state: str) -> None:
    cluster = Cluster("PD", Limits(prefill_slots=1))
    other = ask("other", prompt=(9,))
    others = asyncio.create_task(cluster.generate(other))
    await until(lambda: cluster.router.live == 1)
    turn = asyncio.create_task(cluster.generate(ask()))
    wanted = {"queue": State.READY, "prefill": State.PREFILL, "decode": State.DECODE}[state]
    await until(lambda: "t" in cluster.tracker and cluster.tracker.state("t") is wanted)
    told = len(cluster.events)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert not any(engine.legs.get("t.0.0") for engine in cluster.engines.values())
    assert not any(event.trajectory == "t" for event in cluster.events[told:])
    check_equals_reference(other, await others)
    cluster.check_nothing_left()


@in_virtual_time
async def test_a_caller_cancelled_twice_still_leaves_nothing_behind() -> None:
    cluster = Cluster("PD", Limits(cancel_timeout=1.0))
    cluster.engines["d0"].deaf = True
    turn = asyncio.create_task(cluster.generate(ask(budget=1000)))
    await until(lambda: cluster.context("t") == 3 + 4)
    turn.cancel()
    await asyncio.sleep(0.1)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert cluster.router.live == 1
    await asyncio.sleep(1.0)
    cluster.check_nothing_left()


@in_virtual_time
async def test_close_fails_every_turn_and_leaves_nothing_behind() -> None:
    cluster = Cluster("PD", Limits(prefill_slots=1))
    turns = [asyncio.create_task(cluster.generate(ask(f"t{i}", 500))) for i in range(5)]
    await asyncio.sleep(0.25)
    await cluster.router.close()
    cluster.check_nothing_left()
    for turn in turns:
        with pytest.raises(TurnFailed, match="the cluster is stopping"):
            await turn
    with pytest.raises(TurnFailed, match="the cluster is stopping"):
        await cluster.router.generate(ask("t9"))


# Faults.


@in_virtual_time
async def test_a_dead_prefill_does_not_hang_its_decode() -> None:
    cluster = Cluster()
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await until(lambda: bool(cluster.engines["p0"].legs) and bool(cluster.engines["d0"].legs))
    cluster.engines["p0"].die()
    result = await turn
    check_equals_reference(request, result)
    assert cluster.turns[0].instances == (("p0", "d0"), ("p1", "d0"))
    assert [i.name for i in cluster.fleet.pool(Role.PREFILL)] == ["p1"]
    assert ("d0", "t.0.0") in cluster.world.aborts
    cluster.check_nothing_left()


@in_virtual_time
async def test_a_dead_decode_costs_a_retry_and_no_token() -> None:
    cluster = Cluster()
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await until(lambda: cluster.context("t") == 3 + 6)
    cluster.engines["d0"].die()
    result = await turn
    check_equals_reference(request, result)
    assert cluster.turns[0].instances == (("p0", "d0"), ("p0", "d1"))
    assert [event.tokens for event in cluster.events if isinstance(event, Requeued)] == [3 + 6]
    cluster.check_nothing_left()


@in_virtual_time
async def test_a_prefill_that_dies_after_its_handover_disturbs_nobody() -> None:
    """It has not even said that it handed over: the first token says so."""
    cluster = Cluster()
    cluster.engines["p0"].handover_s = 1.0
    turn = asyncio.create_task(cluster.generate(ask()))
    await until(lambda: cluster.context("t") == 3 + 6)
    assert cluster.engines["p0"].legs
    cluster.engines["p0"].die()
    assert (await turn).attempts == 1
    assert cluster.fleet.pool(Role.PREFILL) == [cluster.fleet["p1"]]
    cluster.check_nothing_left()


@pytest.mark.parametrize("side", ["p0", "d0"])
@in_virtual_time
async def test_what_a_dead_instance_served_is_resent_at_once_also_when_its_streams_stay_open(side: str) -> None:
    """As when a machine is lost: no stream breaks, aborts are not heard; only a health check tells."""
    cluster = Cluster("PPDD", Limits(cancel_timeout=5.0))
    cluster.engines[side].hung = cluster.engines[side].deaf = True
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await asyncio.sleep(1.0)
    cluster.router.bury(cluster.fleet[side], "test")
    check_equals_reference(request, await turn)
    assert asyncio.get_running_loop().time() < 2.0
    cluster.check_nothing_left()


@in_virtual_time
async def test_failures_with_progress_between_them_never_add_up() -> None:
    cluster = Cluster("PD", Limits(max_failures=1))
    request = ask(budget=40)
    turn = asyncio.create_task(cluster.generate(request))
    for tokens in range(5, 40, 5):
        await until(lambda tokens=tokens: cluster.context("t") == 3 + tokens)  # type: ignore[misc]
        cluster.engines["d0"].break_streams()
    check_equals_reference(request, await turn)
    assert (await turn).attempts == 8


@pytest.mark.parametrize("side", ["p0", "d0"])
@in_virtual_time
async def test_one_turn_alone_finds_its_way_around_a_silent_instance(side: str) -> None:
    """It answers aborts and health checks, and gives nothing."""
    cluster = Cluster("PPDD", Limits(stall_timeout=5.0))
    cluster.engines[side].hung = True
    request = ask()
    result = await cluster.generate(request)
    check_equals_reference(request, result)
    assert result.attempts == 2


@in_virtual_time
async def test_a_broken_connection_alone_costs_a_retry_and_no_instance() -> None:
    cluster = Cluster("PD")
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await until(lambda: cluster.context("t") == 3 + 6)
    cluster.engines["d0"].break_streams()
    check_equals_reference(request, await turn)
    assert cluster.fleet.pool(Role.DECODE) == [cluster.fleet["d0"]]


@pytest.mark.parametrize("side", ["p0", "d0"])
@in_virtual_time
async def test_a_silent_instance_is_given_up_for_another(side: str) -> None:
    cluster = Cluster("PPDD", Limits(stall_timeout=5.0))
    cluster.engines[side].hung = True
    requests = [ask(f"t{i}", prompt=(i,)) for i in range(6)]
    results = await asyncio.gather(*map(cluster.generate, requests))
    for request, result in zip(requests, results, strict=True):
        check_equals_reference(request, result)
    assert side not in [i.name for role in Role for i in cluster.fleet.pool(role)]
    cluster.check_nothing_left()


@pytest.mark.parametrize("start", [11.92, 12.03, 12.06])
@in_virtual_time
async def test_a_stall_is_noticed_whatever_the_rounding_of_its_deadline(start: float) -> None:
    """From these starts, now + (20 - silence) rounds to now before the silence reaches 20."""
    await asyncio.sleep(start)
    cluster = Cluster("PD", Limits(stall_timeout=20.0, max_failures=0))
    cluster.engines["d0"].hung = True
    with pytest.raises(TurnFailed, match="nothing came"):
        await cluster.generate(ask())


@in_virtual_time
async def test_a_busy_engine_is_left_alone_for_a_while() -> None:
    """Five refusals at 0.05 s, doubling: the sixth attempt starts 0.05 + 0.1 + 0.2 + 0.4 + 0.8 s later."""
    cluster = Cluster("PD", Limits(backoff=0.05))
    cluster.engines["p0"].refuse = 5
    request = ask()
    result = await cluster.generate(request)
    check_equals_reference(request, result)
    assert result.attempts == 6
    assert cluster.turns[0].first_token == pytest.approx(1.55 + 0.1)
    cluster.check_nothing_left()


@in_virtual_time
async def test_refusals_do_not_fail_a_turn_however_many() -> None:
    cluster = Cluster("PD", Limits(backoff=0.05, max_failures=2))
    cluster.engines["d0"].refuse = 30
    request = ask()
    check_equals_reference(request, await cluster.generate(request))


@in_virtual_time
async def test_a_hopeless_turn_fails_and_says_what_was_tried() -> None:
    """p0 gives nothing but errors, without being dead."""
    cluster = Cluster("PD", Limits(max_failures=2, backoff=0.1))
    turn = asyncio.create_task(cluster.generate(ask()))
    for _ in range(3):
        await until(lambda: bool(cluster.engines["p0"].legs))
        cluster.engines["p0"].break_streams()
        await until(lambda: not cluster.engines["p0"].legs)
    with pytest.raises(TurnFailed, match=r"3 attempts in a row .* tried: t\.0\.0 on p0 and d0 failed: engine p0"):
        await turn
    cluster.check_nothing_left()


@in_virtual_time
async def test_without_instances_the_queue_fails_rather_than_hang() -> None:
    cluster = Cluster("PD", Limits(stall_timeout=30.0))
    cluster.engines["d0"].die()
    with pytest.raises(TurnFailed, match=r"no instances to place it on \(p0 prefill routed, d0 decode dead\)"):
        await cluster.generate(ask())
    assert 30.0 <= asyncio.get_running_loop().time() < 61.0
    cluster.check_nothing_left()


@in_virtual_time
async def test_a_long_pause_is_no_stall() -> None:
    cluster = Cluster("PD", Limits(stall_timeout=5.0))
    cluster.router.pause()
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await asyncio.sleep(60.0)
    assert cluster.router.waiting == 1
    cluster.router.resume()
    check_equals_reference(request, await turn)


@in_virtual_time
async def test_an_instance_that_is_back_soon_after_a_long_pause_is_waited_for() -> None:
    cluster = Cluster("PD", Limits(stall_timeout=5.0))
    cluster.router.pause()
    cluster.fleet.move(cluster.fleet["d0"], InstanceState.DEAD)
    request = ask()
    turn = asyncio.create_task(cluster.generate(request))
    await asyncio.sleep(59.0)
    cluster.router.resume()
    await asyncio.sleep(4.0)
    cluster.fleet.move(cluster.fleet["d0"], InstanceState.ROUTED)
    check_equals_reference(request, await turn)


# The queue and placement.


async def queued(cluster: Cluster, requests: list[TurnRequest]) -> list[asyncio.Task[TurnResult]]:
    """Requests that joined the queue in this order."""
    turns: list[asyncio.Task[TurnResult]] = []
    for request in requests:
        turns.append(asyncio.create_task(cluster.generate(request)))
        await asyncio.sleep(0)
    return turns


@in_virtual_time
async def test_the_queue_is_served_in_order_of_arrival() -> None:
    """The prompts differ in length by far: a shorter one never overtakes."""
    cluster = Cluster("PPD", Limits(prefill_slots=1))
    requests = [ask(f"t{i}", 3, prompt=tuple(range(1 + 37 * i % 91))) for i in range(20)]
    await asyncio.gather(*await queued(cluster, requests))
    ready = [event.trajectory for event in cluster.events if isinstance(event, Ready)]
    started = [event.trajectory for event in cluster.events if isinstance(event, PrefillStarted)]
    assert started == ready == [f"t{i}" for i in range(20)]


@in_virtual_time
async def test_outstanding_prefills_are_bounded() -> None:
    cluster = Cluster("PD", Limits(prefill_slots=2))
    turns = await queued(cluster, [ask(f"t{i}", 3, prompt=(i,)) for i in range(7)])
    most = 0
    for _ in range(500):
        most = max(most, cluster.tracker.counts()[State.PREFILL])
        await asyncio.sleep(0.001)
    await asyncio.gather(*turns)
    assert most == 2


@in_virtual_time
async def test_decodes_never_exceed_the_kv_cache() -> None:
    """Capacity 200: a prompt of 30 with a budget of 40 takes 70 at most, so two fit and three do not."""
    cluster = Cluster("PD", capacity=200)
    turns = await queued(cluster, [ask(f"t{i}", 40, prompt=(i,) * 30) for i in range(9)])
    most = 0
    while not all(turn.done() for turn in turns):
        instance = cluster.fleet["d0"]
        most = max(most, instance.decodes)
        assert instance.kv_tokens <= 200
        await asyncio.sleep(0.005)
    assert most == 2


@in_virtual_time
async def test_a_decode_that_outgrows_its_headroom_is_counted_in_full() -> None:
    cluster = Cluster("PD", Limits(decode_headroom=5))
    turn = asyncio.create_task(cluster.generate(ask(budget=40)))
    seen: list[int] = []
    for context in (3 + 1, 3 + 5, 3 + 6, 3 + 20):
        await until(lambda context=context: cluster.context("t") == context)  # type: ignore[misc]
        seen.append(cluster.fleet["d0"].kv_tokens)
    assert seen == [8, 8, 9, 23]
    await turn
    cluster.check_nothing_left()


@in_virtual_time
async def test_a_prompt_that_can_never_fit_is_the_engines_to_refuse() -> None:
    cluster = Cluster("PD", capacity=10)
    request = ask(prompt=tuple(range(50)))
    check_equals_reference(request, await cluster.generate(request))


@in_virtual_time
async def test_requests_spread_over_the_decode_instances_by_their_kv_cache() -> None:
    cluster = Cluster("PDD")
    lengths = {"a": 50, "b": 20, "c": 20, "d": 30}
    turns = await queued(cluster, [ask(name, 10, prompt=(7,) * length) for name, length in lengths.items()])
    await asyncio.gather(*turns)
    where = {event.trajectory: event.instance for event in cluster.events if isinstance(event, DecodeStarted)}
    # a goes to d0 (60 reserved); b and c (30 each) to d1, which then has 60 as well; d to the first of equals.
    assert where == {"a": "d0", "b": "d1", "c": "d1", "d": "d0"}


async def two_turns(cluster: Cluster, lose_caches: bool) -> tuple[tuple[str, str], ...]:
    """Where trajectory t was served in turns 0 and 1. Another one comes first, so p0 and d0 are free again for turn 1."""
    await asyncio.gather(*await queued(cluster, [ask("other", 5, prompt=(1,)), ask("t", 5)]))
    if lose_caches:
        for instance in cluster.fleet:
            instance.lose_cache()
    cluster.apply(ToolStarted(asyncio.get_running_loop().time(), "t", "python", cluster.context("t")))
    await cluster.router.generate(ask("t", 5, turn=1, prompt=(5, 6, 7, 8, 9)))
    return tuple(place for turn in cluster.turns if turn.trajectory == "t" for place in turn.instances)


@in_virtual_time
async def test_a_trajectory_returns_to_the_instances_that_know_its_prefix() -> None:
    assert await two_turns(Cluster("PPDD"), lose_caches=False) == (("p1", "d1"), ("p1", "d1"))


@in_virtual_time
async def test_lost_caches_attract_nobody() -> None:
    assert await two_turns(Cluster("PPDD"), lose_caches=True) == (("p1", "d1"), ("p0", "d0"))


@in_virtual_time
async def test_a_group_shares_the_prefill_instance_of_its_prompt_until_that_is_overloaded() -> None:
    """With one prompt's length of slack, the first two go to p0; the third would find 20 tokens waiting there."""
    cluster = Cluster("PPD")
    await asyncio.gather(*await queued(cluster, [ask(f"t{i}", 5, prompt=(4,) * 10) for i in range(4)]))
    where = [event.instance for event in cluster.events if isinstance(event, PrefillStarted)]
    assert where == ["p0", "p0", "p1", "p1"]


def test_the_models_of_the_tests_stop_in_reasonable_time() -> None:
    """About one token in VOCABULARY is a stop: the suite sees both ways to finish."""
    model = Model((5, 6, 7))
    assert STOP in [model.step()[0] for _ in range(10 * VOCABULARY)]
