"""The workload models against the measured figures that they are fitted to, and the promises of every workload.

Tolerances are a few standard errors of the sample, worked out beside each, plus what the fit itself is off by.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.config import ConfigError
from prorsa.simulation.scenario import WorkloadSection
from prorsa.simulation.workloads.models import COLD, build_workload
from prorsa.simulation.workloads.scripts import Script, TurnScript, Workload

MODELS = ("math", "coding-agent", "general-agent")
QUESTIONS = 2000
TOKEN_S = 0.03
"""Of an unloaded cluster."""


def build(name: str, seed: int = 0, **fields: int) -> Workload:
    return build_workload(WorkloadSection.model_validate({"name": name, **fields}), seed)


@cache
def sample(name: str) -> list[Script]:
    """One trajectory of each of many questions, so that all are independent."""
    workload = build(name)
    return [workload.script(question, 1) for question in range(QUESTIONS)]


def calls(name: str) -> list[TurnScript]:
    return [turn for script in sample(name) for turn in script.turns if turn.tool is not None]


def facts(values: list[float]) -> tuple[float, float, float]:
    """Mean, median, 95th percentile."""
    return float(np.mean(values)), float(np.median(values)), float(np.percentile(values, 95))


def seconds_alone(script: Script) -> float:
    return script.reward_s + sum(turn.tool_s + TOKEN_S * turn.output_tokens for turn in script.turns)


# Against the figures.


def test_an_answer_in_mathematics_is_as_long_as_those_of_a_reasoning_model() -> None:
    scripts = sample("math")
    outputs = [script.turns[0].output_tokens for script in scripts]
    assert all(script.prompt_tokens == 148 and len(script.turns) == 1 for script in scripts)
    # Standard deviation 12.5k, so the mean of 2,000 has an error of 280; three of them.
    assert np.mean(outputs) == pytest.approx(20_500, abs=840)
    # Around the median a percent of the answers is 580 to 770 tokens; its error is 0.5/sqrt(2000) = 1.1 percent of them.
    assert np.median(outputs) == pytest.approx(25_000, abs=2_500)
    # sqrt(.37 * .63 / 2000) = .011
    assert np.mean(np.array(outputs) == 32_500) == pytest.approx(0.37, abs=0.033)


def test_tool_calls_of_the_coding_agent_take_as_long_as_the_measured_ones() -> None:
    times = np.array([turn.tool_s for turn in calls("coding-agent")])
    # Of 95,000 calls; their standard deviation is about 18 s, the error of the mean 0.06 s.
    assert np.mean(times) == pytest.approx(3.5, abs=0.3)
    for percent, seconds in ((50, 0.10), (90, 2.2), (95, 5.6)):
        assert np.percentile(times, percent) == pytest.approx(seconds, rel=0.08)
    # Measured on 1,560 calls, of which 16 are beyond it: its error there is a quarter of it.
    assert np.percentile(times, 99) == pytest.approx(109, rel=0.3)
    assert np.mean(times > 10) == pytest.approx(0.04, abs=0.004)
    assert times[times > 10].sum() / times.sum() == pytest.approx(0.83, abs=0.03)


def test_tools_of_the_coding_agent_are_told_apart_by_their_times() -> None:
    medians = {
        tool: np.median([turn.tool_s for turn in calls("coding-agent") if turn.tool == tool])
        for tool in ("edit", "shell", "test")
    }
    assert {turn.tool for turn in calls("coding-agent")} == set(medians)
    assert medians["edit"] * 3 < medians["shell"] < medians["test"] / 3


def test_the_coding_agent_is_within_its_public_runs() -> None:
    scripts = sample("coding-agent")
    mean, half, most = facts([len(script.turns) for script in scripts])
    # The sets of 83 and 17 runs: 50/46/110 and 58/60/101.
    assert 45 < mean < 58
    assert 40 < half < 60
    assert 90 < most < 115
    assert 13_000 < np.mean([script.prompt_tokens for script in scripts]) < 19_000
    assert 131 < np.mean([turn.output_tokens for script in scripts for turn in script.turns]) < 269
    assert 565 < np.mean([turn.appended_tokens for turn in calls("coding-agent")]) < 1239
    assert 39_000 < np.mean([script.longest_context for script in scripts]) < 61_000
    assert np.mean([seconds_alone(script) for script in scripts]) == pytest.approx(480, rel=0.05)


def test_the_general_agent_is_as_its_public_runs() -> None:
    scripts = sample("general-agent")
    turns = [turn for script in scripts for turn in script.turns]
    mean, _, most = facts([len(script.turns) for script in scripts])
    assert mean == pytest.approx(20, rel=0.05)
    assert most == pytest.approx(36, rel=0.08)
    # 2,000 prompts, sigma 1.03: errors of 3 % (mean), 3 % (median) and 5 % (95th percentile).
    prompts = facts([script.prompt_tokens for script in scripts])
    assert prompts == pytest.approx((6_600, 3_900, 21_000), rel=0.15)
    assert facts([turn.output_tokens for turn in turns]) == pytest.approx((234, 115, 758), rel=0.06)
    # No lognormal has all three: its median is met, and the mean and the tail from either side.
    mean, half, most = facts([turn.appended_tokens for turn in calls("general-agent")])
    assert half == pytest.approx(521, rel=0.04)
    assert mean == pytest.approx(1798, rel=0.2)
    assert most == pytest.approx(5449, rel=0.25)


def test_steps_of_the_general_agent_take_as_long_as_the_measured_ones() -> None:
    steps = facts([turn.tool_s + TOKEN_S * turn.output_tokens for turn in calls("general-agent")])
    assert steps == pytest.approx((11.3, 8.6, 27), rel=0.06)
    mean = np.mean([seconds_alone(script) for script in sample("general-agent")])
    # Standard deviation 110 s, so the error is 2.5 s. The paper: 216 s.
    assert mean == pytest.approx(216, abs=9)


@pytest.mark.parametrize("name", ["coding-agent", "general-agent"])
def test_turns_depend_on_the_question_as_measured(name: str) -> None:
    workload, groups, size = build(name), 300, 8
    logs = np.log([[len(workload.script(group, seed).turns) for seed in range(size)] for group in range(groups)])
    within = logs.var(axis=1, ddof=1).mean()
    between = logs.mean(axis=1).var(ddof=1) - within / size
    # Its standard error is about 0.02 for 300 groups of 8.
    assert 0.6 < between / (between + within) < 0.8


def test_sandboxes_and_rewards_of_the_coding_agent_start_and_take_as_measured() -> None:
    scripts = sample("coding-agent")
    cold = np.array([script.sandbox_cold_s for script in scripts])
    # .5 * P(N < ln(4.5/2.6)/.35 = 1.57) + .5 * P(N < ln(4.5/27)/1.47 = -1.22) = .5 * .942 + .5 * .111; error .011
    assert np.mean(cold < 4.5) == pytest.approx(0.526, abs=0.035)
    assert all(0.1 <= script.sandbox_prewarmed_s <= 0.3 for script in scripts)
    assert cold.max() <= 600
    assert cold.min() > 0
    rewards = [script.reward_s for script in scripts]
    # .54 * P(N < ln(7/4.4)/.33 = 1.41) + .46 * P(N < ln(7/20.6)/1.03 = -1.05) = .54 * .921 + .46 * .147
    assert np.mean(np.array(rewards) < 7) == pytest.approx(0.565, abs=0.035)


def test_rewards_are_won_half_of_the_time_and_depend_on_the_question() -> None:
    workload = build("general-agent")
    rewards = np.array([[workload.script(group, seed).reward for seed in range(8)] for group in range(300)])
    assert set(np.unique(rewards)) == {0.0, 1.0}
    assert rewards.mean() == pytest.approx(0.5, abs=0.08)
    # Independent rewards would have a variance of 1/32 between groups.
    assert rewards.mean(axis=1).var() > 0.08


def test_a_mixture_has_the_parts_that_it_is_told() -> None:
    values, parts = COLD.draw(np.random.default_rng(0), 40_000)
    assert np.mean(parts == 0) == pytest.approx(0.5, abs=0.0075)
    # Median errors: 1.25 * sigma / sqrt(20000), three of them.
    assert np.median(values[parts == 0]) == pytest.approx(2.6, rel=0.0095)
    assert np.median(values[parts == 1]) == pytest.approx(27, rel=0.04)


# Promises of every workload.


@pytest.mark.parametrize("name", MODELS)
def test_a_script_does_not_depend_on_what_was_asked_before(name: str) -> None:
    asked = [(question, seed) for question in range(6) for seed in (0, 1, 2**31 - 1)]
    workload = build(name, seed=7)
    first = {key: workload.script(*key) for key in asked}
    shuffled = random.Random(3).sample(asked, len(asked))
    again = build(name, seed=7)
    assert {key: again.script(*key) for key in shuffled} == first
    assert len({script.turns for script in first.values()}) > len(asked) / 2


@pytest.mark.parametrize("name", MODELS)
def test_another_seed_gives_other_scripts(name: str) -> None:
    def scripts(seed: int) -> list[Script]:
        return [build(name, seed).script(question, 5) for question in range(20)]

    assert scripts(1) == scripts(1)
    assert scripts(1) != scripts(2)


@pytest.mark.parametrize("name", [*MODELS, "requests"])
@pytest.mark.parametrize("max_context", [4096, 16384, 131072])
def test_every_script_fits_and_only_its_last_turn_has_no_tool(name: str, max_context: int) -> None:
    workload = build(name, max_context=max_context)
    for question in range(100):
        script = workload.script(question, 3)
        assert script.longest_context <= max_context
        assert script.prompt_tokens == workload.script(question, 4).prompt_tokens > 0
        assert all(turn.output_tokens >= 2 for turn in script.turns)
        assert all(turn.tool and turn.appended_tokens > 0 and turn.tool_s > 0 for turn in script.turns[:-1])
        assert script.turns[-1].tool is None


def test_requests_are_all_alike() -> None:
    workload = build("requests", prompt_tokens=100, output_tokens=7)
    assert workload.script(0, 0) == workload.script(9, 9) == Script(100, (TurnScript(7),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output_tokens": 1}, "workload.output_tokens=1: .* set it to 2 or more"),
        ({"prompt_tokens": 90, "output_tokens": 11, "max_context": 100}, "workload.max_context=100: .* to 101 or more"),
    ],
)
def test_impossible_requests_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build("requests", **fields)


# Scripts in a bounded context.

TURNS = (TurnScript(10, "a", 1.0, 20), TurnScript(30, "b", 1.0, 40), TurnScript(50))


@pytest.mark.parametrize(
    ("max_context", "expected"),
    [
        # 100 prompt, 10 output, 20 result, 30 output, 40 result, 50 output: 250.
        (250, TURNS),
        (249, (TURNS[0], TurnScript(30))),
        # After the first turn 110 are used; the result and the next turn need 50, and twice the result 40.
        (160, (TURNS[0], TurnScript(30))),
        (159, (TurnScript(10),)),
        (109, (TurnScript(9),)),
        (102, (TurnScript(2),)),
    ],
)
def test_a_script_ends_early_where_its_context_is_full(max_context: int, expected: tuple[TurnScript, ...]) -> None:
    assert Script(100, TURNS).within(max_context) == Script(100, expected)


def test_a_result_of_more_than_half_of_what_is_left_ends_a_script() -> None:
    script = Script(10, (TurnScript(10, "a", 1.0, 40), TurnScript(2)))
    assert script.within(100) is script
    assert script.within(99).turns == (TurnScript(10),)


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt of 100 tokens leaves no room for a turn of 2 in 101"):
        Script(100, TURNS).within(101)


@given(st.integers(0, 5), st.lists(st.tuples(st.integers(2, 9), st.integers(0, 9)), min_size=1), st.integers(7, 80))
def test_a_bounded_script_begins_as_the_script_and_fits(
    prompt: int, lengths: list[tuple[int, int]], max_context: int
) -> None:
    turns = [TurnScript(output, "t", 1.0, appended) for output, appended in lengths]
    script = Script(prompt, (*turns[:-1], TurnScript(turns[-1].output_tokens)))
    bounded = script.within(max_context)
    assert bounded.longest_context <= max_context
    assert bounded.turns[:-1] == script.turns[: len(bounded.turns) - 1]
    assert bounded.turns[-1].tool is None
    assert bounded.within(max_context) is bounded
    assert script.longest_context + 2 * max(turn.appended_tokens for turn in script.turns) > max_context or (
        bounded is script
    )
