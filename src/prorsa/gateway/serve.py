"""`prorsa serve`: engines, control plane and gateway as a configuration says, recorded in a run directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from prorsa.assembly import build_tokenizer, checkpoint, running_cluster
from prorsa.cluster.control import ControlPlane
from prorsa.cluster.observers import Observer
from prorsa.config import Config, dump_config
from prorsa.gateway.admin import TOKEN_FILE, admin_token
from prorsa.gateway.arrivals import ObservedRate
from prorsa.gateway.live import LiveView
from prorsa.gateway.metrics import Metrics
from prorsa.gateway.server import Gateway, listening
from prorsa.report.recorder import RunRecorder
from prorsa.report.rundir import LOGS

ADDRESS = "gateway.json"
"""In the run directory: where the gateway listens, for scripts."""


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
    limits = config.gateway
    token_file = Path(limits.admin_token_file or run_dir / TOKEN_FILE)
    token = admin_token(token_file)
    tokenizer, model = build_tokenizer(config), model_name(config)
    metrics, live = Metrics(), LiveView(config.name)
    with RunRecorder(run_dir, dump_config(config)) as recorder:
        observers: list[Observer] = [recorder, metrics, live]
        async with running_cluster(config, run_dir / LOGS, observers, ObservedRate()) as control:
            gateway = Gateway(control, config, tokenizer, model, token, metrics, live)
            async with listening(gateway, limits.host, limits.port) as url:
                address = {"url": url, "model": model, "admin_token_file": str(token_file)}
                (run_dir / ADDRESS).write_text(json.dumps(address) + "\n")
                yield Served(url, token, control, gateway)


def model_name(config: Config) -> str:
    """What clients call the model: the name of its checkpoint's directory."""
    return Path(checkpoint(config)).resolve().name


async def serve(config: Config, run_dir: Path, announce: Callable[[str], None]) -> None:
    """Until it is cancelled. `announce` is given the address."""
    async with serving(config, run_dir) as served:
        announce(served.url)
        await asyncio.get_running_loop().create_future()
