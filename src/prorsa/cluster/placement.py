"""Where a turn is placed: prefix affinity on prefill, room for the KV cache on decode, and the shorter wait between the two
ways, over a pair of instances or through a mixed one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prorsa.cluster.instances import Instance
from prorsa.cluster.turns import TurnRequest

REMEMBERED = 1 << 16
"""Prefixes whose place is remembered, the latest used ones."""

UNEVEN = 1.1
"""A decode moves where the instance that it leaves is so many times as full as the one that it goes to will be, and where a
request has two ways it takes none to an instance that is so much fuller than the other."""

Prefix = str | int
Way = tuple[Instance, Instance]
"""(prefill, decode); the same one twice where it is mixed."""


def prefixes(request: TurnRequest) -> tuple[Prefix, ...]:
    """What its prompt may share with earlier ones: the trajectory's context first, then the prompt of its group, by which
    all members begin (a hash is enough)."""
    return (request.trajectory, hash(request.input_ids)) if request.turn == 0 else (request.trajectory,)


class Affinity:
    """Which instances served a prefix last. A place is forgotten when its instance has lost its cache since."""

    def __init__(self) -> None:
        self._places: OrderedDict[Prefix, tuple[Instance, int, Instance, int]] = OrderedDict()

    def remember(self, known: Sequence[Prefix], prefill: Instance, decode: Instance) -> None:
        place = (prefill, prefill.cache_epoch, decode, decode.cache_epoch)
        for prefix in known:
            self._places[prefix] = place
            self._places.move_to_end(prefix)
        while len(self._places) > REMEMBERED:
            self._places.popitem(last=False)

    def find(self, sought: Sequence[Prefix]) -> tuple[Instance | None, Instance | None]:
        """The (prefill, decode) instances that still have the first of the prefixes that any has."""
        on_prefill = on_decode = None
        for prefix in sought:
            if (place := self._places.get(prefix)) is not None:
                prefill, prefill_epoch, decode, decode_epoch = place
                if on_prefill is None and prefill.cache_epoch == prefill_epoch:
                    on_prefill = prefill
                if on_decode is None and decode.cache_epoch == decode_epoch:
                    on_decode = decode
        return on_prefill, on_decode


def choose_prefill(candidates: Sequence[Instance], tokens: int, favourite: Instance | None) -> Instance | None:
    """The least loaded; the favourite, which holds the prefix, while waiting there costs no more than a prefill anew."""
    if not candidates:
        return None
    least = min(candidates, key=lambda instance: instance.load)
    if favourite is not None and favourite in candidates and favourite.load <= least.load + tokens:
        return favourite
    return least


def choose_decode(candidates: Sequence[Instance], need: int, former: Instance | None) -> Instance | None:
    """The one whose KV cache is least used after placement, the former one among equals."""
    if not candidates:
        return None
    return min(
        candidates, key=lambda instance: ((instance.kv_tokens + need) / instance.capacity, instance is not former)
    )


def choose_way(ways: Sequence[Way], tokens: int, need: int, favourite: Instance | None) -> Way:
    """The (prefill, decode) pair, or the mixed instance twice, on which the request waits least: by the prompts before it
    and its own where the prefix is not held, then by how full the KV cache is after placement.

    A way to a decode instance that has clearly more decodes than another's is none: they would take longer there than a
    prefill does."""

    def wait(way: Way) -> tuple[int, float]:
        prefill, decode = way
        return prefill.prefill_tokens + tokens * (prefill is not favourite), (decode.kv_tokens + need) / decode.capacity

    fewest = min(decode.decodes for _, decode in ways)
    return min((way for way in ways if way[1].decodes <= UNEVEN * (fewest + 1)), key=wait)


@dataclass(frozen=True, slots=True)
class Resident:
    """A request that decodes."""

    rid: str
    instance: Instance
    context: int
    """Tokens that have to be prefilled, or fetched, where it moves."""
    reserved: int
    """KV-cache tokens that its instance has set aside for it."""


def choose_moves(
    instances: Sequence[Instance], targets: Sequence[Instance], residents: Iterable[Resident], most: int
) -> list[tuple[str, Instance]]:
    """Which decodes leave fuller `instances`, and for which emptier `targets` (some of them): `most` at a time, the shortest
    contexts first.

    The instance that a move is from was fuller, both by the share of its KV cache and by its batch, than the one that it goes
    to is after it. So every move evens out, and moves end.
    """
    kv = {instance.name: instance.kv_tokens for instance in instances}
    batch = {instance.name: instance.decodes for instance in instances}

    def share(instance: Instance) -> float:
        return kv[instance.name] / instance.capacity

    def evens(source: Instance, target: Instance, tokens: int) -> bool:
        share_there = (kv[target.name] + tokens) / target.capacity
        return share(source) >= UNEVEN * share_there and batch[source.name] >= UNEVEN * (batch[target.name] + 1)

    emptiest = min(targets, key=share, default=None)
    if emptiest is None or not any(evens(instance, emptiest, 0) for instance in instances):
        return []
    moves: list[tuple[str, Instance]] = []
    for resident in sorted(residents, key=lambda resident: resident.context):
        if len(moves) == most:
            break
        emptiest = min(targets, key=share)
        if evens(resident.instance, emptiest, resident.reserved):
            for instance, sign in ((resident.instance, -1), (emptiest, 1)):
                kv[instance.name] += sign * resident.reserved
                batch[instance.name] += sign
            moves.append((resident.rid, emptiest))
    return moves
