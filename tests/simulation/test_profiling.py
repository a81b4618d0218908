"""Measuring an engine gives back what its costs are; what cannot be measured gets one clear error."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
from checkpoints import VOCABULARY

from prorsa.cli import main
from prorsa.config import ConfigError
from prorsa.engines.embedded.core import EngineCore
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import (
    ALL_ROLES,
    Chunk,
    Engine,
    EngineBusy,
    EngineError,
    EngineGone,
    EngineInfo,
    FinishReason,
    GenerateRequest,
    Load,
    Role,
    SamplingParams,
)
from prorsa.engines.sglang import SGLangEngine
from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import load_profile
from prorsa.simulation import clock
from prorsa.simulation.measure import (
    Facts,
    Limits,
    Measured,
    _pace,
    _Served,
    kv_bytes_of,
    measure,
    write_profile,
)

PAGE = 16
LIMITS = Limits(max_context=768, chunk=256, max_running=8, rounds=2)
FACTS = Facts(model="toy", gpu="none", gpus=2, kv_bytes=100, source="a test", restart_s=7.0)
WAY_S = 0.003
FLIP_S = 0.25
UPDATE_S = 1.5


def prefill_s(new: float, prefix: float) -> float:
    return 1e-3 + 2e-5 * new + 1e-8 * new * prefix


def decode_s(batch: float, context: float) -> float:
    return 2e-3 + 1e-4 * batch + 5e-8 * batch * context


@dataclass
class World:
    """What the fake engines share."""

    tokens_per_s: float = 1e5
    latency_s: float = 0.002
    store_tokens_per_s: float | None = 2e5
    caching: bool = True
    decode_request_s: float = 0.0
    handover_steps: int = 0
    overlap: bool = False
    """Whether what a step has made is told only when the next one is done."""
    pipe_s: float = 0.0
    """From the step that makes a token to its reader, while the engine goes on."""
    stored: set[tuple[int, ...]] = field(default_factory=set)
    handovers: dict[int, asyncio.Future[FakeEngine]] = field(default_factory=dict)
    """room -> the decode engine, once it is there."""


@dataclass(eq=False)
class Job:
    request: GenerateRequest
    generated: int = 0
    chunks: asyncio.Queue[Chunk] = field(default_factory=asyncio.Queue)
    cached: int = 0

    @property
    def ended(self) -> bool:
        return self.generated == self.request.sampling.max_new_tokens

    def chunk(self) -> Chunk:
        return Chunk((1,), (0.0,), 0, self.cached, FinishReason.LENGTH if self.ended else None)


class FakeEngine:
    """Prefills one request a step, before it decodes; its steps take what `prefill_s` and `decode_s` say."""

    bootstrap_host = "fake"
    bootstrap_port = 1
    roles = ALL_ROLES

    def __init__(self, name: str, role: Role, world: World, kv_tokens: int = 2048, slots: int = 64) -> None:
        self.name = name
        self.role = role
        self.busy = False
        self._world = world
        self._kv_tokens = kv_tokens
        self._slots = slots
        self._cache: set[tuple[int, ...]] = set()
        self._queue: list[Job] = []
        self._running: list[Job] = []
        self._untold: list[tuple[Job, Chunk]] = []
        self._work = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._sending: list[asyncio.Task[None]] = []
        self._joining_s = 0.0
        self._awaited: dict[int, Job] = {}
        """By room, on a decode engine."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self._worker = self._worker or asyncio.create_task(self._steps())
        await asyncio.sleep(WAY_S)
        job = Job(request)
        if self.role is Role.DECODE:
            assert request.bootstrap is not None
            self._awaited[request.bootstrap.room] = job
            self._room(request).set_result(self)
        else:
            await self._fetch(job)
            self._queue.append(job)
            self._work.set()
        while True:
            chunk = await job.chunks.get()
            yield chunk
            if chunk.finish is not None:
                return

    def _room(self, request: GenerateRequest) -> asyncio.Future[FakeEngine]:
        assert request.bootstrap is not None
        return self._world.handovers.setdefault(request.bootstrap.room, asyncio.get_running_loop().create_future())

    async def _fetch(self, job: Job) -> None:
        tokens = tuple(job.request.input_ids)
        if self._world.store_tokens_per_s is None:
            return
        more = self._known(tokens, self._world.stored) - self._known(tokens, self._cache)
        if more > 0:
            await asyncio.sleep(more / self._world.store_tokens_per_s)
            self._learn(tokens[:-1], self._cache)

    async def _steps(self) -> None:
        while True:
            made, self._untold = self._untold, []
            if self._queue and len(self._running) < self._slots:
                await self._prefill(self._queue.pop(0))
            elif self._running:
                seconds, self._joining_s = self._step_s() + self._joining_s, 0.0
                await asyncio.sleep(seconds)
                self._running = [job for job in self._running if self._emit(job)]
            elif not made:
                self._work.clear()
                await self._work.wait()
            self._tell(made)
            if not self._world.overlap:
                self._tell(self._untold)
                self._untold = []

    def _emit(self, job: Job) -> bool:
        """One token; whether there are more to come."""
        job.generated += 1
        self._untold.append((job, job.chunk()))
        return not job.ended

    def _tell(self, made: list[tuple[Job, Chunk]]) -> None:
        for job, chunk in made:
            asyncio.get_running_loop().call_later(self._world.pipe_s, job.chunks.put_nowait, chunk)

    def _step_s(self) -> float:
        contexts = [len(job.request.input_ids) + job.generated for job in self._running]
        return decode_s(len(contexts), sum(contexts) / len(contexts)) if contexts else 0.0

    async def _prefill(self, job: Job) -> None:
        tokens = tuple(job.request.input_ids)
        job.cached = self._known(tokens, self._cache)
        await asyncio.sleep(prefill_s(len(tokens) - job.cached, job.cached))
        self._learn(tokens, self._cache)
        self._learn(tokens, self._world.stored)
        if self.role is Role.MIXED:
            self._start(job)
        else:
            self._sending.append(asyncio.create_task(self._hand_over(job, tokens)))

    async def _hand_over(self, job: Job, tokens: tuple[int, ...]) -> None:
        decode = await self._room(job.request)
        moved = len(tokens) - self._known((*tokens, 0), decode._cache)
        await asyncio.sleep(self._world.latency_s + moved / self._world.tokens_per_s)
        await asyncio.sleep(self._world.handover_steps * decode._step_s())
        self._learn(tokens, decode._cache)
        decode._joining_s += self._world.decode_request_s
        assert job.request.bootstrap is not None
        decode._start(decode._awaited.pop(job.request.bootstrap.room))
        decode._work.set()
        job.chunks.put_nowait(Chunk((1,), (0.0,), 0, job.cached, FinishReason.LENGTH))

    def _start(self, job: Job) -> None:
        if self._emit(job):
            self._running.append(job)

    def _known(self, tokens: tuple[int, ...], cache: set[tuple[int, ...]]) -> int:
        """Pages of all but the last token that are in a cache."""
        ends = range((len(tokens) - 1) // PAGE * PAGE, 0, -PAGE)
        return next((end for end in ends if tokens[:end] in cache), 0)

    def _learn(self, tokens: tuple[int, ...], cache: set[tuple[int, ...]]) -> None:
        if self._world.caching:
            cache.update(tokens[:end] for end in range(PAGE, len(tokens) + 1, PAGE))

    async def abort(self, rid: str | None = None) -> None:
        raise NotImplementedError

    async def load(self) -> Load:
        return Load(int(self.busy), 0, 0, self._kv_tokens)

    async def info(self) -> EngineInfo:
        await asyncio.sleep(WAY_S)
        return EngineInfo(self.role, 0, "toy")

    async def switch_role(self, role: Role) -> None:
        await asyncio.sleep(FLIP_S)
        self.role = role

    async def update_weights(self, path: str, version: int) -> None:
        await asyncio.sleep(UPDATE_S)
        self._cache.clear()

    async def healthy(self) -> bool:
        return True

    async def close(self) -> None:
        pass


def measured(*roles: Role, world: World | None = None, limits: Limits = LIMITS, **settings: int) -> Measured:
    async def main() -> Measured:
        shared = world or World()
        engines = [FakeEngine(f"e{i}", role, shared, **settings) for i, role in enumerate(roles)]
        return await measure(engines, limits, lambda what: None)

    return clock.run(main())


def assert_prefill(found: Measured, way_s: float = WAY_S) -> None:
    """What a request on its way to a mixed engine takes is measured apart from the steps, the sum of both exactly."""
    assert found.request_s == pytest.approx(way_s, abs=2e-5)
    assert_grid(found.prefill, lambda new, prefix: prefill_s(new, prefix) - (found.request_s - way_s))


def assert_grid(grid: dict[tuple[int, int], float], cost: Callable[[float, float], float], rel: float = 1e-9) -> None:
    for (tokens, context), seconds in grid.items():
        assert seconds == pytest.approx(cost(tokens, context), rel=rel), (tokens, context)


def test_three_engines_give_every_cost_back() -> None:
    found = measured(Role.MIXED, Role.PREFILL, Role.DECODE)
    assert_prefill(found)
    assert found.late_steps == 0
    assert_grid(found.decode, decode_s)
    assert {n for n, _ in found.prefill} == {1, 16, 32, 64, 128, 256}
    assert {p for _, p in found.prefill} == {0, 64, 128, 320, 512, 704}
    assert {b for b, _ in found.decode} == {1, 2, 4, 8}
    assert found.link is not None
    assert found.link.tokens_per_s == pytest.approx(1e5)
    assert found.link.latency_s == pytest.approx(0.002)
    assert found.store_tokens_per_s == pytest.approx(2e5)
    assert found.flip_s == pytest.approx(FLIP_S)
    assert found.update_s == pytest.approx(UPDATE_S)
    assert found.kv_tokens == 2048


def test_what_a_request_costs_beside_its_tokens() -> None:
    world = World(decode_request_s=0.004, handover_steps=3)
    found = measured(Role.MIXED, Role.PREFILL, Role.DECODE, world=world, limits=replace(LIMITS, max_running=4))
    # Each short prompt takes a step of its own here.
    assert found.prefill_request_s == pytest.approx(1e-3)
    assert found.pair_guests is not None
    assert found.pair_guests.held_s == pytest.approx(0.004, rel=0.1)
    assert found.pair_guests.steps == pytest.approx(3, rel=0.1)
    # A mixed engine stops its decodes for a prompt of 64 tokens, which has waited for the end of a step.
    assert found.mixed_guests is not None
    assert found.mixed_guests.held_s == pytest.approx(prefill_s(64, 0), rel=0.1)
    assert 0 < found.mixed_guests.steps < 1
    assert_grid(found.decode, decode_s)


def test_what_happens_beside_the_steps_is_no_part_of_them() -> None:
    found = measured(Role.MIXED, world=World(overlap=True, pipe_s=0.005))
    assert_prefill(found, WAY_S + 0.005)
    assert found.late_steps == pytest.approx(1, rel=0.02)
    assert found.mixed_guests is not None
    assert 0 < found.mixed_guests.steps < 1
    # The step that a token came with is the next one's.
    assert_grid(found.decode, decode_s, rel=1e-3)


def test_a_pair_alone_keeps_the_latency_in_its_prefill_times() -> None:
    found = measured(Role.PREFILL, Role.DECODE)
    assert found.link is not None
    # The last page of a cached prompt is computed again: its attention over the prefix counts as moving.
    per_token = 1 / 1e5 + 16 * 1e-8
    assert found.link.tokens_per_s == pytest.approx(1 / per_token)
    assert found.link.latency_s == 0
    assert_grid(found.prefill, lambda new, prefix: prefill_s(new, prefix) + 0.002 + new * (1 / 1e5 - per_token))
    assert_grid(found.decode, decode_s)
    assert found.store_tokens_per_s is None


def test_a_store_that_is_not_there_is_not_measured() -> None:
    found = measured(Role.MIXED, Role.PREFILL, Role.DECODE, world=World(store_tokens_per_s=None))
    assert found.store_tokens_per_s is None
    assert found.link is not None
    assert found.link.latency_s == pytest.approx(0.002)


def test_a_written_profile_reads_back_and_prices_what_was_measured(tmp_path: Path) -> None:
    found = measured(Role.MIXED, Role.PREFILL, Role.DECODE)
    path = tmp_path / "toy.yaml"
    written = write_profile(path, found, LIMITS, FACTS)
    read = load_profile(str(path))
    assert read == written
    assert read.network_bytes_per_s == pytest.approx(1e7)
    assert read.store_bytes_per_s == pytest.approx(2e7)
    assert (read.name, read.gpus, read.restart_s, read.chunk, read.max_running) == ("toy", 2, 7.0, 256, 8)
    assert read.source == "a test"
    assert (read.prefill_request_s, read.request_s) == (found.prefill_request_s, found.request_s)
    assert found.mixed_guests is not None
    assert read.request_steps == max(0.0, found.mixed_guests.steps - 0.5)
    assert read.late_steps == found.late_steps
    costs = StepCosts(read)
    # A millionth of a second is written.
    assert costs.prefill_local(100, 200) + read.request_s == pytest.approx(prefill_s(100, 200) + WAY_S, abs=2e-7)
    assert costs.decode_local(3, 400) == pytest.approx(decode_s(3, 400), abs=2e-7)
    assert costs.shared(True, 256, 256) == 0


def test_what_one_engine_cannot_show_is_said_to_be_assumed(tmp_path: Path) -> None:
    found = measured(Role.MIXED)
    assert_prefill(found)
    assert (found.link, found.store_tokens_per_s, found.flip_s) == (None, None, None)
    profile = write_profile(tmp_path / "one.yaml", found, LIMITS, FACTS)
    assert profile.source == "a test; not measured but assumed: network, flip_s"
    assert profile.flip_s == 5.0


def test_prompts_are_not_cached_by_accident() -> None:
    """Cached or not, a prompt without a prefix costs the same: nothing of it was sent before."""
    kwargs = {"limits": replace(LIMITS, max_context=256, rounds=1)}
    with pytest.raises(EngineError, match=r"had 0 of 64 tokens cached.*prefix cache"):
        measured(Role.MIXED, world=World(caching=False), **kwargs)
    again = measured(Role.MIXED, **kwargs)
    assert_prefill(again)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ((Role.MIXED, Role.MIXED), "engine e1: is mixed as e0 is; give one engine of each role"),
        ((Role.PREFILL,), "engine e0: is prefill; give the address of a decode engine too"),
        ((Role.DECODE, Role.MIXED), "engine e0: is decode; give the address of a prefill engine too"),
    ],
)
def test_engines_that_cannot_serve(roles: tuple[Role, ...], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        measured(*roles)


def test_limits_that_the_engine_does_not_have() -> None:
    with pytest.raises(EngineError, match=r"4 requests at once.*smaller --max-running"):
        measured(Role.MIXED, slots=2)
    with pytest.raises(EngineError, match="768 tokens of context, 200 of KV cache; to measure it takes 256"):
        measured(Role.MIXED, kv_tokens=200)


def test_requests_that_were_held_up_are_no_measure_of_a_step() -> None:
    first, later = (_Served(at, at, [(at + 0.1 * n, 1) for n in range(4)], 0) for at in (0.0, 0.2))
    # When the later one has its second token, at 0.3 s, the first one is through.
    with pytest.raises(EngineError, match=r"did not decode together.*no other work"):
        _ = _pace([first, later]).step_s
    assert _pace([first, first]).step_s == pytest.approx(0.1)


def test_an_engine_in_use_is_left_alone() -> None:
    async def main() -> None:
        engine = FakeEngine("e0", Role.MIXED, World())
        engine.busy = True
        await measure([engine], LIMITS, lambda what: None)

    with pytest.raises(EngineBusy, match="engine e0: serves requests of others"):
        clock.run(main())


def test_an_endpoint_that_does_not_answer() -> None:
    async def main() -> None:
        engine = SGLangEngine("e0", "http://127.0.0.1:1", "127.0.0.1", 2)
        try:
            await measure([engine], LIMITS, lambda what: None)
        finally:
            await engine.close()

    with pytest.raises(EngineGone, match="engine e0: asked /model_info; connection failed"):
        asyncio.run(main())


def test_kv_bytes_are_those_of_the_engine(checkpoint: Path) -> None:
    core = EngineCore(str(checkpoint), Role.MIXED, kv_tokens=256, block_tokens=PAGE)
    assert kv_bytes_of(str(checkpoint)) == core.block_nbytes // PAGE


def test_kv_bytes_of_latent_attention(tmp_path: Path) -> None:
    # DeepSeek-V3: 61 layers, a latent of 512 numbers and a rotary key of 64 for all heads, two bytes each.
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}'
    )
    assert kv_bytes_of(str(tmp_path)) == 70272


