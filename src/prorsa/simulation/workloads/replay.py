"""Recorded trajectories as a workload, and foreign recordings of agents as traces of ours.

A replay plays the trajectories of a trace again, with their own lengths, tools and durations, on whatever cluster is
simulated. Only what does not depend on the cluster is taken from the trace; its queues, prefills and resends are not.

`convert` reads files of one JSON object a line, gzipped or not, of two kinds. Trajectories have `id` and a list `turns`, and
may have `domain`, `group`, `success`, `sandbox` and `reward_duration_s`. Each turn has `prompt_tokens`, which is
`prompt_tokens_new` + `cached_prefix_tokens`, and `output_tokens`; perhaps a `tool` with `name` and `duration_s` that runs
after it, `llm_time_s`, `ttft_s`, `step_interval_s` (from the start of this turn to that of the next) and `reset` (the context
was compacted). Requests have `timestamp` (ms), `input_length` and `output_length`, or `ts`, `in` and `out`.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from prorsa.config import ConfigError
from prorsa.lifecycle import TRANSITIONS, State, TraceError, TraceWriter, read_trace
from prorsa.lifecycle import events as e
from prorsa.report.rundir import TRACE
from prorsa.rollout.sampler import derive_seed
from prorsa.simulation.workloads.scripts import Script, TurnScript

log = logging.getLogger(__name__)

MIXED_TASKS = "trace"
"""The workload's name where a trace has trajectories of several tasks."""

# What a foreign recording does not say.
TOKEN_S = 0.03
"""Seconds to generate a token."""
PREFILL_TOKENS_PER_S = 10_000.0
"""New prompt tokens; but a prefill takes half of a turn at most."""
TOOL_S = 1.0
REWARD_S = 4.4
"""The median of the quicker half of the measured unit-test rewards."""
HUMAN = ("user", "tool_or_approval")
"""Tools whose durations are a human's, who reads, thinks or approves: they count as unknown."""
COMPACTED = 0.9
"""A prompt that begins with less than this part of the previous one has been compacted, whether it says so or not."""
TASKS = {"coding": "coding-agent", "general": "general-agent"}
INSTANCE = "recorded"

Json = dict[str, Any]


# A trace as a workload.


class Replay:
    """The groups of a trace as questions, in the order in which they were sampled. Implements `Workload`.

    Member m of a group, which the run's `Sampler` gives `derive_seed(run seed, question, 0, m)`, plays the group's m-th
    trajectory, whatever the size of the groups; any other seed plays one of them too. So `seed` must be the run's seed
    where trajectories are to be replayed one by one.
    """

    def __init__(self, name: str, groups: list[list[Script]], left_out: int, seed: int) -> None:
        self.name = name
        self.questions = len(groups)
        self.left_out = left_out
        """Trajectories of the trace that were dropped, or had not ended: what they would have done is not known."""
        self._groups = groups
        self._seed = seed
        self._members: dict[int, dict[int, int]] = {}

    def script(self, question: int, seed: int) -> Script:
        group = self._groups[question]
        return group[self._seeds(question).get(seed, seed % len(group))]

    def _seeds(self, question: int) -> Mapping[int, int]:
        """Seed -> member."""
        members = self._members.get(question)
        if members is None:
            name = f"{self.name}-{question}"
            members = {derive_seed(self._seed, name, 0, m): m for m in range(len(self._groups[question]))}
            self._members[question] = members
        return members


def read_workload(path: str | Path, seed: int, max_context: int) -> Replay:
    """Read a run directory or a trace file. Raises `ConfigError` where it cannot be read or contradicts itself.

    A trajectory that outgrows `max_context` ends early. The members of a group get the first prompt of its first one.
    """
    courses = _read_courses(Path(path))
    ended = [course for course in courses if course.state is State.DONE]
    if not ended:
        raise ConfigError(
            f"workload.path={path}: none of its {len(courses)} trajectories ended; give a trace with some that did"
        )
    tasks = {course.task for course in ended}
    starts = {mode: _typical_start(courses, mode) for mode in e.SandboxMode}
    groups: defaultdict[str, list[Script]] = defaultdict(list)
    for course in ended:
        group = groups[course.group]
        script = course.script(starts)
        prompt = group[0].prompt_tokens if group else script.prompt_tokens
        try:
            group.append(replace(script, prompt_tokens=prompt).within(max_context))
        except ValueError as error:
            raise ConfigError(
                f"workload.max_context={max_context}: {path}, trajectory {course.trajectory}: {error}; "
                f"set it to {script.total_tokens} or more"
            ) from error
    name = tasks.pop() if len(tasks) == 1 else MIXED_TASKS
    return Replay(name, list(groups.values()), len(courses) - len(ended), seed)


