"""The flags of an SGLang engine: what Prorsa's roles, flips and router need of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from prorsa.engines.protocol import Role

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Mooncake:
    """A Mooncake store for the KV that engines share."""

    master: str
    """Address of its master, HOST:PORT."""
    protocol: str | None = None
    """`tcp` or `rdma`; None leaves it to the environment variable MOONCAKE_PROTOCOL."""


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """What all engines of a cluster have in common. Lengths and capacities are in tokens."""

    model_path: str
    device: Literal["cpu", "cuda"]
    kv_tokens: int
    block_tokens: int
    prefill_chunk: int
    max_running: int
    max_waiting: int
    gpus_per_prefill: int = 1
    """Tensor parallelism of a prefill instance."""
    gpus_per_decode: int = 1
    kv_store: str | Mooncake | None = None
    """Where the KV is that the engines share: a directory for files, or Mooncake; None: each has only its own."""
    extra: tuple[str, ...] = ()
    """After all others, so that they win."""

    def gpus(self, role: Role) -> int:
        """How many an engine has; on a CPU they are only counted."""
        of_role = {Role.PREFILL: self.gpus_per_prefill, Role.DECODE: self.gpus_per_decode}
        return of_role.get(role, max(of_role.values()))

    def of_engine(self, role: Role, port: int, bootstrap_port: int) -> list[str]:
        """The command line of an engine, which sees no GPUs but its own."""
        flags = [
            f"--model-path={self.model_path}",
            f"--host={HOST}",
            f"--port={port}",
            f"--max-total-tokens={self.kv_tokens}",
            f"--page-size={self.block_tokens}",
            f"--chunked-prefill-size={self.prefill_chunk}",
            f"--max-running-requests={self.max_running}",
            f"--max-queued-requests={self.max_waiting}",
            # Both would send a request of their own; the launcher waits until the engine answers.
            "--skip-server-warmup",
            # Else each message of a stream repeats all before it: work that grows with the square of the output.
            "--incremental-streaming-output",
            "--enable-metrics",
            "--enable-cache-report",
            *(_ON_CPU if self.device == "cpu" else self._on_gpu(role)),
        ]
        if role is not Role.MIXED:
            flags += [
                f"--disaggregation-mode={role.value}",
                f"--disaggregation-bootstrap-port={bootstrap_port}",
                f"--disaggregation-transfer-backend={'mooncake_tcp' if self.device == 'cpu' else 'mooncake'}",
                "--enable-pd-role-switch",
                # Without it a prefill instance that becomes decode fails; see `plugin.refuse_leaking_decode`.
                "--disaggregation-decode-enable-radix-cache",
            ]
        return [*flags, *self._shared_kv(), *self.extra]

    def _shared_kv(self) -> list[str]:
        storage: dict[str, Any] = {"prefetch_threshold": self.block_tokens}
        match self.kv_store:
            case None:
                return []
            case Mooncake(master, protocol):
                backend, layout = "mooncake", "page_first_direct"
                # The engines hold none of it, so that none is lost with an engine.
                storage |= {"master_server_address": master, "global_segment_size": 0}
                if protocol is not None:
                    storage |= {"protocol": protocol, "local_hostname": HOST}
            case directory:
                backend, layout = "file", "layer_first"
                storage["file_storage_path"] = directory
        return [
            "--enable-hierarchical-cache",
            "--hicache-io-backend=direct",
            f"--hicache-mem-layout={layout}",
            # What is computed is written at once: an engine that flips or dies takes nothing with it.
            "--hicache-write-policy=write_through",
            f"--hicache-storage-backend={backend}",
            "--hicache-storage-prefetch-policy=wait_complete",
            f"--hicache-storage-backend-extra-config={json.dumps(storage)}",
        ]

    def _on_gpu(self, role: Role) -> list[str]:
        return ["--device=cuda", f"--tensor-parallel-size={self.gpus(role)}"]


_ON_CPU = (
    "--device=cpu",
    # What the checkpoint says would be float16, in which requests of one batch change each other's rounding visibly.
    "--dtype=float32",
    "--attention-backend=torch_native",
    "--grammar-backend=none",
    "--mem-fraction-static=0.3",
    "--disaggregation-decode-retraction-backup=cpu_tensor",
    # An idle engine would otherwise keep half a core busy.
    "--sleep-on-idle",
)
