"""Measures running engines through their protocol and writes the profile that simulates them.

What one endpoint can tell: a *whole* request on a mixed engine, or its two legs on a prefill and a decode engine. Prefill is
the time to the first token of a request for one token, less what a request takes on its way (`request_s`: by what that time
is longer than such a request holds up an engine at work, and the round trip of a question that no engine step answers at
least); decode is the time between tokens while a batch of requests runs. A measured step contains the engine's host time, and
an engine is measured as one whole: the profile has one rank and no step overhead.

Prompts are random tokens, so that none begins like another by accident; a prefix is warmed before it counts as cached.
Points take turns, round after round, so that a change of the machine's speed meets them all; each is the median of its
rounds.
"""

from __future__ import annotations

import asyncio
import csv
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, count
from pathlib import Path
from statistics import fmean, median

import yaml

from prorsa.config import ConfigError
from prorsa.engines.protocol import (
    Bootstrap,
    Engine,
    EngineBusy,
    EngineError,
    FinishReason,
    GenerateRequest,
    Role,
    SamplingParams,
)
from prorsa.profiles.costs import COLUMNS
from prorsa.profiles.profile import Profile

DECODED = 64
"""Tokens that each request of a decode batch generates."""
PAGE = 64
"""Prefixes are multiples of this, so that engines which cache by pages have all of one."""
CONTEXTS = (0.125, 0.25, 0.5, 0.75, 1.0)
"""Of the longest context: where prefixes and decode contexts are measured."""
LEAST_CONTEXT = 4 * PAGE
SMALLEST_PREFILL = 16
BACKGROUND = 8
"""Requests that decode while others join them; each generates so many tokens:"""
BACKGROUND_TOKENS = 256
ROUND_TRIPS = 21
WARM_UPS = 3
FOLLOWED = 3
"""Tokens of a request whose first one has others behind it."""
RELOADS = 3
FLIPS = 3
LEAST_GROWTH = 1e-12
"""Seconds a token: less means that the time did not grow at all."""
HELD_UP = "something else held the engines up; measure them again while their machine has no other work"
SETTLE_S = 0.3
"""How long a KV store gets to take what was written."""

Point = tuple[int, int]
"""(tokens, context), as in a profile's grid."""
Report = Callable[[str], None]
"""Called with what is being measured."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be asked of the engines. `chunk` and `max_running` are their own; the protocol does not tell them."""

    max_context: int
    chunk: int
    max_running: int
    rounds: int = 5
    vocabulary: int = 256
    """Random prompts take their tokens from this many, which every model has."""


@dataclass(frozen=True, slots=True)
class Link:
    """What moves KV cache: from a prefill to a decode engine."""

    tokens_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class Guests:
    """Of requests that come to an engine at work."""

    held_s: float
    """By how much each holds up the others, beside the steps that it takes part in."""
    steps: float
    """For how many steps it is kept waiting, beside what it waits for on an idle engine."""
    idle_s: float
    """Time to the first token of such a request on an idle engine, if that is its only one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds. None is what the endpoints could not show: it takes a prefill and a decode engine, or a third one."""

    prefill: dict[Point, float]
    """Every pair of its tokens and contexts; so has `decode`."""
    decode: dict[Point, float]
    kv_tokens: int
    request_s: float
    prefill_request_s: float
    late_steps: float
    """How many steps after its own a token comes, on a mixed engine; 0 where there is none."""
    update_s: float
    mixed_guests: Guests | None
    """On a mixed engine."""
    pair_guests: Guests | None
    """On a pair whose decode engine is at work."""
    link: Link | None
    store_tokens_per_s: float | None
    flip_s: float | None


@dataclass(frozen=True, slots=True)
class Server:
    """What serves a request: a mixed engine alone, which is both of these, or a pair."""

    prefill: Engine
    decode: Engine

    @property
    def mixed(self) -> bool:
        return self.prefill is self.decode


