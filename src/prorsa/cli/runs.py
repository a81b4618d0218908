"""Commands that run trajectories on real engines, and that look at such runs: rollout, train, serve, report, verify."""

from __future__ import annotations

import argparse
import asyncio
import logging
from pathlib import Path

from prorsa import commands
from prorsa.assembly import checkpoint, new_run_dir
from prorsa.cli.common import Subparsers, console, interruptible
from prorsa.config import Config, dump_config, load_config
from prorsa.gateway.logs import JsonFormatter, TextFormatter
from prorsa.gateway.serve import run_server, serve
from prorsa.report import charts
from prorsa.report.headline import headline
from prorsa.report.html import write_page, write_report
from prorsa.report.picture import write_picture
from prorsa.report.progress import LiveProgress
from prorsa.report.rundir import TRACE, read_run

LOG = "prorsa.log"


def add(subparsers: Subparsers) -> None:
    for name, work, text in (
        ("rollout", commands.rollout, "run trajectories without a trainer: evaluation, data, benchmarks"),
        ("train", commands.train, "train with verl; the rollout runs on prefill and decode engines"),
        (
            "serve",
            announced_gateway,
            "serve agents that run elsewhere over HTTP, as OpenAI and SGLang do, until stopped",
        ),
    ):
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.add_argument("config", help="YAML file")
        sub.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
        sub.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")
        sub.set_defaults(command=start, work=work)
    sub = subparsers.add_parser("report", help="write report.html of a run", description="Write report.html of a run.")
    sub.add_argument("run", help="run directory, complete or cut off")
    sub.add_argument("--svg", metavar="PATH", help="also write a picture of roles and forecast")
    sub.set_defaults(command=report)
    text = "generate every turn of a rollout again on one engine without flips and compare the tokens"
    sub = subparsers.add_parser("verify", help=text, description=text)
    sub.add_argument("run", help="directory of a finished `prorsa rollout`")
    sub.set_defaults(command=verify)


def start(parsed: argparse.Namespace) -> int:
    """A rollout or a training run, from its configuration to its report."""
    config = load_config(parsed.config, parsed.overrides)
    if parsed.dry_run:
        print(dump_config(config), end="")
        return 0
    checkpoint(config)
    run_dir = begin(config)
    endless = parsed.work is announced_gateway
    run = run_server if endless else asyncio.run
    try:
        with LiveProgress(run_dir, None if endless else config.rollout.steps, console):
            run(interruptible(parsed.work(config, run_dir)))
    except KeyboardInterrupt:
        if not endless:
            raise
        # That is how a server ends.
    finally:
        # However it ended: a run that was cut off is worth a look too.
        if (run_dir / TRACE).is_file():
            conclude(run_dir)
    return 0


async def announced_gateway(config: Config, run_dir: Path) -> None:
    def announce(url: str) -> None:
        console.print(f"gateway {url}   (OpenAI base URL {url}/v1)", soft_wrap=True)

    await serve(config, run_dir, announce)


def report(parsed: argparse.Namespace) -> int:
    console.print(f"{write_report(parsed.run)}", soft_wrap=True)
    if parsed.svg:
        console.print(f"{write_picture(parsed.run, parsed.svg)}", soft_wrap=True)
    return 0


def verify(parsed: argparse.Namespace) -> int:
    return asyncio.run(commands.verify(Path(parsed.run), console))


def begin(config: Config) -> Path:
    run_dir = new_run_dir(config)
    handler = logging.FileHandler(run_dir / LOG)
    handler.setFormatter(JsonFormatter() if config.gateway.log == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    console.print(f"run directory {run_dir}", soft_wrap=True)
    return run_dir


def conclude(run_dir: Path) -> None:
    """Write the report, and print the figures that head it."""
    drawn = charts.prepare(read_run(run_dir))
    path = write_page(drawn)
    for figure in headline(drawn.run, drawn.replayed):
        console.print(f"{figure.value:>13}  {figure.words}", highlight=False, soft_wrap=True)
    console.print(f"report {path}", soft_wrap=True)
