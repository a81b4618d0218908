"""How long a step of an engine takes, from the measured grid of its profile (`prorsa.profiles.profile`).

A step ends when the slowest rank has done its attention and dense layers, the experts have done the tokens of all ranks
and both exchanges between them are over:

    step = max over ranks of (attention + dense) + experts(mean tokens of a rank) + communication(most tokens of a rank)
           + host overhead

(paper, 3.2: all attention DP ranks meet at the expert layer). Once any rank prefills, all of them exchange in the prefill
mode, so that experts and communication are priced by the prefill part of the grid.

Between grid points the times are interpolated linearly, below the smallest one they stay as they are there, and above the
largest they go on along the last segment, or level where that one falls.
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from prorsa.config import ConfigError
from prorsa.profiles.profile import Profile

PHASES = ("prefill", "decode")
TIMES = ("attn_ms", "dense_ms", "moe_ms", "moe_skewed_ms", "comm_ms")
COLUMNS = ("phase", "tokens", "context", *TIMES)
MILLISECOND = 1e-3
Rows = dict[tuple[float, float], tuple[float, ...]]
"""Of one phase: (tokens, context) -> milliseconds, in the order of `TIMES`."""


class StepCosts:
    """Times in seconds. Cheap enough to be asked at every step of every rank."""

    def __init__(self, profile: Profile) -> None:
        """Raises `ConfigError` with the file, the line, the value and the remedy where the grid cannot be used."""
        path = Path(profile.directory) / profile.grid
        grids = tuple(_read(path))
        prefill, decode = (_Phase(grid, profile.expert_imbalance) for grid in grids)
        gaps = [above - below for below, above in pairwise(grids[1].contexts)]
        self.least_window = max(1, int(min(gaps))) if gaps else None
        """Tokens of context between the two points of the decode grid that are closest; None where it has only one."""
        self._prefill_local = prefill.local.at
        self._single = grids[0].tokens[0] == 1
        self._decode_local = decode.local.at
        self._shared = {True: (prefill.moe.at, prefill.comm.at), False: (decode.moe.at, decode.comm.at)}
        self._overhead = profile.step_overhead_s
        self._chunk = profile.chunk
        self._ranks = profile.ranks

    def prefill_local(self, tokens: float, prefix: float) -> float:
        """Attention and dense layers of a rank that prefills `tokens` new tokens after `prefix` (where its chunk holds
        several requests, the mean over its tokens), seconds."""
        return self._prefill_local(tokens, prefix)

    def prefix_s(self, prefix: float) -> float:
        """What a request's cached `prefix` adds to a step however few new tokens follow it, seconds: a chunk of several
        requests reads the prefix of each, of which `prefill_local` has one of mean length. 0 where the grid does not have
        steps of one token."""
        return self._prefill_local(1, prefix) - self._prefill_local(1, 0) if self._single else 0.0

    def decode_local(self, batch: float, context: float) -> float:
        """Attention and dense layers of a rank that decodes `batch` requests of `context` tokens each (the mean), seconds."""
        return self._decode_local(batch, context)

    def shared(self, extending: bool, mean_tokens: float, max_tokens: float) -> float:
        """What a step adds for all ranks together: experts, communication and host, seconds.

        `extending`: any rank prefills. `mean_tokens`, `max_tokens`: what a rank brings to the experts, over all ranks.
        """
        moe, comm = self._shared[extending]
        return moe(mean_tokens) + comm(max_tokens) + self._overhead

    def prefill_speed(self, prompt: int, prefix: int = 0) -> float:
        """New tokens a second of one instance whose ranks all prefill prompts of `prompt` tokens, the first `prefix` of
        them cached, in full chunks: what a prompt leaves of its last chunk, another one fills."""
        if not 0 <= prefix < prompt:
            raise ValueError(f"a prompt of {prompt} tokens with {prefix} cached: at least one must be new")
        shared = self.shared(True, self._chunk, self._chunk)
        seconds = 0.0
        for start in range(prefix, prompt, self._chunk):
            share = min(self._chunk, prompt - start) / self._chunk
            seconds += share * (self.prefill_local(self._chunk, start) + shared)
        return self._ranks * (prompt - prefix) / seconds


class _Curve:
    """A function of one number, linear between its points."""

    __slots__ = ("_last", "_xs", "_ys")

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self._xs, self._ys = _extended(xs, ys)
        self._last = len(xs)

    def at(self, x: float) -> float:
        xs, ys = self._xs, self._ys
        i = bisect_right(xs, x, 1, self._last) - 1
        low = xs[i]
        if x <= low:
            return ys[i]
        return ys[i] + (ys[i + 1] - ys[i]) * ((x - low) / (xs[i + 1] - low))


class _Surface:
    """A function of two numbers, bilinear between the points of its rectangle."""

    __slots__ = ("_last_x", "_last_y", "_rows", "_xs", "_ys")

    def __init__(self, xs: Sequence[float], ys: Sequence[float], value: Callable[[float, float], float]) -> None:
        rows: list[list[float]] = []
        for x in xs:
            self._ys, row = _extended(ys, [value(x, y) for y in ys])
            rows.append(row)
        columns: list[list[float]] = []
        for column in zip(*rows, strict=True):
            self._xs, extended = _extended(xs, column)
            columns.append(extended)
        self._rows: list[list[float]] = [list(row) for row in zip(*columns, strict=True)]
        self._last_x, self._last_y = len(xs), len(ys)

    def at(self, x: float, y: float) -> float:
        xs, ys = self._xs, self._ys
        i = bisect_right(xs, x, 1, self._last_x) - 1
        j = bisect_right(ys, y, 1, self._last_y) - 1
        right = (x - xs[i]) / (xs[i + 1] - xs[i]) if x > xs[i] else 0.0
        up = (y - ys[j]) / (ys[j + 1] - ys[j]) if y > ys[j] else 0.0
        row, following = self._rows[i], self._rows[i + 1]
        here = row[j] + (row[j + 1] - row[j]) * up
        there = following[j] + (following[j + 1] - following[j]) * up
        return here + (there - here) * right


def _extended(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """With one more point, so that the segment before it says how the function goes on: it never falls there, since
    scatter in the last measured segment would else make far times negative."""
    step, rise = (xs[-1] - xs[-2], ys[-1] - ys[-2]) if len(xs) > 1 else (1.0, 0.0)
    return [*xs, xs[-1] + step], [*ys, ys[-1] + max(0.0, rise)]


@dataclass(frozen=True)
class _Grid:
    """One phase: a row at every pair of the two axes."""

    tokens: list[float]
    contexts: list[float]
    rows: Rows


class _Phase:
    def __init__(self, grid: _Grid, imbalance: float) -> None:
        def local(tokens: float, context: float) -> float:
            attention, dense, *_ = grid.rows[tokens, context]
            return MILLISECOND * (attention + dense)

        def moe(row: tuple[float, ...]) -> float:
            _, _, balanced, skewed, _ = row
            return max(0.0, balanced + imbalance * (skewed - balanced))

        self.local = _Surface(grid.tokens, grid.contexts, local)
        self.moe = self._shared(grid, moe)
        self.comm = self._shared(grid, lambda row: row[-1])

    def _shared(self, grid: _Grid, value: Callable[[tuple[float, ...]], float]) -> _Curve:
        """By tokens alone: experts and communication know no context, so what differs with it is scatter."""
        typical = [MILLISECOND * median(value(grid.rows[tokens, c]) for c in grid.contexts) for tokens in grid.tokens]
        return _Curve(grid.tokens, typical)


def _read(path: Path) -> Iterator[_Grid]:
    """The grids of prefill and of decode. Raises `ConfigError`."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"grid={path}: cannot be read ({error}); name a CSV file beside the profile") from error
    lines = csv.reader(text.splitlines())
    header = [name.strip() for name in next(lines, [])]
    if sorted(header) != sorted(COLUMNS):
        raise ConfigError(
            f"grid={path}, line 1: the columns are {','.join(header) or 'none'}; they must be {','.join(COLUMNS)}"
        )
    rows: dict[str, Rows] = {phase: {} for phase in PHASES}
    for cells in filter(None, lines):
        where = f"grid={path}, line {lines.line_num}"
        if len(cells) != len(header):
            raise ConfigError(f"{where}: {len(cells)} values; the header names {len(header)} columns")
        row = dict(zip(header, map(str.strip, cells), strict=True))
        _add(rows, row, where)
    for phase in PHASES:
        yield _rectangle(rows[phase], phase, path)


