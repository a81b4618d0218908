"""Starts and ends SGLang engines on this machine, through a keeper process that ends them when this process dies.

Like `engines.launcher` of the embedded engine: engines are known by name, each with a log file of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import random
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from prorsa.engines.launcher import log_tail
from prorsa.engines.protocol import SPLIT_ROLES, EngineError, EngineGone, Role, Shortage
from prorsa.engines.sglang import SGLangEngine
from prorsa.engines.sglang_server.flags import HOST, EngineFlags, Mooncake

logger = logging.getLogger(__name__)

HEALTH_POLL_SECONDS = 0.5
PROGRESS_SECONDS = 15.0
"""How often a start that takes long is reported."""
KEEPER_STOP_SECONDS = 10.0
KEEPER_ANSWER_SECONDS = 60.0
"""Within which a keeper that lives has ended a child, far more than it gives the child."""
CHECK_SECONDS, CHECKS = 5.0, 2
"""How often a program of the KV store is asked for a sign of life, and how many times in a row it may give none."""
RESTART_PAUSE, MAX_RESTART_PAUSE = 1.0, 60.0
"""Seconds until a program of the KV store that did not start is tried again: the first pause, which doubles, and the last."""
LOWEST_PORT = 20000
STANDINS = Path(__file__).parent / "cpu_standins"
NVIDIA = Path("/dev/nvidiactl")


def gpu_here() -> bool:
    return NVIDIA.exists()


@dataclass(slots=True)
class _Child:
    log: Path
    gpus: tuple[int, ...] = ()
    """That are its own."""
    pid: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Its exit status; -1 where it could not be started."""
    reason: str = ""
    """Why it could not be."""
    keeper: _Keeper | None = None
    """Whose child it is."""
    engine: SGLangEngine | None = None


