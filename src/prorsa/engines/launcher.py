"""Starts and ends the processes of an embedded cluster on this machine: the engines and, if asked for, the KV store.

Every child holds a pipe from this process as its stdin and ends when that reaches EOF, so that even a SIGKILL of this
process leaves none behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from prorsa.engines.protocol import ALL_ROLES, EngineError, Role
from prorsa.engines.sglang import SGLangEngine

HOST = "127.0.0.1"
START_SECONDS = 60.0
STOP_SECONDS = 5.0
"""How long a child may take to end after SIGTERM before it gets SIGKILL."""
LOG_TAIL_BYTES = 2000


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    ports: dict[str, int]
    engine: SGLangEngine | None = None


class EmbeddedLauncher:
    """Owns the processes. Engines are known by name; each writes its messages to `log_dir/NAME.log`.

    The parameters are those of the engine (tokens and counts, see `EngineCore`); `kv_store_tokens` 0 runs without a store.
    """

    roles = ALL_ROLES
    """Those between which an engine can change without a restart."""

    def __init__(
        self,
        model_path: str,
        *,
        kv_tokens: int,
        block_tokens: int,
        prefill_chunk: int,
        max_running: int,
        max_waiting: int,
        kv_store_tokens: int,
        log_dir: Path,
    ) -> None:
        self._engine_flags = [
            f"--model={model_path}",
            f"--kv-tokens={kv_tokens}",
            f"--block-tokens={block_tokens}",
            f"--prefill-chunk={prefill_chunk}",
            f"--max-running={max_running}",
            f"--max-waiting={max_waiting}",
        ]
        self._store_flags = [f"--capacity-tokens={kv_store_tokens}", f"--block-tokens={block_tokens}"]
        self._with_store = kv_store_tokens > 0
        self._log_dir = log_dir
        self._engines: dict[str, _Child] = {}
        self._store: asyncio.Task[_Child] | None = None

    async def start(self, name: str, role: Role) -> SGLangEngine:
        """Start an engine and wait until it serves. Several can start at once. Raises `EngineError` with its log's end."""
        if name in self._engines:
            raise EngineError(f"engine {name}: is running already; stop it first")
        flags = [*self._engine_flags, f"--role={role.value}"]
        if self._with_store:
            flags.append(f"--kv-store={HOST}:{(await self._running_store()).ports['port']}")
        child = await self._spawn(name, "prorsa.engines.embedded.server", flags)
        url, bootstrap_port = f"http://{HOST}:{child.ports['port']}", child.ports["bootstrap_port"]
        child.engine = SGLangEngine(name, url, HOST, bootstrap_port, roles=self.roles)
        self._engines[name] = child
        return child.engine

    async def stop(self, name: str) -> None:
        """End an engine; harmless when it is dead already. KeyError when there was none of that name."""
        child = self._engines.pop(name)
        if child.engine is not None:
            await child.engine.close()
        await _end(child.process)

    async def restart(self, name: str, role: Role) -> SGLangEngine:
        """A new process under the old name, whether the old one lives, is dead or never started. It has the weights that
        the launcher was made with: update them if newer ones are in use."""
        if name in self._engines:
            await self.stop(name)
        return await self.start(name, role)

    async def close(self) -> None:
        """End every process."""
        await asyncio.gather(*(self.stop(name) for name in list(self._engines)))
        if self._store is not None:
            store, self._store = self._store, None
            await _end((await store).process)

    def pid(self, name: str) -> int:
        return self._engines[name].process.pid

    async def _running_store(self) -> _Child:
        if self._store is None:
            self._store = asyncio.create_task(
                self._spawn("kv-store", "prorsa.engines.embedded.kv_store", self._store_flags)
            )
        return await asyncio.shield(self._store)

    async def _spawn(self, name: str, module: str, flags: list[str]) -> _Child:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        log_path = self._log_dir / f"{name}.log"
        # One thread each: a pool of engines shares the machine, and matrix products this small do not gain from more.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *flags,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                # A Ctrl-C at the terminal is for the parent, which ends its children in order.
                start_new_session=True,
            )
        try:
            return _Child(process, await _announced_ports(process))
        except BaseException as error:
            await _end(process)
            if isinstance(error, (TimeoutError, ValueError)):
                raise EngineError(
                    f"engine {name}: did not start; {log_path} ends with:\n{log_tail(log_path)}"
                ) from error
            raise


async def _announced_ports(process: asyncio.subprocess.Process) -> dict[str, int]:
    """The line of JSON that a child prints when it is ready. ValueError when it ends without one."""
    assert process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        line = await process.stdout.readline()
    ports: dict[str, int] = json.loads(line)
    return ports


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def log_tail(path: Path) -> str:
    """The end of an engine's log, for an error's message."""
    return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if path.exists() else "(nothing)"