def test_kv_bytes_that_cannot_be_read_off() -> None:
    with pytest.raises(ConfigError, match=r"kv_bytes: cannot be read off.*--kv-bytes"):
        kv_bytes_of("somewhere/else")


@pytest.mark.engine
def test_a_real_engine_against_a_stopwatch(checkpoint: Path, tmp_path: Path) -> None:
    """The measured step times add up to what a client waits for requests that were not part of the measurement."""
    prompt, tokens = 200, 100

    async def main() -> tuple[Measured, list[float]]:
        launcher = EmbeddedLauncher(
            str(checkpoint),
            kv_tokens=2048,
            block_tokens=PAGE,
            prefill_chunk=256,
            max_running=4,
            max_waiting=16,
            kv_store_tokens=0,
            log_dir=tmp_path,
        )
        try:
            engines: list[Engine] = [await launcher.start(role.value, role) for role in Role]
            mixed = engines[list(Role).index(Role.MIXED)]
            before = [await stopwatch(mixed, prompt, tokens, seed) for seed in range(5)]
            found = await measure(engines, Limits(320, 256, 4, rounds=3), lambda what: None)
            return found, before + [await stopwatch(mixed, prompt, tokens, seed) for seed in range(5, 10)]
        finally:
            await launcher.close()

    found, waited = asyncio.run(main())
    profile = write_profile(tmp_path / "real.yaml", found, Limits(320, 256, 4), FACTS)
    costs = StepCosts(profile)
    expected = found.request_s + costs.prefill_local(prompt, 0)
    expected += sum(costs.decode_local(1, prompt + done) for done in range(1, tokens))
    # The machine's speed may change meanwhile.
    assert min(waited) / 2 < expected < 2 * max(waited)
    assert found.prefill[256, 0] > found.prefill[16, 0] > 0
    assert found.decode[4, 64] > 0
    assert found.link is not None
    assert found.flip_s is not None
    assert 0 < found.flip_s < 1
    assert found.store_tokens_per_s is None


