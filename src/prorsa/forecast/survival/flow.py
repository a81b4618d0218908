"""What passes through the stages on a grid of time: arrivals, the prefill queue, decode, tools, and arrivals again.

Expected numbers flow, not trajectories. Every array has the last axis over the bins of the grid and the axis before it over
the tasks; a volume is a pair of requests and tokens on the first axis. A kernel says how many bins later what enters a stage
leaves it: [j] is the chance that it is j bins later, for what enters at any moment of a bin.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.durations import Floats

REQUESTS, TOKENS = 0, 1
ROUNDS = 2
"""What returns within its own bin is served again in the same bin so often at most."""


@dataclass(frozen=True, slots=True)
class Grid:
    bins: int
    step: float
    """Seconds of a bin."""

    @property
    def lags(self) -> Floats:
        """Seconds between the bins of a kernel."""
        return np.arange(self.bins, dtype=np.float64) * self.step

    @property
    def middles(self) -> Floats:
        """Seconds from now to the middle of each bin."""
        return self.lags + 0.5 * self.step


@dataclass(frozen=True, slots=True)
class Turns:
    """Turns that are to be decoded, of each task."""

    ends: Floats
    """[task, lag]: kernel from the start of a decode to its end."""
    goes_on: Floats
    """[task]: chance that a tool follows."""
    speed: float
    """Tokens/s of a decode."""


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits, in order."""

    volume: Floats
    """[2, task]."""
    tokens: Floats
    """Of each request; so is the next."""
    work: Floats
    """Seconds of an instance that its prefill takes."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Where everything is and how it goes on."""

    grid: Grid
    coming: Floats
    """[2, task, bin]: requests of trajectories that are not queued now, the next one of each."""
    coming_work: Floats
    """[bin]: seconds of an instance that their prefills take."""
    queued: Queue
    """In READY and PREFILL."""
    queued_turns: Turns
    turns: Turns
    """Of all requests that are to come."""
    tools: Floats
    """[task, lag]: kernel from the end of a turn to the next request."""
    appended: Floats
    """[task]: tokens that a tool's result adds."""
    later_work: Floats
    """[task]: seconds of an instance for the prefill of a request that is not the next one of its trajectory."""
    instances: float
    """That prefill."""
    latency: float
    """Seconds that a prefill takes at least, however idle its instance is."""


@dataclass(frozen=True, slots=True)
class Passed:
    """[2, task, bin] each."""

    arrived: Floats
    later: Floats
    """Of these, the requests that are not the next ones of their trajectories, or come from those queued now."""
    admitted_queued: Floats
    """Prefills that end, of what is queued now."""
    admitted_new: Floats
    """The same of what arrives."""
    ended: Floats
    """Of these, the turns that end."""
    decoding: Floats
    """[2, bin]: of these, what still decodes at the end of each bin, with the tokens that it has then."""


def pass_through(stages: Stages) -> Passed:
    """Serve the queue in order and let what is decoded come back."""
    admitted_queued, spare = _serve_queued(stages)
    of_queued, of_new = _returns(stages)
    returned = _passed(admitted_queued, of_queued)
    served, again = _serve_new(stages, _delayed(of_new, stages), returned, spare)
    admitted_new = _delayed(served, stages)
    both = np.concatenate((admitted_queued, admitted_new), axis=1)
    ends = np.concatenate((stages.queued_turns.ends, stages.turns.ends))
    leaves = np.array((ends, 1.0 - np.add.accumulate(ends, axis=1)))
    output = np.array((stages.queued_turns.speed, stages.turns.speed)).repeat(len(stages.appended))
    leaves_with = leaves * (output[:, None] * stages.grid.lags)
    ended, decoding = _passed(both, np.array((leaves, leaves_with)))
    return Passed(
        stages.coming + again,
        again,
        admitted_queued,
        admitted_new,
        ended.reshape(2, 2, *again.shape[1:]).sum(axis=1),
        decoding.sum(axis=1),
    )


def _serve_queued(stages: Stages) -> tuple[Floats, Floats]:
    """([2, task, bin] of the queue that is admitted to decode, [bin]: seconds of the instances that are left then).

    The prefill instances are as one server, which works on the queue before it works on what arrives.
    """
    bins, queued = stages.grid.bins, stages.queued
    capacity = stages.instances * stages.grid.step
    work = np.append(0.0, np.cumsum(queued.work))
    done = np.minimum(capacity * np.arange(bins + 1.0), work[-1])
    share = np.zeros((2, bins))
    share[:, 0] = 1.0
    if work[-1] > 0.0:
        tokens = np.append(0.0, np.cumsum(queued.tokens))
        requests = np.arange(len(work), dtype=np.float64)
        share = np.diff([np.interp(done, work, passed / passed[-1]) for passed in (requests, tokens)])
    return queued.volume[:, :, None] * share[:, None], np.maximum(capacity - (done[1:] - done[:-1]), 0.0)


