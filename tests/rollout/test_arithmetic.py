"""The arithmetic task: what counts as right, which questions exist, and which tool calls are understood."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorsa.rollout.tasks.arithmetic import ArithmeticTask, Problem, Step, conversation, worded_problems
from prorsa.rollout.tasks.base import Question, ToolCall

TASK = ArithmeticTask()
QUESTION = Question("q", conversation("Compute 37 * 48. Then add 512. Then multiply by 3."), "6864")


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("The answer is 6864.", 1.0),
        ("The answer is 6864", 1.0),
        ("Answer: 6864\n", 1.0),
        ("The answer is 1776. No, the answer is 6864.", 1.0),
        ("The answer is 6864. No, the answer is 1776.", 0.0),
        ("The answer is 68640.", 0.0),
        ("The answer is 6864.5.", 0.0),
        ("The answer is 6,864.", 0.0),
        ("The answer is -6864.", 0.0),
        ("The answer is 06864.", 0.0),
        ("6864", 0.0),
        ("The answer is", 0.0),
        ("The answer is 6864. That is my answer.", 0.0),
        ("The answer is, after a long time of thought, 6864.", 0.0),
        ("The answer is ٦٨٦٤.", 0.0),
        ("The answer is 6864-1.", 0.0),
        ("The answer is 6864 - that is all.", 1.0),
        ("", 0.0),
    ],
)
def test_reward_of_a_final_text(text: str, reward: float) -> None:
    assert TASK.reward(QUESTION, text) == reward


def test_reward_of_a_negative_truth() -> None:
    question = Question("q", conversation("Compute 3 - 5."), "-2")
    assert TASK.reward(question, "The answer is -2.") == 1.0
    assert TASK.reward(question, "The answer is 2.") == 0.0


@given(st.lists(st.sampled_from(["answer", "The ", " is ", "6864", "-", ".", ",", "\n", "1"])).map("".join))
def test_reward_asks_for_the_truth_in_plain_digits_after_the_last_keyword(text: str) -> None:
    _, keyword, rest = text.rpartition("answer")
    numbers = re.findall(r"[\d.,-]*\d[\d.,]*", rest)
    if TASK.reward(QUESTION, text):
        assert keyword
        assert numbers[0].strip(".,") == "6864"
    elif keyword:
        assert not re.fullmatch(r" is 6864\.?", rest)


def test_every_operation_means_what_its_words_say() -> None:
    problem = Problem(
        37,
        (
            Step("multiply", 48),
            Step("add", 512),
            Step("subtract", 2200),
            Step("subtract_from", 100),
            Step("multiply", 3),
        ),
    )
    # 37 * 48 = 1776; + 512 = 2288; - 2200 = 88; 100 - 88 = 12; * 3 = 36
    assert problem.answer == 36


def test_truth_follows_from_the_words() -> None:
    """An independent reading of the question's sentences gives the answer that it carries."""
    for question in TASK.questions("train", 500, 3):
        assert str(_solve(question.messages[-1]["content"])) == question.answer


def _solve(text: str) -> int:
    first, *rest = [sentence.strip() for sentence in re.split(r"[.?]", text) if sentence.strip()]
    value = _read_first(first.lower())
    for sentence in rest:
        (number,) = map(int, re.findall(r"\d+", sentence))
        words = sentence.lower()
        if "that from" in words or "that away from" in words:
            value = number - value
        elif "subtract" in words or "away" in words:
            value -= number
        elif "add" in words:
            value += number
        else:
            assert "multiply" in words
            value *= number
    return value


def _read_first(words: str) -> int:
    a, b = map(int, re.findall(r"\d+", words))
    if re.search(r"\+|add|plus", words):
        return a + b
    if re.search(r"\*|multiply|times", words):
        return a * b
    assert re.search(r" - |minus|subtract|away", words)
    return b - a if words.startswith(("subtract", "take")) else a - b


def test_questions_are_deterministic_and_a_longer_list_begins_with_the_shorter() -> None:
    assert TASK.questions("train", 20, 7) == TASK.questions("train", 50, 7)[:20]
    assert TASK.questions("train", 20, 7) != TASK.questions("train", 20, 8)


def test_splits_share_no_problem_over_any_seeds() -> None:
    drawn: dict[str, set[Problem]] = {"train": set(), "test": set()}
    for split in ("train", "test"):
        for seed in range(5):
            problems = worded_problems(split, seed)
            drawn[split] |= {next(problems)[0] for _ in range(1000)}
    assert len(drawn["train"]) > 4000
    assert not drawn["train"] & drawn["test"]


def test_a_list_repeats_no_question_and_uses_every_number_of_steps() -> None:
    problems = worded_problems("test", 0)
    drawn = [next(problems)[0] for _ in range(1000)]
    assert len(set(drawn)) == 1000
    by_steps = [sum(len(problem.steps) == steps for problem in drawn) for steps in range(1, 5)]
    assert sum(by_steps) == 1000
    assert min(by_steps) > 150
    assert len({question.id for question in TASK.questions("test", 1000, 0)}) == 1000


def test_intermediate_results_stay_within_bounds() -> None:
    problems = worded_problems("train", 1)
    for _ in range(1000):
        problem, _text = next(problems)
        value = problem.start
        for step in problem.steps:
            value = step.apply(value)
            assert 0 <= value <= 999_999


def test_a_call_is_read_from_the_text_of_a_turn() -> None:
    text = 'First.\n<tool_call>\n{"name": "python", "arguments": {"code": "print(37*48)"}}\n</tool_call>'
    assert TASK.parse_tool_call(text) == ToolCall("python", {"code": "print(37*48)"})


def test_a_malformed_call_is_passed_over() -> None:
    good = '<tool_call>{"name": "python", "arguments": {}}</tool_call>'
    assert TASK.parse_tool_call("<tool_call>{oops}</tool_call>" + good) == ToolCall("python", {})


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "null",
        "[1]",
        '"python"',
        '{"name": "python", "code": "1"}',
        '{"name": 3, "arguments": {}}',
        '{"name": "python", "arguments": "{}"}',
        "[" * 100_000,
        '{"name": "python", "arguments": {"n": ' + "9" * 5000 + "}}",
    ],
    ids=lambda body: body[:24],
)
def test_malformed_calls_are_none(body: str) -> None:
    assert TASK.parse_tool_call(f"<tool_call>{body}</tool_call>") is None


def test_a_call_may_end_with_the_turn() -> None:
    assert TASK.parse_tool_call('<tool_call>\n{"name": "python", "arguments": {}}') == ToolCall("python", {})
    assert TASK.parse_tool_call('<tool_call>\n{"name": "python", "arguments": {}') is None


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "python", ', '"arguments": {}}', "}", "\n", "\x00"])
    )
)
def test_parsing_takes_any_text(pieces: list[str]) -> None:
    call = TASK.parse_tool_call("".join(pieces))
    assert call is None or call == ToolCall("python", {})
