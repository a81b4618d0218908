"""The figures of `/metrics`, in Prometheus' text format (version 0.0.4). Their names and meanings are in docs/gateway.md.

Counters and histograms grow as an `Observer` of the cluster and as requests end; gauges are read off the cluster when asked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from prorsa.cluster.control import Status
from prorsa.cluster.instances import InstanceState
from prorsa.cluster.observers import Decision, Flip, TurnRecord
from prorsa.engines.protocol import Role
from prorsa.gateway.connections import Connections
from prorsa.lifecycle import ENDS, Done, Ready, Sampled, State, Transition

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)

Labels = tuple[tuple[str, str], ...]


class Counter:
    kind = "counter"

    def __init__(self, name: str, words: str) -> None:
        self.name = name
        self.words = words
        self._values: dict[Labels, float] = {}

    def add(self, amount: float = 1.0, **labels: str) -> None:
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + amount

    def lines(self) -> Iterable[str]:
        values = self._values or {(): 0.0}
        return (f"{self.name}{written(labels)} {number(value)}" for labels, value in values.items())


class Histogram:
    kind = "histogram"

    def __init__(self, name: str, words: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.words = words
        self._bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, value: float, **labels: str) -> None:
        key = tuple(labels.items())
        counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[key] = self._sums.get(key, 0.0) + value

    def lines(self) -> Iterable[str]:
        for labels, counts in (self._counts or {(): [0] * (len(self._bounds) + 1)}).items():
            total = 0
            for bound, count in zip((*map(number, self._bounds), "+Inf"), counts, strict=True):
                total += count
                yield f"{self.name}_bucket{written((*labels, ('le', bound)))} {total}"
            yield f"{self.name}_sum{written(labels)} {number(self._sums.get(labels, 0.0))}"
            yield f"{self.name}_count{written(labels)} {total}"


class Metrics:
    """An `Observer`."""

    def __init__(self) -> None:
        self.in_flight = 0
        """Requests in service."""
        self.requests = Counter("prorsa_requests_total", "Requests answered, by endpoint and HTTP status.")
        self.request_seconds = Histogram("prorsa_request_seconds", "From a request to the end of its answer.", SECONDS)
        self.disconnects = Counter("prorsa_client_disconnects_total", "Requests whose client left or did not read.")
        self._first = Histogram("prorsa_first_token_seconds", "From a turn's arrival to its first token.", SECONDS)
        self._per_token = Histogram(
            "prorsa_output_token_seconds", "Mean time from a token to the next, one value a turn.", TOKEN_SECONDS
        )
        self._tool = Histogram("prorsa_tool_seconds", "From an answer to the trajectory's next request.", SECONDS)
        self._turns = Counter("prorsa_turns_total", "Model turns finished, by how they ended.")
        self._resends = Counter("prorsa_resends_total", "Attempts that were cancelled or failed, and were resent.")
        self._prompt = Counter("prorsa_prompt_tokens_total", "Prompt tokens of finished turns.")
        self._cached = Counter("prorsa_cached_prompt_tokens_total", "Of those, tokens that were not computed.")
        self._output = Counter("prorsa_output_tokens_total", "Output tokens of finished turns.")
        self._sampled = Counter("prorsa_trajectories_sampled_total", "Trajectories begun.")
        self._ended = Counter("prorsa_trajectories_ended_total", "Trajectories ended, done or dropped.")
        self._decisions = Counter("prorsa_decisions_total", "Decisions of the global manager.")
        self._flips = Counter("prorsa_flips_total", "Role switches, by the role switched to and the result.")
        self._flip_seconds = Histogram("prorsa_flip_seconds", "From leaving the old pool to serving again.", SECONDS)
        self._flip_cancelled = Counter("prorsa_flip_cancelled_requests_total", "Requests that flips cancelled.")
        self._decision: Decision | None = None

    def transition(self, transition: Transition) -> None:
        event = transition.event
        if isinstance(event, Sampled):
            self._sampled.add()
        elif isinstance(event, ENDS):
            self._ended.add(end="done" if isinstance(event, Done) else "dropped")
        elif isinstance(event, Ready) and transition.before is State.TOOL:
            self._tool.observe(transition.elapsed)

    def decision(self, decision: Decision) -> None:
        self._decisions.add()
        self._decision = decision

    def flip(self, flip: Flip) -> None:
        self._flips.add(to=flip.after.value, result="done" if flip.failure is None else "failed")
        self._flip_seconds.observe(flip.drain_s + flip.flip_s)
        self._flip_cancelled.add(flip.cancelled)

    def turn(self, turn: TurnRecord) -> None:
        self._turns.add(finish=turn.finish.value)
        self._resends.add(turn.attempts - 1)
        self._prompt.add(turn.prompt_tokens)
        self._cached.add(turn.cached_tokens)
        self._output.add(turn.output_tokens)
        if turn.first_token is not None:
            self._first.observe(turn.first_token - turn.ready)
        if turn.output_tokens > 1:
            self._per_token.observe((turn.arrivals[-1] - turn.arrivals[0]) / (turn.output_tokens - 1))

    def instance(self, time: float, name: str, role: Role, state: InstanceState) -> None:
        """Gauges are read off the cluster."""

    def render(self, status: Status, continued: Mapping[str, int], connections: Connections) -> str:
        """`continued`: turns after the first, by how their trajectory was known."""
        lines: list[str] = []
        for one in vars(self).values():
            if isinstance(one, Counter | Histogram):
                lines += [f"# HELP {one.name} {one.words}", f"# TYPE {one.name} {one.kind}", *one.lines()]
        known = {f'{{by="{how}"}}': continued.get(how, 0) for how in ("name", "prefix", "conversation")}
        lines += _family("prorsa_continued_turns_total", "counter", "Turns after the first, by how known.", known)
        refused = {"": connections.refused}
        lines += _family("prorsa_connections_refused_total", "counter", "Connections beyond the bound.", refused)
        lines += _family("prorsa_connections", "gauge", "Open connections of clients.", {"": connections.open})
        for name, words, values in self._gauges(status):
            lines += _family(name, "gauge", words, values)
        return "\n".join(lines) + "\n"

    def _gauges(self, status: Status) -> Iterable[tuple[str, str, Mapping[str, float]]]:
        states = {f'{{state="{state.name.lower()}"}}': count for state, count in status.states.items()}
        yield "prorsa_requests_in_flight", "Requests in service.", {"": self.in_flight}
        yield "prorsa_trajectories", "Live trajectories by state.", states
        yield "prorsa_ready_queue", "Turns that wait for a prefill and a decode instance.", {"": status.waiting}
        yield "prorsa_weights_version", "Version of the weights that turns are generated with.", {"": status.version}
        engines = status.instances
        roles = {f'{{engine="{i.name}",role="{i.role}",state="{i.state}"}}': 1 for i in engines}
        yield "prorsa_engine", "1 for each engine, with its role and state.", roles
        for name, words, values in (
            ("prefills", "Prefills outstanding on an engine.", {i.name: i.prefills for i in engines}),
            ("decodes", "Decodes on an engine.", {i.name: i.decodes for i in engines}),
            ("kv_tokens", "KV-cache tokens reserved for its decodes.", {i.name: i.kv_tokens for i in engines}),
            ("kv_capacity_tokens", "KV-cache tokens that an engine holds.", {i.name: i.capacity for i in engines}),
        ):
            yield f"prorsa_engine_{name}", words, {f'{{engine="{key}"}}': value for key, value in values.items()}
        decision = self._decision
        if decision is not None:
            forecast, target = decision.forecast, decision.target
            yield "prorsa_forecast_prefill_tokens", "Prompt tokens of the next window.", {"": forecast.prefill_tokens}
            yield "prorsa_forecast_admitted_tokens", "Tokens admitted to decode in it.", {"": forecast.admitted_tokens}
            if target is not None:
                wanted = {f'{{role="{role}"}}': count for role, count in asdict(target).items()}
                yield "prorsa_target_instances", "Instances that the last decision wants.", wanted


def _family(name: str, kind: str, words: str, values: Mapping[str, float]) -> list[str]:
    return [
        f"# HELP {name} {words}",
        f"# TYPE {name} {kind}",
        *(f"{name}{key} {number(value)}" for key, value in values.items()),
    ]


def written(labels: Labels) -> str:
    if not labels:
        return ""
    pairs = (f'{key}="{_escaped(value)}"' for key, value in labels)
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
