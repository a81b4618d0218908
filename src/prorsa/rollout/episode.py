"""One trajectory from its sampling to its end: sandbox, model turns, tool calls, reward.

Every step is a lifecycle event. The episode records the steps that it takes itself; between its call of `generate` and
the answer, the router records those of the request (READY, PREFILL, DECODE), and when `generate` returns the trajectory is
in DECODE. Whatever happens, an episode that recorded `Sampled` records exactly one end, `Done` or `Dropped`, and its
sandbox is gone. It knows the cluster by two calls only, so it runs beside the control plane or in another process.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from prorsa.cluster.turns import TurnFailed, TurnRequest, TurnResult
from prorsa.engines.protocol import FinishReason, SamplingParams
from prorsa.lifecycle import events
from prorsa.rollout.records import TrajectoryRecord, Transcript
from prorsa.rollout.resume import CANCELLED
from prorsa.rollout.rewards.base import Reward
from prorsa.rollout.sandboxes.base import Sandbox, SandboxError, Sandboxes
from prorsa.rollout.tasks.base import Message, Question, Task, ToolCall
from prorsa.rollout.toolcalls import OPEN
from prorsa.rollout.tools.base import Tool

log = logging.getLogger(__name__)

MALFORMED = 'Error: malformed tool call. It must be JSON with "name" and "arguments" between the tool_call tags.'
"""The answer to a turn with the tag of a call, but no call that the task understands."""
NO_TOOL = "invalid"
"""The tool of `ToolStarted` for a call that names none: the names that models make up stay out of the statistics."""
CUT = " [cut]"
"""At the end of a tool result that did not fit."""


class Ports(Protocol):
    """The cluster, as an episode sees it."""

    async def record(self, event: events.Event) -> None: ...

    async def generate(self, request: TurnRequest) -> TurnResult:
        """Raises `TurnFailed`."""
        ...


class Tokenizer(Protocol):
    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a turn, the chat template's end-of-turn token first."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def tool_turn(self, result_text: str) -> Sequence[int]:
        """The ids between a turn's end-of-turn token and the first token of the next assistant turn."""
        ...


@dataclass(frozen=True, slots=True)
class Launch:
    """The decision to sample one trajectory."""

    trajectory: str
    group: str
    question: Question
    version: int
    """Weights version at that moment."""
    seed: int
    """For every turn: a token depends on the context, the seed and its position, so a replay samples the same ones."""


@dataclass(frozen=True, slots=True)
class Bounds:
    sampling: SamplingParams
    """`max_new_tokens` for one turn. The stop tokens and the seed are the episode's."""
    max_turns: int
    """Model turns; at least 1."""
    max_context: int
    """Longest prompt plus output, tokens."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the episodes of a rollout have in common."""

    task: Task
    tokenizer: Tokenizer
    sandboxes: Sandboxes
    tools: Mapping[str, Tool]
    """By name."""
    reward: Reward
    bounds: Bounds
    transcript: Callable[[Sequence[int]], Transcript] = Transcript
    """What keeps a trajectory's tokens while it runs."""


class NoRoom(Exception):
    """The first prompt alone fills the context."""


class BadReward(Exception):
    """A reward that nothing can be trained on; the message names the task, the question and the value."""


