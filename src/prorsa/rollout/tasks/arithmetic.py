"""Arithmetic in words, solved step by step with a Python tool.

A question is a chain of one to four steps over whole numbers, such as "Compute 37 * 48. Then add 512. Then multiply by 3.":
one tool call a step, each on the result of the one before. Every right intermediate result is between 0 and 999,999.
A chain belongs to the split that its hash names, however it is worded, so the splits cannot meet.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, get_args

from prorsa.rollout.tasks import base
from prorsa.rollout.tasks.base import Message, Question, Split, ToolCall

Operation = Literal["add", "subtract", "subtract_from", "multiply"]

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
MOST_STEPS = 4
LARGEST_RESULT = 999_999
SYSTEM_PROMPT = "Solve one step at a time with the tool. Then say: The answer is N."
PYTHON_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run code and return what it prints.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}

_FIRST: dict[Operation, tuple[str, ...]] = {
    "add": ("Compute {a} + {b}.", "Add {b} to {a}.", "What is {a} plus {b}?"),
    "subtract": ("Compute {a} - {b}.", "From {a}, subtract {b}.", "What is {a} minus {b}?"),
    "subtract_from": ("Subtract {a} from {b}.", "Take {a} away from {b}."),
    "multiply": ("Compute {a} * {b}.", "Multiply {a} by {b}.", "What is {a} times {b}?"),
}
_NEXT: dict[Operation, tuple[str, ...]] = {
    "add": ("Then add {b}.", "Add {b} to that."),
    "subtract": ("Then subtract {b}.", "Take {b} away from that."),
    "subtract_from": ("Then subtract that from {b}.", "Take that away from {b}."),
    "multiply": ("Then multiply by {b}.", "Multiply that by {b}."),
}
_ANSWER = re.compile(r"answer[^\d\n-]{0,16}(-?\d[\d.,]*+)(?![\d.,-]*\d)")


@dataclass(frozen=True, slots=True)
class Step:
    operation: Operation
    number: int

    def expression(self, value: int | str) -> str:
        """The Python expression of this step applied to `value`, a number or an expression in brackets."""
        match self.operation:
            case "add":
                return f"{value}+{self.number}"
            case "subtract":
                return f"{value}-{self.number}"
            case "subtract_from":
                return f"{self.number}-{value}"
            case "multiply":
                return f"{value}*{self.number}"

    def apply(self, value: int) -> int:
        match self.operation:
            case "add":
                return value + self.number
            case "subtract":
                return value - self.number
            case "subtract_from":
                return self.number - value
            case "multiply":
                return value * self.number


@dataclass(frozen=True, slots=True)
class Problem:
    start: int
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        value = self.start
        for step in self.steps:
            value = step.apply(value)
        return value

    @property
    def split(self) -> Split:
        expression = str(self.start)
        for step in self.steps:
            expression = f"({step.expression(expression)})"
        return "test" if hashlib.sha256(expression.encode()).digest()[0] % 2 else "train"


class ArithmeticTask:
    """Implements `Task`."""

    name = "arithmetic"
    tools = (PYTHON_TOOL,)

    def questions(self, split: Split, n: int, seed: int) -> list[Question]:
        problems = worded_problems(split, seed)
        return [
            Question(f"{self.name}-{split}-{seed}-{index}", conversation(text), str(problem.answer))
            for index, (problem, text) in enumerate(islice(problems, n))
        ]

    def reward(self, question: Question, final_text: str) -> float:
        """1.0 if the number after the last "answer" is the truth, in plain digits; 0.0 for whatever else."""
        _, keyword, rest = final_text.lower().rpartition("answer")
        number = _ANSWER.match(keyword + rest)
        return float(number is not None and number[1].rstrip(".,") == question.answer)

    def parse_tool_call(self, text: str) -> ToolCall | None:
        return base.parse_tool_call(text)


def conversation(text: str) -> tuple[Message, ...]:
    return {"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}


def worded_problems(split: Split, seed: int) -> Iterator[tuple[Problem, str]]:
    """The endless sequence of a split's distinct problems for a seed, each with its wording."""
    rng = random.Random(f"{split} {seed}")
    seen: set[Problem] = set()
    while True:
        problem = _draw_problem(rng)
        if problem.split == split and problem not in seen:
            seen.add(problem)
            yield problem, _word(problem, rng)


def _draw_problem(rng: random.Random) -> Problem:
    value = start = _draw_number(rng)
    steps: list[Step] = []
    for _ in range(rng.randint(1, MOST_STEPS)):
        step = _draw_step(value, rng)
        value = step.apply(value)
        steps.append(step)
    return Problem(start, tuple(steps))


def _draw_step(value: int, rng: random.Random) -> Step:
    while True:
        step = Step(rng.choice(OPERATIONS), _draw_number(rng))
        if 0 <= step.apply(value) <= LARGEST_RESULT:
            return step


def _draw_number(rng: random.Random) -> int:
    """One to three digits, each length equally likely; never 0 or 1, which make a step vanish."""
    digits = rng.randint(1, 3)
    return rng.randint(max(2, 10 ** (digits - 1)), 10**digits - 1)


def _word(problem: Problem, rng: random.Random) -> str:
    first, *rest = problem.steps
    sentences = [rng.choice(_FIRST[first.operation]).format(a=problem.start, b=first.number)]
    sentences += [rng.choice(_NEXT[step.operation]).format(b=step.number) for step in rest]
    return " ".join(sentences)
