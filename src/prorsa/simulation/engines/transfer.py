"""How KV cache moves: from prefill to decode ranks, and to and from the KV store outside the instances.

A link is a fluid that serves its transfers one after the other: all that is known of it is until when it is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorsa.simulation.engines.ranks import Job

if TYPE_CHECKING:
    from prorsa.simulation.engines.core import Core


class KvStore:
    """The KV store outside the instances: everything is written through one shared link and nothing is forgotten."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._busy = 0.0
        self._contexts: dict[str, tuple[int, int]] = {}
        self._prompts: dict[int, tuple[int, int]] = {}
        self._gone = 0
        """How many faults keep it away."""

    def lose(self) -> None:
        """It is gone with all that it held, until `come_back`."""
        self._gone += 1
        self._contexts.clear()
        self._prompts.clear()

    def come_back(self) -> None:
        self._gone -= 1

    def stored(self, job: Job, version: int) -> int:
        """How many tokens of the job's context it has under these weights."""
        own = self._contexts.get(job.trajectory)
        if own is not None and own[0] == version:
            return own[1]
        group = self._prompts.get(job.question)
        return group[1] if group is not None and group[0] == version else 0

    def write(self, job: Job, tokens: int, version: int, token_bytes: int, now: float) -> None:
        """Keep the first `tokens` of the job's context; only what is new moves."""
        if self._gone:
            return
        present = self._contexts.get(job.trajectory)
        if present is not None and present[0] > version:
            return
        more = tokens - self.stored(job, version)
        if more <= 0:
            return
        self.move(more * token_bytes, now)
        self._contexts[job.trajectory] = (version, tokens)
        if tokens >= job.first_prompt > 0:
            self._prompts[job.question] = (version, job.first_prompt)

    def cut(self, trajectory: str, kept: int) -> None:
        """Of the trajectory's context, only the first `kept` tokens are its still."""
        known = self._contexts.get(trajectory)
        if known is not None:
            self._contexts[trajectory] = (known[0], min(known[1], kept))

    def delay(self, size: float, now: float) -> float:
        """How long `size` bytes would take now, what waits before them included, seconds."""
        return max(self._busy - now, 0.0) + size / self._rate

    def move(self, size: float, now: float) -> float:
        """Take the link for `size` bytes; returns when they are there."""
        self._busy = max(self._busy, now) + size / self._rate
        return self._busy


class Links:
    """Which pairs of instances cannot reach each other, and until when."""

    def __init__(self) -> None:
        self._cut: dict[frozenset[str], float] = {}

    def cut(self, one: str, other: str, until: float) -> None:
        ends = frozenset((one, other))
        self._cut[ends] = max(self._cut.get(ends, 0.0), until)

    def mend(self, name: str) -> None:
        """The instance is a new one: all its links are."""
        self._cut = {ends: until for ends, until in self._cut.items() if name not in ends}

    def open_at(self, one: str, other: str) -> float:
        """From when on something that is sent arrives; 0 where nothing was cut."""
        return self._cut.get(frozenset((one, other)), 0.0) if self._cut else 0.0


class Handover:
    """The KV cache of one request on its way from a prefill rank to a decode rank.

    The prefill starts when a decode rank has room: so no prefill rank fills up with what nobody can take. Tokens move as
    soon as they are there, first come first served on both ranks' links; all but the last chunk moves while the prefill
    goes on. It ends on both sides: when all has arrived, or as soon as one side is gone.
    """

    __slots__ = ("arrival", "broken", "decode", "late_s", "links", "moved", "open_at", "prefill", "room")

    def __init__(self, links: Links | None = None) -> None:
        self.links = links
        self.open_at = 0.0
        """When the link that its tokens wait for is there again."""
        self.late_s = 0.0
        """How long what has waited for that takes then."""
        self.prefill: tuple[Core, Job] | None = None
        self.decode: tuple[Core, Job] | None = None
        """The legs that have come."""
        self.room = False
        """Whether the decode leg has its place on a rank."""
        self.moved = 0
        """Tokens that are or were on their way, until they are booked as handed over or lost."""
        self.arrival = 0.0
        """When the last of them arrive."""
        self.broken = False

    def come(self, core: Core, job: Job, prefills: bool, now: float) -> None:
        """A leg has come. It has to end where the other one is gone already, or has other weights."""
        other = self.decode if prefills else self.prefill
        if prefills:
            self.prefill = (core, job)
        else:
            self.decode = (core, job)
        if self.broken or (other is not None and other[0].version != core.version):
            self.snap(job, now)
            core.abort(job, now)
        else:
            self._begin(now)

    def accept(self, now: float) -> None:
        """The decode side has room."""
        self.room = True
        self._begin(now)

    def _begin(self, now: float) -> None:
        if self.room and self.prefill is not None:
            core, job = self.prefill
            core.begin(job, now)

    def offer(self, tokens: int, now: float) -> None:
        """The prefill side has so many tokens more."""
        assert self.prefill is not None
        assert self.decode is not None
        (source, sent), (target, received) = self.prefill, self.decode
        rate = min(source.profile.network_bytes_per_s, target.profile.network_bytes_per_s)
        seconds = tokens * source.profile.kv_bytes / rate
        for rank in (sent.rank, received.rank):
            rank.link_busy = max(rank.link_busy, now) + seconds
        self.arrival = max(sent.rank.link_busy, received.rank.link_busy)
        if self.links is not None and (open_at := self.links.open_at(source.name, target.name)) > now:
            self.open_at = open_at
            self.late_s += seconds
        self.arrival = max(self.arrival, self.open_at + self.late_s)
        source.statistics.moved_tokens += tokens
        self.moved += tokens
        if sent.done == sent.prompt:
            waiting = source.profile.network_latency_s + target.profile.handover_steps * target.step_s
            source.at(self.arrival + waiting, sent)

    def land(self, now: float) -> int:
        """All has arrived: the decode side goes on. Returns how many tokens were moved."""
        assert self.decode is not None
        core, job = self.decode
        moved, self.moved = self.moved, 0
        core.arrive(job, now)
        return moved

    def snap(self, job: Job, now: float) -> int:
        """The leg of `job` has ended before that: the other cannot go on. Returns how many tokens are lost."""
        lost, self.moved = self.moved, 0
        if not self.broken:
            self.broken = True
            for leg in (self.prefill, self.decode):
                if leg is not None and leg[1] is not job:
                    core, other = leg
                    core.abort(other, now)
        return lost
