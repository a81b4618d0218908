"""Whose turn a request is, and the lifecycle that comes of it: agents that know nothing of it, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from gateway_bench import END, PYTHON, TOKENIZER, Script, ScriptedEngine, babble, configured, control_over, saying

from prorsa.assembly import sampling_params
from prorsa.cluster.turns import TurnResult
from prorsa.engines.protocol import FinishReason, Role
from prorsa.gateway.asks import Ask, AskReader, Identity
from prorsa.gateway.errors import ApiError
from prorsa.gateway.trajectories import Trajectories
from prorsa.gateway.turns import Running, Turns
from prorsa.lifecycle import Done, Dropped, Event, Ready, RewardStarted, Sampled, State, ToolStarted, Transition
from prorsa.simulation import clock

CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "1+2"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "What is 1 plus 2?"}
Message = dict[str, Any]
SEEN = Sampled | Ready | ToolStarted | RewardStarted | Done | Dropped


class Notes:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.transitions: list[Transition] = []

    def transition(self, transition: Transition) -> None:
        self.transitions.append(transition)
        self.events.append(transition.event)

    def decision(self, decision: object) -> None: ...
    def flip(self, flip: object) -> None: ...
    def turn(self, turn: object) -> None: ...
    def instance(self, *what: object) -> None: ...


T = TypeVar("T")


class Front:
    """The gateway without HTTP."""

    def __init__(self, script: Script, token_s: float, **gateway: Any) -> None:
        config = configured(**gateway)
        self.notes = Notes()
        self.engines = [
            ScriptedEngine("p", Role.PREFILL, script, 0.0),
            ScriptedEngine("d", Role.DECODE, script, token_s),
        ]
        self.control = control_over(self.engines, self.notes)
        self.trajectories = Trajectories(
            self.control, TOKENIZER.encode, 512, config.gateway.tool_timeout, config.gateway.idle_timeout
        )
        self.reader = AskReader(TOKENIZER, "arithmetic", sampling_params(config))
        self.turns = Turns(self.control, TOKENIZER, self.trajectories, 512, config.gateway.seed)

    async def take(self, ask: Ask, within: float = 1000.0) -> tuple[Running, TurnResult]:
        async with self.turns.run(ask, asyncio.get_running_loop().time() + within) as running:
            await asyncio.wait({running.task})
            outcome = running.outcome()
            if isinstance(outcome, ApiError):
                raise outcome
            return running, outcome

    async def chat(self, messages: list[Message], name: str | None = None, **body: Any) -> tuple[Running, Message]:
        """The turn, and its answer as a client appends it."""
        ask = self.reader.chat({"messages": messages, "tools": [PYTHON], **body}, Identity(name))
        running, _ = await self.take(ask)
        parsed = running.parsed()
        calls = [{"function": {"name": call.name, "arguments": call.arguments}} for call in parsed.calls]
        return running, {"role": "assistant", "content": parsed.content, "tool_calls": calls}

    async def complete(self, prompt: str | list[int], name: str | None = None, **body: Any) -> Running:
        ask = self.reader.completions({"prompt": prompt, "max_tokens": 8, **body}, Identity(name))
        return (await self.take(ask))[0]

    def told(self, trajectory: str) -> list[tuple[str, float]]:
        """What the lifecycle knows of a trajectory, but for the way through the cluster."""
        return [
            (type(event).__name__, round(event.time, 3))
            for event in self.notes.events
            if event.trajectory == trajectory
            and isinstance(event, Sampled | Ready | ToolStarted | RewardStarted | Done | Dropped)
        ]

    def state(self, trajectory: str) -> State:
        return self.control.tracker.state(trajectory)


@asynccontextmanager
async def front(script: Script = babble, token_s: float = 0.0, **gateway: Any) -> AsyncIterator[Front]:
    made = Front(script, token_s, **gateway)
    await made.control.start()
    try:
        yield made
    finally:
        made.trajectories.close("the test is over")
        await made.control.stop()
    assert not any(made.control.tracker.counts().values())
    assert len(made.trajectories) == 0


def run(main: Coroutine[Any, Any, T]) -> T:
    return clock.run(main)


def test_a_conversation_is_one_trajectory_and_its_gaps_are_tool_time() -> None:
    async def main() -> None:
        async with front(saying(CALL, "It is 3."), idle_timeout=60.0) as gateway:
            first, answer = await gateway.chat([QUESTION])
            assert gateway.state(first.trajectory) is State.TOOL
            await asyncio.sleep(4.0)
            result = {"role": "tool", "content": "3"}
            second, last = await gateway.chat([QUESTION, answer, result])
            assert (second.trajectory, second.number) == (first.trajectory, 1)
            assert last["content"] == "It is 3."
            assert gateway.trajectories.continued == {"prefix": 1}
            await asyncio.sleep(60.1)
            assert gateway.told(first.trajectory) == [
                ("Sampled", 0.0),
                ("Ready", 0.0),
                ("ToolStarted", 0.0),
                ("Ready", 4.0),
                ("RewardStarted", 4.0),
                ("Done", 64.0),
            ]
            assert [event.tool for event in gateway.notes.events if isinstance(event, ToolStarted)] == ["python"]
            assert next(t.elapsed for t in gateway.notes.transitions if t.before is State.TOOL) == pytest.approx(4.0)

    run(main())


def test_the_next_prompt_begins_with_the_very_tokens_that_were_generated() -> None:
    """The model spells its answer in other tokens than the tokenizer would."""
    spelled = [token for letter in "The answer is 3." for token in TOKENIZER.encode(letter)]
    assert spelled != TOKENIZER.encode("The answer is 3.")

    def script(context: list[int]) -> int:
        done = len(context) - len(TOKENIZER.render([QUESTION], [PYTHON]))
        return spelled[done] if 0 <= done < len(spelled) else END

    async def main() -> None:
        async with front(script) as gateway:
            first, answer = await gateway.chat([QUESTION])
            second, _ = await gateway.chat([QUESTION, answer, {"role": "user", "content": "Sure?"}])
            context = (*first.prompt_ids, *spelled, END)
            assert second.prompt_ids[: len(context)] == context
            assert TOKENIZER.decode(second.prompt_ids, False) == TOKENIZER.render_text(
                [QUESTION, answer, {"role": "user", "content": "Sure?"}], [PYTHON]
            )

    run(main())


def test_a_history_that_is_written_otherwise_is_known_by_its_conversation() -> None:
    """A framework that parses arguments and writes them anew, with other blanks and another order."""

    async def main() -> None:
        async with front(
            saying('<tool_call>{"arguments":{"a":1,"b":2},"name":"python"}</tool_call>', "Yes.")
        ) as gateway:
            first, answer = await gateway.chat([QUESTION])
            answer["tool_calls"][0]["function"]["arguments"] = '{"b": 2, "a": 1}'
            answer["content"] = None
            second, _ = await gateway.chat([QUESTION, answer, {"role": "tool", "content": "3"}])
            assert (second.trajectory, second.number) == (first.trajectory, 1)
            assert gateway.trajectories.continued == {"conversation": 1}

    run(main())


def test_two_agents_with_one_question_are_two_trajectories() -> None:
    async def main() -> None:
        async with front(saying(CALL, "It is 3.")) as gateway:
            (one, answer), (two, _) = await asyncio.gather(gateway.chat([QUESTION]), gateway.chat([QUESTION]))
            assert one.trajectory != two.trajectory
            past = [QUESTION, answer, {"role": "tool", "content": "3"}]
            again = await asyncio.gather(gateway.chat(past), gateway.chat(past))
            assert {running.trajectory for running, _ in again} == {one.trajectory, two.trajectory}
            assert [running.number for running, _ in again] == [1, 1]

    run(main())


def test_an_empty_answer_does_not_make_others_its_continuation() -> None:
    async def main() -> None:
        async with front(lambda context: END) as gateway:
            first, _ = await gateway.chat([QUESTION])
            other = [QUESTION, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "So?"}]
            second, _ = await gateway.chat(other)
            assert second.trajectory != first.trajectory
            empty = await gateway.complete("Once")
            assert (await gateway.complete("Once upon a time")).trajectory != empty.trajectory

    run(main())


def test_an_answer_that_another_only_begins_with_is_not_its_past() -> None:
    async def main() -> None:
        async with front(saying("OK", "Well.")) as gateway:
            first, answer = await gateway.chat([QUESTION])
            other = [QUESTION, {"role": "assistant", "content": "OK, let me see."}, {"role": "user", "content": "So?"}]
            assert (await gateway.chat(other))[0].trajectory != first.trajectory
            mine = [QUESTION, answer, {"role": "user", "content": "So?"}]
            assert (await gateway.chat(mine))[0].name == first.name

    run(main())


@pytest.mark.parametrize("as_ids", [False, True])
def test_text_and_ids_that_grow_are_one_trajectory(as_ids: bool) -> None:
    async def main() -> None:
        async with front() as gateway:
            text, prompt = "Once", TOKENIZER.encode("Once")
            names = []
            for _ in range(3):
                running = await gateway.complete(prompt if as_ids else text)
                names.append((running.trajectory, running.number))
                text += running.output.text + " and"
                prompt = [*prompt, *running.output.ids, *TOKENIZER.encode(" and")]
                await asyncio.sleep(1.0)
            assert names == [("auto-1", 0), ("auto-1", 1), ("auto-1", 2)]

    run(main())


def test_after_a_stop_string_the_client_goes_on_with_what_it_saw() -> None:
    """The stop string and what came with it is in no context; the turn ends as soon as it is complete."""

    def script(context: list[int]) -> int:
        return TOKENIZER.encode("0123456789STOP" * 9)[len(context) - 1]

    async def main() -> None:
        async with front(script) as gateway:
            first = await gateway.complete(TOKENIZER.decode([40]), stop="STOP", max_tokens=60)
            assert first.output.text == "0123456789"
            assert TOKENIZER.decode(first.output.ids) == "0123456789STOP"
            prompt = TOKENIZER.decode([40]) + "0123456789" + " and so on"
            second = await gateway.complete(prompt)
            assert second.trajectory == first.trajectory
            assert TOKENIZER.decode(second.prompt_ids) == prompt

    run(main())


def test_an_agent_that_comes_back_after_what_seemed_its_last_answer_goes_on_as_a_new_trajectory() -> None:
    """With the tokens of the old one. Once such agents are known to come back, they stay the same trajectory."""

    async def main() -> None:
        async with front(saying("Hm.", "So.", "Yes.", "No.", "Well.")) as gateway:
            past, seen = [QUESTION], []
            for _ in range(4):
                running, answer = await gateway.chat(past)
                seen.append((running.name, running.number, gateway.state(running.trajectory)))
                past += [answer, {"role": "user", "content": "And?"}]
                await asyncio.sleep(1.0)
            assert seen == [
                ("auto-1", 0, State.REWARD),
                # The reply that was followed weighs as much as the first guess.
                ("auto-1", 0, State.TOOL),
                ("auto-1", 1, State.TOOL),
                ("auto-1", 2, State.TOOL),
            ]
            assert gateway.trajectories.continued == {"prefix": 3}
            assert [type(event).__name__ for event in gateway.notes.events].count("Sampled") == 2

    run(main())


def test_requests_that_nothing_follows_are_soon_taken_to_be_the_last_of_theirs() -> None:
    async def main() -> None:
        async with front(idle_timeout=5.0) as gateway:
            states = []
            for number in range(4):
                running = await gateway.complete(f"Question {number}")
                states.append(gateway.state(running.trajectory))
                await asyncio.sleep(6.0)
            assert states == [State.TOOL, State.TOOL, State.REWARD, State.REWARD]

    run(main())


def test_the_reward_may_be_told_of_a_trajectory_whose_end_was_guessed() -> None:
    async def main() -> None:
        async with front(saying("It is 3.")) as gateway:
            running, _ = await gateway.chat([QUESTION], name="t")
            assert gateway.state("t") is State.REWARD
            gateway.trajectories.post({"event": "reward_started", "trajectory": "t"})
            gateway.trajectories.post({"event": "done", "trajectory": "t", "reward": 0.75})
            (done,) = [event for event in gateway.notes.events if isinstance(event, Done)]
            assert (done.trajectory, done.reward) == (running.trajectory, 0.75)

    run(main())


def test_requests_under_one_name_are_served_one_after_another() -> None:
    async def main() -> None:
        async with front(token_s=1.0) as gateway:
            turns = await asyncio.gather(*(gateway.complete(f"Prompt {i}", name="t") for i in range(3)))
            assert [running.number for running in turns] == [0, 1, 2]
            ready = [event.time for event in gateway.notes.events if isinstance(event, Ready)]
            assert ready == pytest.approx([0.0, 8.0, 16.0])
            assert {running.trajectory for running in turns} == {"t"}

    run(main())


def test_a_name_that_comes_back_after_its_end_is_a_new_trajectory_of_that_name() -> None:
    async def main() -> None:
        async with front(idle_timeout=5.0) as gateway:
            first = await gateway.complete("One", name="t")
            await asyncio.sleep(6.0)
            assert gateway.state("t") is State.DONE
            second = await gateway.complete("Two", name="t")
            assert (first.name, second.name) == ("t", "t")
            assert second.trajectory != first.trajectory
            assert second.number == 0

    run(main())


def test_a_made_up_name_is_none_that_a_client_has_chosen() -> None:
    async def main() -> None:
        async with front() as gateway:
            await gateway.complete("One", name="auto-1")
            assert (await gateway.complete("Two")).name == "auto-2"

    run(main())


def test_a_tool_may_take_longer_than_a_reply() -> None:
    async def main() -> None:
        async with front(saying(CALL, "3"), idle_timeout=5.0, tool_timeout=50.0) as gateway:
            await gateway.chat([QUESTION], name="calls")
            await gateway.complete("Once", name="replies")
            await asyncio.sleep(49.0)
            assert (gateway.state("calls"), gateway.state("replies")) == (State.TOOL, State.DONE)
            await asyncio.sleep(2.0)
            assert gateway.state("calls") is State.DONE

    run(main())


@pytest.mark.parametrize("after", [0.0, 0.5, 3.5])
def test_a_client_that_leaves_frees_its_engines_and_ends_its_trajectory(after: float) -> None:
    async def main() -> None:
        async with front(token_s=1.0) as gateway:
            client = asyncio.create_task(gateway.complete("Once", name="t"))
            await asyncio.sleep(after)
            client.cancel()
            await asyncio.wait({client})
            if after:
                assert gateway.told("t")[-1][0] == "Dropped"
                assert gateway.told("t")[-1][1] < after + 1.0
            assert (gateway.control.router.live, gateway.control.router.waiting) == (0, 0)
            assert not any(engine.legs for engine in gateway.engines)
            assert (await gateway.complete("Once", name="t")).number == 0, "its name is free for a retry"

    run(main())


def test_who_waits_behind_a_request_that_is_cancelled_begins_a_new_trajectory() -> None:
    async def main() -> None:
        async with front(token_s=1.0) as gateway:
            leaving, waiting = (asyncio.create_task(gateway.complete(f"Prompt {i}", name="t")) for i in range(2))
            await asyncio.sleep(3.5)
            leaving.cancel()
            running = await waiting
            assert (running.name, running.number) == ("t", 0)
            assert running.trajectory != "t"
            assert gateway.state("t") is State.DROPPED

    run(main())


def test_a_turn_that_is_cancelled_before_its_first_step_leaves_its_trajectory_free() -> None:
    async def main() -> None:
        async with front() as gateway:
            ask = gateway.reader.completions({"prompt": "Once"}, Identity("t"))
            async with gateway.turns.run(ask, 100.0):
                pass
            assert gateway.told("t")[-1][0] == "Dropped"
            assert (await gateway.complete("Once", name="t")).number == 0

    run(main())


def test_an_answer_that_takes_too_long_is_ended() -> None:
    async def main() -> None:
        async with front(token_s=1.0) as gateway:
            ask = gateway.reader.completions({"prompt": "Once", "max_tokens": 50}, Identity("t"))
            with pytest.raises(ApiError, match="request_timeout") as caught:
                await gateway.take(ask, within=7.0)
            assert caught.value.status == 504
            assert asyncio.get_running_loop().time() == pytest.approx(7.0, abs=1.1)
            with pytest.raises(ApiError) as caught:
                await asyncio.gather(gateway.take(ask, within=70.0), gateway.take(ask, within=5.0))
            assert caught.value.status == 504, "waiting for another request of the same name counts too"
            await asyncio.sleep(60.0)

    run(main())


def test_a_resend_changes_nothing_that_the_client_sees() -> None:
    async def main() -> None:
        texts = []
        for cancelled in (False, True):
            async with front(token_s=1.0) as gateway:
                client = asyncio.create_task(gateway.complete("Once", max_tokens=20))
                await asyncio.sleep(6.5)
                if cancelled:
                    assert await gateway.control.router.cancel_all("test") == 1
                running = await client
                texts.append((running.output.text, running.output.ids))
        assert texts[0] == texts[1]
        assert len(texts[0][1]) == 20

    run(main())


async def seeds_of(seed: int | None, *asked: tuple[str | None, int | None]) -> list[int | None]:
    """Those that the engine sees under a gateway with `seed`, of requests with a trajectory's name and a seed each."""
    async with front(seed=seed) as gateway:
        for name, own in asked:
            await gateway.complete("Once", name=name, seed=own, temperature=0.5)
        return [request.sampling.seed for request in gateway.engines[1].requests]


