"""What the embedded server, its client and the KV transfer cost on top of the engine core.

    python benchmarks/engine_server.py

A random Qwen3 of 4 million parameters, greedy, 32-token prompts, 128 new tokens. Costs are CPU seconds of the processes
that cause them, so that other load on the machine disturbs them little; latencies are wall time, best of several.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from time import perf_counter, process_time

from prorsa.engines.embedded.core import EngineCore
from prorsa.engines.launcher import EmbeddedLauncher
from prorsa.engines.protocol import Bootstrap, GenerateRequest, Role, SamplingParams
from prorsa.engines.sglang import SGLangEngine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from checkpoints import write_checkpoint

VOCABULARY = 4096
PROMPT = 32
NEW = 128
BATCHES = (1, 8, 32)
REQUESTS = 32
"""Requests a measurement makes at least."""
ROUNDS = 5

numbers = count(1)


def make_request(length: int, new: int, prefill: SGLangEngine | None = None) -> GenerateRequest:
    number = next(numbers)
    room = None if prefill is None else Bootstrap(prefill.bootstrap_host, prefill.bootstrap_port, number)
    ids = tuple(random.randrange(VOCABULARY) for _ in range(length))
    return GenerateRequest(f"r{number}", ids, SamplingParams(new, temperature=0.0), room)


async def read(engine: SGLangEngine, request: GenerateRequest) -> None:
    async for _ in engine.generate(request):
        pass


async def disaggregated(prefill: SGLangEngine, decode: SGLangEngine, length: int, new: int) -> None:
    request = make_request(length, new, prefill)
    await asyncio.gather(read(prefill, request), read(decode, request))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def core_cost(path: str, batch: int) -> float:
    """CPU microseconds a token of the core alone, in this process."""
    core = EngineCore(path, Role.MIXED, kv_tokens=16384)
    rounds = -(-REQUESTS // batch)
    start = process_time()
    for _ in range(rounds):
        for _ in range(batch):
            request = make_request(PROMPT, NEW)
            core.submit(request.rid, request.input_ids, request.sampling)
        while core.has_work():
            core.step()
    return (process_time() - start) / (rounds * batch * NEW) * 1e6


async def served_cost(batch: int, pids: list[int], run: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """CPU microseconds a token of the processes `pids`, and of the client in this one."""
    rounds = -(-REQUESTS // batch)
    client, servers = process_time(), sum(map(cpu_seconds, pids))
    for _ in range(rounds):
        await asyncio.gather(*(run() for _ in range(batch)))
    tokens = rounds * batch * NEW
    return (sum(map(cpu_seconds, pids)) - servers) / tokens * 1e6, (process_time() - client) / tokens * 1e6


async def best_ms(run: Callable[[], Awaitable[object]]) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        start = perf_counter()
        await run()
        best = min(best, perf_counter() - start)
    return best * 1e3


async def measure(path: str, log_dir: Path) -> None:
    launcher = EmbeddedLauncher(
        path,
        kv_tokens=16384,
        block_tokens=16,
        prefill_chunk=512,
        max_running=32,
        max_waiting=64,
        kv_store_tokens=65536,
        log_dir=log_dir,
    )
    try:
        start = perf_counter()
        roles = {"mixed": Role.MIXED, "prefill": Role.PREFILL, "decode": Role.DECODE}
        mixed, prefill, decode = await asyncio.gather(*(launcher.start(name, role) for name, role in roles.items()))
        print(f"load average {os.getloadavg()[0]:.1f}")
        print(f"start of three engines and the KV store: {perf_counter() - start:.2f} s")
        print("\n| CPU us a token | core | mixed server | prefill + decode servers | client |\n|---|---|---|---|---|")
        for batch in BATCHES:
            one, client = await served_cost(
                batch, [launcher.pid("mixed")], lambda: read(mixed, make_request(PROMPT, NEW))
            )
            both, _ = await served_cost(
                batch,
                [launcher.pid("prefill"), launcher.pid("decode")],
                lambda: disaggregated(prefill, decode, PROMPT, NEW),
            )
            print(f"| batch {batch} | {core_cost(path, batch):.0f} | {one:.0f} | {both:.0f} | {client:.0f} |")
        print("\n| first token, ms | mixed | disaggregated |\n|---|---|---|")
        for length in (64, 512, 1024):
            alone = await best_ms(lambda length=length: read(mixed, make_request(length, 1)))
            apart = await best_ms(lambda length=length: disaggregated(prefill, decode, length, 1))
            print(f"| prompt of {length} | {alone:.1f} | {apart:.1f} |")

        async def flip_there_and_back() -> None:
            await prefill.switch_role(Role.DECODE)
            await prefill.switch_role(Role.PREFILL)

        print(f"\nrole flip of an idle engine: {await best_ms(flip_there_and_back) / 2:.1f} ms")
        versions = count(1)
        update = await best_ms(lambda: mixed.update_weights(path, next(versions)))
        print(f"weight update from disk: {update:.1f} ms")
    finally:
        await launcher.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(
            Path(directory) / "model",
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
        )
        asyncio.run(measure(str(path), Path(directory) / "logs"))


if __name__ == "__main__":
    # The core that runs in this process for comparison; the launcher sets the same for its children.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
