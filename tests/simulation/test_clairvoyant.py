"""The policy that knows the future: its model by hand and against the simulator, and what it makes of what it knows."""

from __future__ import annotations

import numpy as np
import pytest

from prorsa.allocation import Allocation
from prorsa.profiles.instance import ProfileCosts
from prorsa.simulation.experiments.settings import scenario_path
from prorsa.simulation.foresight import FULL, NEVER, Field, Plan, Tables, Turns, foresee, stretches, turns_of
from prorsa.simulation.outcome import RunOutcome
from prorsa.simulation.run import run_scenario
from prorsa.simulation.scenario import PolicySection, Scenario, load_scenario
from prorsa.simulation.workloads.launches import Launches
from prorsa.simulation.workloads.models import build_workload
from prorsa.simulation.workloads.scripts import Script, TurnScript

PREFILL_STEP, DECODE_STEP, FLIP_S = 0.1, 0.01, 5.0


class Costs:
    """Of an instance of one rank whose steps take the same time whatever is in them. An `EngineCosts`."""

    ranks, chunk, flip_s = 1, 500, FLIP_S

    def prefill_s(self, new: float, prefix: float) -> float:
        return new / self.chunk * PREFILL_STEP

    def prefill_step_s(self, tokens: float, prefix: float, share: float) -> float:
        return PREFILL_STEP

    def decode_step_s(self, decodes: float, context: float) -> float:
        return DECODE_STEP


def scripted(*scripts: Script, waiting: int = 0) -> Field:
    """Trajectories that begin now, each in a group of its own, the last `waiting` of them when another has ended."""
    tables = Tables(Costs(), 4096)
    known = [turns_of(script, tables, cached=True) for script in scripts]
    ends = np.cumsum([len(turns) for turns in known])
    nothing = np.zeros(len(scripts))
    return Field(
        stretches(nothing, nothing + 1.0, nothing, nothing, nothing, tables),
        ends - [len(turns) for turns in known],
        ends,
        Turns(*(np.concatenate([getattr(turns, name) for turns in known]) for name in Turns.__slots__)),
        np.arange(len(scripts)),
        len(scripts) - waiting,
    )


ONE = Script(1000, (TurnScript(1001, "tool", 30.0, 499), TurnScript(501)), reward_s=4.0)
# A second until it begins, two chunks, a thousand tokens, the tool, a chunk, five hundred tokens, the reward.
ALONE_S = 1.0 + 2 * PREFILL_STEP + 1000 * DECODE_STEP + 30.0 + PREFILL_STEP + 500 * DECODE_STEP + 4.0
SPLIT = Allocation(1, 1)


def test_a_trajectory_alone() -> None:
    found = foresee(scripted(ONE), [Plan(SPLIT, NEVER, SPLIT)], SPLIT, Tables(Costs(), 4096))
    assert found.end_s[0] == found.mean_s[0] == pytest.approx(ALONE_S, rel=0.01)
    assert found.tokens[0] == pytest.approx(1500, rel=0.1)


def test_flips_stand_still_unless_they_are_made_in_place() -> None:
    """500 prompts take 50 s of one prefill instance, once a mixed one has become it, and 25 s of two mixed ones."""
    tables = Tables(Costs(), 4096)
    mixed = Allocation(0, 0, 2)
    plans = [Plan(SPLIT, NEVER, SPLIT), Plan(mixed, NEVER, mixed)]
    count = np.full(500, 1.0)
    now = stretches(100 * count, 0 * count, 500 * count, 0 * count, 500 * count, tables)
    over = np.zeros(500, dtype=np.int64)
    many = Field(now, over, over, now.at(over[:1]), np.arange(500), 500)
    split, flipped = foresee(many, plans, SPLIT, tables).end_s
    split_too, unflipped = foresee(many, plans, mixed, tables).end_s
    assert split == pytest.approx(50 / FULL, rel=0.05)
    assert unflipped == pytest.approx(25 / FULL, rel=0.1)
    assert split_too - split == pytest.approx(FLIP_S, abs=2.5)
    assert flipped == unflipped