def _read_courses(path: Path) -> list[_Course]:
    """Every trajectory of the trace, in the order in which they were sampled."""
    file = path / TRACE if path.is_dir() else path
    courses: dict[str, _Course] = {}
    try:
        for event in read_trace(file):
            if isinstance(event, e.Sampled):
                if event.trajectory in courses:
                    raise ConfigError(
                        f"{file}: trajectory {event.trajectory} was sampled twice; give each its own name"
                    )
                courses[event.trajectory] = _Course(file, event)
            elif event.trajectory in courses:
                courses[event.trajectory].take(event)
            else:
                raise ConfigError(f"{file}: trajectory {event.trajectory} was never sampled; record the trace again")
    except OSError as error:
        raise ConfigError(
            f"workload.path={path}: {error.strerror}; give a run directory or the trace in one"
        ) from error
    except TraceError as error:
        if not courses:
            raise ConfigError(f"workload.path={path}: {error}") from error
        # A run that was killed: its trace is good up to here.
        log.warning("%s", error)
    return list(courses.values())


def _typical_start(courses: list[_Course], mode: e.SandboxMode) -> float:
    """The median start of a sandbox, seconds; where none started in this mode, of those in the other."""
    starts = [course.sandbox_s for course in courses if course.sandbox is mode]
    others = [course.sandbox_s for course in courses if course.sandbox is not None]
    return median(starts or others or [0.0])


class _Course:
    """What a trajectory does, read event by event. Raises `ConfigError` at what cannot follow."""

    def __init__(self, file: Path, sampled: e.Sampled) -> None:
        self.trajectory = sampled.trajectory
        self.group = sampled.group
        self.task = sampled.task
        self.state = State.SAMPLED
        self.sandbox: e.SandboxMode | None = None
        self.sandbox_s = 0.0
        self._file = file
        self._time = sampled.time
        self._prompt = sampled.prompt_tokens
        self._turns: list[TurnScript] = []
        self._start = 0
        """Length of the context with which the current turn began."""
        self._tokens = sampled.prompt_tokens
        """Length that the context has at least."""
        self._tool: str | None = None
        self._output = 0
        self._reward_s = self._reward = 0.0

    def script(self, starts: Mapping[e.SandboxMode, float]) -> Script:
        """Of a trajectory that is DONE. Its sandbox started in one mode; `starts` has the seconds in the other."""
        if self.sandbox is not None:
            starts = {**starts, self.sandbox: self.sandbox_s}
        return Script(
            prompt_tokens=self._prompt,
            turns=tuple(self._turns),
            sandbox_cold_s=starts[e.SandboxMode.COLD] if self.sandbox is not None else 0.0,
            sandbox_prewarmed_s=starts[e.SandboxMode.PREWARMED] if self.sandbox is not None else 0.0,
            reward_s=self._reward_s,
            reward=self._reward,
        )

    def take(self, event: e.Event) -> None:
        sources, target = TRANSITIONS[type(event)]
        if self.state not in sources:
            self._fail(f"{type(event).__name__} cannot follow {self.state.name}")
        elapsed = event.time - self._time
        if elapsed < 0:
            self._fail(f"{self.state.name} ended at {event.time} s, before it began at {self._time} s")
        match event:
            case e.SandboxStarting():
                self.sandbox = event.mode
            case e.Ready():
                self._begin_turn(event.tokens, elapsed)
            case e.Requeued() if event.tokens < self._tokens:
                self._fail(f"it was resent with {event.tokens} tokens and had {self._tokens}")
            case e.Requeued():
                self._tokens = event.tokens
            case e.ToolStarted():
                self._end_turn(event.tokens)
                self._tool = event.tool
            case e.RewardStarted():
                self._end_turn(event.tokens)
                self._turns.append(TurnScript(self._output))
            case e.Done():
                self._reward_s, self._reward = elapsed, event.reward
        self.state = target
        self._time = event.time

    def _begin_turn(self, tokens: int, elapsed: float) -> None:
        if self.state is State.TOOL:
            if tokens < self._tokens:
                self._fail(f"it begins with {tokens} tokens, but the turn before ended with {self._tokens}", turn=1)
            self._turns.append(TurnScript(self._output, self._tool, elapsed, tokens - self._tokens))
        else:
            if self._prompt not in (0, tokens):
                self._fail(f"it begins with {tokens} tokens, but the first prompt has {self._prompt}")
            self._prompt = tokens
            if self.state is State.SANDBOX_STARTING:
                self.sandbox_s = elapsed
        self._start = self._tokens = tokens

    def _end_turn(self, tokens: int) -> None:
        if tokens <= self._start or tokens < self._tokens:
            self._fail(f"it ends with {tokens} tokens, but began with {self._start} and had {self._tokens} already")
        # A simulated turn has a token and its stop at least.
        self._output = max(2, tokens - self._start)
        self._tokens = tokens

    def _fail(self, problem: str, turn: int = 0) -> None:
        raise ConfigError(
            f"{self._file}: trajectory {self.trajectory}, turn {len(self._turns) + turn}: {problem}; "
            "the trace contradicts itself, record it again"
        )


