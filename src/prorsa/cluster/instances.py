"""Engine instances as the router and the switcher see them, and the routing pool of each role.

An instance is in a pool exactly while it is ROUTED. Its books (outstanding prefills, reserved KV cache) hold one entry for
each attempt that uses it; they are what this process knows without asking the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from enum import StrEnum

from prorsa.allocation import Allocation
from prorsa.engines.protocol import Engine, Role


class InstanceState(StrEnum):
    ROUTED = "routed"
    DRAINING = "draining"
    """Out of the pool; its requests are being cancelled."""
    FLIPPING = "flipping"
    DEAD = "dead"
    """Out of the pool until a restart has brought it back."""
    STOPPED = "stopped"
    """Gone for good: its process was ended, so that another instance has its GPUs."""


class Instance:
    """One engine with its role, its state and its books. `capacity` is in KV-cache tokens."""

    def __init__(self, engine: Engine, role: Role, capacity: int) -> None:
        self.engine = engine
        self.name = engine.name
        self.role = role
        self.capacity = capacity
        self.state = InstanceState.ROUTED
        self.cache_epoch = 0
        """Counts the times that its resident prefixes were lost: flips, restarts, weight updates."""
        self.refuses_until = 0.0
        """It refused or failed a request: nothing is sent to it before this time."""
        self.failures = 0
        """How often it did since it last gave anything."""
        self.stalls = 0
        """How many requests fell silent on it since it last gave anything."""
        self.gave_at = 0.0
        """When it last gave anything, loop time."""
        self.queued = 0
        """How many requests waited in its engine when that was last asked."""
        self.problem: str | None = None
        """Why it is dead, and how its restart fares."""
        self.unused = asyncio.Event()
        """Set while its books are empty."""
        self.unused.set()
        self._prefilling: dict[str, int] = {}
        self._decoding: dict[str, int] = {}
        self.prefill_tokens = 0
        """Full prompt tokens of its outstanding prefills."""
        self.kv_tokens = 0
        """KV-cache tokens that its decodes have or are promised."""

    def __repr__(self) -> str:
        return f"Instance({self.name}, {self.role}, {self.state}, {self.prefills} prefills, {self.decodes} decodes)"

    @property
    def prefills(self) -> int:
        return len(self._prefilling)

    @property
    def decodes(self) -> int:
        return len(self._decoding)

    @property
    def load(self) -> int:
        """Tokens that a drain would disturb."""
        return self.prefill_tokens + self.kv_tokens

    @property
    def rids(self) -> list[str]:
        """The attempts that use it, oldest first."""
        return list(self._prefilling | self._decoding)

    def reserved(self, rid: str) -> int:
        """KV-cache tokens that one of its decodes has or is promised."""
        return self._decoding[rid]

    def has_prefill_slot(self, slots: int, now: float) -> bool:
        return len(self._prefilling) < slots and self.refuses_until <= now

    def has_decode_slot(self, slots: int, need: int, now: float) -> bool:
        """An instance without any decode takes every request: one that can never fit is the engine's to refuse."""
        if self.refuses_until > now:
            return False
        decodes = len(self._decoding)
        return not decodes or (decodes < slots and self.kv_tokens + need <= self.capacity)

    def lose_cache(self) -> None:
        """Nothing that it served before is resident any more."""
        self.cache_epoch += 1

    def begin_prefill(self, rid: str, tokens: int) -> None:
        self.unused.clear()
        self._prefilling[rid] = tokens
        self.prefill_tokens += tokens

    def end_prefill(self, rid: str) -> None:
        self.prefill_tokens -= self._prefilling.pop(rid, 0)
        self._leave()

    def begin_decode(self, rid: str, tokens: int) -> None:
        self.unused.clear()
        self._decoding[rid] = tokens
        self.kv_tokens += tokens

    def grow_decode(self, rid: str, tokens: int) -> None:
        """The context of a decode is `tokens` long now; what was reserved for it may be more."""
        more = tokens - self._decoding[rid]
        if more > 0:
            self._decoding[rid] = tokens
            self.kv_tokens += more

    def end_decode(self, rid: str) -> None:
        self.kv_tokens -= self._decoding.pop(rid, 0)
        self._leave()

    def _leave(self) -> None:
        if not self._prefilling and not self._decoding:
            self.unused.set()


class Fleet:
    """Every instance by name, and the pool of each role. Watchers are told of each change of state or role."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._pools: dict[Role, list[Instance]] = {role: [] for role in Role}
        self.watchers: list[Callable[[Instance], None]] = []

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def __getitem__(self, name: str) -> Instance:
        return self._instances[name]

    def pool(self, role: Role) -> list[Instance]:
        """The routed instances of a role, in the order in which the cluster was given them."""
        return self._pools[role]

    @property
    def in_service(self) -> Allocation:
        """How many instances each role has in its pool."""
        return Allocation(*(len(self.pool(role)) for role in (Role.PREFILL, Role.DECODE, Role.MIXED)))

    def add(self, instance: Instance) -> None:
        """A new instance, in service."""
        if instance.name in self._instances:
            raise ValueError(f"two instances are named {instance.name!r}; names must differ")
        self._instances[instance.name] = instance
        self.move(instance, InstanceState.ROUTED)

    def remove(self, instance: Instance) -> None:
        del self._instances[instance.name]
        self.move(instance, InstanceState.STOPPED)

    def move(self, instance: Instance, state: InstanceState, role: Role | None = None) -> None:
        """Every change of state or role goes through here, so that the pools are always right."""
        instance.state = state
        if state is InstanceState.ROUTED:
            instance.problem = None
        if role is not None:
            instance.role = role
        self._pool()
        for watcher in self.watchers:
            watcher(instance)

    def _pool(self) -> None:
        self._pools = {role: [] for role in Role}
        for instance in self:
            if instance.state is InstanceState.ROUTED:
                self._pools[instance.role].append(instance)
