from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from cluster_bench import Bench, in_virtual_time, until
from fake_engine import FakeEngine, World

from prorsa.allocation import Adaptive, Allocation, Colocated, Handling, Moment, Policy, Situation, Static
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import replay
from prorsa.cluster.progress import ProgressWatch
from prorsa.engines.protocol import EngineError, Role
from prorsa.forecast import Forecast, LifecycleForecaster
from prorsa.lifecycle import Snapshot, State, Transition
from prorsa.lifecycle.events import Sampled

ADAPTIVE = Adaptive(1, 1, 4)


class Scripted(Policy):
    """Answers the given targets in turn, then keeps the last."""

    moments = frozenset({Moment.GRID})

    def __init__(self, *targets: tuple[int, ...]) -> None:
        self.targets = [Allocation(*target) for target in targets]

    def decide(self, situation: Situation) -> Allocation | None:
        return self.targets.pop(0) if len(self.targets) > 1 else self.targets[0]


@in_virtual_time
async def test_decisions_keep_to_the_grid_also_when_a_flip_takes_longer() -> None:
    """S = 1 s; the first flip takes 2.5 s, so those at 2 and 3 s are made up for by one at 3.5 s."""
    async with Bench("PPD", Scripted((1, 2), (1, 2)), flip_s=2.5) as bench:
        await asyncio.sleep(6.5)
        assert [decision.time for decision in bench.control.decisions] == pytest.approx([1, 3.5, 4, 5, 6])
        assert bench.roles() == "DPD"


@in_virtual_time
async def test_roles_follow_a_demand_that_moves_and_stay_while_it_does_not() -> None:
    """A burst of long prompts pulls instances to prefill; many decodes pull them back; no other flips."""
    async with Bench("PPDD", ADAPTIVE, capacity=2000, prefill_s=3.0, token_s=0.05) as bench:
        burst = [asyncio.create_task(bench.trajectory(f"p{i}", (i,) * 100, 3)) for i in range(30)]
        await until(lambda: bench.roles().count("P") == 3 and not bench.control.switcher.lock.locked())
        await asyncio.gather(*burst)
        decodes = [asyncio.create_task(bench.trajectory(f"d{i}", (i,), 1000)) for i in range(20)]
        await until(lambda: bench.roles().count("D") == 3 and not bench.control.switcher.lock.locked())
        await asyncio.gather(*decodes)
        assert {flip.failure for flip in bench.control.flips} == {None}


class Steady:
    """Forecasts W and K in turn from a list, over and over."""

    def __init__(self, *volumes: tuple[float, float]) -> None:
        self.volumes = itertools.cycle(volumes)
        self.inner = LifecycleForecaster(None, 100.0)

    def observe(self, transition: Transition) -> None:
        self.inner.observe(transition)

    def caches_lost(self) -> None:
        self.inner.caches_lost()

    def forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        prefill, decode = next(self.volumes)
        made = self.inner.forecast(snapshot, horizon, prefill_instances)
        return replace(made, prefill_tokens=prefill, admitted_kv=decode, decode_kv=0.0)


@pytest.mark.parametrize(
    "volumes",
    [
        pytest.param([(100.0, 1000.0)], id="one instance of each: 3:1, 2:2 and 1:3 are equal or worse"),
        pytest.param([(300.0, 1000.0)], id="exactly 3:1"),
        pytest.param([(100.0, 0.0)], id="no decode at all"),
        pytest.param([(500.0, 9000.0)], id="far over capacity"),
        pytest.param([(290.0, 1000.0), (310.0, 960.0), (300.0, 1040.0)], id="noise of 4 percent around 3:1"),
    ],
)
@in_virtual_time
async def test_constant_demand_flips_nothing_after_the_first_decision(volumes: list[tuple[float, float]]) -> None:
    """theta is 100 tokens/s, S is 1 s and C is 1000: (100, 1000) is the work of one instance of each role."""
    async with Bench("PPDD", ADAPTIVE, Steady(*volumes), capacity=1000) as bench:
        await bench.control.record(Sampled(0.0, "t", group="g", task="t"))
        await asyncio.sleep(60.5)
        assert len(bench.control.decisions) >= 59
        assert [flip.time for flip in bench.control.flips if flip.time > 1.5] == []


