"""A forecaster that knows every trajectory's script: how far a forecast of the lifecycle could get.

A script is what a trajectory does whatever the engines do: when its sandbox has started, each turn's tokens and those that
the tool appends, the tools' seconds, when it has been rewarded. It is read from the events of the run that is forecast; a
turn that was cancelled and resent has the tokens of all its attempts. Live trajectories are followed one by one through the
horizon, and so are the groups that the sampler begins where groups end, in the order of the run.

Not known is what the engines will take. Decodes go on for a while at the pace of late, then at the speed that a survival
forecaster has learnt until now; a prefill takes what prefills took of late, a line in its own tokens to compute and in those
of the others in service; where requests wait for an instance, they go through the survival forecaster's queue, too. Nor are
flips and weight updates known, nor the batch with which a step begins.

On request the run's own times of decode, or of prefill (waits, flips and all), take the place of those: what is left of the
error then comes of the other.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from prorsa.forecast import Forecast, SurvivalForecaster
from prorsa.forecast.survival.contexts import Contexts
from prorsa.lifecycle import Event, Snapshot, State, Transition
from prorsa.lifecycle import events as e

Floats = NDArray[np.float64]

FORGET = 1 / 4096
"""Weight of the newest prefill in `PrefillLine`."""
DECODES = 20
"""So many have to say how fast an instance decodes."""
THOUSAND = 1000.0
"""Tokens are counted in thousands there, so that all three columns are of a size."""


@dataclass(slots=True)
class Turn:
    prompt: int
    """Tokens of the context that it begins with."""
    ready: float
    """When its request came, seconds."""
    tokens: float = math.inf
    """Of the context that it ends with; infinite where the run ended before."""
    ended: float = math.inf
    """When that was, seconds."""
    admitted: list[float] = field(default_factory=list)
    """When each attempt's prefill ended."""

    def admission(self, since: float) -> float:
        """The first one from then on."""
        index = bisect_left(self.admitted, since)
        return self.admitted[index] if index < len(self.admitted) else math.inf


@dataclass(slots=True)
class Script:
    group: str
    sampled: float
    turns: list[Turn] = field(default_factory=list)
    done: float = math.inf
    """When it was rewarded, seconds."""


def read_scripts(events: Iterable[Event]) -> dict[str, Script]:
    """By trajectory, in the order in which they were sampled."""
    scripts: dict[str, Script] = {}
    for event in events:
        if isinstance(event, e.Sampled):
            scripts[event.trajectory] = Script(event.group, event.time)
            continue
        script = scripts[event.trajectory]
        if isinstance(event, e.Ready):
            script.turns.append(Turn(event.tokens, event.time))
        elif isinstance(event, e.DecodeStarted):
            script.turns[-1].admitted.append(event.time)
        elif isinstance(event, e.ToolStarted | e.RewardStarted) and math.isinf(script.turns[-1].ended):
            script.turns[-1].tokens, script.turns[-1].ended = event.tokens, event.time
        elif isinstance(event, e.Done):
            script.done = event.time
    return scripts


