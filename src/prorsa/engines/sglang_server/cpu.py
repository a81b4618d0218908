"""What PyTorch and SGLang have to be told where no GPU is: memory cannot be pinned, and no stream has to be waited for.

`prepare` is called once in each engine process, by the plugin, and only in engines that were started for a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

FACTORIES = ("empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")
"""Functions of torch that take `pin_memory`, and fail with it without an accelerator."""


def prepare() -> None:
    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *arguments, **options: self
    torch.cuda.Event = _DoneEvent
    _prepare_transfer()
    _prepare_hierarchical_cache()


def _unpinned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(function)
    def create(*arguments: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return function(*arguments, **options)

    return create


class _DoneEvent:
    """An event on a device whose operations are over when they return."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0


def _prepare_transfer() -> None:
    from sglang.srt.disaggregation.mooncake import conn

    # Host indices would be copied through pinned memory.
    conn.MooncakeKVSender.supports_host_tensor_indices = False


def _prepare_hierarchical_cache() -> None:
    from sglang.srt.mem_cache.pool_host import common, mha

    common._cuda_host_register = lambda *arguments, **options: None
    mha.transfer_kv_direct = _copy_tokens
    mha.transfer_kv_all_layer_direct_lf_pf = _copy_into_pages
    mha.transfer_kv_per_layer_direct_pf_lf = _copy_from_pages


def _copy_tokens(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def _copy_into_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """From layers, all of K and then all of V, which tokens index, to K and V, which page, layer and place in the page do."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[dst_indices // page_size, number % layers, dst_indices % page_size] = source[src_indices]


def _copy_from_pages(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]
