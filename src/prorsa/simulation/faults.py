"""Schedules of faults for a simulated cluster: what fails, when, and what it strikes. One YAML file.

The file has a `seed` and a list `faults`. Each fault has a `kind`, its own keys, and either `at`, the second at which it
happens, or `every`, the mean seconds between two of the kind, whose times are then drawn from the seed. Nothing of the
control plane knows of a schedule: it meets what engines, store and links do then. Equal schedules do the same to equal runs.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from prorsa.config import ConfigError, Positive, Section, find_yaml, read_yaml, validated
from prorsa.engines.protocol import Role
from prorsa.simulation.engines.cluster import SimulatedCluster, SimulatedEngine
from prorsa.simulation.outcome import FaultRecord

SCHEDULES = files("prorsa.simulation") / "schedules"
ANY = "any"
CONTROL = "control"
"""The control plane, as one end of a link."""
GROUPS = (ANY, *(role.value for role in Role))
"""What a target can be beside an engine's name."""

Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Span = Annotated[float, Field(gt=0, allow_inf_nan=False)]
T = TypeVar("T")


class Fault(Section):
    """When it happens. `strike` does it once, and returns what it struck; None where there was nothing to strike."""

    kind: ClassVar[str]
    at: Time | None = None
    """Seconds from the start of the run; once."""
    every: Span | None = None
    """Mean seconds between two of them, at random: the gaps are exponential."""
    count: Positive | None = None
    """With `every`: how many at most; None: until the run ends."""

    @model_validator(mode="after")
    def _timed(self) -> Self:
        if (self.at is None) == (self.every is None):
            raise ValueError(f"at={self.at}, every={self.every}: give one of the two")
        if self.count is not None and self.every is None:
            raise ValueError(f"count={self.count}: only a fault with `every` happens more than once; remove it")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The engines that it names."""
        return ()

    def strike(self, cluster: SimulatedCluster, chance: random.Random) -> str | None:
        raise NotImplementedError

    def times(self, chance: random.Random) -> Iterator[float]:
        """Seconds from the start of the run."""
        if self.every is None:
            assert self.at is not None
            yield self.at
            return
        time, left = 0.0, self.count or inf
        while left > 0:
            left -= 1
            time += chance.expovariate(1 / self.every)
            yield time


class EngineFault(Fault):
    target: str = ANY
    """Which engine: a name such as engine-0, a role (one of those that have it then), or `any`."""

    @property
    def names(self) -> tuple[str, ...]:
        return () if self.target in GROUPS else (self.target,)

    def strike(self, cluster: SimulatedCluster, chance: random.Random) -> str | None:
        engine = _one(_candidates(cluster, self.target), chance)
        if engine is None:
            return None
        self.strike_engine(engine)
        return engine.name

    def strike_engine(self, engine: SimulatedEngine) -> None:
        raise NotImplementedError


class Kill(EngineFault):
    """The engine's process ends: its streams break, and all that it held is gone."""

    kind = "kill"

    def strike_engine(self, engine: SimulatedEngine) -> None:
        engine.die()


class Hang(EngineFault):
    """The engine stands still and answers nothing, health checks included; connections stay open."""

    kind = "hang"
    seconds: Span | None = None
    """None: for ever, so until it is restarted."""

    def strike_engine(self, engine: SimulatedEngine) -> None:
        engine.hang()
        _later(self.seconds, engine.go_on)


class Slow(EngineFault):
    """The engine's steps take longer."""

    kind = "slow"
    factor: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    """How many times as long."""
    seconds: Span

    def strike_engine(self, engine: SimulatedEngine) -> None:
        engine.slow_down(self.factor)
        _later(self.seconds, lambda: engine.speed_up(self.factor))


class Refuse(EngineFault):
    """The engine refuses the next requests as a full one does."""

    kind = "refuse"
    requests: Positive = 1

    def strike_engine(self, engine: SimulatedEngine) -> None:
        engine.refuse += self.requests


class LoseReply(EngineFault):
    """The connection breaks under the next piece of a stream: what the engine has told is lost. It lives on."""

    kind = "lose-reply"
    replies: Positive = 1

    def strike_engine(self, engine: SimulatedEngine) -> None:
        engine.lose_replies += self.replies


class FailFlip(EngineFault):
    """The engine's next role switch fails."""

    kind = "fail-flip"

    def strike_engine(self, engine: SimulatedEngine) -> None:
        engine.flip_fault = "the switch failed"


class LoseStore(Fault):
    """The KV store outside the instances is gone with all that it held. What is on its way arrives."""

    kind = "lose-store"
    seconds: Span | None = None
    """After which an empty one is there; None: never."""

    def strike(self, cluster: SimulatedCluster, chance: random.Random) -> str | None:
        store = cluster.store
        if store is None:
            return None
        store.lose()
        _later(self.seconds, store.come_back)
        return "the KV store"


