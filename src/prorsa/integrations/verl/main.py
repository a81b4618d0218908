"""The driver: `python -m prorsa.integrations.verl.main RAY_DIR HYDRA_OVERRIDES...` is verl's `main_ppo`, started quicker.

Most of a small run's start is processes that import verl, 5 s each and one after the other. So verl's task runner runs in
this process and not in one more, and Ray hands its workers no runtime environment, in which those that it starts ahead could
not be used.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import hydra
import ray

from prorsa.integrations.verl.loaded import refuse

PLUGIN = "prorsa.integrations.verl.plugin"
RAY_CPUS = 16
"""What Ray believes it has. verl's workers take one each, and most of them sleep."""
RAY_GPUS = 2
"""Numbers without a device: one for the trainer, one for the rollout."""


def check_plugin() -> None:
    """Raise `NotLoaded` unless `import verl` loads our plugin, or the plugin's own error, which verl hides."""
    importlib.import_module("verl")
    if PLUGIN not in sys.modules:
        importlib.import_module(PLUGIN)
        refuse(["plugin"])


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
    check_plugin()
    hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)(train)()