class SGLangLauncher:
    """Owns the engines. `python` is the interpreter that has SGLang; `start_seconds` bounds one engine's start.

    With `kv_store_dir` they share their KV as files in a new directory below it, with `mooncake_gb` in a Mooncake store of
    that size, GiB, on this machine; either goes when they do.
    """

    def __init__(
        self,
        python: str,
        flags: EngineFlags,
        *,
        start_seconds: float,
        log_dir: Path,
        kv_store_dir: Path | None = None,
        mooncake_gb: float | None = None,
        gpus: int | None = None,
    ) -> None:
        """`gpus` is how many the engines may have together; None sets no bound."""
        self._gpus = gpus
        self._python = python
        self._flags = flags
        self._kv_store_dir = kv_store_dir
        self._mooncake_gb = mooncake_gb
        self._start_seconds = start_seconds
        self._log_dir = log_dir
        self._engines: dict[str, _Child] = {}
        self._keeper: asyncio.Task[_Keeper] | None = None
        self._programs: dict[str, _Child] = {}
        """Of the KV store."""
        self._watches: list[asyncio.Task[None]] = []
        self._ports: set[int] = set()

    @property
    def roles(self) -> frozenset[Role]:
        """Those between which an engine can change without a restart: they need equal parallelism. A mixed one, launched as
        that, stays it."""
        return SPLIT_ROLES if len({self._flags.gpus(role) for role in SPLIT_ROLES}) == 1 else frozenset()

    async def start(self, name: str, role: Role) -> SGLangEngine:
        """Start an engine and wait until it serves. Several can start at once. Raises `EngineError` with its log's end."""
        if name in self._engines:
            raise EngineError(f"engine {name}: is running already; stop it first")
        gpus = self._free_gpus(name, role)
        child = self._engines[name] = _Child(self._log_dir / f"{name}.log", gpus)
        try:
            port, bootstrap_port = self._free_port(), self._free_port()
            keeper = await self._running_keeper()
            environment = {"CUDA_VISIBLE_DEVICES": _devices(gpus)} if self._flags.device == "cuda" else {}
            # Left to itself SGLang takes one that was free a moment ago, and so may the engine beside it.
            group_port = f"--nccl-port={self._free_port()}"
            child.keeper = keeper
            keeper.start(name, child, [group_port, *self._flags.of_engine(role, port, bootstrap_port)], environment)
            roles = self.roles if role in self.roles else frozenset({role})
            engine = child.engine = SGLangEngine(name, f"http://{HOST}:{port}", HOST, bootstrap_port, roles=roles)
            await self._wait_until_it_serves(f"engine {name}", child, lambda: _serves(engine))
        except BaseException:
            await self.stop(name)
            raise
        return engine

    async def stop(self, name: str) -> None:
        """End an engine; harmless when it is dead already. KeyError when there was none of that name."""
        child = self._engines[name]
        await self._end(name, child, "stop")

    async def _end(self, name: str, child: _Child, do: str) -> None:
        if child.engine is not None:
            await child.engine.close()
        if child.keeper is not None:
            await child.keeper.stop(name, do)
        # Until now it had its GPUs.
        self._engines.pop(name, None)

    async def restart(self, name: str, role: Role) -> SGLangEngine:
        """A new process under the old name, whether the old one lives, hangs, is dead or never started. It has the weights
        that the launcher was made with: update them if newer ones are in use.

        The old one is killed: one that hung and woke would still write KV into memory that others have by now.
        """
        if name in self._engines:
            await self._end(name, self._engines[name], "kill")
        return await self.start(name, role)

    async def close(self) -> None:
        """End every process."""
        await asyncio.gather(*(self.stop(name) for name in list(self._engines)))
        for watch in self._watches:
            watch.cancel()
        for ended in await asyncio.gather(*self._watches, return_exceptions=True):
            if isinstance(ended, EngineError):
                logger.error("the KV was not shared to the end: %s", ended)
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            await asyncio.wait([keeper])
            if keeper.exception() is None:
                await asyncio.gather(*(keeper.result().stop(program) for program in self._programs))
                await keeper.result().close()
            if isinstance(self._flags.kv_store, str) and self._kv_store_dir is not None:
                shutil.rmtree(self._flags.kv_store, ignore_errors=True)

    def pid(self, name: str) -> int:
        """Of an engine or a program of the KV store."""
        return {**self._engines, **self._programs}[name].pid.result()

    async def _running_keeper(self) -> _Keeper:
        """Started anew where it did not start or has ended; its children ended with it."""
        former = None
        if self._keeper is not None and _is_over(self._keeper):
            former, self._keeper = self._keeper, None
            for watch in self._watches:
                watch.cancel()
            self._watches.clear()
        if self._keeper is None:
            if self._kv_store_dir is not None and not isinstance(self._flags.kv_store, str):
                self._kv_store_dir.mkdir(parents=True, exist_ok=True)
                self._flags = replace(self._flags, kv_store=tempfile.mkdtemp(prefix="kv-", dir=self._kv_store_dir))
            self._keeper = asyncio.create_task(self._start_keeper(former))
        return await asyncio.shield(self._keeper)

    async def _start_keeper(self, former: asyncio.Task[_Keeper] | None) -> _Keeper:
        if former is not None and not former.cancelled() and former.exception() is None:
            await former.result().close()
        keeper = await _start_keeper(self._python, self._flags.device, self._log_dir)
        if self._mooncake_gb is not None:
            try:
                self._flags = replace(self._flags, kv_store=await self._start_mooncake(keeper, self._mooncake_gb))
            except BaseException:
                await keeper.close()
                raise
        return keeper

    async def _start_mooncake(self, keeper: _Keeper, gigabytes: float) -> Mooncake:
        """A master, and a client that holds what is stored."""
        port, client_port, metrics_port, http_port = (self._free_port() for _ in range(4))
        master = f"{HOST}:{port}"
        await self._run(
            keeper,
            "mooncake_master",
            (port, metrics_port),
            f"--rpc_address={HOST}",
            f"--rpc_port={port}",
            f"--metrics_host={HOST}",
            f"--metrics_port={metrics_port}",
            "--enable_metric_reporting=false",
        )
        await self._run(
            keeper,
            "mooncake_client",
            (client_port, http_port),
            "--enable_http_server=true",
            f"--http_port={http_port}",
            f"--host={HOST}",
            f"--port={client_port}",
            f"--master_server_address={master}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--global_segment_size={int(gigabytes * 2**30)}",
        )
        return Mooncake(master, "tcp")

    async def _run(self, keeper: _Keeper, program: str, ports: tuple[int, int], *flags: str) -> None:
        """Run a program of the engines' environment, and again whenever it ends or hangs, until `close`. Returns when it
        listens. `ports` are where it serves, and where it answers HTTP while it lives."""
        port, http_port = ports
        command = [str(Path(self._python).with_name(program).absolute()), *flags, "--logtostderr"]

        async def start() -> _Child:
            child = self._programs[program] = _Child(self._log_dir / f"{program}.log")
            keeper.run(program, child, command)
            await self._wait_until_it_serves(program, child, lambda: _listens(port))
            return child

        async def watch(child: _Child) -> None:
            pause = RESTART_PAUSE
            while not keeper.ended:
                await _until_gone(child, http_port)
                await keeper.stop(program, "kill")
                status = child.ended.result()
                logger.error("%s: ended with status %d and is started again; see %s", program, status, child.log)
                try:
                    child = await start()
                    pause = RESTART_PAUSE
                except EngineError as error:
                    logger.error("%s: not started, again in %.0f s: %s", program, pause, error)
                    child = self._programs[program]
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, MAX_RESTART_PAUSE)

        self._watches.append(asyncio.create_task(watch(await start()), name=f"watch over {program}"))

    async def _wait_until_it_serves(self, what: str, child: _Child, serves: Callable[[], Awaitable[bool]]) -> None:
        now = asyncio.get_running_loop().time
        start = reported = now()
        while not await serves():
            await asyncio.wait([child.ended], timeout=HEALTH_POLL_SECONDS)
            if child.ended.done():
                if child.reason:
                    raise EngineError(f"{what}: could not be started: {child.reason}")
                raise EngineError(
                    f"{what}: ended with status {child.ended.result()} before it served; {child.log} ends with:\n"
                    f"{log_tail(child.log)}"
                )
            if now() - start > self._start_seconds:
                raise EngineError(
                    f"{what}: did not serve after {self._start_seconds:.0f} s; {child.log} ends with:\n"
                    f"{log_tail(child.log)}"
                )
            if now() - reported > PROGRESS_SECONDS:
                reported = now()
                logger.info("%s: starting since %.0f s: %s", what, now() - start, _last_line(child.log))
        logger.info("%s: serves after %.1f s", what, now() - start)

    def _free_gpus(self, name: str, role: Role) -> tuple[int, ...]:
        """The lowest numbers that no other engine has."""
        count = self._flags.gpus(role)
        taken = {gpu for child in self._engines.values() for gpu in child.gpus}
        free = (gpu for gpu in itertools.count() if gpu not in taken)
        if self._gpus is not None and len(taken) + count > self._gpus:
            raise EngineError(
                f"engine {name}: as {role} it takes {count} GPUs, and {self._gpus - len(taken)} of {self._gpus} are free"
            )
        return tuple(itertools.islice(free, count))

    def _free_port(self) -> int:
        """A port that is free, was not given before, and is not among those that the system hands to connections: the engine
        takes it seconds later."""
        highest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        while True:
            port = random.SystemRandom().randrange(LOWEST_PORT, highest)
            with socket.socket() as probe:
                if port not in self._ports and probe.connect_ex((HOST, port)) != 0:
                    self._ports.add(port)
                    return port


