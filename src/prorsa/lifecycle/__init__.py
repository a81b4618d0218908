"""Where every trajectory is: states and allowed transitions, events, the tracker, the atomic snapshot, the trace."""

from prorsa.lifecycle.events import (
    ENDS,
    UNKNOWN,
    DecodeStarted,
    Done,
    Dropped,
    Event,
    PrefillStarted,
    Ready,
    Requeued,
    RewardStarted,
    Sampled,
    SandboxMode,
    SandboxStarting,
    ToolStarted,
)
from prorsa.lifecycle.snapshot import NONE, Names, Snapshot, Transition
from prorsa.lifecycle.states import LIVE, TRANSITIONS, State
from prorsa.lifecycle.trace import TraceCoder, TraceError, TraceWriter, read_trace
from prorsa.lifecycle.tracker import IllegalTransition, Tracker

__all__ = [
    "ENDS",
    "LIVE",
    "NONE",
    "TRANSITIONS",
    "UNKNOWN",
    "DecodeStarted",
    "Done",
    "Dropped",
    "Event",
    "IllegalTransition",
    "Names",
    "PrefillStarted",
    "Ready",
    "Requeued",
    "RewardStarted",
    "Sampled",
    "SandboxMode",
    "SandboxStarting",
    "Snapshot",
    "State",
    "ToolStarted",
    "TraceCoder",
    "TraceError",
    "TraceWriter",
    "Tracker",
    "Transition",
    "read_trace",
]