@in_virtual_time
async def test_a_failing_flip_ends_neither_the_loop_nor_the_others() -> None:
    """Both e0 and e1 become decode: e0 lies, is restarted as what is missing, and the loop goes on."""
    async with Bench("PPPD", Scripted((1, 3))) as bench:
        bench.engine("e0").flip_fault = "noop"
        await until(lambda: len(bench.control.flips) == 2)
        assert [flip.failure is None for flip in bench.control.flips] == [False, True]
        await until(lambda: bench.roles() == "DDPD")
        assert bench.restarter.restarted == [("e0", Role.DECODE)]
        decided = len(bench.control.decisions)
        await asyncio.sleep(5.0)
        assert len(bench.control.decisions) >= decided + 4


@in_virtual_time
async def test_a_decision_can_be_replayed_and_explained() -> None:
    async with Bench("PPDD", ADAPTIVE, capacity=500) as bench:
        turns = bench.trajectories(40, budget=200)
        await asyncio.gather(*turns)
        assert any(decision.target != decision.current for decision in bench.control.decisions)
        for decision in bench.control.decisions:
            assert replay(decision, ADAPTIVE) == decision.target
        first = bench.control.decisions[0]
        assert first.states[State.READY] > 20
        assert first.forecast.ready == 3 * first.states[State.READY]
        assert first.demand.prefill_tokens == first.forecast.ready + first.forecast.inflight
        assert first.demand.decode_capacity == 500
        assert first.current == Allocation(2, 2)


@in_virtual_time
async def test_colocated_instances_are_left_alone() -> None:
    async with Bench("MM", Colocated()) as bench:
        turns = bench.trajectories(10)
        await asyncio.gather(*turns)
        await asyncio.sleep(3.0)
        assert {decision.target for decision in bench.control.decisions} == {None}
        assert bench.control.flips == []
        assert bench.roles() == "MM"


@in_virtual_time
async def test_an_instance_that_dies_while_idle_is_found_and_restarted() -> None:
    """Checks at 1, 2, ... s; two failed ones in a row at 6 and 7 s; the restart takes 2 s."""
    async with Bench("PDD") as bench:
        await asyncio.sleep(5.5)
        bench.engine("e2").die()
        await until(lambda: bench.roles() == "PD.")
        assert asyncio.get_running_loop().time() == pytest.approx(7.0, abs=0.01)
        await until(lambda: bench.roles() == "PDD")
        assert asyncio.get_running_loop().time() == pytest.approx(9.0, abs=0.01)
        await asyncio.gather(*bench.trajectories(6))


@in_virtual_time
async def test_an_instance_whose_health_check_hangs_is_restarted() -> None:
    async with Bench("PDD") as bench:
        bench.engine("e2").healthy_s = 1e6
        await until(lambda: bench.roles() == "PD.")
        await until(lambda: bench.roles() == "PDD")


@pytest.mark.parametrize("name", ["e0", "e1"])
@in_virtual_time
async def test_a_silent_instance_without_an_alternative_is_restarted(name: str) -> None:
    """It answers aborts and health checks, and gives nothing, to two attempts of one turn."""
    async with Bench("PD") as bench:
        bench.engine(name).hung = True
        result = await bench.trajectory("t")
        assert result.attempts == 3
        assert name in [restarted for restarted, _ in bench.restarter.restarted]