def test_a_seed_of_the_request_is_taken_as_it_is() -> None:
    given = [11, 0, -1, 2**63 - 1, -(2**63), 11]
    assert run(seeds_of(3, *(("c", seed) for seed in given))) == given


def test_every_turn_draws_anew_also_after_a_restart() -> None:
    asked = [("a", None)] * 6 + [(None, None)] * 6
    before, after = run(seeds_of(None, *asked)), run(seeds_of(None, *asked))
    assert len({*before, *after}) == 24
    assert all(seed is not None and 0 <= seed < 2**63 for seed in before)


def test_with_a_seed_for_the_gateway_the_same_turn_draws_the_same() -> None:
    asked = [("a", None)] * 6 + [("b", None)] * 6
    first, again, other = (run(seeds_of(seed, *asked)) for seed in (5, 5, 6))
    assert first == again
    assert len({*first, *other}) == 24
    # Who else asks, and when, changes nothing.
    assert run(seeds_of(5, *reversed(asked))) == first[6:] + first[:6]


def test_a_resend_keeps_the_seed_of_its_turn() -> None:
    async def main() -> None:
        async with front(token_s=1.0) as gateway:
            client = asyncio.create_task(gateway.complete("Once", max_tokens=20))
            await asyncio.sleep(6.5)
            assert await gateway.control.router.cancel_all("test") == 1
            await client
            first, second = (request.sampling.seed for request in gateway.engines[1].requests)
            assert first == second is not None

    run(main())


