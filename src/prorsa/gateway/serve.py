"""`prorsa serve`: engines, control plane and gateway as a configuration says, recorded in a run directory."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVarTuple

import uvloop

from prorsa.assembly import build_tokenizer, checkpoint, running_cluster
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.observers import Observer
from prorsa.config import Config, ConfigError, dump_config
from prorsa.engines.descriptors import raise_open_files
from prorsa.gateway.arrivals import ObservedRate
from prorsa.gateway.connections import most_connections
from prorsa.gateway.keys import KEY_VARIABLE, TOKEN_FILE, admin_token, api_key
from prorsa.gateway.live import LiveView
from prorsa.gateway.metrics import Metrics
from prorsa.gateway.server import Gateway, listening, resolved
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import LOGS

if TYPE_CHECKING:
    from prorsa.gateway.traces import Traces

Ts = TypeVarTuple("Ts")
ADDRESS = "gateway.json"
"""In the run directory: where the gateway listens, for scripts."""
TICK = 0.0015
"""Seconds. uvloop counts whole milliseconds: a timer may be one and a half early."""
SWITCH_SECONDS = 0.0005
"""How long a thread with a large request may keep Python's lock while the loop waits for it, which it does at every event."""
YOUNG_OBJECTS = 10_000
"""So many more than at the last look before the garbage collector looks again. A stream has some hundred, nearly all of which
go by themselves when it ends: with Python's 700 a fifth of the CPU time went into looking."""


class Loop(uvloop.Loop):
    """uvloop with the clock of asyncio: its own shows the last look at the sockets, and may be behind when a timer is due."""

    def time(self) -> float:
        return time.monotonic()

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_later(delay + TICK if delay > 0 else 0, callback, *args, context=context)


def run_server(work: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` on that loop, for a process that does nothing else."""
    gc.freeze()  # what is imported stays
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(work)


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that listens."""

    url: str
    token: str
    control: ControlPlane
    gateway: Gateway


@asynccontextmanager
async def serving(config: Config, run_dir: Path) -> AsyncIterator[Served]:
    """Leaving it ends the turns in service, the trajectories, and then the engines. Raises `ConfigError`, `EngineError`."""
    most_connections(config, raise_open_files())  # what does not fit is refused before any engine starts
    limits = config.gateway
    token_file = Path(limits.admin_token_file or run_dir / TOKEN_FILE)
    token, key = admin_token(token_file), api_key(limits.api_key_file)
    if key is None:
        await _refuse_unless_loopback(limits.host, limits.port)
    tokenizer, model = build_tokenizer(config), model_name(config)
    metrics, live = Metrics(), LiveView(config.name)
    memory = config.recording.memory_mb << 20
    with RunRecorder(run_dir, dump_config(config), command="serve", memory=memory) as recorder:
        async with tracing(limits.traces) as traces:
            observers: list[Observer] = [recorder, metrics, live, *([] if traces is None else [traces])]
            async with running_cluster(config, run_dir / LOGS, observers, ObservedRate()) as control:
                gateway = Gateway(control, config, tokenizer, model, token, metrics, live, traces, key)
                async with listening(gateway, limits.host, limits.port) as url:
                    address = {"url": url, "model": model, "admin_token_file": str(token_file)}
                    (run_dir / ADDRESS).write_text(json.dumps(address) + "\n")
                    yield Served(url, token, control, gateway)


async def _refuse_unless_loopback(host: str, port: int) -> None:
    """Raises `ConfigError`."""
    for _, (address, _) in await resolved(host, port):
        if not ip_address(address).is_loopback:
            raise ConfigError(
                f"gateway.host={host!r}: without an API key every machine that reaches {address} could use the engines; "
                f"set gateway.api_key_file or the environment variable {KEY_VARIABLE}, or listen at 127.0.0.1"
            )


@asynccontextmanager
async def tracing(where: str | None) -> AsyncIterator[Traces | None]:
    """Traces that go to `where` (see `gateway.traces`), until they are left. Raises `ConfigError`."""
    if where is None:
        yield None
        return
    try:
        from prorsa.gateway.traces import traced
    except ImportError as error:
        raise ConfigError(
            f"gateway.traces={where!r}: needs OpenTelemetry; pip install 'prorsa[otel]', or set it to null"
        ) from error
    async with traced(where) as traces:
        yield traces


def model_name(config: Config) -> str:
    """What clients call the model: the name of its checkpoint's directory."""
    return Path(checkpoint(config)).resolve().name


async def serve(config: Config, run_dir: Path, announce: Callable[[str], None]) -> None:
    """Until it is cancelled. `announce` is given the address."""
    async with serving(config, run_dir) as served:
        announce(served.url)
        await asyncio.get_running_loop().create_future()