@in_virtual_time
async def test_a_slow_answer_now_and_then_is_no_death() -> None:
    async with Bench("PDD") as bench:
        for _ in range(5):
            bench.engine("e2").healthy_s = 1e6
            await asyncio.sleep(2.5)
            bench.engine("e2").healthy_s = 0.0
            await asyncio.sleep(3.5)
        assert bench.restarter.restarted == []


@pytest.mark.parametrize("name", ["e0", "e1", "e2"])
@in_virtual_time
async def test_an_instance_that_answers_and_does_not_move_is_restarted_and_no_turn_notices(name: str) -> None:
    """Checks every second; what has not moved for 10 s hangs, busy or idle. The requests on it are not silent for 20 s."""
    async with Bench("PDD") as bench:
        for engine in bench.engines.values():
            engine.tells = True
        turns = bench.trajectories(4, budget=2000)
        await asyncio.sleep(3.5)
        bench.engine(name).hung = True
        await until(lambda: "." in bench.roles())
        assert asyncio.get_running_loop().time() == pytest.approx(3.5 + 10.5, abs=1.1)
        assert "nothing has moved" in (bench.control.fleet[name].problem or "")
        await until(lambda: bench.roles() == "PDD")
        assert [restarted for restarted, _ in bench.restarter.restarted] == [name]
        await asyncio.gather(*turns)


@in_virtual_time
async def test_requests_that_wait_on_an_engine_that_moves_are_no_hang() -> None:
    """A prefill of 19 s gives nothing for twice the bound."""
    async with Bench("PD", prefill_s=19.0) as bench:
        for engine in bench.engines.values():
            engine.tells = True
        await bench.trajectory("t")
        assert bench.restarter.restarted == []


@in_virtual_time
async def test_a_request_that_waits_for_room_while_others_are_served_is_not_silent() -> None:
    """For five times what would be silence, on a healthy engine."""
    async with Bench("PD") as bench:
        engine = bench.engine("e1")
        engine.tells, engine.room = True, asyncio.Event()
        waiting = asyncio.create_task(bench.trajectory("waiting"))
        for number in range(20):
            await bench.trajectory(f"t{number}", (number, 1), 500)
            await asyncio.sleep(5.0)
        assert asyncio.get_running_loop().time() > 100
        engine.room.set()
        assert (await waiting).attempts == 1
        assert bench.restarter.restarted == []


@in_virtual_time
async def test_a_process_that_itself_stood_still_takes_no_engine_for_hung() -> None:
    """Its marks stood still for an hour, and so did the watch."""
    engine, watch = FakeEngine("e", World(), Role.DECODE), ProgressWatch(3.0)
    assert watch.silence(engine, 1.0, 0.0, 10.0) == 0
    assert watch.silence(engine, 1.0, 0.0, 3610.0) == 3.0
    assert watch.silence(engine, 1.0, 3611.0, 3612.0) == 0


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "too many open files"),
        OSError(errno.ENOSPC, "no space left"),
        FileNotFoundError("python"),
        PermissionError("python"),
        BlockingIOError(errno.EAGAIN, "fork"),
        MemoryError(),
        TimeoutError(),
        EngineError("odd answer"),
        KeyError("anything"),
    ],
    ids=repr,
)
@in_virtual_time
async def test_a_restart_is_tried_again_whatever_it_met(error: Exception) -> None:
    """Tries of 2 s each, with pauses of 1, 2 and 4 s between them."""
    async with Bench("PDD") as bench:
        bench.restarter.errors = [error] * 3
        bench.engine("e2").die()
        await until(lambda: bench.roles() == "PD.")
        died = asyncio.get_running_loop().time()
        await asyncio.sleep(2.5)
        assert repr(error) in (bench.control.status().instances[2].problem or "")
        assert bench.control.health()["problems"].keys() == {"e2"}
        await until(lambda: bench.roles() == "PDD")
        assert asyncio.get_running_loop().time() - died == pytest.approx(4 * 2 + 1 + 2 + 4, abs=0.1)
        assert bench.control.health() == {
            "can_serve": True,
            "serving": {"prefill": 1, "decode": 2, "mixed": 0},
            "problems": {},
        }
        assert bench.control.status().errors == ()


