from __future__ import annotations

import asyncio

import pytest
from cluster_bench import Bench, in_virtual_time, until

from prorsa.cluster.turns import TurnFailed
from prorsa.engines.protocol import EngineError, Role
from prorsa.lifecycle import Transition


@in_virtual_time
async def test_a_run_is_observed_and_counted() -> None:
    async with Bench() as bench:
        await asyncio.gather(*bench.trajectories(20))
        status = bench.control.status()
        assert (status.turns, status.resends, status.waiting) == (20, 0, 0)
        assert status.output_tokens == sum(turn.output_tokens for turn in bench.notes.turns)
        assert len(bench.notes.transitions) == 20 * 6
        assert [(i.name, i.role) for i in status.instances] == [
            ("e0", Role.PREFILL),
            ("e1", Role.PREFILL),
            ("e2", Role.DECODE),
            ("e3", Role.DECODE),
        ]


@in_virtual_time
async def test_prefill_speed_is_measured_from_the_attempts() -> None:
    """Each prompt of 30 tokens takes 0.1 s on an instance that was idle: 300 tokens/s, not the profiled 100."""
    async with Bench("PD") as bench:
        for i in range(5):
            await bench.trajectory(f"t{i}", (i,) * 30, 5)
        await asyncio.sleep(1.0)
        assert bench.control.decisions[-1].demand.prefill_speed == pytest.approx(300.0)


@in_virtual_time
async def test_a_weight_update_in_mid_generation_loses_nothing_and_marks_every_token() -> None:
    async with Bench("PPDD") as bench:
        turns = bench.trajectories(16, budget=90)
        await asyncio.sleep(0.5)
        await bench.control.update_weights("/weights/7", 7)
        assert bench.control.version == 7
        assert {engine.version for engine in bench.engines.values()} == {7}
        assert {instance.cache_epoch for instance in bench.control.fleet} == {1}
        results = await asyncio.gather(*turns)
        for result in results:
            assert list(result.versions) == sorted(result.versions)
            assert set(result.versions) <= {0, 7}
        assert sum(set(result.versions) == {0, 7} for result in results) > 4
        assert sum(result.attempts == 2 for result in results) > 4


@in_virtual_time
async def test_nothing_is_generated_while_weights_are_updated() -> None:
    async with Bench("PD") as bench:
        turns = bench.trajectories(6)
        await asyncio.sleep(0.3)
        update = asyncio.create_task(bench.control.update_weights("/weights/1", 1))
        await asyncio.sleep(0.2)
        tokens = bench.control.status().output_tokens
        assert all(not engine.legs for engine in bench.engines.values())
        await asyncio.sleep(0.5)
        assert bench.control.status().output_tokens == tokens
        await update
        await asyncio.gather(*turns)


@pytest.mark.parametrize("fault", ["fail", "lie", "die"])
@in_virtual_time
async def test_an_instance_that_fails_a_weight_update_comes_back_with_the_new_weights(fault: str) -> None:
    async with Bench("PPDD") as bench:
        turns = bench.trajectories(12)
        await asyncio.sleep(0.3)
        bench.engine("e3").update_fault = fault
        await bench.control.update_weights("/weights/1", 1)
        assert bench.roles() == "PPD."
        await asyncio.gather(*turns)
        await until(lambda: bench.roles() == "PPDD")
        assert bench.engine("e3") is not bench.engines["e3"]
        assert bench.engine("e3").version == 1


@in_virtual_time
async def test_a_checkpoint_that_no_instance_accepts_leaves_the_old_weights() -> None:
    async with Bench("PD") as bench:
        turns = bench.trajectories(4)
        await asyncio.sleep(0.3)
        for engine in bench.engines.values():
            engine.update_fault = "fail"
        with pytest.raises(EngineError, match="weights 1 at /nowhere reached no instance: engine e0: cannot read"):
            await bench.control.update_weights("/nowhere", 1)
        assert bench.control.version == 0
        assert bench.roles() == "PD"
        await asyncio.gather(*turns)


@in_virtual_time
async def test_an_instance_restarted_during_an_update_gets_the_new_weights() -> None:
    async with Bench("PPDD") as bench:
        turns = bench.trajectories(12)
        await asyncio.sleep(0.3)
        bench.engine("e2").die()
        await until(lambda: bench.roles() == "PP.D")
        await bench.control.update_weights("/weights/5", 5)
        await until(lambda: bench.roles() == "PPDD")
        assert bench.engine("e2").version == 5
        await asyncio.gather(*turns)


