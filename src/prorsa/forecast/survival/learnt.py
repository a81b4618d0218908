"""What the survival forecaster knows: statistics of every stage, learnt from transitions."""

from __future__ import annotations

import math

from prorsa.forecast.backoff import Ema, load_bucket
from prorsa.forecast.injection import Injection
from prorsa.forecast.launches import Launches
from prorsa.forecast.lengths import PromptLengths
from prorsa.forecast.survival.contexts import Contexts
from prorsa.forecast.survival.groups import Endings, GroupLengths, Groups
from prorsa.forecast.survival.hazards import Hazards
from prorsa.forecast.survival.speeds import Busy, DecodeSpeed, PrefillSpeeds, Rate, Server
from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import Transition
from prorsa.lifecycle.states import State

TURN_ENDS = (e.ToolStarted, e.RewardStarted)


class Prefills:
    """Means over the last prefills."""

    FORGET = 1 / 256

    def __init__(self) -> None:
        self.seconds = self.new = self.tokens = 0.0
        """How long one took, its tokens to compute, and all of them."""
        self._between = self._last = 0.0
        self._count = 0

    def add(self, time: float, seconds: float, new: int, tokens: int) -> None:
        """One that ended at `time`."""
        if self._count:
            self._between += max(self.FORGET, 1.0 / self._count) * (time - self._last - self._between)
        self._last = time
        self._count += 1
        weight = max(self.FORGET, 1.0 / self._count)
        self.seconds += weight * (seconds - self.seconds)
        self.new += weight * (new - self.new)
        self.tokens += weight * (tokens - self.tokens)

    @property
    def rate(self) -> float:
        """A second; 0 where that is not known."""
        return 1.0 / self._between if self._between > 0.0 else 0.0


class Learnt:
    """`observe` is O(1)."""

    def __init__(self, injection: Injection | None, prefill_tokens_per_s: float) -> None:
        self.live_groups = Groups()
        self.contexts = Contexts(self.live_groups)
        self.outputs = Hazards()
        """Tokens of a turn over what is usual in its group, by task and turn."""
        self.groups = GroupLengths(self.live_groups)
        self.endings = Endings(self.live_groups)
        self.tools = Hazards()
        """Seconds, by task and tool."""
        self.starts = Hazards()
        """Seconds of a sandbox's start, by mode and image; without a mode, of trajectories that have none."""
        self.lengths = PromptLengths()
        self.launches = Launches(injection)
        self.first_new = Ema(1 / 256)
        """Tokens to compute of a first prompt."""
        self.speed = DecodeSpeed()
        self.prefill_speeds = PrefillSpeeds(prefill_tokens_per_s)
        self.arrivals = Rate()
        """In the queue."""
        self.unreported = Ema(1 / 256)
        """Seconds of a turn whose tokens are not reported before it ends."""
        self._busy = Busy()
        self._begun: dict[str, float] = {}
        """Of the trajectories in DECODE, the busy seconds of the instance when they began."""
        self.prefills = Prefills()
        self._joining: dict[str, int] = {}
        """Tokens to compute of the requests in PREFILL."""
        self._ready = 0
        """Requests in READY."""

    def server(self, prefill: int, mixed: int, time: float) -> Server:
        """What so many instances that only prefill, and so many mixed ones, make of their queue at `time`."""
        return self.prefill_speeds.server(
            prefill, mixed, self.prefills.new, 0.0 if self._ready else self.arrivals.at(time)
        )

    def observe(self, transition: Transition) -> None:
        self.launches.observe(transition)
        event = transition.event
        self._ready += (transition.after is State.READY) - (transition.before is State.READY)
        if isinstance(event, e.PrefillStarted):
            self._joined(transition, event)
        elif isinstance(event, e.DecodeStarted):
            self._prefilled(transition, event)
        elif isinstance(event, e.Ready):
            self._arrived(transition)
        elif isinstance(event, TURN_ENDS):
            self._turn_ended(transition, event.tokens)
        if transition.before is State.PREFILL:
            self._joining.pop(event.trajectory, None)
            self._busy.left(transition.instance or "", event.time)
        elif transition.before is State.DECODE:
            self._begun.pop(event.trajectory, None)
        if self.contexts.observe(transition):
            self.live_groups.forget(transition.group_code)

    def _joined(self, transition: Transition, event: e.PrefillStarted) -> None:
        name = event.trajectory
        new = self.contexts.uncached(name, transition.group_code, transition.tokens)
        self._joining[name] = new
        self._busy.joined(event.instance, event.time)
        if transition.turn == 0 and not self.contexts.cached(name):
            self.first_new.add(new)

    def _prefilled(self, transition: Transition, event: e.DecodeStarted) -> None:
        instance, time = transition.instance or "", event.time
        joined = time - transition.elapsed
        new = self._joining[event.trajectory]
        self.prefill_speeds.finished(event.instance == instance, instance, new, joined, time, self._ready > 0)
        self.prefills.add(time, transition.elapsed, new, transition.tokens)
        self._begun[event.trajectory] = self._busy.until(event.instance, time)

    def _arrived(self, transition: Transition) -> None:
        self.arrivals.add(transition.event.time)
        began = transition.event.time - transition.elapsed
        if transition.before is State.TOOL:
            tool = transition.tool or ""
            self.tools.add((transition.task, tool), transition.elapsed, began)
            self.lengths.add_appended(transition.task, tool, transition.tokens - transition.tokens_before)
            return
        self.lengths.add_first(transition.task, transition.tokens)
        self.launches.started(transition)
        self.starts.add((transition.mode or "", transition.image or ""), transition.elapsed, began)

    def _turn_ended(self, transition: Transition, tokens: int) -> None:
        name, task, group = transition.event.trajectory, transition.task, transition.group_code
        began = transition.event.time - transition.elapsed
        if transition.before is State.TOOL:
            # Nobody knew of the answer before that it was the last one.
            self.tools.add((task, transition.tool or ""), math.inf, began)
            return
        output = max(tokens - self.contexts.start(name), 1)
        usual = self.groups.add(task, group, output)
        if transition.turn == 0:
            # A group's first turns go on beside each other: those that have ended are the short ones, and say nothing yet.
            usual = 1.0
        self.outputs.add((task, load_bucket(transition.turn + 1)), output / usual, began)
        self.endings.add(task, group, transition.turn, transition.after is State.REWARD)
        instance, cached = transition.instance or "", self.contexts.cached(name)
        if cached:
            # After a weight update nothing is known of those that went on.
            made, busy = max(tokens - cached, 0), self._busy.until(instance, transition.event.time) - self._begun[name]
            self.speed.add(instance, busy > 0.5 * transition.elapsed, made, transition.elapsed)
            self.unreported.add(transition.elapsed * (tokens - transition.tokens_before) / max(made, 1))
