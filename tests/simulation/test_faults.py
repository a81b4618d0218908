"""Schedules of faults: what each kind costs, by hand; nothing is lost to any; a seed does the same again; errors are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_profile import DECODE_STEP, PREFILL_STEP, write_tiny_profile

from prorsa.cli import main
from prorsa.config import ConfigError, validated
from prorsa.engines.protocol import Role
from prorsa.report.rundir import read_run
from prorsa.simulation.engines.transfer import Links
from prorsa.simulation.experiments.settings import scenario_path
from prorsa.simulation.faults import KINDS, FaultSchedule, load_faults
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.run import run_scenario
from prorsa.simulation.scenario import Scenario, load_scenario

ALONE = 2 * PREFILL_STEP + 10 * DECODE_STEP
"""Seconds of one request of 1,000 prompt tokens, two chunks, and 11 output tokens on an idle mixed engine."""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_profile(tmp_path_factory.mktemp("profile"), max_running=64)


def schedule(directory: Path, *faults: dict[str, Any], seed: int = 0) -> FaultSchedule:
    path = directory / "faults.yaml"
    path.write_text(yaml.safe_dump({"seed": seed, "faults": list(faults)}))
    return load_faults(path)


def one_request(profile: str, **rollout: object) -> Scenario:
    return validated(
        Scenario,
        {
            "name": "test",
            "hardware": {"profile": profile, "gpus": 4},
            "workload": {"name": "requests", "prompt_tokens": 1000, "output_tokens": 11},
            "rollout": {"groups": 1, "group_size": 1, "steps": 1, "train_s": 0.0} | rollout,
            "policies": {"colocated": {"name": "colocated"}, "pair": {"name": "static", "split": "1:1"}},
        },
    )


def rollout_s(outcome: RunOutcome) -> float:
    assert (outcome.done, outcome.disturbance.lost) == (1, 0)
    return outcome.steps[0].rollout_s


@pytest.mark.parametrize(
    ("fault", "seconds", "resends"),
    [
        pytest.param({"kind": "hang", "at": 0.15, "seconds": 3.0}, ALONE + 3.0, 0, id="it stands still in a step"),
        pytest.param(
            {"kind": "hang", "at": 0.0, "seconds": 3.0}, ALONE + 3.0, 0, id="it stands still before its first step"
        ),
        pytest.param({"kind": "slow", "at": 0.0, "factor": 3, "seconds": 60}, 3 * ALONE, 0, id="all steps are slow"),
        pytest.param(
            {"kind": "slow", "at": 0.15, "factor": 3, "seconds": 60},
            2 * PREFILL_STEP + 30 * DECODE_STEP,
            0,
            id="the steps that begin later are slow",
        ),
        # The second chunk ends at 0.5 s; the ten decodes are fast again.
        pytest.param(
            {"kind": "slow", "at": 0.05, "factor": 4, "seconds": 0.4},
            0.1 + 0.4 + 10 * DECODE_STEP,
            0,
            id="one step is slow",
        ),
        pytest.param({"kind": "refuse", "at": 0.0}, ALONE, 1, id="another engine serves it at once"),
        # The first token was told at 0.2 s; its context of 1,001 tokens takes three chunks on another engine.
        pytest.param(
            {"kind": "kill", "at": 0.255}, 0.255 + 3 * PREFILL_STEP + 9 * DECODE_STEP, 1, id="all but one token is lost"
        ),
        pytest.param(
            {"kind": "cut-link", "at": 0.05, "to": "control", "seconds": 2.0}, 2.05, 0, id="its answer comes 2 s later"
        ),
    ],
)
def test_what_a_fault_costs_one_request(
    profile: str, tmp_path: Path, fault: dict[str, Any], seconds: float, resends: int
) -> None:
    faults = schedule(tmp_path, {"target": "engine-0"} | fault)
    outcome = run_scenario(one_request(profile), "colocated", faults=faults)
    assert rollout_s(outcome) == pytest.approx(seconds)
    assert outcome.resends == resends
    (happened,) = outcome.disturbance.faults
    assert (happened.kind, happened.time) == (fault["kind"], fault["at"])
    assert (happened.target or "").startswith("engine-0")


def test_what_a_death_costs_is_counted(profile: str, tmp_path: Path) -> None:
    """Five decode steps after the first token, which alone was told, the engine dies."""
    faults = schedule(tmp_path, {"kind": "kill", "target": "engine-0", "at": 0.255})
    disturbance = run_scenario(one_request(profile), "colocated", faults=faults).disturbance
    assert (disturbance.recomputed_tokens, disturbance.unread_tokens) == (1001, 5)


def test_a_reply_that_is_lost_costs_its_token_and_a_resend(profile: str, tmp_path: Path) -> None:
    """The engine hears of it while it makes another token."""
    faults = schedule(tmp_path, {"kind": "lose-reply", "target": "engine-0", "at": 0.0})
    outcome = run_scenario(one_request(profile), "colocated", faults=faults)
    assert rollout_s(outcome) > ALONE
    assert (outcome.resends, outcome.disturbance.unread_tokens, outcome.disturbance.restarts) == (1, 2, 0)


def test_kv_waits_for_a_link_that_is_cut(profile: str, tmp_path: Path) -> None:
    """Both chunks of half a megabyte wait until 3 s; then they take 0.5 s each."""
    cut = {"kind": "cut-link", "target": "engine-0", "to": "engine-1", "at": 0.0, "seconds": 3.0}
    outcome = run_scenario(one_request(profile), "pair", faults=schedule(tmp_path, cut))
    assert rollout_s(outcome) == pytest.approx(3.0 + 2 * 0.5 + 10 * DECODE_STEP)
    assert outcome.disturbance.faults[0].target == "engine-0 to engine-1"


def test_links_are_mended_with_a_restart() -> None:
    links = Links()
    links.cut("a", "b", 5.0)
    links.cut("b", "a", 3.0)
    assert (links.open_at("b", "a"), links.open_at("a", "c")) == (5.0, 0.0)
    links.mend("a")
    assert links.open_at("a", "b") == 0.0


@pytest.mark.parametrize("kind", ["hang", "cut-link"])
def test_what_never_answers_again_is_found_and_restarted(profile: str, tmp_path: Path, kind: str) -> None:
    fault: dict[str, Any] = {"kind": kind, "target": "engine-0", "at": 0.15}
    if kind == "cut-link":
        fault["to"] = "control"
    scenario = one_request(profile, steps=3, train_s=100.0)
    outcome = run_scenario(scenario, "colocated", faults=schedule(tmp_path, fault))
    assert (outcome.done, outcome.resends, outcome.disturbance.lost) == (3, 1, 0)
    assert outcome.disturbance.restarts == 1
    assert outcome.steps[-1].rollout_s == pytest.approx(ALONE)


def test_a_link_that_stays_cut_between_the_only_two_engines_loses_nothing(profile: str, tmp_path: Path) -> None:
    cut = {"kind": "cut-link", "target": "engine-0", "to": "engine-1", "at": 0.0}
    outcome = run_scenario(one_request(profile), "pair", faults=schedule(tmp_path, cut))
    assert rollout_s(outcome) > 3.0
    assert outcome.disturbance.restarts > 0


AGENT = ["rollout.groups=2", "rollout.group_size=4", "rollout.steps=2", "workload.max_context=16384"]
EXAMPLE = "every-kind"


def small(*overrides: str) -> Scenario:
    return load_scenario(scenario_path("qwen3-235b-general-agent"), [*AGENT, *overrides])


def test_a_flip_that_fails_costs_a_restart(tmp_path: Path) -> None:
    faults = schedule(tmp_path, {"kind": "fail-flip", "every": 1.0, "count": 100})
    outcome = run_scenario(small(), "adaptive", faults=faults, record_to=tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.problems == []
    assert any("the switch failed" in (flip.failure or "") for flip in run.flips)
    assert (outcome.done, outcome.disturbance.lost) == (16, 0)


def test_without_its_store_a_cluster_computes_what_it_would_have_fetched(tmp_path: Path) -> None:
    faults = schedule(tmp_path, {"kind": "lose-store", "at": 0.0})
    with_store, without = (run_scenario(small(), "adaptive", faults=failing) for failing in (None, faults))
    assert with_store.statistics.fetched_tokens > 0
    assert without.statistics.fetched_tokens == 0
    assert without.statistics.prefilled_tokens > with_store.statistics.prefilled_tokens
    nothing_to_lose = run_scenario(small("hardware.kv_store=false"), "adaptive", faults=faults)
    assert nothing_to_lose.disturbance.faults[0].target is None


@pytest.mark.parametrize("policy", ["colocated", "adaptive", "planned"])
def test_the_example_costs_time_and_no_trajectory(policy: str) -> None:
    faults = load_faults(EXAMPLE)
    undisturbed, outcome = (run_scenario(small(), policy, faults=failing) for failing in (None, faults))
    assert {fault.kind for fault in outcome.disturbance.faults} >= {"kill", "hang", "slow", "lose-reply", "cut-link"}
    assert (outcome.done, outcome.dropped, outcome.disturbance.lost) == (16, 0, 0)
    assert [step.reward for step in outcome.steps] == [step.reward for step in undisturbed.steps]
    assert outcome.disturbance.restarts > 0
    assert outcome.resends > undisturbed.resends


def test_faults_after_the_end_change_nothing(tmp_path: Path) -> None:
    late = schedule(tmp_path, {"kind": "kill", "at": 1e6})
    assert run_scenario(small(), "adaptive", faults=late) == run_scenario(small(), "adaptive")


def test_the_same_seed_does_the_same_and_another_one_does_not(tmp_path: Path) -> None:
    def play(seed: int) -> RunOutcome:
        faults = schedule(
            tmp_path, {"kind": "kill", "every": 20.0}, {"kind": "hang", "every": 30.0, "seconds": 5.0}, seed=seed
        )
        return run_scenario(small(), "adaptive", faults=faults)

    first = play(1)
    assert first == play(1)
    assert first.disturbance.faults != play(2).disturbance.faults


def test_it_does_not_depend_on_the_hash_seed_and_shows_what_happened(tmp_path: Path) -> None:
    found = []
    for seed in ("1", "2"):
        path = tmp_path / f"{seed}.json"
        command = [sys.executable, "-m", "prorsa.cli", "simulate", "qwen3-235b-general-agent", *AGENT, "--workers", "1"]
        command += ["--json", str(path), "--out", str(tmp_path / "page.html"), "--policy", "adaptive"]
        shown = subprocess.run(
            [*command, "--faults", EXAMPLE],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed, "COLUMNS": "100"},
        ).stdout
        found.append(json.loads(path.read_text()))
    assert found[0] == found[1]
    plain, failing = found[0]["outcomes"]
    assert (plain["name"], failing["name"]) == ("adaptive", "adaptive, faults")
    assert (plain["toll"]["faults"], plain["toll"]["slowdown"]) == ([], 1.0)
    assert failing["toll"]["slowdown"] == pytest.approx(sum(failing["step_s"]) / sum(plain["step_s"]))
    assert failing["toll"]["lost"] == 0
    for row in ("faults: kill", "instances started anew", "prompt tokens computed for resends", "trajectories lost"):
        assert row in shown


targets = st.sampled_from(["any", "prefill", "decode", "mixed", "engine-0", "engine-1", "engine-2", "engine-3"])
spans = st.none() | st.floats(0.1, 30.0)


@st.composite
def a_fault(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    fault: dict[str, Any] = {"kind": kind, "at": draw(st.floats(0.0, 4.0))}
    if kind != "lose-store":
        fault["target"] = draw(targets)
    match kind:
        case "hang" | "lose-store":
            fault["seconds"] = draw(spans)
        case "slow":
            fault |= {"factor": draw(st.floats(1.1, 10.0)), "seconds": draw(st.floats(0.1, 30.0))}
        case "refuse":
            fault["requests"] = draw(st.integers(1, 20))
        case "lose-reply":
            fault["replies"] = draw(st.integers(1, 5))
        case "cut-link":
            fault |= {"to": draw(st.sampled_from(["any", "decode", "prefill", "control"])), "seconds": draw(spans)}
    return fault


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(faults=st.lists(a_fault(), min_size=1, max_size=8), policy=st.sampled_from(["colocated", "halves", "adaptive"]))
def test_no_trajectory_is_lost_to_any_schedule(
    profile: str, tmp_path_factory: pytest.TempPathFactory, faults: list[dict[str, Any]], policy: str
) -> None:
    """The books of the simulation are checked too; tokens are hashes of their contexts."""
    scenario = validated(
        Scenario,
        {
            "name": "test",
            "hardware": {"profile": profile, "gpus": 4, "tokens": "hash", "stream_s": 0.2, "kv_tokens": 100_000},
            "workload": {"name": "math", "max_context": 3000},
            "rollout": {"groups": 3, "group_size": 4, "steps": 2, "train_s": 1.0},
            "policies": {
                "colocated": {"name": "colocated"},
                "halves": {"name": "static", "split": "2:2"},
                "adaptive": {"name": "adaptive", "horizon": 1.0},
            },
        },
    )
    played = schedule(tmp_path_factory.mktemp("faults"), *faults)
    outcome = run_scenario(scenario, policy, faults=played)
    assert (outcome.done, outcome.dropped, outcome.disturbance.lost) == (24, 0, 0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("faults: []", r"faults=\[\]: write a list of one fault or more"),
        ("seed: 1", "faults=None: write a list"),
        ("seed: x\nfaults: [{kind: kill, at: 1}]", "seed='x': write a whole number"),
        ("sed: 1\nfaults: [{kind: kill, at: 1}]", "sed=1: unknown key; a schedule of faults has `seed` and `faults`"),
        ("faults: [{kind: explode, at: 1}]", "faults.0.kind='explode': no such fault; use one of kill, hang, slow"),
        ("faults: [{kind: [kill], at: 1}]", r"faults.0.kind=\['kill'\]: no such fault"),
        ("faults: [{at: 1}]", "faults.0.kind=None: no such fault"),
        ("faults: [kill]", "faults.0='kill': write a mapping"),
        (
            "faults: [{kind: kill, at: 1}, {kind: hang, at: 1, secnods: 3}]",
            "faults.1.secnods=3: unknown key; hang has .*seconds",
        ),
        ("faults: [{kind: lose-store, at: 1, target: any}]", "faults.0.target='any': unknown key; lose-store has"),
        ("faults: [{kind: kill}]", "faults.0.at=None, every=None: give one of the two"),
        ("faults: [{kind: kill, at: 1, every: 2}]", "faults.0.at=1.0, every=2.0: give one of the two"),
        ("faults: [{kind: kill, at: 1, count: 2}]", "faults.0.count=2: only a fault with `every`"),
        ("faults: [{kind: kill, at: -1}]", "faults.0.at=-1: .*greater than or equal to 0; change the value"),
        ("faults: [{kind: kill, every: 0}]", "faults.0.every=0: .*greater than 0"),
        ("faults: [{kind: kill, at: .nan}]", "faults.0.at=nan: .*finite"),
        ("faults: [{kind: kill, at: soon}]", "faults.0.at='soon': .*number"),
        ("faults: [{kind: slow, at: 1, seconds: 3}]", "faults.0.factor: missing"),
        ("faults: [{kind: slow, at: 1, seconds: 3, factor: 0.5}]", "faults.0.factor=0.5: .*greater than 1"),
        ("faults: [{kind: hang, at: 1, seconds: .inf}]", "faults.0.seconds=inf: .*finite"),
        ("faults: [{kind: refuse, at: 1, requests: 0}]", "faults.0.requests=0: .*greater than 0"),
        ("faults: [{kind: cut-link, at: 1}]", "faults.0.to: missing"),
        (
            "faults: [{kind: cut-link, at: 1, target: engine-0, to: engine-0}]",
            "faults.0.to='engine-0': a link has two ends",
        ),
        ("- kill", "--faults=.*holds list; a mapping"),
        ("faults: [", "not valid YAML"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_error(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "faults.yaml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        load_faults(tmp_path / "faults.yaml")


def test_a_target_that_no_policy_has_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faults.yaml").write_text("faults: [{kind: kill, at: 1, target: engine-99}]")
    arguments = ["simulate", "qwen3-235b-general-agent", "--faults", str(tmp_path / "faults.yaml")]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert (
        "faults.0: 'engine-99' is no engine of policy colocated; name one of engine-0 to engine-31, any, "
        in captured.err
    )
    assert captured.out == ""
    assert main([*arguments[:-1], str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err


def test_a_name_is_checked_against_the_roles_that_there_are(tmp_path: Path) -> None:
    cut = schedule(tmp_path, {"kind": "cut-link", "at": 1, "to": "engin-1"})
    with pytest.raises(ConfigError, match=r"'engin-1' is no engine of policy x; .* or control for `to`"):
        cut.check({"engine-0": Role.MIXED, "engine-1": Role.MIXED}, "x")