_rids = count()


async def stopwatch(engine: Engine, prompt: int, tokens: int, seed: int) -> float:
    ids = tuple((seed * 7919 + index * 104729) % VOCABULARY for index in range(prompt))
    request = GenerateRequest(f"stopwatch-{next(_rids)}", ids, SamplingParams(tokens, seed=seed))
    start = time.perf_counter()
    async for _ in engine.generate(request):
        pass
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the addresses of running engines, or --config FILE"),
        (["http://a:1", "--config", "x.yaml"], "give the addresses of running engines, or --config FILE"),
        (["http://a:1"], "--max-context: missing"),
        (["a:1", "--max-context", "512"], "endpoint 'a:1': write it as http://HOST:PORT"),
        (["http://a:1,x", "--max-context", "512"], "endpoint 'http://a:1,x': write it as"),
        (["http://a:1", "--max-context", "512", "--rounds", "0"], "--rounds=0: write a number of 1 or more"),
        (
            ["http://127.0.0.1:1", "--max-context", "512"],
            "engine http://127.0.0.1:1: asked /model_info; connection failed",
        ),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--out", str(tmp_path / "p.yaml"), *arguments]) in (1, 2)
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["p.csv", "nowhere/p.yaml"])
def test_a_profile_goes_to_a_yaml_file(out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--out", str(tmp_path / out), "http://a:1", "--max-context", "512"]) == 2
    assert "give a path that ends in .yaml, in a directory that exists" in capsys.readouterr().err
