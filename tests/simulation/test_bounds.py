"""The least time of a step: worked out by hand on tiny workloads, and never above what a simulated run takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_profile import DECODE_STEP, PREFILL_STEP, write_tiny_profile

from prorsa.config import ConfigError, validated
from prorsa.simulation.bounds import requests, step_bounds
from prorsa.simulation.experiments.settings import scenario_path
from prorsa.simulation.run import run_scenario
from prorsa.simulation.scenario import Scenario, load_scenario
from prorsa.simulation.workloads.launches import Launches
from prorsa.simulation.workloads.models import build_workload
from prorsa.simulation.workloads.scripts import Script, TurnScript


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return write_tiny_profile(tmp_path, max_running=4)


def scenario(profile: str, prompt: int, output: int, groups: int, size: int, gpus: int = 2) -> Scenario:
    return validated(
        Scenario,
        {
            "name": "test",
            "hardware": {"profile": profile, "gpus": gpus},
            "workload": {"name": "requests", "prompt_tokens": prompt, "output_tokens": output, "max_context": 4096},
            "rollout": {"groups": groups, "group_size": size, "steps": 1},
            "policies": {"colocated": {"name": "colocated"}, "static": {"name": "static", "split": "1:1"}},
        },
    )


def test_path_of_one_request(profile: str) -> None:
    [bound] = step_bounds(scenario(profile, prompt=1000, output=11, groups=1, size=1))
    # Two chunks, and ten more tokens after the one that the second chunk gives.
    assert bound.path_s == pytest.approx(2 * PREFILL_STEP + 10 * DECODE_STEP)
    assert bound.seconds == bound.path_s


def test_work_of_many_requests(profile: str) -> None:
    [bound] = step_bounds(scenario(profile, prompt=500, output=401, groups=40, size=1))
    # Of two ranks: 40 full chunks, and 40 x 400 tokens in batches of four.
    assert bound.work_s == pytest.approx((40 * PREFILL_STEP + 40 * 400 / 4 * DECODE_STEP) / 2, rel=1e-4)
    assert bound.seconds == bound.work_s
    # Colocation comes close: it only waits while both ranks begin.
    taken = run_scenario(scenario(profile, prompt=500, output=401, groups=40, size=1), "colocated").steps[0].rollout_s
    assert bound.seconds <= taken <= 1.1 * bound.seconds


def test_members_of_a_group_share_their_prompt(profile: str) -> None:
    [bound] = step_bounds(scenario(profile, prompt=500, output=401, groups=1, size=40))
    # One full chunk and the last token of 39 others, which share a chunk at best.
    prefill = (1 + 39 / 500) * PREFILL_STEP
    assert bound.work_s == pytest.approx((prefill + 40 * 400 / 4 * DECODE_STEP) / 2, rel=1e-4)


def test_few_trajectories_cannot_fill_batches(profile: str) -> None:
    [bound] = step_bounds(scenario(profile, prompt=500, output=401, groups=4, size=1, gpus=4))
    # Four requests on four ranks are batches of one: a token of each takes a step, however many ranks there are.
    assert bound.work_s >= 400 * DECODE_STEP
    assert bound.work_s <= bound.path_s


def test_requests_of_a_script() -> None:
    script = Script(100, (TurnScript(10, "tool", 1.0, 5), TurnScript(20)))
    # The second prompt has 115 tokens: the first nine tokens of the turn before are cached, its last one is not.
    assert list(requests(script)) == [(100, 0), (6, 109)]


def test_asynchronous_steps_have_no_bound(profile: str) -> None:
    one = scenario(profile, prompt=100, output=10, groups=1, size=1)
    rollout = one.rollout.model_copy(update={"mode": "async"})
    with pytest.raises(ConfigError, match=r"rollout\.mode=async"):
        step_bounds(one.model_copy(update={"rollout": rollout}))


def test_launches_are_those_of_a_run() -> None:
    """Every trajectory ends with as many tokens as the script that is foretold for it."""
    small = load_scenario(
        scenario_path("qwen3-235b-general-agent"),
        ["rollout.groups=2", "rollout.group_size=4", "rollout.steps=1", "workload.max_context=16384"],
    )
    launches = Launches(build_workload(small.workload, small.seed), 4, small.seed)
    outcome = run_scenario(small, "adaptive")
    scripts = [launches.script(group, member) for group in range(2) for member in range(4)]
    assert outcome.turns == sum(len(script.turns) for script in scripts)
    assert outcome.statistics.decoded_tokens == sum(t.output_tokens for s in scripts for t in s.turns)


@pytest.mark.parametrize("model", ["qwen3-235b", "deepseek-v3.2", "mimo-v2.5-pro"])
@pytest.mark.parametrize("task", ["math", "coding-agent", "general-agent"])
def test_no_run_is_below_its_bound(model: str, task: str) -> None:
    overrides = ["rollout.groups=3", "rollout.group_size=8", "rollout.steps=2", "workload.max_context=20000", "seed=3"]
    small = load_scenario(scenario_path(f"{model}-{task}"), overrides)
    bounds = step_bounds(small)
    for policy in ("colocated", "adaptive"):
        steps = run_scenario(small, policy).steps
        for step, bound in zip(steps, bounds, strict=True):
            assert bound.work_s > 0
            assert bound.seconds <= step.rollout_s
            # It would say nothing if it were far off: alone on the cluster, trajectories are nearly on their path.
            assert bound.seconds >= 0.5 * step.rollout_s
