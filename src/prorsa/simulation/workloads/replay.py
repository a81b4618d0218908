"""Recorded trajectories as a workload.

A replay plays the trajectories of a trace again, with their own lengths, tools and durations, on whatever cluster is
simulated. Only what does not depend on the cluster is taken from the trace; its queues, prefills and resends are not, nor
when its trajectories came. Where a prompt does not extend the context before it, another segment of the same trajectory
begins: the next prompt has in common with the context what `Ready.kept` says.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from prorsa.config import ConfigError
from prorsa.lifecycle import TRANSITIONS, State, TraceError, read_trace
from prorsa.lifecycle import events as e
from prorsa.report.rundir import TRACE
from prorsa.rollout.sampler import derive_seed
from prorsa.simulation.workloads.pseudo_model import MOST_TURNS
from prorsa.simulation.workloads.scripts import Script, TurnScript

log = logging.getLogger(__name__)

MIXED_TASKS = "trace"
"""The workload's name where a trace has trajectories of several tasks."""


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
            group.append(script.reshaped(prompt).within(max_context))
        except ValueError as error:
            raise ConfigError(
                f"workload.max_context={max_context}: {path}, trajectory {course.trajectory}: {error}; "
                f"set it to {script.longest_context} or more"
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
        self._played = sampled.prompt_tokens
        """Length of the current prompt when it is played: an output may be longer then, see `_end_turn`."""
        self._start = 0
        """Length of the context with which the current turn began."""
        self._tokens = sampled.prompt_tokens
        """Length that the context has at least."""
        self._tool: str | None = None
        self._output = 0
        self._reward_s = self._reward = 0.0

    def script(self, starts: Mapping[e.SandboxMode, float]) -> Script:
        """Of a trajectory that is DONE. Its sandbox started in one mode; `starts` has the seconds in the other."""
        if not 0 < len(self._turns) <= MOST_TURNS:
            raise ConfigError(
                f"{self._file}: trajectory {self.trajectory} has {len(self._turns)} turns; it must be 1 to {MOST_TURNS}"
            )
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
                self._begin_turn(event, elapsed)
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

    def _begin_turn(self, event: e.Ready, elapsed: float) -> None:
        tokens = event.tokens
        if tokens < 1:
            self._fail(f"it begins with {tokens} tokens; a prompt has one at least")
        if self.state is State.TOOL:
            try:
                self._continue(tokens, event.extends(self._tokens), elapsed)
            except ValueError as error:
                self._fail(str(error), turn=1)
        else:
            if self._prompt not in (0, tokens):
                self._fail(f"it begins with {tokens} tokens, but the first prompt has {self._prompt}")
            self._prompt = self._played = tokens
            if self.state is State.SANDBOX_STARTING:
                self.sandbox_s = elapsed
        self._start = self._tokens = tokens

    def _continue(self, tokens: int, kept: int, elapsed: float) -> None:
        """The tool has returned; the next prompt of `tokens` begins with `kept` tokens of the context."""
        dropped = self._tokens - kept
        if kept < self._start:
            dropped = self._played + self._output - min(kept, self._played)
        turn = TurnScript(self._output, self._tool, elapsed, tokens - kept, dropped)
        self._turns.append(turn)
        self._played = turn.next(self._played)

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
