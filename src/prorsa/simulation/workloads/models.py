"""The workloads: distributions of scripts for a mathematical task, two agentic ones, and requests of fixed length.

Their parameters are our fits to public runs of agents. What those runs are, and their licences:

- Coding agent: 134 SWE-bench runs in three sets with 50/46/110, 18/18/37 and 58/60/101 turns (mean/median/p95), and the times
  of 1,560 tool calls. Turns, prompt and tokens are between the first and the third set.
- General agent: 490 runs with MCP servers, of 20 turns on average (p95 36).
- Turns depend on the question above all: on SWE-bench Pro (three runs a question) the intra-class correlation of their
  logarithm is 0.82, in other sets 0.6 to 0.8.
- Tokens of a turn and tool times hardly depend on the turn before (lag-1 autocorrelation of logarithms within +-0.35), so
  here they do not.
- Mathematics: AIME 2025 answered by a reasoning model of 8B parameters: 148 tokens of prompt, 20.5k of output on average,
  median 25k, cut at 32.5k in 37 % of the answers.

Every script depends on the workload's seed, the question and the trajectory's seed alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import erf, inf, log, sqrt

import numpy as np
from numpy.typing import NDArray

from prorsa.config import ConfigError
from prorsa.simulation.scenario import WorkloadSection
from prorsa.simulation.workloads.replay import read_workload
from prorsa.simulation.workloads.scripts import Script, TurnScript, Workload

Floats = NDArray[np.float64]

WITHIN_GROUP = 0.7
"""Intra-class correlation: the part of a logarithm's variance that is between questions."""
TOOL_LIMIT_S = 300.0
"""A tool call that takes longer is ended by the agent. With it the fitted mixture of the coding agent has the measured mean
of 3.5 s, and the measured 83 % of its time in calls of more than 10 s; without it, 4.3 s and 87 %."""
START_LIMIT_S = 600.0
"""The same for the start of a sandbox; an assumption."""
RESULT_LIMIT = 16384
"""Tokens at which a tool's result is cut, as agents do; an assumption."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    median: float
    sigma: float
    """Of the logarithm."""
    most: float = inf
    """Larger values are cut to it."""

    def at(self, normal: Floats | float) -> Floats:
        """The values that standard normal ones turn into."""
        values: Floats = np.minimum(self.median * np.exp(self.sigma * normal), self.most)
        return values


class Mixture:
    """Of lognormals, each with a weight; the weights need not sum to 1."""

    def __init__(self, parts: Sequence[tuple[float, Lognormal]]) -> None:
        weights = np.array([weight for weight, _ in parts])
        self._bounds = np.cumsum(weights / weights.sum())[:-1]
        self._logs = np.array([log(part.median) for _, part in parts])
        self._sigmas = np.array([part.sigma for _, part in parts])
        self._most = np.array([part.most for _, part in parts])

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, NDArray[np.intp]]:
        """Values, and of which part each is."""
        part = self._bounds.searchsorted(rng.random(count), side="right")
        values = np.exp(self._logs[part] + self._sigmas[part] * rng.standard_normal(count))
        return np.minimum(values, self._most[part]), part


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    times: tuple[tuple[float, Lognormal], ...]
    """Seconds: a mixture, the weights of which say also how often the tool is used."""


@dataclass(frozen=True, slots=True)
class AgentParameters:
    turns: Lognormal
    prompt: Lognormal
    """Tokens of the first prompt, the same for a whole group."""
    output: Lognormal
    """Tokens of a turn."""
    appended: Lognormal
    """Tokens of a tool's result."""
    tools: tuple[Tool, ...]
    reward_s: tuple[tuple[float, Lognormal], ...]


_INSTANT, _QUICK, _SLOW, _LONG = (
    Lognormal(0.028, 0.31, TOOL_LIMIT_S),
    Lognormal(0.093, 0.68, TOOL_LIMIT_S),
    Lognormal(1.23, 0.56, TOOL_LIMIT_S),
    Lognormal(20.1, 1.49, TOOL_LIMIT_S),
)
CODING = AgentParameters(
    turns=Lognormal(43, 0.5),
    prompt=Lognormal(13500, 0.2),
    output=Lognormal(121, 1.0),
    appended=Lognormal(265, 1.4, RESULT_LIMIT),
    tools=(
        Tool("edit", ((0.31, _INSTANT), (0.08, _QUICK))),
        Tool("shell", ((0.25, _QUICK), (0.19, _SLOW), (0.01, _LONG))),
        Tool("test", ((0.10, _SLOW), (0.05, _LONG))),
    ),
    reward_s=((0.54, Lognormal(4.4, 0.33)), (0.46, Lognormal(20.6, 1.03, START_LIMIT_S))),
)
"""The parts of the tools sum to the mixture of four that fits the 1,560 measured calls (weights .31/.33/.29/.06); how they
are dealt to tools is our assumption. At 30 ms a token and with no queues a trajectory takes about 480 s: 49 turns of 6 s
generation and 3.5 s tool, and the reward. The paper's trajectories take 846 s, on a loaded cluster and with lengths that it
does not state; in the public runs turns and tokens differ threefold between agents, and these values stay within them."""

