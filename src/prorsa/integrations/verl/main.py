"""The driver: `python -m prorsa.integrations.verl.main RAY_DIR HYDRA_OVERRIDES...` is verl's `main_ppo`, started quicker.

Most of a small run's start is processes that import verl, 5 s each and one after the other. So verl's task runner runs in
this process and not in one more, and Ray hands its workers no runtime environment, in which those that it starts ahead could
not be used.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import hydra
import ray

from prorsa.integrations.verl.loaded import refuse
from prorsa.integrations.verl.settings import NAME

RAY_CPUS = 16
"""What Ray believes it has. verl's workers take one each, and most of them sleep."""
RAY_GPUS = 2
"""Numbers without a device: one for the trainer, one for the rollout."""


def missing_here() -> list[str]:
    """The extension points that `import verl` should have loaded in this process, and has not."""
    from verl.plugin.platform.platform_manager import PlatformRegistry
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    missing = []
    if NAME not in RolloutReplicaRegistry._registry or (NAME, "async") not in _ROLLOUT_REGISTRY:
        missing.append("plugin")
    wanted = os.environ.get("VERL_PLATFORM")
    if wanted == "cpu" and PlatformRegistry.get(wanted) is None:
        missing.append("platform")
    return missing


def train(config: Any) -> None:
    from verl.trainer.main_ppo import TaskRunnerV1
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    TaskRunnerV1.__ray_metadata__.modified_class().run(config)


if __name__ == "__main__":
    directory = sys.argv.pop(1)
    # Ray's processes die with this one.
    ray.init(num_cpus=RAY_CPUS, num_gpus=RAY_GPUS, include_dashboard=False, _temp_dir=directory)
    refuse(missing_here())
    hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)(train)()
