"""verl's trainer, after a look at what `import verl` has loaded; the arguments are Hydra overrides."""

from __future__ import annotations

import os
import runpy

from prorsa.integrations.verl.loaded import refuse
from prorsa.integrations.verl.settings import NAME


def missing_in_this_process() -> list[str]:
    """The extension points that `import verl` should have loaded here, and has not."""
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


if __name__ == "__main__":
    refuse(missing_in_this_process())
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
