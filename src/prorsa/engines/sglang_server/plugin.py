"""A plugin of SGLang (entry point `sglang.srt.plugins`): mends what SGLang 0.5.23 does wrong when roles flip at run time, and
draws tokens by their requests' seeds, so that a resent turn draws what the undisturbed one would have.

SGLang only logs a plugin that fails, so this one looks after itself: `verify` finds each hook in the function that it is
meant for, or tells which one is missing. An engine that may flip does not start unfixed, nor with another SGLang than
the one that the fixes were made and tested for.
"""

from __future__ import annotations

import logging
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

VERSION = "0.5.23"
"""Of SGLang."""
CHOSEN = "PRORSA_SGLANG_FIXES"
"""Environment variable: names of the fixes to apply, separated by commas. Unset: all. Tests leave fixes out with it."""
DEVICE = "PRORSA_SGLANG_DEVICE"
"""Environment variable of engines that we start: what they run on, `cpu` or `cuda`."""


class Unfixed(Exception):
    """Engines would run with a known defect; the message says which."""


@dataclass(frozen=True)
class Fix:
    name: str
    target: str
    """Full name of the function of SGLang that is wrapped."""
    hook: Callable[..., Any]
    """Called with the wrapped function and its arguments."""


def refuse_leaking_decode(original: Callable[..., Any], scheduler: Any, new_role: str) -> Any:
    """A decode instance without a radix cache that was a prefill instance with one dies of a "memory leak".

    Its check adds up the KV pool with the cache that it thinks it has not. The flip is refused with the remedy.
    """
    reason = original(scheduler, new_role)
    with_decode = scheduler.server_args.disaggregation_decode_enable_radix_cache
    if reason is None and new_role == "decode" and not (scheduler.disable_radix_cache or with_decode):
        return (
            "this instance would fail as decode; start it with --disaggregation-decode-enable-radix-cache or "
            "--disable-radix-cache",
            True,
        )
    return reason


def refuse_with_held_requests(original: Callable[..., Any], scheduler: Any, new_role: str) -> Any:
    """Requests that a pause (mode "retract") holds back are in no queue that a flip looks at, and would be lost with it."""
    reason = original(scheduler, new_role)
    queue = getattr(scheduler, "disagg_decode_prealloc_queue", None)
    held = len(queue.held_rebootstrap_reqs) if queue is not None else 0
    if reason is None and held:
        return f"instance is not idle; it holds {held} paused requests", True
    return reason


def keep_shared_storage(original: Callable[..., Any], scheduler: Any) -> Any:
    """A flip drops the instance's own prefix cache. The storage behind it belongs to all instances and stays."""
    cache = scheduler.tree_cache
    if not hasattr(cache, "clear_storage_backend"):
        return original(scheduler)
    cache.clear_storage_backend = None
    try:
        return original(scheduler)
    finally:
        del cache.clear_storage_backend


def forget_moved_peers(original: Callable[..., Any], receiver: Any) -> Any:
    """A prefill instance that was decode in between listens at another port than a decode instance remembers.

    So the decode instance asks, before each transfer, where its peer is now.
    """
    manager = receiver.kv_mgr
    for cp_rank in receiver.target_cp_ranks:
        key = f"{receiver.bootstrap_addr}_{receiver.prefill_dp_rank}_{cp_rank}_{receiver.target_tp_rank}"
        with manager.connection_lock:
            known = manager.connection_pool.get(key)
        if known and _moved(receiver, cp_rank, known[0]):
            with manager.connection_lock:
                manager.connection_pool.pop(key, None)
    return original(receiver)


def _moved(receiver: Any, cp_rank: int, known: dict[str, Any]) -> bool:
    now = receiver._get_bootstrap_info_from_server(
        receiver.prefill_dp_rank, cp_rank, receiver.target_tp_ranks[0], known["pp_rank"]
    )
    return now is not None and any(now[key] != known[key] for key in ("rank_ip", "rank_port"))


def fill_seeds(original: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """SGLang drops the seeds of requests; see `draws`, which needs PyTorch, and this module does not."""
    from prorsa.engines.sglang_server import draws

    return draws.fill_seeds(original, *arguments, **options)


def draw_by_seed(original: Callable[..., Any], *arguments: Any) -> Any:
    from prorsa.engines.sglang_server import draws

    return draws.draw_by_seed(original, *arguments)


ROLE_SWITCH = "sglang.srt.disaggregation.role_switch"
FIXES = (
    Fix("leaking-decode", f"{ROLE_SWITCH}._reject_reason", refuse_leaking_decode),
    Fix("held-requests", f"{ROLE_SWITCH}._reject_reason", refuse_with_held_requests),
    Fix("shared-storage", f"{ROLE_SWITCH}._release_prefix_cache_for_role_switch", keep_shared_storage),
    Fix(
        "moved-peers",
        "sglang.srt.disaggregation.common.conn.CommonKVReceiver._setup_bootstrap_infos",
        forget_moved_peers,
    ),
    Fix("seeds", "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", fill_seeds),
    Fix("seeded-draws", "sglang.srt.layers.sampler.Sampler._sample_from_probs", draw_by_seed),
)


def register() -> None:
    """What SGLang calls in each of its processes. Ends the process where an engine that may flip would be unfixed."""
    try:
        if os.environ.get(DEVICE) == "cpu":
            from prorsa.engines.sglang_server import cpu

            cpu.prepare()
        if DEVICE in os.environ:
            _keep_files_together()
        _apply()
        verify()
    except Exception as error:
        if "--enable-pd-role-switch" in sys.argv or DEVICE in os.environ:
            raise SystemExit(f"prorsa: {error}") from error
        logger.error("prorsa's fixes are not in place: %s", error)


def _keep_files_together() -> None:
    """An engine leaves the file in shared memory by which its processes tell their load. Where its other temporary files are,
    the launcher removes it with them."""
    from sglang.srt.managers import load_snapshot

    in_shared_memory = load_snapshot.shm_path_for
    load_snapshot.shm_path_for = lambda ipc_name: os.path.join(
        tempfile.gettempdir(), os.path.basename(in_shared_memory(ipc_name))
    )


def verify() -> None:
    """Raises `Unfixed` where a fix that should be in place in this process is not."""
    _check_version()
    for fix in _chosen():
        if not _wraps(pkgutil.resolve_name(fix.target), fix.hook):
            raise Unfixed(f"SGLang's {fix.target} runs without the fix {fix.name!r}")


def _apply() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _check_version()
    for fix in _chosen():
        HookRegistry.register(fix.target, fix.hook, HookType.AROUND)
    HookRegistry.apply_hooks()


def _check_version() -> None:
    from sglang.version import __version__

    if __version__ != VERSION:
        raise Unfixed(f"the fixes are for SGLang {VERSION}, this is {__version__}; install {VERSION}")


def _chosen() -> list[Fix]:
    chosen = os.environ.get(CHOSEN)
    if chosen is None:
        return list(FIXES)
    names = {name for name in chosen.split(",") if name}
    unknown = names - {fix.name for fix in FIXES}
    if unknown:
        raise Unfixed(f"{CHOSEN}={chosen}: there is no fix {min(unknown)!r}")
    return [fix for fix in FIXES if fix.name in names]


def _wraps(function: Any, hook: Callable[..., Any]) -> bool:
    """Whether the hook is called by this function, or by one that it wraps."""
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