@in_virtual_time
async def test_flips_and_weight_updates_exclude_each_other() -> None:
    async with Bench("PPD", flip_s=1.0, update_s=1.0) as bench:
        flip = asyncio.create_task(bench.control.switcher.flip("e0", Role.DECODE))
        await asyncio.sleep(0.5)
        update = asyncio.create_task(bench.control.update_weights("/weights/1", 1))
        await asyncio.sleep(0.6)
        assert (flip.done(), update.done()) == (True, False)
        second = asyncio.create_task(bench.control.switcher.flip("e0", Role.PREFILL))
        await update
        assert (asyncio.get_running_loop().time(), second.done()) == (pytest.approx(2.0), False)
        assert (await second).failure is None
        assert {engine.version for engine in bench.engines.values()} == {1}


@in_virtual_time
async def test_weight_updates_at_the_same_time_happen_one_after_the_other() -> None:
    async with Bench("PPD") as bench:
        bench.engine("e0").update_s = 5.0
        await asyncio.gather(*(bench.control.update_weights("/weights", version) for version in (1, 2)))
        assert {engine.version for engine in bench.engines.values()} == {2} == {bench.control.version}


@pytest.mark.parametrize("after", [0.1, 0.9])
@in_virtual_time
async def test_a_weight_update_is_completed_when_its_caller_is_cancelled(after: float) -> None:
    """Cancelled while the attempts are being aborted, and while the engines load."""
    async with Bench("PPD") as bench:
        turns = bench.trajectories(9)
        await asyncio.sleep(0.3)
        bench.engine("e2").late_tokens = 20
        update = asyncio.create_task(bench.control.update_weights("/weights/1", 1))
        await asyncio.sleep(after)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        assert bench.control.version == 0
        await asyncio.gather(*turns)
        assert {engine.version for engine in bench.engines.values()} == {1} == {bench.control.version}


@in_virtual_time
async def test_stop_during_a_weight_update_leaves_nothing_behind() -> None:
    bench = Bench("PPD")
    await bench.control.start()
    update = asyncio.create_task(bench.control.update_weights("/weights/1", 1))
    await asyncio.sleep(0.5)
    await bench.control.stop()
    assert update.done()
    bench.check_nothing_left()


@in_virtual_time
async def test_no_decision_is_made_while_generation_is_paused() -> None:
    async with Bench("PD") as bench:
        turns = bench.trajectories(6, budget=300)
        await asyncio.sleep(1.5)
        await bench.control.pause()
        await bench.control.update_weights("/weights/1", 1)
        await asyncio.sleep(10.0)
        assert len(bench.control.decisions) == 1
        assert bench.control.router.live == 0
        bench.control.resume()
        await asyncio.gather(*turns)
        assert len(bench.control.decisions) > 1
        with pytest.raises(RuntimeError, match="resume without pause"):
            bench.control.resume()


@in_virtual_time
async def test_a_failing_observer_misses_that_observation_alone_and_surfaces() -> None:
    bench = Bench("PD")

    def fail(transition: Transition) -> None:
        raise OSError("disk full")

    bench.notes.transition = fail  # type: ignore[method-assign]
    await bench.control.start()
    await asyncio.gather(*bench.trajectories(5))
    assert bench.control.status().errors == ("observer Notes: disk full",)
    with pytest.raises(ExceptionGroup) as failure:
        await bench.control.stop()
    assert [str(error) for error in failure.value.exceptions] == ["disk full"]
    assert len(bench.notes.turns) == 5, "they were not what failed"
    bench.check_nothing_left()


@in_virtual_time
async def test_engines_with_different_weights_are_refused() -> None:
    bench = Bench("PD")
    bench.engines["e1"].version = 2
    with pytest.raises(EngineError, match=r"different weights versions \[0, 2\]"):
        await bench.control.start()


@in_virtual_time
async def test_an_engine_that_does_not_answer_while_it_loads_weights_is_not_dead() -> None:
    async with Bench("PD") as bench:
        await asyncio.sleep(0.9)
        for engine in bench.engines.values():
            engine.update_s, engine.healthy_s = 30.0, 1e6
        update = asyncio.create_task(bench.control.update_weights("/weights/1", 1))
        await asyncio.sleep(30.05)
        for engine in bench.engines.values():
            engine.healthy_s = 0.0
        await update
        await asyncio.sleep(5.0)
        assert bench.restarter.restarted == []


@in_virtual_time
async def test_stop_in_mid_run_leaves_nothing_behind() -> None:
    bench = Bench()
    await bench.control.start()
    turns = bench.trajectories(30, budget=500)
    await asyncio.sleep(0.15)
    await bench.control.stop()
    await bench.control.stop()
    bench.check_nothing_left()
    results = await asyncio.gather(*turns, return_exceptions=True)
    assert {type(result) for result in results} == {TurnFailed}


@in_virtual_time
async def test_what_an_observer_cannot_keep_is_told() -> None:
    bench = Bench("PD")
    assert bench.control.trouble == []
    bench.notes.trouble = None  # type: ignore[attr-defined]
    assert bench.control.trouble == []
    bench.notes.trouble = "/run/trace: No space left on device; free space there"  # type: ignore[attr-defined]
    assert bench.control.trouble == ["/run/trace: No space left on device; free space there"]
