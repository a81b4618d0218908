"""One simulated engine instance: attention DP ranks that step together, with their queues, KV pools and prefix caches.

A plain object that is told the time. It does prompt work and decodes, whatever its role: a prefill instance is given only
the first, a decode instance only the second (and the prompts of decodes that it had to retract), a mixed one both.

Physics. All ranks make one step together: a rank with prompt work prefills up to `profile.chunk` tokens, any other decodes
one token of each request that runs on it, and the step lasts as long as its slowest rank needs, plus what all then do
together. While no rank prefills and no batch changes, many steps are one event: its time is the mean of its first and its
last step times their number (step times are linear between the grid's points). Whatever comes in between ends the event
at the next step boundary.

Invariants. Live requests and cached prefixes together never exceed a rank's pool. A request is on one rank at most.
Requests end at step boundaries, or at once while no step works on them. An event costs the requests that it changes and
the ranks, never the batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from prorsa.engines.protocol import FinishReason, Role
from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import Profile
from prorsa.simulation.engines.ranks import Job, Rank, Stage
from prorsa.simulation.engines.statistics import ConservationError, Ledger, Statistics
from prorsa.simulation.engines.transfer import KvStore

WINDOW = 1024
"""Contexts between which the cost of a decode step is linear, unless the grid's points are closer."""
UNBALANCED = 1.5
"""How much more KV cache than the least loaded rank the one may have to which a prefix calls a request."""
LAST_PART = 0.1
"""Share of the host's work for one request that is not divided any further."""
NEVER = math.inf


