"""The states of a trajectory and the transitions that are allowed between them (paper, section 4.1.1, Fig. 4).

The table stands beside the states on purpose: it is the whole definition of the machine. `Requeued` is ours: the paper's
cancel-and-resend (Appendix C) takes a request from PREFILL or DECODE back to READY, and the agent notices nothing.
"""

from __future__ import annotations

from enum import IntEnum

from prorsa.lifecycle import events as e


class State(IntEnum):
    """Where a trajectory is. The integer values are stored in traces: append, never renumber."""

    SAMPLED = 0
    SANDBOX_STARTING = 1
    READY = 2
    PREFILL = 3
    DECODE = 4
    TOOL = 5
    REWARD = 6
    DONE = 7
    DROPPED = 8

    @property
    def live(self) -> bool:
        return self not in (State.DONE, State.DROPPED)


LIVE = frozenset(state for state in State if state.live)

TRANSITIONS: dict[type[e.Event], tuple[frozenset[State], State]] = {
    e.SandboxStarting: (frozenset({State.SAMPLED}), State.SANDBOX_STARTING),
    # A task without a sandbox goes straight from SAMPLED to READY.
    e.Ready: (frozenset({State.SAMPLED, State.SANDBOX_STARTING, State.TOOL}), State.READY),
    e.PrefillStarted: (frozenset({State.READY}), State.PREFILL),
    e.DecodeStarted: (frozenset({State.PREFILL}), State.DECODE),
    e.Requeued: (frozenset({State.PREFILL, State.DECODE}), State.READY),
    e.ToolStarted: (frozenset({State.DECODE}), State.TOOL),
    # From TOOL where the agent runs elsewhere: nobody knew of its last answer that no request would follow.
    e.RewardStarted: (frozenset({State.DECODE, State.TOOL}), State.REWARD),
    e.Done: (frozenset({State.REWARD}), State.DONE),
    e.Dropped: (LIVE, State.DROPPED),
}
"""Event type -> (states it may come from, state it leads to). `Sampled` creates the trajectory, so it has no source."""
