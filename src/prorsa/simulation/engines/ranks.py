"""The parts of a simulated instance: its attention DP ranks and the requests on them. Lengths and KV cache in tokens."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from prorsa.engines.protocol import FinishReason
from prorsa.simulation.engines.statistics import ConservationError

if TYPE_CHECKING:
    from prorsa.simulation.engines.transfer import Handover

WATERMARK = 0.01
"""Share of a rank's pool that must stay free when a request joins others, so that it is not retracted at once."""


class Stage(Enum):
    """Where a request is on an instance."""

    UNMATCHED = "unmatched"
    """To be prefilled as soon as a decode rank has room for it."""
    FETCHING = "fetching"
    """Its prefix comes from the KV store."""
    QUEUED = "queued"
    """For prompt work."""
    PREFILLING = "prefilling"
    SENDING = "sending"
    """Prefilled; its KV cache is on the way to the decode instance."""
    UNPLACED = "unplaced"
    """Waits for room on a decode rank."""
    RESERVED = "reserved"
    """Has room on a decode rank; its KV cache is on the way."""
    ARRIVED = "arrived"
    """Its KV cache is there; waits to join a batch."""
    DECODING = "decoding"
    ENDED = "ended"


class Job:
    """One leg of a request on one instance. Lengths in tokens."""

    __slots__ = (
        "aborting",
        "base",
        "cached",
        "cached_prompt",
        "computed",
        "done",
        "end",
        "fetched",
        "first_prompt",
        "generated",
        "handover",
        "in_step",
        "prompt",
        "question",
        "rank",
        "report",
        "report_at",
        "resent",
        "resident",
        "stage",
        "target",
        "told",
        "trajectory",
        "work",
    )

    def __init__(
        self,
        *,
        trajectory: str,
        question: int,
        prompt: int,
        target: int,
        first_prompt: int,
        report: Callable[[Job, FinishReason | None], None],
        handover: Handover | None,
        resent: bool = False,
    ) -> None:
        """`target` tokens are to be generated; `first_prompt` is the part of the prompt that its group shares.

        `report` is called when there is something to stream: `generated` has grown, or the job ends.
        `resent`: an earlier attempt of the same turn was made.
        """
        self.trajectory = trajectory
        self.question = question
        self.prompt = prompt
        self.target = target
        self.first_prompt = first_prompt
        self.report = report
        self.handover = handover
        self.resent = resent
        self.stage = Stage.QUEUED
        self.rank: Rank = None  # type: ignore[assignment]
        self.generated = 0
        """While it decodes: as of when it joined its batch, or was last counted."""
        self.told = 0
        """Of `generated`, what its stream has had."""
        self.base = 0
        """While it decodes: its context less the rank's steps."""
        self.end = 0
        """The step of its rank with which it ends."""
        self.work = 0
        """Prompt tokens that the rank still expects to compute for it."""
        self.cached_prompt = 0
        """Of the request's own prompt, what was not computed; known when its prefill is done."""
        self.done = self.cached = self.fetched = self.computed = 0
        """Of the prefill in progress: tokens that are there, and where they came from."""
        self.resident = False
        """Whether the rank counts it among those that hold its group's first prompt."""
        self.report_at = 0.0
        """While it decodes: when it next reports if nothing else happens."""
        self.in_step = False
        """Whether the present step prefills it."""
        self.aborting = False
        """Whether it ends with the present step."""

    @property
    def context(self) -> int:
        return self.prompt + self.generated


