"""What an SGLang engine is started with: flags and GPUs. SGLang itself is not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prorsa.engines.protocol import SPLIT_ROLES, EngineError, Role
from prorsa.engines.sglang_server.flags import EngineFlags, Mooncake
from prorsa.engines.sglang_server.launcher import SGLangLauncher, _devices


def flags(**changes: Any) -> EngineFlags:
    sizes = {"kv_tokens": 4096, "block_tokens": 16, "prefill_chunk": 512, "max_running": 8, "max_waiting": 8}
    return EngineFlags("model", **{"device": "cuda", **sizes, **changes})


def value(line: list[str], flag: str) -> str:
    [found] = [entry.partition("=")[2] for entry in line if entry.startswith(f"{flag}=")]
    return found


@pytest.mark.parametrize(("role", "gpus"), [(Role.PREFILL, 4), (Role.DECODE, 2), (Role.MIXED, 4)])
def test_each_role_has_its_own_parallelism(role: Role, gpus: int) -> None:
    of = flags(gpus_per_prefill=4, gpus_per_decode=2)
    assert of.gpus(role) == gpus
    assert value(of.of_engine(role, 1, 2), "--tensor-parallel-size") == str(gpus)


@pytest.mark.parametrize(("decode", "roles"), [(2, SPLIT_ROLES), (1, frozenset())])
def test_engines_flip_between_roles_of_equal_parallelism(decode: int, roles: frozenset[Role], tmp_path: Path) -> None:
    of = flags(gpus_per_prefill=2, gpus_per_decode=decode)
    assert SGLangLauncher("python", of, start_seconds=1.0, log_dir=tmp_path).roles == roles


@pytest.mark.parametrize(
    ("store", "backend", "layout", "told"),
    [
        ("/kv", "file", "layer_first", {"file_storage_path": "/kv"}),
        (
            Mooncake("10.0.0.1:50051"),
            "mooncake",
            "page_first_direct",
            {"master_server_address": "10.0.0.1:50051", "global_segment_size": 0},
        ),
        (
            Mooncake("127.0.0.1:9", "tcp"),
            "mooncake",
            "page_first_direct",
            {
                "master_server_address": "127.0.0.1:9",
                "global_segment_size": 0,
                "protocol": "tcp",
                "local_hostname": "127.0.0.1",
            },
        ),
    ],
)
def test_where_the_shared_kv_is(store: str | Mooncake, backend: str, layout: str, told: dict[str, Any]) -> None:
    line = flags(kv_store=store).of_engine(Role.PREFILL, 1, 2)
    assert value(line, "--hicache-storage-backend") == backend
    assert value(line, "--hicache-mem-layout") == layout
    assert json.loads(value(line, "--hicache-storage-backend-extra-config")) == {"prefetch_threshold": 16, **told}


def test_without_a_store_there_is_no_hierarchical_cache() -> None:
    assert not [entry for entry in flags().of_engine(Role.DECODE, 1, 2) if "hi" in entry and "cache" in entry]


def test_engines_get_their_gpus_out_of_those_that_we_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _devices((1, 3)) == "1,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert _devices((0, 2)) == "4,6"
    with pytest.raises(EngineError, match="CUDA_VISIBLE_DEVICES=4,5,6 is 3 GPUs, too few"):
        _devices((1, 3))