def test_groups_follow_each_other() -> None:
    """Where a group waits for another one's end, it takes twice as long; only those that live now count as ended."""
    tables = Tables(Costs(), 4096)
    found = foresee(scripted(ONE, ONE, waiting=1), [Plan(SPLIT, NEVER, SPLIT)], SPLIT, tables, horizon=3 * ALONE_S)
    assert found.tokens[0] == pytest.approx(3000, rel=0.1)
    assert found.end_s[0] == pytest.approx(ALONE_S, rel=0.05)


def foreseen(scenario: Scenario, allocation: Allocation, prefill_every: int) -> float:
    """Seconds that the model says a step takes."""
    rollout = scenario.rollout
    tables = Tables(ProfileCosts(scenario.prefill_profile()), scenario.workload.max_context, prefill_every)
    launches = Launches(build_workload(scenario.workload, scenario.seed), rollout.group_size, scenario.seed)
    members = [(group, member) for group in range(rollout.groups) for member in range(rollout.group_size)]
    known = [turns_of(launches.script(*one), tables, cached=True, shared=0.9) for one in members]
    ends = np.cumsum([len(turns) for turns in known])
    nothing = np.zeros(len(known))
    field = Field(
        stretches(nothing, nothing + 0.2, nothing, nothing, nothing, tables),
        ends - [len(turns) for turns in known],
        ends,
        Turns(*(np.concatenate([getattr(turns, name) for turns in known]) for name in Turns.__slots__)),
        np.array([group for group, _ in members]),
        rollout.groups,
    )
    return float(foresee(field, [Plan(allocation, NEVER, allocation)], allocation, tables).end_s[0])


def simulated(scenario: Scenario, policy: PolicySection) -> RunOutcome:
    return run_scenario(scenario.model_copy(update={"policies": {"one": policy}}), "one")


@pytest.mark.parametrize("model", ["deepseek-v3.2", "mimo-v2.5-pro"])
@pytest.mark.parametrize("task", ["general-agent", "math"])
def test_the_model_is_near_the_simulator(model: str, task: str) -> None:
    scenario = load_scenario(
        scenario_path(f"{model}-{task}"),
        ["rollout.groups=8", "rollout.group_size=16", "rollout.steps=1", "workload.max_context=32768"],
    )
    for prefill in (2, 4):
        split = PolicySection(name="static", split=f"{prefill}:{8 - prefill}")
        told = foreseen(scenario, Allocation(prefill, 8 - prefill), 0)
        assert told == pytest.approx(simulated(scenario, split).rollout_s, rel=0.1)
    for cadence in (0, 16):
        colocated = PolicySection(name="colocated", prefill_every=cadence)
        told = foreseen(scenario, Allocation(0, 0, 8), cadence)
        assert told == pytest.approx(simulated(scenario, colocated).rollout_s, rel=0.1)


def test_it_gets_away_from_a_bad_split() -> None:
    scenario = load_scenario(
        scenario_path("deepseek-v3.2-math"),
        ["rollout.groups=64", "rollout.group_size=8", "rollout.steps=1", "workload.max_context=8192"],
    )
    bad = simulated(scenario, PolicySection(name="static", split="6:2"))
    good = simulated(scenario, PolicySection(name="static", split="1:7"))
    found = simulated(scenario, PolicySection(name="clairvoyant", split="6:2"))
    assert (found.done, found.turns) == (bad.done, bad.turns)
    assert found.flips
    # It begins in the same roles, and loses the dead time of a flip.
    assert found.rollout_s < min(bad.rollout_s, good.rollout_s + 2 * FLIP_S)


def test_it_sees_what_is_launched_later() -> None:
    """Asynchronous rollout with syncs: every trajectory is known by its id, also after its group's number has grown."""
    scenario = load_scenario(
        scenario_path("mimo-v2.5-pro-general-agent"),
        [
            *("rollout.groups=2", "rollout.group_size=8", "rollout.steps=3", "workload.max_context=16384"),
            *("rollout.mode=async", "rollout.max_staleness=4", "rollout.in_flight=3", "rollout.train_s=20"),
        ],
    )
    found = simulated(scenario, PolicySection(name="clairvoyant", split="2:6"))
    assert len(found.steps) == 3
    assert found.rollout_s < 1.2 * simulated(scenario, PolicySection(name="static", split="2:6")).rollout_s
