"""What the tests of the simulated engines share: profiles, made-up step costs, and cores driven by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, cast

from prorsa.engines.protocol import FinishReason, Role
from prorsa.profiles.costs import StepCosts
from prorsa.profiles.profile import Profile
from prorsa.simulation.engines.core import NEVER, Core, StepTimes
from prorsa.simulation.engines.ranks import Job
from prorsa.simulation.engines.statistics import Ledger, Statistics
from prorsa.simulation.engines.transfer import Handover, KvStore


def a_profile(**changes: Any) -> Profile:
    """Two ranks, chunks of 100 tokens, a network of 1,000 tokens/s, a store of 10,000."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "model": "m",
        "gpu": "g",
        "source": "made up",
        "gpus": 2,
        "ranks": 2,
        "grid": "tiny.csv",
        "chunk": 100,
        "kv_tokens": 10_000,
        "kv_bytes": 10,
        "max_running": 8,
        "network_bytes_per_s": 10_000.0,
        "store_bytes_per_s": 100_000.0,
        "flip_s": 2.0,
        "update_s": 3.0,
        "restart_s": 20.0,
    }
    return Profile(**fields | changes)


@dataclass
class Costs:
    """Seconds. A step of a prefilling rank costs `token` for each token and `prefix` for each token of prefix; of a
    decoding one `request` for each request and `context` for each token of KV cache; all then take `together`."""

    token: float = 0.01
    prefix: float = 0.0
    read: float = 0.0
    """What each request after the first of a chunk costs for each token of its own prefix."""
    request: float = 0.125
    context: float = 0.0
    together: float = 0.5
    bend: int | None = None
    """Tokens of context up to which they cost a decode nothing."""

    @property
    def least_window(self) -> int | None:
        return self.bend

    def prefill_local(self, tokens: float, prefix: float) -> float:
        return self.token * tokens + self.prefix * prefix

    def prefix_s(self, prefix: float) -> float:
        return self.read * prefix

    def decode_local(self, batch: float, context: float) -> float:
        return self.request * batch + self.context * batch * max(0.0, context - (self.bend or 0))

    def shared(self, extending: bool, mean_tokens: float, max_tokens: float) -> float:
        return self.together


@dataclass
class Seen:
    """What was reported of a request."""

    reports: list[tuple[float, int, FinishReason | None]] = field(default_factory=list)
    """(time, tokens generated so far, finish)."""

    @property
    def end(self) -> float:
        assert self.reports[-1][2] is not None, "it has not ended"
        return self.reports[-1][0]

    @property
    def tokens(self) -> int:
        return self.reports[-1][1]

    @property
    def finish(self) -> FinishReason | None:
        return self.reports[-1][2]


class Bench:
    """Cores driven by a plain list of acts."""

    def __init__(self, costs: Costs | None = None, *, store: bool = False, **profile: Any) -> None:
        self.profile = a_profile(**profile)
        self.times = StepTimes(cast(StepCosts, costs or Costs()))
        self.statistics = Statistics()
        self.ledger = Ledger()
        self.store = KvStore(self.profile.store_bytes_per_s) if store else None
        self.cores: list[Core] = []
        self.seen: dict[str, Seen] = {}
        self.jobs: dict[str, list[tuple[Core, Job]]] = {}
        self.questions: dict[str, int] = {}
        self.first_prompts: dict[int, int] = {}
        self.now = 0.0
        self._acts: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = count()

    def core(self, role: Role = Role.MIXED, *, prefill_every: int = 0, stream_s: float = 1e9, version: int = 0) -> Core:
        core = Core(
            self.profile,
            self.times,
            role,
            version=version,
            store=self.store,
            statistics=self.statistics,
            ledger=self.ledger,
            changed=lambda: None,
            prefill_every=prefill_every,
            stream_s=stream_s,
        )
        self.cores.append(core)
        return core

    def job(self, core: Core, name: str, prompt: int, target: int, question: int, handover: Handover | None) -> Job:
        """Its trajectory is what stands before the first dot of its name, alone in its group unless `question` is given."""
        seen = self.seen.setdefault(f"{name}/{core.role}", Seen())

        def report(job: Job, finish: FinishReason | None) -> None:
            generated = core.generated(job)
            self.ledger.streamed += generated - job.told
            job.told = generated
            seen.reports.append((self.now, generated, finish))

        trajectory = name.split(".")[0]
        question = question or self.questions.setdefault(trajectory, 1000 + len(self.questions))
        job = Job(
            trajectory=trajectory,
            question=question,
            prompt=prompt,
            target=target,
            first_prompt=self.first_prompts.setdefault(question, prompt),
            report=report,
            handover=handover,
        )
        self.jobs.setdefault(name, []).append((core, job))
        return job

    def at(self, time: float, act: Callable[[], None]) -> None:
        heappush(self._acts, (time, next(self._serial), act))

    def ask(self, time: float, core: Core, name: str, prompt: int, target: int, question: int = 0) -> None:
        """A request for a mixed instance."""
        self.at(time, lambda: core.prefill(self.job(core, name, prompt, target, question, None), self.now))

    def ask_pair(self, time: float, prefill: Core, decode: Core, name: str, prompt: int, target: int) -> None:
        handover = Handover()
        self.at(time, lambda: prefill.prefill(self.job(prefill, name, prompt, 0, 0, handover), self.now))
        self.at(time, lambda: decode.decode(self.job(decode, name, prompt, target, 0, handover), self.now))

    def abort(self, time: float, name: str) -> None:
        def act() -> None:
            for core, job in self.jobs[name]:
                core.abort(job, self.now)

        self.at(time, act)

    def run(self, until: float = 1e9) -> None:
        """Acts of the same time come before what is due then."""
        while True:
            act = self._acts[0][0] if self._acts else NEVER
            due = min(core.due for core in self.cores)
            self.now = min(act, due, until)
            if act <= min(due, until):
                heappop(self._acts)[2]()
            elif due <= until:
                for core in self.cores:
                    core.advance(self.now)
            else:
                break
            if act == due == NEVER:
                break
        self.check()

    def check(self) -> None:
        live = [(core, job) for core in self.cores for job in core.jobs]
        for core in self.cores:
            core.settle(self.now)
            core.check()
        self.ledger.check(
            self.statistics,
            prefilling=sum(job.computed for _, job in live),
            moving=sum({id(job.handover): job.handover.moved for _, job in live if job.handover}.values()),
            untold=sum(core.generated(job) - job.told for core, job in live),
        )

    def end(self, name: str, role: Role = Role.MIXED) -> float:
        return self.seen[f"{name}/{role}"].end
