"""A small seeded discrete-event rollout that emits lifecycle events: the stream that the forecasters are judged on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np

from prorsa.lifecycle import events as e
from prorsa.lifecycle.snapshot import Transition
from prorsa.lifecycle.tracker import Tracker

INSTANCES = tuple(f"p{n}" for n in range(16))


@dataclass(frozen=True)
class Kind:
    """A task: token counts are means, times are medians in seconds."""

    name: str
    prompt: int
    turns: float
    output: int
    tools: dict[str, tuple[float, int]]
    """Tool -> (median seconds, mean tokens of its result)."""
    reward: float


GENERAL = Kind("general", 2500, 6, 250, {"search": (8.0, 1500), "browse": (15.0, 3000)}, 6.0)
MATH = Kind("math", 3000, 3, 700, {"python": (6.0, 500)}, 4.0)


class SyntheticRollout:
    """Steps of `batch` trajectories, each step launched when the last has ended (`synchronous`), or `batch` live ones with
    a new one for each that ended."""

    def __init__(
        self, seed: int, synchronous: bool, batch: int = 384, kinds: tuple[Kind, ...] = (GENERAL, MATH)
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.tracker = Tracker()
        self.listeners: list[Callable[[Transition], None]] = []
        self.time = 0.0
        self._synchronous, self._batch, self._kinds = synchronous, batch, kinds
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = count()
        self._names = count()
        self._queue: deque[tuple[str, int, Callable[[], None]]] = deque()
        self._free = list(INSTANCES)
        for _ in range(batch):
            self._after(float(self.random.uniform(0, 1)), self._launch)

    def run_until(self, end: float) -> None:
        """Everything that happens before `end`."""
        while self._agenda and self._agenda[0][0] < end:
            self.time, _, act = heappop(self._agenda)
            act()
        self.time = end

    def _after(self, delay: float, act: Callable[[], None]) -> None:
        heappush(self._agenda, (self.time + delay, next(self._sequence), act))

    def _emit(self, event: e.Event) -> None:
        transition = self.tracker.apply(event)
        for listener in self.listeners:
            listener(transition)

    def _around(self, median: float, spread: float = 0.35) -> float:
        return float(median * np.exp(spread * self.random.standard_normal()))

    def _launch(self) -> None:
        name, kind = f"t{next(self._names)}", self._kinds[int(self.random.integers(len(self._kinds)))]
        self._emit(e.Sampled(self.time, name, group=name, task=kind.name))
        cold = self.random.random() < 0.3
        turns = 1 + int(self.random.poisson(kind.turns - 1))

        def start() -> None:
            mode = e.SandboxMode.COLD if cold else e.SandboxMode.PREWARMED
            self._emit(e.SandboxStarting(self.time, name, mode, image=kind.name, node_class="cpu"))
            prompt = int(self._around(kind.prompt, 0.2))
            self._after(self._around(14.0 if cold else 1.5), lambda: self._ready(name, kind, prompt, turns))

        self._after(0.2, start)

    def _ready(self, name: str, kind: Kind, tokens: int, turns: int) -> None:
        self._emit(e.Ready(self.time, name, tokens))
        self._queue.append((name, tokens, lambda: self._decode(name, kind, tokens, turns)))
        self._serve()

    def _serve(self) -> None:
        while self._queue and self._free:
            name, tokens, then = self._queue.popleft()
            self._prefill(name, tokens, self._free.pop(0), then)

    def _prefill(self, name: str, tokens: int, instance: str, then: Callable[[], None]) -> None:
        self._emit(e.PrefillStarted(self.time, name, instance))

        def finish() -> None:
            self._emit(e.DecodeStarted(self.time, name, "d0"))
            self._free.append(instance)
            then()
            self._serve()

        self._after(0.02 + tokens / 30_000, finish)

    def _decode(self, name: str, kind: Kind, tokens: int, turns: int) -> None:
        output = 1 + int(self.random.exponential(kind.output))

        def finish() -> None:
            if turns > 1:
                self._call_tool(name, kind, tokens + output, turns - 1)
            else:
                self._emit(e.RewardStarted(self.time, name, tokens + output))
                self._after(self._around(kind.reward), lambda: self._done(name))

        self._after(output * 0.03, finish)

    def _call_tool(self, name: str, kind: Kind, tokens: int, turns: int) -> None:
        tool = list(kind.tools)[int(self.random.integers(len(kind.tools)))]
        seconds, result = kind.tools[tool]
        self._emit(e.ToolStarted(self.time, name, tool, tokens))
        longer = tokens + int(self._around(result, 0.3))
        self._after(self._around(seconds), lambda: self._ready(name, kind, longer, turns))

    def _done(self, name: str) -> None:
        self._emit(e.Done(self.time, name, reward=1.0, admitted=True))
        if not self._synchronous:
            self._launch()
        elif not len(self.tracker):
            for _ in range(self._batch):
                self._after(5.0 + float(self.random.uniform(0, 1)), self._launch)