async def find_servers(engines: Sequence[Engine]) -> tuple[Server | None, Server | None]:
    """The mixed engine and the pair among `engines`; at least one of them.

    Raises `EngineGone` where one does not answer, `EngineBusy` where one serves somebody, `EngineError` for roles that
    make no server.
    """
    found: dict[Role, Engine] = {}
    for engine in engines:
        role = (await engine.info()).role
        if role in found:
            raise EngineError(f"engine {engine.name}: is {role} as {found[role].name} is; give one engine of each role")
        if not (await engine.load()).idle:
            raise EngineBusy(f"engine {engine.name}: serves requests of others; measure it while it is idle")
        found[role] = engine
    missing = {Role.PREFILL, Role.DECODE} - found.keys()
    if len(missing) == 1:
        (other,) = {Role.PREFILL, Role.DECODE} & found.keys()
        raise EngineError(f"engine {found[other].name}: is {other}; give the address of a {missing.pop()} engine too")
    mixed = Server(found[Role.MIXED], found[Role.MIXED]) if Role.MIXED in found else None
    pair = Server(found[Role.PREFILL], found[Role.DECODE]) if not missing else None
    return mixed, pair


async def measure(engines: Sequence[Engine], limits: Limits, report: Report, weights: str | None = None) -> Measured:
    """Measure engines of one kind: a mixed one, a prefill and a decode one, or all three, which tells most.

    `weights` is the checkpoint whose loading is timed, else the one that they serve. Loading it empties the engines' caches.
    Raises `EngineError` as `find_servers` does, and where an engine does not do what was asked of it.
    """
    mixed, pair = await find_servers(engines)
    server = mixed or pair
    assert server is not None
    kv_tokens = (await server.decode.load()).max_tokens
    if min(limits.max_context, kv_tokens) < LEAST_CONTEXT:
        raise EngineError(
            f"engine {server.decode.name}: {limits.max_context} tokens of context, {kv_tokens} of KV cache; to measure it "
            f"takes {LEAST_CONTEXT} of both"
        )
    bench = _Bench(replace(limits, max_context=min(limits.max_context, kv_tokens)), report, weights)
    for each in filter(None, (mixed, pair)):
        await bench.warm_up(each)
    round_trip = await bench.round_trip(server.prefill)
    first_token = await bench.prefill(server)
    decode = await bench.decode(server, kv_tokens)
    prefill_request_s = await bench.prefill_request(server)
    late = 0.0 if mixed is None else await bench.late(mixed, min(decode.values()))
    mixed_guests = None if mixed is None else await bench.guests(mixed, kv_tokens, late)
    pair_guests = link = store = flip_s = None
    if pair is not None:
        pair_guests = await bench.guests(pair, kv_tokens, 0.0)
        link, store = await bench.movement(pair, mixed)
        flip_s = await bench.flips(pair)
    await bench.reload(server.decode)
    # Where the legs were timed, the KV of the new tokens moved after they were computed.
    moving = 1 / link.tokens_per_s if mixed is None and link is not None else 0.0
    request_s = round_trip if mixed_guests is None else max(round_trip, mixed_guests.idle_s - mixed_guests.held_s)
    return Measured(
        prefill=_steps_of(first_token, request_s, moving),
        decode=decode,
        kv_tokens=kv_tokens,
        request_s=request_s,
        prefill_request_s=prefill_request_s,
        late_steps=late,
        update_s=median(bench.reloads),
        mixed_guests=mixed_guests,
        pair_guests=pair_guests,
        link=link,
        store_tokens_per_s=store,
        flip_s=flip_s,
    )


@dataclass(frozen=True, slots=True)
class _Served:
    """A request as its client saw it, in seconds of the event loop's clock."""

    start: float
    prefilled: float
    """The prefill leg ended, or the first token came."""
    arrivals: list[tuple[float, int]]
    """When tokens came, and how many."""
    cached_tokens: int

    @property
    def first_token_s(self) -> float:
        return self.prefilled - self.start