class StepTimes:
    """`StepCosts` that remembers. Decode costs are tabled by batch and window of mean contexts."""

    def __init__(self, costs: StepCosts) -> None:
        self.prefill = costs.prefill_local
        self.prefix = costs.prefix_s
        self.window = min(WINDOW, costs.least_window or WINDOW)
        self._costs = costs
        self._decode: dict[tuple[int, int], tuple[float, float]] = {}
        self._shared: dict[tuple[float, float], float] = {}
        self._token_s: dict[tuple[int, int], float] = {}

    def decode(self, batch: int, floor: int) -> tuple[float, float]:
        """(seconds at a mean context of `floor`, seconds that a further token of it adds)."""
        known = self._decode.get((batch, floor))
        if known is None:
            low, high = (self._costs.decode_local(batch, context) for context in (floor, floor + self.window))
            known = self._decode[batch, floor] = (low, (high - low) / self.window)
        return known

    def shared(self, extending: bool, mean: float, most: float) -> float:
        if extending:
            # Chunks have any length: only decodes come back to the same sums.
            return self._costs.shared(True, mean, most)
        known = self._shared.get((mean, most))
        if known is None:
            known = self._shared[mean, most] = self._costs.shared(False, mean, most)
        return known

    def prefill_token(self, prefix: int, chunk: int) -> float:
        """Seconds that a rank takes for one prompt token of a full chunk after `prefix`, to a WINDOW's width."""
        key = (prefix // WINDOW, chunk)
        known = self._token_s.get(key)
        if known is None:
            step = self._costs.prefill_local(chunk, key[0] * WINDOW) + self._costs.shared(True, chunk, chunk)
            known = self._token_s[key] = step / chunk
        return known


class SlowStepTimes(StepTimes):
    """Of an instance whose steps take `factor` times as long."""

    def __init__(self, costs: StepCosts, factor: float) -> None:
        super().__init__(costs)
        self._factor = factor
        self.prefill = lambda tokens, prefix: factor * costs.prefill_local(tokens, prefix)
        self.prefix = lambda prefix: factor * costs.prefix_s(prefix)

    def decode(self, batch: int, floor: int) -> tuple[float, float]:
        low, slope = super().decode(batch, floor)
        return self._factor * low, self._factor * slope

    def shared(self, extending: bool, mean: float, most: float) -> float:
        return self._factor * super().shared(extending, mean, most)

    def prefill_token(self, prefix: int, chunk: int) -> float:
        return self._factor * super().prefill_token(prefix, chunk)


class Core:
    """An instance in time. Whoever owns it calls `advance` when `due` has come; `changed` tells of an earlier `due`."""

    def __init__(
        self,
        profile: Profile,
        times: StepTimes,
        role: Role,
        *,
        version: int,
        store: KvStore | None,
        statistics: Statistics,
        ledger: Ledger,
        changed: Callable[[], None],
        prefill_every: int,
        stream_s: float,
        name: str = "",
    ) -> None:
        self.name = name
        """Of the instance."""
        self.profile = profile
        self.times = times
        self.version = version
        self.store = store
        self.statistics = statistics
        self.ledger = ledger
        self.changed = changed
        self._mixed_prefill_every = prefill_every
        self.become(role)
        self.stream_s = stream_s
        self.jobs: dict[Job, None] = {}
        """Every request that lives here."""
        self.ranks = [Rank(index, profile.kv_tokens) for index in range(profile.ranks)]
        self._homes: dict[str, Rank] = {}
        """trajectory -> the rank that served it last."""
        self._unplaced: deque[Job] = deque()
        self._arrived: deque[Job] = deque()
        self._ending: list[Job] = []
        """Aborted while a step works on them."""
        self._timers: list[tuple[float, int, Job]] = []
        self._reports: deque[tuple[float, Job]] = deque()
        self._serial = count()
        self._queued = 0
        """Requests in the ranks' queues, those in service included."""
        self._decodes = 0
        """Requests in the ranks' batches."""
        self._since_prefill = 0
        """Decode steps since the last step that prefilled."""
        self._joining_s = 0.0
        """Host time of the requests that have joined, as far as no step has waited for it yet."""
        # The present step, or steps: `_steps` of them from `_start` to `_end`; 0 while there is nothing to do. The first
        # takes `_first` seconds, each later one `_growth` more; of that, `_shared` is not the ranks' own.
        self._steps = 0
        self._start = 0.0
        self._end = NEVER
        self._first = self._growth = self._shared = 0.0
        self._own = self._own_growth = 0.0
        """Summed over the ranks: their part of the first step, and its growth."""
        self._decoding: list[Rank] = []
        self._extending: list[Rank] = []

    # What the owner calls.

    def become(self, role: Role) -> None:
        """Get a role that differs only in what is accepted: what is here goes on."""
        self.role = role
        self.prefill_every = self._mixed_prefill_every if role is Role.MIXED else 0

    @property
    def due(self) -> float:
        reports = self._reports
        while reports and reports[0][1].report_at != reports[0][0]:
            reports.popleft()
        due = self._end
        if self._timers and self._timers[0][0] < due:
            due = self._timers[0][0]
        if reports and reports[0][0] < due:
            due = reports[0][0]
        return due

    def advance(self, now: float) -> None:
        """Do everything that is due."""
        timers, reports = self._timers, self._reports
        while True:
            timer = timers[0][0] if timers else NEVER
            report = reports[0][0] if reports else NEVER
            if timer <= self._end and timer <= report:
                if timer > now:
                    return
                self._ring(heappop(timers)[2], timer)
            elif report <= self._end:
                if report > now:
                    return
                self._report_due()
            elif self._end > now:
                return
            else:
                self._boundary(self._end)

    def prefill(self, job: Job, now: float) -> None:
        """Take in a request's prompt work."""
        self.jobs[job] = None
        if job.handover is None:
            self._join_queue(job, now)
        else:
            job.stage = Stage.UNMATCHED
            job.handover.come(self, job, prefills=True, now=now)
        self.changed()

    def begin(self, job: Job, now: float) -> None:
        """A decode rank has room for what this instance is to prefill."""
        self._join_queue(job, now)
        self.changed()

    def decode(self, job: Job, now: float) -> None:
        """Take in a request that is prefilled elsewhere."""
        assert job.handover is not None
        self.jobs[job] = None
        job.stage = Stage.UNPLACED
        self._unplaced.append(job)
        job.handover.come(self, job, prefills=False, now=now)
        if len(self._unplaced) == 1:
            self._place_decodes(now)
        self.changed()

    def arrive(self, job: Job, now: float) -> None:
        """The KV cache of a request that has room here is there."""
        assert job.stage is Stage.RESERVED
        job.stage = Stage.ARRIVED
        job.handover = None
        self._arrived.append(job)
        self._cut(now)
        self.changed()

    def abort(self, job: Job, now: float) -> None:
        """End the request: at once, or at the next boundary where a step works on it."""
        if job.stage is Stage.ENDED or job.aborting:
            return
        if job.stage is Stage.DECODING or job.in_step:
            job.aborting = True
            self._ending.append(job)
            self._cut(now)
        else:
            self._finish(job, FinishReason.ABORT, now)
            self._place_decodes(now)
        self.changed()

    def cut(self, trajectory: str, question: int, kept: int) -> None:
        """A context begins anew: of what is cached of it, `kept` tokens are its, and begin what `question` stands for."""
        for rank in self.ranks:
            rank.cut(trajectory, question, kept)

    def vanish(self, now: float) -> None:
        """The instance is gone with everything on it. Nothing is reported."""
        self.settle(now)
        for job in list(self.jobs):
            self._close_books(job, now)
            job.stage = Stage.ENDED
        self.jobs.clear()
        self.ranks = []
        self._steps, self._end = 0, NEVER
        self._timers.clear()
        self._reports.clear()

    def freeze(self, now: float) -> None:
        """The instance stands still from now until `thaw`, in the middle of its step. Its owner does not advance it then."""
        self.settle(now)
        self._cut(now)

    def thaw(self, now: float, since: float) -> None:
        """It goes on: its step has taken so much longer, and what has come since `since` is seen only now."""
        if self._steps:
            stood = now - since
            self._first += stood
            self._shared += stood
            self._end += stood
        elif self._end != NEVER:
            self._end = max(self._end, now)
        self._timers = [(max(time, now), serial, job) for time, serial, job in self._timers]
        heapify(self._timers)
        self.changed()

    def pace(self, times: StepTimes, now: float) -> None:
        """From the next step on steps take what `times` says."""
        self.times = times
        for rank in self.ranks:
            rank.priced = -1
        self._cut(now)
        self.changed()

    def at(self, time: float, job: Job) -> None:
        """Come back to the job then."""
        heappush(self._timers, (time, next(self._serial), job))
        self.changed()

    def settle(self, now: float) -> None:
        """Book the steps that are over; those of them that end a request stay."""
        done = self._unbooked(now)
        if done > 0:
            self._book(done)

    @property
    def live_tokens(self) -> int:
        return sum(rank.live for rank in self.ranks)

    @property
    def running(self) -> int:
        """Requests that steps work on."""
        return sum(rank.batch + rank.serving for rank in self.ranks)

    @property
    def step_s(self) -> float:
        """How long the present step takes; 0 where there is none."""
        return self._first if self._steps else 0.0

    def generated(self, job: Job) -> int:
        """Tokens of a job as of the last settled step."""
        return job.base + job.rank.step - job.prompt if job.stage is Stage.DECODING else job.generated

    def check(self) -> None:
        """Raises `ConservationError` where something is left behind, or the sums of a rank do not fit its requests."""
        for rank in self.ranks:
            where = f"rank {rank.index} of a {self.role} instance"
            if rank.live + rank.cached > rank.capacity:
                raise ConservationError(f"{where}: {rank.live} + {rank.cached} tokens are above {rank.capacity}")
            if rank.context != sum(self.generated(job) + job.prompt for job in rank.running):
                raise ConservationError(f"{where}: its KV cache is {rank.context} tokens, not what its decodes have")
            if rank.cached != sum(tokens for tokens, _, _ in rank.cache.values()):
                raise ConservationError(f"{where}: its cached prefixes do not add up to {rank.cached}")
            if not self.jobs and (rank.live or rank.batch or rank.queue or rank.work or rank.backlog or rank.serving):
                raise ConservationError(f"{where}: it is idle, but {rank.live} tokens of KV cache are still held")
            if not self.jobs and sum(rank.groups.values()) != sum(held for _, _, held in rank.cache.values()):
                raise ConservationError(f"{where}: it counts holders of first prompts that are gone")

    # Prompt work.

    def _join_queue(self, job: Job, now: float, front: bool = False) -> None:
        """Choose a rank, and fetch what the KV store has and the rank lacks where that is faster than computing it.

        What is fetched waits in the host's memory until the prefill starts.
        """
        rank, local = self._choose(job, now)
        job.rank = rank
        self._homes[job.trajectory] = rank
        if job.trajectory in rank.cache:
            rank.cache.move_to_end(job.trajectory)
        job.done = job.fetched = job.computed = 0
        job.cached = local
        job.work = job.context - local
        rank.work += job.work
        rank.backlog += job.context
        if not self._fetch(job, local, now):
            self._queue(job, now, front)

    def _fetch(self, job: Job, local: int, now: float) -> bool:
        if self.store is None:
            return False
        stored = min(self.store.stored(job, self.version), job.context - 1)
        more = stored - local
        compute = more * self.times.prefill_token(local, self.profile.chunk)
        size = more * self.profile.kv_bytes
        if more <= 0 or self.store.delay(size, now) >= compute:
            return False
        job.stage = Stage.FETCHING
        job.fetched = stored
        job.work -= more
        job.rank.work -= more
        self.at(self.store.move(size, now), job)
        return True

    def _queue(self, job: Job, now: float, front: bool = False) -> None:
        job.stage = Stage.QUEUED
        rank = job.rank
        if front:
            # Those in service stand before all others: what they hold is freed only when they go on.
            rank.queue.insert(rank.serving, job)
        else:
            rank.queue.append(job)
        self._queued += 1
        self._cut(now)

    def _choose(self, job: Job, now: float) -> tuple[Rank, int]:
        """The rank that has its prefix unless that is clearly more loaded, else the least loaded one; and how much of the
        context it has. A prefill rank's load is its work: the prefix is worth waiting for as long as computing it would
        take. Any other's is its KV cache, which slows its decodes: there it may be `UNBALANCED`."""
        if self.role is Role.PREFILL:
            loads = [rank.work for rank in self.ranks]
            least = bound = min(loads)
        else:
            loads = self._loads(now)
            least = min(loads)
            bound = int(least * UNBALANCED)
        home = self._homes.get(job.trajectory)
        if home is None or not home.has(job):
            holders = [rank for rank in self.ranks if job.question in rank.groups]
            home = min(holders, key=lambda rank: loads[rank.index], default=None)
        if home is not None:
            local = self._local(home, job)
            if loads[home.index] <= bound + local:
                return home, local
        rank = self.ranks[loads.index(least)]
        return rank, self._local(rank, job)

    def _loads(self, now: float) -> list[int]:
        """KV cache of each rank, with that of its queued prompts."""
        steps = self._unbooked(now)
        return [rank.held + rank.context + rank.backlog + rank.batch * steps for rank in self.ranks]

    def _local(self, rank: Rank, job: Job) -> int:
        """Tokens of the job's context that the rank has; the last one must always be computed."""
        entry = rank.cache.get(job.trajectory)
        own = entry[0] if entry is not None and entry[1] == job.question else 0
        shared = job.first_prompt if job.question in rank.groups else 0
        return min(max(own, shared), job.context - 1)

    def _admit(self, rank: Rank, job: Job, now: float) -> bool:
        """Start to serve a queued prompt where the rank has room for it."""
        need = job.context + 1
        if not rank.fits(need):
            return False
        if self.role is not Role.PREFILL and rank.batch + rank.serving >= self.profile.max_running:
            return False
        local = self._local(rank, job)
        rank.take(job)
        rank.held += need
        rank.backlog -= job.context
        rank.serving += 1
        rank.trim()
        # What was fetched follows what the rank had then: it is of no use where the rank has lost that.
        job.fetched = max(job.fetched - local, 0) if local >= job.cached else 0
        job.cached = local
        job.done = local + job.fetched
        rank.work += job.context - job.done - job.work
        job.work = job.context - job.done
        job.stage = Stage.PREFILLING
        if job.handover is not None and job.done:
            job.handover.offer(job.done, now)
        return True

    def _form_chunk(self, rank: Rank, now: float) -> None:
        """Fill the rank's chunk from the front of its queue, and price it."""
        budget, weighted = self.profile.chunk, 0
        for job in rank.queue:
            if job.stage is Stage.QUEUED and not self._admit(rank, job, now):
                break
            tokens = min(budget, job.context - job.done)
            rank.chunk.append((job, tokens))
            job.in_step = True
            weighted += tokens * job.done
            budget -= tokens
            if not budget:
                break
        tokens = self.profile.chunk - budget
        if tokens:
            mean = weighted / tokens
            rank.cost = self.times.prefill(tokens, mean)
            if len(rank.chunk) > 1:
                rank.cost += (len(rank.chunk) - 1) * self.profile.prefill_request_s
                rank.cost += sum(self.times.prefix(job.done) for job, _ in rank.chunk) - self.times.prefix(mean)

    def _chunk_done(self, rank: Rank, now: float) -> None:
        for job, tokens in rank.chunk:
            job.in_step = False
            job.done += tokens
            job.computed += tokens
            job.work -= tokens
            rank.work -= tokens
            self.statistics.prefilled_tokens += tokens
            if job.done == job.context:
                self._prefilled(rank, job, now)
            if job.handover is not None:
                job.handover.offer(tokens, now)
        rank.chunk.clear()

    def _prefilled(self, rank: Rank, job: Job, now: float) -> None:
        rank.queue.remove(job)
        self._queued -= 1
        rank.serving -= 1
        rank.join(job)
        self.statistics.cached_tokens += job.cached
        self.statistics.fetched_tokens += job.fetched
        self.statistics.add_prompt(now, job.context, job.computed)
        self.ledger.prompts += job.context
        self.ledger.computed += job.computed
        if job.resent:
            self.ledger.recomputed += job.computed
        job.computed = 0
        if not job.generated:
            job.cached_prompt = job.cached + job.fetched
        if job.handover is not None:
            job.stage = Stage.SENDING
            return
        rank.held -= job.context + 1
        self._first_token(job, now)
        if job.stage is Stage.DECODING:
            job.report(job, None)

    # Decoding.

    def _place_decodes(self, now: float) -> None:
        """Give the requests that wait for a decode rank the room that they need, first come first served."""
        # Retracted ones come first.
        while self._unplaced and not self._queued:
            job = self._unplaced[0]
            need = job.context + 1
            loads = self._loads(now)
            rank = self.ranks[loads.index(min(loads))]
            # The steps that go on were planned with the room that there was: it may be given away only between steps.
            if not rank.fits(need + rank.batch * self._steps):
                if self._steps:
                    self._cut(now)
                return
            self._unplaced.popleft()
            job.rank = rank
            job.stage = Stage.RESERVED
            rank.held += need
            rank.trim()
            assert job.handover is not None
            job.handover.accept(now)

    def _ring(self, job: Job, now: float) -> None:
        """What the job waited for is there."""
        if job.stage is Stage.FETCHING:
            self._queue(job, now)
        elif job.stage is Stage.SENDING:
            assert job.handover is not None
            handover, job.handover = job.handover, None
            self._finish(job, FinishReason.LENGTH, now)
            self._cut(now)
            self.ledger.handed += handover.land(now)

    def _join_batches(self, now: float) -> None:
        """Arrived requests start to decode where the batch has room."""
        waiting: deque[Job] = deque()
        for job in self._arrived:
            if job.rank.batch < self.profile.max_running:
                job.rank.held -= job.context + 1
                self._joining_s += self.profile.decode_request_s
                self._first_token(job, now)
            else:
                waiting.append(job)
        self._arrived = waiting

    def _first_token(self, job: Job, now: float) -> None:
        """The prefill has made a token; the rest of them are decoded."""
        job.generated += 1
        self.statistics.decoded_tokens += 1
        rank = job.rank
        job.stage = Stage.DECODING
        job.base = job.context - rank.step
        job.end = rank.step + job.target - job.generated
        self._decodes += 1
        rank.batch += 1
        rank.context += job.context
        rank.running[job] = None
        heappush(rank.ends, (job.end, next(self._serial), job))
        if job.end == rank.step:
            self._finish(job, FinishReason.STOP, now)
        else:
            self._report_later(job, now)

    def _report_later(self, job: Job, now: float) -> None:
        # All wait equally long, so the first to be due stands first.
        job.report_at = now + self.stream_s
        self._reports.append((job.report_at, job))

    def _report_due(self) -> None:
        due, job = self._reports.popleft()
        if job.report_at == due:
            self.settle(due)
            job.report(job, None)
            self._report_later(job, due)

    def _retract(self, rank: Rank, now: float) -> None:
        """Take the KV cache from the youngest decodes until each of the others has room for one more token."""
        while rank.batch and rank.held + rank.context + rank.batch > rank.capacity:
            job = next(reversed(rank.running))
            self._leave_batch(job)
            self._write_through(job, job.context - 1, now)
            if job.resident:
                job.resident = False
                rank.leave(job.question)
            self.statistics.retracted += 1
            self._join_queue(job, now, front=True)

    def _leave_batch(self, job: Job) -> None:
        rank = job.rank
        job.generated = self.generated(job)
        job.stage = Stage.QUEUED
        job.report_at = NEVER
        self._decodes -= 1
        rank.batch -= 1
        rank.context -= job.context
        del rank.running[job]
        # The first of the ends is always one that will be.
        ends = rank.ends
        while ends and not (
            ends[0][2].stage is Stage.DECODING and ends[0][2].end == ends[0][0] and ends[0][2].rank is rank
        ):
            heappop(ends)
        if not rank.batch:
            rank.paused, rank.pause = 0, 0.0

    # The end of a request.

    def _finish(self, job: Job, reason: FinishReason, now: float) -> None:
        """Free what it holds, keep its KV cache where it can be found again, and tell its stream."""
        rank = job.rank
        kept = self._release(job)
        if kept and self.role is not Role.DECODE:
            rank.put(job, kept)
            rank.trim()
        elif job.resident:
            job.resident = False
            rank.leave(job.question)
        # What was handed over, the decode side writes when it has more.
        if kept and reason is not FinishReason.LENGTH:
            self._write_through(job, kept, now)
        self._close_books(job, now)
        job.stage = Stage.ENDED
        del self.jobs[job]
        job.report(job, reason)

    def _release(self, job: Job) -> int:
        """Take the job out of wherever it is; returns how many tokens of its context have a KV cache."""
        rank, need = job.rank, job.context + 1
        match job.stage:
            case Stage.DECODING:
                self._leave_batch(job)
                # The last token has not been through the model.
                return job.context - 1
            case Stage.FETCHING | Stage.QUEUED:
                rank.work -= job.work
                rank.backlog -= job.context
                if job.stage is Stage.QUEUED:
                    rank.queue.remove(job)
                    self._queued -= 1
            case Stage.PREFILLING:
                rank.queue.remove(job)
                self._queued -= 1
                rank.work -= job.work
                rank.serving -= 1
                rank.held -= need
                return job.done
            case Stage.SENDING:
                rank.held -= need
                return job.context
            case Stage.UNPLACED:
                self._unplaced.remove(job)
            case Stage.RESERVED:
                rank.held -= need
            case Stage.ARRIVED:
                rank.held -= need
                self._arrived.remove(job)
        return 0

    def _close_books(self, job: Job, now: float) -> None:
        """Account for what the job leaves unfinished."""
        self.ledger.cut += job.computed
        job.computed = 0
        if job.stage is Stage.DECODING:
            job.generated = self.generated(job)
        if job.handover is not None:
            self.ledger.lost += job.handover.snap(job, now)
            job.handover = None

    def _write_through(self, job: Job, tokens: int, now: float) -> None:
        if self.store is not None:
            self.store.write(job, tokens, self.version, self.profile.kv_bytes, now)

    # Steps.

    def _boundary(self, now: float) -> None:
        """The present steps are over: book them, end what has ended, begin the next ones."""
        if self._steps:
            self._book(self._steps)
            for rank in self._extending:
                self._chunk_done(rank, now)
            for rank in self._decoding:
                ends = rank.ends
                while ends and ends[0][0] <= rank.step:
                    self._finish(ends[0][2], FinishReason.STOP, now)
            self._extending, self._decoding = [], []
            self._steps = 0
        for job in self._ending:
            if job.stage is not Stage.ENDED:
                self._finish(job, FinishReason.ABORT, now)
        self._ending.clear()
        if self._arrived:
            self._join_batches(now)
        if self._unplaced:
            self._place_decodes(now)
        self._begin(now)

    def _begin(self, now: float) -> None:
        """Begin the next step or steps."""
        extending, decoding = self._extending, self._decoding
        retracted = False
        if self._queued and not (self._decodes and self._since_prefill < self.prefill_every):
            for rank in self.ranks:
                if rank.queue:
                    self._form_chunk(rank, now)
                    if rank.chunk:
                        extending.append(rank)
        if self._decodes:
            for rank in self.ranks:
                if not rank.batch or rank.chunk:
                    continue
                if rank.held + rank.context + rank.batch > rank.capacity:
                    self._retract(rank, now)
                    retracted = True
                if rank.batch:
                    decoding.append(rank)
        if extending:
            self._begin_prefill(now)
        elif decoding:
            # What was retracted may find room on another rank. Each step waits for another part of the host's work. The
            # context must not grow over several points of the grid.
            self._begin_decodes(now, 1 if retracted or self._joining_s else self.times.window)
        else:
            # Where a retraction has emptied every rank, what it has queued can start.
            self._end = now if retracted and self._queued else NEVER

    def _begin_prefill(self, now: float) -> None:
        loads = [sum(tokens for _, tokens in rank.chunk) for rank in self._extending]
        loads += [rank.batch for rank in self._decoding]
        costs = [rank.cost for rank in self._extending]
        costs += [self._price(rank) for rank in self._decoding]
        self._shared = self.times.shared(True, sum(loads) / len(self.ranks), max(loads))
        own, slowest = sum(costs), max(costs)
        self._set_steps(1, now, slowest, slowest, own, own)

    def _begin_decodes(self, now: float, steps: int) -> None:
        """As many as can be until a batch changes or a pool is full, but `steps` at most."""
        tokens = most = 0
        own = slowest = 0.0
        decoding, price = self._decoding, self._price
        for rank in decoding:
            batch, left = rank.batch, rank.ends[0][0] - rank.step
            if left < steps:
                steps = left
            room = rank.capacity - rank.held - rank.context
            if room < steps * batch:
                steps = room // batch
            tokens += batch
            if batch > most:
                most = batch
            cost = price(rank)
            own += cost
            if cost > slowest:
                slowest = cost
        if self._queued and self.prefill_every > self._since_prefill:
            steps = min(steps, self.prefill_every - self._since_prefill)
        last, last_own = slowest, own
        if steps > 1:
            costs = [rank.cost + rank.slope * (steps - 1) for rank in decoding]
            last, last_own = max(costs), sum(costs)
        self._shared = self.times.shared(False, tokens / len(self.ranks), most) + self._host_s()
        self._set_steps(steps, now, slowest, last, own, last_own)

    def _host_s(self) -> float:
        """The next step's part of the host's work for who joins, which is done in as many steps as a handover takes."""
        profile, left = self.profile, self._joining_s
        part = left / max(1.0, profile.handover_steps)
        if left - part < LAST_PART * profile.decode_request_s:
            part = left
        self._joining_s -= part
        return part

    def _price(self, rank: Rank) -> float:
        """The rank's part of a decode step."""
        mean = rank.context / rank.batch
        above = mean - rank.floor
        window = self.times.window
        if rank.priced != rank.batch or not 0 <= above < window:
            rank.floor = int(mean) // window * window
            rank.priced = rank.batch
            rank.low, rank.slope = self.times.decode(rank.batch, rank.floor)
            above = mean - rank.floor
        rank.cost = rank.low + rank.slope * above
        return rank.cost

    def _set_steps(self, steps: int, now: float, slowest: float, last: float, own: float, last_own: float) -> None:
        """`slowest` and `own`: the ranks' part of the first step, the largest and the sum; `last...` of the last one."""
        self._steps = steps
        self._start = now
        self._first = slowest + self._shared
        self._own = own
        self._growth = (last - slowest) / (steps - 1) if steps > 1 else 0.0
        self._own_growth = (last_own - own) / (steps - 1) if steps > 1 else 0.0
        self._end = now + self._duration(steps)

    def _duration(self, steps: int) -> float:
        """Of the first so many of the present steps."""
        return steps * (self._first + self._growth * (steps - 1) / 2)

    def _steps_until(self, now: float) -> int:
        """How many of the present steps are over."""
        if now >= self._end:
            return self._steps
        if now <= self._start or not self._steps:
            return 0
        # first * n + growth * n * (n - 1) / 2 = now - start
        half = self._first - self._growth / 2
        elapsed = now - self._start
        steps = int(2 * elapsed / (half + math.sqrt(max(half * half + 2 * self._growth * elapsed, 0.0))))
        while self._start + self._duration(steps) > now:
            steps -= 1
        while self._start + self._duration(steps + 1) <= now:
            steps += 1
        return min(steps, self._steps)

    def _unbooked(self, now: float) -> int:
        """How many of the present steps are over and end no request."""
        return min(self._steps_until(now), self._steps - 1) if self._steps > 1 else 0

    def _cut(self, now: float) -> None:
        """Something has come: end the present steps at the next boundary, or begin when there are none."""
        if self._steps <= 1:
            if not self._steps:
                self._end = min(self._end, now)
            return
        steps = self._steps_until(now)
        if self._start + self._duration(steps) < now or steps == 0:
            steps += 1
        if steps < self._steps:
            self._steps = steps
            self._end = self._start + self._duration(steps)

    def _book(self, steps: int) -> None:
        """The first `steps` of the present steps are made."""
        statistics, ranks = self.statistics, len(self.ranks)
        duration = self._duration(steps)
        pairs = steps * (steps - 1) / 2
        own = steps * self._own + pairs * self._own_growth
        waited = duration - steps * self._shared - own / ranks
        start, latency, tokens = self._start, duration / steps, 0
        for rank in self._decoding:
            batch = rank.batch
            rank.step += steps
            rank.context += batch * steps
            tokens += batch * steps
            if rank.paused:
                tokens -= self._book_pause(rank, start)
            if rank.held + rank.context + rank.cached > rank.capacity:
                rank.trim()
        if tokens:
            statistics.add_latency(start, start + duration, latency, tokens)
            statistics.decoded_tokens += tokens
        statistics.steps += steps
        statistics.step_s += duration
        if self._extending:
            slowest = self._first - self._shared
            stalled = sum(slowest - rank.cost for rank in self._decoding) / ranks
            statistics.interference_s += stalled
            statistics.prefill_steps += steps
            waited -= stalled
            for rank in self._extending:
                if rank.batch:
                    rank.paused = rank.paused or rank.batch
                    rank.pause += duration
            self._since_prefill = 0
        else:
            self._since_prefill += steps
        statistics.imbalance_s += waited
        self._steps -= steps
        self._start += duration
        self._first += self._growth * steps
        self._own += self._own_growth * steps

    def _book_pause(self, rank: Rank, start: float) -> int:
        """The first token after its rank has prefilled took each decode that long; returns how many there were."""
        stopped, waited = min(rank.paused, rank.batch), rank.pause + self._first
        rank.paused, rank.pause = 0, 0.0
        self.statistics.add_latency(start, start + self._first, waited, stopped)
        self.statistics.decoded_tokens += stopped
        return stopped
