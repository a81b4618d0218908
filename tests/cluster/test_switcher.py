from __future__ import annotations

import asyncio

import pytest
from cluster_bench import Bench, in_virtual_time, until
from fake_engine import FakeEngine, World
from hypothesis import given
from hypothesis import strategies as st

from prorsa.allocation import Allocation
from prorsa.cluster.flips import allocation_of, next_wave, serves
from prorsa.cluster.instances import Fleet, Instance, InstanceState
from prorsa.cluster.observers import Flip
from prorsa.cluster.switcher import FlipRefused
from prorsa.engines.protocol import SPLIT_ROLES, Role


async def busy(bench: Bench, count: int = 12) -> list[asyncio.Task[object]]:
    """Trajectories of which some decode and some wait in the queue."""
    turns = bench.trajectories(count)
    await asyncio.sleep(0.25)
    return list(turns)


@in_virtual_time
async def test_a_flip_unroutes_cancels_waits_flips_verifies_and_reroutes() -> None:
    async with Bench("PDDD") as bench:
        turns = await busy(bench, 40)
        before = bench.control.fleet["e1"].decodes
        assert before > 0
        flip = await bench.control.switcher.flip("e1", Role.PREFILL)
        assert flip == Flip(0.25, "e1", Role.DECODE, Role.PREFILL, before, flip.drain_s, flip.flip_s, None)
        assert flip.flip_s == pytest.approx(0.5)
        assert bench.roles() == "PPDD"
        assert bench.engine("e1").role is Role.PREFILL
        await asyncio.gather(*turns)
        states = [(role, state) for _, name, role, state in bench.notes.instances if name == "e1"]
        assert states == [
            (Role.DECODE, InstanceState.ROUTED),
            (Role.DECODE, InstanceState.DRAINING),
            (Role.DECODE, InstanceState.FLIPPING),
            (Role.PREFILL, InstanceState.ROUTED),
        ]
        assert bench.control.fleet["e1"].cache_epoch == 1
        assert bench.notes.flips == [flip] == bench.control.flips
        assert any(place[0] == "e1" for turn in bench.notes.turns for place in turn.instances)


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("noop", "asked to become prefill; it still reports decode"),
        ("fail", "rebuild failed"),
        ("die", "no answer"),
        ("hang", r"was not prefill after 5\.0 s"),
    ],
)
@in_virtual_time
async def test_a_flip_that_fails_restarts_its_instance_and_loses_no_request(fault: str, failure: str) -> None:
    async with Bench("PDDD") as bench:
        turns = await busy(bench)
        bench.engine("e1").flip_fault = fault
        flip = await bench.control.switcher.flip("e1", Role.PREFILL)
        assert flip.failure is not None
        with pytest.raises(AssertionError, match=failure):
            raise AssertionError(flip.failure)
        assert bench.roles() == "P.DD"
        await asyncio.gather(*turns)
        await until(lambda: bench.roles() == "PDDD")
        assert bench.restarter.restarted == [("e1", Role.DECODE)]
        assert bench.engines["e1"].closed


@in_virtual_time
async def test_an_instance_that_does_not_get_idle_is_restarted() -> None:
    async with Bench("PDD") as bench:
        bench.engine("e1").legs["stuck"] = None  # type: ignore[assignment]
        flip = await bench.control.switcher.flip("e1", Role.PREFILL)
        assert flip.failure == "instance e1 was not idle after 3.0 s"
        assert (flip.drain_s, flip.flip_s) == (pytest.approx(3.0), 0.0)
        await until(lambda: bench.roles() == "PDD")
        bench.engines["e1"].legs.clear()


@in_virtual_time
async def test_an_instance_that_dies_while_it_drains_is_restarted() -> None:
    async with Bench("PDDD") as bench:
        turns = await busy(bench)
        bench.engine("e1").deaf = True
        flip = asyncio.create_task(bench.control.switcher.flip("e1", Role.PREFILL))
        await asyncio.sleep(0.1)
        bench.engine("e1").die()
        assert (await flip).failure is not None
        await asyncio.gather(*turns)
        await until(lambda: bench.roles() == "PDDD")
        assert len(bench.restarter.restarted) == 1


@in_virtual_time
async def test_a_prefill_that_hands_over_late_is_waited_for() -> None:
    """The engine refuses to flip while a leg that the router has let go of still runs there."""
    async with Bench("PPD") as bench:
        engine = bench.engine("e0")
        engine.legs["handing over"] = None  # type: ignore[assignment]
        asyncio.get_running_loop().call_later(1.0, engine.legs.clear)
        flip = await bench.control.switcher.flip("e0", Role.DECODE)
        assert flip.failure is None
        assert flip.drain_s == pytest.approx(1.0, abs=0.03)


