"""The rollout without a trainer: launches trajectories by a rule and hands over batches of complete groups.

Synchronous: a batch is launched when it is asked for, and nothing runs between batches. Asynchronous: an injection rule
(paper, B.2) keeps launching, batches come out in completion order, and a trajectory that falls more than `max_staleness`
weights versions behind is dropped. In both, a group that loses a member is lost as a whole, and every group ends exactly
once: trained, dropped or replaced, whatever fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from prorsa.cluster.turns import TurnRequest, TurnResult
from prorsa.forecast.injection import FixedRate, GroupReplenishment, Injection, ReplaceOnReward
from prorsa.lifecycle.events import Event
from prorsa.rollout.episode import Environment, Episode, Ports
from prorsa.rollout.records import TrajectoryRecord
from prorsa.rollout.resume import ENDED, Left
from prorsa.rollout.sampler import Group, Outcome, Sampler

log = logging.getLogger(__name__)

LOST_ROUNDS = 8
"""The rollout fails once so many times its capacity of groups were lost in a row: it would go on for ever."""
STALE = "stale"
"""How the reason begins for which a trajectory that is too old is dropped."""


class RolloutFailed(Exception):
    """The rollout cannot go on; the message says what its groups were lost to."""


class Control(Ports, Protocol):
    """The control plane, as the controller sees it."""

    @property
    def version(self) -> int:
        """The weights version that turns are generated with."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    groups: int
    """Groups in a batch."""
    injection: Injection | None = None
    """The rule that launches trajectories (`ReplaceOnReward`, `FixedRate`, `GroupReplenishment`); None: synchronous."""
    max_staleness: int = 0
    """How many weights versions a trajectory may fall behind before it is dropped."""
    in_flight: int | None = None
    """Groups that are launched at first under an injection rule; None: as many as a batch has."""

    @property
    def first_launch(self) -> int:
        """Groups that the first batch launches."""
        return self.groups if self.injection is None else (self.in_flight or self.groups)

    @property
    def capacity(self) -> int:
        """Groups that may run or wait to be handed over: what is generated further ahead would be stale when used."""
        return self.groups if self.injection is None else self.groups * (self.max_staleness + 1)