def test_a_prompt_that_fills_the_context_is_refused_and_changes_nothing() -> None:
    async def main() -> None:
        async with front() as gateway:
            with pytest.raises(ApiError, match="512") as caught:
                await gateway.complete([40] * 512, name="t")
            assert caught.value.code == "context_length_exceeded"
            assert gateway.notes.events == []
            assert len(gateway.trajectories) == 0
            running = await gateway.complete([40] * 510, name="t")
            assert len(running.output.ids) == 2, "the budget is cut to the room"
            assert running.task.result().finish is FinishReason.LENGTH

    run(main())


# What frameworks tell.


def test_a_framework_tells_what_it_knows() -> None:
    async def main() -> None:
        async with front(saying(CALL, "3")) as gateway:
            post = gateway.trajectories.post
            post({"event": "sampled", "trajectory": "t", "group": "g", "task": "coding", "prompt_tokens": 9})
            await asyncio.sleep(1.0)
            post({"event": "sandbox_starting", "trajectory": "t", "mode": "prewarmed", "image": "py"})
            await asyncio.sleep(1.0)
            await gateway.chat([QUESTION], name="t")
            assert gateway.state("t") is State.DECODE, "the tool is the framework's to tell"
            post({"event": "tool_started", "trajectory": "t", "tool": "pytest"})
            await asyncio.sleep(3.0)
            await gateway.complete("It came back", name="t")
            assert post({"event": "reward_started", "trajectory": "t"}).id == "t"
            post({"event": "done", "trajectory": "t", "reward": 0.5, "admitted": False})
            names = [type(event).__name__ for event in gateway.notes.events]
            assert names == [
                *("Sampled", "SandboxStarting", "Ready", "PrefillStarted", "DecodeStarted", "ToolStarted"),
                *("Ready", "PrefillStarted", "DecodeStarted", "RewardStarted", "Done"),
            ]
            sampled, done = gateway.notes.events[0], gateway.notes.events[-1]
            assert isinstance(sampled, Sampled)
            assert (sampled.group, sampled.task, sampled.prompt_tokens) == ("g", "coding", 9)
            assert isinstance(done, Done)
            assert (done.reward, done.admitted) == (0.5, False)
            tool = next(t for t in gateway.notes.transitions if t.before is State.TOOL)
            assert (tool.tool, tool.elapsed) == ("pytest", pytest.approx(3.0))

    run(main())