class _Keeper:
    """The keeper process, and whose lives it tells of."""

    def __init__(self, process: asyncio.subprocess.Process, directory: str) -> None:
        self._process = process
        self._directory = directory
        self._children: dict[str, _Child] = {}
        self._listening = asyncio.create_task(self._listen(), name="SGLang keeper")

    def start(self, name: str, child: _Child, flags: list[str], environment: dict[str, str]) -> None:
        """An engine."""
        self._begin("start", name, child, flags, environment)

    def run(self, name: str, child: _Child, command: list[str]) -> None:
        self._begin("run", name, child, command, {})

    def _begin(self, do: str, name: str, child: _Child, arguments: list[str], environment: dict[str, str]) -> None:
        self._children[name] = child
        self._order(do=do, name=name, arguments=arguments, environment=environment, log=str(child.log.absolute()))

    @property
    def ended(self) -> bool:
        return self._listening.done()

    async def stop(self, name: str, do: str = "stop") -> None:
        """End a child, unless it has ended; `kill` gives it no time."""
        ended = self._children[name].ended
        if not ended.done():
            self._order(do=do, name=name)
            await asyncio.wait([ended], timeout=KEEPER_ANSWER_SECONDS)
        if not ended.done():
            self._process.kill()  # it hangs; its children die with it
            await asyncio.wait([ended])

    async def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(KEEPER_STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._listening
        shutil.rmtree(self._directory, ignore_errors=True)

    def _order(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            event = json.loads(line)
            child = self._children[event["name"]]
            if event["event"] == "started":
                child.pid.set_result(event["pid"])
            elif event["event"] == "failed":
                child.reason = event["reason"]
                child.ended.set_result(-1)
            elif not child.ended.done():
                child.ended.set_result(event["status"])
        for child in self._children.values():
            if not child.ended.done():
                child.ended.set_result(-9)


def _is_over(keeper: asyncio.Task[_Keeper]) -> bool:
    if not keeper.done():
        return False
    return keeper.cancelled() or keeper.exception() is not None or keeper.result().ended


async def _start_keeper(python: str, device: str, log_dir: Path) -> _Keeper:
    log_dir.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240
    log_path = log_dir / "sglang-keeper.log"
    # SGLang leaves temporary files behind; in a directory of their own they go when the engines do.
    directory = tempfile.mkdtemp(prefix="prorsa-")
    try:
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                python,
                "-m",
                "prorsa.engines.sglang_server.keeper",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_environment(device), "TMPDIR": directory},
                # A Ctrl-C at the terminal is for the parent, which ends its children in order.
                start_new_session=True,
            )
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise EngineError(f"SGLang in {python}: its keeper could not be started: {error}") from error
    assert process.stdout is not None
    try:
        told = await process.stdout.readline()
    except BaseException:
        process.kill()
        await process.wait()
        shutil.rmtree(directory, ignore_errors=True)
        raise
    event = json.loads(told) if told else {"event": "refused", "reason": f"{log_path} ends with:\n{log_tail(log_path)}"}
    keeper = _Keeper(process, directory)
    if event["event"] != "ready":
        await keeper.close()
        raise EngineError(f"SGLang in {python}: {event['reason']}")
    return keeper