@in_virtual_time
async def test_a_flip_is_refused_where_it_does_harm_or_makes_no_sense() -> None:
    async with Bench("PDDD") as bench:
        flips = bench.control.switcher
        with pytest.raises(FlipRefused, match="e0: it is the last prefill instance in service"):
            await flips.flip("e0", Role.DECODE)
        with pytest.raises(FlipRefused, match="e1: it is decode already"):
            await flips.flip("e1", Role.DECODE)
        first = asyncio.create_task(flips.flip("e1", Role.PREFILL))
        await asyncio.sleep(0.1)
        with pytest.raises(FlipRefused, match="e1: a flip to prefill was asked while another is going on"):
            await flips.flip("e1", Role.PREFILL)
        assert (await first).failure is None
        bench.engine("e2").die()
        await until(lambda: bench.roles() == "PP.D")
        with pytest.raises(FlipRefused, match="e2: it is dead"):
            await flips.flip("e2", Role.PREFILL)
        with pytest.raises(FlipRefused, match="e3: it is the last decode instance in service"):
            await flips.flip("e3", Role.PREFILL)


@in_virtual_time
async def test_two_flips_that_together_would_empty_a_role_leave_one() -> None:
    async with Bench("PDD") as bench:
        flips = [asyncio.create_task(bench.control.switcher.flip(name, Role.PREFILL)) for name in ("e1", "e2")]
        results = await asyncio.gather(*flips, return_exceptions=True)
        assert [type(result) for result in results] == [Flip, FlipRefused]
        assert bench.roles() == "PPD"


@in_virtual_time
async def test_the_least_loaded_instances_are_flipped() -> None:
    async with Bench("PDDDD") as bench:
        turns = await busy(bench, 3)
        assert [bench.control.fleet[f"e{i}"].decodes for i in range(1, 5)] == [1, 1, 1, 0]
        flips = await bench.control.switcher.apply(Allocation(2, 3))
        assert [(flip.instance, flip.cancelled) for flip in flips] == [("e4", 0)]
        await asyncio.gather(*turns)


@pytest.mark.parametrize(
    ("start", "target", "after"),
    [
        ("PPPD", (1, 3), "DDPD"),
        ("PDDD", (3, 1), "PPPD"),
        ("PPDD", (2, 2), "PPDD"),
        ("PPDD", (5, 5), "PPDD"),
        ("PD", (1, 1), "PD"),
        ("PPPP", (2, 2), "DDPP"),
        ("PPDD", (4, 0), "PPPD"),
        ("PPDD", (1, 1, 2), "MPMD"),
        ("MMMM", (2, 1, 1), "PPDM"),
        ("PMD", (0, 0, 3), "MMM"),
        # In two waves: those that have to serve meanwhile wait for the others.
        ("PPD", (0, 0, 3), "MMM"),
        ("MMM", (1, 2, 0), "PDD"),
        ("PPM", (1, 2, 0), "DPD"),
        # Nothing would be served while one of the two flips.
        ("PD", (0, 0, 2), "PD"),
        ("MM", (1, 1, 0), "MM"),
    ],
)
@in_virtual_time
async def test_an_allocation_is_reached_while_the_routed_instances_serve_all_the_time(
    start: str, target: tuple[int, ...], after: str
) -> None:
    async with Bench(start) as bench:
        served: list[bool] = []
        bench.control.fleet.watchers.append(lambda _: served.append(serves(bench.control.fleet.in_service)))
        turns = bench.trajectories(8) if serves(bench.control.fleet.in_service) else []
        flips = await bench.control.switcher.apply(Allocation(*target))
        assert bench.roles() == after
        assert len(flips) == sum(one != other for one, other in zip(start, after, strict=True))
        assert all(served) or not turns
        await asyncio.gather(*turns)


ROLE_LISTS = st.lists(st.sampled_from(Role), min_size=1, max_size=9)


