"""The advice, from runs that are made up: what is tried, what is chosen, and what is said of it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path

import pytest
from rich.console import Console

from prorsa.cli import main
from prorsa.config import ConfigError
from prorsa.simulation.experiments.grid import Grid, Job
from prorsa.simulation.experiments.plan import (
    Advice,
    Request,
    Way,
    choose_split,
    exact,
    interval,
    plan,
    request,
    short_context,
    splits,
    ways,
)
from prorsa.simulation.experiments.terminal import advice_view
from prorsa.simulation.outcome import RunOutcome, StepOutcome
from prorsa.simulation.scenario import PolicySection, WorkloadSection

MIMO = "mimo-v2.5-pro-h200-ep16"
WIDE = "mimo-v2.5-pro-h200-ep32-decode"
ADAPTIVE = Way(MIMO, PolicySection(name="adaptive"))
PLANNED = Way(MIMO, PolicySection(name="planned"))


class Here(Executor):
    """Runs what is submitted at once, in this thread."""

    def submit(self, work, /, *arguments, **named):  # type: ignore[no-untyped-def, override]
        future: Future[object] = Future()
        future.set_result(work(*arguments, **named))
        return future


def static(split: str, decode: str | None = None) -> Way:
    return Way(MIMO, PolicySection(name="static", split=split), decode)


def asked(gpus: int = 128, seeds: int = 3) -> Request:
    return request(
        {"name": "general-agent"}, {}, gpus, [MIMO], concurrency=512, group_size=None, staleness=0, seeds=seeds
    )


def advised(seconds: Callable[[Job], float], asked_for: Request | None = None) -> tuple[Advice, list[Job]]:
    """With a made up step of `seconds(job)`."""
    ran: list[Job] = []

    def run(job: Job) -> RunOutcome:
        ran.append(job)
        return RunOutcome.of_steps([StepOutcome(1, 0.0, seconds(job), 512, 0.0)])

    return plan(asked_for or asked(), Grid(Here(), runner=run)), ran


def usual(job: Job) -> float:
    """Colocated 200, with cadence 160 and k/4 more; adaptive 100, planned 104; static 110 and 10 more for each instance away
    from 3:5; doubled decode 5 more. Each seed 1 % slower than the one before."""
    policy = job.policy
    if policy.name == "colocated":
        seconds = 160 + policy.prefill_every / 4 if policy.prefill_every else 200.0
    elif policy.name in ("adaptive", "planned"):
        seconds = 100.0 if policy.name == "adaptive" else 104.0
    else:
        assert policy.split is not None
        seconds = 110 + 10 * abs(int(policy.split.split(":")[0]) - 3)
        seconds += 5 if job.scenario.hardware.decode_profile else 0
    return seconds * 1.01**job.scenario.seed


def test_splits_lie_at_eighths_of_the_cluster() -> None:
    assert splits(128, 16, 16) == ["1:7", "2:6", "3:5", "4:4", "5:3", "6:2", "7:1"]
    assert splits(128, 16, 32) == ["1:3", "2:3", "3:2", "4:2", "5:1", "6:1"]
    assert splits(128, 4, 4) == ["4:28", "8:24", "12:20", "16:16", "20:12", "24:8", "28:4"]
    assert splits(32, 16, 16) == ["1:1"]
    assert splits(16, 16, 16) == []


def test_what_is_tried() -> None:
    found = ways(asked())
    assert len(found) == len(set(found)) == 4 + 2 + 7 + 6
    assert {ADAPTIVE, PLANNED} < set(found)
    assert static("4:2", WIDE) in found
    # One instance: nothing to split.
    assert all(way.colocated for way in ways(asked(gpus=16)))
    with pytest.raises(ConfigError, match=r"--gpus 8: the smallest instance takes 16; give that many or more"):
        ways(asked(gpus=8))


def test_one_model_on_one_gpu() -> None:
    mixed = request(
        {"name": "math"},
        {},
        128,
        [MIMO, "qwen3-235b-h200-ep4"],
        concurrency=512,
        group_size=None,
        staleness=0,
        seeds=2,
    )
    with pytest.raises(ConfigError, match=r"Qwen.* are given; one model on one kind of GPU"):
        ways(mixed)


def test_what_is_asked_for_becomes_a_rollout() -> None:
    one = request({"name": "math"}, {}, 64, [MIMO], concurrency=500, group_size=None, staleness=8, seeds=2)
    assert (one.rollout.mode, one.rollout.max_staleness) == ("async", 8)
    assert (one.rollout.groups, one.rollout.group_size) == (62, 8)
    two = request(
        {"name": "coding-agent"},
        {"train_s": 10},
        64,
        [MIMO],
        concurrency=4,
        group_size=None,
        staleness=0,
        seeds=2,
    )
    assert (two.rollout.mode, two.rollout.groups, two.rollout.group_size, two.rollout.train_s) == ("sync", 1, 32, 10)
    with pytest.raises(ConfigError, match=r"--seeds 1: write a number of 2 or more"):
        request({"name": "math"}, {}, 64, [MIMO], concurrency=1, group_size=1, staleness=0, seeds=1)


def test_an_interval_by_hand() -> None:
    """Logarithms 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3), t 4.30 with two degrees of freedom."""
    found = interval([math.exp(0.1), math.exp(0.2), math.exp(0.3)])
    half = 4.30 * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(math.exp(0.2))
    assert found.low == pytest.approx(math.exp(0.2 - half))
    assert found.high == pytest.approx(math.exp(0.2 + half))


def test_a_split_that_follows_the_forecast_wins_a_tie() -> None:
    assert choose_split({ADAPTIVE: 102.0, PLANNED: 101.0, static("3:5"): 100.0}) == PLANNED
    assert choose_split({ADAPTIVE: 102.0, static("3:5"): 100.0}) == ADAPTIVE
    assert choose_split({ADAPTIVE: 102.1, static("3:5"): 100.0}) == static("3:5")
    assert choose_split({static("4:4"): 90.0, static("3:5"): 100.0}) == static("4:4")


def test_the_fastest_way_is_advised() -> None:
    advice, _ = advised(usual)
    assert advice.way == ADAPTIVE
    assert advice.best_colocated == Way(MIMO, PolicySection(name="colocated", prefill_every=4))
    assert advice.gain.mean == pytest.approx(1.61)
    # Both sides slow down alike from seed to seed: paired, the gain has no spread.
    assert advice.gain.low == pytest.approx(1.61)
    assert advice.plain_gain.mean == pytest.approx(2.0)
    assert advice.rollout_s == pytest.approx(100 * (1 + 1.01 + 1.01**2) / 3)


def test_where_nothing_is_gained_the_advice_is_to_stay() -> None:
    advice, _ = advised(lambda job: 99.0 if job.policy.name == "adaptive" else 100.0)
    assert advice.way.colocated
    assert advice.best_split == ADAPTIVE
    assert "stay colocated" in said(asked(), advice)


def test_a_gain_that_the_seeds_do_not_agree_on_is_none() -> None:
    """1.5, 0.9 and 1.3: more than 1 on average, and less than 1 within the interval."""

    def noisy(job: Job) -> float:
        return 100 / (1.5, 0.9, 1.3)[job.scenario.seed] if job.policy.name == "adaptive" else 100.0

    advice, _ = advised(noisy)
    assert advice.gain.mean > 1.2
    assert advice.gain.low < 1
    assert advice.way.colocated


def test_one_instance_has_nothing_to_split() -> None:
    advice, _ = advised(usual, asked(gpus=16))
    assert advice.best_split is None
    assert advice.way.colocated
    assert advice.influences == ()
    assert "nothing to split" in said(asked(gpus=16), advice)


def test_few_ways_run_whole_and_only_the_last_run_again() -> None:
    advice, ran = advised(usual)
    whole = [job for job in ran if job.scenario.workload.max_context == asked().workload.max_context]
    first = [job for job in whole if job.scenario.seed == 0]
    # The splits that follow, two static and two colocated ways, and plain colocation; then the last three at two more seeds.
    assert len(first) == 7
    assert len(whole) == 7 + 2 * 3
    assert len({job.key for job in ran}) == len(ran)
    assert {one.way for one in advice.tried} == set(ways(asked()))
    assert sum(one.full_s is not None for one in advice.tried) == 7


def test_the_strongest_influence_comes_first_and_says_when_it_turns_the_advice() -> None:
    def loaded(job: Job) -> float:
        load, tools = job.scenario.rollout.load, job.scenario.workload.tool_times
        if job.policy.name == "adaptive":
            # As fast as colocation at half of the load, and slower still with slow tools.
            return usual(job) * {0.5: 2.0, 1.0: 1.0, 2.0: 1.0}[load] * (1.1 if tools == 2.0 else 1.0)
        return usual(job)

    advice, _ = advised(loaded)
    assert advice.influences[0].name == "load"
    assert advice.influences[0].base == pytest.approx(1.61)
    assert advice.influences[0].gains == {"x0.5": pytest.approx(0.805), "x2": pytest.approx(1.61)}
    assert advice.influences[0].turns
    assert advice.influences[1].name == "tool times"
    assert advice.influences[1].strength == pytest.approx(0.1)
    assert not advice.influences[1].turns
    assert advice.influences[-1].strength == pytest.approx(0.0)


def test_short_trajectories_are_cut_at_the_first_quartile_of_their_lengths() -> None:
    full = WorkloadSection(name="coding-agent")
    short = short_context(full)
    assert 20_000 < short < 60_000
    # Fixed requests have one length.
    assert short_context(WorkloadSection(name="requests")) == 2 * 2048


def said(asked_for: Request, advice: Advice) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    for shown in advice_view(asked_for, advice):
        console.print(shown)
    return console.export_text()


def test_the_advice_as_words_and_as_json(tmp_path: Path) -> None:
    advice, _ = advised(usual)
    words = said(asked(), advice)
    assert f"Advice: adaptive, {MIMO}." in words
    assert "1.61x (1.61 to 1.61) the speed of the best colocation" in words
    assert "20 to 40 %" in words
    values = json.loads(json.dumps(exact(asked(), advice), allow_nan=False))
    assert values["advice"]["policy"] == "adaptive"
    assert values["gain_over_best_colocated"]["mean"] == pytest.approx(1.61)
    assert len(values["tried"]) == len(advice.tried)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--profile", "h900"], "profile=h900: there is no file"),
        (["--gpus", "8"], "--gpus 8: the smallest instance takes 16"),
        (["--gpus", "0"], "--gpus 0: write a number of 1 or more"),
        (["--group-size", "0"], "rollout.group_size=0"),
        (["--workers", "0"], "--workers=0"),
        (["hardware.gpus=4"], "only workload.* and rollout.* can be replaced"),
        (["rollout.no=4"], "rollout.no=4: unknown key"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(
    changed: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["plan", "--workload", "math", "--gpus", "128"]
    profile = [] if "--profile" in changed else ["--profile", MIMO]
    assert main([*given, *profile, *changed]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_is_not_there_is_one_clear_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--trace", str(tmp_path / "no"), "--gpus", "128", "--profile", MIMO]) == 2
    assert "workload.path=" in capsys.readouterr().err