class Rank:
    """One attention DP rank. KV cache in tokens."""

    __slots__ = (
        "arrived",
        "backlog",
        "batch",
        "cache",
        "cached",
        "capacity",
        "chunk",
        "context",
        "cost",
        "ends",
        "floor",
        "groups",
        "held",
        "index",
        "link_busy",
        "low",
        "pause",
        "paused",
        "priced",
        "queue",
        "running",
        "serving",
        "slope",
        "step",
        "work",
    )

    def __init__(self, index: int, capacity: int) -> None:
        self.index = index
        self.capacity = capacity
        self.queue: deque[Job] = deque()
        self.chunk: list[tuple[Job, int]] = []
        """What the present step prefills: (request, tokens)."""
        self.work = 0
        """Prompt tokens to compute, of queued and prefilling requests."""
        self.backlog = 0
        """Prompt tokens of requests that wait for their prefill to start."""
        self.serving = 0
        """Requests whose prefill has started and not ended."""
        self.running: dict[Job, None] = {}
        """The decoding requests, oldest first."""
        self.ends: list[tuple[int, int, Job]] = []
        """A heap of (step, serial, request) of all decoding ones, and behind the first of some that have gone."""
        self.step = 0
        """Decode steps that it has made."""
        self.batch = 0
        self.context = 0
        """KV cache of the decoding requests."""
        self.held = 0
        """KV cache of all other live requests."""
        self.cache: OrderedDict[str, tuple[int, int, bool]] = OrderedDict()
        """trajectory -> (tokens, question, resident) of evictable prefixes, the least recently used first."""
        self.cached = 0
        self.groups: dict[int, int] = {}
        """question -> how many live or cached contexts start with its prompt."""
        self.link_busy = 0.0
        """Until when its network interfaces are taken."""
        self.pause = 0.0
        """How long its decodes have stood still, and how many of them."""
        self.paused = 0
        self.cost = 0.0
        """Of its part of the present step, seconds."""
        self.priced = -1
        """The batch for which `low` and `slope` hold, for mean contexts of the window that begins at `floor`."""
        self.floor = 0
        self.low = 0.0
        self.slope = 0.0

    @property
    def live(self) -> int:
        return self.held + self.context

    def fits(self, tokens: int) -> bool:
        """Whether so many tokens may join those that live here; an empty rank takes any request."""
        live = self.held + self.context
        return live == 0 or live + tokens <= self.capacity * (1 - WATERMARK)

    def put(self, job: Job, tokens: int) -> None:
        """Keep the job's KV cache as an evictable prefix."""
        self.drop(job.trajectory)
        self.cache[job.trajectory] = (tokens, job.question, job.resident)
        self.cached += tokens
        job.resident = False

    def has(self, job: Job) -> bool:
        """Whether it has a prefix of the job's trajectory, as its segment is."""
        entry = self.cache.get(job.trajectory)
        return entry is not None and entry[1] == job.question

    def cut(self, trajectory: str, question: int, kept: int) -> None:
        """Of the trajectory's prefix, `kept` tokens stay and are the beginning of what `question` stands for."""
        entry = self.cache.get(trajectory)
        if entry is None or not kept:
            self.drop(trajectory)
            return
        tokens, former, resident = entry
        if resident and question != former:
            self.leave(former)
        self.cached -= max(tokens - kept, 0)
        self.cache[trajectory] = (min(tokens, kept), question, resident and question == former)

    def take(self, job: Job) -> None:
        """The job takes its trajectory's prefix over."""
        if not self.has(job):
            # Left behind by an attempt of another segment that ended late.
            self.drop(job.trajectory)
        entry = self.cache.pop(job.trajectory, None)
        if entry is not None:
            tokens, _, job.resident = entry
            self.cached -= tokens

    def drop(self, trajectory: str) -> None:
        entry = self.cache.pop(trajectory, None)
        if entry is not None:
            tokens, question, resident = entry
            self.cached -= tokens
            if resident:
                self.leave(question)

    def trim(self) -> None:
        """Evict prefixes until everything fits."""
        while self.held + self.context + self.cached > self.capacity:
            if not self.cache:
                raise ConservationError(
                    f"rank {self.index} holds {self.live} tokens of KV cache, its capacity is {self.capacity}"
                )
            self.drop(next(iter(self.cache)))

    def join(self, job: Job) -> None:
        """The job's context holds its group's first prompt from now on."""
        if not job.resident:
            job.resident = True
            self.groups[job.question] = self.groups.get(job.question, 0) + 1

    def leave(self, question: int) -> None:
        left = self.groups[question] - 1
        if left:
            self.groups[question] = left
        else:
            del self.groups[question]
