"""verl's rollout replica for `rollout.name=prorsa`: one replica is the whole cluster of prefill and decode instances.

verl asks a replica to abort, sleep, wake and resume around a weight update. Here the control plane does all of it inside
`update_weights`: it cancels and resends what is running, and excludes role switches. So these are nothing to do.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplica

from prorsa.integrations.verl.server import ProrsaServer
from prorsa.integrations.verl.settings import SERVER, Settings


class ProrsaReplica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        if self.is_reward_model or self.is_teacher_model:
            raise NotImplementedError("rollout.name=prorsa serves the policy only; give the reward model another name")
        name = SERVER.format(rank=self.replica_rank)
        server = ray.remote(ProrsaServer).options(name=name, num_cpus=0).remote(Settings.of(self.config.custom["prorsa"]))
        await server.start.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, name

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def resume_generation(self) -> None: ...

    async def sleep(self) -> None: ...

    async def wake_up(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **kwargs: Any) -> None: ...

    async def stop_profile(self) -> None: ...
