"""Simulated engines behind the engine protocol, and the promises of the cluster kept by them, whatever fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from simulated_bench import ROLES, Scripts, SimulatedBench, prompt_of, tiny

from prorsa.allocation import Allocation
from prorsa.cluster.turns import TurnFailed
from prorsa.engines.protocol import (
    Bootstrap,
    Chunk,
    EngineBusy,
    EngineError,
    EngineGone,
    FinishReason,
    GenerateRequest,
    Role,
    SamplingParams,
)
from prorsa.profiles.profile import Profile
from prorsa.simulation.clock import run
from prorsa.simulation.engines.cluster import ConservationError, SimulatedCluster, SimulatedEngine
from prorsa.simulation.workloads.pseudo_model import STOP, PseudoModel


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return tiny(tmp_path_factory.mktemp("profile"))


def cluster(profile: Profile, roles: str, **settings: object) -> tuple[SimulatedCluster, list[SimulatedEngine]]:
    world = SimulatedCluster(profile, profile, PseudoModel(Scripts(), hashed=True), **settings)  # type: ignore[arg-type]
    return world, [world.start(f"e{index}", ROLES[letter]) for index, letter in enumerate(roles)]


def request(number: int = 3, room: int | None = None, budget: int = 1000) -> GenerateRequest:
    """The first turn of a trajectory of question 0: a prompt of 40 tokens, 5 + 7 * number output tokens below 65."""
    ids = prompt_of(Scripts().script(0, number), 0)
    bootstrap = None if room is None else Bootstrap("e0", 1, room)
    return GenerateRequest(
        f"t{number}.0.0", ids, SamplingParams(budget, stop_token_ids=(STOP,), seed=number), bootstrap
    )


async def read(stream: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in stream]


def tokens(chunks: list[Chunk]) -> tuple[int, ...]:
    return tuple(token for chunk in chunks for token in chunk.token_ids)


# One engine.


def test_a_mixed_engine_gives_the_first_token_the_rest_in_periods_and_the_finish(profile: Profile) -> None:
    async def main() -> None:
        world, (engine,) = cluster(profile, "M", stream_s=0.1)
        ask = request()
        chunks = await read(engine.generate(ask))
        expected, logprobs = world.model.stream(ask).take(1000)
        assert tokens(chunks) == expected
        assert tuple(p for chunk in chunks for p in chunk.logprobs) == logprobs
        assert len(chunks[0].token_ids) == 1
        assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.STOP]
        # 26 tokens, 25 of them in steps of about 12 ms: three periods of 0.1 s.
        assert len(chunks) == 5
        world.check()

    run(main())


def test_both_legs_of_a_request(profile: Profile) -> None:
    async def main() -> None:
        world, (prefill, decode) = cluster(profile, "PD")
        ask = request(room=1)
        first, second = await asyncio.gather(read(prefill.generate(ask)), read(decode.generate(ask)))
        assert [(chunk.token_ids, chunk.cached_tokens, chunk.finish) for chunk in first] == [
            ((), 0, FinishReason.LENGTH)
        ]
        assert tokens(second) == world.model.stream(ask).take(1000)[0]
        assert len(second) == 1
        # The other members of its group have the prompt cached, all but the last token.
        ask = request(4, room=2)
        first, _ = await asyncio.gather(read(prefill.generate(ask)), read(decode.generate(ask)))
        assert first[0].cached_tokens == 39
        world.check()

    run(main())


def test_a_request_takes_its_time_on_the_way(profile: Profile) -> None:
    async def first_token(request_s: float) -> float:
        _, (engine,) = cluster(profile.model_copy(update={"request_s": request_s}), "M")
        start = asyncio.get_running_loop().time()
        async for _ in engine.generate(request()):
            break
        return asyncio.get_running_loop().time() - start

    async def main() -> None:
        assert await first_token(0.25) == pytest.approx(0.25 + await first_token(0.0))

    run(main())


def test_a_request_waits_for_steps_of_an_engine_at_work_alone(profile: Profile) -> None:
    async def arrivals(request_steps: float) -> tuple[float, float]:
        """When the second of two requests is on the engine, and how long a step takes then."""
        _, (engine,) = cluster(profile.model_copy(update={"request_steps": request_steps}), "M")
        now = asyncio.get_running_loop().time
        first = asyncio.create_task(read(engine.generate(request(3))))
        await asyncio.sleep(0.05)
        start, step_s = now(), engine.core.step_s
        second = asyncio.create_task(read(engine.generate(request(4))))
        while len(engine.core.jobs) < 2:  # noqa: ASYNC110
            await asyncio.sleep(1e-4)
        found = now() - start, step_s
        await asyncio.gather(first, second)
        return found

    async def main() -> None:
        waited, step_s = await arrivals(2.0)
        assert step_s > 0.001
        assert waited == pytest.approx(2 * step_s, abs=2e-4)
        assert (await arrivals(0.0))[0] < 2e-4

    run(main())


def test_a_token_comes_steps_late_while_there_is_more_to_do(profile: Profile) -> None:
    async def arrivals(late_steps: float) -> tuple[float, float, float]:
        """Of the first and the last token of a request, and how long a step took between them."""
        _, (engine,) = cluster(profile.model_copy(update={"late_steps": late_steps}), "M")
        now = asyncio.get_running_loop().time
        start, times, step_s = now(), [], 0.0
        async for _ in engine.generate(request()):
            times.append(now() - start)
            step_s = step_s or engine.core.step_s
        return times[0], times[-1], step_s

    async def main() -> None:
        first, last, step_s = await arrivals(0.0)
        late_first, late_last, _ = await arrivals(1.0)
        assert late_first == pytest.approx(first + step_s)
        # No step follows the last one.
        assert late_last == last

    run(main())


def test_the_budget_ends_a_turn_with_length(profile: Profile) -> None:
    async def main() -> None:
        world, (engine,) = cluster(profile, "M")
        chunks = await read(engine.generate(request(budget=7)))
        assert len(tokens(chunks)) == 7
        assert chunks[-1].finish is FinishReason.LENGTH
        world.check()

    run(main())


def test_an_abort_gives_the_tokens_so_far(profile: Profile) -> None:
    async def main() -> None:
        world, (engine,) = cluster(profile, "M")
        ask = request()
        reading = asyncio.create_task(read(engine.generate(ask)))
        await asyncio.sleep(0.2)
        await engine.abort("another")
        await engine.abort(ask.rid)
        chunks = await reading
        made = tokens(chunks)
        assert chunks[-1].finish is FinishReason.ABORT
        assert 1 < len(made) < 26
        assert made == world.model.stream(ask).take(len(made))[0]
        assert (await engine.load()).idle
        world.check()

    run(main())


@pytest.mark.parametrize("delay", [0.0, 0.03, 0.2])
def test_closing_a_stream_cancels_it(profile: Profile, delay: float) -> None:
    async def main() -> None:
        world, (engine,) = cluster(profile, "M")
        reading = asyncio.create_task(read(engine.generate(request())))
        await asyncio.sleep(delay)
        reading.cancel()
        await asyncio.wait([reading])
        await asyncio.sleep(0.2)
        load = await engine.load()
        assert load.idle
        assert load.used_tokens == 0
        world.check()

    run(main())


def test_the_load_counts_requests_and_their_kv(profile: Profile) -> None:
    async def main() -> None:
        _, (engine,) = cluster(profile, "M")
        readers = [asyncio.create_task(read(engine.generate(request(number)))) for number in (4, 5, 6)]
        await asyncio.sleep(0)
        load = await engine.load()
        assert (load.running, load.waiting, load.used_tokens, load.max_tokens) == (0, 3, 0, 20_000)
        # Two prompts of 40 share a rank's chunk; the third is on the other rank. All decode after 0.09 s.
        await asyncio.sleep(0.2)
        load = await engine.load()
        assert (load.running, load.waiting) == (3, 0)
        assert 3 * 42 < load.used_tokens < 3 * 60
        await asyncio.gather(*readers)
        assert (await engine.load()).idle

    run(main())


def test_a_request_that_can_never_fit_is_refused(profile: Profile) -> None:
    async def main() -> None:
        _, (engine,) = cluster(profile.model_copy(update={"kv_tokens": 50}), "M")
        with pytest.raises(EngineError, match="can never fit into the 50 tokens"):
            await read(engine.generate(request()))

    run(main())


@pytest.mark.parametrize(("role", "room"), [("P", None), ("D", None), ("M", 1)])
def test_a_request_for_another_role_is_refused(profile: Profile, role: str, room: int | None) -> None:
    async def main() -> None:
        _, (engine,) = cluster(profile, role)
        with pytest.raises(EngineError, match="instance"):
            await read(engine.generate(request(room=room)))

    run(main())


def test_only_an_idle_engine_becomes_another_and_it_takes_its_time(profile: Profile) -> None:
    async def main() -> None:
        _, (engine,) = cluster(profile, "M")
        reading = asyncio.create_task(read(engine.generate(request())))
        await asyncio.sleep(0.01)
        with pytest.raises(EngineBusy):
            await engine.switch_role(Role.PREFILL)
        await reading
        start = asyncio.get_running_loop().time()
        switch = asyncio.create_task(engine.switch_role(Role.PREFILL))
        await asyncio.sleep(0.1)
        with pytest.raises(EngineBusy):
            await read(engine.generate(request(4, room=1)))
        await switch
        assert asyncio.get_running_loop().time() - start == pytest.approx(profile.flip_s)
        assert (await engine.info()).role is Role.PREFILL

    run(main())


def test_an_engine_that_becomes_mixed_or_is_no_longer_goes_on_with_what_it_has(profile: Profile) -> None:
    async def main() -> None:
        simulated, (prefill, decode) = cluster(profile, "PD")
        told = request(room=1)
        legs = [asyncio.create_task(read(engine.generate(told))) for engine in (prefill, decode)]
        await asyncio.sleep(0.0)
        start = asyncio.get_running_loop().time()
        for engine in (prefill, decode):
            await engine.switch_role(Role.MIXED)
        whole = asyncio.create_task(read(decode.generate(request(4))))
        await asyncio.sleep(0.0)
        await decode.switch_role(Role.DECODE)
        assert asyncio.get_running_loop().time() == start
        chunks = [await leg for leg in (*legs, whole)]
        assert [leg[-1].finish for leg in chunks] == [FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP]
        simulated.check()

    run(main())


def test_a_switch_loses_the_cache_and_the_store_brings_it_back(profile: Profile) -> None:
    async def cached(kv_store: bool) -> int:
        _, (engine,) = cluster(profile, "M", kv_store=kv_store)
        await read(engine.generate(request()))
        await engine.switch_role(Role.PREFILL)
        await engine.switch_role(Role.MIXED)
        return (await read(engine.generate(request(4))))[-1].cached_tokens

    assert run(cached(kv_store=True)) == 39
    assert run(cached(kv_store=False)) == 0


def test_a_weight_update_aborts_takes_its_time_and_forgets_every_cache(profile: Profile) -> None:
    async def main() -> None:
        world, (engine,) = cluster(profile, "M")
        await read(engine.generate(request()))
        reading = asyncio.create_task(read(engine.generate(request(4))))
        await asyncio.sleep(0.1)
        start = asyncio.get_running_loop().time()
        await engine.update_weights("/weights", 1)
        took = asyncio.get_running_loop().time() - start
        assert profile.update_s <= took < profile.update_s + 0.02
        assert (await reading)[-1].finish is FinishReason.ABORT
        again = await read(engine.generate(request(5)))
        assert {(chunk.weights_version, chunk.cached_tokens) for chunk in again} == {(1, 0)}
        world.check()

    run(main())


def test_profiles_that_differ_keep_decode_engines_apart(profile: Profile) -> None:
    async def main() -> None:
        wide = profile.model_copy(update={"name": "wide", "gpus": 4, "ranks": 4})
        world = SimulatedCluster(profile, wide, PseudoModel(Scripts(), hashed=True))
        prefill, decode = world.start("e0", Role.PREFILL), world.start("e1", Role.DECODE)
        assert (await decode.load()).max_tokens == 40_000
        for engine, role in ((prefill, Role.DECODE), (decode, Role.PREFILL)):
            with pytest.raises(EngineError, match="would have to be restarted"):
                await engine.switch_role(role)
        await prefill.switch_role(Role.MIXED)
        await prefill.switch_role(Role.PREFILL)
        ask = request(room=1)
        _, chunks = await asyncio.gather(read(prefill.generate(ask)), read(decode.generate(ask)))
        assert len(tokens(chunks)) == 26
        world.check()

    run(main())


def test_a_killed_engine_breaks_its_streams_and_comes_back_empty(profile: Profile) -> None:
    async def main() -> None:
        world, (prefill, decode) = cluster(profile, "PD")
        ask = request(room=1)
        legs = [asyncio.create_task(read(engine.generate(ask))) for engine in (prefill, decode)]
        await asyncio.sleep(0.02)
        world.kill("e0")
        with pytest.raises(EngineGone):
            await legs[0]
        # A dead prefill does not hang its decode.
        assert [chunk.finish for chunk in await legs[1]] == [FinishReason.ABORT]
        for call in (prefill.load(), prefill.abort(), prefill.info(), read(prefill.generate(ask))):
            with pytest.raises(EngineGone):
                await call
        assert not await prefill.healthy()
        world.check()
        start = asyncio.get_running_loop().time()
        prefill = await world.restart("e0", Role.PREFILL)
        assert asyncio.get_running_loop().time() - start == pytest.approx(profile.restart_s)
        ask = request(room=2)
        first, _ = await asyncio.gather(read(prefill.generate(ask)), read(decode.generate(ask)))
        assert first[0].cached_tokens == 0
        world.check()

    run(main())


def test_the_books_show_tokens_that_were_streamed_twice(profile: Profile) -> None:
    async def main() -> None:
        world, (engine,) = cluster(profile, "M")
        await read(engine.generate(request()))
        world.ledger.streamed += 1
        with pytest.raises(ConservationError, match="decoded = streamed"):
            world.check()

    run(main())


def test_the_same_run_gives_the_same_statistics(profile: Profile) -> None:
    async def main() -> tuple[float, object]:
        async with SimulatedBench("PPDD", profile) as bench:
            await asyncio.gather(*(bench.trajectory(number) for number in range(30)))
            return asyncio.get_running_loop().time(), bench.cluster.statistics.itl_over_time

    assert run(main()) == run(main())


# The promises, through the control plane of production.


@pytest.mark.parametrize("roles", ["MMM", "PPDD"])
def test_an_undisturbed_rollout(profile: Profile, roles: str) -> None:
    async def main() -> None:
        async with SimulatedBench(roles, profile) as bench:
            await asyncio.gather(*(bench.trajectory(number) for number in range(60)))
            assert bench.turns == 240
            s = bench.cluster.statistics
            assert bench.control.status().resends == s.retracted == 0
            assert s.decoded_tokens == bench.control.status().output_tokens
            # Every turn but the first of a trajectory finds its prefix, here or in the store.
            assert s.cached_tokens + s.fetched_tokens > s.prefilled_tokens

    run(main())


def test_cadence_control_lets_decodes_go_on(profile: Profile) -> None:
    async def stall(prefill_every: int) -> float:
        async with SimulatedBench("M", profile, prefill_every=prefill_every) as bench:
            await asyncio.gather(*(bench.trajectory(number) for number in range(40)))
            return bench.cluster.statistics.interference_s

    assert run(stall(8)) < 0.7 * run(stall(0))


def test_crowded_pools_retract_and_lose_nothing(profile: Profile) -> None:
    async def main() -> None:
        crowded = profile.model_copy(update={"kv_tokens": 700, "ranks": 1})
        async with SimulatedBench("PDDM", crowded) as bench:
            # More than the router would let in: it does not know how its reservations spread over ranks.
            for instance in bench.control.fleet:
                instance.capacity = 100_000
            await asyncio.gather(*(bench.trajectory(number) for number in range(40)))
            assert bench.cluster.statistics.retracted > 0

    run(main())


@pytest.mark.parametrize("after", [0.0, 0.02, 0.06, 0.25])
def test_a_cancel_reaches_both_sides(profile: Profile, after: float) -> None:
    """Before it is served, during its prefill, during the handover (of 1 ms or so after 0.05 s), while it decodes."""

    async def main() -> None:
        async with SimulatedBench("PD", profile) as bench:
            caller = asyncio.create_task(bench.trajectory(8))
            await asyncio.sleep(after)
            caller.cancel()
            await asyncio.wait([caller])
            await asyncio.sleep(0.1)
            for name in ("e0", "e1"):
                load = await bench.engine(name).load()
                assert load.idle
                assert load.used_tokens == 0
            bench.cluster.check()

    run(main())


def test_a_flip_cancels_what_runs_and_keeps_every_turn(profile: Profile) -> None:
    async def main() -> None:
        async with SimulatedBench("PDD", profile) as bench:
            callers = [asyncio.create_task(bench.trajectory(number)) for number in range(20)]
            await asyncio.sleep(1.0)
            flip = await bench.control.switcher.flip("e1", Role.PREFILL)
            assert flip.failure is None
            assert flip.cancelled > 0
            assert flip.flip_s == pytest.approx(profile.flip_s)
            # Decodes end with the step that they are in.
            assert flip.drain_s < 0.05
            await asyncio.gather(*callers)
            assert bench.control.status().resends == flip.cancelled
            assert bench.roles() == "PPD"

    run(main())


def test_roles_that_become_mixed_and_back_keep_every_turn(profile: Profile) -> None:
    async def main() -> None:
        async with SimulatedBench("PDDD", profile, prefill_every=4) as bench:
            callers = [asyncio.create_task(bench.trajectory(number)) for number in range(40)]
            for prefill, decode, mixed in ((1, 1, 2), (0, 0, 4), (2, 2, 0)):
                await asyncio.sleep(0.6)
                flips = await bench.control.switcher.apply(Allocation(prefill, decode, mixed))
                assert {flip.failure for flip in flips} == {None}
                cadences = {(engine.core.role, engine.core.prefill_every) for engine in bench.cluster.engines.values()}
                assert cadences <= {(Role.PREFILL, 0), (Role.DECODE, 0), (Role.MIXED, 4)}
                assert bench.control.fleet.in_service == Allocation(prefill, decode, mixed)
            await asyncio.gather(*callers)
            assert bench.turns == 160
            assert bench.control.status().resends > 0

    run(main())


def test_many_trajectories_over_many_ranks_with_faults_all_along(profile: Profile) -> None:
    wide = profile.model_copy(update={"ranks": 8, "gpus": 8})

    async def main() -> None:
        async with SimulatedBench("PPPDDDDD", wide) as bench:
            callers = [asyncio.create_task(bench.trajectory(number)) for number in range(240)]
            chance = random.Random(1)
            version = 0
            for act in range(24):
                await asyncio.sleep(chance.uniform(0.05, 0.25))
                if act % 8 == 5:
                    version += 1
                    await bench.control.update_weights("/weights", version)
                elif act % 8 == 2:
                    bench.cluster.kill(f"e{chance.randrange(8)}")
                else:
                    prefill = chance.randint(2, 5)
                    await bench.control.switcher.apply(Allocation(prefill, 8 - prefill))
                bench.cluster.check()
            await asyncio.gather(*callers)
            assert bench.turns == 960
            assert bench.control.status().resends > 100

    run(main())


def test_without_any_engine_of_a_role_turns_fail_in_the_end(profile: Profile) -> None:
    async def main() -> None:
        async with SimulatedBench("P", profile) as bench:
            with pytest.raises(TurnFailed):
                await bench.trajectory(1)

    run(main())


TRAJECTORIES = 40
TARGETS = (
    *(Allocation(prefill, 5 - prefill) for prefill in range(1, 5)),
    *(Allocation(prefill, 5 - prefill - mixed, mixed) for mixed in range(1, 4) for prefill in range(1, 5 - mixed)),
    Allocation(0, 0, 5),
)
ACTS = (
    "kill",
    "break streams",
    "refuse",
    "flip fails",
    "drain",
    "flip",
    "even out",
    "update weights",
    "cancel a caller",
    "check",
)


@dataclass(frozen=True)
class Act:
    after: float
    """Seconds since the act before."""
    what: str
    number: int
    """Which instance, allocation or caller."""


class Rollout:
    def __init__(self, bench: SimulatedBench) -> None:
        self.bench = bench
        self.version = 0
        self.callers = [asyncio.create_task(bench.trajectory(number)) for number in range(TRAJECTORIES)]
        self.cancelled: set[int] = set()
        self.background: list[asyncio.Task[object]] = []

    async def act(self, act: Act) -> None:
        await asyncio.sleep(act.after)
        control, cluster = self.bench.control, self.bench.cluster
        name = f"e{act.number % 5}"
        match act.what:
            case "kill":
                cluster.kill(name)
            case "break streams":
                cluster.engines[name].break_streams()
            case "refuse":
                cluster.engines[name].refuse = 5
            case "flip fails":
                cluster.engines[name].flip_fault = "it was told to fail"
            case "drain":
                self.background.append(asyncio.create_task(control.router.drain(control.fleet[name], "test")))
            case "flip":
                target, patience = TARGETS[act.number % len(TARGETS)], act.number % 3 * 0.2
                self.background.append(asyncio.create_task(control.switcher.apply(target, patience)))
            case "even out":
                control.router.even_out(act.number % 3 > 0)
            case "update weights":
                self.version += 1
                self.background.append(asyncio.create_task(self.update(self.version)))
            case "cancel a caller":
                if not self.callers[act.number].done():
                    self.cancelled.add(act.number)
                    self.callers[act.number].cancel()
            case "check":
                cluster.check()

    async def update(self, version: int) -> None:
        try:
            await self.bench.control.update_weights("/weights", version)
        except EngineError:
            event("a weight update reached no instance")


acts = st.lists(
    st.builds(
        Act,
        after=st.floats(0.0, 0.5),
        what=st.sampled_from(ACTS),
        number=st.integers(0, TRAJECTORIES - 1),
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=acts, store=st.booleans(), crowded=st.booleans())
def test_every_turn_ends_as_if_undisturbed_whatever_fails(
    profile: Profile, schedule: list[Act], store: bool, crowded: bool
) -> None:
    used = profile.model_copy(update={"kv_tokens": 800}) if crowded else profile

    async def main() -> None:
        async with SimulatedBench("PPDDD", used, kv_store=store) as bench:
            rollout = Rollout(bench)
            for act in schedule:
                await rollout.act(act)
            ends = await asyncio.gather(*rollout.callers, return_exceptions=True)
            await asyncio.gather(*rollout.background)
            for number, end in enumerate(ends):
                if number in rollout.cancelled:
                    assert isinstance(end, asyncio.CancelledError)
                elif isinstance(end, BaseException):
                    raise end
            assert bench.turns >= (TRAJECTORIES - len(rollout.cancelled)) * 4
            event(f"resends: {bench.control.status().resends // 20 * 20}+")
            async with asyncio.timeout(60.0):
                while "." in bench.roles():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert {engine.core.version for engine in bench.cluster.engines.values()} == {bench.control.version}

    run(main())
