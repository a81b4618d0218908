"""Contexts that do not extend the one before: the segments of one trajectory, from the trace to the simulated engines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudo_control import MAX_CONTEXT, Scripts, of, play
from tiny_profile import write_tiny_profile

from prorsa.cli import main
from prorsa.config import validated
from prorsa.lifecycle import UNKNOWN, IllegalTransition, TraceWriter, Tracker, read_trace
from prorsa.lifecycle import events as e
from prorsa.report.analysis import analyse
from prorsa.simulation.bounds import requests
from prorsa.simulation.run import run_scenario
from prorsa.simulation.scenario import Scenario, WorkloadSection
from prorsa.simulation.workloads.models import build_workload
from prorsa.simulation.workloads.pseudo_model import PseudoModel
from prorsa.simulation.workloads.replay import read_workload
from prorsa.simulation.workloads.scripts import Script, TurnScript

SCRIPT = Script(
    100,
    (
        TurnScript(10, "shell", 1.0, 20),  # 130: extends
        TurnScript(30, "shell", 1.0, 5, dropped_tokens=3),  # 160, without 3: a stop string was cut
        TurnScript(8, "compact", 1.0, 40, dropped_tokens=130),  # 170, of which 40 stay: compacted
        TurnScript(20, "shell", 1.0, 0, dropped_tokens=20),  # 80 again: the turn is sampled once more
        TurnScript(6, "agent", 1.0, 7, dropped_tokens=86),  # nothing stays
        TurnScript(2),
    ),
)
PROMPTS = [100, 130, 162, 80, 80, 7]
KEPT = [UNKNOWN, UNKNOWN, 157, 40, 80, 0]


def write(path: Path, events: Iterable[e.Event]) -> Path:
    with TraceWriter(path) as writer:
        for event in events:
            writer.write(event)
    return path


def rounded(script: Script) -> Script:
    turns = tuple(replace(turn, tool_s=round(turn.tool_s, 6)) for turn in script.turns)
    return replace(script, turns=turns, sandbox_prewarmed_s=0.0)


def test_the_lengths_of_a_script_with_segments() -> None:
    assert list(SCRIPT.prompts()) == PROMPTS
    assert SCRIPT.longest_context == 170
    # What has to be computed: all but what the former context and the prompt have in common, and no last token is cached.
    assert list(requests(SCRIPT)) == [(100, 0), (21, 109), (5, 157), (40, 40), (1, 79), (7, 0)]


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("resends", [0, 2])
def test_an_episode_plays_its_segments(tmp_path: Path, hashed: bool, resends: int) -> None:
    control, [record] = play(Scripts(SCRIPT), hashed=hashed, resends=resends)
    ready = of(e.Ready, control.events)
    assert [event.tokens for event in ready] == PROMPTS
    assert [event.kept for event in ready] == KEPT
    assert [event.tokens for event in of(e.ToolStarted, control.events)] == [110, 160, 170, 100, 86]
    if hashed:
        # What each prompt has in common with the context before it, token by token; a first token is its question.
        contexts = [tuple(request.input_ids) for request in control.requests]
        assert [len(context) for context in contexts] == PROMPTS
        assert contexts[2][:130] == contexts[1]
        assert contexts[3][:40] == contexts[2][:40]
        assert contexts[3][40] != contexts[2][40]
        assert contexts[4] == contexts[3]
        assert contexts[5][0] == contexts[4][0]
        assert contexts[5][1] != contexts[4][1]
        assert len(record.prompt_ids) + len(record.response_ids) == 9
    replay = read_workload(write(tmp_path / "trace", control.events), 0, MAX_CONTEXT)
    assert rounded(replay.script(0, 0)) == SCRIPT


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    prompt = draw(st.integers(1, 30))
    script = Script(prompt, ())
    for _ in range(draw(st.integers(0, 5))):
        output = draw(st.integers(2, 12))
        dropped = draw(st.sampled_from([0, 0, 1, output, prompt + output]) | st.integers(0, prompt + output))
        least = 1 if dropped == prompt + output else 0
        turn = TurnScript(output, "tool", 1.0, draw(st.integers(least, 20)), dropped)
        script = replace(script, turns=(*script.turns, turn))
        prompt = turn.next(prompt)
    return replace(script, turns=(*script.turns, TurnScript(draw(st.integers(2, 9)))))


@settings(max_examples=60, deadline=None)
@given(script=scripts(), resends=st.integers(0, 1), data=st.data())
def test_whatever_is_played_is_replayed(
    tmp_path_factory: pytest.TempPathFactory, script: Script, resends: int, data: st.DataObject
) -> None:
    control, _ = play(Scripts(script), hashed=True, resends=resends)
    path = write(tmp_path_factory.mktemp("segments") / "trace", control.events)
    assert rounded(read_workload(path, 0, MAX_CONTEXT).script(0, 0)) == script
    described = analyse(path).described
    assert described.reuse.ideal_tokens == sum(
        prompt - (0 if event.kept == UNKNOWN and index == 0 else event.extends(former))
        for index, (prompt, event, former) in enumerate(
            zip(
                script.prompts(),
                of(e.Ready, control.events),
                [0, *(event.tokens for event in of(e.ToolStarted, control.events))],
                strict=True,
            )
        )
    )
    # Cut to any context that the prompt fits in, it stays within it.
    most = data.draw(st.integers(script.prompt_tokens + 2, script.longest_context + 2))
    within = script.within(most)
    assert within.longest_context <= most
    play(Scripts(within), hashed=True, max_context=most)
    # With turns of other lengths every prompt has a token at least.
    for factor in (0.1, 3):
        scaled = script.reshaped(data.draw(st.integers(1, 50)), lambda tokens, by=factor: max(2, round(by * tokens)))
        assert min(scaled.prompts()) >= 1
        play(Scripts(scaled))


def test_scaled_turns_keep_what_they_kept() -> None:
    scaled = SCRIPT.reshaped(50, lambda tokens: 2 * tokens)
    # 3 tokens of an output are cut as before; 40 tokens of a context are kept as before.
    assert list(scaled.prompts()) == [50, 90, 152, 80, 80 + 20, 7]


def scenario(path: Path, policy: dict[str, object], groups: int = 1, size: int = 1, **hardware: object) -> Scenario:
    return validated(
        Scenario,
        {
            "name": "segments",
            "hardware": {"profile": write_tiny_profile(path, max_running=16), "gpus": 2, "kv_store": False, **hardware},
            "workload": {"name": "trace", "path": str(path / "trace"), "max_context": 4096},
            "rollout": {"groups": groups, "group_size": size, "steps": 1},
            "policies": {"one": policy},
        },
    )


@pytest.mark.parametrize("tokens", ["count", "hash"])
def test_a_prefix_cache_has_what_the_contexts_have_in_common(tmp_path: Path, tokens: str) -> None:
    control, _ = play(Scripts(SCRIPT))
    write(tmp_path / "trace", control.events)
    one = scenario(tmp_path, {"name": "colocated"}, tokens=tokens, gpus=1)
    statistics = run_scenario(one, "one").statistics
    assert statistics.prefilled_tokens == 100 + 21 + 5 + 40 + 1 + 7
    assert statistics.cached_tokens == sum(PROMPTS) - statistics.prefilled_tokens


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(
    "policy",
    [
        {"name": "colocated"},
        {"name": "static", "split": "2:2"},
        {"name": "adaptive", "horizon": 5.0},
        {"name": "planned", "horizon": 5.0},
        {"name": "clairvoyant", "horizon": 5.0},
    ],
    ids=lambda policy: str(policy["name"]),
)
def test_every_policy_simulates_trajectories_that_are_compacted(
    tmp_path: Path, policy: dict[str, object], store: bool
) -> None:
    turn = TurnScript(200, "shell", 2.0, 300)
    members = [
        Script(
            400 + 10 * index,
            (turn, turn, replace(turn, dropped_tokens=1000 + 10 * index, appended_tokens=150), turn, TurnScript(50)),
        )
        for index in range(6)
    ]
    control, _ = play(Scripts(*members), groups=6)
    write(tmp_path / "trace", control.events)
    outcome = run_scenario(scenario(tmp_path, policy, 6, 2, gpus=4, kv_store=store), "one")
    assert (outcome.done, outcome.dropped) == (12, 0)
    assert outcome.turns == 60


def test_a_recorded_simulation_says_what_its_prompts_keep(tmp_path: Path) -> None:
    control, _ = play(Scripts(SCRIPT))
    write(tmp_path / "trace", control.events)
    run_scenario(scenario(tmp_path, {"name": "colocated"}), "one", record_to=tmp_path / "run")
    recorded = of(e.Ready, read_trace(tmp_path / "run" / "trace"))
    assert [(event.tokens, event.kept) for event in recorded] == list(zip(PROMPTS, KEPT, strict=True))
    described = analyse(tmp_path / "run").described
    assert described.reuse.uncached_tokens == 174


def test_what_a_run_recorded_is_planned_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        e.Sampled(0.0, "agent-1", "agent-1", "agent", 0, 25),
        e.Ready(0.0, "agent-1", 160),
        e.PrefillStarted(0.0, "agent-1", "p"),
        e.DecodeStarted(1.0, "agent-1", "d"),
        e.ToolStarted(2.0, "agent-1", "reply", 176),
        # Nobody compared it: nothing of a context is in a shorter prompt.
        e.Ready(3.0, "agent-1", 25),
        e.PrefillStarted(3.0, "agent-1", "p"),
        e.DecodeStarted(4.0, "agent-1", "d"),
        e.RewardStarted(5.0, "agent-1", 40),
        e.Done(5.0, "agent-1", 0.0, True),
    ]
    events[0] = replace(events[0], prompt_tokens=160)  # type: ignore[call-arg]
    write(tmp_path / "trace", events)
    script = build_workload(WorkloadSection(name="trace", path=str(tmp_path / "trace")), 0).script(0, 0)
    assert script.turns == (TurnScript(16, "reply", 1.0, 25, 176), TurnScript(15))
    assert analyse(tmp_path / "trace").described.reuse.ideal_tokens == 185
    profile = write_tiny_profile(tmp_path, max_running=16)
    asked = ["--trace", str(tmp_path / "trace"), "--profile", profile, "--gpus", "2", "--seeds", "2", "--workers", "1"]
    advice = tmp_path / "advice.json"
    assert main(["plan", *asked, "--concurrency", "2", "--json", str(advice)]) == 0
    assert json.loads(advice.read_text())["rollout_s"] > 0


def test_a_tracker_refuses_to_keep_what_is_not_there() -> None:
    tracker = Tracker()
    tracker.apply(e.Sampled(0.0, "t", "g", "task"))
    with pytest.raises(IllegalTransition, match="its former context has 0 tokens"):
        tracker.apply(e.Ready(0.0, "t", 10, 1))
    tracker.apply(e.Ready(0.0, "t", 10))
    tracker.apply(e.PrefillStarted(0.0, "t", "p"))
    tracker.apply(e.DecodeStarted(0.0, "t", "d"))
    tracker.apply(e.ToolStarted(0.0, "t", "x", 15))
    with pytest.raises(IllegalTransition, match="its former context has 15 tokens"):
        tracker.apply(e.Ready(1.0, "t", 30, 16))
    tracker.apply(e.Ready(1.0, "t", 12, 12))


def test_segments_are_known_by_their_turns() -> None:
    model = PseudoModel(Scripts(SCRIPT))
    assert [segment.number for segment in model._segments(0, 0)] == [0, 0, 1, 2, 3, 4]
    # The first three have the group's first prompt, the others none in common with any other trajectory.
    groups = [segment.group for segment in model._segments(0, 0)]
    assert groups[:3] == [1, 1, 1]
    assert len({*groups[3:], *(segment.group for segment in model._segments(0, 1))}) == 3 + 4
