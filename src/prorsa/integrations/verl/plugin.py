"""The `verl.plugins` entry point: `import verl` loads this module in every process, driver and Ray workers alike.

It runs while verl's own package is still being imported, so it registers by name and imports nothing heavy. verl logs an
error in here at DEBUG level only: `checks` makes sure that each registration is really there.
"""

from __future__ import annotations

import os

from verl.workers.rollout.base import _ROLLOUT_REGISTRY
from verl.workers.rollout.replica import RolloutReplicaRegistry

from prorsa.integrations.verl.settings import NAME


def _load_replica() -> type:
    from prorsa.integrations.verl.replica import ProrsaReplica

    return ProrsaReplica


if os.environ.get("VERL_PLATFORM") == "cpu":
    from prorsa.integrations.verl import platform_cpu  # noqa: F401

RolloutReplicaRegistry.register(NAME, _load_replica)
_ROLLOUT_REGISTRY[NAME, "async"] = "prorsa.integrations.verl.adapter.ProrsaAdapter"