@given(ROLE_LISTS, ROLE_LISTS, st.data())
def test_waves_serve_all_along_and_reach_what_serves_by_the_fewest_flips(
    before: list[Role], wanted: list[Role], data: st.DataObject
) -> None:
    fleet, target = Fleet(), allocation_of(wanted)
    for index, role in enumerate(before):
        fleet.add(Instance(FakeEngine(f"e{index}", World(), role), role, 1000))
        list(fleet)[-1].begin_decode("r", data.draw(st.integers(0, 100)))
    start, served, flips = fleet.in_service, serves(fleet.in_service), 0
    while wave := next_wave(fleet, target):
        for instance, _ in wave:
            fleet.move(instance, InstanceState.DRAINING)
        assert serves(fleet.in_service) or not serves(start)
        for instance, role in wave:
            fleet.move(instance, InstanceState.ROUTED, role)
        flips += len(wave)
    surplus = sum(max(0, getattr(start, role) - getattr(target, role)) for role in Role)
    lack = sum(max(0, getattr(target, role) - getattr(start, role)) for role in Role)
    assert flips <= min(surplus, lack)
    whole = all((one.prefill > 0) == (one.decode > 0) for one in (start, target))
    if len(before) == len(wanted) and (not served or (whole and len(before) > 2)):
        assert fleet.in_service == target
        assert flips == surplus


def test_the_least_loaded_go_first_and_only_to_roles_that_their_engines_can_have() -> None:
    fleet = Fleet()
    for index, load in enumerate((30, 10, 20, 0)):
        fleet.add(Instance(FakeEngine(f"e{index}", World(), Role.DECODE), Role.DECODE, 1000))
        list(fleet)[-1].begin_decode("r", load)
    fleet.add(Instance(FakeEngine("e4", World(), Role.PREFILL), Role.PREFILL, 1000))
    fleet["e3"].engine.roles = SPLIT_ROLES  # type: ignore[misc]
    wave = next_wave(fleet, Allocation(1, 1, 3))
    assert [(instance.name, role) for instance, role in wave] == [("e1", Role.MIXED), ("e2", Role.MIXED)]
    wave = next_wave(fleet, Allocation(3, 2, 0))
    assert [(instance.name, role) for instance, role in wave] == [("e3", Role.PREFILL), ("e1", Role.PREFILL)]


@in_virtual_time
async def test_a_flip_to_a_role_that_the_engine_cannot_have_is_refused() -> None:
    async with Bench("PDD") as bench:
        bench.engine("e1").roles = SPLIT_ROLES
        with pytest.raises(FlipRefused, match="e1: its engine cannot become mixed without a restart"):
            await bench.control.switcher.flip("e1", Role.MIXED)
        assert await bench.control.switcher.apply(Allocation(1, 1, 1)) == []


@in_virtual_time
async def test_a_mixed_instance_serves_while_the_last_of_a_role_flips() -> None:
    async with Bench("PMD") as bench:
        turns = await busy(bench)
        assert (await bench.control.switcher.flip("e0", Role.MIXED)).failure is None
        await asyncio.gather(*turns)
        assert bench.roles() == "MMD"


@in_virtual_time
async def test_nothing_is_disturbed_where_an_instance_becomes_mixed_or_a_mixed_one_decodes_only() -> None:
    async with Bench("PDD") as bench:
        turns = await busy(bench, 4)
        instances = list(bench.control.fleet)
        epochs = [instance.cache_epoch for instance in instances]
        flips = await bench.control.switcher.apply(Allocation(0, 0, 3))
        more = [asyncio.create_task(bench.trajectory(f"later-{n}")) for n in range(4)]
        await asyncio.sleep(0.25)
        flips += await bench.control.switcher.apply(Allocation(0, 1, 2))
        assert [(flip.cancelled, flip.drain_s, flip.failure) for flip in flips] == [(0, 0.0, None)] * 4
        await asyncio.gather(*turns, *more)
        assert {turn.attempts for turn in bench.notes.turns} == {1}
        assert [instance.cache_epoch for instance in instances] == epochs


# Patience.


@in_virtual_time
async def test_an_instance_finishes_what_it_serves_before_it_flips() -> None:
    """49 tokens of 0.01 s after a first one at 0.1 s; nothing new comes meanwhile."""
    async with Bench("PDD") as bench:
        turns = await busy(bench, 4)
        before = bench.control.fleet["e1"].decodes
        assert before > 0
        (flip,) = await bench.control.switcher.apply(Allocation(2, 1), patience=10.0)
        assert (flip.instance, flip.cancelled, flip.failure) == ("e1", 0, None)
        assert 0.0 < flip.drain_s < 0.5
        assert sum(place[1] == "e1" for turn in bench.notes.turns for place in turn.instances) == before
        await asyncio.gather(*turns)
        assert {turn.attempts for turn in bench.notes.turns} == {1}


