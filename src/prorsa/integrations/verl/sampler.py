"""verl's replay buffers with a short poll: theirs look every 2 s, which is half a step of a small model.

`trainer.v1.sampler.custom_sampler` names one of these.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from prorsa.integrations.verl.loaded import mark
from prorsa.integrations.verl.settings import Settings

POLL_SECONDS = 0.1


class PromptReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_SECONDS)
        mark(Settings.of(kwargs["sampler_kwargs"]), "sampler")


class PromptReplayBufferAsync(ReplayBufferAsync):  # type: ignore[misc]
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_SECONDS)
        mark(Settings.of(kwargs["sampler_kwargs"]), "sampler")
