"""What a forecast says, and what every forecaster can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from prorsa.forecast.work import Work
from prorsa.lifecycle.snapshot import Snapshot, Transition
from prorsa.lifecycle.states import State


@dataclass(frozen=True, slots=True)
class Forecast:
    """The demand over [time, time + horizon). All volumes are full prompt lengths in tokens (paper, B.1)."""

    time: float
    horizon: float
    """S, seconds."""
    sampler: float
    """Predicted first requests of trajectories that are not sampled yet, uncorrected (Eq. 5)."""
    startup: float
    """Predicted first requests of trajectories that are starting, uncorrected (Eq. 7)."""
    ready: float
    """Observed: requests in READY (Eq. 8)."""
    tool: float
    """Predicted requests after a tool's return, uncorrected (Eq. 11)."""
    inflight: float
    """Observed: requests in PREFILL (Eq. 12)."""
    bias: float
    """Multiplies the predicted parts (B.8)."""
    prefill_tokens: float
    """W (Eq. 15): backlog + bias * predicted."""
    admitted_tokens: float
    """A_dec (Eq. 14): prompt tokens of the requests that finish their prefill within the horizon."""
    admitted_kv: float
    """K_dec (Eq. 14): KV-cache footprint of those requests at their admission."""
    decode_kv: float
    """K_now: KV-cache footprint of the requests in DECODE."""
    from_decode: float = 0.0
    """Predicted requests of trajectories that decode now (and what else comes within the horizon), uncorrected; not in the
    paper, whose forecaster says 0."""
    admission_bias: float = 1.0
    """Multiplies what the predicted requests add to `admitted_tokens` and `admitted_kv`."""
    admitted_backlog: float = 0.0
    """What the observed requests add to `admitted_tokens`."""
    uncached_tokens: float = 0.0
    """Of `prefill_tokens`, what has to be computed. This and what follows is 0 where the forecaster says nothing of it."""
    prefill_sd: float = 0.0
    """Standard deviation of what `prefill_tokens` will turn out to be."""
    completed_turns: float = 0.0
    """Turns that end within the horizon."""
    kv_now: float = 0.0
    """`decode_kv` with the tokens that have not been reported yet."""
    kv_end: float = 0.0
    """KV-cache footprint of the requests in DECODE at the end of the horizon."""
    kv_peak: float = 0.0
    """The most that it is expected to be on the way, now and the end included."""
    kv_sd: float = 0.0
    """Standard deviation of what `kv_end` will turn out to be."""
    work: Work | None = None
    """None where the forecaster does not look so closely."""

    @classmethod
    def of_backlog(cls, snapshot: Snapshot, horizon: float) -> Forecast:
        """That what is observed to wait will be prefilled, and nothing else comes."""
        ready, inflight, decoding = (
            float(snapshot.tokens[snapshot.state == state].sum())
            for state in (State.READY, State.PREFILL, State.DECODE)
        )
        backlog = ready + inflight
        return cls(
            time=snapshot.time,
            horizon=horizon,
            sampler=0.0,
            startup=0.0,
            ready=ready,
            tool=0.0,
            inflight=inflight,
            bias=1.0,
            prefill_tokens=backlog,
            admitted_tokens=backlog,
            admitted_kv=backlog,
            decode_kv=decoding,
        )

    @property
    def predicted(self) -> float:
        """The predicted parts together, uncorrected."""
        return self.sampler + self.startup + self.tool + self.from_decode

    @property
    def backlog(self) -> float:
        """The observed parts together."""
        return self.ready + self.inflight


class Forecaster(Protocol):
    def observe(self, transition: Transition) -> None:
        """Learn from one applied event. Every event of the run goes through here, once and in order."""
        ...

    def caches_lost(self) -> None:
        """Every instance has new weights: no KV cache of before is of use."""
        ...

    def forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        """The demand over the next `horizon` seconds. `prefill_instances` are those that prefill now (mixed ones too)."""
        ...