# Foreign recordings as traces.


def convert_file(source: str | Path, target: str | Path) -> int:
    """Write `source` (see the module) as a trace; returns the number of its events. Raises `ConfigError`."""
    events = list(convert(source))
    try:
        writer = TraceWriter(target)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}; give the path of a file that can be made") from error
    with writer:
        for event in events:
            writer.write(event)
    return len(events)


def convert(path: str | Path) -> Iterator[e.Event]:
    """The events of a foreign recording, in the order of their times.

    All trajectories start at time 0, as those of a batch do, and requests when they came. An output counts as part of the
    next prompt. A context cannot shrink: after a compaction (`reset`, or a prompt that does not begin with nine tenths of the
    one before) a new trajectory in a group of its own goes on, called `ID/2`; what an agent dropped of a single output
    stays. Durations that are not known are as the constants of this module say. Raises `ConfigError` with the line.
    """
    path = Path(path)
    events: list[e.Event] = []
    first: float | None = None
    for number, line in _read_lines(path):
        where = f"{path}, line {number}"
        try:
            if isinstance(line.get("turns"), list):
                events += _Recording(line).events()
            elif "input_length" in line or "in" in line:
                time, prompt, output = _request(line)
                first = time if first is None else first
                events += _single_request(f"r{number}", time - first, prompt, output)
            else:
                raise ConfigError(
                    f"{where}: has neither turns nor the lengths of a request, and a summary cannot be played; "
                    "give a file of trajectories or requests"
                )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else error
            raise ConfigError(f"{where}: {problem}; mend the file") from error
    return iter(sorted(events, key=lambda event: event.time))


def _read_lines(path: Path) -> Iterator[tuple[int, Json]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            for number, text in enumerate(file, start=1):
                try:
                    line = json.loads(text)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number}: no JSON ({error}); mend the file") from error
                if not isinstance(line, dict):
                    raise ConfigError(f"{path}, line {number}: no JSON object; mend the file")
                yield number, line
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); give a file of JSON lines, gzipped or not") from error


class _Recording:
    """One trajectory of a foreign recording as events. ValueError where its numbers are impossible."""

    def __init__(self, line: Json) -> None:
        self._line = line
        self._events: list[e.Event] = []
        self._time = 0.0
        self._context = 0
        self._segment = 0
        self._name = ""

    def events(self) -> list[e.Event]:
        turns = self._line["turns"]
        for index, turn in enumerate(turns):
            try:
                _check_turn(turn)
                self._take_turn(turn, turns[index - 1] if index else None)
            except ValueError as error:
                raise ValueError(f"trajectory {self._line['id']}, turn {index}: {error}") from error
            if index + 1 < len(turns) and not _compacted(turns[index + 1], turn):
                self._use_tool(turn)
            else:
                self._end(last=index + 1 == len(turns))
                self._time += _tool_s(turn)
        return self._events

    def _take_turn(self, turn: Json, before: Json | None) -> None:
        if before is None or _compacted(turn, before):
            self._begin(turn["prompt_tokens"])
        self._context = max(self._context, turn["prompt_tokens"])
        self._events.append(e.Ready(self._time, self._name, self._context))
        self._events.append(e.PrefillStarted(self._time, self._name, INSTANCE))
        llm = _llm_s(turn)
        prefill = turn.get("ttft_s")
        if prefill is None:
            prefill = turn["prompt_tokens_new"] / PREFILL_TOKENS_PER_S
        self._events.append(e.DecodeStarted(self._time + min(prefill, llm / 2), self._name, INSTANCE))
        self._time += llm
        # One that was broken off before its first token has cost its prefill.
        self._context += max(1, turn["output_tokens"])

    def _begin(self, prompt: int) -> None:
        line = self._line
        self._segment += 1
        suffix = f"/{self._segment}" if self._segment > 1 else ""
        self._name = f"{line['id']}{suffix}"
        group = f"{line.get('group') or line['id']}{suffix}"
        task = TASKS.get(line.get("domain", ""), MIXED_TASKS)
        self._events.append(e.Sampled(self._time, self._name, group, task, 0, prompt))
        sandbox = line.get("sandbox")
        if sandbox is not None and self._segment == 1:
            mode = e.SandboxMode.PREWARMED if sandbox.get("mode") == "prewarmed" else e.SandboxMode.COLD
            self._events.append(e.SandboxStarting(self._time, self._name, mode, INSTANCE, INSTANCE))
            self._time += _seconds("sandbox.duration_s", sandbox["duration_s"])
        self._context = 0

    def _use_tool(self, turn: Json) -> None:
        name = (turn.get("tool") or {}).get("name") or "unknown"
        self._events.append(e.ToolStarted(self._time, self._name, name, self._context))
        self._time += _tool_s(turn)

    def _end(self, last: bool) -> None:
        line = self._line
        duration = line.get("reward_duration_s") if last else 0.0
        reward_s = REWARD_S if duration is None else _seconds("reward_duration_s", duration)
        reward = float(bool(line.get("success")) and last)
        self._events.append(e.RewardStarted(self._time, self._name, self._context))
        self._events.append(e.Done(self._time + reward_s, self._name, reward, admitted=True))


