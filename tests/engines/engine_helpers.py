"""What the tests with real engine processes share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import Bootstrap, Chunk, FinishReason, GenerateRequest, Load, SamplingParams
from prorsa.engines.sglang import SGLangEngine

TEST_SECONDS = 60.0
BLOCK_TOKENS = 16

_numbers: Iterator[int] = count(1)


@asynccontextmanager
async def launching(checkpoint: Path, log_dir: Path, **overrides: Any) -> AsyncIterator[EmbeddedLauncher]:
    """A launcher, closed at the end; the whole block is bounded in time."""
    settings = {
        "kv_tokens": 2048,
        "block_tokens": BLOCK_TOKENS,
        "prefill_chunk": 64,
        "max_running": 8,
        "max_waiting": 16,
        "kv_store_tokens": 8192,
        **overrides,
    }
    launcher = EmbeddedLauncher(str(checkpoint), log_dir=log_dir, **settings)
    try:
        async with asyncio.timeout(TEST_SECONDS):
            yield launcher
    finally:
        await launcher.close()


@dataclass(frozen=True)
class Leg:
    """A finished stream."""

    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int
    versions: set[int]
    finish: FinishReason | None


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(4, 320) for _ in range(length))


def greedy(max_new_tokens: int, *stops: int) -> SamplingParams:
    return SamplingParams(max_new_tokens, temperature=0.0, stop_token_ids=stops)


def request(
    input_ids: tuple[int, ...], sampling: SamplingParams, prefill: SGLangEngine | None = None
) -> GenerateRequest:
    number = next(_numbers)
    room = None if prefill is None else Bootstrap(prefill.bootstrap_host, prefill.bootstrap_port, number)
    return GenerateRequest(f"r{number}", input_ids, sampling, room)


async def read(engine: SGLangEngine, asked: GenerateRequest) -> Leg:
    return leg([chunk async for chunk in engine.generate(asked)])


def leg(chunks: list[Chunk]) -> Leg:
    return Leg(
        tokens=[token for chunk in chunks for token in chunk.token_ids],
        logprobs=[logprob for chunk in chunks for logprob in chunk.logprobs],
        cached_tokens=chunks[0].cached_tokens,
        versions={chunk.weights_version for chunk in chunks},
        finish=chunks[-1].finish,
    )


async def both_legs(prefill: SGLangEngine, decode: SGLangEngine, asked: GenerateRequest) -> tuple[Leg, Leg]:
    """When one leg fails the other is cancelled, as a router has to do."""
    legs = [asyncio.create_task(read(engine, asked)) for engine in (prefill, decode)]
    try:
        first, second = await asyncio.gather(*legs)
    finally:
        for task in legs:
            task.cancel()
    return first, second


async def disaggregated(
    prefill: SGLangEngine, decode: SGLangEngine, input_ids: tuple[int, ...], sampling: SamplingParams
) -> Leg:
    """The decode leg of a whole request."""
    return (await both_legs(prefill, decode, request(input_ids, sampling, prefill)))[1]


async def until_load(engine: SGLangEngine, reached: Callable[[Load], bool]) -> None:
    """An engine in another process gives no signal, so this asks again and again."""
    while not reached(await engine.load()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def until_idle(*engines: SGLangEngine) -> None:
    """Wait until the engines hold no request, and check that they hold no KV either."""
    for engine in engines:
        await until_load(engine, lambda load: load.idle)
        assert (await engine.load()).used_tokens == 0
