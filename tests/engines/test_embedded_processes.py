"""Real engine processes, driven by the client: what disaggregation, aborts, flips and weight updates must not change.

Promises 1, 5, 6 and 9.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from checkpoints import write_checkpoint
from engine_helpers import (
    BLOCK_TOKENS,
    Leg,
    both_legs,
    disaggregated,
    greedy,
    launching,
    leg,
    prompt,
    read,
    request,
    until_idle,
    until_load,
)

from prorsa.engines.launcher import EmbeddedLauncher
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
from prorsa.engines.sglang import SGLangEngine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def one_engine(checkpoint: Path) -> Iterator[str]:
    """The URL of a mixed engine."""
    command = [sys.executable, "-m", "prorsa.engines.embedded.server", f"--model={checkpoint}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        process.stdin.close()
        assert process.wait(10) == 0


async def start(launcher: EmbeddedLauncher, *roles: Role) -> list[SGLangEngine]:
    return await asyncio.gather(*(launcher.start(f"e{i}", role) for i, role in enumerate(roles)))


def test_greedy_tokens_equal_transformers(checkpoint: Path, tmp_path: Path) -> None:
    """Mixed, disaggregated, and disaggregated with every role flipped between requests."""
    torch = pytest.importorskip("torch", reason="the reference needs torch")
    transformers = pytest.importorskip("transformers", reason="the reference needs transformers")
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 15, 16, 17, 64, 150))]
    expected = [
        model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(ids) :].tolist()
        for ids in prompts
    ]

    async def main() -> None:
        async with launching(checkpoint, tmp_path, kv_store_tokens=0) as launcher:
            mixed, a, b = await start(launcher, Role.MIXED, Role.PREFILL, Role.DECODE)
            together = await asyncio.gather(*(read(mixed, request(ids, greedy(40))) for ids in prompts))
            assert [one.tokens for one in together] == expected
            apart = await asyncio.gather(*(disaggregated(a, b, ids, greedy(40)) for ids in prompts))
            assert [one.tokens for one in apart] == expected
            for ids, tokens in zip(prompts, expected, strict=True):
                await until_idle(a, b)
                await a.switch_role(Role.DECODE)
                await b.switch_role(Role.PREFILL)
                a, b = b, a
                assert ((await a.info()).role, (await b.info()).role) == (Role.PREFILL, Role.DECODE)
                assert (await disaggregated(a, b, ids, greedy(40))).tokens == tokens
            for one, other in zip(together, apart, strict=True):
                assert one.finish is other.finish is FinishReason.LENGTH
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)

    asyncio.run(main())


def test_the_prefill_leg_is_one_chunk_with_the_first_token(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            a, b = await start(launcher, Role.PREFILL, Role.DECODE)
            asked = request(prompt(100), greedy(8), a)
            chunks, second = await asyncio.gather(_chunks(a, asked), read(b, asked))
            assert [(chunk.token_ids, chunk.finish) for chunk in chunks] == [((second.tokens[0],), FinishReason.LENGTH)]
            assert chunks[0].logprobs == (second.logprobs[0],)
            # A first token that ends the output ends both legs.
            stop = second.tokens[0]
            first, second = await both_legs(a, b, request(prompt(100), greedy(8, stop), a))
            assert (first.tokens, first.finish) == (second.tokens, second.finish) == ([stop], FinishReason.STOP)
            first, second = await both_legs(a, b, request(prompt(100), greedy(1), a))
            assert (first.tokens, first.finish) == (second.tokens, second.finish) == ([stop], FinishReason.LENGTH)
            # The second request of the same prompt computed only what is beyond its full blocks, 96 of 100 tokens.
            assert first.cached_tokens == second.cached_tokens == 96
            await until_idle(a, b)

    asyncio.run(main())


async def _chunks(engine: SGLangEngine, asked: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(asked)]


@pytest.mark.parametrize(
    "sampling", [greedy(150), SamplingParams(150, temperature=1.0, seed=11)], ids=["greedy", "seeded"]
)
def test_a_request_aborted_anywhere_and_resent_elsewhere_loses_nothing(
    checkpoint: Path, tmp_path: Path, sampling: SamplingParams
) -> None:
    """Four engines: the resend goes to a prefill and a decode instance that have never seen the request, so all that they
    reuse comes from the KV store: everything but the last block at most, and the tail."""

    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            a, b, c, d = await start(launcher, Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE)
            for seed, index in enumerate((1, 2, 11, 12, 13, 30, 75)):
                ids = prompt(100, seed)
                whole = await disaggregated(c, d, ids, sampling)
                # The same weights as a new version: all have forgotten what was just computed.
                for engine in (a, b, c, d):
                    await engine.update_weights(str(checkpoint), seed + 1)
                part = await _abort_after(a, b, ids, sampling, index)
                assert part.finish is FinishReason.ABORT
                kept = part.tokens
                assert index <= len(kept) < 150
                left = SamplingParams(150 - len(kept), sampling.temperature, seed=sampling.seed)
                rest = await disaggregated(c, d, ids + tuple(kept), left)
                assert kept + rest.tokens == whole.tokens
                assert part.logprobs + rest.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
                # The KV of the newest token does not exist yet, and only full blocks are stored.
                stored = (100 + len(kept) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                assert rest.cached_tokens == stored
                await until_idle(a, b, c, d)

    asyncio.run(main())


async def _abort_after(
    prefill: SGLangEngine, decode: SGLangEngine, ids: tuple[int, ...], sampling: SamplingParams, index: int
) -> Leg:
    """Abort the decode leg once `index` tokens have come."""
    asked = request(ids, sampling, prefill)
    other = asyncio.create_task(read(prefill, asked))
    chunks, tokens, aborting = [], 0, None
    async for chunk in decode.generate(asked):
        chunks.append(chunk)
        tokens += len(chunk.token_ids)
        if tokens >= index and aborting is None:
            aborting = asyncio.create_task(decode.abort(asked.rid))
    assert aborting is not None
    await aborting
    await other
    return leg(chunks)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_on_either_side_ends_both_legs(checkpoint: Path, tmp_path: Path, side: str) -> None:
    """The prompt takes 32 steps, so the abort falls into its prefill."""

    async def main() -> None:
        async with launching(checkpoint, tmp_path, prefill_chunk=16, kv_store_tokens=0) as launcher:
            a, b = await start(launcher, Role.PREFILL, Role.DECODE)
            asked = request(prompt(1000), greedy(20), a)
            legs = asyncio.gather(read(a, asked), read(b, asked))
            await until_load(a, lambda load: load.running > 0)
            await (a if side == "prefill" else b).abort(asked.rid)
            first, second = await legs
            assert (first.finish, second.finish) == (FinishReason.ABORT, FinishReason.ABORT)
            assert first.tokens == second.tokens == []
            await until_idle(a, b)

    asyncio.run(main())


def test_closing_a_stream_frees_both_sides(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            a, b = await start(launcher, Role.PREFILL, Role.DECODE)
            # Before the other leg came.
            alone = asyncio.create_task(read(a, request(prompt(50), greedy(20), a)))
            await until_load(a, lambda load: not load.idle)
            alone.cancel()
            await until_idle(a)
            # While it decodes.
            asked = request(prompt(50), greedy(1900), a)
            first = asyncio.create_task(read(a, asked))
            stream = b.generate(asked)
            await anext(stream)
            await stream.aclose()
            assert (await first).finish is FinishReason.LENGTH
            await until_idle(a, b)

    asyncio.run(main())


def test_a_prefill_killed_mid_transfer_does_not_hang_its_decode(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path, prefill_chunk=16, kv_store_tokens=0) as launcher:
            a, b = await start(launcher, Role.PREFILL, Role.DECODE)
            asked = request(prompt(1000), greedy(20), a)
            first, second = asyncio.create_task(read(a, asked)), asyncio.create_task(read(b, asked))
            await until_load(a, lambda load: load.running > 0)
            os.kill(launcher.pid("e0"), signal.SIGKILL)
            with pytest.raises(EngineGone):
                await first
            async with asyncio.timeout(5):
                assert (await second).finish is FinishReason.ABORT
            await until_idle(b)
            assert not await a.healthy()
            # The instance comes back under its name and serves.
            a = await launcher.restart("e0", Role.PREFILL)
            assert len((await disaggregated(a, b, prompt(40), greedy(5))).tokens) == 5

    asyncio.run(main())


def test_a_decode_killed_mid_request_ends_its_prefill(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path, prefill_chunk=16, kv_store_tokens=0) as launcher:
            a, b = await start(launcher, Role.PREFILL, Role.DECODE)
            asked = request(prompt(1000), greedy(20), a)
            first, second = asyncio.create_task(read(a, asked)), asyncio.create_task(read(b, asked))
            await until_load(a, lambda load: load.running > 0)
            os.kill(launcher.pid("e1"), signal.SIGKILL)
            async with asyncio.timeout(5):
                assert (await first).finish is FinishReason.ABORT
            with pytest.raises(EngineGone):
                await second
            await until_idle(a)

    asyncio.run(main())


def test_new_weights_never_read_old_kv(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", seed=1)
    ids = prompt(100)

    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            a, b, mixed = await start(launcher, Role.PREFILL, Role.DECODE, Role.MIXED)
            old = await disaggregated(a, b, ids, greedy(30))
            asked = request(ids, greedy(1900), a)
            live = asyncio.create_task(read(b, asked))
            await read(a, asked)
            await b.update_weights(str(other), 5)
            await a.update_weights(str(other), 5)
            aborted = await live
            assert (aborted.finish, aborted.versions) == (FinishReason.ABORT, {0})

            new = await disaggregated(a, b, ids, greedy(30))
            assert new.cached_tokens == 0
            assert new.versions == {5}
            assert (await a.info()).weights_version == (await b.info()).weights_version == 5
            async with launching(other, tmp_path / "reference", kv_store_tokens=0) as reference:
                (fresh,) = await start(reference, Role.MIXED)
                assert new.tokens == (await read(fresh, request(ids, greedy(30)))).tokens != old.tokens
            # An engine that still has the old weights keeps its own.
            assert (await read(mixed, request(ids, greedy(30)))).tokens == old.tokens
            # Two versions never meet in one request.
            await b.update_weights(str(other), 6)
            first, second = await both_legs(a, b, request(ids, greedy(5), a))
            assert first.finish is second.finish is FinishReason.ABORT
            await until_idle(a, b)

    asyncio.run(main())


def test_a_checkpoint_that_does_not_fit_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", num_hidden_layers=3)

    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            (engine,) = await start(launcher, Role.MIXED)
            before = await read(engine, request(prompt(30), greedy(10)))
            with pytest.raises(EngineError, match="other"):
                await engine.update_weights(str(other), 1)
            with pytest.raises(EngineError, match="nowhere"):
                await engine.update_weights(str(tmp_path / "nowhere"), 1)
            assert (await engine.info()).weights_version == 0
            assert (await read(engine, request(prompt(30), greedy(10)))).tokens == before.tokens

    asyncio.run(main())


def test_a_full_queue_refuses(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path, max_running=1, max_waiting=2, kv_store_tokens=0) as launcher:
            mixed, a, b = await start(launcher, Role.MIXED, Role.PREFILL, Role.DECODE)
            tasks = [asyncio.create_task(read(mixed, request(prompt(8), greedy(400)))) for _ in range(8)]
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            served = [one for one in outcomes if not isinstance(one, BaseException)]
            refused = [one for one in outcomes if isinstance(one, EngineBusy)]
            assert len(served) + len(refused) == 8
            assert len(refused) >= 4
            assert all(len(one.tokens) == 400 for one in served)
            assert "e0" in str(refused[0])
            # Prefill legs whose decode side is full wait too, and are bounded too.
            pairs = [both_legs(a, b, request(prompt(8), greedy(400), a)) for _ in range(8)]
            outcomes = await asyncio.gather(*pairs, return_exceptions=True)
            assert any(isinstance(one, EngineBusy) for one in outcomes)
            await until_idle(mixed, a, b)

    asyncio.run(main())


def test_more_requests_than_fit_all_end(checkpoint: Path, tmp_path: Path) -> None:
    """Two prefills and two decodes whose KV holds three requests each: nobody may wait for each other in a circle."""

    async def main() -> None:
        settings = {"kv_tokens": 512, "max_waiting": 64, "kv_store_tokens": 0}
        async with launching(checkpoint, tmp_path, **settings) as launcher:
            engines = await start(launcher, Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
            requests = [
                disaggregated(engines[i % 2], engines[2 + i // 2 % 2], prompt(120, i), greedy(30)) for i in range(32)
            ]
            legs = await asyncio.gather(*requests)
            assert all(len(one.tokens) == 30 for one in legs)
            await until_idle(*engines)

    asyncio.run(main())


def test_the_wrong_role_is_refused_at_once(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path, kv_store_tokens=0) as launcher:
            mixed, a, b = await start(launcher, Role.MIXED, Role.PREFILL, Role.DECODE)
            for engine, asked in (
                (a, request(prompt(8), greedy(4))),
                (b, request(prompt(8), greedy(4))),
                (mixed, request(prompt(8), greedy(4), a)),
            ):
                with pytest.raises(EngineError, match=r"answered 400: .*bootstrap_room"):
                    await read(engine, asked)
            # A decode that is sent to an engine that is no prefill hears so from that engine.
            async with asyncio.timeout(5):
                assert (await read(b, request(prompt(8), greedy(4), mixed))).finish is FinishReason.ABORT
            nowhere = GenerateRequest("x", prompt(8), greedy(4), Bootstrap("127.0.0.1", 9, 1))
            async with asyncio.timeout(5):
                assert (await read(b, nowhere)).finish is FinishReason.ABORT
            await until_idle(mixed, a, b)

    asyncio.run(main())


def test_a_role_switch_needs_an_idle_engine_and_is_reported(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            a, b = await start(launcher, Role.PREFILL, Role.DECODE)
            asked = request(prompt(20), greedy(1500), a)
            legs = asyncio.gather(read(a, asked), read(b, asked))
            await until_load(b, lambda load: not load.idle)
            with pytest.raises(EngineBusy, match="not idle"):
                await b.switch_role(Role.PREFILL)
            assert (await b.info()).role is Role.DECODE
            await b.abort()
            await legs
            await until_idle(a, b)
            await b.switch_role(Role.PREFILL)
            assert (await b.info()).role is Role.PREFILL
            with pytest.raises(EngineError, match="already"):
                await b.switch_role(Role.PREFILL)
            await b.switch_role(Role.MIXED)
            assert (await b.info()).role is Role.MIXED

    asyncio.run(main())


def test_a_flip_keeps_the_kv(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path, kv_store_tokens=0) as launcher:
            a, b = await start(launcher, Role.PREFILL, Role.DECODE)
            first = await disaggregated(a, b, prompt(100), greedy(29))
            await until_idle(a, b)
            await a.switch_role(Role.DECODE)
            await b.switch_role(Role.PREFILL)
            # 128 tokens have KV: the prompt and the output but for its last token. The former decode still has them.
            again = await disaggregated(b, a, prompt(100) + tuple(first.tokens), greedy(5))
            assert again.cached_tokens == 128

    asyncio.run(main())


def test_engines_go_on_when_the_store_dies(checkpoint: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            a, b = await start(launcher, Role.PREFILL, Role.DECODE)
            before = await disaggregated(a, b, prompt(100), greedy(30))
            assert launcher._store is not None
            os.kill(launcher._store.process.pid, signal.SIGKILL)
            asked = request(prompt(100), greedy(1500), a)
            live = asyncio.gather(read(a, asked), read(b, asked))
            after = await disaggregated(a, b, prompt(100), greedy(30))
            assert after.tokens == before.tokens
            await b.abort(asked.rid)
            assert (await live)[1].finish is FinishReason.ABORT

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_dies_or_hangs_is_started_again_and_engines_find_it(
    number: signal.Signals, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorsa.engines.launcher.STORE_CHECK_SECONDS", 0.5)

    async def main() -> None:
        async with launching(checkpoint, tmp_path) as launcher:
            a, b = await start(launcher, Role.PREFILL, Role.DECODE)
            before = await disaggregated(a, b, prompt(100), greedy(30))
            assert launcher._store is not None
            former = launcher._store.process.pid
            os.kill(former, number)
            # Nobody waits for it.
            assert (await disaggregated(a, b, prompt(100), greedy(30))).tokens == before.tokens
            async with asyncio.timeout(60):
                while launcher._store.process.pid == former or not (await connected(a) and await connected(b)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            other = prompt(200)[100:]
            first = await disaggregated(a, b, other, greedy(30))
            await until_idle(a, b)
            c = await launcher.start("c", Role.PREFILL)
            again = await disaggregated(c, b, other, greedy(30))
            assert again.tokens == first.tokens
            assert again.cached_tokens >= 80

    async def connected(engine: SGLangEngine) -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"{engine.url}/v1/loads") as response:
            return bool((await response.json())["loads"][0]["kv_store"]["connected"])

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, 2.5]}, "input_ids"),
        ({"input_ids": [1, 99999]}, "input_ids"),
        ({"rid": None}, "rid"),
        ({"sampling_params": {"max_new_tokens": "9"}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": 4, "top_p": 0}}, "top_p"),
        ({"sampling_params": {"max_new_tokens": 4, "temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": 9999}}, "context"),
        ({"stream": False}, "stream"),
        ({"bootstrap_room": 3}, "bootstrap_host"),
    ],
)
def test_a_malformed_request_is_refused_with_the_field(one_engine: str, change: dict[str, Any], named: str) -> None:
    good = {"rid": "x", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, "stream": True}

    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{one_engine}/generate", json=good) as response:
                assert response.status == 200
                await response.read()
            async with session.post(f"{one_engine}/generate", json={**good, **change}) as response:
                assert response.status == 400
                assert named in (await response.json())["error"]["message"]
            for garbage in (b"{", b"[]", b"\xff"):
                async with session.post(f"{one_engine}/generate", data=garbage) as response:
                    assert response.status == 400
                    assert "body" in (await response.json())["error"]["message"]

    asyncio.run(main())
