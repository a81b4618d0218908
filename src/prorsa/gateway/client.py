"""A small client for frameworks that can tell the gateway more than it can guess: when a trajectory is launched, when its
sandbox starts, which tool runs, what it was worth. Standard library only; it may be used from any thread.

    told = Trajectory("http://127.0.0.1:8000", "run-7/42", group="run-7", task="coding")
    told.sampled()                         # before anything of it runs
    told.sandbox_starting(mode="cold", image="python-3.11")
    answer = openai.chat.completions.create(..., extra_headers=told.headers)
    told.tool_started("pytest")            # after an answer, before the tool runs
    told.done(reward=1.0)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

SECONDS = 10.0
_OPENER = build_opener(ProxyHandler({}))


class EventRefused(Exception):
    """The gateway refused an event; the message is the gateway's."""


class Trajectory:
    """One trajectory, told about as it goes. Every call raises `EventRefused`, or `OSError` where no gateway answers."""

    def __init__(
        self, url: str, name: str, *, group: str | None = None, task: str | None = None, api_key: str | None = None
    ) -> None:
        """`group`: trajectories of one question that are compared with each other; `task`: what kind of work it is;
        `api_key`: the gateway's, where it has one."""
        self._url = url.rstrip("/") + "/prorsa/events"
        self.name = name
        self._group = group
        self._task = task
        self._http_headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._http_headers["Authorization"] = f"Bearer {api_key}"

    @property
    def headers(self) -> dict[str, str]:
        """For each request of the trajectory."""
        return {"X-Prorsa-Trajectory": self.name}

    def sampled(self, prompt_tokens: int = 0) -> str:
        """It exists. Its requests may follow at any time. Each call returns the state that the trajectory is in then."""
        return self._post("sampled", {"group": self._group, "task": self._task, "prompt_tokens": prompt_tokens})

    def sandbox_starting(self, mode: str = "cold", image: str = "default", node_class: str = "default") -> str:
        """`mode` is `cold` or `prewarmed`. Only between `sampled` and the first request."""
        return self._post("sandbox_starting", {"mode": mode, "image": image, "node_class": node_class})

    def tool_started(self, tool: str) -> str:
        """A tool works on the last answer; the next request ends it."""
        return self._post("tool_started", {"tool": tool})

    def reward_started(self) -> str:
        """No request will follow; the reward is being computed."""
        return self._post("reward_started", {})

    def done(self, reward: float = 0.0, admitted: bool = True) -> str:
        """The end. `admitted`: whether it is used for training."""
        return self._post("done", {"reward": reward, "admitted": admitted})

    def dropped(self, reason: str) -> str:
        """The end of one that is of no use."""
        return self._post("dropped", {"reason": reason})

    def _post(self, kind: str, fields: Mapping[str, Any]) -> str:
        body = json.dumps({"event": kind, "trajectory": self.name, **fields}).encode()
        request = Request(self._url, body, self._http_headers, method="POST")
        try:
            with _OPENER.open(request, timeout=SECONDS) as response:
                state: str = json.load(response)["state"]
                return state
        except HTTPError as error:
            with error:
                raise EventRefused(_message(error.read())) from error


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return answer.decode(errors="replace")
