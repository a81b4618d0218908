from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from pseudo_control import MAX_CONTEXT, PseudoControl, Scripts, of, play

from prorsa.engines.protocol import GenerateRequest
from prorsa.lifecycle import SandboxMode
from prorsa.lifecycle import events as e
from prorsa.rollout.sampler import derive_seed
from prorsa.rollout.verify import recorded_turns
from prorsa.simulation import clock
from prorsa.simulation.scenario import WorkloadSection
from prorsa.simulation.workloads.environment import questions, simulated_environment
from prorsa.simulation.workloads.models import build_workload
from prorsa.simulation.workloads.pseudo_model import PseudoModel
from prorsa.simulation.workloads.scripts import Script, TurnScript

SCRIPT = Script(
    prompt_tokens=100,
    turns=(TurnScript(10, "shell", 2.5, 20), TurnScript(30, "test", 4.0, 40), TurnScript(50)),
    sandbox_cold_s=8.0,
    sandbox_prewarmed_s=0.25,
    reward_s=3.0,
    reward=1.0,
)


def timeline(control: PseudoControl, trajectory: str) -> list[e.Event]:
    return [event for event in control.events if event.trajectory == trajectory]


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("resends", [0, 2])
def test_an_episode_does_what_its_script_says(hashed: bool, resends: int) -> None:
    control, records = play(Scripts(SCRIPT), hashed=hashed, resends=resends)
    # The model takes no time here: the sandbox 8 s, the tools 2.5 and 4 s, the reward 3 s.
    kinds = (e.PrefillStarted, e.DecodeStarted, e.Requeued)
    assert [event for event in timeline(control, "g0.0") if not isinstance(event, kinds)] == [
        e.Sampled(0.0, "g0.0", "g0", "listed", 0, 100),
        e.SandboxStarting(0.0, "g0.0", SandboxMode.COLD, "listed", "simulated"),
        e.Ready(8.0, "g0.0", 100),
        e.ToolStarted(8.0, "g0.0", "shell", 110),
        e.Ready(10.5, "g0.0", 130),
        e.ToolStarted(10.5, "g0.0", "test", 160),
        e.Ready(14.5, "g0.0", 200),
        e.RewardStarted(14.5, "g0.0", 250),
        e.Done(17.5, "g0.0", 1.0, admitted=True),
    ]
    assert len(of(e.Requeued, control.events, "g0.0")) == 3 * resends
    [record] = records
    assert (record.turns, record.reward, record.dropped) == (3, 1.0, None)


def test_only_hashed_trajectories_keep_their_tokens() -> None:
    _, [counted] = play(Scripts(SCRIPT))
    _, [hashed] = play(Scripts(SCRIPT), hashed=True)
    assert (counted.prompt_ids, counted.response_ids) == ((), ())
    assert (len(hashed.prompt_ids), len(hashed.response_ids)) == (100, 150)
    assert hashed.response_mask == (1,) * 10 + (0,) * 20 + (1,) * 30 + (0,) * 40 + (1,) * 50
    assert len(set(hashed.response_ids)) == 150 - 2, "three stop tokens, and nothing else twice"


def test_hashed_turns_can_be_generated_again_from_their_contexts() -> None:
    """What `prorsa verify` does with a real engine."""
    workload = build_workload(WorkloadSection(name="general-agent", max_context=8192), 0)
    control, records = play(workload, groups=2, size=2, hashed=True, resends=1, max_context=8192)
    fresh = PseudoModel(workload, hashed=True)
    sampling = control.requests[0].sampling
    checked = 0
    for record in records:
        for turn in recorded_turns(record):
            seeded = type(sampling)(sampling.max_new_tokens, seed=turn.seed)
            stream = fresh.stream(GenerateRequest(f"{turn.name}.0", turn.context, seeded))
            assert stream.take(stream.length)[0] == turn.output
            checked += 1
    assert checked == sum(record.turns for record in records) > 10


@pytest.mark.parametrize("name", ["math", "coding-agent", "general-agent", "requests"])
def test_the_members_of_a_group_play_the_scripts_of_their_seeds(name: str) -> None:
    workload = build_workload(WorkloadSection.model_validate({"name": name}), 5)
    control, records = play(workload, groups=3, size=4, seed=11, max_context=131072)
    assert len(records) == 12
    for record in records:
        group, member = (int(number) for number in record.trajectory[1:].split("."))
        seed = derive_seed(11, f"{name}-{group}", 0, member)
        script = workload.script(group, seed)
        [ended] = of(e.RewardStarted, control.events, record.trajectory)
        tools = of(e.ToolStarted, control.events, record.trajectory)
        contexts = [request.input_ids for request in control.requests if request.trajectory == record.trajectory]
        assert (record.seed, record.reward, record.turns) == (seed, script.reward, len(script.turns))
        assert [tool.tool for tool in tools] == [turn.tool for turn in script.turns[:-1]]
        assert ended.tokens == script.longest_context
        assert len(contexts[0]) == script.prompt_tokens
        assert [len(after) - len(before) for before, after in pairwise(contexts)] == [
            turn.output_tokens + turn.appended_tokens for turn in script.turns[:-1]
        ]


def test_a_script_that_fills_the_context_is_played_to_its_early_end() -> None:
    control, [record] = play(Scripts(SCRIPT.within(249)), max_context=249)
    assert (record.turns, record.dropped) == (2, None)
    assert [event.tokens for event in of(e.RewardStarted, control.events, "g0.0")] == [160]


def test_sandboxes_are_prewarmed_while_they_last_and_replaced_after_a_cold_start() -> None:
    async def main() -> list[tuple[float, SandboxMode, float]]:
        taken = []
        for wait in (0.0, 0.0, 0.0, 4.0, 4.0):
            await asyncio.sleep(wait)
            taken.append(asyncio.create_task(start()))
        return [await task for task in taken]

    async def start() -> tuple[float, SandboxMode, float]:
        now = asyncio.get_running_loop().time
        asked = now()
        environment.tokenizer.render(questions(workload, 1)[0].messages, None, True)
        async with environment.sandboxes.sandbox() as sandbox:
            await sandbox.start()
            return asked, sandbox.mode, now() - asked

    workload = Scripts(SCRIPT)
    environment = simulated_environment(PseudoModel(workload), workload, prewarmed=2, max_context=MAX_CONTEXT)
    # The first two are replaced at 8 s, before the last one asks: its timer was set later.
    assert clock.run(main()) == [
        (0.0, SandboxMode.PREWARMED, 0.25),
        (0.0, SandboxMode.PREWARMED, 0.25),
        (0.0, SandboxMode.COLD, 8.0),
        (4.0, SandboxMode.COLD, 8.0),
        (8.0, SandboxMode.PREWARMED, 0.25),
    ]


def test_a_prewarmed_sandbox_is_recorded_as_one() -> None:
    control, _ = play(Scripts(SCRIPT), size=2, prewarmed=1)
    modes = [event.mode for event in control.events if isinstance(event, e.SandboxStarting)]
    assert modes == [SandboxMode.PREWARMED, SandboxMode.COLD]
    assert [of(e.Ready, control.events, name)[0].time for name in ("g0.0", "g0.1")] == [0.25, 8.0]


def test_there_are_no_more_questions_than_a_workload_has() -> None:
    assert [question.id for question in questions(Scripts(SCRIPT, SCRIPT), 5)] == ["listed-0", "listed-1"]
    assert len(questions(build_workload(WorkloadSection(name="math"), 0), 5)) == 5
