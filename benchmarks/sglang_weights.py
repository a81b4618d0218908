"""Four ways to bring new weights from a trainer on this machine to three real SGLang engines: how long does each take?

    python benchmarks/sglang_weights.py [--layers 8] [--rounds 5]

The trainer is this process and has the tensors as PyTorch CPU tensors. `disk` and `memory` write a checkpoint and let the
engines load it; `memory` is what `ControlPlane.update_weights` does with tensors. `shared` is SGLang's
`/update_weights_from_tensor`, with tensors copied into PyTorch's shared memory. `group` is its
`/update_weights_from_distributed`, a broadcast over a gloo process group that the engines joined before. After each update
every engine is asked for its version.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import torch
import torch.distributed as dist
import torch.multiprocessing
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sglang_engines"))
from checkpoints import write_checkpoint as write_random_checkpoint
from sglang_bench import D, P, flags, launching

from prorsa.engines.sglang import SGLangEngine
from prorsa.engines.weights import MEMORY, write_checkpoint

Tensors = dict[str, torch.Tensor]
Way = Callable[[int], Awaitable[float]]
"""Brings the weights to the engines as the given version. Returns the seconds until they are written or shared."""
GROUP = "weights"
HOST = "127.0.0.1"


class Trainer:
    def __init__(self, model: Path, engines: Sequence[SGLangEngine], session: aiohttp.ClientSession) -> None:
        self.model, self.engines, self.session = model, engines, session
        self.tensors: Tensors = load_file(model / "model.safetensors")
        self.group: dist.ProcessGroupGloo | None = None

    async def everyone(self, path: str, **body: Any) -> None:
        async def ask(engine: SGLangEngine) -> None:
            async with self.session.post(engine.url + path, json=body) as response:
                answer = await response.json(content_type=None)
                assert answer.get("success"), answer

        await asyncio.gather(*(ask(engine) for engine in self.engines))

    async def as_checkpoint(self, root: Path, version: int) -> float:
        start = time.perf_counter()
        directory = Path(tempfile.mkdtemp(dir=root))
        write_checkpoint(self.tensors, self.model, directory)
        written = time.perf_counter() - start
        await asyncio.gather(*(engine.update_weights(str(directory), version) for engine in self.engines))
        shutil.rmtree(directory)
        return written

    async def shared(self, version: int) -> float:
        start = time.perf_counter()
        tensors = [(name, tensor.clone().share_memory_()) for name, tensor in self.tensors.items()]
        payload = io.BytesIO()
        ForkingPickler(payload).dump(tensors)
        written = time.perf_counter() - start
        await self.everyone("/begin_weight_update")
        await self.everyone(
            "/update_weights_from_tensor",
            serialized_named_tensors=[base64.b64encode(payload.getvalue()).decode()],
            weight_version=str(version),
            abort_all_requests=True,
        )
        await self.everyone("/end_weight_update")
        return written

    async def join(self) -> None:
        size = len(self.engines) + 1
        store = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)

        async def ask(rank: int, engine: SGLangEngine) -> None:
            body = {"master_address": HOST, "master_port": store.port, "rank_offset": rank, "world_size": size}
            body |= {"group_name": GROUP, "backend": "gloo"}
            async with self.session.post(engine.url + "/init_weights_update_group", json=body) as response:
                assert (await response.json())["success"]

        asking = [asyncio.create_task(ask(rank, engine)) for rank, engine in enumerate(self.engines, start=1)]
        # The names under which SGLang's side of the group keeps its addresses.
        ours = dist.PrefixStore("cpu/", dist.PrefixStore(f"{GROUP}/", dist.PrefixStore(GROUP, store)))
        self.group = await asyncio.to_thread(dist.ProcessGroupGloo, ours, 0, size, timedelta(seconds=60))
        await asyncio.gather(*asking)

    async def broadcast(self, version: int) -> float:
        group = self.group
        assert group is not None

        def send() -> None:
            for tensor in self.tensors.values():
                group.broadcast([tensor], dist.BroadcastOptions()).wait()

        await self.everyone("/begin_weight_update")
        shapes = [list(tensor.shape) for tensor in self.tensors.values()]
        asking = asyncio.create_task(
            self.everyone(
                "/update_weights_from_distributed",
                names=list(self.tensors),
                dtypes=["float32"] * len(shapes),
                shapes=shapes,
                group_name=GROUP,
                weight_version=str(version),
                abort_all_requests=True,
            )
        )
        await asyncio.to_thread(send)
        await asking
        await self.everyone("/end_weight_update")
        return 0.0


async def main(parsed: argparse.Namespace, disk: Path, memory: Path) -> None:
    model = write_random_checkpoint(
        disk / "model",
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=parsed.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
    )
    roles = {"a": P, "b": D, "c": D}
    async with (
        launching(disk / "log", flags(model, kv_tokens=2048)) as launcher,
        # Kept alive, a connection may end just when it is used again.
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
    ):
        engines = await asyncio.gather(*(launcher.start(*instance) for instance in roles.items()))
        trainer = Trainer(model, engines, session)
        await trainer.join()
        ways: dict[str, Way] = {
            "disk": lambda version: trainer.as_checkpoint(disk, version),
            "memory": lambda version: trainer.as_checkpoint(memory, version),
            "shared": trainer.shared,
            "group": trainer.broadcast,
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(parsed.rounds * len(ways)):
            name = list(ways)[number % len(ways)]
            start = time.perf_counter()
            written = await ways[name](number + 1)
            taken[name].append((written, time.perf_counter() - start))
            assert {(await engine.info()).weights_version for engine in engines} == {number + 1}
    size = sum(tensor.nbytes for tensor in trainer.tensors.values())
    print(f"{size / 1e6:.0f} MB to {len(roles)} engines, median (least to most) of {parsed.rounds}, seconds")
    for name, seconds in taken.items():
        show(f"{name}: written", [written for written, _ in seconds])
        show(f"{name}: in all", [total for _, total in seconds])


def show(what: str, seconds: Sequence[float]) -> None:
    print(f"{what:16} {median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    # Only files in shared memory are open to processes that are not our children.
    torch.multiprocessing.set_sharing_strategy("file_system")
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        asyncio.run(main(parser.parse_args(), Path(directory), Path(memory)))
