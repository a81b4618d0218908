"""A scenario from end to end: times by hand, the same work under every policy, the same run every time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_profile import DECODE_STEP, PREFILL_STEP, write_tiny_profile

from prorsa.cli import main
from prorsa.config import ConfigError, validated
from prorsa.report.rundir import read_run
from prorsa.simulation.experiments.settings import scenario_path
from prorsa.simulation.run import run_scenario
from prorsa.simulation.scenario import Scenario, load_scenario


@pytest.fixture
def profile(tmp_path: Path) -> str:
    return write_tiny_profile(tmp_path, max_running=64)


def scenario(profile: str, workload: dict[str, object], rollout: dict[str, object], **policies: object) -> Scenario:
    return validated(
        Scenario,
        {
            "name": "test",
            "hardware": {"profile": profile, "gpus": 4},
            "workload": workload,
            "rollout": {"groups": 1, "group_size": 1, "steps": 1, "train_s": 10.0} | rollout,
            "policies": policies or {"colocated": {"name": "colocated"}, "static": {"name": "static", "split": "2:2"}},
        },
    )


AGENT = ["rollout.groups=2", "rollout.group_size=4", "rollout.steps=2", "workload.max_context=16384"]


def small(*overrides: str) -> Scenario:
    return load_scenario(scenario_path("qwen3-235b-general-agent"), [*AGENT, *overrides])


def test_one_request_takes_its_chunks_and_its_tokens(profile: str) -> None:
    one = scenario(profile, {"name": "requests", "prompt_tokens": 1000, "output_tokens": 11}, {})
    # Two chunks; the second gives the first of eleven tokens.
    alone = 2 * PREFILL_STEP + 10 * DECODE_STEP
    assert run_scenario(one, "colocated").steps[0].rollout_s == pytest.approx(alone)
    # The first chunk's half megabyte has 0.1 s of prefill to move in, and takes 0.5 s; then the second's moves.
    moved = PREFILL_STEP + 2 * 500 * 1000 / 1_000_000 + 10 * DECODE_STEP
    assert run_scenario(one, "static").steps[0].rollout_s == pytest.approx(moved)


def test_between_synchronous_steps_the_trainer_trains_and_the_weights_are_updated(profile: str) -> None:
    two = scenario(profile, {"name": "requests", "prompt_tokens": 500, "output_tokens": 2}, {"steps": 2})
    first, second = run_scenario(two, "colocated").steps
    assert second.start - first.end == pytest.approx(10.0 + 2.0)
    assert second.rollout_s == pytest.approx(first.rollout_s)


def test_every_policy_plays_the_same_trajectories() -> None:
    outcomes = [run_scenario(small(), policy) for policy in ("colocated", "colocated-cadence", "adaptive")]
    assert [(one.done, one.dropped, one.lost_groups) for one in outcomes] == [(2 * 2 * 4, 0, 0)] * 3
    assert len({tuple(step.reward for step in one.steps) for one in outcomes}) == 1
    assert len({one.statistics.decoded_tokens for one in outcomes}) == 1
    assert outcomes[2].flips, "no instance changed its role, so this shows nothing of the policy"


def test_the_same_scenario_gives_the_same_run() -> None:
    first, again = (run_scenario(small(), "adaptive") for _ in range(2))
    assert first == again


def test_it_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    found = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "prorsa.cli", "simulate", "qwen3-235b-general-agent", *AGENT]
        command += ["--json", str(path), "--out", str(tmp_path / "page.html"), "--workers", "1", "--policy", "adaptive"]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"PYTHONHASHSEED": seed})
        found.append(json.loads(path.read_text()))
    assert found[0] == found[1]


def test_asynchronous_rollout_keeps_its_groups_in_flight_and_goes_on_while_it_trains() -> None:
    overrides = ("rollout.mode=async", "rollout.max_staleness=4", "rollout.in_flight=3", "rollout.train_s=50")
    outcome = run_scenario(small(*overrides), "adaptive")
    assert outcome.live_max >= 3 * 4
    first, second = outcome.steps
    assert second.start == first.end
    assert [step.trajectories for step in outcome.steps] == [8, 8]


def test_a_recorded_run_is_a_run_directory(tmp_path: Path) -> None:
    outcome = run_scenario(small("rollout.steps=1"), "adaptive", record_to=tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.problems == []
    assert len(run.turns) >= outcome.turns
    assert sum(flip.failure is None for flip in run.flips) == len(outcome.flips)


def test_what_no_cluster_can_be_is_one_error(profile: str) -> None:
    workload: dict[str, object] = {"name": "requests"}
    too_many = scenario(profile, workload, {}, static={"name": "static", "split": "3:2"})
    with pytest.raises(ConfigError, match=r"split='3:2' on hardware.gpus=4.* take 5 GPUs"):
        run_scenario(too_many, "static")
    other = small("hardware.decode_profile=qwen3-235b-h200-ep8-decode")
    with pytest.raises(ConfigError, match="cannot become one of 8 while it runs"):
        run_scenario(other, "adaptive")


def test_unequal_parallelism_runs_a_static_split() -> None:
    section = {"name": "static", "split": "16:8"}
    unequal = small("hardware.decode_profile=qwen3-235b-h200-ep8-decode", "rollout.steps=1")
    played = validated(Scenario, unequal.model_dump() | {"policies": {"static": section}})
    outcome = run_scenario(played, "static")
    assert outcome.done == 8
    assert (outcome.roles[-1].prefill, outcome.roles[-1].decode) == (16, 8)


def test_simulate_compares_the_policies_of_a_scenario(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    arguments = ["simulate", "qwen3-235b-general-agent", *AGENT, "rollout.steps=1", "--out", str(page)]
    assert main([*arguments, "--policy", "colocated", "--policy", "adaptive"]) == 0
    shown = capsys.readouterr().out
    assert "speed-up" in shown
    assert "simulated, from the profile qwen3-235b-h200-ep4" in shown
    assert "qwen3-235b-general-agent" in page.read_text()
    assert main([*arguments, "--policy", "nobody"]) == 2
    assert (
        "--policy nobody: the scenario has colocated, colocated-cadence, adaptive, planned" in capsys.readouterr().err
    )


def test_a_plan_may_start_from_colocation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = load_scenario(
        scenario_path("deepseek-v3.2-math"),
        ["rollout.steps=1", "rollout.load=0.0625", "policies={mixed: {name: planned, split: mixed}}"],
    )
    roles = run_scenario(scenario, "mixed").roles[0]
    assert (roles.prefill, roles.decode, roles.mixed) == (0, 0, 8)
    for others in ("adaptive, split: mixed", "planned, split: mixed, planning: {mixed: false}"):
        arguments = ["simulate", "deepseek-v3.2-math", f"policies={{wrong: {{name: {others}}}}}", "--dry-run"]
        assert main(arguments) == 2
        assert "policy.split=mixed" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["deepseek-v3.2-coding-agent", "mimo-v2.5-pro-math", "qwen3-235b-general-agent"])
def test_a_dry_run_prints_a_scenario_that_reads_as_the_same_one(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", name, "rollout.load=2.5", "--dry-run"]) == 0
    (tmp_path / "resolved.yaml").write_text(shown := capsys.readouterr().out)
    assert load_scenario(tmp_path / "resolved.yaml") == load_scenario(scenario_path(name), ["rollout.load=2.5"])
    assert shown.count("# Of mixed instances: 0 prefills") == 1, "each key is explained once"


def test_overrides_may_stand_behind_options_and_splits_need_no_quotes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "qwen3-235b-math", "--dry-run", "rollout.load=2", "policies.adaptive.split=2:30"]) == 0
    (tmp_path / "resolved.yaml").write_text(capsys.readouterr().out)
    resolved = load_scenario(tmp_path / "resolved.yaml")
    assert (resolved.rollout.load, resolved.policies["adaptive"].split) == (2.0, "2:30")
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "qwen3-235b-math", "--dry-run", "--nonsense"])
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err


def test_a_cluster_that_cannot_be_is_one_error_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "qwen3-235b-general-agent", "hardware.gpus=2"]) == 2
    captured = capsys.readouterr()
    assert captured.err == "prorsa: hardware.gpus=2: one instance takes 4; set it to 4 or more\n"
    assert captured.out == ""
