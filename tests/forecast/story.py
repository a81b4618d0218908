"""Lifecycles in a few words: events of one trajectory, told in order to a tracker and to whoever listens."""

from __future__ import annotations

from collections.abc import Iterable

from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import Snapshot
from prorsa.lifecycle.states import State
from prorsa.lifecycle.tracker import Tracker


class Story:
    def __init__(self, *listeners) -> None:
        self.tracker = Tracker()
        self.listeners = listeners

    def tell(self, *events: e.Event) -> None:
        for event in events:
            transition = self.tracker.apply(event)
            for listener in self.listeners:
                listener.observe(transition)

    def tell_all(self, *trajectories: Iterable[e.Event]) -> None:
        """Several trajectories, their events in order of time."""
        self.tell(*sorted((event for events in trajectories for event in events), key=lambda event: event.time))

    def snapshot(self, time: float) -> Snapshot:
        return self.tracker.snapshot(time)


def trajectory(
    name: str,
    at: float,
    until: State = State.DONE,
    *,
    task: str = "math",
    group: str = "g",
    prompt_known: int = 0,
    dispatch: float = 0.0,
    mode: e.SandboxMode = e.SandboxMode.PREWARMED,
    image: str = "python",
    node_class: str = "cpu",
    startup: float = 2.0,
    first: int = 100,
    instance: str = "p0",
    prefill: float = 0.1,
    decode: float = 1.0,
    output: int = 0,
    tools: tuple[tuple[str, float, int], ...] = (),
    reward: float = 1.0,
    admitted: bool = True,
) -> list[e.Event]:
    """The events of a trajectory sampled at `at`, up to the one that enters `until` for the last time.

    `tools` are (tool, seconds, tokens of the result) of one turn after another; `until=TOOL` stops in the last of them.
    """
    time, tokens = at, first
    told: list[e.Event] = [e.Sampled(time, name, group, task, prompt_tokens=prompt_known)]
    if until is State.SAMPLED:
        return told
    time += dispatch
    told.append(e.SandboxStarting(time, name, mode, image, node_class))
    if until is State.SANDBOX_STARTING:
        return told
    time += startup
    for turn in range(len(tools) + 1):
        last = turn == len(tools)
        told.append(e.Ready(time, name, tokens))
        if last and until is State.READY:
            return told
        told.append(e.PrefillStarted(time, name, instance))
        if last and until is State.PREFILL:
            return told
        time += prefill
        told.append(e.DecodeStarted(time, name, "d0"))
        if last and until is State.DECODE:
            return told
        time, tokens = time + decode, tokens + output
        if not last:
            tool, seconds, result = tools[turn]
            told.append(e.ToolStarted(time, name, tool, tokens))
            if turn == len(tools) - 1 and until is State.TOOL:
                return told
            time, tokens = time + seconds, tokens + result
    told.append(e.RewardStarted(time, name, tokens))
    if until is State.REWARD:
        return told
    told.append(e.Done(time + reward, name, 1.0, admitted))
    return told