@in_virtual_time
async def test_a_restart_that_never_succeeds_is_given_up_by_name() -> None:
    bench = Bench("PDD", restart_within=60.0)
    await bench.control.start()
    bench.restarter.errors = [OSError(errno.EMFILE, "too many open files")] * 1000
    bench.engine("e1").die()
    bench.engine("e2").die()
    await until(lambda: bench.roles() == "P..")
    assert not bench.control.can_serve
    await asyncio.sleep(130.0)
    assert "given up after 60 s" in bench.control.health()["problems"]["e1"]
    tries = 1000 - len(bench.restarter.errors)
    await asyncio.sleep(1000.0)
    assert 1000 - len(bench.restarter.errors) == tries
    with pytest.raises(ExceptionGroup) as failure:
        await bench.control.stop()
    assert {note for error in failure.value.exceptions for note in error.__notes__} == {
        "(the first failure of: restart of e1)",
        "(the first failure of: restart of e2)",
    }


@in_virtual_time
async def test_what_our_own_process_lacks_kills_no_engine() -> None:
    """Connections fail for a while: requests, aborts and health checks."""
    async with Bench("PDD") as bench:
        for engine in bench.engines.values():
            engine.shortages = 30
        await asyncio.gather(*bench.trajectories(6))
        await until(lambda: not any(engine.shortages for engine in bench.engines.values()))
        assert bench.restarter.restarted == []
        assert {state for *_, state in bench.notes.instances} == {InstanceState.ROUTED}


@in_virtual_time
async def test_the_last_decode_instance_dies_and_another_takes_its_role_until_it_is_back() -> None:
    async with Bench("PPPD", ADAPTIVE) as bench:
        bench.restarter.seconds = 30.0
        turns = bench.trajectories(10, budget=400)
        await asyncio.sleep(0.5)
        bench.engine("e3").die()
        await until(lambda: bench.roles().count("D") > 0)
        assert asyncio.get_running_loop().time() < 3.0
        await asyncio.gather(*turns)


@in_virtual_time
async def test_a_dead_instance_comes_back_in_the_role_that_is_wanted() -> None:
    """In service 1:2, wanted 3:1 of four: the dead decode instance comes back as prefill."""
    async with Bench("PDDD", Scripted((1, 3), (3, 1))) as bench:
        await asyncio.sleep(1.5)
        bench.engine("e3").die()
        bench.control.router.bury(bench.control.fleet["e3"], "test")
        await until(lambda: "." not in bench.roles() and asyncio.get_running_loop().time() > 3.0)
        assert bench.restarter.restarted == [("e3", Role.PREFILL)]


@pytest.mark.parametrize(
    ("target", "died", "wanted"),
    [
        ((1, 1, 2), "M", Role.MIXED),
        ((1, 1, 2), "D", Role.DECODE),
        ((0, 0, 4), "D", Role.MIXED),
        ((1, 3, 0), "M", Role.DECODE),
    ],
)
@in_virtual_time
async def test_a_dead_instance_is_wanted_as_what_there_are_too_few_of(
    target: tuple[int, int, int], died: str, wanted: Role
) -> None:
    """In service are the other three of 1:1 + 2 mixed; its own role comes first, then the one that lacks most."""
    roles = "PDMM"
    async with Bench(roles, Scripted((1, 1, 2))) as bench:
        await asyncio.sleep(1.5)
        bench.control.manager._policy = Scripted(target)
        victim = bench.control.fleet[f"e{roles.index(died)}"]
        bench.control.fleet.move(victim, InstanceState.DRAINING)
        assert bench.control.manager.wanted_role(victim) is wanted
        bench.control.fleet.move(victim, InstanceState.ROUTED)


