"""What passes through the stages on a grid of time: arrivals, the prefill queue, decode, tools, and arrivals again.

Expected numbers flow, not trajectories. Every array has the last axis over the bins of the grid and the axis before it over
the tasks; a volume is a pair of requests and tokens on the first axis. A kernel says how many bins later what enters a stage
leaves it: [j] is the chance that it is j bins later, for what enters at any moment of a bin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
    """[2, task] and the seconds of an instance that the prefills take."""

    volume: Floats
    work: float


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
    tasks, bins = stages.coming.shape[1:]
    back, growth = _kernels(stages)
    at_once = back[tasks:, 0], growth[tasks:, 0]
    later = np.zeros_like(stages.coming)
    # What is queued now in the first rows, what arrives in the others.
    admitted = np.zeros((2, 2 * tasks, bins))
    server = _Server(stages, admitted)
    for k in range(bins):
        server.begin(k)
        sofar, chance, gain = admitted[:, :, : k + 1], back[:, k::-1], growth[:, k::-1]
        requests = np.einsum("tj,tj->t", sofar[REQUESTS], chance)
        tokens = np.einsum("tj,tj->t", sofar[TOKENS], chance) + np.einsum("tj,tj->t", sofar[REQUESTS], gain)
        came = np.stack((requests, tokens)).reshape(2, 2, tasks).sum(axis=1)
        for _ in range(ROUNDS):
            later[:, :, k] += came
            served = server.serve(came)
            came = np.stack(
                (served[REQUESTS] * at_once[0], served[TOKENS] * at_once[0] + served[REQUESTS] * at_once[1])
            )
        # Whatever is left of those comes with the next bin.
        if k + 1 < bins:
            server.owe(came)
            later[:, :, k + 1] += came
    queued, new = admitted[:, :tasks], admitted[:, tasks:]
    ended, decoding = np.zeros_like(later), np.zeros((2, bins))
    for volume, turns in ((queued, stages.queued_turns), (new, stages.turns)):
        output = turns.speed * stages.grid.lags
        stays = 1.0 - np.cumsum(turns.ends, axis=1)
        ended += convolved(volume, turns.ends)
        ended[TOKENS] += convolved(volume[REQUESTS], turns.ends * output)
        decoding += convolved(volume, stays).sum(axis=1)
        decoding[TOKENS] += convolved(volume[REQUESTS], stays * output).sum(axis=0)
    return Passed(stages.coming + later, later, queued, new, ended, decoding)


class _Server:
    """The prefill instances as one server that works on the queue first and then on what arrives, in order."""

    def __init__(self, stages: Stages, admitted: Floats) -> None:
        self._stages = stages
        self._admitted = admitted
        self._tasks = len(stages.appended)
        self._old, self._old_work = stages.queued.volume.copy(), stages.queued.work
        self._new, self._new_work = np.zeros_like(self._old), 0.0
        whole, self._part = divmod(stages.latency / stages.grid.step, 1.0)
        self._late = int(whole)
        self._bin = 0
        self._left = 0.0

    def begin(self, k: int) -> None:
        """Bin k begins: the queue is served, and what was to come arrives."""
        self._bin, self._left = k, self._stages.instances * self._stages.grid.step
        if self._old_work > 0.0:
            share = min(self._left / self._old_work, 1.0)
            self._left -= share * self._old_work
            self._old_work *= 1.0 - share
        else:
            share = 1.0
        self._admitted[:, : self._tasks, k] += share * self._old
        self._old *= 1.0 - share
        self._new += self._stages.coming[:, :, k]
        self._new_work += float(self._stages.coming_work[k])

    def owe(self, volume: Floats) -> None:
        """Requests that are served later."""
        self._new += volume
        self._new_work += float(volume[REQUESTS] @ self._stages.later_work)

    def serve(self, volume: Floats) -> Floats:
        """`volume` arrives in this bin too; returns what of all that waits is admitted to decode within the bin."""
        self.owe(volume)
        share = min(self._left / self._new_work, 1.0) if self._new_work > 0.0 else 1.0
        served = share * self._new
        self._left -= share * self._new_work
        self._new_work *= 1.0 - share
        self._new -= served
        first = self._bin + self._late
        for at, part in ((first, 1.0 - self._part), (first + 1, self._part)):
            if at < self._admitted.shape[-1]:
                self._admitted[:, self._tasks :, at] += part * served
        return served * (1.0 - self._part) if not self._late else np.zeros_like(served)


def _kernels(stages: Stages) -> tuple[Floats, Floats]:
    """From admission to the next request, [2 tasks, lag]: the chance, and the chance times what the context gains."""
    rows = []
    for turns in (stages.queued_turns, stages.turns):
        back = convolved(turns.ends, stages.tools)
        output = convolved(turns.ends * (turns.speed * stages.grid.lags), stages.tools)
        goes_on = turns.goes_on[:, None]
        rows.append((goes_on * back, goes_on * (output + stages.appended[:, None] * back)))
    back, growth = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return back, growth


def convolved(volume: Floats, kernel: Floats) -> Floats:
    """What leaves a stage, on the same grid: [..., task, bin] through [task, lag]."""
    bins = kernel.shape[-1]
    lag = np.arange(bins)[:, None] - np.arange(bins)[None, :]
    matrix = np.where(lag >= 0, kernel[:, lag], 0.0)
    through: Floats = np.einsum("tkj,...tj->...tk", matrix, volume)
    return through
