"""Whose turn a request is, and what the lifecycle is told of agents that run elsewhere.

A trajectory is named by its client, or recognised: a prompt that starts with the context that a known trajectory had after
its last answer continues it, and so does a chat whose past is the conversation of one. The gap between two of its requests
is its tool time. An answer without a tool call may be the last: where most of the latest such answers were, the trajectory
is in REWARD after it, so that nothing more is forecast of it, and goes on as a new one if its client does come back.

Invariants. A trajectory has one turn at a time; further requests under its name wait for their turn. A recognised one
continues the very tokens that were generated: only what is new is encoded. Every trajectory that was sampled ends once: by
its client's word, by silence for longer than its timeout, by a turn that failed, or with the gateway.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prorsa.gateway import accepted, fields
from prorsa.gateway.asks import TASK, Identity, Prompt, checked_name
from prorsa.gateway.errors import ApiError, context_full
from prorsa.gateway.fields import wrong
from prorsa.gateway.prefixes import PrefixIndex
from prorsa.lifecycle import (
    Done,
    Dropped,
    Event,
    RewardStarted,
    Sampled,
    SandboxMode,
    SandboxStarting,
    State,
    ToolStarted,
    Tracker,
)

REPLY = "reply"
"""The tool of an answer without a tool call: whatever the client does before its next request."""
LATEST = 64
"""Replies of a kind that are remembered, with whether a request followed."""
OTHER = "other"
"""The tool of a call that names none of the request's tools: names that models make up stay out of the statistics."""
READY_STATES = (State.SAMPLED, State.SANDBOX_STARTING, State.TOOL)
"""Where a trajectory may begin a turn."""