class AtMoments(Policy):
    """Keeps the roles on the grid, and answers other moments with targets of their own."""

    def __init__(self, **targets: tuple[int, ...]) -> None:
        self.targets = {Moment(name): Allocation(*target) for name, target in targets.items()}

    def decide(self, situation: Situation) -> Allocation | None:
        return self.targets.get(situation.moment, situation.current)


def moments(bench: Bench) -> list[tuple[float, Moment]]:
    decisions = bench.control.decisions
    return [(decision.time, decision.moment) for decision in decisions if decision.moment is not Moment.GRID]


@in_virtual_time
async def test_a_sync_is_decided_before_generation_resumes_and_its_flips_disturb_nobody() -> None:
    """From 0.3 s on the update takes 1 s and the flips 0.5 s: until 1.8 s the other two serve, no request is cancelled."""
    async with Bench("PPDD", AtMoments(sync=(1, 3)), update_s=1.0) as bench:
        turns = bench.trajectories(6, budget=400)
        await asyncio.sleep(0.3)
        await bench.control.update_weights("/weights", 1)
        (decision,) = [decision for decision in bench.control.decisions if decision.moment is Moment.SYNC]
        assert decision.time == pytest.approx(1.3, abs=0.02)
        assert decision.current == Allocation(2, 2)
        assert decision.states[State.READY] == sum(decision.states.values()) > 3
        assert bench.roles() == ".PDD"
        await asyncio.sleep(0.4)
        assert bench.roles() == ".PDD"
        assert bench.control.router.live > 0
        await until(lambda: bench.roles() == "DPDD")
        (flip,) = bench.control.flips
        assert (flip.time, flip.cancelled, flip.drain_s) == (decision.time, 0, 0.0)
        assert asyncio.get_running_loop().time() == pytest.approx(decision.time + 0.5, abs=0.01)
        assert not bench.control.switcher.lock.locked()
        await asyncio.gather(*turns)
        assert {turn.attempts for turn in bench.notes.turns} <= {1, 2}


@in_virtual_time
async def test_at_a_sync_all_instances_may_flip_at_once() -> None:
    async with Bench("PD", AtMoments(sync=(0, 0, 2))) as bench:
        turns = bench.trajectories(4, budget=300)
        await asyncio.sleep(0.5)
        await bench.control.pause()
        await bench.control.update_weights("/weights", 1)
        assert bench.roles() == "PD"
        bench.control.resume()
        assert bench.roles() == ".."
        await until(lambda: bench.roles() == "MM")
        await asyncio.gather(*turns)
        await bench.control.pause()
        bench.control.resume()
        assert [moment for _, moment in moments(bench)].count(Moment.SYNC) == 1


@in_virtual_time
async def test_a_weight_update_that_reaches_nobody_is_no_sync() -> None:
    async with Bench("PD", AtMoments(sync=(0, 0, 2))) as bench:
        bench.engine("e0").update_fault = bench.engine("e1").update_fault = "fail"
        with pytest.raises(EngineError):
            await bench.control.update_weights("/weights", 1)
        assert moments(bench) == []
        assert not bench.control.switcher.lock.locked()


@in_virtual_time
async def test_a_start_is_decided_once_when_all_that_were_launched_are_in() -> None:
    async with Bench("PPDD", AtMoments(start=(3, 1))) as bench:
        await asyncio.sleep(0.25)
        await asyncio.gather(*bench.trajectories(50))
        assert moments(bench) == [(0.25, Moment.START)]
        (decision,) = [decision for decision in bench.control.decisions if decision.moment is Moment.START]
        assert sum(decision.states.values()) == 50
        assert bench.roles().count("P") == 3
        begun = asyncio.get_running_loop().time()
        await asyncio.gather(*(bench.trajectory(f"later-{index}") for index in range(3)))
        assert moments(bench) == [(0.25, Moment.START), (begun, Moment.START)]


