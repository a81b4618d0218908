"""Every format that is read, by small recordings in its shape: their lengths, tools and times worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prorsa.config import ConfigError
from prorsa.lifecycle import read_trace
from prorsa.report.analysis import analyse
from prorsa.simulation.workloads.recordings import FORMATS, convert_files, read_recordings
from prorsa.simulation.workloads.recordings.events import kept_tokens
from prorsa.simulation.workloads.recordings.model import Trajectory, tokens_of
from prorsa.simulation.workloads.replay import read_workload

Json = dict[str, Any]


def write(path: Path, content: str | list[Json] | Json) -> Path:
    """Text as it is, an object as one document, a list as JSON lines."""
    if isinstance(content, dict):
        content = json.dumps(content, indent=1)
    elif isinstance(content, list):
        content = "".join(json.dumps(line) + "\n" for line in content)
    path.write_text(content)
    return path


def read(path: Path, name: str) -> list[Trajectory]:
    """As the format `name`, which it is recognised as; and what becomes of it can be described and played."""
    found, formats, _ = read_recordings([path])
    assert formats == (name,)
    target = path.parent / f"{path.name}.trace"
    done = convert_files([path], target)
    assert analyse(target).described.done == done.trajectories == len(found)
    assert sum(map(len, read_workload(target, 0, 1_000_000)._groups)) == len(found)
    assert len(list(read_trace(target))) == done.events
    return found


def lengths(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [(turn.prompt, turn.output) for turn in trajectory.turns]


def tools(trajectory: Trajectory) -> list[tuple[str | None, float | None]]:
    """Of every turn but the last."""
    return [(turn.tool, None if turn.tool_s is None else round(turn.tool_s, 6)) for turn in trajectory.turns[:-1]]


def guess(*texts: str) -> int:
    return sum(tokens_of(text, 4.0) for text in texts)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_recordings([path])
    return str(caught.value)


def test_every_format_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "recordings.md").read_text()
    assert [name for name in FORMATS if f"`{name}`" not in page] == []


# Requests.


def test_mooncake_rows_of_a_session_are_its_turns(tmp_path: Path) -> None:
    rows: list[Json] = [
        {"timestamp": 1000, "session_id": "s", "input_length": 1200, "output_length": 100, "hash_ids": [1, 2, 3]},
        {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [8, 9]},
        # It extends the first: its third block is another one, for more follows in it.
        {"timestamp": 9000, "session_id": "s", "input_length": 1400, "output_length": 10, "hash_ids": [1, 2, 4]},
        # Of this only the first block stays.
        {"delay": 2500, "session_id": "s", "input_length": 1500, "output_length": 10, "hash_ids": [1, 5, 6]},
    ]
    single, session = sorted(read(write(tmp_path / "r.jsonl", rows), "mooncake"), key=lambda one: str(one.name))
    assert (single.name, single.start, lengths(single)) == ("r2", 0.0, [(600, 7)])
    assert (session.name, session.start) == ("s", 1.0)
    assert lengths(session) == [(1200, 100), (1400, 10), (1500, 10)]
    assert [turn.kept for turn in session.turns] == [None, None, 512]
    assert session.turns[0].step_s == 8.0
    assert tools(session)[1] == ("delay", 2.5)


def test_mooncake_sessions_may_have_no_times_and_other_blocks(tmp_path: Path) -> None:
    rows: list[Json] = [
        {"session_id": 3, "input_length": 64, "output_length": 5, "hash_ids": [1, 2, 3, 4]},
        {"session_id": 3, "input_length": 96, "output_length": 5, "hash_ids": [1, 2, 7, 8, 9, 10]},
    ]
    [session] = read(write(tmp_path / "r.jsonl", rows), "mooncake")
    assert (session.name, session.start) == ("3", 0.0)
    assert [turn.kept for turn in session.turns] == [None, 32]


def test_azure_of_both_years(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        "2023-11-16 23:59:59.9000000,4808,10\r\n"
        "2023-11-17 00:00:01.15,3180,8\r\n"
        "2023-11-17 00:00:02,110,0\r\n"
        "2024-05-10 00:00:00.009930+00:00,2162,5\r\n"
        "2024-05-10 02:00:01.5+02:00,7,5\r\n"
    )
    found = read(write(tmp_path / "a.csv", text), "azure")
    assert [lengths(one)[0] for one in found] == [(4808, 10), (3180, 8), (110, 0), (2162, 5), (7, 5)]
    starts = [one.start - found[0].start for one in found]
    assert starts[1:3] == pytest.approx([1.25, 2.1], abs=1e-5)
    assert found[4].start - found[3].start == pytest.approx(1.49007, abs=1e-5)


def test_burstgpt_with_and_without_sessions(tmp_path: Path) -> None:
    plain = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.0,GPT-4,1087,0,1087,API log\n"
    )
    found = read(write(tmp_path / "b.csv", plain), "burstgpt")
    assert [(one.start, lengths(one)) for one in found] == [(5.0, [(472, 18)]), (45.0, [(1087, 0)])]
    sessions = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,7,2.5,ChatGPT,100,20,120,Conversation log\n"
        "6,,1.0,ChatGPT,50,5,55,API log\n"
        "65,7,1.5,ChatGPT,150,30,180,Conversation log\n"
    )
    api, session = read(write(tmp_path / "c.csv", sessions), "burstgpt")
    assert lengths(api) == [(50, 5)]
    assert lengths(session) == [(100, 20), (150, 30)]
    assert (session.turns[0].llm_s, session.turns[0].step_s, session.turns[0].tool) == (2.5, 60.0, "user")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: TIMESTAMP='noon': not a time"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-30 00:00:00,1,1\n", "line 2: TIMESTAMP='2023-02-30"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-03 00:00:00,1,\n", "line 2: GeneratedTokens is missing"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-02-03 00:00:00,1e18,1\n", "line 2: ContextTokens='1e18'"),
        ("Timestamp,Request tokens,Response tokens\n\n1,1,1\n1,0,1\n", "line 4: Request tokens='0'"),
        ("Timestamp,Request tokens,Response tokens\n1,1_000,1\n", "line 2: Request tokens='1_000'"),
    ],
)
def test_a_row_that_cannot_be_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(write(tmp_path / "r.csv", text))


# Conversations as text.


def test_sharegpt(tmp_path: Path) -> None:
    conversations = [
        {"id": "c1", "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 20}]},
        {"id": "c2", "conversations": []},
        {"id": "c3", "conversations": [{"from": "gpt", "value": "y" * 8}, {"from": "human", "value": "x" * 4}]},
        {
            "id": "c4",
            "conversations": [
                {"from": "system", "value": "s" * 12},
                {"from": "human", "value": "x" * 40},
                {"from": "gpt", "value": "y" * 20},
                {"from": "human", "value": "x" * 4},
                {"from": "gpt", "value": "y" * 8},
            ],
        },
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps(conversations, indent=2))
    first, fourth = read(path, "sharegpt")
    # A token is 4 characters, and each message has one around it.
    assert (first.name, lengths(first)) == ("c1", [(11, 6)])
    assert lengths(fourth) == [(4 + 11, 6), (15 + 6 + 2, 3)]
    assert list(kept_tokens(fourth.turns)) == [-1, -1]
    assert read_recordings([path], characters=2.0)[0][0].turns[0].prompt == 21
    assert convert_files([path], tmp_path / "trace").empty == 2


def test_swe_agent(tmp_path: Path) -> None:
    system, task = {"role": "system", "content": "s" * 8}, {"role": "user", "content": "t" * 16}
    steps = [
        {"response": "r" * 40, "action": "ls -la\n", "observation": "o" * 20, "execution_time": 0.25},
        {"response": "q" * 12, "action": "submit", "observation": "", "execution_time": 1.5},
    ]
    plain = {
        "environment": "e",
        "trajectory": steps,
        "history": [system, task, {"role": "assistant", "content": "r" * 40}],
    }
    [found] = read(write(tmp_path / "django__django-1.traj", plain), "swe-agent")
    assert (found.name, found.task) == ("django__django-1", "coding-agent")
    assert lengths(found) == [(3 + 5, 11), (8 + 11 + 6, 4)]
    assert tools(found) == [("ls", 0.25)]
    # A history processor has left out the answer before: what stays is what was sent.
    steps[0] |= {"query": [system, task]}
    steps[1] |= {"query": [system, task, {"role": "tool", "content": "left out"}]}
    [found] = read(write(tmp_path / "b.traj", plain), "swe-agent")
    assert lengths(found) == [(8, 11), (8 + 3, 4)]
    assert list(kept_tokens(found.turns)) == [-1, 8]


def mini(*counts: Json | None) -> Json:
    def response(usage: Json | None) -> Json:
        return {} if usage is None else {"response": {"usage": usage}}

    return {
        "trajectory_format": "mini-swe-agent-1.1",
        "info": {"model_stats": {"api_calls": 2}, "exit_status": "Submitted"},
        "messages": [
            {"role": "system", "content": "s" * 8, "extra": {"timestamp": 100.0}},
            {"role": "user", "content": "t" * 16, "extra": {"timestamp": 100.5}},
            {"role": "assistant", "content": "a" * 40, "extra": {"timestamp": 103.5} | response(counts[0])},
            {"role": "user", "content": "o" * 20, "extra": {"timestamp": 105.5}},
            {"role": "assistant", "content": "b" * 12, "extra": {"timestamp": 106.0} | response(counts[1])},
            {"role": "exit", "content": "", "extra": {"timestamp": 106.5}},
        ],
    }


def test_mini_swe_agent(tmp_path: Path) -> None:
    usages: list[Json] = [
        {"prompt_tokens": 1662, "completion_tokens": 106, "prompt_tokens_details": {"cached_tokens": 512}},
        {"prompt_tokens": 1710, "completion_tokens": 500, "prompt_tokens_details": {"cached_tokens": 1700}},
    ]
    [found] = read(write(tmp_path / "sympy__sympy-1.traj.json", mini(*usages)), "mini-swe-agent")
    assert (found.name, found.start) == ("sympy__sympy-1", 100.0)
    assert lengths(found) == [(1662, 106), (1710, 500)]
    # The template has dropped the reasoning: the second prompt is shorter than the context.
    assert list(kept_tokens(found.turns)) == [-1, 1700]
    assert [turn.llm_s for turn in found.turns] == [3.0, 0.5]
    assert tools(found) == [("bash", 2.0)]
    # Where one response has no counts all lengths are guesses.
    [found] = read(write(tmp_path / "b.traj.json", mini(usages[0], None)), "mini-swe-agent")
    assert lengths(found) == [(8, 11), (25, 4)]
    assert tools(found) == [("bash", 2.0)]


# Events.


def test_openhands_output_of_the_older_version(tmp_path: Path) -> None:
    def call(response: str, tool: str) -> Json:
        return {"function_name": tool, "model_response": {"id": response}}

    history = [
        {
            "id": 0,
            "timestamp": "2025-01-01T00:00:00",
            "source": "agent",
            "action": "system",
            "args": {"content": "s" * 8},
        },
        {
            "id": 1,
            "timestamp": "2025-01-01T00:00:01",
            "source": "user",
            "action": "message",
            "args": {"content": "fix"},
        },
        {"id": 2, "source": "agent", "action": "recall", "args": {}},
        {
            "id": 3,
            "timestamp": "2025-01-01T00:00:05.5",
            "source": "agent",
            "action": "run",
            "args": {"command": "ls"},
            "tool_call_metadata": call("r1", "execute_bash"),
        },
        {"id": 4, "timestamp": "2025-01-01T00:00:07.5", "source": "agent", "observation": "run", "content": "a b"},
        {
            "id": 5,
            "timestamp": "2025-01-01T00:00:10",
            "source": "agent",
            "action": "finish",
            "tool_call_metadata": call("r2", "finish"),
        },
    ]
    usages = [
        {"response_id": "r1", "prompt_tokens": 900, "completion_tokens": 40, "cache_read_tokens": 0},
        {"response_id": "r2", "prompt_tokens": 1000, "completion_tokens": 20, "cache_read_tokens": 900},
    ]
    line = {"instance_id": "i-1", "history": history, "metrics": {"token_usages": usages}, "report": {"resolved": True}}
    [found] = read(write(tmp_path / "output.jsonl", [line]), "openhands")
    assert (found.name, found.reward) == ("i-1", 1.0)
    assert lengths(found) == [(900, 40), (1000, 20)]
    assert [turn.llm_s for turn in found.turns] == [4.5, 2.5]
    assert tools(found) == [("execute_bash", 2.0)]
    # Without usage the lengths are guesses.
    [found] = read(write(tmp_path / "guessed.jsonl", [line | {"metrics": {}}]), "openhands")
    assert lengths(found)[0] == (guess("s" * 8, "fix"), guess("ls"))


def test_openhands_events_of_the_newer_version(tmp_path: Path) -> None:
    events: list[Json] = [
        {
            "kind": "SystemPromptEvent",
            "source": "agent",
            "system_prompt": {"text": "s" * 8},
            "timestamp": "2025-11-01T00:00:00",
        },
        {
            "kind": "MessageEvent",
            "source": "user",
            "llm_message": {"role": "user", "content": [{"type": "text", "text": "fix"}]},
            "timestamp": "2025-11-01T00:00:01",
        },
        {"kind": "ConversationStateUpdateEvent", "source": "environment", "key": "x", "value": 1},
        {
            "kind": "ActionEvent",
            "source": "agent",
            "tool_name": "terminal",
            "llm_response_id": "r1",
            "tool_call": {"arguments": "ls"},
            "timestamp": "2025-11-01T00:00:03",
        },
        {
            "kind": "ActionEvent",
            "source": "agent",
            "tool_name": "terminal",
            "llm_response_id": "r1",
            "tool_call": {"arguments": "pwd"},
            "timestamp": "2025-11-01T00:00:03",
        },
        {
            "kind": "ObservationEvent",
            "source": "environment",
            "observation": {"text": "a"},
            "timestamp": "2025-11-01T00:00:04",
        },
        {
            "kind": "ObservationEvent",
            "source": "environment",
            "observation": {"text": "b"},
            "timestamp": "2025-11-01T00:00:06",
        },
        {
            "kind": "MessageEvent",
            "source": "agent",
            "llm_message": {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
            "timestamp": "2025-11-01T00:00:07",
        },
    ]
    [found] = read(write(tmp_path / "run.jsonl", events), "openhands")
    assert found.name == "run"
    assert lengths(found)[0] == (guess("s" * 8, "userfix"), guess("ls"))
    # Two calls of one answer are one turn, whose tools end with the last.
    assert tools(found) == [("terminal", 3.0)]
    assert len(found.turns) == 2


def test_verifiers(tmp_path: Path) -> None:
    base: Json = {"prompt": [{"role": "user", "content": "x" * 16}], "task": "wordle", "timing": {"scoring_ms": 1500.0}}
    answer = {"role": "assistant", "content": "y" * 8}
    rows: list[Json] = [
        base
        | {
            "example_id": 0,
            "reward": 0.5,
            "completion": [answer, {"role": "tool", "content": "o" * 4}, answer],
            "token_usage": {"input_tokens": 30.0, "output_tokens": 9.0},
        },
        base
        | {
            "example_id": 0,
            "reward": 1.0,
            "completion": [answer],
            "token_usage": {"input_tokens": 17.0, "output_tokens": 9.0},
        },
        base
        | {
            "example_id": 1,
            "reward": 0.0,
            "completion": [answer],
            "trajectory": [
                {"tokens": {"prompt_ids": [1, 2, 3], "completion_ids": [4, 5]}},
                {"tokens": {"prompt_ids": [1, 2, 9, 9], "completion_ids": [4]}},
                {"tokens": {"prompt_ids": [1, 2, 9, 9, 4, 7], "completion_ids": [4]}},
            ],
        },
        {"example_id": 2, "prompt": None, "completion": None, "reward": 0.0, "error": {"error": "boom"}},
    ]
    two, one, exact = read(write(tmp_path / "results.jsonl", rows), "verifiers")
    assert (two.name, one.name, two.reward, two.reward_s, two.task) == ("0", "0", 0.5, 1.5, "wordle")
    assert lengths(two) == [(5, 3), (5 + 3 + 2, 3)]
    assert lengths(one) == [(17, 9)]
    assert lengths(exact) == [(3, 2), (4, 1), (6, 1)]
    assert list(kept_tokens(exact.turns)) == [-1, 2, -1]
    done = convert_files([tmp_path / "results.jsonl"], tmp_path / "trace")
    assert (done.trajectories, done.empty) == (3, 1)


def claude(kind: str, second: float, message: Json, **fields: Any) -> Json:
    return {
        "type": kind,
        "sessionId": "s-1",
        "isSidechain": False,
        "timestamp": f"2026-01-01T00:00:{second:06.3f}Z",
        "message": message,
    } | fields


def usage(new: int, written: int, read: int, output: int) -> Json:
    return {
        "input_tokens": new,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": output,
    }


def test_claude_code(tmp_path: Path) -> None:
    def said(name: str, counts: Json, *content: Json, model: str = "claude") -> Json:
        return {"id": name, "role": "assistant", "model": model, "content": list(content), "usage": counts}

    bash, task = ({"type": "tool_use", "name": tool, "input": {}} for tool in ("Bash", "Task"))
    text = {"type": "text", "text": "done"}
    side = {"isSidechain": True}
    session = [
        {"type": "summary", "summary": "what it was about", "leafUuid": "u"},
        claude("user", 0, {"role": "user", "content": "fix it"}),
        claude("assistant", 2, said("m1", usage(10, 990, 0, 1), text)),
        claude("assistant", 3, said("m1", usage(10, 990, 0, 60), bash)),
        claude("user", 4.5, {"role": "user", "content": [{"type": "tool_result"}]}),
        claude("assistant", 6, said("m2", usage(5, 100, 1000, 40), task)),
        claude("user", 6.5, {"role": "user", "content": "look"}, uuid="a", parentUuid=None, **side),
        claude("assistant", 8, said("m3", usage(3, 397, 0, 20), text), uuid="b", parentUuid="a", **side),
        claude("user", 9, {"role": "user", "content": [{"type": "tool_result"}]}),
        claude("assistant", 9.5, said("e1", usage(0, 0, 0, 0), text, model="<synthetic>")),
        # Compacted: 300 tokens of the context were still cached.
        claude("assistant", 11, said("m4", usage(0, 200, 300, 15), text)),
        claude("user", 50, {"role": "user", "content": "thanks"}),
        claude("assistant", 51, said("m5", usage(0, 20, 515, 5), text)),
    ]
    main, agent = read(write(tmp_path / "s-1.jsonl", session), "claude-code")
    assert (main.name, agent.name) == ("s-1", "s-1/a")
    assert lengths(main) == [(1000, 60), (1105, 40), (500, 15), (535, 5)]
    assert list(kept_tokens(main.turns)) == [-1, -1, 300, -1]
    assert [turn.llm_s for turn in main.turns] == [3.0, 1.5, 2.0, 1.0]
    # A human's pause is nobody's tool time.
    assert tools(main) == [("Bash", 1.5), ("Task", 3.0), ("user", None)]
    assert lengths(agent) == [(400, 20)]
    assert agent.start - main.start == 6.5
    broken = [*session, claude("assistant", 52, {"id": "m6", "role": "assistant", "content": []})]
    path = write(tmp_path / "broken.jsonl", broken)
    assert f"{path}, line {len(broken)}: message.usage is missing" in refusal(path)


def span(name: str, start: float, end: float, parent: str = "", status: int = 0, **attributes: Any) -> Json:
    def value(one: Any) -> Json:
        return {"intValue": str(one)} if isinstance(one, int) else {"stringValue": one}

    return {
        "traceId": "t",
        "spanId": name,
        "parentSpanId": parent,
        "startTimeUnixNano": str(int(start * 1e9)),
        "endTimeUnixNano": str(int(end * 1e9)),
        "status": {"code": status},
        "attributes": [{"key": key.replace("__", "."), "value": value(one)} for key, one in attributes.items()],
    }


def otlp(*spans: Json) -> Json:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {"name": "x"}, "spans": list(spans)}]}]}


def model(name: str, start: float, end: float, prompt: int, output: int, parent: str = "", **more: Any) -> Json:
    counts = {"gen_ai__usage__input_tokens": prompt, "gen_ai__usage__output_tokens": output}
    return span(name, start, end, parent, gen_ai__operation__name="chat", **counts, **more)


def test_open_telemetry(tmp_path: Path) -> None:
    first = otlp(
        model("c2", 5.0, 6.0, 80, 5, "agent", gen_ai__usage__cache_read__input_tokens=64),
        span("tool", 2.0, 4.5, "agent", gen_ai__operation__name="execute_tool", gen_ai__tool__name="search"),
        # The agent's own span counts the tokens of all its calls: it is no call.
        span("agent", 0.5, 6.5, gen_ai__operation__name="invoke_agent", gen_ai__usage__input_tokens=180),
        model("c1", 1.0, 2.0, 100, 10, "agent"),
        span("http", 1.0, 2.0, "c1"),
        span("failed", 2.0, 2.1, "agent", 2, gen_ai__operation__name="chat"),
    )
    second = otlp(model("d1", 3.0, 4.0, 7, 3, gen_ai__conversation__id="talk"))
    agent, talk = read(write(tmp_path / "spans.jsonl", [first, second]), "otel")
    assert (agent.name, talk.name) == ("agent", "talk")
    assert lengths(agent) == [(100, 10), (80, 5)]
    assert list(kept_tokens(agent.turns)) == [-1, 64]
    assert [turn.llm_s for turn in agent.turns] == [1.0, 1.0]
    assert tools(agent) == [("search", 3.0)]
    assert talk.start - agent.start == 2.0


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([span("c", 0, 1, gen_ai__operation__name="chat")], "span c: gen_ai.usage.input_tokens or gen_ai.usage.output"),
        ([model("c", 0, 1, 0, 5)], "span c: gen_ai.usage.input_tokens=0: a prompt has a token at least"),
        ([model("c", 0, 1, 10**12, 5)], "span c: gen_ai.usage.input_tokens='1000000000000': not a number of tokens"),
        ([span("c", 0, 1) | {"startTimeUnixNano": "soon"}], "span c: startTimeUnixNano='soon': not a time"),
        ([span("", 0, 1)], "spanId is missing"),
    ],
)
def test_a_span_that_cannot_be_is_refused(tmp_path: Path, spans: list[Json], message: str) -> None:
    path = write(tmp_path / "spans.json", otlp(*spans))
    assert f"{path}" in refusal(path)
    assert message in refusal(path)


# Whatever stands where a value should.

SAMPLES: dict[str, list[Json]] = {
    "turns": [
        {"id": 1, "turns": [{"prompt_tokens": 4, "output_tokens": 2, "tool": {"name": "a", "duration_s": 1}}] * 2}
    ],
    "mooncake": [
        {"timestamp": 1, "session_id": "s", "input_length": 9, "output_length": 2, "hash_ids": [1], "delay": 3}
    ]
    * 2,
    "requests": [{"ts": "2026-01-01 00:00:00.5", "in": 4, "out": 2}] * 2,
    "azure": [{"TIMESTAMP": "2026-01-01 00:00:00.5", "ContextTokens": 4, "GeneratedTokens": 2}] * 2,
    "burstgpt": [{"Timestamp": 1, "Session ID": 1, "Elapsed time": 2, "Request tokens": 4, "Response tokens": 2}] * 2,
    "claude-code": [
        claude("user", 0, {"role": "user", "content": "x"}, isSidechain=True, uuid="a", parentUuid=None),
        claude(
            "assistant",
            1,
            {"id": "m", "model": "c", "content": [{"type": "tool_use", "name": "t"}], "usage": usage(1, 2, 3, 4)},
            isSidechain=True,
            uuid="b",
            parentUuid="a",
        ),
        claude("assistant", 2, {"id": "n", "model": "c", "content": [], "usage": usage(1, 0, 0, 4)}),
    ],
    "otel": [
        otlp(
            span("agent", 0, 3, gen_ai__operation__name="invoke_agent"),
            model("a", 0, 1, 9, 2, "agent"),
            span("t", 1, 2, "agent", gen_ai__operation__name="execute_tool", gen_ai__tool__name="x"),
            model("b", 2, 3, 5, 2, "agent", gen_ai__usage__cache_read__input_tokens=4),
        )
    ],
    "verifiers": [
        {
            "example_id": 1,
            "task": "t",
            "prompt": [{"role": "user", "content": "x"}],
            "completion": [{"role": "assistant", "content": "y", "tool_calls": [{"function": {"name": "f"}}]}],
            "reward": 1.0,
            "timing": {"scoring_ms": 3.0},
            "token_usage": {"input_tokens": 3.0, "output_tokens": 4.0},
            "trajectory": [
                {"tokens": {"prompt_ids": [1, 2], "completion_ids": [3]}, "completion": [{"role": "assistant"}]},
                {"response": {"usage": {"prompt_tokens": 4, "completion_tokens": 2}}},
            ],
        }
    ],
    "mini-swe-agent": [
        mini(
            *[
                {"prompt_tokens": n, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
                for n in (9, 8)
            ]
        )
    ],
    "swe-agent": [
        {
            "history": [{"role": "system", "content": "s"}],
            "trajectory": [
                {"response": "r", "action": "a b", "observation": "o", "execution_time": 1, "query": [{"role": "u"}]}
            ]
            * 2,
        }
    ],
    "openhands": [
        {
            "instance_id": "i",
            "history": [
                {"kind": "SystemPromptEvent", "source": "agent", "system_prompt": {"text": "s"}, "timestamp": 1},
                {"kind": "ActionEvent", "source": "agent", "tool_name": "t", "llm_response_id": "r", "timestamp": 2},
                {"source": "agent", "action": "run", "args": {}, "tool_call_metadata": {"model_response": {"id": "q"}}},
            ],
            "metrics": {"token_usages": [{"response_id": r, "prompt_tokens": 5, "completion_tokens": 2} for r in "rq"]},
            "report": {"resolved": True},
        }
    ],
    "sharegpt": [{"id": "c", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]}],
}
JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    1e300,
    float("nan"),
    10**18,
    2.5,
    "",
    "x",
    "\ud83d\x1b\n",
    [],
    {},
    [1],
    [None],
    {"a": 1},
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def replaced(value: Any, path: tuple[Any, ...], junk: Any) -> Any:
    if not path:
        return junk
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], junk)
    return copy


def test_samples_are_of_all_formats(tmp_path: Path) -> None:
    assert SAMPLES.keys() == FORMATS.keys()
    for name, records in SAMPLES.items():
        read(write(tmp_path / name, records), name)


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_junk_in_any_place_is_read_over_or_refused(tmp_path: Path, name: str, asked: bool) -> None:
    records = SAMPLES[name]
    path = tmp_path / "recording"
    for place in places(records):
        if not place:
            continue
        for junk in JUNK:
            path.write_text("".join(json.dumps(line) + "\n" for line in replaced(records, place, junk)))
            try:
                found, _, _ = read_recordings([path], name if asked else None)
            except ConfigError as error:
                problem = str(error)
            else:
                for trajectory in found:
                    assert all(0 < turn.prompt <= 10**9 and 0 <= turn.output <= 10**9 for turn in trajectory.turns)
                    assert all((turn.tool_s or 0) >= 0 and (turn.llm_s or 0) >= 0 for turn in trajectory.turns)
                continue
            assert problem.startswith(str(path)), (place, junk)
            assert problem.isprintable(), (place, junk)