class Episode:
    def __init__(
        self,
        launch: Launch,
        environment: Environment,
        ports: Ports,
        ended: Callable[[TrajectoryRecord], None] = lambda _: None,
    ) -> None:
        """`ended` is given the record of the trajectory just before its last event is recorded: once the trace says that it
        has ended, what it has left is kept."""
        self.launch = launch
        self._ended = ended
        self._environment = environment
        self._ports = ports
        self._transcript = environment.transcript(())
        self._sampling = replace(
            environment.bounds.sampling, stop_token_ids=environment.tokenizer.eos_ids, seed=launch.seed
        )
        self._last: events.Event | None = None
        """The last step that was handed to `record`; no trajectory exists before there is one."""
        self._recorded = True
        """Whether `record` took it."""
        self._task: asyncio.Task[Any] | None = None
        self._drop_reason: str | None = None

    async def run(self) -> TrajectoryRecord:
        """Play to the end. Failures end in a dropped record; so does `drop`.

        A cancellation from outside is recorded as a drop too, and raised. What `record` raises is raised.
        """
        self._task = asyncio.current_task()
        assert self._task is not None
        try:
            if self._drop_reason is None:
                await self._play()
        except asyncio.CancelledError:
            asked = self._drop_reason is not None
            await self._drop(self._drop_reason or CANCELLED)
            if not asked or self._task.uncancel() > 0:
                raise
        except (TurnFailed, SandboxError, NoRoom, BadReward) as error:
            await self._drop(str(error))
        except Exception as error:
            if not self._recorded:
                raise
            log.exception("trajectory %s failed", self.launch.trajectory)
            await self._drop(f"{type(error).__name__}: {error}")
        finally:
            self._task = None
        return self._result()

    def drop(self, reason: str) -> None:
        """End it now: `run` returns a record that was dropped for `reason`, unless it has ended already."""
        if self._drop_reason is None:
            self._drop_reason = reason
            if self._task is not None:
                self._task.cancel()

    async def _play(self) -> None:
        launch = self.launch
        task = self._environment.task
        prompt = self._environment.tokenizer.render(launch.question.messages, task.tools, True)
        self._transcript = self._environment.transcript(prompt)
        prompt_tokens = len(self._transcript)
        await self._record(events.Sampled(*self._stamp(), launch.group, task.name, launch.version, prompt_tokens))
        async with self._environment.sandboxes.sandbox() as sandbox:
            starting = events.SandboxStarting(*self._stamp(), sandbox.mode, sandbox.image, sandbox.node_class)
            await self._record(starting)
            await sandbox.start()
            text = await self._converse(sandbox)
            await self._record(events.RewardStarted(*self._stamp(), len(self._transcript)))
            reward = checked(await self._environment.reward.score(launch.question, text), task.name, launch.question)
            await self._record(events.Done(*self._stamp(), reward, admitted=True))

    async def _converse(self, sandbox: Sandbox) -> str:
        """Model turns and tool calls; the text of the last model turn."""
        while True:
            text, stopped = await self._take_turn()
            call = self._environment.task.parse_tool_call(text)
            wants_tool = call is not None or OPEN in text
            if not (wants_tool and stopped and self._transcript.turns < self._environment.bounds.max_turns):
                return text
            room = self._room_for_tool_turn()
            if room is None:
                return text
            await self._use_tool(call, sandbox, room)

    async def _take_turn(self) -> tuple[str, bool]:
        """One model turn: its text, and whether it ended as the chat template ends one."""
        bounds, tokenizer = self._environment.bounds, self._environment.tokenizer
        room = bounds.max_context - len(self._transcript)
        if room < 1:
            raise NoRoom(f"the prompt has {len(self._transcript)} tokens, max_context is {bounds.max_context}")
        sampling = self._sampling
        if room < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=room)
        transcript = self._transcript
        request = TurnRequest(
            self.launch.trajectory, transcript.turns, transcript.context, sampling, kept=transcript.kept
        )
        result = await self._ports.generate(request)
        transcript.add_turn(result)
        stopped = result.finish is FinishReason.STOP and result.token_ids[-1:] == tokenizer.eos_ids[:1]
        return tokenizer.decode(result.token_ids), stopped

    def _room_for_tool_turn(self) -> int | None:
        """Tokens that a tool turn may take: half of what is left, for the answer needs room too. None: not even an
        empty one fits."""
        left = self._environment.bounds.max_context - len(self._transcript)
        least = len(self._environment.tokenizer.tool_turn(""))
        return max(least, left // 2) if least < left else None

    async def _use_tool(self, call: ToolCall | None, sandbox: Sandbox, room: int) -> None:
        tool = self._environment.tools.get(call.name) if call is not None else None
        name = tool.name if tool is not None else NO_TOOL
        await self._record(events.ToolStarted(*self._stamp(), name, len(self._transcript)))
        if call is None:
            result = MALFORMED
        elif tool is None:
            result = f"Error: there is no tool {call.name!r}. Tools: {', '.join(self._environment.tools)}."
        else:
            result = await tool.use(call.arguments, sandbox)
        self._transcript.add_tool_turn(fit_tool_turn(self._environment.tokenizer, result, room))

    def _stamp(self) -> tuple[float, str]:
        return asyncio.get_running_loop().time(), self.launch.trajectory

    async def _record(self, event: events.Event) -> None:
        # Noted before the call: a cancellation that meets it comes too late to undo it.
        self._last, self._recorded = event, False
        if isinstance(event, events.Done):
            self._ended(self._result())
        await self._ports.record(event)
        self._recorded = True

    async def _drop(self, reason: str) -> None:
        self._drop_reason = reason
        if self._last is not None and not isinstance(self._last, events.Done):
            self._ended(self._result())
            await asyncio.shield(self._ports.record(events.Dropped(*self._stamp(), reason)))

    def _result(self) -> TrajectoryRecord:
        launch, transcript, last = self.launch, self._transcript, self._last
        return TrajectoryRecord(
            trajectory=launch.trajectory,
            group=launch.group,
            question=launch.question.id,
            version=launch.version,
            seed=launch.seed,
            prompt_ids=transcript.prompt_ids,
            response_ids=tuple(transcript.response_ids),
            response_mask=tuple(transcript.response_mask),
            logprobs=tuple(transcript.logprobs),
            versions=tuple(transcript.versions),
            reward=last.reward if isinstance(last, events.Done) else None,
            turns=transcript.turns,
            dropped=None if isinstance(last, events.Done) else self._drop_reason,
        )


def checked(reward: Any, task: str, question: Question) -> float:
    """The reward as a finite number. Raises `BadReward`."""
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise BadReward(f"task {task}, question {question.id}: the reward is {reward!r}; it must be a finite number")
    return value


def fit_tool_turn(tokenizer: Tokenizer, text: str, room: int) -> Sequence[int]:
    """The tool turn for `text`, with its end cut off until it has at most `room` tokens; the empty one is never cut."""
    ids = tokenizer.tool_turn(text)
    while len(ids) > room and text:
        # Token counts grow nearly in proportion to characters, so this ends after a few rounds.
        text = text[: min(len(text) * room // len(ids), len(text) - 1)]
        ids = tokenizer.tool_turn(text + CUT if text else "")
    return ids
