"""An environment for verifiers, and its rollouts: verifiers_program.py URL TASKS. Prints every trace as JSON.

verifiers loads the questions and the agent from this module by its name.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable

import verifiers.v1 as vf
from openai import AsyncOpenAI
from openai_agent import MODEL_NAME, TASK, converse
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Agent", "Questions"]

NAME = "verifiers_program"


class Question(vf.TaskData):
    number: int


class Arithmetic(vf.Task[Question]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        question = TASK.questions("test", self.data.number + 1, 0)[self.data.number]
        return TASK.reward(question, trace.last_reply)


class Questions(vf.Taskset[Arithmetic]):
    def load(self) -> Iterable[Arithmetic]:
        for number in range(16):
            system, user = TASK.questions("test", number + 1, 0)[number].messages
            yield Arithmetic(Question(number=number, system_prompt=system["content"], prompt=user["content"]))


class Agent(vf.Harness[vf.HarnessConfig]):
    """Runs in this process: verifiers stands between it and the model, and writes down what passes."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):  # type: ignore[no-untyped-def]
        messages = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await converse(client, messages, stream=False)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def main(url: str, tasks: int) -> None:
    endpoint = vf.EvalClientConfig(base_url=url + "/v1", api_key_var="NO_KEY")
    agent = {"harness": {"id": NAME}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": NAME}, agent=agent))
    context = vf.ModelContext(MODEL_NAME, endpoint, vf.Sampling(temperature=0.0))
    async with env.serving():
        slots = [slot for task in env.taskset.take(tasks) for slot in env.slots(task)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context) for slot in slots))
    print(json.dumps([_plain(trace) for episode in episodes for trace in episode.traces]))


def _plain(trace: vf.Trace) -> dict[str, object]:
    return {
        "errors": [error.message for error in trace.errors],
        "reward": trace.reward,
        "turns": trace.num_turns,
        "said": [message_to_wire(message) for message in trace.assistant_messages],
    }


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
