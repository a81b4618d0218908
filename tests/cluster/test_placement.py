from __future__ import annotations

from collections.abc import Sequence

from fake_engine import FakeEngine, World
from hypothesis import given
from hypothesis import strategies as st

from prorsa.cluster.instances import Instance
from prorsa.cluster.placement import Resident, choose_moves, choose_way
from prorsa.engines.protocol import Role

CONTEXTS = st.lists(st.integers(1, 400), max_size=12)


def filled(*contexts: Sequence[int], capacity: int = 1000) -> tuple[list[Instance], list[Resident]]:
    """Instances i0, i1, ... that decode contexts of these lengths as r0.0, r0.1, ..."""
    instances, residents = [], []
    for number, lengths in enumerate(contexts):
        instance = Instance(FakeEngine(f"i{number}", World(), Role.DECODE), Role.DECODE, capacity)
        instances.append(instance)
        for index, length in enumerate(lengths):
            instance.begin_decode(f"r{number}.{index}", length)
            residents.append(Resident(f"r{number}.{index}", instance, length, length))
    return instances, residents


def moved(instances: list[Instance], residents: list[Resident], most: int) -> list[tuple[str, str]]:
    return [(rid, target.name) for rid, target in choose_moves(instances, instances, residents, most)]


def test_the_shortest_contexts_move_until_either_the_batches_or_the_kv_are_even() -> None:
    # 4 decodes against none: two each.
    instances, residents = filled([100, 200, 20, 10], [])
    assert moved(instances, residents, 10) == [("r0.3", "i1"), ("r0.2", "i1")]
    # 3 against none: a second move would only exchange 2 and 1.
    instances, residents = filled([30, 20, 10], [])
    assert moved(instances, residents, 10) == [("r0.2", "i1")]
    # The KV cache: 10 + 10 + 400 tokens in three decodes against 390 in one; 420 is not 1.1 times 400.
    instances, residents = filled([10, 10, 400], [390])
    assert moved(instances, residents, 10) == []


def test_a_prefix_is_no_reason_to_crowd_a_mixed_instance() -> None:
    for decodes, chosen in ((4, "mixed"), (5, "apart")):
        prefill, decode = (
            Instance(FakeEngine(role, World(), role), role, 1000) for role in (Role.PREFILL, Role.DECODE)
        )
        mixed = Instance(FakeEngine("m", World(), Role.MIXED), Role.MIXED, 1000)
        for index in range(3):
            decode.begin_decode(f"d{index}", 10)
        for index in range(decodes):
            mixed.begin_decode(f"m{index}", 10)
        # It holds the prefix, and has no more than 1.1 times the 3 decodes and this one, or more.
        way = choose_way([(prefill, decode), (mixed, mixed)], 500, 10, mixed)
        assert way == ((mixed, mixed) if chosen == "mixed" else (prefill, decode))


def test_no_more_move_than_are_asked_for_and_to_the_emptiest_first() -> None:
    instances, residents = filled([10] * 20, [5], [])
    assert moved(instances, residents, 3) == [("r0.0", "i2"), ("r0.1", "i1"), ("r0.2", "i2")]
    assert moved(instances, residents, 0) == []
    assert moved([], [], 3) == []


def test_decodes_leave_instances_to_which_none_can_move() -> None:
    instances, residents = filled([10] * 8, [10] * 8, [])
    moves = choose_moves(instances, instances[1:2], residents, 3)
    assert moves == []
    moves = choose_moves(instances, instances[2:], residents, 3)
    assert {target.name for _, target in moves} == {"i2"}


@given(st.lists(CONTEXTS, min_size=1, max_size=5), st.integers(1, 8))
def test_moves_even_out_and_end(contexts: list[list[int]], most: int) -> None:
    instances, residents = filled(*contexts, capacity=5000)
    there = {resident.rid: resident for resident in residents}
    fullest, emptiest = (of(i.kv_tokens for i in instances) for of in (max, min))
    for _ in range(20 * len(residents) + 1):
        moves = choose_moves(instances, instances, there.values(), most)
        assert len(moves) <= most
        if not moves:
            break
        for rid, target in moves:
            resident = there[rid]
            source = resident.instance
            before = source.kv_tokens, source.decodes
            source.end_decode(rid)
            target.begin_decode(rid, resident.reserved)
            there[rid] = Resident(rid, target, resident.context, resident.reserved)
            assert before[0] > target.kv_tokens
            assert before[1] > target.decodes
    else:
        raise AssertionError("there was always another one to move")
    assert emptiest <= min(i.kv_tokens for i in instances)
    assert max(i.kv_tokens for i in instances) <= fullest
