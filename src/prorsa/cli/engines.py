"""`prorsa engines launch`: the engines of a configuration alone, without a control plane over them."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

from prorsa import commands
from prorsa.assembly import checkpoint, new_run_dir
from prorsa.cli.common import Subparsers, console, interruptible, say
from prorsa.config import Config, load_config
from prorsa.report.legible import plain_text


def add(subparsers: Subparsers) -> None:
    text = "start and stop engines by themselves"
    engines = subparsers.add_parser("engines", help=text, description=text).add_subparsers(
        required=True, metavar="COMMAND"
    )
    text = "start the engines of a configuration, say where they listen, and keep them until Ctrl-C"
    sub = engines.add_parser("launch", help=text, description=text)
    sub.add_argument("config", help="YAML file")
    sub.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
    sub.set_defaults(command=launch)


def launch(parsed: argparse.Namespace) -> int:
    config = load_config(parsed.config, parsed.overrides)
    checkpoint(config)
    asyncio.run(interruptible(_launch(config, new_run_dir(config))))
    return 0


async def _launch(config: Config, run_dir: Path) -> None:
    say(f"run directory {run_dir}")
    with console.status("starting engines") as status:
        progress = _Progress(lambda words: status.update(plain_text(words)))
        logger = logging.getLogger("prorsa.engines")
        logger.addHandler(progress)
        logger.setLevel(logging.INFO)
        async with commands.launched_engines(config, run_dir) as engines:
            status.stop()
            for engine in engines:
                console.print(
                    f"{engine.name:>12}  {engine.role:<7}  {engine.url}  bootstrap port {engine.bootstrap_port}",
                    soft_wrap=True,
                )
            await asyncio.get_running_loop().create_future()


class _Progress(logging.Handler):
    def __init__(self, show: commands.Show) -> None:
        super().__init__()
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())
