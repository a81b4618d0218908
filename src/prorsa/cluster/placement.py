"""Where a turn is placed: prefix affinity on prefill, room for the KV cache on decode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from prorsa.cluster.instances import Instance
from prorsa.cluster.turns import TurnRequest

REMEMBERED = 1 << 16
"""Prefixes whose place is remembered, the latest used ones."""

Key = str | int


class Affinity:
    """Which instances served a prefix last: that of the trajectory, or the same first prompt (the rest of its group).

    A place is forgotten when its instance has lost its cache since.
    """

    def __init__(self) -> None:
        self._places: OrderedDict[Key, tuple[Instance, int, Instance, int]] = OrderedDict()

    def remember(self, request: TurnRequest, prefill: Instance, decode: Instance) -> None:
        place = (prefill, prefill.cache_epoch, decode, decode.cache_epoch)
        for key in self._keys(request):
            self._places[key] = place
            self._places.move_to_end(key)
        while len(self._places) > REMEMBERED:
            self._places.popitem(last=False)

    def prefill(self, request: TurnRequest) -> Instance | None:
        return next((i for i, epoch, _, _ in self._found(request) if i.cache_epoch == epoch), None)

    def decode(self, request: TurnRequest) -> Instance | None:
        return next((i for _, _, i, epoch in self._found(request) if i.cache_epoch == epoch), None)

    def _found(self, request: TurnRequest) -> list[tuple[Instance, int, Instance, int]]:
        return [self._places[key] for key in self._keys(request) if key in self._places]

    @staticmethod
    def _keys(request: TurnRequest) -> list[Key]:
        """The trajectory first. Its group is known by its first prompt, which all members share (a hash is enough)."""
        return [request.trajectory, hash(request.input_ids)] if request.turn == 0 else [request.trajectory]


def fitting(candidates: Sequence[Instance], need: int) -> list[Instance]:
    """Those with room for `need` KV-cache tokens.

    An instance without any decode takes every request: one that can never fit is the engine's to refuse.
    """
    return [i for i in candidates if i.decodes == 0 or i.kv_tokens + need <= i.capacity]


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