class PrefillLine:
    """Seconds of a prefill where none waits: a constant, and so much for each of its own tokens and of the others'.

    Only tokens to compute count; the others are those in service when it is placed, an instance's mean.
    """

    def __init__(self, contexts: Contexts) -> None:
        """Somebody else feeds `contexts`."""
        self._contexts = contexts
        # Almost nothing, so that it can be inverted whatever was seen.
        self._gram: Floats = 1e-3 * np.eye(3)
        self._moment: Floats = np.zeros(3)
        self._placed: dict[str, tuple[int, str, Floats]] = {}
        """(tokens to compute, instance, row of the fit) of those in PREFILL."""
        self._instances: Counter[str] = Counter()
        """How many each has."""
        self._tokens = self._ready = 0

    def observe(self, transition: Transition) -> None:
        event = transition.event
        self._ready += (transition.after is State.READY) - (transition.before is State.READY)
        if isinstance(event, e.PrefillStarted):
            new = self._contexts.uncached(event.trajectory, transition.group_code, transition.tokens)
            self._instances[event.instance] += 1
            busy = sum(count > 0 for count in self._instances.values())
            self._placed[event.trajectory] = new, event.instance, prefill_row(new, self._tokens / busy)
            self._tokens += new
        elif transition.before is State.PREFILL:
            new, instance, row = self._placed.pop(event.trajectory)
            self._instances[instance] -= 1
            self._tokens -= new
            if isinstance(event, e.DecodeStarted) and not self._ready:
                self._gram += np.outer(row, row) - FORGET * self._gram
                self._moment += transition.elapsed * row - FORGET * self._moment

    def line(self) -> Floats:
        """Least squares, none negative."""
        line, used = np.zeros(3), np.arange(3)
        while used.size:
            solved = np.linalg.solve(self._gram[np.ix_(used, used)], self._moment[used])
            if (solved >= 0.0).all():
                line[used] = solved
                break
            used = used[solved > 0.0]
        return line


def prefill_row(own: float, others: float) -> Floats:
    return np.array([1.0, own / THOUSAND, others / THOUSAND])


class Pace:
    """Tokens/s of a decode, by instance: what those that decode made since the snapshot before.

    Where few did so all the while it is not said.
    """

    def __init__(self) -> None:
        self._time = -math.inf
        self._before: dict[str, tuple[float, int]] = {}
        """(beginning, tokens) of the decodes at `_time`."""
        self._pace: dict[str, float] = {}
        self.seconds = 0.0
        """Between the two snapshots."""

    def at(self, snapshot: Snapshot) -> dict[str, float]:
        """One may ask about the same snapshot again."""
        if snapshot.time > self._time:
            made: dict[str, list[int]] = defaultdict(list)
            now: dict[str, tuple[float, int]] = {}
            for row in np.flatnonzero(snapshot.state == State.DECODE).tolist():
                name, since, tokens = snapshot.ids[row], float(snapshot.since[row]), int(snapshot.tokens[row])
                now[name] = since, tokens
                began, before = self._before.get(name, (math.inf, 0))
                # Until its first report it may have waited for its KV cache.
                if began == since and before > snapshot.prompt[row]:
                    made[snapshot.names.instances[snapshot.instance[row]]].append(tokens - before)
            self.seconds = snapshot.time - self._time if self._before else 0.0
            self._pace = {
                key: sum(each) / len(each) / self.seconds for key, each in made.items() if len(each) >= DECODES
            }
            self._time, self._before = snapshot.time, now
        return self._pace


class KnownScripts:
    """`Forecaster`."""

    def __init__(
        self,
        scripts: Mapping[str, Script],
        survival: SurvivalForecaster,
        replaces: bool,
        decodes: bool = False,
        prefills: bool = False,
    ) -> None:
        """Somebody else feeds `survival`. `replaces`: a group begins whenever one has ended. `decodes`, `prefills`: take as
        long as in the run."""
        self.scripts = scripts
        self.learnt = survival.learnt
        self.replaces = replaces
        self.decodes = decodes
        self.prefills = prefills
        self.line = PrefillLine(survival.learnt.contexts)
        self.pace = Pace()
        self.groups: dict[str, list[str]] = {"": []}
        """Their members, in the order in which they were sampled; the group "" has none."""
        for name, script in scripts.items():
            self.groups.setdefault(script.group, []).append(name)

    def observe(self, transition: Transition) -> None:
        self.line.observe(transition)

    def caches_lost(self) -> None:
        """The survival forecaster's contexts know of it."""

    def forecast(self, snapshot: Snapshot, horizon: float, prefill_instances: Sequence[str]) -> Forecast:
        return _Future(self, snapshot, horizon, prefill_instances).forecast()