def test_a_framework_that_forgets_its_tool_is_helped() -> None:
    async def main() -> None:
        async with front() as gateway:
            gateway.trajectories.post({"event": "sampled", "trajectory": "t"})
            await gateway.complete("One", name="t")
            assert (await gateway.complete("Two", name="t")).number == 1

    run(main())


def test_the_end_may_be_told_of_a_trajectory_that_was_recognised() -> None:
    async def main() -> None:
        async with front() as gateway:
            running = await gateway.complete("One")
            gateway.trajectories.post({"event": "done", "trajectory": running.name, "reward": 1})
            assert gateway.state(running.trajectory) is State.DONE

    run(main())


@pytest.mark.parametrize("silence", ["sampled", "reward_started"])
def test_a_framework_that_falls_silent_ends_its_trajectory(silence: str) -> None:
    async def main() -> None:
        async with front(tool_timeout=9.0) as gateway:
            gateway.trajectories.post({"event": "sampled", "trajectory": "t"})
            if silence == "reward_started":
                await gateway.complete("One", name="t")
                gateway.trajectories.post({"event": "reward_started", "trajectory": "t"})
            await asyncio.sleep(8.9)
            assert gateway.state("t") in (State.SAMPLED, State.REWARD)
            await asyncio.sleep(0.2)
            assert gateway.state("t") is State.DROPPED

    run(main())