class Lifecycle(Protocol):
    """The part of the control plane that is told."""

    @property
    def tracker(self) -> Tracker: ...
    @property
    def version(self) -> int: ...
    def apply(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class Context:
    """What a trajectory knows after an answer."""

    key: bytes
    """What a prompt that continues it starts with: UTF-8 text, or 4 bytes an id where its client sends ids."""
    ids: array[int] | None
    """Of the text; None where its client sends ids."""
    distinct: bool
    """Whether a prompt that starts with it is taken for its continuation."""
    conversation: bytes | None = None


ReplyKind = tuple[str, bool]
"""Of an answer without a tool call: (task, whether the request offered tools)."""


class Replies:
    """Whether a request follows a reply, of the latest ones of its kind. At first it does where no tools were offered."""

    def __init__(self) -> None:
        self._followed: dict[ReplyKind, deque[bool]] = {}

    def add(self, kind: ReplyKind, followed: bool) -> None:
        self._followed.setdefault(kind, deque(maxlen=LATEST)).append(followed)

    def likely(self, kind: ReplyKind) -> bool:
        _, offered = kind
        known = [not offered, *self._followed.get(kind, ())]
        return known.count(True) * 2 >= len(known)


@dataclass(eq=False)
class Trajectory:
    id: str
    """Unique in the run: what events and engines call it."""
    name: str
    """What its client calls it."""
    group: str
    task: str
    told: bool = False
    """Its framework posts the events of its tools; else they are guessed from its requests."""
    turns: int = 0
    tokens: int = 0
    """Length of its context."""
    sampled: bool = False
    ended: bool = False
    context: Context | None = None
    reply: ReplyKind | None = None
    """Of its last answer, where that was a reply of which it is not known yet whether a request follows."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the request whose turn it is."""
    timer: asyncio.TimerHandle | None = None


class Trajectories:
    def __init__(
        self,
        lifecycle: Lifecycle,
        encode: Callable[[str], list[int]],
        max_context: int,
        tool_timeout: float,
        idle_timeout: float,
    ) -> None:
        self.continued: Counter[str] = Counter()
        """Turns after the first, by how their trajectory was known: name, prefix or conversation."""
        self._lifecycle = lifecycle
        self._encode = encode
        self._max_context = max_context
        self._tool_timeout = tool_timeout
        self._idle_timeout = idle_timeout
        self._live: dict[str, Trajectory] = {}
        """By name."""
        self._texts: PrefixIndex[Trajectory] = PrefixIndex()
        self._ids: PrefixIndex[Trajectory] = PrefixIndex()
        self._conversations: dict[bytes, dict[Trajectory, None]] = {}
        self._replies = Replies()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """Live ones."""
        return len(self._live)

    # Turns.

    async def begin(self, identity: Identity, prompt: Prompt) -> tuple[Trajectory, tuple[int, ...]]:
        """The trajectory, which has its turn from now on, and the ids of its prompt. Raises `ApiError`.

        `answered` or `failed` must follow.
        """
        trajectory, how = await self._find(identity, prompt)
        try:
            ids = self._prompt_ids(trajectory, prompt)
            self._check(trajectory, len(ids))
            if trajectory.reply is not None:
                self._came_back(trajectory, trajectory.reply)
            if not trajectory.sampled:
                self._sample(trajectory, len(ids))
            if self._state(trajectory) is State.DECODE:
                # Its framework said that it would tell of its tools, and did not.
                self._tell(ToolStarted(self._now, trajectory.id, REPLY, trajectory.tokens))
        except BaseException:
            if not trajectory.sampled:
                self._end(trajectory)
            trajectory.lock.release()
            raise
        if trajectory.context is not None:
            self.continued[how] += 1
        self._forget(trajectory)
        return trajectory, ids

    def answered(
        self, trajectory: Trajectory, tokens: int, context: Context, tool: str | None, offered: bool = False
    ) -> None:
        """Its turn is over; `tokens` is the length of its context, `tool` the first one that its answer calls.

        `offered`: whether its request offered tools.
        """
        trajectory.turns += 1
        trajectory.tokens = tokens
        trajectory.context = context
        if not trajectory.told:
            kind = trajectory.task, offered
            trajectory.reply = kind if tool is None else None
            if tool is not None or self._replies.likely(kind):
                self._tell(ToolStarted(self._now, trajectory.id, tool or REPLY, tokens))
            else:
                self._tell(RewardStarted(self._now, trajectory.id, tokens))
        self._remember(trajectory, context)
        self._arm(trajectory, self._idle_timeout if tool is None and not trajectory.told else self._tool_timeout)
        trajectory.lock.release()

    def failed(self, trajectory: Trajectory, reason: str) -> None:
        """Its turn came to nothing, and so does it: whatever its client sends next is a new one."""
        self._drop(trajectory, reason)
        trajectory.lock.release()

    def close(self, reason: str) -> None:
        """End every trajectory that waits for its client."""
        for trajectory in list(self._live.values()):
            if trajectory.sampled and not trajectory.lock.locked():
                self._expire(trajectory, reason)

    # What frameworks tell.

    def post(self, body: dict[str, Any]) -> Trajectory:
        """Take in an event that a framework posts. Raises `ApiError` and changes nothing then."""
        name, kind = checked_name(body.get("trajectory"), "trajectory"), fields.typed(body, "event", str, "")
        if kind in accepted.EVENTS:
            accepted.EVENTS[kind].check(body)
        if kind == "sampled":
            return self._post_sampled(name, body)
        trajectory = self._live.get(name)
        if trajectory is None or not trajectory.sampled:
            raise ApiError(404, f"trajectory={name!r}: none of that name is live; post sampled first", "trajectory")
        if trajectory.lock.locked():
            raise ApiError(409, f"trajectory={name!r}: a request of it is in service; {kind} comes too early")
        match kind:
            case "sandbox_starting":
                self._post_sandbox(trajectory, body)
            case "tool_started":
                self._from(trajectory, kind, State.DECODE)
                tool = checked_name(body.get("tool"), "tool")
                self._tell(ToolStarted(self._now, trajectory.id, tool, trajectory.tokens))
            case "reward_started":
                self._from(trajectory, kind, State.DECODE, State.TOOL, State.REWARD)
                self._reward(trajectory)
            case "done":
                self._from(trajectory, kind, State.DECODE, State.TOOL, State.REWARD)
                reward = fields.typed(body, "reward", float, 0.0)
                self._finish(trajectory, reward, fields.typed(body, "admitted", bool, True))
                return trajectory
            case "dropped":
                self._drop(trajectory, fields.typed(body, "reason", str, "its client dropped it"))
                return trajectory
            case _:
                known = "sampled, sandbox_starting, tool_started, reward_started, done or dropped"
                raise wrong("event", kind, f"must be {known}")
        self._arm(trajectory, self._tool_timeout)
        return trajectory

    def state(self, trajectory: Trajectory) -> str:
        return self._state(trajectory).name.lower()

    def _post_sampled(self, name: str, body: dict[str, Any]) -> Trajectory:
        if name in self._live:
            raise ApiError(409, f"trajectory={name!r}: is live already; a trajectory is sampled once", "trajectory")
        told = {key: None if body.get(key) is None else checked_name(body[key], key) for key in ("group", "task")}
        tokens = fields.whole(body, "prompt_tokens", 0, 0) or 0
        trajectory = self._new(Identity(name, told["group"], told["task"]))
        trajectory.told = True
        self._sample(trajectory, tokens)
        self._arm(trajectory, self._tool_timeout)
        return trajectory

    def _post_sandbox(self, trajectory: Trajectory, body: dict[str, Any]) -> None:
        self._from(trajectory, "sandbox_starting", State.SAMPLED)
        mode = fields.typed(body, "mode", str, SandboxMode.COLD.value)
        if mode not in list(SandboxMode):
            raise wrong("mode", mode, f"must be {' or '.join(SandboxMode)}")
        image, node_class = (checked_name(body.get(key, "default"), key) for key in ("image", "node_class"))
        self._tell(SandboxStarting(self._now, trajectory.id, SandboxMode(mode), image, node_class))

    def _from(self, trajectory: Trajectory, kind: str, *states: State) -> None:
        state = self._state(trajectory)
        if state not in states:
            allowed = " or ".join(one.name.lower() for one in states)
            hint = "" if trajectory.told else "; tools are told of trajectories that began with a posted sampled"
            problem = f"it is in {state.name.lower()}, and {kind} may only come from {allowed}{hint}"
            raise ApiError(409, f"trajectory={trajectory.name!r}: {problem}", "event")

    # Who it is.

    async def _find(self, identity: Identity, prompt: Prompt) -> tuple[Trajectory, str]:
        """Its lock is held on return."""
        while True:
            trajectory, how = self._known(identity, prompt)
            if trajectory is None:
                trajectory = self._new(identity)
            await trajectory.lock.acquire()
            if not trajectory.ended:
                return trajectory, how
            trajectory.lock.release()

    def _known(self, identity: Identity, prompt: Prompt) -> tuple[Trajectory | None, str]:
        if identity.name is not None:
            return self._live.get(identity.name), "name"
        found = self._texts.find(prompt.text.encode()) if prompt.ids is None else self._ids.find(key_of(prompt.ids))
        if found is not None:
            return found, "prefix"
        if prompt.conversation is not None and (same := self._conversations.get(prompt.conversation)):
            return next(iter(same)), "conversation"
        return None, ""

    def _new(self, identity: Identity) -> Trajectory:
        name = identity.name or self._free_name()
        # A name may come again once its trajectory has ended; the run tells them apart.
        trajectory_id = f"{name}#{next(self._numbers)}" if self._used(name) else name
        trajectory = Trajectory(trajectory_id, name, identity.group or trajectory_id, identity.task or TASK)
        self._live[name] = trajectory
        return trajectory

    def _free_name(self) -> str:
        """One that no client has chosen either."""
        while True:
            name = f"auto-{next(self._numbers)}"
            if name not in self._live and not self._used(name):
                return name

    def _used(self, trajectory_id: str) -> bool:
        try:
            self._lifecycle.tracker.state(trajectory_id)
        except KeyError:
            return False
        return True

    def _prompt_ids(self, trajectory: Trajectory, prompt: Prompt) -> tuple[int, ...]:
        if prompt.ids is not None:
            return prompt.ids
        context, text = trajectory.context, prompt.text.encode()
        if context is not None and context.ids is not None and text.startswith(context.key):
            return (*context.ids, *self._encode(text[len(context.key) :].decode()))
        return tuple(self._encode(prompt.text))

    def _check(self, trajectory: Trajectory, tokens: int) -> None:
        if tokens >= self._max_context:
            raise context_full(self._max_context, f"the prompt has {tokens} tokens, and the answer needs room too")
        expected = trajectory.told or trajectory.reply is None  # a guess that it has ended binds nobody
        if trajectory.sampled and expected and self._state(trajectory) not in (*READY_STATES, State.DECODE):
            state = self._state(trajectory).name.lower()
            # Not a 409: OpenAI's clients would send it again.
            raise ApiError(400, f"trajectory={trajectory.name!r}: it is in {state}; use a new name", "trajectory")

    # What is remembered between two requests.

    def _remember(self, trajectory: Trajectory, context: Context) -> None:
        if context.distinct:
            self._index(context).add(context.key, trajectory)
        if context.conversation is not None:
            self._conversations.setdefault(context.conversation, {})[trajectory] = None

    def _forget(self, trajectory: Trajectory) -> None:
        if trajectory.timer is not None:
            trajectory.timer.cancel()
            trajectory.timer = None
        context, trajectory.context = trajectory.context, None
        if context is None:
            return
        if context.distinct:
            self._index(context).remove(context.key, trajectory)
        if context.conversation is not None:
            same = self._conversations[context.conversation]
            del same[trajectory]
            if not same:
                del self._conversations[context.conversation]

    def _index(self, context: Context) -> PrefixIndex[Trajectory]:
        return self._ids if context.ids is None else self._texts

    # What the lifecycle is told.

    def _sample(self, trajectory: Trajectory, tokens: int) -> None:
        version = self._lifecycle.version
        self._tell(Sampled(self._now, trajectory.id, trajectory.group, trajectory.task, version, tokens))
        trajectory.sampled = True

    def _came_back(self, trajectory: Trajectory, kind: ReplyKind) -> None:
        """A request followed its reply. Where that was taken for its last, it goes on as a new one."""
        self._replies.add(kind, followed=True)
        trajectory.reply = None
        if self._state(trajectory) is State.REWARD:
            self._tell(Done(self._now, trajectory.id, 0.0, admitted=True))
            trajectory.id = f"{trajectory.name}#{next(self._numbers)}"
            trajectory.turns, trajectory.sampled = 0, False

    def _arm(self, trajectory: Trajectory, seconds: float) -> None:
        if trajectory.timer is not None:
            trajectory.timer.cancel()
        loop = asyncio.get_running_loop()
        trajectory.timer = loop.call_later(seconds, self._expire, trajectory, f"nothing came for {seconds:g} s")

    def _expire(self, trajectory: Trajectory, reason: str) -> None:
        if trajectory.ended or trajectory.lock.locked():
            return
        guessed = trajectory.reply is not None and self._state(trajectory) is State.REWARD
        if guessed or self._state(trajectory) in (State.DECODE, State.TOOL):
            self._finish(trajectory, 0.0, admitted=True)
        else:
            self._drop(trajectory, reason)

    def _finish(self, trajectory: Trajectory, reward: float, admitted: bool) -> None:
        self._reward(trajectory)
        self._tell(Done(self._now, trajectory.id, reward, admitted))
        if trajectory.reply is not None:
            self._replies.add(trajectory.reply, followed=False)
        self._end(trajectory)

    def _reward(self, trajectory: Trajectory) -> None:
        if self._state(trajectory) is not State.REWARD:
            self._tell(RewardStarted(self._now, trajectory.id, trajectory.tokens))

    def _drop(self, trajectory: Trajectory, reason: str) -> None:
        self._tell(Dropped(self._now, trajectory.id, reason))
        self._end(trajectory)

    def _end(self, trajectory: Trajectory) -> None:
        self._forget(trajectory)
        trajectory.ended = True
        if self._live.get(trajectory.name) is trajectory:
            del self._live[trajectory.name]

    def _tell(self, event: Event) -> None:
        self._lifecycle.apply(event)

    def _state(self, trajectory: Trajectory) -> State:
        return self._lifecycle.tracker.state(trajectory.id)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def key_of(ids: Sequence[int]) -> bytes:
    return array("i", ids).tobytes()
