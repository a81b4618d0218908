"""The simulated instance: times and idle worked out by hand, event jumps against a token-by-token simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from core_bench import Bench, Costs
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_engine import Ask, NaiveEngine

from prorsa.engines.protocol import FinishReason, Role
from prorsa.simulation.engines.statistics import ConservationError, Histogram, Ledger, Statistics

# A prefill step of a full chunk takes 1.0 + 0.5 s, a decode step 0.125 s a request + 0.5 s.


def test_a_request_alone_takes_its_chunks_and_then_a_step_a_token() -> None:
    bench = Bench()
    bench.ask(0.0, bench.core(), "a", prompt=250, target=3)
    bench.run()
    # Chunks of 100, 100, 50: 1.5 + 1.5 + 1.0; the last makes the first token; two steps of 0.625 make the others.
    assert bench.end("a") == pytest.approx(5.25)
    assert bench.seen["a/mixed"].reports[0] == (pytest.approx(4.0), 1, None)
    assert bench.seen["a/mixed"].tokens == 3
    s = bench.statistics
    assert (s.steps, s.prefill_steps, s.prefilled_tokens, s.decoded_tokens) == (5, 3, 250, 3)
    assert s.step_s == pytest.approx(5.25)
    # The other rank has nothing to do: half of 1.0 + 1.0 + 0.5 + 2 * 0.125.
    assert (s.interference_s, s.imbalance_s) == (0.0, pytest.approx(1.375))


def test_a_decoding_rank_waits_for_one_that_prefills() -> None:
    bench = Bench()
    core = bench.core()
    bench.ask(0.0, core, "a", prompt=100, target=11)
    bench.ask(2.0, core, "b", prompt=100, target=1)
    bench.run()
    # a has its first token at 1.5 and the second at 2.125, where b begins on the other rank; until 3.625 a gets one more.
    assert bench.end("b") == pytest.approx(3.625)
    assert bench.end("a") == pytest.approx(3.625 + 8 * 0.625)
    s = bench.statistics
    assert s.interference_s == pytest.approx((1.0 - 0.125) / 2)
    # The first prefill leaves a rank idle for 1.0, nine decode steps for 0.125.
    assert s.imbalance_s == pytest.approx((1.0 + 9 * 0.125) / 2)
    assert s.idle_ratio == pytest.approx((0.4375 + 1.0625) / 8.625)


def test_the_decodes_of_a_rank_stand_still_while_it_prefills() -> None:
    bench = Bench(ranks=1)
    core = bench.core()
    bench.ask(0.0, core, "a", prompt=100, target=11)
    bench.ask(2.0, core, "b", prompt=100, target=1)
    bench.run()
    assert bench.end("b") == pytest.approx(3.625)
    assert bench.end("a") == pytest.approx(3.625 + 9 * 0.625)
    # One token at 2.125; the next one waits for the prefill, 2.125 s; the last eight come every 0.625 s.
    itl = bench.statistics.itl
    assert sum(itl.weights.values()) == 10
    assert itl.percentile(0.5) == pytest.approx(0.625, rel=0.02)
    assert itl.percentile(0.89) == pytest.approx(0.625, rel=0.02)
    assert itl.percentile(0.95) == pytest.approx(2.125, rel=0.02)
    assert bench.statistics.itl_over_time[0] == (pytest.approx(9 * 0.625 + 2.125), pytest.approx(10))


def test_a_decode_that_ends_while_it_stands_still_leaves_no_pause_behind() -> None:
    bench = Bench(ranks=1)
    core = bench.core()
    bench.ask(0.0, core, "a", prompt=100, target=50)
    bench.ask(2.0, core, "b", prompt=100, target=1)
    bench.abort(2.5, "a")
    bench.ask(9.0, core, "c", prompt=100, target=3)
    bench.run()
    assert bench.statistics.itl.percentile(1.0) == pytest.approx(0.625, rel=0.02)


def test_requests_share_a_chunk() -> None:
    bench = Bench(Costs(prefix=0.001), ranks=1)
    core = bench.core()
    for name in "abc":
        bench.ask(0.0, core, name, prompt=60, target=1)
    bench.run()
    # 60 of a and 40 of b without prefix; then 20 of b after 40 and 60 of c after none: a mean prefix of 10.
    assert bench.end("a") == pytest.approx(1.5)
    assert bench.end("b") == bench.end("c") == pytest.approx(1.5 + 0.8 + 0.01 + 0.5)


def test_all_ranks_with_prompts_prefill_in_the_same_step() -> None:
    bench = Bench()
    core = bench.core()
    bench.ask(0.0, core, "a", prompt=100, target=1)
    bench.ask(0.0, core, "b", prompt=40, target=1)
    bench.run()
    assert bench.end("a") == bench.end("b") == pytest.approx(1.5)
    assert bench.statistics.imbalance_s == pytest.approx((1.0 - 0.4) / 2)


def test_with_a_cadence_decodes_make_k_steps_between_prefills() -> None:
    bench = Bench()
    core = bench.core(prefill_every=3)
    bench.ask(0.0, core, "a", prompt=100, target=50)
    bench.ask(1.6, core, "b", prompt=150, target=1)
    bench.run()
    # Three steps from 1.5; a chunk until 4.875; three steps; the rest, 0.5 + 0.5.
    assert bench.end("b") == pytest.approx(1.5 + 3 * 0.625 + 1.5 + 3 * 0.625 + 1.0)
    # a had 1 + 3 + 1 + 3 + 1 tokens then.
    assert bench.end("a") == pytest.approx(bench.end("b") + 41 * 0.625)


def test_with_a_cadence_and_nothing_to_decode_prefills_follow_each_other() -> None:
    bench = Bench()
    bench.ask(0.0, bench.core(prefill_every=3), "a", prompt=300, target=1)
    bench.run()
    assert bench.end("a") == pytest.approx(4.5)


def test_a_growing_context_costs_the_sum_of_its_steps() -> None:
    bench = Bench(Costs(context=0.001))
    bench.ask(0.0, bench.core(), "a", prompt=100, target=11)
    bench.run()
    # Contexts of 101 to 110 tokens.
    assert bench.end("a") == pytest.approx(1.5 + 10 * 0.625 + 0.001 * sum(range(101, 111)))
    assert bench.statistics.steps == 11


def test_between_the_points_of_a_fine_grid_times_are_those_of_the_grid() -> None:
    bench = Bench(Costs(context=0.001, bend=105))
    bench.ask(0.0, bench.core(), "a", prompt=300, target=11)
    bench.run()
    # Contexts of 301 to 310 tokens, of which those beyond 105 cost something.
    assert bench.end("a") == pytest.approx(3 * 1.5 + 10 * 0.625 + 0.001 * sum(range(196, 206)))


def test_a_decode_reports_every_period_and_at_its_end() -> None:
    bench = Bench()
    bench.ask(0.0, bench.core(stream_s=2.0), "a", prompt=100, target=11)
    bench.run()
    # Tokens at 1.5 (the prefill's) and every 0.625 s after it.
    reports = bench.seen["a/mixed"].reports
    assert [time for time, _, _ in reports] == pytest.approx([1.5, 3.5, 5.5, 7.5, 7.75])
    assert [tokens for _, tokens, _ in reports] == [1, 4, 7, 10, 11]


def test_an_abort_ends_a_decode_at_the_next_boundary_with_its_tokens() -> None:
    bench = Bench()
    bench.ask(0.0, bench.core(), "a", prompt=100, target=50)
    bench.abort(3.0, "a")
    bench.run()
    # Boundaries at 2.125, 2.75, 3.375.
    assert bench.seen["a/mixed"].reports[-1] == (pytest.approx(3.375), 4, FinishReason.ABORT)


def test_an_abort_ends_a_prefill_with_its_chunk_and_a_queued_request_at_once() -> None:
    bench = Bench(ranks=1)
    core = bench.core()
    bench.ask(0.0, core, "a", prompt=250, target=5)
    bench.ask(0.0, core, "b", prompt=250, target=5)
    bench.abort(2.0, "b")
    bench.abort(2.0, "a")
    bench.run()
    assert bench.seen["b/mixed"].reports == [(2.0, 0, FinishReason.ABORT)]
    assert bench.seen["a/mixed"].reports == [(pytest.approx(3.0), 0, FinishReason.ABORT)]
    assert bench.ledger.cut == bench.statistics.prefilled_tokens == 200


# Prefill and decode apart.


@pytest.mark.parametrize(
    ("tokens_per_s", "arrival"),
    [
        # Chunks are there at 1.5, 3.0 and 4.0: only the last one's 50 tokens take time afterwards.
        (1000, 4.0 + 0.05),
        # Each 100 tokens take a second, so they wait for none either.
        (100, 4.0 + 0.5),
        # The link is the bottleneck: busy from 1.5 on.
        (25, 1.5 + 250 / 25),
    ],
)
def test_all_but_the_last_chunk_moves_while_the_prefill_goes_on(tokens_per_s: int, arrival: float) -> None:
    bench = Bench(network_bytes_per_s=10.0 * tokens_per_s, network_latency_s=0.25)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=250, target=3)
    bench.run()
    assert bench.seen["a/prefill"].reports == [(pytest.approx(arrival + 0.25), 0, FinishReason.LENGTH)]
    assert bench.end("a", Role.DECODE) == pytest.approx(arrival + 0.25 + 2 * 0.625)
    assert bench.seen["a/decode"].tokens == 3
    assert bench.statistics.moved_tokens == bench.ledger.handed == 250
    # A prefill instance that waits for its network makes no steps.
    assert bench.statistics.step_s == pytest.approx(4.0 + 2 * 0.625)


def test_the_host_takes_its_time_for_each_further_request_of_a_chunk() -> None:
    bench = Bench(ranks=1, prefill_request_s=0.0625)
    core = bench.core()
    for name in ("a", "b", "c"):
        bench.ask(0.0, core, name, prompt=30, target=1)
    bench.run()
    # 90 tokens in one step: 0.9 + 0.5 s, and twice the host's time.
    assert bench.end("c") == pytest.approx(1.4 + 2 * 0.0625)


def test_a_chunk_reads_the_prefix_of_each_request() -> None:
    bench = Bench(Costs(prefix=0.001, read=0.001), ranks=1)
    core = bench.core()
    for name, prompt in (("a", 100), ("b", 300)):
        bench.ask(0.0, core, name, prompt=prompt, target=1)
    bench.ask(100.0, core, "a.1", prompt=130, target=1)
    bench.ask(100.0, core, "b.1", prompt=310, target=1)
    bench.run()
    # 30 new tokens after 100 and 10 after 300, a mean prefix of 150, which is read already; the two read 400.
    assert bench.end("b.1") == pytest.approx(100.0 + 0.5 + 0.4 + 0.15 + 0.4 - 0.15)


def test_the_host_takes_its_time_for_a_request_that_joins_a_decode() -> None:
    bench = Bench(ranks=1, network_bytes_per_s=1e9, decode_request_s=0.25)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=100, target=11)
    bench.run()
    # Only the first of ten steps is longer.
    assert bench.end("a", Role.DECODE) == pytest.approx(1.5 + 0.25 + 10 * 0.625)
    assert bench.statistics.steps == 1 + 10


def test_the_hosts_work_for_a_request_is_done_in_as_many_steps_as_a_handover_takes() -> None:
    bench = Bench(ranks=1, network_bytes_per_s=1e9, decode_request_s=0.25, handover_steps=2)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=100, target=11)
    bench.run()
    assert bench.end("a", Role.DECODE) == pytest.approx(1.5 + 0.25 + 10 * 0.625)
    # A half, a quarter, an eighth, and what is left.
    longest = 0.625 + 0.125
    assert bench.statistics.itl.percentile(1.0) == pytest.approx(longest, rel=0.02)


def test_a_handover_waits_for_steps_of_a_decoding_instance_alone() -> None:
    bench = Bench(ranks=1, network_bytes_per_s=1e9, handover_steps=2)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=100, target=101)
    bench.ask_pair(2.0, prefill, decode, "b", prompt=100, target=2)
    bench.run()
    assert bench.seen["a/prefill"].end == pytest.approx(1.5)
    # It is prefilled at 3.5; a decodes then, 0.625 s a step.
    assert bench.seen["b/prefill"].end == pytest.approx(3.5 + 2 * 0.625)
    # It joins at the next end of a step, 5 s after a's first one began at 1.5, and decodes one token together with a.
    assert bench.end("b", Role.DECODE) == pytest.approx(1.5 + 6 * 0.625 + 0.75)


def test_a_cached_prefix_moves_from_the_start_of_service() -> None:
    bench = Bench(network_bytes_per_s=1000.0)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a.0.0", prompt=200, target=2)
    bench.ask_pair(100.0, prefill, decode, "a.1.0", prompt=300, target=2)
    bench.run()
    # 200 cached tokens take 2 s from 100.0 on; the chunk of 100 is there at 101.5 and takes 1 s after them.
    assert bench.end("a.1.0", Role.PREFILL) == pytest.approx(103.0)
    assert [job.cached_prompt for _, job in bench.jobs["a.1.0"]] == [200, 0]


def test_both_links_are_first_come_first_served() -> None:
    bench = Bench(network_bytes_per_s=1000.0, ranks=1)
    first, second, decode = bench.core(Role.PREFILL), bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, first, decode, "a", prompt=100, target=2)
    bench.ask_pair(0.0, second, decode, "b", prompt=100, target=2)
    bench.run()
    # Both are prefilled at 1.5; the decode rank takes in one after the other.
    assert bench.end("a", Role.PREFILL) == pytest.approx(2.5)
    assert bench.end("b", Role.PREFILL) == pytest.approx(3.5)


def test_a_prefill_starts_when_a_decode_rank_has_room() -> None:
    bench = Bench(ranks=1, kv_tokens=300)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=200, target=50)
    bench.ask_pair(0.0, prefill, decode, "b", prompt=150, target=2)
    bench.run()
    # Two chunks and the last one's 0.1 s on the link.
    assert bench.end("a", Role.PREFILL) == pytest.approx(3.1)
    a = 3.1 + 49 * 0.625
    assert bench.end("a", Role.DECODE) == pytest.approx(a)
    # b's chunks of 100 and 50 take 1.5 + 1.0 s from then on; 0.05 s for the last tokens.
    assert bench.end("b", Role.PREFILL) == pytest.approx(a + 2.5 + 0.05)
    assert bench.end("b", Role.DECODE) == pytest.approx(a + 2.5 + 0.05 + 0.625)


def test_a_decode_of_one_token_leaves_its_room_to_the_next() -> None:
    bench = Bench(ranks=1, kv_tokens=300)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    for name in ("a", "b"):
        bench.ask_pair(0.0, prefill, decode, name, prompt=200, target=1)
    bench.run()
    # The prefill has made the only token.
    assert bench.end("a", Role.DECODE) == pytest.approx(3.1)
    assert bench.end("b", Role.DECODE) == pytest.approx(6.2)


def test_a_full_batch_keeps_what_has_arrived_waiting() -> None:
    bench = Bench(ranks=1, max_running=1)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=50, target=5)
    bench.ask_pair(0.0, prefill, decode, "b", prompt=50, target=5)
    bench.run()
    # Both share a chunk, 1.5 s, and the link: at 1.55 and 1.6.
    assert bench.end("a", Role.DECODE) == pytest.approx(1.55 + 4 * 0.625)
    assert bench.end("b", Role.DECODE) == pytest.approx(1.55 + 8 * 0.625)


@pytest.mark.parametrize("gone", ["prefill", "decode"])
@pytest.mark.parametrize("time", [0.5, 2.0, 3.05])
def test_where_one_side_ends_before_the_handover_the_other_ends_too(gone: str, time: float) -> None:
    bench = Bench()
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=200, target=5)
    core = prefill if gone == "prefill" else decode
    bench.at(time, lambda: core.abort(next(job for c, job in bench.jobs["a"] if c is core), bench.now))
    bench.run()
    assert bench.seen["a/prefill"].finish is bench.seen["a/decode"].finish is FinishReason.ABORT
    assert bench.ledger.handed == 0
    assert bench.ledger.lost == bench.statistics.moved_tokens


def test_kv_of_other_weights_is_not_handed_over() -> None:
    bench = Bench()
    prefill, decode = bench.core(Role.PREFILL, version=1), bench.core(Role.DECODE, version=2)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=200, target=5)
    bench.run()
    assert bench.seen["a/prefill"].finish is bench.seen["a/decode"].finish is FinishReason.ABORT
    assert bench.statistics.moved_tokens == 0


# KV pools.


def overflowing(bench: Bench) -> Bench:
    """Two decodes that outgrow a rank of 120 tokens."""
    core = bench.core()
    bench.ask(0.0, core, "a", prompt=40, target=40)
    bench.ask(0.0, core, "b", prompt=30, target=40)
    bench.run()
    # One chunk of 70, 1.2 s; contexts of 41 and 31 grow to 120 in 24 steps of 0.75 s; then b, the younger, is retracted.
    # Alone, a makes its last 15 tokens in steps of 0.625 s.
    assert bench.statistics.retracted == 1
    assert bench.end("a") == pytest.approx(1.2 + 24 * 0.75 + 15 * 0.625)
    assert bench.seen["a/mixed"].tokens == bench.seen["b/mixed"].tokens == 40
    return bench


def test_the_youngest_decode_makes_room_and_is_prefilled_again() -> None:
    bench = overflowing(Bench(ranks=1, kv_tokens=120))
    # Its prompt of 30 and the 25 tokens that it had: 0.55 + 0.5 s, which makes one more; 14 are left.
    assert bench.end("b") == pytest.approx(bench.end("a") + 1.05 + 14 * 0.625)
    assert bench.statistics.prefilled_tokens == 70 + 55


def test_a_retracted_decode_comes_back_from_the_kv_store() -> None:
    bench = overflowing(Bench(ranks=1, kv_tokens=120, store=True))
    # All but the last of the 55 tokens had a KV cache; that one is computed, 0.01 + 0.5 s.
    assert bench.end("b") == pytest.approx(bench.end("a") + 0.51 + 14 * 0.625)
    assert (bench.statistics.fetched_tokens, bench.statistics.prefilled_tokens) == (54, 70 + 1)


def test_a_decode_instance_prefills_what_it_retracted() -> None:
    bench = Bench(ranks=1, kv_tokens=120)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=40, target=60)
    bench.ask_pair(0.0, prefill, decode, "b", prompt=30, target=60)
    bench.run()
    assert bench.statistics.retracted == 1
    assert bench.seen["a/decode"].tokens == bench.seen["b/decode"].tokens == 60
    assert bench.statistics.decoded_tokens == 120


def test_a_decode_that_joins_another_does_not_take_the_room_that_it_is_growing_into() -> None:
    bench = Bench(ranks=1, kv_tokens=200, network_bytes_per_s=10.0)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=50, target=100)
    bench.ask_pair(60.0, prefill, decode, "b", prompt=60, target=100)
    bench.run()
    # From 51.0 on a alone would grow to 150 in one event. With the 61 that are kept for b, which needs until 121.1 to
    # arrive, it is full at 139 and is retracted itself.
    assert bench.statistics.retracted == 1
    assert bench.seen["a/decode"].tokens == bench.seen["b/decode"].tokens == 100
    assert bench.end("a", Role.DECODE) > bench.end("b", Role.DECODE)


def test_a_retracted_decode_reports_as_often_as_any_other() -> None:
    bench = Bench(ranks=1, kv_tokens=120)
    core = bench.core(stream_s=30.0)
    bench.ask(0.0, core, "a", prompt=40, target=40)
    bench.ask(0.0, core, "b", prompt=30, target=90)
    bench.run()
    # Retracted at 19.2 and back at 29.625, before its first report would have been due.
    assert [time for time, _, _ in bench.seen["b/mixed"].reports] == pytest.approx([1.2, 29.625, 59.625, 69.625])


def test_a_retracted_decode_goes_to_a_rank_with_room() -> None:
    bench = Bench(kv_tokens=120)
    core = bench.core()
    for name, prompt, target in [("a", 40, 5), ("b", 30, 60), ("c", 30, 60)]:
        bench.ask(0.0, core, name, prompt, target)
    bench.run()
    # b and c share a rank: 1.1 s for their chunk, 29 steps of 0.75 until they fill it. a's rank is free by then: c waits
    # for the step that begins, is prefilled there (60 tokens, its 31st output) and makes its last 29.
    assert bench.statistics.retracted == 1
    assert bench.end("c") == pytest.approx(1.1 + 29 * 0.75 + 0.625 + 1.1 + 29 * 0.625)


def test_a_prompt_in_service_is_not_blocked_by_a_decode_that_it_displaced() -> None:
    bench = Bench(ranks=1, kv_tokens=420)
    core = bench.core(prefill_every=50)
    bench.ask(0.0, core, "a", prompt=150, target=100)
    bench.ask(3.0, core, "b", prompt=200, target=2)
    bench.run()
    # b holds 201 from its first chunk on; a fills the rest before the second one may come. Both chunks of a prompt with
    # its room are worth more than a decode that can only come back after it.
    assert bench.statistics.retracted == 1
    assert bench.end("b") < bench.end("a")


def test_retracted_decodes_come_before_new_ones() -> None:
    bench = Bench(ranks=1, kv_tokens=120)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a", prompt=40, target=40)
    bench.ask_pair(0.0, prefill, decode, "b", prompt=30, target=40)
    bench.ask_pair(5.0, prefill, decode, "c", prompt=75, target=2)
    bench.run()
    assert bench.statistics.retracted == 1
    assert bench.end("a", Role.DECODE) < bench.end("b", Role.DECODE) < bench.end("c", Role.DECODE)


def test_who_joins_others_leaves_a_hundredth_free() -> None:
    bench = Bench(ranks=1, kv_tokens=120)
    core = bench.core()
    bench.ask(0.0, core, "a", prompt=59, target=20)
    bench.ask(0.0, core, "b", prompt=59, target=20)
    bench.run()
    # 60 + 60 would fill the pool.
    assert bench.statistics.retracted == 0
    assert bench.end("b") == pytest.approx(bench.end("a") + 1.09 + 19 * 0.625)


def test_a_mixed_rank_runs_so_many_requests_at_once() -> None:
    bench = Bench(ranks=1, max_running=1)
    core = bench.core()
    bench.ask(0.0, core, "a", prompt=50, target=5)
    bench.ask(0.0, core, "b", prompt=50, target=5)
    bench.run()
    assert bench.end("b") == pytest.approx(2 * bench.end("a"))


def cached(bench: Bench, name: str) -> int:
    return bench.jobs[name][0][1].cached_prompt


def test_prefixes_are_evicted_least_recently_used_first() -> None:
    bench = Bench(ranks=1, kv_tokens=1000)
    core = bench.core()
    for time, name in [(0, "a.0"), (20, "b.0"), (40, "a.1"), (60, "c.0"), (80, "b.1"), (100, "a.2")]:
        bench.ask(time, core, name, prompt=400 + 10 * int(name[2]), target=2)
    bench.run()
    # a and b take 401 each; a is used again, so c's 401 cost b its place; b's return then costs a its place.
    assert {name: cached(bench, name) for name in bench.jobs} == {
        "a.0": 0,
        "b.0": 0,
        "a.1": 401,
        "c.0": 0,
        "b.1": 0,
        "a.2": 0,
    }


def test_the_first_prompt_of_a_group_is_cached_for_its_other_members() -> None:
    bench = Bench(ranks=1)
    core = bench.core()
    bench.ask(0.0, core, "a.0", prompt=50, target=5, question=7)
    bench.ask(9.0, core, "b.0", prompt=50, target=5, question=7)
    bench.ask(18.0, core, "c.0", prompt=50, target=5, question=8)
    bench.run()
    # One token must always be computed.
    assert [cached(bench, name) for name in ("a.0", "b.0", "c.0")] == [0, 49, 0]


def test_a_group_is_forgotten_with_the_last_context_that_starts_with_its_prompt() -> None:
    bench = Bench(ranks=1, kv_tokens=500)
    core = bench.core()
    bench.ask(0.0, core, "a.0", prompt=50, target=5, question=7)
    bench.ask(20.0, core, "x.0", prompt=490, target=5)
    bench.ask(60.0, core, "b.0", prompt=50, target=5, question=7)
    bench.run()
    assert cached(bench, "b.0") == 0


def test_a_trajectory_returns_to_the_rank_with_its_prefix_unless_that_has_much_more_to_do() -> None:
    bench = Bench()
    core = bench.core(Role.PREFILL)
    decode = bench.core(Role.DECODE)
    bench.ask_pair(0.0, core, decode, "a.0", prompt=200, target=2)
    bench.ask_pair(20.0, core, decode, "b.0", prompt=300, target=2)
    bench.ask_pair(20.1, core, decode, "a.1", prompt=250, target=2)
    bench.run()
    ranks = {name: legs[0][1].rank.index for name, legs in bench.jobs.items()}
    # b goes to the first of two idle ranks, where a's prefix of 200 is worth less than b's 300 to wait for.
    assert ranks == {"a.0": 0, "b.0": 0, "a.1": 1}
    bench.ask_pair(60.0, core, decode, "c.0", prompt=100, target=2)
    bench.ask_pair(60.1, core, decode, "a.2", prompt=400, target=2)
    bench.run()
    assert [bench.jobs[name][0][1].rank.index for name in ("c.0", "a.2")] == [0, 1]
    assert cached(bench, "a.2") == 250


def test_a_queued_request_keeps_its_prefix_from_being_the_next_to_go() -> None:
    bench = Bench(ranks=1, kv_tokens=1000)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    for time, name, prompt in [(0, "a.0", 300), (20, "b.0", 300), (40, "x", 150), (40, "y", 300), (40.1, "a.1", 350)]:
        bench.ask_pair(time, prefill, decode, name, prompt, target=2)
    bench.run()
    # y needs the place of a or of b; a's was used earlier, but is waited for.
    assert cached(bench, "a.1") == 300


def rank_of(bench: Bench, name: str) -> int:
    return bench.jobs[name][0][1].rank.index


def test_a_request_goes_to_the_rank_that_has_the_least_kv_now() -> None:
    bench = Bench()
    core = bench.core()
    for time, name, prompt in [(0.0, "a", 40), (0.1, "b", 100), (0.2, "c", 40), (50.0, "d", 30)]:
        bench.ask(time, core, name, prompt, target=200)
    bench.run()
    # a and c have 80 against b's 100 at first; but they grow by two tokens a step.
    assert [rank_of(bench, name) for name in "abcd"] == [0, 1, 0, 1]


@pytest.mark.parametrize(("others", "home"), [(140, True), (200, False)])
def test_a_mixed_rank_keeps_its_trajectories_up_to_half_more_load(others: int, home: bool) -> None:
    bench = Bench()
    core = bench.core()
    bench.ask(0.0, core, "a.0", prompt=10, target=2)
    bench.ask(9.0, core, "x", prompt=others, target=500)
    bench.ask(9.1, core, "y", prompt=100, target=500)
    bench.ask(13.0, core, "a.1", prompt=20, target=2)
    bench.run()
    assert [rank_of(bench, name) for name in ("a.0", "x", "y")] == [0, 0, 1]
    assert (rank_of(bench, "a.1") == 0) is home


# The KV store.


def test_a_prefix_is_fetched_where_that_is_faster_than_computing_it() -> None:
    bench = Bench(store=True, store_bytes_per_s=1000.0)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a.0", prompt=300, target=101)
    bench.ask_pair(500.0, prefill, decode, "a.1", prompt=500, target=2)
    bench.run()
    # The rank has 300; the store 400 (the last token has no KV cache): 100 more take 1 s, to compute them 1.5 s.
    job = bench.jobs["a.1"][0][1]
    assert (job.cached, job.fetched) == (300, 100)
    assert bench.end("a.1", Role.PREFILL) == pytest.approx(500.0 + 1.0 + 1.5 + 0.1)
    assert bench.statistics.fetched_tokens == 100


def test_what_was_fetched_is_of_no_use_without_the_prefix_before_it() -> None:
    bench = Bench(store=True, store_bytes_per_s=1000.0, kv_tokens=1000, ranks=1)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a.0", prompt=300, target=101)
    bench.ask_pair(500.0, prefill, decode, "a.1", prompt=500, target=2)
    bench.ask_pair(500.0, prefill, bench.core(Role.DECODE), "b.0", prompt=800, target=2)
    bench.run()
    # While a's next 100 tokens come, b takes the place of its first 300.
    job = bench.jobs["a.1"][0][1]
    assert (job.cached, job.fetched) == (0, 0)


def test_the_decode_side_writes_the_context_when_it_ends() -> None:
    bench = Bench(store=True, store_bytes_per_s=100.0)
    assert bench.store is not None
    store, delays = bench.store, []
    for time in (5.0, 10.0):
        bench.at(time, lambda: delays.append(store.delay(0.0, bench.now)))
    bench.ask_pair(0.0, bench.core(Role.PREFILL), bench.core(Role.DECODE), "a", prompt=250, target=5)
    bench.run()
    # The prefill is over at 4.05, the decode at 6.55: 254 tokens then take 25.4 s.
    assert delays == [0.0, pytest.approx(6.55 + 25.4 - 10.0)]


def test_a_slow_store_is_not_used() -> None:
    bench = Bench(store=True, store_bytes_per_s=500.0)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a.0", prompt=300, target=101)
    bench.ask_pair(500.0, prefill, decode, "a.1", prompt=500, target=2)
    bench.run()
    assert bench.end("a.1", Role.PREFILL) == pytest.approx(500.0 + 3.0 + 0.1)
    assert bench.statistics.fetched_tokens == 0


def test_what_waits_on_the_stores_link_counts() -> None:
    bench = Bench(store=True, store_bytes_per_s=1000.0)
    prefill, decode = bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a.0", prompt=300, target=101)
    assert bench.store is not None
    store = bench.store
    bench.at(500.0, lambda: store.move(600.0, 500.0) and None)
    bench.ask_pair(500.0, prefill, decode, "a.1", prompt=500, target=2)
    bench.run()
    assert bench.statistics.fetched_tokens == 0


def test_a_cancelled_request_finds_its_kv_on_another_instance() -> None:
    bench = Bench(store=True)
    first, second = bench.core(), bench.core()
    bench.ask(0.0, first, "a.0.0", prompt=250, target=50)
    bench.abort(5.0, "a.0.0")
    # The abort took effect at 5.25 with 3 tokens: 252 of the context's 253 have a KV cache.
    bench.ask(8.0, second, "a.0.1", prompt=253, target=47)
    bench.run()
    assert bench.seen["a.0.0/mixed"].tokens == 3
    assert bench.jobs["a.0.1"][0][1].fetched == 252


def test_a_prefill_that_is_cancelled_during_its_handover_is_found_elsewhere() -> None:
    bench = Bench(store=True, network_bytes_per_s=100.0)
    prefill, other, decode = bench.core(Role.PREFILL), bench.core(Role.PREFILL), bench.core(Role.DECODE)
    bench.ask_pair(0.0, prefill, decode, "a.0.0", prompt=200, target=2)
    bench.abort(10.0, "a.0.0")
    bench.ask_pair(30.0, other, decode, "a.0.1", prompt=200, target=2)
    bench.run()
    assert bench.seen["a.0.0/prefill"].reports == [(10.0, 0, FinishReason.ABORT)]
    assert bench.jobs["a.0.1"][0][1].fetched == 199


def test_kv_of_other_weights_is_not_fetched() -> None:
    bench = Bench(store=True)
    old, new, another = bench.core(), bench.core(version=1), bench.core(version=1)
    bench.ask(0.0, old, "a.0", prompt=250, target=5)
    bench.ask(20.0, new, "a.1", prompt=300, target=5)
    bench.ask(40.0, old, "a.2", prompt=350, target=5)
    bench.ask(60.0, another, "a.3", prompt=400, target=5)
    bench.ask(80.0, new, "a.4", prompt=450, target=5)
    bench.run()
    found = {name: (legs[0][1].cached, legs[0][1].fetched) for name, legs in bench.jobs.items()}
    # Each instance still has what it cached itself; the store keeps the context of the newest weights.
    assert found == {"a.0": (0, 0), "a.1": (0, 0), "a.2": (254, 0), "a.3": (0, 304), "a.4": (304, 100)}


# Against the naive simulation.


@st.composite
def schedules(draw: st.DrawFn) -> list[Ask]:
    """Requests with odd times, so that none meets a step boundary exactly."""
    asks, time = [], 0.0
    for index in range(draw(st.integers(1, 12))):
        time += draw(st.integers(0, 40)) * 0.25 + 0.001 * math.pi
        prompt, target = draw(st.integers(1, 320)), draw(st.integers(1, 40))
        abort = draw(st.one_of(st.none(), st.integers(0, 60)))
        asks.append(Ask(time, prompt, target, None if abort is None else time + abort * 0.5 + 0.0001 * (index + 1)))
    return asks


def simulated(asks: list[Ask], costs: Costs, ranks: int, every: int) -> tuple[list[tuple[float, int]], Bench]:
    bench = Bench(costs, ranks=ranks, kv_tokens=100_000, max_running=1000)
    core = bench.core(prefill_every=every)
    for index, ask in enumerate(asks):
        bench.ask(ask.time, core, f"t{index}", ask.prompt, ask.target)
        if ask.abort is not None:
            bench.abort(ask.abort, f"t{index}")
    bench.run()
    seen = [bench.seen[f"t{index}/mixed"] for index in range(len(asks))]
    return [(one.end, one.tokens) for one in seen], bench


def distances(asks: list[Ask], costs: Costs, ranks: int, every: int) -> Iterator[tuple[float, int]]:
    jumped, _ = simulated(asks, costs, ranks, every)
    for (end, tokens), (naive_end, naive_tokens) in zip(
        jumped, NaiveEngine(asks, costs, ranks, chunk=100, every=every).run(), strict=True
    ):
        yield abs(end - naive_end), abs(tokens - naive_tokens)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 3), st.sampled_from([0, 1, 4]))
def test_jumps_equal_single_steps(asks: list[Ask], ranks: int, every: int) -> None:
    for seconds, tokens in distances(asks, Costs(prefix=0.0005), ranks, every):
        assert seconds < 1e-6
        assert tokens == 0


@settings(max_examples=40, deadline=None)
@given(schedules(), st.sampled_from([0, 4]))
def test_jumps_of_one_rank_equal_single_steps_with_growing_contexts(asks: list[Ask], every: int) -> None:
    """Of one rank step times are linear in the steps, so their mean is exact."""
    for seconds, tokens in distances(asks, Costs(context=0.0004), 1, every):
        assert seconds < 1e-6
        assert tokens == 0


@settings(max_examples=40, deadline=None)
@given(schedules())
def test_jumps_of_several_ranks_are_off_by_less_than_a_step(asks: list[Ask]) -> None:
    """The slowest rank can change within a jump: then the mean is a little too much."""
    for ask in asks:
        ask.abort = None
    for seconds, tokens in distances(asks, Costs(context=0.0001), 3, 0):
        assert seconds < 2.0
        assert tokens == 0


@settings(max_examples=40, deadline=None)
@given(schedules(), st.integers(1, 3), st.integers(330, 900), st.booleans())
def test_whatever_comes_pools_hold_and_books_balance(asks: list[Ask], ranks: int, kv: int, store: bool) -> None:
    bench = Bench(Costs(context=0.0004), ranks=ranks, kv_tokens=max(kv, 365), max_running=3, store=store)
    prefill, decode, mixed = bench.core(Role.PREFILL), bench.core(Role.DECODE), bench.core(stream_s=3.0)
    for index, ask in enumerate(asks):
        name = f"t{index % 5}.{index}"
        if index % 2:
            bench.ask(ask.time, mixed, name, ask.prompt, ask.target)
        else:
            bench.ask_pair(ask.time, prefill, decode, name, ask.prompt, ask.target)
        if ask.abort is not None:
            bench.abort(ask.abort, name)
    for time in range(0, 200, 7):
        bench.at(time + 0.5, bench.check)
    bench.run()
    assert [core.jobs for core in bench.cores] == [{}, {}, {}]
    for index, ask in enumerate(asks):
        seen = bench.seen[f"t{index % 5}.{index}/{'mixed' if index % 2 else 'decode'}"]
        assert seen.tokens == ask.target if seen.finish is FinishReason.STOP else ask.abort is not None


# Statistics.


def test_a_histogram_knows_its_percentiles() -> None:
    histogram = Histogram()
    for value, weight in [(0.01, 50.0), (0.1, 45.0), (1.0, 5.0)]:
        histogram.add(value, weight)
    assert histogram.percentile(0.5) == pytest.approx(0.01, rel=0.02)
    assert histogram.percentile(0.9) == pytest.approx(0.1, rel=0.02)
    assert histogram.percentile(0.99) == pytest.approx(1.0, rel=0.02)
    assert math.isnan(Histogram().percentile(0.5))


def test_latencies_are_shared_over_the_bins_that_their_tokens_lie_in() -> None:
    statistics = Statistics()
    statistics.add_latency(start=8.0, end=28.0, latency=0.5, tokens=40)
    assert statistics.itl_over_time == {
        0: (pytest.approx(2.0), pytest.approx(4.0)),
        1: (pytest.approx(10.0), pytest.approx(20.0)),
        2: (pytest.approx(8.0), pytest.approx(16.0)),
    }


def test_books_that_do_not_balance_say_which() -> None:
    with pytest.raises(ConservationError, match=r"moved = handed over \+ lost \+ on the way: 5 != 4"):
        Ledger(handed=4).check(Statistics(moved_tokens=5), prefilling=0, moving=0, untold=0)