class _Future:
    """One forecast. Requests are served in the order in which they arrive, so each is followed to its next one at once."""

    def __init__(self, known: KnownScripts, snapshot: Snapshot, horizon: float, instances: Sequence[str]) -> None:
        self._known = known
        self._scripts = known.scripts
        self._snapshot = snapshot
        self._now = snapshot.time
        self._end = snapshot.time + horizon
        self._instances = len(instances)
        self._group_codes = {name: code for code, name in enumerate(snapshot.names.groups)}
        decoding = snapshot.instance[snapshot.state == State.DECODE]
        # Prefill.
        self._line = known.line.line()
        mixed = len({snapshot.names.instances[code] for code in np.unique(decoding).tolist()}.intersection(instances))
        self._server = known.learnt.server(len(instances) - mixed, mixed, snapshot.time)
        self._queued = bool((snapshot.state == State.READY).any())
        self._free = self._now
        """When the queue will have been served, where there is one."""
        self._serving: list[tuple[float, int]] = []
        """(end, tokens to compute) of prefills, a heap."""
        self._tokens = 0
        """Sum of the latter."""
        self._followed: set[str] = set()
        """Trajectories of which a request was served here: their contexts are in a cache."""
        self._computed: dict[str, float] = {}
        """When the first prompt of a group will be in a cache."""
        # Decode.
        learnt, pace = known.learnt.speed, known.pace.at(snapshot)
        usual = [learnt.of(name) for name in snapshot.names.instances]
        now = [pace.get(name, speed) for name, speed in zip(snapshot.names.instances, usual, strict=True)]
        self._speeds = np.array((now, usual)).T
        """[instance]: tokens/s until `_change`, and after."""
        self._speed = self._speeds[decoding].mean(axis=0) if len(decoding) else np.full(2, learnt.of())
        """Of decodes that have not begun."""
        self._change = self._now + known.pace.seconds
        # The sampler.
        self._live = Counter(self._scripts[name].group for name in snapshot.ids)
        self._over: dict[str, float] = defaultdict(float)
        """When the last of a group's trajectories ends, as far as they have been followed."""
        later = (g for g, names in known.groups.items() if names and self._scripts[names[0]].sampled >= self._now)
        self._next = iter(later if known.replaces else ())
        # What comes of it.
        self._requests: list[tuple[float, str, int]] = []
        """(time, trajectory, turn) of those that are to arrive, a heap."""
        self._arrived = self._admitted = 0
        self._context = 0.0

    def forecast(self) -> Forecast:
        snapshot = self._snapshot
        observed = Forecast.of_backlog(snapshot, self._end - self._now)
        # Those in PREFILL before those in READY, both in the order in which they are served.
        for row in np.lexsort((snapshot.order, snapshot.state == State.READY)).tolist():
            self._go_on(row)
        backlog = self._admitted
        while self._requests:
            time, name, turn = heappop(self._requests)
            prompt = self._scripts[name].turns[turn].prompt
            self._arrived += prompt
            self._prefill(name, turn, prompt, time, time, self._scripts[name].turns[turn].ready)
        return replace(
            observed,
            prefill_tokens=observed.backlog + self._arrived,
            admitted_tokens=self._admitted,
            admitted_kv=self._admitted,
            from_decode=self._arrived,
            admitted_backlog=backlog,
            kv_end=self._context,
        )

    def _go_on(self, row: int) -> None:
        """From where the trajectory is now."""
        snapshot = self._snapshot
        name, state, turn = snapshot.ids[row], snapshot.state[row], int(snapshot.turn[row])
        script, since = self._scripts[name], float(snapshot.since[row])
        if state in (State.READY, State.PREFILL):
            placed = since if state == State.PREFILL else self._now
            self._prefill(name, turn, int(snapshot.tokens[row]), self._now, placed, self._now)
        elif state == State.DECODE:
            speeds = self._speeds[snapshot.instance[row]]
            # Tokens may be reported late; what has been made since follows from the speed.
            context = max(float(snapshot.tokens[row]), snapshot.prompt[row] + float(speeds[0]) * (self._now - since))
            self._decode(name, turn, self._now, context, speeds, script.turns[turn].ended)
        elif turn < len(script.turns):
            self._come(name, turn, script.turns[turn].ready)
        else:
            self._finish(name, script.done)

    def _come(self, name: str, turn: int, time: float) -> None:
        if time < self._end:
            heappush(self._requests, (max(time, self._now), name, turn))

    def _prefill(self, name: str, turn: int, prompt: int, time: float, placed: float, begin: float) -> None:
        """A request of `prompt` tokens that waits from `time` on, in the run from `begin` on; `placed` as in `_served`."""
        known = self._scripts[name].turns[turn]
        admission = known.admission(begin)
        served = self._served(name, turn, prompt, time, placed)
        admitted = time + admission - begin if self._known.prefills else served
        if admitted < self._end:
            self._admitted += prompt
            took = known.ended - admission if known.ended < math.inf else math.inf
            self._decode(name, turn, admitted, prompt, self._speed, admitted + took)

    def _served(self, name: str, turn: int, prompt: int, time: float, placed: float) -> float:
        """When its prefill ends. One that is in service already was `placed` before `time`."""
        if not self._instances:
            return math.inf
        begins = max(self._free, time)
        while self._serving and self._serving[0][0] <= begins:
            self._tokens -= heappop(self._serving)[1]
        script = self._scripts[name]
        new = self._uncached(script, name, turn, prompt, begins)
        row = prefill_row(new, self._tokens / self._instances)
        end = max(placed + float(self._line @ row), self._now)
        if self._queued:
            self._free = begins + (self._server.fixed + self._server.slope * new) / self._server.instances
            end = max(end, self._free)
        heappush(self._serving, (end, new))
        self._tokens += new
        if not turn:
            self._computed[script.group] = min(self._computed.get(script.group, math.inf), end)
        return end

    def _uncached(self, script: Script, name: str, turn: int, prompt: int, time: float) -> int:
        """Tokens of the prompt that have to be computed then."""
        if name in self._followed:
            return prompt - int(script.turns[turn - 1].tokens) + 1
        self._followed.add(name)
        group = self._group_codes.get(script.group)
        new = prompt if group is None else self._known.learnt.contexts.uncached(name, group, prompt)
        if self._computed.get(script.group, math.inf) <= time:
            new = min(new, max(prompt - script.turns[0].prompt, 1))
        return new

    def _decode(self, name: str, turn: int, time: float, context: float, speeds: Floats, known: float) -> None:
        """A turn that has `context` tokens at `time`, and ended at `known` in the run."""
        now, usual = speeds.tolist()
        left = max(self._scripts[name].turns[turn].tokens - context, 0.0)
        soon = now * max(self._change - time, 0.0)
        if left <= soon:
            ended = time + (left / now if left else 0.0)
        else:
            ended = max(time, self._change) + ((left - soon) / usual if usual else math.inf)
        if self._known.decodes:
            ended = known
        if ended < self._end:
            self._turn_over(name, turn, ended)
        else:
            soon = now * max(min(self._change, self._end) - time, 0.0)
            self._context += context + soon + usual * max(self._end - max(time, self._change), 0.0)

    def _turn_over(self, name: str, turn: int, time: float) -> None:
        script = self._scripts[name]
        after = time - script.turns[turn].ended
        if turn + 1 < len(script.turns):
            self._come(name, turn + 1, script.turns[turn + 1].ready + after)
        else:
            self._finish(name, script.done + after)

    def _finish(self, name: str, time: float) -> None:
        """A trajectory ends, and with the last one of its group perhaps the next group begins."""
        group = self._scripts[name].group
        self._live[group] -= 1
        self._over[group] = over = max(self._over[group], time, self._now)
        if self._live[group] or over >= self._end:
            return
        for member in self._known.groups[next(self._next, "")]:
            script = self._scripts[member]
            self._live[script.group] += 1
            if script.turns:
                self._come(member, 0, over + script.turns[0].ready - script.sampled)