class _Bench:
    """Sends the requests of a measurement. Numbers of seconds, unless said otherwise."""

    def __init__(self, limits: Limits, report: Report, weights: str | None) -> None:
        self._limits = limits
        self._report = report
        self._weights = weights
        self._random = random.Random(0)
        self._numbers = count(1)
        self.reloads: list[float] = []

    async def warm_up(self, server: Server) -> None:
        self._report("warming up")
        for _ in range(WARM_UPS):
            await self._serve(server, self._tokens(self._limits.max_context // 4), 4)

    async def round_trip(self, engine: Engine) -> float:
        """Of a question that needs no step."""
        self._report("round trip")
        return median([await _timed(engine.info()) for _ in range(ROUND_TRIPS)])

    async def prefill(self, server: Server) -> dict[Point, float]:
        """Time to the first token at (new tokens, cached prefix)."""
        longest = self._limits.max_context - 1
        sizes = sorted({1, *_doubling(SMALLEST_PREFILL, min(self._limits.chunk, longest))})
        prefixes = [0, *_shares(longest - SMALLEST_PREFILL)]
        times: dict[Point, list[float]] = {}
        for number in self._rounds():
            for prefix in prefixes:
                self._report(f"prefill after {prefix} tokens, round {number} of {self._limits.rounds}")
                shared = self._tokens(prefix)
                if prefix:
                    await self._serve(server, shared, 1)
                for new in sizes:
                    if prefix + new <= longest:
                        served = await self._serve(server, shared + self._tokens(new), 1)
                        _check_cached(server.prefill, served, prefix)
                        times.setdefault((new, prefix), []).append(served.first_token_s)
        return _completed({point: median(several) for point, several in times.items()})

    async def decode(self, server: Server, kv_tokens: int) -> dict[Point, float]:
        """Time between tokens at (requests, context)."""
        contexts = _shares(self._limits.max_context - DECODED // 2 - 1)
        batches = _doubling(1, self._limits.max_running)
        seen: dict[Point, list[tuple[float, float]]] = {}
        for number in self._rounds():
            for context in contexts:
                for batch in batches:
                    if batch * (context + DECODED // 2) <= kv_tokens:
                        self._report(f"decode of {batch} x {context} tokens, round {number} of {self._limits.rounds}")
                        several = seen.setdefault((batch, context), [])
                        several.extend(filter(None, [await self._decode_once(server, batch, context)]))
        times: dict[Point, float] = {}
        for batch in sorted({batch for batch, _ in seen}):
            if not all(several for (size, _), several in seen.items() if size == batch):
                raise EngineError(
                    f"engine {server.decode.name}: asked for {batch} requests at once; they never ran together: give a "
                    "smaller --max-running"
                )
            line = sorted(_medians(several) for (size, _), several in seen.items() if size == batch)
            times |= {(size, context): _on_line(line, context) for size, context in seen if size == batch}
        return _completed(times)

    async def _decode_once(self, server: Server, batch: int, context: int) -> tuple[float, float] | None:
        """(mean context, seconds between tokens), while all requests of the batch run; None where they hardly did."""
        prompts = [self._tokens(context - DECODED // 2) for _ in range(batch)]
        # Once they are cached, the requests start nearly together.
        await asyncio.gather(*(self._serve(server, prompt, 1) for prompt in prompts))
        runs = await asyncio.gather(*(self._serve(server, prompt, DECODED) for prompt in prompts))
        pace = _pace(runs)
        if pace.steps < DECODED // 4:
            return None
        return context - DECODED // 2 + pace.before + (pace.steps - 1) / 2, pace.step_s

    async def prefill_request(self, server: Server) -> float:
        """What several short prompts at once take longer than one of their length, for each after the first."""
        extra: list[float] = []
        most = min(self._limits.max_running, (self._limits.max_context - 1) // SMALLEST_PREFILL)
        for number in self._rounds():
            self._report(f"short prompts, round {number} of {self._limits.rounds}")
            for prompts in _doubling(2, most):
                start = _now()
                await asyncio.gather(*(self._serve(server, self._tokens(SMALLEST_PREFILL), 1) for _ in range(prompts)))
                several = _now() - start
                one = await self._serve(server, self._tokens(SMALLEST_PREFILL * prompts), 1)
                extra.append((several - (one.prefilled - one.start)) / (prompts - 1))
        return max(0.0, median(extra))

    async def late(self, server: Server, step_s: float) -> float:
        """How many steps after the one that makes it a token comes while there is more to do: an engine that overlaps its
        host's work with its steps tells of one when the next is done, or under way. `step_s`: of one short request."""
        self._report("overlap")
        late = []
        for _ in range(WARM_UPS * self._limits.rounds):
            only, first = [(await self._serve(server, self._tokens(PAGE), new)).first_token_s for new in (1, FOLLOWED)]
            late.append((first - only) / step_s)
        return max(0.0, median(late))

    async def guests(self, server: Server, kv_tokens: int, late: float) -> Guests | None:
        """Requests for two tokens, one after another, while a batch decodes. None where two do not fit at once."""
        tokens = min(self._limits.max_context, PAGE + BACKGROUND_TOKENS)
        batch = min(BACKGROUND, self._limits.max_running // 2, kv_tokens // (2 * tokens))
        if batch == 0:
            return None
        held: list[float] = []
        steps: list[float] = []
        idle: list[float] = []
        for number in self._rounds():
            self._report(f"requests to a busy engine, round {number} of {self._limits.rounds}")
            alone = _pace(await self._decode_batch(server, batch))
            larger = _pace(await self._decode_batch(server, 2 * batch))
            idle += [(await self._serve(server, self._tokens(PAGE), 1)).first_token_s for _ in range(WARM_UPS)]
            work = asyncio.ensure_future(self._decode_batch(server, batch))
            guests: list[_Served] = []
            while not work.done():
                guests.append(await self._serve(server, self._tokens(PAGE), 2))
            pace = _pace(await work)
            guests = [guest for guest in guests if pace.begin < guest.prefilled <= pace.end]
            if guests:
                # Each was one more request in one step.
                own = (larger.step_s - alone.step_s) / batch
                held.append(pace.steps * (pace.step_s - alone.step_s) / len(guests) - own)
                steps.append((median(guest.first_token_s for guest in guests) - median(idle)) / alone.step_s - late)
        return Guests(max(0.0, median(held)), max(0.0, median(steps)), median(idle)) if held else None

    async def _decode_batch(self, server: Server, batch: int) -> list[_Served]:
        """Short prompts and long outputs."""
        tokens = min(self._limits.max_context - PAGE, BACKGROUND_TOKENS)
        return await asyncio.gather(*(self._serve(server, self._tokens(PAGE), tokens) for _ in range(batch)))

    async def movement(self, pair: Server, mixed: Server | None) -> tuple[Link, float | None]:
        """KV from prefill to decode, and the tokens/s from the KV store, or None where there is none to see.

        What a request whose prompt was computed before takes longer on the pair, whose decode side has forgotten it, than
        on a mixed engine grows with the length of the prompt by its rate; what remains is the latency. Without a mixed engine
        the growth contains that of the last token's attention, and the latency stays in the prefill times.
        """
        lengths = _shares(self._limits.max_context - 1)
        moved: dict[int, list[float]] = {length: [] for length in lengths}
        fetched: dict[int, list[float]] = {length: [] for length in lengths}
        for number in self._rounds():
            self._report(f"KV transfer, round {number} of {self._limits.rounds}")
            prompts = {length: self._tokens(length) for length in lengths}
            others = {length: self._tokens(length) for length in lengths}
            for server in filter(None, (pair, mixed)):
                for prompt in prompts.values():
                    await self._serve(server, prompt, 1)
            if mixed is not None:
                for prompt in others.values():
                    await self._serve(mixed, prompt, 1)
                await asyncio.sleep(SETTLE_S)
            await self.reload(pair.decode)
            for length in lengths:
                apart = await self._serve(pair, prompts[length], 1)
                _check_cached(pair.prefill, apart, length - PAGE)
                if mixed is None:
                    moved[length].append(apart.first_token_s)
                    continue
                whole = await self._serve(mixed, prompts[length], 1)
                moved[length].append(apart.first_token_s - whole.first_token_s)
                far = await self._serve(pair, others[length], 1)
                if far.cached_tokens >= length - PAGE:
                    fetched[length].append(far.first_token_s - apart.first_token_s)
        growth, rest = _line(moved)
        link = Link(1 / growth, 0.0 if mixed is None else max(0.0, rest))
        return link, 1 / _line(fetched)[0] if all(fetched.values()) else None

    async def flips(self, pair: Server) -> float:
        """A role switch of an idle engine."""
        self._report("role switches")
        return median(
            [await _timed(pair.prefill.switch_role(role)) for _ in range(FLIPS) for role in (Role.DECODE, Role.PREFILL)]
        )

    async def reload(self, engine: Engine) -> None:
        """Load weights, which empties the cache too."""
        info = await engine.info()
        path = self._weights or info.model_path
        self.reloads.append(await _timed(engine.update_weights(path, info.weights_version)))

    async def _serve(self, server: Server, tokens: tuple[int, ...], new: int) -> _Served:
        number = next(self._numbers)
        bootstrap = None
        if not server.mixed:
            bootstrap = Bootstrap(server.prefill.bootstrap_host, server.prefill.bootstrap_port, number)
        request = GenerateRequest(
            rid=f"measure-{number}",
            input_ids=tokens,
            sampling=SamplingParams(max_new_tokens=new, seed=number),
            bootstrap=bootstrap,
        )
        start = _now()
        if server.mixed:
            leg = await _read(server.decode, request)
            return _Served(start, leg.arrivals[0][0], leg.arrivals, leg.cached_tokens)
        first, leg = await asyncio.gather(_read(server.prefill, request), _read(server.decode, request))
        return _Served(start, first.arrivals[-1][0], leg.arrivals, first.cached_tokens)

    def _tokens(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.choices(range(self._limits.vocabulary), k=length))

    def _rounds(self) -> range:
        return range(1, self._limits.rounds + 1)


@dataclass(frozen=True, slots=True)
class _Pace:
    """Of requests that decode together, while all of them do."""

    begin: float
    end: float
    before: float
    """Tokens that each had by then."""
    steps: float

    @property
    def step_s(self) -> float:
        """Raises `EngineError` where they hardly decoded together."""
        if self.steps <= 0:
            raise EngineError(f"requests that were sent together did not decode together: {HELD_UP}")
        return (self.end - self.begin) / self.steps


def _pace(runs: Sequence[_Served]) -> _Pace:
    # Where tokens come late, the last one does not: no step follows it.
    arrivals = [run.arrivals[:-1] or run.arrivals for run in runs]
    # The last one to join did so in the middle of a step, perhaps; with its second token that step is over.
    begin = max(several[:2][-1][0] for several in arrivals)
    end = min(several[-1][0] for several in arrivals)
    before = [sum(tokens for time, tokens in several if time <= begin) for several in arrivals]
    within = [sum(tokens for time, tokens in several if begin < time <= end) for several in arrivals]
    return _Pace(begin, end, fmean(before), fmean(within))


@dataclass(frozen=True, slots=True)
class _Leg:
    arrivals: list[tuple[float, int]]
    cached_tokens: int


async def _read(engine: Engine, request: GenerateRequest) -> _Leg:
    """Raises `EngineError` when it was aborted."""
    arrivals: list[tuple[float, int]] = []
    cached = 0
    async for chunk in engine.generate(request):
        cached = max(cached, chunk.cached_tokens)
        if chunk.token_ids:
            arrivals.append((_now(), len(chunk.token_ids)))
        if chunk.finish is FinishReason.ABORT:
            raise EngineError(f"engine {engine.name}: asked {request.rid}; it aborted the request")
    if not arrivals:
        raise EngineError(f"engine {engine.name}: asked {request.rid}; it gave no token")
    return _Leg(arrivals, cached)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _timed(work: Awaitable[object]) -> float:
    start = _now()
    await work
    return _now() - start


def _check_cached(engine: Engine, served: _Served, expected: int) -> None:
    if served.cached_tokens < expected:
        raise EngineError(
            f"engine {engine.name}: had {served.cached_tokens} of {expected} tokens cached that it had just computed; "
            "measure an engine with a prefix cache that holds a whole context"
        )


def _doubling(first: int, last: int) -> list[int]:
    """`first`, twice that, and so on, and `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def _shares(longest: int) -> list[int]:
    """Lengths of whole pages up to `longest`."""
    return sorted({max(PAGE, int(share * longest) // PAGE * PAGE) for share in CONTEXTS})


def _medians(several: Sequence[tuple[float, float]]) -> tuple[float, float]:
    xs, ys = zip(*several, strict=True)
    return median(xs), median(ys)


def _on_line(line: Sequence[tuple[float, float]], x: float) -> float:
    """The value at `x` of the line through points in ascending order, which goes on straight at its ends."""
    if len(line) == 1:
        return line[0][1]
    upper = next((i for i in range(1, len(line)) if line[i][0] >= x), len(line) - 1)
    (x0, y0), (x1, y1) = line[upper - 1], line[upper]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _completed(times: dict[Point, float]) -> dict[Point, float]:
    """With the corner that the engine's limits cut off the rectangle, so that whoever interpolates near it finds four points.

    There each number of tokens goes on along the line of its own times, since its attention grows with the context. One that
    was measured at a single context grows as the largest that was measured at more, in proportion to its tokens.
    """
    sizes, contexts = (sorted({point[axis] for point in times}) for axis in (0, 1))
    lines = {
        size: {context: [times[size, context]] for context in contexts if (size, context) in times} for size in sizes
    }
    growths = {size: _line(line)[0] for size, line in lines.items() if len(line) > 1}
    full = dict(times)
    for size, line in lines.items():
        last = max(line)
        for context in contexts:
            if context > last:
                growth = growths.get(size, growths[max(growths)] / max(growths) * size)
                full[size, context] = times[size, last] + growth * (context - last)
    return full


def _steps_of(first_token: dict[Point, float], request_s: float, moving: float) -> dict[Point, float]:
    """Times to the first token without the way, and without `moving` seconds for each new token. Raises `EngineError`."""
    times = {(new, prefix): seconds - request_s - new * moving for (new, prefix), seconds in first_token.items()}
    if min(times.values()) <= 0:
        raise EngineError(
            f"the engines took {1000 * min(first_token.values()):.1f} ms to a first token, {1000 * request_s:.1f} ms of it "
            f"on the way: {HELD_UP}"
        )
    return times


def _line(times: dict[int, list[float]]) -> tuple[float, float]:
    """(seconds a token, seconds at none) of times by length: the median slope over all pairs of lengths (Theil and Sen)."""
    points = [(length, median(several)) for length, several in times.items()]
    slope = median([(t2 - t1) / (n2 - n1) for (n1, t1), (n2, t2) in combinations(points, 2)])
    slope = max(slope, LEAST_GROWTH)
    return slope, median([time - slope * length for length, time in points])


@dataclass(frozen=True, slots=True)
class Facts:
    """What a profile says that no measurement shows; see `Profile`."""

    model: str
    gpu: str
    gpus: int
    kv_bytes: int
    source: str
    restart_s: float


def kv_bytes_of(model_path: str) -> int:
    """KV cache of a token, bytes, as a checkpoint's `config.json` tells. Raises `ConfigError` where it cannot be read off."""
    path = Path(model_path) / "config.json"
    try:
        config = json.loads(path.read_text())
        if "kv_lora_rank" in config:
            numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
        else:
            heads = config["num_attention_heads"]
            head = config.get("head_dim") or config["hidden_size"] // heads
            numbers = 2 * config.get("num_key_value_heads", heads) * head
        kind = str(config.get("dtype") or config["torch_dtype"])
        return int(config["num_hidden_layers"] * numbers * KV_NUMBER_BYTES[kind])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"kv_bytes: cannot be read off {path} ({error!r}); give --kv-bytes") from error


KV_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ASSUMED = {"network_bytes_per_s": 50e9, "flip_s": 5.0}
"""Where only one engine was there: the paper's network interface (400 Gbit/s) and its role switch (5, 5.4)."""


def write_profile(path: Path, measured: Measured, limits: Limits, facts: Facts) -> Profile:
    """Write `path` and the grid beside it. Raises OSError."""
    grid = path.with_suffix(".csv")
    link, store = measured.link, measured.store_tokens_per_s
    mixed, pair = measured.mixed_guests, measured.pair_guests
    network = ASSUMED["network_bytes_per_s"] if link is None else link.tokens_per_s * facts.kv_bytes
    unknown = [name for name, value in (("network", link), ("flip_s", measured.flip_s)) if value is None]
    profile = Profile(
        name=path.stem,
        model=facts.model,
        gpu=facts.gpu,
        source=facts.source + (f"; not measured but assumed: {', '.join(unknown)}" if unknown else ""),
        gpus=facts.gpus,
        gpus_per_server=facts.gpus,
        ranks=1,
        grid=grid.name,
        chunk=limits.chunk,
        kv_tokens=measured.kv_tokens,
        kv_bytes=facts.kv_bytes,
        max_running=limits.max_running,
        request_s=measured.request_s,
        prefill_request_s=measured.prefill_request_s,
        late_steps=measured.late_steps,
        # Until the next step begins, which is half of one on average, a simulated request waits by itself.
        request_steps=0.0 if mixed is None else max(0.0, mixed.steps - 0.5),
        decode_request_s=0.0 if pair is None else pair.held_s,
        handover_steps=0.0 if pair is None else pair.steps,
        network_bytes_per_s=network,
        network_latency_s=0.0 if link is None else link.latency_s,
        store_bytes_per_s=network if store is None else store * facts.kv_bytes,
        flip_s=ASSUMED["flip_s"] if measured.flip_s is None else measured.flip_s,
        update_s=measured.update_s,
        directory=str(path.parent),
        restart_s=facts.restart_s,
    )
    with grid.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for phase, times in (("prefill", measured.prefill), ("decode", measured.decode)):
            # From outside an engine its operators cannot be told apart; `attn_ms` has them all.
            writer.writerows((phase, *point, f"{1000 * times[point]:.4f}", 0, 0, 0, 0) for point in sorted(times))
    data = profile.model_dump(exclude={"directory"}, exclude_none=True)
    path.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
    return profile