def _environment(device: str) -> dict[str, str]:
    environment = {
        "PRORSA_SGLANG_DEVICE": device,
        # The health check of an idle engine would be a request of its own, in the way of a flip.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_EXTERNAL_MODEL_PACKAGE": "prorsa.engines.sglang_server.cpu_models",
            "PYTHONPATH": os.pathsep.join([str(STANDINS), *filter(None, [os.environ.get("PYTHONPATH")])]),
            # With a stand-in for triton PyTorch's compiler, which SGLang uses under tensor parallelism, does not end.
            "TORCHDYNAMO_DISABLE": "1",
            # One thread each: a pool of engines shares the machine.
            "OMP_NUM_THREADS": "1",
        }
    return environment


def _devices(gpus: Sequence[int]) -> str:
    """Their names among those that we see ourselves. Raises `EngineError`."""
    ours = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not ours:
        return ",".join(map(str, gpus))
    names = ours.split(",")
    if max(gpus) >= len(names):
        raise EngineError(f"CUDA_VISIBLE_DEVICES={ours} is {len(names)} GPUs, too few for all engines")
    return ",".join(names[gpu] for gpu in gpus)


async def _serves(engine: SGLangEngine) -> bool:
    try:
        await engine.info()
    except (EngineGone, Shortage):
        return False
    return True


async def _until_gone(child: _Child, http_port: int) -> None:
    """Until it has ended, or given no sign of life for too long. That we cannot ask is no sign of its death."""
    silent = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CHECK_SECONDS)) as session:
        while silent < CHECKS:
            if (await asyncio.wait([child.ended], timeout=CHECK_SECONDS))[0]:
                return
            try:
                async with session.get(f"http://{HOST}:{http_port}/metrics"):
                    silent = 0
            except TimeoutError:
                silent += 1
            except (aiohttp.ClientError, OSError) as error:
                logger.info("port %d: not checked: %r", http_port, error)


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True


def _last_line(path: Path) -> str:
    lines = log_tail(path).rstrip().splitlines()
    return lines[-1] if lines else "(no output yet)"