@in_virtual_time
async def test_what_is_not_finished_when_the_patience_ends_is_cancelled() -> None:
    async with Bench("PDD") as bench:
        turns = await busy(bench, 4)
        (flip,) = await bench.control.switcher.apply(Allocation(2, 1), patience=0.1)
        assert flip.cancelled > 0
        assert flip.drain_s == pytest.approx(0.1, abs=0.03)
        await asyncio.gather(*turns)


@in_virtual_time
async def test_a_weight_update_ends_the_patience() -> None:
    async with Bench("PDD") as bench:
        turns = await busy(bench, 4)
        flipping = asyncio.create_task(bench.control.switcher.apply(Allocation(2, 1), patience=100.0))
        await asyncio.sleep(0.05)
        await bench.control.update_weights("/weights", 1)
        (flip,) = await flipping
        assert flip.cancelled > 0
        assert flip.drain_s == pytest.approx(0.05, abs=0.03)
        assert asyncio.get_running_loop().time() < 2.0
        await asyncio.gather(*turns)


@in_virtual_time
async def test_a_weight_update_does_not_wait_for_a_second_wave() -> None:
    async with Bench("PPD") as bench:
        turns = await busy(bench, 4)
        flipping = asyncio.create_task(bench.control.switcher.apply(Allocation(0, 0, 3)))
        await asyncio.sleep(0.05)
        await bench.control.update_weights("/weights", 1)
        assert len(await flipping) == 1
        assert sorted(bench.roles()) == ["D", "M", "P"]
        await asyncio.gather(*turns)


@in_virtual_time
async def test_an_instance_that_dies_in_its_patience_is_restarted() -> None:
    async with Bench("PDD") as bench:
        turns = await busy(bench, 4)
        flipping = asyncio.create_task(bench.control.switcher.apply(Allocation(2, 1), patience=100.0))
        await asyncio.sleep(0.05)
        bench.engine("e1").die()
        (flip,) = await flipping
        assert flip.failure is not None
        assert flip.drain_s < 1.0
        await asyncio.gather(*turns)
        await until(lambda: "." not in bench.roles())


@in_virtual_time
async def test_a_restart_that_fails_is_tried_again() -> None:
    async with Bench("PDD") as bench:
        bench.restarter.failures = 3
        turns = await busy(bench)
        bench.engine("e1").die()
        await asyncio.gather(*turns)
        await until(lambda: bench.roles() == "PDD")
        # Four restarts of 2 s with pauses of 1, 2 and 4 s between them.
        times = [time for time, name, _, _ in bench.notes.instances if name == "e1"]
        assert times[-1] - times[-2] == pytest.approx(4 * 2 + 1 + 2 + 4)


@in_virtual_time
async def test_a_flip_cancelled_half_way_restarts_its_instance() -> None:
    async with Bench("PDD") as bench:
        flip = asyncio.create_task(bench.control.switcher.flip("e1", Role.PREFILL))
        await asyncio.sleep(0.2)
        flip.cancel()
        await asyncio.gather(flip, return_exceptions=True)
        assert bench.roles() == "P.D"
        await until(lambda: bench.roles() == "PDD")


@in_virtual_time
async def test_an_instance_that_is_declared_dead_while_it_drains_is_not_rerouted() -> None:
    """It still answers; but it was given up, and its restart is under way."""
    async with Bench("PDD") as bench:
        bench.engine("e1").legs["slow"] = None  # type: ignore[assignment]
        flip = asyncio.create_task(bench.control.switcher.flip("e1", Role.PREFILL))
        await asyncio.sleep(0.1)
        bench.control.router.bury(bench.control.fleet["e1"], "test")
        bench.engine("e1").legs.clear()
        assert (await flip).failure == "instance e1: it was found dead while it was draining"
        assert bench.roles() == "P.D"
        await until(lambda: bench.roles() == "PDD")


@in_virtual_time
async def test_an_engine_that_reports_idle_too_early_is_asked_again() -> None:
    async with Bench("PDD") as bench:
        bench.engine("e1").refuse_flips = 4
        assert (await bench.control.switcher.flip("e1", Role.PREFILL)).failure is None


@in_virtual_time
async def test_flips_that_waited_for_a_weight_update_are_checked_again() -> None:
    async with Bench("PDD") as bench:
        await bench.control.pause()
        flips = [asyncio.create_task(bench.control.switcher.flip(name, Role.PREFILL)) for name in ("e1", "e2")]
        await asyncio.sleep(0.1)
        bench.control.resume()
        results = await asyncio.gather(*flips, return_exceptions=True)
        assert [type(result) for result in results] == [Flip, FlipRefused]
        assert bench.roles() == "PPD"
