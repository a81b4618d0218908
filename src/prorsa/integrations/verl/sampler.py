"""verl's replay buffers, quicker for a small model: they look ten times a second instead of every 2 s, and they hand over
each mini-batch by length, so that a micro-batch of neighbours is padded little.

`trainer.v1.sampler.custom_sampler` names one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from prorsa.integrations.verl.loaded import mark
from prorsa.integrations.verl.settings import Settings

POLL_SECONDS = 0.1


class _Quick(ReplayBuffer):  # type: ignore[misc]
    """What both have of their own."""

    def __init__(self, sampler_kwargs: Any, **kwargs: Any) -> None:
        super().__init__(sampler_kwargs=sampler_kwargs, **kwargs, poll_interval=POLL_SECONDS)
        settings = Settings.of(sampler_kwargs)
        self._mini_batch_groups = settings.config().train.mini_batch_groups
        mark(settings, "sampler")

    def _materialize_batch(self, partition_id: str, selected_prompt_uids: list[str], snapshot: Any) -> Any:
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, snapshot)
        lengths = [tag["seq_len"] for tag in batch.tags]
        batch.reorder(training_order(batch.keys, lengths, selected_prompt_uids, self._mini_batch_groups))
        return batch


def training_order(
    keys: Sequence[str], lengths: Sequence[int], groups: Sequence[str], mini_batch_groups: int
) -> list[int]:
    """Indices of the trajectories: mini-batch after mini-batch of whole groups, the shortest first in each.

    A key is its group, then "_", then the member.
    """
    place = {group: index // mini_batch_groups for index, group in enumerate(groups)}
    return sorted(range(len(keys)), key=lambda i: (place[keys[i].split("_")[0]], lengths[i]))


class PromptReplayBuffer(_Quick):
    """Of the sync trainer."""


class PromptReplayBufferAsync(_Quick, ReplayBufferAsync):  # type: ignore[misc]
    """Of the async ones."""
