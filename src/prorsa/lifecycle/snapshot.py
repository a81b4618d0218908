"""The atomic, immutable picture of every live trajectory that a forecast starts from (paper, B.1 "Input")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prorsa.lifecycle.events import Event, SandboxMode
from prorsa.lifecycle.states import State

NONE = -1
"""The code of "no name": no tool yet, no sandbox, no instance."""
MODES = (SandboxMode.PREWARMED, SandboxMode.COLD)
"""By their codes."""


@dataclass(frozen=True, slots=True)
class Names:
    """What the integer codes of a snapshot stand for: `tasks[code]` is the name.

    A code stands for the same name as long as a live trajectory has it; in another snapshot it may stand for another one,
    that of an instance excepted.
    """

    groups: tuple[str, ...]
    tasks: tuple[str, ...]
    tools: tuple[str, ...]
    instances: tuple[str, ...]
    images: tuple[str, ...]
    node_classes: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """N live trajectories as columns; row i is one trajectory. The arrays are read-only copies."""

    time: float
    """When it was taken, seconds."""
    ids: tuple[str, ...]
    state: NDArray[np.int8]
    """`State` values, live ones only."""
    since: NDArray[np.float64]
    """When the present state was entered, seconds."""
    tokens: NDArray[np.int64]
    """READY, PREFILL: full prompt length x_j. DECODE: prompt plus tokens generated so far. TOOL, REWARD: context length.
    SAMPLED, SANDBOX_STARTING: first prompt where known, else 0."""
    start: NDArray[np.int64]
    """Tokens of the context with which the present or last turn began; NONE before the first."""
    prompt: NDArray[np.int64]
    """Full prompt length of its last attempt: more than `start` where it was cancelled and resent."""
    turn: NDArray[np.int32]
    """Index of the present or next model turn: 0 until the first decode ended."""
    version: NDArray[np.int32]
    """Weights version when it was sampled."""
    order: NDArray[np.int64]
    """Sequence number of the last entry into READY: the ready queue is served in this order."""
    group: NDArray[np.int32]
    task: NDArray[np.int32]
    tool: NDArray[np.int32]
    """The running tool in TOOL, else NONE."""
    instance: NDArray[np.int32]
    """The instance that serves it in PREFILL and DECODE, else NONE."""
    mode: NDArray[np.int8]
    """SANDBOX_STARTING: index into `MODES`; else NONE."""
    image: NDArray[np.int32]
    node_class: NDArray[np.int32]
    concurrency: NDArray[np.int32]
    """SANDBOX_STARTING: sandboxes starting when it began, itself included; TOOL: tools running then, itself included."""
    names: Names

    def __len__(self) -> int:
        return len(self.ids)


class Transition(NamedTuple):
    """What one applied event meant: from which state to which, and how long the trajectory had been in the former.

    Whatever learns from the rollout (duration statistics, prefill speed, metrics) is fed these.
    """

    event: Event
    before: State | None
    """None for `Sampled`."""
    after: State
    elapsed: float
    """Seconds spent in `before`."""
    tokens_before: int
    """The `tokens` column before the event (see `Snapshot`)."""
    tokens: int
    """The `tokens` column after the event."""
    turn: int
    """The `turn` column before the event."""
    task: str
    group: str
    group_code: int
    """The `group` column: see `Names` for how long it stands for `group`."""
    concurrency: int
    """The `concurrency` column of `before`; 0 where it has none."""
    sampled_at: float
    """When the trajectory was sampled, seconds."""
    tool: str | None = None
    """The tool that ran, when `before` is TOOL."""
    instance: str | None = None
    """The instance that served it, when `before` is PREFILL or DECODE."""
    mode: str | None = None
    """`SandboxMode` of the startup, when `before` is SANDBOX_STARTING; so are the next two."""
    image: str | None = None
    node_class: str | None = None
