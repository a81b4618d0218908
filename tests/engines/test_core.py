"""What the engine core promises its owner: nothing is lost, computed twice, or read across weights versions (promise 9)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from checkpoints import VOCABULARY, write_checkpoint
from core_driving import Result, collect, generate, generate_apart, hand_over, prompts_of, run
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prorsa.engines.embedded.checkpoint import ModelError
from prorsa.engines.embedded.core import (
    CoreError,
    EngineCore,
    NotIdle,
    QueueFull,
    RequestRefused,
    Reservation,
    UnknownRequest,
    block_hashes,
)
from prorsa.engines.protocol import FinishReason, Role, SamplingParams

GREEDY = SamplingParams(24, temperature=0.0)
SEEDED = SamplingParams(24, temperature=1.0, seed=11)


def core_at(checkpoint: Path, role: Role = Role.MIXED, kv_tokens: int = 2048, **settings: int) -> EngineCore:
    return EngineCore(str(checkpoint), role, kv_tokens=kv_tokens, **settings)


@pytest.fixture(scope="module")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("other"), seed=1)


# Requests from beginning to end


def test_a_request_ends_at_its_budget_or_after_a_stop_token(checkpoint: Path) -> None:
    (prompt,) = prompts_of((20,))
    (whole,) = generate(core_at(checkpoint), [prompt], GREEDY)
    assert whole.finish is FinishReason.LENGTH
    assert len(whole.tokens) == 24
    for index in range(24):
        stop = whole.tokens[index]
        first = whole.tokens.index(stop)
        (stopped,) = generate(core_at(checkpoint), [prompt], dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
        assert stopped.tokens == whole.tokens[: first + 1]
        assert stopped.finish is FinishReason.STOP
    (one,) = generate(core_at(checkpoint), [prompt], dataclasses.replace(GREEDY, max_new_tokens=1))
    assert (one.tokens, one.finish) == (whole.tokens[:1], FinishReason.LENGTH)


def test_requests_that_come_and_go_do_not_change_each_other(checkpoint: Path) -> None:
    prompts = prompts_of((3, 30, 17, 90, 8, 41, 64, 25))
    budgets = [5, 30, 12, 3, 26, 9, 17, 21]
    params = [SamplingParams(budget, 1.0, seed=i) for i, budget in enumerate(budgets)]
    alone = [generate(core_at(checkpoint), [p], s)[0].tokens for p, s in zip(prompts, params, strict=True)]
    core, results = core_at(checkpoint, max_running=3, prefill_chunk=20), {}
    for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        core.submit(str(i), prompt, sampling)
        collect(core.step(), results)
        assert core.load().running <= 3
    run(core, results)
    assert [results[str(i)].tokens for i in range(8)] == alone
    assert core.load().used_tokens == 0


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_aborted_at_any_token_and_resubmitted_it_gives_what_it_would_have(
    checkpoint: Path, sampling: SamplingParams
) -> None:
    prompt, other = prompts_of((37, 50))
    (whole,) = generate(core_at(checkpoint), [prompt], sampling)
    core = core_at(checkpoint)
    core.submit("other", other, dataclasses.replace(sampling, max_new_tokens=900))
    for index in range(1, 24):
        results: dict[str, Result] = {}
        core.submit(f"first-{index}", prompt, sampling)
        while len(results.get(f"first-{index}", Result()).tokens) < index:
            collect(core.step(), results)
        assert core.abort(f"first-{index}")
        collect(core.step(), results)
        part = results[f"first-{index}"]
        assert part.finish is FinishReason.ABORT
        left = dataclasses.replace(sampling, max_new_tokens=24 - len(part.tokens))
        core.submit(f"second-{index}", prompt + part.tokens, left)
        while results.get(f"second-{index}", Result()).finish is None:
            collect(core.step(), results)
        rest = results[f"second-{index}"]
        assert part.tokens + rest.tokens == whole.tokens
        np.testing.assert_allclose(part.logprobs + rest.logprobs, whole.logprobs, atol=1e-4)
        # Every block that the first attempt had filled is found again.
        assert rest.cached == (len(prompt) + index - 1) // 16 * 16


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_cancelled_on_the_decode_side_and_sent_through_flipped_engines(
    checkpoint: Path, sampling: SamplingParams
) -> None:
    (prompt,) = prompts_of((37,))
    (whole,) = generate(core_at(checkpoint), [prompt], sampling)
    prefill, decode = core_at(checkpoint, Role.PREFILL), core_at(checkpoint, Role.DECODE)
    for index in range(1, 24):
        results: dict[str, Result] = {}
        hand_over(prefill, decode, "first", prompt, sampling)
        for _ in range(index):
            collect(decode.step(), results)
        decode.abort("first")
        run(decode, results)
        prefill, decode = decode, prefill
        prefill.set_role(Role.PREFILL)
        decode.set_role(Role.DECODE)
        part = results["first"].tokens
        left = dataclasses.replace(sampling, max_new_tokens=24 - len(part))
        (rest,) = generate_apart(prefill, decode, [prompt + part], left)
        assert part + rest.tokens == whole.tokens


# Prefix cache and KV store


def test_equal_prompts_that_arrive_together_are_computed_once(checkpoint: Path) -> None:
    (prompt,) = prompts_of((70,))
    results = generate(core_at(checkpoint), [prompt] * 8, GREEDY)
    assert len({tuple(result.tokens) for result in results}) == 1
    assert sorted(result.cached for result in results) == [0] + [64] * 7


def test_equal_prompts_share_their_full_blocks(checkpoint: Path) -> None:
    (prompt,) = prompts_of((70,))
    core = core_at(checkpoint, Role.PREFILL)
    for index in range(8):
        core.submit(str(index), prompt, GREEDY, handover=True)
    run(core)
    assert core.load().used_tokens == 64 + 8 * 16
    assert core.load().waiting == 8


def test_decode_takes_from_its_own_cache_what_it_can(checkpoint: Path) -> None:
    prompt, tail = prompts_of((48, 40))
    prefill, decode = core_at(checkpoint, Role.PREFILL), core_at(checkpoint, Role.DECODE)
    assert hand_over(prefill, decode, "a", prompt, GREEDY) == 3
    answer = run(decode)["a"].tokens
    # 48 prompt + 23 computed answer tokens are 4 full blocks.
    longer = prompt + answer + tail
    assert hand_over(prefill, decode, "b", longer, GREEDY) == 7 - 4
    (expected,) = generate(core_at(checkpoint), [longer], GREEDY)
    assert run(decode)["b"].tokens == expected.tokens
    # A prompt that is cached to its last token needs no transfer at all.
    assert hand_over(prefill, decode, "c", prompt, GREEDY) == 0
    assert run(decode)["c"].tokens == answer


def test_what_one_core_computed_another_reuses_through_a_store(checkpoint: Path) -> None:
    store: dict[bytes, bytes] = {}

    def drain(core: EngineCore) -> None:
        while core.has_work():
            step = core.step()
            for filled in step.filled:
                assert filled.hash not in store
                store[filled.hash] = bytes(core.block_data(filled.block))
            collect(step, results)

    results: dict[str, Result] = {}
    (prompt,) = prompts_of((50,))
    prefill, decode = core_at(checkpoint, Role.PREFILL), core_at(checkpoint, Role.DECODE)
    prefill.submit("a", prompt, GREEDY, handover=True)
    drain(prefill)
    assert list(store) == block_hashes(prompt, 0, 16)
    decode.reserve("a", prompt, GREEDY)
    for index in range(4):
        decode.import_block("a", index, prefill.export_block("a", index))
    decode.admit("a", results["a"].tokens[0], results["a"].logprobs[0])
    results.clear()
    drain(decode)
    context = prompt + results["a"].tokens
    assert list(store) == block_hashes(context[:-1], 0, 16)

    fresh = core_at(checkpoint)
    missing = fresh.missing_hashes(context)
    assert missing == list(store)
    assert fresh.import_prefix(missing, [store[hash] for hash in missing]) == 4
    assert fresh.missing_hashes(context) == []
    (expected,) = generate(core_at(checkpoint), [context], GREEDY)
    (result,) = generate(fresh, [context], GREEDY)
    assert result.tokens == expected.tokens
    assert result.cached == 64


def test_an_import_takes_no_more_than_there_is_room_for(checkpoint: Path) -> None:
    core = core_at(checkpoint, kv_tokens=5 * 16)
    (prompt,) = prompts_of((8 * 16,))
    hashes = block_hashes(prompt, 0, 16)
    data = [bytes(core.block_nbytes)] * 8
    assert core.import_prefix(hashes, data) == 5
    assert core.missing_hashes(prompt) == hashes[5:7]
    assert core.load().used_tokens == 0
    with pytest.raises(CoreError, match=f"{core.block_nbytes} bytes, not 3"):
        core.import_prefix(hashes[5:7], [data[0], b"abc"])
    assert core.load().used_tokens == 0


# Weights


def test_after_a_weight_update_no_old_kv_is_read(checkpoint: Path, other_checkpoint: Path) -> None:
    prompts = prompts_of((40, 80))
    expected = [result.tokens for result in generate(core_at(other_checkpoint), prompts, GREEDY)]
    core, results = core_at(checkpoint), {}
    core.submit("live", prompts[0], GREEDY)
    for _ in range(4):
        collect(core.step(), results)
    old = core.missing_hashes(prompts[1])
    core.load_weights(str(other_checkpoint), 7)
    collect(core.step(), results)
    assert results["live"].finish is FinishReason.ABORT
    assert core.load().idle
    assert core.weights_version == 7
    assert set(core.missing_hashes(prompts[1])).isdisjoint(old)
    # Blocks of the old version that come late from a store are never found.
    core.import_prefix(old, [bytes(core.block_nbytes)] * len(old))
    renewed = generate(core, prompts, GREEDY)
    assert [result.tokens for result in renewed] == expected
    assert [result.cached for result in renewed] == [0, 0]
    core.submit("next", prompts[0], dataclasses.replace(GREEDY, max_new_tokens=1))
    assert core.step().outputs[0].weights_version == 7


def test_even_under_an_equal_version_no_old_kv_is_read(checkpoint: Path, other_checkpoint: Path) -> None:
    prompts = prompts_of((40,))
    (expected,) = generate(core_at(other_checkpoint), prompts, GREEDY)
    core = core_at(checkpoint)
    generate(core, prompts, GREEDY)
    core.load_weights(str(other_checkpoint), core.weights_version)
    (result,) = generate(core, prompts, GREEDY)
    assert (result.tokens, result.cached) == (expected.tokens, 0)


def test_a_checkpoint_that_does_not_fit_changes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (prompt,) = prompts_of((40,))
    core = core_at(checkpoint)
    (before,) = generate(core, [prompt], GREEDY)
    core.submit("live", prompt, GREEDY)
    core.step()
    wide = write_checkpoint(tmp_path / "wide", intermediate_size=192)
    with pytest.raises(ModelError, match="inner=192"):
        core.load_weights(str(wide), 1)
    with pytest.raises(ModelError, match="cannot be read"):
        core.load_weights(str(tmp_path / "nowhere"), 1)
    assert core.weights_version == 0
    assert run(core)["live"].tokens == before.tokens[1:]


# Roles


def test_a_role_changes_only_when_idle_and_keeps_the_cache(checkpoint: Path) -> None:
    (prompt,) = prompts_of((40,))
    core = core_at(checkpoint, Role.PREFILL)
    core.submit("a", prompt, GREEDY, handover=True)
    run(core)
    with pytest.raises(NotIdle, match="1 requests"):
        core.set_role(Role.DECODE)
    core.release("a")
    core.set_role(Role.DECODE)
    assert core.reserve("b", prompt, GREEDY) == Reservation(first_missing_block=2, n_blocks=3)
    with pytest.raises(NotIdle):
        core.set_role(Role.PREFILL)
    core.abort("b")
    core.set_role(Role.MIXED)
    assert core.missing_hashes(prompt) == []


def test_what_is_on_an_engine_goes_on_where_its_role_changes_in_place(checkpoint: Path) -> None:
    prompts = prompts_of((40, 25, 33))
    alone = [generate(core_at(checkpoint), [prompt], GREEDY)[0].tokens for prompt in prompts]
    prefill, decode = core_at(checkpoint, Role.PREFILL), core_at(checkpoint, Role.DECODE)
    hand_over(prefill, decode, "a", prompts[0], GREEDY)
    tokens: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    def step(core: EngineCore) -> None:
        for output in core.step().outputs:
            tokens[output.rid] += output.token_ids

    step(decode)
    decode.set_role(Role.MIXED)
    decode.submit("b", prompts[1], GREEDY)
    step(decode)
    decode.submit("c", prompts[2], GREEDY)
    # Neither what decodes nor what waits for its prefill has to end first.
    decode.set_role(Role.DECODE)
    while decode.has_work():
        step(decode)
    assert [tokens["a"], tokens["b"], tokens["c"]] == alone
    assert decode.load().used_tokens == 0


def test_a_prefill_that_has_begun_is_handed_over_by_an_engine_that_has_become_mixed(checkpoint: Path) -> None:
    short, long = prompts_of((30, 40))
    prefill = core_at(checkpoint, Role.PREFILL, prefill_chunk=16)
    prefill.submit("held", long, GREEDY, handover=True)
    prefill.step()
    prefill.set_role(Role.MIXED)
    prefill.submit("whole", short, GREEDY)
    done = run(prefill)
    assert len(done["whole"].tokens) == GREEDY.max_new_tokens
    # The first token alone, and its KV cache to be fetched.
    assert len(done["held"].tokens) == 1
    assert prefill.export_block("held", 2)
    prefill.release("held")
    assert prefill.load().used_tokens == 0


def test_each_role_refuses_what_belongs_to_another(checkpoint: Path) -> None:
    (prompt,) = prompts_of((4,))
    prefill, decode, mixed = (core_at(checkpoint, role) for role in (Role.PREFILL, Role.DECODE, Role.MIXED))
    for core, handover in ((prefill, False), (mixed, True), (decode, True), (decode, False)):
        with pytest.raises(RequestRefused, match=core.role):
            core.submit("a", prompt, GREEDY, handover=handover)
    for core in (prefill, mixed):
        with pytest.raises(RequestRefused, match=core.role):
            core.reserve("a", prompt, GREEDY)


# Bounds


def test_the_queue_is_bounded(checkpoint: Path) -> None:
    (prompt,) = prompts_of((4,))
    core = core_at(checkpoint, max_running=1, max_waiting=2)
    core.submit("0", prompt, GREEDY)
    core.step()
    core.submit("1", prompt, GREEDY)
    core.submit("2", prompt, GREEDY)
    with pytest.raises(QueueFull, match="2 requests wait"):
        core.submit("3", prompt, GREEDY)
    assert core.load().waiting == 2
    assert core.abort("1")
    core.submit("3", prompt, GREEDY)
    results = run(core)
    assert results["1"].finish is FinishReason.ABORT
    assert [len(results[rid].tokens) for rid in "023"] == [23, 24, 24]


@pytest.mark.parametrize(
    ("length", "new", "message"),
    [
        (0, 1, "at least one"),
        (4, 0, "max_new_tokens is 0"),
        (2000, 49, "2000 prompt . 49 new tokens exceed the context of 2048"),
        (1000, 26, "need 65 KV blocks of 16; the pool has 64"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_numbers(
    checkpoint: Path, length: int, new: int, message: str
) -> None:
    core = core_at(checkpoint, kv_tokens=1024)
    with pytest.raises(RequestRefused, match=message):
        core.submit("a", [1] * length, SamplingParams(new, temperature=0.0))
    assert core.load().idle


def test_tokens_outside_the_vocabulary_and_a_second_use_of_a_rid_are_refused(checkpoint: Path) -> None:
    core = core_at(checkpoint)
    for token in (-1, VOCABULARY):
        with pytest.raises(RequestRefused, match=str(VOCABULARY)):
            core.submit("a", [1, token], GREEDY)
    core.submit("a", [1], GREEDY)
    with pytest.raises(RequestRefused, match="already"):
        core.submit("a", [2], GREEDY)


def test_a_pool_filled_to_its_last_token_serves_the_request(checkpoint: Path) -> None:
    core = core_at(checkpoint, kv_tokens=64)
    (prompt,) = prompts_of((41,))
    (expected,) = generate(core_at(checkpoint), [prompt], GREEDY)
    assert generate(core, [prompt], GREEDY)[0].tokens == expected.tokens  # the KV of 41 + 24 - 1 = 64 tokens


def test_under_a_full_pool_requests_are_retracted_and_no_token_is_lost(checkpoint: Path) -> None:
    prompts = prompts_of((30, 40, 20, 33, 28))
    sampling = SamplingParams(80, temperature=0.0)
    expected = [generate(core_at(checkpoint), [prompt], sampling)[0] for prompt in prompts]
    core, results = core_at(checkpoint, kv_tokens=16 * 16, prefill_chunk=32), {}
    for index, prompt in enumerate(prompts):
        core.submit(str(index), prompt, sampling)
    retractions = 0
    while core.has_work():
        running, ended = core.load().running, sum(r.finish is not None for r in results.values())
        collect(core.step(), results)
        gone = sum(r.finish is not None for r in results.values()) - ended
        retractions += core.load().running < running - gone
    assert retractions > 0
    for index, result in enumerate(expected):
        assert results[str(index)].tokens == result.tokens
        np.testing.assert_allclose(results[str(index)].logprobs, result.logprobs, atol=1e-4)
    assert core.load().used_tokens == 0


def test_retracted_requests_keep_their_place(checkpoint: Path) -> None:
    sampling = SamplingParams(60, temperature=0.0)
    core, results = core_at(checkpoint, kv_tokens=16 * 16), {}
    order: list[str] = []
    for index, prompt in enumerate(prompts_of([30] * 7)):
        core.submit(str(index), prompt, sampling)
    while core.has_work():
        step = core.step()
        collect(step, results)
        order += sorted(output.rid for output in step.outputs if output.finish is not None)
    assert order == [str(index) for index in range(7)]


def test_a_request_starts_only_when_the_running_ones_can_still_grow(checkpoint: Path) -> None:
    first, second = prompts_of((30, 90))  # 2 and 6 blocks
    core = core_at(checkpoint, kv_tokens=8 * 16)
    core.submit("first", first, GREEDY)
    core.step()
    core.submit("second", second, GREEDY)
    core.step()
    assert core.load().running == 1
    assert len(run(core)["second"].tokens) == 24
    core.submit("second", second, GREEDY)
    core.step()
    core.submit("first", prompts_of((10,))[0], GREEDY)  # 1 block, and one to grow
    core.step()
    assert core.load().running == 2


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 18)), min_size=1, max_size=6),
    blocks=st.integers(12, 20),
    chunk=st.integers(1, 40),
)
def test_whatever_the_lengths_a_small_pool_gives_the_same_tokens(
    checkpoint: Path, requests: list[tuple[int, int]], blocks: int, chunk: int
) -> None:
    prompts = prompts_of([length for length, _ in requests])
    params = [SamplingParams(new, 1.0, seed=index) for index, (_, new) in enumerate(requests)]
    core, large = core_at(checkpoint, kv_tokens=blocks * 4, block_tokens=4, prefill_chunk=chunk), core_at(checkpoint)
    for each in (core, large):
        for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            each.submit(str(index), prompt, sampling)
    assert {rid: r.tokens for rid, r in run(core).items()} == {rid: r.tokens for rid, r in run(large).items()}
    assert core.load().used_tokens == 0


def test_decode_admits_only_what_fits_to_its_end_and_tells_when_there_is_room(checkpoint: Path) -> None:
    sampling = SamplingParams(80, temperature=0.0)
    prompts = prompts_of((30, 40, 33))  # 7, 8 and 7 blocks to their ends
    expected = [generate(core_at(checkpoint), [prompt], sampling)[0].tokens for prompt in prompts]
    prefill = core_at(checkpoint, Role.PREFILL)
    decode = core_at(checkpoint, Role.DECODE, kv_tokens=15 * 16)
    for rid in "01":
        hand_over(prefill, decode, rid, prompts[int(rid)], sampling)
    assert decode.reserve("2", prompts[2], sampling) is None
    prefill.submit("2", prompts[2], sampling, handover=True)
    (first,) = prefill.step().outputs
    results: dict[str, Result] = {}
    while decode.has_work():
        step = decode.step()
        collect(step, results)
        for rid, reservation in step.reserved:
            assert (rid, reservation) == ("2", Reservation(0, 3))
            assert FinishReason.LENGTH in (results["0"].finish, results["1"].finish)
            for index in range(3):
                decode.import_block("2", index, prefill.export_block("2", index))
            decode.admit("2", first.token_ids[0], first.logprobs[0])
    assert [results[rid].tokens for rid in "012"] == expected


# The handover


def test_a_handover_admits_no_wrong_or_missing_block(checkpoint: Path) -> None:
    (prompt,) = prompts_of((40,))
    prefill = core_at(checkpoint, Role.PREFILL, prefill_chunk=20)
    decode = core_at(checkpoint, Role.DECODE)
    prefill.submit("a", prompt, GREEDY, handover=True)
    with pytest.raises(CoreError, match="0 of 40"):
        prefill.export_block("a", 0)
    assert [output.prefilled for output in prefill.step().outputs] == [20]
    block = bytes(prefill.export_block("a", 0))
    with pytest.raises(CoreError, match="20 of 40"):
        prefill.export_block("a", 1)
    with pytest.raises(CoreError, match="PREFILLING"):
        prefill.release("a")
    decode.reserve("a", prompt, GREEDY)
    with pytest.raises(CoreError, match=rf"{len(block)} bytes, not {len(block) - 4}"):
        decode.import_block("a", 0, block[4:])
    with pytest.raises(CoreError, match="block 3 is not awaited"):
        decode.import_block("a", 3, block)
    decode.import_block("a", 0, block)
    with pytest.raises(CoreError, match="block 0 is not awaited"):
        decode.import_block("a", 0, block)
    with pytest.raises(CoreError, match=r"blocks \[1, 2\] were not imported"):
        decode.admit("a", 1, 0.0)
    for call in (
        lambda: decode.import_block("b", 0, block),
        lambda: prefill.release("b"),
        lambda: decode.admit("b", 1, 0.0),
    ):
        with pytest.raises(UnknownRequest):
            call()


def test_a_first_token_that_ends_the_answer_is_told_by_the_decode_side(checkpoint: Path) -> None:
    (prompt,) = prompts_of((40,))
    (whole,) = generate(core_at(checkpoint), [prompt], GREEDY)
    for sampling, finish in (
        (dataclasses.replace(GREEDY, max_new_tokens=1), FinishReason.LENGTH),
        (dataclasses.replace(GREEDY, stop_token_ids=(whole.tokens[0],)), FinishReason.STOP),
    ):
        decode = core_at(checkpoint, Role.DECODE)
        (result,) = generate_apart(core_at(checkpoint, Role.PREFILL), decode, [prompt], sampling)
        assert (result.tokens, result.finish) == (whole.tokens[:1], finish)
        assert decode.load().idle
        assert decode.load().used_tokens == 0


def test_aborted_before_its_first_token_was_told_it_keeps_that_token(checkpoint: Path) -> None:
    (prompt,) = prompts_of((40,))
    decode = core_at(checkpoint, Role.DECODE)
    hand_over(core_at(checkpoint, Role.PREFILL), decode, "a", prompt, GREEDY)
    assert decode.abort_all() == ["a"]
    result = run(decode)["a"]
    assert (len(result.tokens), result.finish) == (1, FinishReason.ABORT)


class CoreMachine(RuleBasedStateMachine):
    """A prefill and a decode core under random requests, aborts and flips."""

    path: str

    @initialize()
    def start(self) -> None:
        self.prefill, self.decode = (
            EngineCore(self.path, role, kv_tokens=12 * 4, block_tokens=4, prefill_chunk=6, max_running=3, max_waiting=3)
            for role in (Role.PREFILL, Role.DECODE)
        )
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        """Everything that the decode core ever accepted."""
        self.firsts: dict[str, tuple[int, float]] = {}
        """Held on the prefill core: the first token."""
        self.reserved: dict[str, Reservation] = {}
        self.results: dict[str, Result] = {}
        """What the decode core told."""

    @rule(seed=st.integers(0, 2), length=st.integers(1, 20), new=st.integers(1, 12))
    def request(self, seed: int, length: int, new: int) -> None:
        rid, sampling = str(len(self.requests)), SamplingParams(new, 1.0, seed=seed)
        prompt = prompts_of((length,), seed)[0]
        try:
            reservation = self.decode.reserve(rid, prompt, sampling)
        except QueueFull:
            return
        self.requests[rid] = (prompt, sampling)
        if reservation is not None:
            self.reserved[rid] = reservation
        try:
            self.prefill.submit(rid, prompt, sampling, handover=True)
        except QueueFull:
            self.abort(rid)

    @rule()
    def step_prefill(self) -> None:
        for output in self.prefill.step().outputs:
            assert output.finish in (None, FinishReason.ABORT)
            if output.token_ids:
                self.firsts[output.rid] = (output.token_ids[0], output.logprobs[0])

    @rule()
    def step_decode(self) -> None:
        step = self.decode.step()
        collect(step, self.results)
        self.reserved.update(step.reserved)

    @rule()
    def hand_over(self) -> None:
        for rid in self.firsts.keys() & self.reserved.keys():
            reservation = self.reserved.pop(rid)
            for index in range(reservation.first_missing_block, reservation.n_blocks):
                self.decode.import_block(rid, index, self.prefill.export_block(rid, index))
            self.decode.admit(rid, *self.firsts.pop(rid))
            self.prefill.release(rid)

    @rule(data=st.data())
    def abort_any(self, data: st.DataObject) -> None:
        if self.requests:
            self.abort(data.draw(st.sampled_from(sorted(self.requests))))

    def abort(self, rid: str) -> None:
        self.prefill.abort(rid)
        self.decode.abort(rid)
        self.firsts.pop(rid, None)
        self.reserved.pop(rid, None)
        assert not self.prefill.abort(rid)
        assert not self.decode.abort(rid)

    @rule()
    def flip(self) -> None:
        if self.prefill.load().idle and self.decode.load().idle:
            self.step_prefill()
            self.step_decode()
            self.prefill, self.decode = self.decode, self.prefill
            self.prefill.set_role(Role.PREFILL)
            self.decode.set_role(Role.DECODE)

    @invariant()
    def loads_are_within_bounds(self) -> None:
        for core in (self.prefill, self.decode):
            load = core.load()
            assert 0 <= load.used_tokens <= load.max_tokens == 48
            assert load.running <= 3

    def teardown(self) -> None:
        for _ in range(200):
            self.step_prefill()
            self.hand_over()
            self.step_decode()
        for rid, (prompt, sampling) in self.requests.items():
            result = self.results[rid]
            assert result.finish is not None
            if result.tokens:
                reference = EngineCore(self.path, Role.MIXED, kv_tokens=64, block_tokens=4)
                (expected,) = generate(reference, [prompt], sampling)
                assert result.tokens == expected.tokens[: len(result.tokens)]
                if result.finish is not FinishReason.ABORT:
                    assert len(result.tokens) == sampling.max_new_tokens
        for core in (self.prefill, self.decode):
            assert core.load().idle
            assert core.load().used_tokens == 0
            assert not core.has_work()


def test_nothing_is_lost_or_left_behind_whatever_happens(checkpoint: Path) -> None:
    CoreMachine.path = str(checkpoint)
    case = CoreMachine.TestCase
    case.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
    case().runTest()
