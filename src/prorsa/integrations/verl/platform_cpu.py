"""A CPU platform for verl, which ships CUDA, ROCm and Ascend ones: FSDP over gloo on a machine without accelerators.

Importing this module registers it; `plugin` does so where `VERL_PLATFORM=cpu`. Ray's "GPU" is then a number without a device
behind it (`ray.init(num_gpus=...)`), which is how verl places its workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import verl.utils.distributed as verl_distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "cpu"
_HOST_BYTES = 1 << 34
"""What verl is told where it asks for device memory; it only logs it."""

_device_module = SimpleNamespace(
    is_available=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: NAME,
    set_device=lambda *_: None,
    synchronize=lambda *_: None,
    empty_cache=lambda: None,
    ipc_collect=lambda: None,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    get_rng_state=lambda *_: torch.get_rng_state(),
    set_rng_state=lambda state, *_: torch.set_rng_state(state),
    memory_allocated=lambda *_: 0,
    memory_reserved=lambda *_: 0,
    max_memory_allocated=lambda *_: 0,
    max_memory_reserved=lambda *_: 0,
    reset_peak_memory_stats=lambda *_: None,
    mem_get_info=lambda *_: (_HOST_BYTES, _HOST_BYTES),
    get_device_name=lambda *_: NAME,
    get_device_properties=lambda *_: SimpleNamespace(name=NAME, total_memory=_HOST_BYTES),
)


@PlatformRegistry.register(platform=NAME)
class PlatformCPU(PlatformBase):  # type: ignore[misc]
    device_name = NAME
    vendor_name = NAME
    device_module = _device_module

    def is_available(self) -> bool:
        return True

    def current_device(self) -> torch.device:
        return torch.device(NAME)

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


_initialize = verl_distributed.initialize_global_process_group_ray


def _initialize_on_gloo(timeout_second: float | None = None, backend: str | None = None) -> Any:
    """verl asks for "cpu:gloo,<device>:<backend>", and torch refuses one device named twice."""
    return _initialize(timeout_second, backend or "cpu:gloo")


verl_distributed.initialize_global_process_group_ray = _initialize_on_gloo