@in_virtual_time
async def test_a_start_during_flips_is_decided_when_they_are_made() -> None:
    async with Bench("PPDD", AtMoments(sync=(1, 3), start=(2, 2))) as bench:
        await bench.control.update_weights("/weights", 1)
        await asyncio.gather(*bench.trajectories(3))
        # 1 s of update, 0.5 s of flips.
        assert moments(bench) == [(1.0, Moment.SYNC), (1.5, Moment.START)]


@pytest.mark.parametrize("policy", [ADAPTIVE, Static(2, 2), Colocated()])
@in_virtual_time
async def test_policies_that_look_at_the_grid_alone_are_not_asked_at_other_moments(policy: Policy) -> None:
    async with Bench("PPDD", policy) as bench:
        turns = bench.trajectories(4, budget=300)
        await asyncio.sleep(1.5)
        await bench.control.update_weights("/weights", 1)
        await asyncio.gather(*turns)
        assert {decision.moment for decision in bench.control.decisions} == {Moment.GRID}


@in_virtual_time
async def test_a_policy_that_fails_at_a_sync_leaves_the_roles_and_the_run_alone() -> None:
    bench = Bench("PPDD", AtMoments())
    await bench.control.start()
    bench.policy.decide = lambda situation: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    turns = bench.trajectories(4, budget=50)
    await bench.control.update_weights("/weights", 1)
    await asyncio.gather(*turns)
    assert bench.control.status().errors == ("decision: division by zero",)
    with pytest.raises(ExceptionGroup):
        await bench.control.stop()


class Gentle(Scripted):
    def handling(self, situation: Situation, target: Allocation) -> Handling:
        return Handling(patience=10.0, even_out=True)


@in_virtual_time
async def test_requests_are_handled_as_the_policy_says_while_roles_change() -> None:
    """At 1 s a prefill instance begins to become decode and is let finish; then decodes move there."""
    async with Bench("PPD", Gentle((1, 2)), prefill_s=0.2, token_s=0.1) as bench:
        turns = bench.trajectories(12, budget=60)
        await asyncio.sleep(0.9)
        late = [asyncio.create_task(bench.trajectory(f"late-{i}", (i, i), 60)) for i in range(4)]
        await until(lambda: len(bench.control.flips) == 1)
        (flip,) = bench.control.flips
        assert (flip.cancelled, flip.drain_s > 0.05) == (0, True)
        await asyncio.gather(*turns, *late)
        assert sum(turn.moves for turn in bench.notes.turns) > 2
        assert {turn.attempts - turn.moves for turn in bench.notes.turns} == {1}


@in_virtual_time
async def test_an_error_in_the_forecast_is_reported_and_the_loop_goes_on() -> None:
    bench = Bench()
    good = bench.forecaster.forecast

    def fail(snapshot: Snapshot, horizon: float, prefill_instances: object) -> object:
        raise ZeroDivisionError("no data")

    bench.forecaster.forecast = fail  # type: ignore[assignment, method-assign]
    await bench.control.start()
    await asyncio.sleep(3.5)
    bench.forecaster.forecast = good  # type: ignore[method-assign]
    await asyncio.sleep(3.0)
    assert [decision.time for decision in bench.control.decisions] == pytest.approx([4, 5, 6])
    assert bench.control.status().errors == ("decision: no data",)
    with pytest.raises(ExceptionGroup, match="these failed") as failure:
        await bench.control.stop()
    assert [type(error) for error in failure.value.exceptions] == [ZeroDivisionError]


@in_virtual_time
async def test_stop_ends_at_once_also_during_a_flip() -> None:
    bench = Bench("PPD", Scripted((1, 2)), flip_s=4.0)
    await bench.control.start()
    await bench.control.record(Sampled(0.0, "t", group="g", task="t"))
    await asyncio.sleep(2.0)
    assert bench.roles() == ".PD"
    await bench.control.stop()
    assert asyncio.get_running_loop().time() == pytest.approx(2.0)
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