class CutLink(EngineFault):
    """Nothing passes between two ends: no KV cache between two engines, or no call, answer or token between an engine and
    the control plane. Nothing breaks off; what was sent before between engines arrives."""

    kind = "cut-link"
    to: str
    """The other end: as `target`, or `control`."""
    seconds: Span | None = None
    """None: for ever, so until an end of it is restarted."""

    @model_validator(mode="after")
    def _two_ends(self) -> Self:
        if self.to == self.target and self.to not in GROUPS:
            raise ValueError(f"to={self.to!r}: a link has two ends; name another one than its target")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(end for end in (self.target, self.to) if end not in (*GROUPS, CONTROL))

    def strike(self, cluster: SimulatedCluster, chance: random.Random) -> str | None:
        engine = _one(_candidates(cluster, self.target), chance)
        if engine is None:
            return None
        if self.to == CONTROL:
            engine.cut_off()
            _later(self.seconds, engine.connect)
            return f"{engine.name} to {CONTROL}"
        other = _one([one for one in _candidates(cluster, self.to) if one is not engine], chance)
        if other is None:
            return None
        cluster.links.cut(engine.name, other.name, asyncio.get_running_loop().time() + (self.seconds or inf))
        return f"{engine.name} to {other.name}"


KINDS: Mapping[str, type[Fault]] = {
    fault.kind: fault for fault in (Kill, Hang, Slow, Refuse, LoseReply, FailFlip, LoseStore, CutLink)
}


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    seed: int
    faults: tuple[Fault, ...]

    def check(self, engines: Mapping[str, Role], policy: str) -> None:
        """Raises `ConfigError` where it names an engine that there is not."""
        for index, fault in enumerate(self.faults):
            for name in fault.names:
                if name not in engines:
                    known = f"{next(iter(engines))} to {list(engines)[-1]}"
                    raise ConfigError(
                        f"faults.{index}: {name!r} is no engine of policy {policy}; name one of {known}, "
                        f"{', '.join(GROUPS)}" + (f", or {CONTROL} for `to`" if isinstance(fault, CutLink) else "")
                    )


def load_faults(path: str | Path) -> FaultSchedule:
    """By its path, or by the name of one that comes with the package. Raises `ConfigError` with the key, the value and the
    remedy."""
    data = read_yaml(find_yaml(path, SCHEDULES, "--faults"), what="--faults")
    if unknown := sorted(set(data) - {"seed", "faults"}):
        raise ConfigError(
            f"{unknown[0]}={data[unknown[0]]!r}: unknown key; a schedule of faults has `seed` and `faults`"
        )
    seed, listed = data.get("seed", 0), data.get("faults")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"seed={seed!r}: write a whole number")
    if not isinstance(listed, list) or not listed:
        raise ConfigError(f"faults={listed!r}: write a list of one fault or more")
    return FaultSchedule(seed, tuple(_fault(f"faults.{index}", entry) for index, entry in enumerate(listed)))


def _fault(where: str, entry: Any) -> Fault:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}={entry!r}: write a mapping with a `kind`")
    kind = entry.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where}.kind={kind!r}: no such fault; use one of {', '.join(KINDS)}")
    fault, told = KINDS[kind], {key: value for key, value in entry.items() if key != "kind"}
    for key, value in told.items():
        if key not in fault.model_fields:
            raise ConfigError(f"{where}.{key}={value!r}: unknown key; {kind} has {', '.join(fault.model_fields)}")
    return validated(fault, told, f"{where}.")


class Injector:
    """Lets a schedule happen to a cluster, from entering to leaving it as a context."""

    def __init__(self, schedule: FaultSchedule | None, cluster: SimulatedCluster) -> None:
        self.happened: list[FaultRecord] = []
        """In the order of time."""
        self._schedule = schedule
        self._cluster = cluster
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Injector:
        if self._schedule is not None:
            self._tasks = [
                asyncio.create_task(self._play(fault, random.Random(f"{self._schedule.seed}/{index}")), name=fault.kind)
                for index, fault in enumerate(self._schedule.faults)
            ]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Raises what a fault failed with."""
        for task in self._tasks:
            task.cancel()
        for end in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(end, Exception):
                raise end

    async def _play(self, fault: Fault, chance: random.Random) -> None:
        now = asyncio.get_running_loop().time
        start = now()
        # What is struck is drawn apart from the times, so that these do not depend on the cluster.
        when, whom = random.Random(chance.random()), random.Random(chance.random())
        for time in fault.times(when):
            await asyncio.sleep(max(0.0, start + time - now()))
            struck = fault.strike(self._cluster, whom)
            self.happened.append(FaultRecord(now(), fault.kind, struck))


def _candidates(cluster: SimulatedCluster, target: str) -> list[SimulatedEngine]:
    """The engines that live and are meant."""
    return [
        engine
        for engine in cluster.engines.values()
        if engine.alive and target in (ANY, engine.name, engine.core.role.value)
    ]


def _one(candidates: list[T], chance: random.Random) -> T | None:
    return chance.choice(candidates) if candidates else None


def _later(seconds: float | None, act: Callable[[], None]) -> None:
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, act)