def _serve_new(stages: Stages, returns: Floats, returned: Floats, spare: Floats) -> tuple[Floats, Floats]:
    """Serve what arrives in order, in the seconds `spare` [bin] of the instances.

    What is served comes back by the kernels `returns` (chance and gain); `returned` [2, task, bin] comes back of the queue.
    Returns [2, task, bin] each: what is served, and what comes back of the queue and of that.
    """
    tasks, bins = stages.coming.shape[1:]
    chance, gain = returns
    # [task, what returns, bins ago, what was served], the oldest first: what returns in a bin is one product.
    kernel = np.zeros((tasks, 2, bins, 2))
    kernel[:, REQUESTS, :, REQUESTS] = kernel[:, TOKENS, :, TOKENS] = chance[:, ::-1]
    kernel[:, TOKENS, :, REQUESTS] = gain[:, ::-1]
    at_once, history = kernel[:, :, -1], kernel.reshape(tasks, 2, 2 * bins)
    # [bin, task, 2, 1]: columns for that product.
    coming, returned = (volume.transpose(2, 1, 0)[..., None].copy() for volume in (stages.coming, returned))
    seconds = np.array((stages.later_work, np.zeros(tasks))).T.reshape(-1)
    served, again = np.zeros((tasks, 2 * bins, 1)), np.zeros_like(coming)
    waiting, work, came = np.zeros((tasks, 2, 1)), 0.0, np.zeros((tasks, 2, 1))
    for k in range(bins):
        waiting += coming[k]
        work += float(stages.coming_work[k])
        left = float(spare[k])
        came += returned[k]
        if k:
            came += np.matmul(history[:, :, 2 * (bins - 1 - k) : -2], served[:, : 2 * k])
        for _ in range(ROUNDS):
            again[k] += came
            waiting += came
            work += float(np.vdot(seconds, came))
            if left <= 0.0 < work:
                came = np.zeros((tasks, 2, 1))
                break
            done = min(left, work)
            now = done / work * waiting if work > 0.0 else waiting
            waiting = waiting - now
            left -= done
            work -= done
            served[:, 2 * k : 2 * k + 2] += now
            # What the last round leaves of these comes with the next bin.
            came = np.matmul(at_once, now)
    return served.reshape(tasks, bins, 2).transpose(2, 0, 1), again[..., 0].transpose(2, 1, 0)


def _returns(stages: Stages) -> Floats:
    """Kernels from admission to the next request, of the turns that are queued and of those to come.

    [2, 2, task, lag]: of both, the chance, and the chance times what the context gains.
    """
    kinds = stages.queued_turns, stages.turns
    lags = stages.grid.lags
    back: Floats = convolved(
        np.array([(turns.ends, turns.ends * (turns.speed * lags)) for turns in kinds]), stages.tools
    )
    back[:, TOKENS] += stages.appended[:, None] * back[:, REQUESTS]
    back *= np.array([turns.goes_on for turns in kinds])[:, None, :, None]
    return back


def _delayed(volume: Floats, stages: Stages) -> Floats:
    """[..., bin], as much later as a prefill takes at least."""
    whole, part = divmod(stages.latency / stages.grid.step, 1.0)
    delay = np.zeros(stages.grid.bins + 2)
    at = min(int(whole), stages.grid.bins)
    delay[at : at + 2] = 1.0 - part, part
    return convolved(volume, delay[None, :-2])


def _passed(volume: Floats, kernels: Floats) -> Floats:
    """[..., 2, task, bin] that leaves a stage; `kernels` [2, ..., task, lag] are the chance, and the tokens that a request
    gains, times the chance."""
    moved = convolved(volume, kernels[:, ..., None, :, :])
    through: Floats = moved[0]
    through[..., TOKENS, :, :] += moved[1, ..., REQUESTS, :, :]
    return through


def convolved(volume: Floats, kernel: Floats) -> Floats:
    """What leaves a stage, on the same grid: [..., task, bin] through [..., task, lag]."""
    bins = kernel.shape[-1]
    late = np.zeros((*kernel.shape[:-1], bins + 1))
    late[..., :-1] = kernel
    through: Floats = np.matmul(late.take(_lags(bins), axis=-1), volume[..., None])[..., 0]
    return through


@lru_cache(maxsize=4)
def _lags(bins: int) -> NDArray[np.intp]:
    """[bin, earlier bin]: the lag between them, `bins` where the second is not the earlier one."""
    lag = np.arange(bins)[:, None] - np.arange(bins)
    return np.where(lag >= 0, lag, bins)