def _add(rows: dict[str, Rows], row: dict[str, str], where: str) -> None:
    phase = row["phase"]
    if phase not in rows:
        raise ConfigError(f"{where}: phase={phase}: unknown; write {' or '.join(PHASES)}")
    point = _number(row, "tokens", where), _number(row, "context", where)
    times = tuple(_number(row, name, where) for name in TIMES)
    if point[0] == 0:
        raise ConfigError(f"{where}: tokens=0: a step has tokens; remove the line")
    if times[0] + times[1] == 0:
        raise ConfigError(f"{where}: attn_ms=0, dense_ms=0: a step takes time; measure one of them")
    if point in rows[phase]:
        raise ConfigError(
            f"{where}: {phase} of tokens={point[0]:g}, context={point[1]:g} stands twice; remove one line"
        )
    rows[phase][point] = times


def _number(row: dict[str, str], name: str, where: str) -> float:
    try:
        number = float(row[name])
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(f"{where}: {name}={row[name]}: write a number of 0 or more")
    return number


def _rectangle(rows: Rows, phase: str, path: Path) -> _Grid:
    if not rows:
        raise ConfigError(f"grid={path}: no line has phase={phase}; add its measurements")
    tokens, contexts = (sorted({point[axis] for point in rows}) for axis in (0, 1))
    for t in tokens:
        for c in contexts:
            if (t, c) not in rows:
                raise ConfigError(
                    f"grid={path}: {phase} of tokens={t:g}, context={c:g} is missing; the lines of a phase must be all "
                    "pairs of its tokens and contexts: add the line, or remove the others of that tokens or context"
                )
    return _Grid(tokens, contexts, rows)