class Controller:
    """Use as `async with Controller(...) as controller`; leaving the block drops what still runs.

    Its episodes reach the cluster through it: it is the `Ports` that they record to.
    """

    def __init__(
        self,
        control: Control,
        environment: Environment,
        sampler: Sampler,
        plan: Plan,
        ended: Callable[[TrajectoryRecord], None] = lambda _: None,
    ) -> None:
        """`ended` is given each trajectory when it has ended, save those that end with the rollout."""
        self.plan = plan
        self._ended = ended
        self.lost = 0
        """Groups dropped or replaced so far."""
        self._control = control
        self._environment = environment
        self._sampler = sampler
        self._version = control.version
        self._groups: dict[str, Group] = {}
        """Those that have not ended, by id."""
        self._complete: list[Group] = []
        """Those of them that wait to be handed over, in completion order."""
        self._episodes: dict[str, list[Episode]] = {}
        """Those of their members, by the group's id."""
        self._tasks: set[asyncio.Task[None]] = set()
        """The ticker, and every episode that runs, those of groups that were lost too."""
        self._owed = 0
        """Trajectories to launch as soon as the capacity allows."""
        self._lost_in_a_row = 0
        self._begun = self._closed = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Controller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def resume(self, left: Left) -> None:
        """Before the first batch: go on with what a run that was cut off has left."""
        if not left.dealt:
            return
        groups = self._sampler.resume(left)
        for group in groups:
            self._groups[group.id], self._episodes[group.id] = group, []
        self._complete = [group for group in groups if group.complete]
        missing = sum(group.size - len(group.records) for group in groups)
        self._owed = missing + self._never_launched(groups, missing)

    def _never_launched(self, groups: list[Group], missing: int) -> int:
        """Trajectories that the rule had launched or would have, and of which nothing was recorded."""
        size, first = self._sampler.group_size, self.plan.first_launch
        match self.plan.injection:
            case None:
                return size * max(0, first - len(groups)) if groups else 0
            case ReplaceOnReward():
                return max(0, first * size - missing)
            case GroupReplenishment():
                return size * max(0, first - sum(not group.complete for group in groups))
            case _:
                return 0

    async def batch(self) -> list[Group]:
        """The next `plan.groups` complete groups. Raises `RolloutFailed`, or what the control plane's `record` raised."""
        self._begin_batch()
        while True:
            self._lose_stale()
            if self._failure is not None:
                raise self._failure
            if len(self._complete) >= self.plan.groups:
                return self._hand_over()
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Drop everything that runs or waits; returns when all episodes have ended."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        for episodes in self._episodes.values():
            for episode in episodes:
                episode.drop(ENDED)
        if self._tasks:
            await asyncio.wait(self._tasks)
        for group in list(self._groups.values()):
            self._end(group, Outcome.DROPPED, ENDED)

    # The ports of the episodes.

    async def record(self, event: Event) -> None:
        if self._control.version != self._version:
            self._version = self._control.version
            # Not here: the episode that records cannot be cancelled in the middle of its own step.
            asyncio.get_running_loop().call_soon(self._lose_stale)
        await self._control.record(event)

    async def generate(self, request: TurnRequest) -> TurnResult:
        return await self._control.generate(request)

    # Launching.

    @property
    def _launching(self) -> bool:
        return not self._closed and self._failure is None

    def _begin_batch(self) -> None:
        size, first = self._sampler.group_size, self.plan.first_launch
        if not self._groups:
            self._owed += first * size if self.plan.injection is None or not self._begun else 0
        elif self.plan.injection is None and self._begun:
            # A resumed run may have some groups of this batch already.
            self._owed += max(0, size * (first - len(self._groups)) - self._owed)
        self._launch_owed()
        if not self._begun and isinstance(self.plan.injection, FixedRate):
            self._ticker = self._spawn(self._tick(self.plan.injection.rate), "injection")
        self._begun = True

    async def _tick(self, rate: float) -> None:
        while True:
            await asyncio.sleep(1 / rate)
            # At capacity a tick waits; those that come meanwhile are lost, or they would all be launched at once.
            self._owed = max(self._owed, 1)
            self._launch_owed()

    def _launch_owed(self) -> None:
        room = self.plan.capacity * self._sampler.group_size - sum(group.launched for group in self._groups.values())
        while self._launching and self._owed and room > 0:
            self._owed -= 1
            room -= 1
            self._launch()

    def _launch(self) -> None:
        group, launch = self._sampler.deal(self._control.version)
        episode = Episode(launch, self._environment, self, self._keep)
        self._groups[group.id] = group
        self._episodes.setdefault(group.id, []).append(episode)
        self._spawn(self._play(group, episode), launch.trajectory)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _play(self, group: Group, episode: Episode) -> None:
        try:
            self._member_ended(group, await episode.run())
        except Exception as error:
            log.exception("the rollout failed at trajectory %s", episode.launch.trajectory)
            self._fail(error)

    # Ending.

    def _keep(self, record: TrajectoryRecord) -> None:
        if record.dropped is None or not self._closed:
            self._ended(record)

    def _member_ended(self, group: Group, record: TrajectoryRecord) -> None:
        group.records.append(record)
        if group.complete and group.outcome is None:
            self._complete.append(group)
            self._lost_in_a_row = 0
        elif record.dropped is not None and group.outcome is None:
            self._lose(group, record.dropped)
        self._owed += self._replacements(group)
        self._launch_owed()
        self._changed.set()

    def _replacements(self, group: Group) -> int:
        """Trajectories that the rule launches now that a member of `group` has ended."""
        match self.plan.injection:
            case ReplaceOnReward():
                return 1
            case GroupReplenishment():
                return 0 if group.live else group.size
            case None:
                return group.size if group.outcome is not None and not group.live else 0
            case _:
                return 0

    def _lose_stale(self) -> None:
        version, most = self._control.version, self.plan.max_staleness
        for group in [group for group in self._groups.values() if version - group.version > most]:
            self._lose(group, f"{STALE}: sampled with weights {group.version}, now {version}, max_staleness {most}")

    def _lose(self, group: Group, reason: str) -> None:
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= LOST_ROUNDS * self.plan.capacity:
            self._fail(RolloutFailed(f"{self._lost_in_a_row} groups were lost in a row, the last one to: {reason}"))
        for episode in self._episodes[group.id]:
            episode.drop(reason)
        if group in self._complete and self.plan.injection is None:
            # No member's end is left to make up for it.
            self._owed += group.size
        replaced = self._launching and not isinstance(self.plan.injection, FixedRate)
        self._end(group, Outcome.REPLACED if replaced else Outcome.DROPPED, reason)
        self._launch_owed()

    def _hand_over(self) -> list[Group]:
        batch = self._complete[: self.plan.groups]
        for group in batch:
            self._end(group, Outcome.TRAINED)
        self._launch_owed()
        return batch

    def _end(self, group: Group, outcome: Outcome, reason: str | None = None) -> None:
        group.end(outcome, reason)
        del self._groups[group.id], self._episodes[group.id]
        if group in self._complete:
            self._complete.remove(group)
        self.lost += outcome is not Outcome.TRAINED

    def _fail(self, error: Exception) -> None:
        if self._failure is None:
            self._failure = error
        self._changed.set()
