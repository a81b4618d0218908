"""verl's rollout replica for `rollout.name=prorsa`: one replica is the whole cluster of prefill and decode instances.

verl asks a replica to abort, sleep, wake and resume around a weight update. Here the control plane does all of it inside
`update_weights`: it cancels and resends what is running, and excludes role switches. So there is nothing to do before it.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.replica import RolloutReplica

from prorsa.integrations.verl.loaded import mark
from prorsa.integrations.verl.router import ProrsaRouter
from prorsa.integrations.verl.settings import NAME, Settings


class ProrsaReplica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        if self.is_reward_model or self.is_teacher_model or self.replica_rank != 0:
            raise NotImplementedError(
                f"verl wants replica {self.replica_rank} (reward model: {self.is_reward_model}, teacher: "
                f"{self.is_teacher_model}): rollout.name={NAME} is one replica that serves the policy; set "
                "trainer.n_gpus_per_node=1 (in separate_async rollout.n_gpus_per_node=1), and name another for the rest"
            )
        settings = Settings.of(self.config.custom[NAME])
        mark(settings, "replica")
        router = ProrsaRouter.remote({}, settings.mapping())
        await router.start.remote()
        self.servers = [router]
        self._server_handle, self._server_address = router, NAME

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def resume_generation(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **kwargs: Any) -> None: ...

    async def stop_profile(self) -> None: ...
