"""A mixed instance simulated token by token, as plainly as can be: what the event-jumping core is compared with.

No caches, no limits of memory or batch. One step at a time, one request at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from core_bench import Costs


@dataclass
class Ask:
    time: float
    prompt: int
    target: int
    abort: float | None = None


@dataclass(eq=False)
class State:
    ask: Ask
    rank: int = -1
    served: bool = False
    prefilled: int = 0
    tokens: int = 0
    aborted: bool = False
    end: float | None = None

    @property
    def live(self) -> bool:
        return self.rank >= 0 and self.end is None

    @property
    def decodes(self) -> bool:
        return self.live and self.prefilled == self.ask.prompt

    @property
    def kv(self) -> int:
        """A prompt in service has reserved room for its first token as well."""
        return self.ask.prompt + self.tokens + (self.served and not self.decodes)


class NaiveEngine:
    def __init__(self, asks: list[Ask], costs: Costs, ranks: int, chunk: int, every: int) -> None:
        self.states = [State(ask) for ask in asks]
        self.costs, self.ranks, self.chunk, self.every = costs, ranks, chunk, every
        events = [(ask.time, index) for index, ask in enumerate(asks)]
        events += [(ask.abort, index) for index, ask in enumerate(asks) if ask.abort is not None]
        self.events = sorted(events)
        self.since = 0

    def run(self) -> list[tuple[float, int]]:
        """(end, tokens) of each request."""
        now = 0.0
        while self.events or any(state.live for state in self.states):
            if any(state.live for state in self.states):
                now = self.step(now)
            else:
                now = self.events[0][0]
                self.happen(now, set())
        return [(state.end or 0.0, state.tokens) for state in self.states]

    def happen(self, until: float, busy: set[State]) -> None:
        """What comes until then; `busy` are the requests that the present step works on."""
        while self.events and self.events[0][0] <= until:
            time, index = self.events.pop(0)
            state = self.states[index]
            if state.rank < 0:
                state.rank = min(range(self.ranks), key=self.load)
            elif state in busy:
                state.aborted = True
            elif state.live:
                state.end = time

    def load(self, rank: int) -> int:
        return sum(state.kv for state in self.states if state.live and state.rank == rank)

    def step(self, now: float) -> float:
        live = [state for state in self.states if state.live]
        prefills = self.since >= self.every or not any(state.decodes for state in live)
        work = {rank: self.chunks(live, rank) if prefills else [] for rank in range(self.ranks)}
        batches = {r: [s for s in live if s.rank == r and s.decodes] for r in range(self.ranks) if not work[r]}
        local = [self.prefill_cost(pairs) for pairs in work.values() if pairs]
        local += [self.decode_cost(batch) for batch in batches.values() if batch]
        end = now + max(local) + self.costs.together
        chunked = {state for pairs in work.values() for state, _ in pairs}
        self.happen(end, chunked | {state for state in live if state.decodes})
        for batch in batches.values():
            for state in batch:
                self.give(state, end)
        for pairs in work.values():
            for state, count in pairs:
                state.prefilled += count
                if state.decodes:
                    self.give(state, end)
        for state in self.states:
            if state.live and state.aborted:
                state.end = end
        self.since = 0 if chunked else self.since + 1
        return end

    def chunks(self, live: list[State], rank: int) -> list[tuple[State, int]]:
        found, budget = [], self.chunk
        for state in live:
            if state.rank == rank and not state.decodes and budget:
                state.served = True
                tokens = min(budget, state.ask.prompt - state.prefilled)
                found.append((state, tokens))
                budget -= tokens
        return found

    def prefill_cost(self, pairs: list[tuple[State, int]]) -> float:
        tokens = sum(count for _, count in pairs)
        return self.costs.prefill_local(tokens, sum(count * state.prefilled for state, count in pairs) / tokens)

    def decode_cost(self, batch: list[State]) -> float:
        return self.costs.decode_local(len(batch), sum(state.kv for state in batch) / len(batch))

    def give(self, state: State, now: float) -> None:
        state.tokens += 1
        if state.tokens == state.ask.target:
            state.end = now