GENERAL = AgentParameters(
    turns=Lognormal(18, 0.43),
    prompt=Lognormal(3900, 1.026),
    output=Lognormal(115, 1.15),
    appended=Lognormal(521, 1.55, RESULT_LIMIT),
    tools=(
        Tool("search", ((0.5, Lognormal(3.6, 0.4)),)),
        Tool("browse", ((0.3, Lognormal(5.5, 0.4)),)),
        Tool("code", ((0.2, Lognormal(3.2, 0.8)),)),
    ),
    reward_s=((1.0, Lognormal(4.4, 0.33)),),
)
"""Turns and tokens are fits to the 490 MCP runs. Of those only whole steps (generation and tool) were measured: 11.3/8.6/27 s
(mean/median/p95). The tools here are what is left of them when generation takes 30 ms a token. A trajectory takes about
220 s then; the paper's take 216 s. Three tools, so that classes of durations can be told apart, are our assumption."""

COLD = Mixture([(0.5, Lognormal(2.6, 0.35)), (0.5, Lognormal(27, 1.47, START_LIMIT_S))])
"""Seconds to start a sandbox in Docker: with a cached image, or with one that is built or pulled."""
PREWARMED = (0.1, 0.3)
"""Seconds, uniform, until a prewarmed one is ready."""


class _Draws:
    """What scripts are drawn with: a generator for each question, and one for each trajectory."""

    def __init__(self, name: str, seed: int) -> None:
        self._key = f"{name}/{seed}"

    def of_question(self, question: int) -> np.random.Generator:
        return self._generator(f"{question}")

    def of_trajectory(self, question: int, seed: int) -> np.random.Generator:
        return self._generator(f"{question}/{seed}")

    def _generator(self, key: str) -> np.random.Generator:
        digest = hashlib.blake2b(f"{self._key}/{key}".encode(), digest_size=16).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "big")))


