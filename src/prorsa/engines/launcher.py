"""Starts and ends the processes of an embedded cluster on this machine: the engines and, if asked for, the KV store.

Every child holds a pipe from this process as its stdin and ends when that reaches EOF, so that even a SIGKILL of this
process leaves none behind.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prorsa.engines.embedded.kv_store import StoreClient
from prorsa.engines.protocol import ALL_ROLES, EngineError, Role
from prorsa.engines.sglang import SGLangEngine

HOST = "127.0.0.1"
START_SECONDS = 60.0
STOP_SECONDS = 5.0
"""How long a child may take to end after SIGTERM before it gets SIGKILL."""
LOG_TAIL_BYTES = 2000
STORE_CHECK_SECONDS, STORE_CHECKS = 5.0, 2
"""How often the KV store is asked for a sign of life, and how many times in a row it may give none."""
RESTART_PAUSE, MAX_RESTART_PAUSE = 0.5, 60.0
"""Seconds until a KV store that did not start is tried again: the first pause, which doubles, and the last."""

logger = logging.getLogger(__name__)


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
        self._store: _Child | None = None
        self._store_started = asyncio.Lock()
        self._store_watch: asyncio.Task[None] | None = None

    async def start(self, name: str, role: Role) -> SGLangEngine:
        """Start an engine and wait until it serves. Several can start at once. Raises `EngineError` with its log's end."""
        if name in self._engines:
            raise EngineError(f"engine {name}: is running already; stop it first")
        flags = [*self._engine_flags, f"--role={role.value}"]
        if self._with_store:
            flags.append(f"--kv-store={HOST}:{await self._store_port()}")
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
        """A new process under the old name, whether the old one lives, hangs, is dead or never started. It has the weights
        that the launcher was made with: update them if newer ones are in use. The old one is killed: it cannot wake again."""
        if name in self._engines:
            _kill(self._engines[name].process)
            await self.stop(name)
        return await self.start(name, role)

    async def close(self) -> None:
        """End every process."""
        await asyncio.gather(*(self.stop(name) for name in list(self._engines)))
        if self._store_watch is not None:
            self._store_watch.cancel()
            await asyncio.gather(self._store_watch, return_exceptions=True)
        if self._store is not None:
            store, self._store = self._store, None
            await _end(store.process)

    def pid(self, name: str) -> int:
        return self._engines[name].process.pid

    async def _store_port(self) -> int:
        """It stays the same for as long as the launcher lives, whatever happens to the store."""
        async with self._store_started:
            if self._store is None:
                self._store = await self._start_store(0)
                self._store_watch = asyncio.create_task(self._watch_store(self._store), name="watch over the KV store")
        return self._store.ports["port"]

    async def _start_store(self, port: int) -> _Child:
        flags = [*self._store_flags, f"--port={port}"]
        return await self._spawn("kv-store", "prorsa.engines.embedded.kv_store", flags)

    async def _watch_store(self, store: _Child) -> None:
        """Start it again whenever it has ended or hangs. Engines go on without it and connect to the new one."""
        pause = RESTART_PAUSE
        while True:
            await _until_gone(store)
            _kill(store.process)
            await store.process.wait()
            logger.error("KV store: ended or hung (status %s) and is started again", store.process.returncode)
            while store.process.returncode is not None:
                try:
                    store = self._store = await self._start_store(store.ports["port"])
                    pause = RESTART_PAUSE
                except (EngineError, OSError) as error:
                    logger.error("KV store: not started, again in %.1f s: %s", pause, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MAX_RESTART_PAUSE)

    async def _spawn(self, name: str, module: str, flags: list[str]) -> _Child:
        """Raises `EngineError`."""
        log_path = self._log_dir / f"{name}.log"
        try:
            process = await self._process(module, flags, log_path)
        except OSError as error:
            raise EngineError(f"engine {name}: its process could not be started: {error}") from error
        try:
            return _Child(process, await _announced_ports(process))
        except BaseException as error:
            await _end(process)
            if isinstance(error, (TimeoutError, ValueError)):
                raise EngineError(
                    f"engine {name}: did not start; {log_path} ends with:\n{log_tail(log_path)}"
                ) from error
            raise

    async def _process(self, module: str, flags: list[str], log_path: Path) -> asyncio.subprocess.Process:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        # One thread each: a pool of engines shares the machine, and matrix products this small do not gain from more.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with log_path.open("ab") as log:
            return await asyncio.create_subprocess_exec(
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


async def _announced_ports(process: asyncio.subprocess.Process) -> dict[str, int]:
    """The line of JSON that a child prints when it is ready. ValueError when it ends without one."""
    assert process.stdout is not None
    async with asyncio.timeout(START_SECONDS):
        line = await process.stdout.readline()
    ports: dict[str, int] = json.loads(line)
    return ports


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        _kill(process)
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()


async def _until_gone(store: _Child) -> None:
    """Until it has ended, or given no sign of life for too long. That we cannot ask is no sign of its death."""
    ended = asyncio.create_task(store.process.wait())
    silent = 0
    try:
        while silent < STORE_CHECKS:
            done, _ = await asyncio.wait({ended}, timeout=STORE_CHECK_SECONDS)
            if done:
                return
            try:
                async with asyncio.timeout(STORE_CHECK_SECONDS):
                    (await StoreClient.connected_to(HOST, store.ports["port"], 1)).close()
                silent = 0
            except TimeoutError:
                silent += 1
            except OSError as error:
                logger.info("KV store: not checked: %s", error)
    finally:
        ended.cancel()


def log_tail(path: Path) -> str:
    """The end of an engine's log, for an error's message."""
    try:
        return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace") if path.exists() else "(nothing)"
    except OSError as error:
        return f"(it cannot be read: {error})"
