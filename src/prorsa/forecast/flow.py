"""What passes through the stages on a grid of time: arrivals, the prefill queue, decode, tools, and arrivals again.

Expected numbers flow, not trajectories. Every array has the last axis over the bins of the grid and the axis before it over
the tasks; a volume is a pair of requests and tokens on the first axis. A kernel says how many bins later what enters a stage
leaves it: [j] is the chance that it is j bins later, for what enters at any moment of a bin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast.durations import Floats

REQUESTS, TOKENS = 0, 1


@dataclass(frozen=True, slots=True)
class Grid:
    bins: int
    step: float
    """Seconds of a bin."""

    @property
    def middles(self) -> Floats:
        """Seconds from now to the middle of each bin."""
        return self.lags + 0.5 * self.step

    @property
    def lags(self) -> Floats:
        """Seconds between the bins of a kernel."""
        return np.arange(self.bins, dtype=np.float64) * self.step


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns that are to be decoded, of each task."""

    ends: Floats
    """[task, lag]: kernel from the start of a decode to its end."""
    goes_on: Floats
    """[task]: chance that a tool follows."""
    speed: float
    """Tokens/s of a decode."""


@dataclass(frozen=True, slots=True)
class Stages:
    """Where everything is and how it goes on."""

    grid: Grid
    coming: Floats
    """[2, task, bin]: requests of trajectories that are neither queued nor decoding, and of those that decode now."""
    coming_work: Floats
    """[bin]: seconds of an instance that their prefills take."""
    queued: Floats
    """[2, task]: in READY and PREFILL."""
    queued_work: float
    queued_turns: Turns
    turns: Turns
    """Of all requests that are to come."""
    tools: Floats
    """[task, lag]: kernel from the end of a turn to the next request."""
    appended: Floats
    """[task]: tokens that a tool's result adds."""
    later_work: Floats
    """[task]: seconds of an instance for the prefill of a request after that."""
    instances: float
    """That prefill."""
    latency: float
    """Seconds that a prefill takes at least, however idle its instance is."""


@dataclass(frozen=True, slots=True)
class Passed:
    """[2, task, bin] each."""

    arrived: Floats
    later: Floats
    """Of these, the requests of trajectories that are queued now or decode twice."""
    admitted_queued: Floats
    """Prefills that end, of what is queued now."""
    admitted_new: Floats
    """The same of what arrives."""


def pass_through(stages: Stages) -> Passed:
    """Serve the queue in order and let what is decoded come back."""
    grid = stages.grid
    tasks, bins = stages.coming.shape[1:]
    back, growth = _kernels(stages)
    arrived, later = stages.coming.copy(), np.zeros_like(stages.coming)
    # What is queued now in the first rows, what arrives in the others.
    admitted = np.zeros((2, 2 * tasks, bins))
    old, new = stages.queued.copy(), np.zeros((2, tasks))
    old_work, new_work = stages.queued_work, 0.0
    room = stages.instances * grid.step
    whole, part = divmod(stages.latency / grid.step, 1.0)
    late = int(whole)
    for k in range(bins):
        if k:
            lags = slice(k, 0, -1)
            requests = np.einsum("tj,tj->t", admitted[REQUESTS, :, :k], back[:, lags])
            tokens = np.einsum("tj,tj->t", admitted[TOKENS, :, :k], back[:, lags])
            tokens += np.einsum("tj,tj->t", admitted[REQUESTS, :, :k], growth[:, lags])
            later[REQUESTS, :, k] = requests[:tasks] + requests[tasks:]
            later[TOKENS, :, k] = tokens[:tasks] + tokens[tasks:]
            arrived[:, :, k] += later[:, :, k]
        left = room
        if old_work > 0.0:
            share = min(left / old_work, 1.0)
            admitted[:, :tasks, k] += share * old
            old *= 1.0 - share
            left -= share * old_work
            old_work *= 1.0 - share
        else:
            admitted[:, :tasks, k] += old
            old[:] = 0.0
        new += arrived[:, :, k]
        new_work += float(stages.coming_work[k]) + float(later[REQUESTS, :, k] @ stages.later_work)
        share = min(left / new_work, 1.0) if new_work > 0.0 else 1.0
        served = share * new
        new -= served
        new_work *= 1.0 - share
        if k + late < bins:
            admitted[:, tasks:, k + late] += (1.0 - part) * served
        if k + late + 1 < bins:
            admitted[:, tasks:, k + late + 1] += part * served
    return Passed(arrived, later, admitted[:, :tasks], admitted[:, tasks:])


def _kernels(stages: Stages) -> tuple[Floats, Floats]:
    """From admission to the next request, [2 tasks, lag]: the chance, and the chance times what the context gains."""
    rows = []
    for turns in (stages.queued_turns, stages.turns):
        back = convolved(turns.ends, stages.tools)
        output = convolved(turns.ends * (turns.speed * stages.grid.lags), stages.tools)
        rows.append(
            (turns.goes_on[:, None] * back, turns.goes_on[:, None] * (output + stages.appended[:, None] * back))
        )
    back, growth = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    for kernel in (back, growth):
        # Nothing comes back within its own bin: those few come one later.
        kernel[:, 1] += kernel[:, 0]
        kernel[:, 0] = 0.0
    return back, growth


def convolved(volume: Floats, kernel: Floats) -> Floats:
    """What leaves a stage, on the same grid: [..., task, bin] through [task, lag]."""
    bins = kernel.shape[-1]
    lag = np.arange(bins)[:, None] - np.arange(bins)[None, :]
    matrix = np.where(lag >= 0, kernel[:, lag], 0.0)
    through: Floats = np.einsum("tkj,...tj->...tk", matrix, volume)
    return through


def decoding(passed: Passed, stages: Stages) -> NDArray[np.float64]:
    """[2, bin]: what was admitted since and still decodes at the end of each bin, with the tokens that it has."""
    total = np.zeros((2, stages.grid.bins))
    for admitted, turns in ((passed.admitted_queued, stages.queued_turns), (passed.admitted_new, stages.turns)):
        stays = 1.0 - np.cumsum(turns.ends, axis=1)
        total += convolved(admitted, stays).sum(axis=1)
        total[TOKENS] += convolved(admitted[REQUESTS], stays * (turns.speed * stages.grid.lags)).sum(axis=0)
    return total