class AgentWorkload:
    """Multi-turn trajectories with tools in a sandbox. Implements `Workload`."""

    questions: int | None = None

    def __init__(self, name: str, parameters: AgentParameters, seed: int, max_context: int) -> None:
        self.name = name
        self._parameters = parameters
        self._max_context = max_context
        self._draws = _Draws(name, seed)
        self._question = lru_cache(4096)(self._draw_question)
        parts = [(tool.name, weight, times) for tool in parameters.tools for weight, times in tool.times]
        self._tool_names = [name for name, _, _ in parts]
        self._tools = Mixture([(weight, times) for _, weight, times in parts])
        self._reward_s = Mixture(parameters.reward_s)

    def script(self, question: int, seed: int) -> Script:
        prompt, ease, length = self._question(question)
        rng = self._draws.of_trajectory(question, seed)
        own_length, own_ease = rng.standard_normal(2)
        count = max(1, round(float(self._parameters.turns.at(_member(length, own_length)))))
        return Script(
            prompt_tokens=prompt,
            turns=tuple(self._draw_turns(rng, count)),
            sandbox_cold_s=float(COLD.draw(rng, 1)[0][0]),
            sandbox_prewarmed_s=float(rng.uniform(*PREWARMED)),
            reward_s=float(self._reward_s.draw(rng, 1)[0][0]),
            reward=float(_member(ease, own_ease) > 0),
        ).within(self._max_context)

    def _draw_question(self, question: int) -> tuple[int, float, float]:
        """Tokens of its prompt, and its effects on the reward and on the number of turns, standard normal."""
        prompt, ease, length = self._draws.of_question(question).standard_normal(3)
        tokens = round(float(self._parameters.prompt.at(prompt)))
        # A prompt that fills the context leaves nothing to do; half of it is already far in the tail.
        return max(1, min(tokens, self._max_context // 2)), ease, length

    def _draw_turns(self, rng: np.random.Generator, count: int) -> list[TurnScript]:
        parameters = self._parameters
        normal = rng.standard_normal((2, count))
        output = np.maximum(2, np.rint(parameters.output.at(normal[0]))).astype(int).tolist()
        appended = np.maximum(1, np.rint(parameters.appended.at(normal[1]))).astype(int).tolist()
        seconds, part = self._tools.draw(rng, count)
        tools = map(self._tool_names.__getitem__, part.tolist())
        turns = list(map(TurnScript, output, tools, seconds.tolist(), appended))
        turns[-1] = TurnScript(output[-1])
        return turns


MATH_PROMPT = 148
MATH_OUTPUT = ((0.0, 0.25, 0.5, 0.63, 1.0), (1500.0, 5700.0, 25000.0, 32500.0, 32500.0))
"""Quantiles of the output, linear between these. The median, the cap and the 37 % at the cap are measured; the lower quartile
of 5,700 follows from the measured mean (.25 * 3600 + .25 * 15350 + .13 * 28750 + .37 * 32500 = 20500) once the shortest
answer, which is our assumption, is set to 1,500."""


class MathWorkload:
    """One long turn without a tool, scored at once; needs no sandbox. Implements `Workload`.

    How much of an answer's length is the question's is not known; it is taken to be as for an agent's turns.
    """

    name = "math"
    questions: int | None = None

    def __init__(self, seed: int, max_context: int) -> None:
        self._max_context = max_context
        self._draws = _Draws(self.name, seed)

    def script(self, question: int, seed: int) -> Script:
        length, ease = self._draws.of_question(question).standard_normal(2)
        own_length, own_ease = self._draws.of_trajectory(question, seed).standard_normal(2)
        # A quantile of the mixture of question and trajectory: the answers as a whole keep the distribution.
        quantile = (1 + erf(_member(length, own_length) / sqrt(2))) / 2
        output = round(float(np.interp(quantile, *MATH_OUTPUT)))
        reward = float(_member(ease, own_ease) > 0)
        return Script(MATH_PROMPT, (TurnScript(output),), reward=reward).within(self._max_context)


class RequestsWorkload:
    """Single requests, all of the same lengths. Implements `Workload`."""

    name = "requests"
    questions: int | None = None

    def __init__(self, prompt_tokens: int, output_tokens: int) -> None:
        self._script = Script(prompt_tokens, (TurnScript(output_tokens),))

    def script(self, question: int, seed: int) -> Script:
        return self._script


class ScaledWorkload:
    """Another workload with its tools slower or faster and its turns longer or shorter. Implements `Workload`."""

    def __init__(self, inner: Workload, section: WorkloadSection) -> None:
        self.name = inner.name
        self.questions = inner.questions
        self._inner = inner
        self._tool_times = section.tool_times
        self._output_lengths = section.output_lengths
        self._max_context = section.max_context

    def script(self, question: int, seed: int) -> Script:
        script = self._inner.script(question, seed)
        scaled = script.reshaped(script.prompt_tokens, lambda tokens: max(2, round(self._output_lengths * tokens)))
        turns = tuple(replace(turn, tool_s=self._tool_times * turn.tool_s) for turn in scaled.turns)
        return replace(scaled, turns=turns).within(self._max_context)


def build_workload(section: WorkloadSection, seed: int) -> Workload:
    """The workload of a scenario, whose seed is `seed`. Raises `ConfigError`."""
    workload = _unscaled(section, seed)
    return workload if section.tool_times == section.output_lengths == 1 else ScaledWorkload(workload, section)


def _unscaled(section: WorkloadSection, seed: int) -> Workload:
    match section.name:
        case "math":
            return MathWorkload(seed, section.max_context)
        case "coding-agent":
            return AgentWorkload(section.name, CODING, seed, section.max_context)
        case "general-agent":
            return AgentWorkload(section.name, GENERAL, seed, section.max_context)
        case "requests":
            return _requests(section)
        case "trace":
            assert section.path is not None  # a scenario that is none has been refused
            return read_workload(section.path, seed, section.max_context)


def _requests(section: WorkloadSection) -> RequestsWorkload:
    if section.output_tokens < 2:
        raise ConfigError("workload.output_tokens=1: a simulated turn has a token and its stop; set it to 2 or more")
    total = section.prompt_tokens + section.output_tokens
    if total > section.max_context:
        raise ConfigError(
            f"workload.max_context={section.max_context}: a request of {section.prompt_tokens} + {section.output_tokens} "
            f"tokens does not fit; set it to {total} or more"
        )
    return RequestsWorkload(section.prompt_tokens, section.output_tokens)


def _member(question: float, own: float) -> float:
    """A standard normal value, of whose variance the part `WITHIN_GROUP` is the question's."""
    return sqrt(WITHIN_GROUP) * question + sqrt(1 - WITHIN_GROUP) * own