@pytest.mark.parametrize(
    ("before", "event", "status", "part"),
    [
        ([], {"event": "tool_started", "trajectory": "t", "tool": "x"}, 404, "post sampled first"),
        (["sampled"], {"event": "sampled", "trajectory": "t"}, 409, "sampled once"),
        (["sampled"], {"event": "tool_started", "trajectory": "t", "tool": "x"}, 409, "sampled, and tool_started"),
        (["sampled"], {"event": "done", "trajectory": "t"}, 409, "decode or tool or reward"),
        (["request"], {"event": "tool_started", "trajectory": "t", "tool": "x"}, 409, "posted sampled"),
        (["request"], {"event": "done", "trajectory": "t", "reward": "high"}, 400, "reward='high'"),
        ([], {"event": "sampled", "trajectory": "a b"}, 400, "trajectory='a b'"),
        (["sampled"], {"event": "sandbox_starting", "trajectory": "t", "mode": "hot"}, 400, "prewarmed or cold"),
        (["sampled"], {"event": "slept", "trajectory": "t"}, 400, "event='slept'"),
    ],
)
def test_what_a_framework_may_not_tell(before: list[str], event: dict[str, Any], status: int, part: str) -> None:
    async def main() -> None:
        async with front() as gateway:
            if "sampled" in before:
                gateway.trajectories.post({"event": "sampled", "trajectory": "t"})
            if "request" in before:
                await gateway.complete("One", name="t")
            known = len(gateway.notes.events)
            with pytest.raises(ApiError, match=part) as caught:
                gateway.trajectories.post(event)
            assert caught.value.status == status
            assert len(gateway.notes.events) == known

    run(main())


def test_nothing_may_be_told_while_a_request_is_in_service() -> None:
    async def main() -> None:
        async with front(token_s=1.0) as gateway:
            client = asyncio.create_task(gateway.complete("One", name="t"))
            await asyncio.sleep(2.0)
            with pytest.raises(ApiError, match="in service"):
                gateway.trajectories.post({"event": "done", "trajectory": "t"})
            await client

    run(main())