def _check_turn(turn: Json) -> None:
    prompt, new, cached = turn["prompt_tokens"], turn["prompt_tokens_new"], turn["cached_prefix_tokens"]
    if prompt != new + cached or new < 0 or cached < 0:
        raise ValueError(f"prompt_tokens={prompt} must be prompt_tokens_new + cached_prefix_tokens = {new} + {cached}")
    if prompt < 1 or turn["output_tokens"] < 0:
        raise ValueError(f"a turn of prompt_tokens={prompt} and output_tokens={turn['output_tokens']} cannot be")
    times = {key: turn.get(key) for key in ("llm_time_s", "ttft_s", "step_interval_s")}
    for key, value in (times | {"tool.duration_s": (turn.get("tool") or {}).get("duration_s")}).items():
        if value is not None:
            _seconds(key, value)


def _compacted(turn: Json, before: Json) -> bool:
    return bool(turn.get("reset")) or turn["cached_prefix_tokens"] < COMPACTED * before["prompt_tokens"]


def _llm_s(turn: Json) -> float:
    """Seconds until the turn's last token."""
    known = turn.get("llm_time_s")
    if known is not None:
        return float(known)
    assumed: float = turn["output_tokens"] * TOKEN_S + turn["prompt_tokens_new"] / PREFILL_TOKENS_PER_S
    interval = turn.get("step_interval_s")
    return assumed if interval is None else min(assumed, interval)


def _tool_s(turn: Json) -> float:
    """Seconds that the tool after the turn takes: its own, or else what the turn leaves of its step."""
    tool = turn.get("tool") or {}
    duration = None if tool.get("name") in HUMAN else tool.get("duration_s")
    if duration is not None:
        return float(duration)
    interval = turn.get("step_interval_s")
    return TOOL_S if interval is None else float(interval) - min(_llm_s(turn), float(interval))


def _seconds(key: str, value: float) -> float:
    if not value >= 0:
        raise ValueError(f"{key}={value} must be 0 or more")
    return float(value)


def _request(line: Json) -> tuple[float, int, int]:
    """Seconds of its arrival on some clock, tokens of its prompt and of its output."""
    if "in" in line:
        # Python reads six digits of a second's fraction; some have seven.
        return datetime.fromisoformat(line["ts"][:26]).timestamp(), line["in"], line["out"]
    return line["timestamp"] / 1000, line["input_length"], line["output_length"]


def _single_request(name: str, time: float, prompt: int, output: int) -> list[e.Event]:
    if time < 0 or prompt < 1 or output < 1:
        raise ValueError(f"a request {time} s after the first one, of {prompt} + {output} tokens; it cannot be")
    started = time + prompt / PREFILL_TOKENS_PER_S
    ended = started + output * TOKEN_S
    return [
        e.Sampled(time, name, name, "requests", 0, prompt),
        e.Ready(time, name, prompt),
        e.PrefillStarted(time, name, INSTANCE),
        e.DecodeStarted(started, name, INSTANCE),
        e.RewardStarted(ended, name, prompt + output),
        e.Done(ended, name, 0.0, admitted=True),
    ]
