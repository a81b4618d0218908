"""The commands. Each checks its arguments, does its work through `prorsa.commands`, and turns errors into one message.

Exit status: 0 done, 1 the run failed, 2 the arguments or the configuration cannot be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from prorsa import commands
from prorsa.assembly import checkpoint, new_run_dir
from prorsa.cluster.turns import TurnFailed
from prorsa.config import Config, ConfigError, dump_config, load_config
from prorsa.engines.protocol import EngineError
from prorsa.report import charts
from prorsa.report.analysis import analyse, write_json
from prorsa.report.analysis import write_page as write_analysis
from prorsa.report.characterise import BadEvents
from prorsa.report.headline import headline
from prorsa.report.html import write_page, write_report
from prorsa.report.picture import write_picture
from prorsa.report.progress import LiveProgress
from prorsa.report.rundir import TRACE, read_run
from prorsa.rollout.controller import RolloutFailed
from prorsa.rollout.sandboxes.base import SandboxError

LOG = "prorsa.log"
console = Console()
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = build_parser().parse_args(arguments)
    try:
        status: int = parsed.command(parsed)
    except (ConfigError, FileNotFoundError) as error:
        return fail(error, 2)
    except (EngineError, RolloutFailed, SandboxError, TurnFailed, commands.CommandFailed) as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        return 130
    return status


def fail(error: Exception, status: int) -> int:
    print(f"prorsa: {error}", file=sys.stderr)
    return status


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prorsa", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, work, text in (
        ("rollout", commands.rollout, "run trajectories without a trainer: evaluation, data, benchmarks"),
        ("train", commands.train, "train with verl; the rollout runs on prefill and decode engines"),
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
    add_analyze(subparsers)
    text = "generate every turn of a rollout again on one engine without flips and compare the tokens"
    sub = subparsers.add_parser("verify", help=text, description=text)
    sub.add_argument("run", help="directory of a finished `prorsa rollout`")
    sub.set_defaults(command=verify)
    return parser


def add_analyze(subparsers: Subparsers) -> None:
    text = "describe what a rollout asks of its engines: tokens over time, turns, tools, where the time goes"
    sub = subparsers.add_parser("analyze", help=text, description=text)
    sub.add_argument("run", metavar="RUN|TRACE", help="run directory, or a lifecycle trace alone")
    sub.add_argument("--step-windows", type=positive, default=10.0, metavar="SECONDS", help="default 10")
    sub.add_argument("--json", metavar="PATH", help="write every number (docs/analysis.md says what each is)")
    sub.add_argument("--out", metavar="PATH", help="write a page with charts (HTML)")
    sub.set_defaults(command=analyze)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def start(parsed: argparse.Namespace) -> int:
    """A rollout or a training run, from its configuration to its report."""
    config = load_config(parsed.config, parsed.overrides)
    if parsed.dry_run:
        print(dump_config(config), end="")
        return 0
    checkpoint(config)
    run_dir = begin(config)
    try:
        with LiveProgress(run_dir, config.rollout.steps, console):
            asyncio.run(interruptible(parsed.work(config, run_dir)))
    finally:
        # However it ended: a run that was cut off is worth a look too.
        if (run_dir / TRACE).is_file():
            conclude(run_dir)
    return 0


def report(parsed: argparse.Namespace) -> int:
    console.print(f"{write_report(parsed.run)}", soft_wrap=True)
    if parsed.svg:
        console.print(f"{write_picture(parsed.run, parsed.svg)}", soft_wrap=True)
    return 0


def analyze(parsed: argparse.Namespace) -> int:
    try:
        analysis = analyse(parsed.run, parsed.step_windows)
        console.print(analysis)
        for path, write in ((parsed.json, write_json), (parsed.out, write_analysis)):
            if path is not None:
                console.print(f"{write(analysis, path)}", soft_wrap=True)
    except (BadEvents, OSError) as error:
        return fail(error, 2)
    return 0


def verify(parsed: argparse.Namespace) -> int:
    return asyncio.run(commands.verify(Path(parsed.run), console))


def begin(config: Config) -> Path:
    run_dir = new_run_dir(config)
    logging.basicConfig(
        filename=run_dir / LOG, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    console.print(f"run directory {run_dir}", soft_wrap=True)
    return run_dir


def conclude(run_dir: Path) -> None:
    """Write the report, and print the figures that head it."""
    drawn = charts.prepare(read_run(run_dir))
    path = write_page(drawn)
    for figure in headline(drawn.run, drawn.replayed):
        console.print(f"{figure.value:>13}  {figure.words}", highlight=False, soft_wrap=True)
    console.print(f"report {path}", soft_wrap=True)


async def interruptible(work: Coroutine[Any, Any, None]) -> None:
    """SIGTERM ends the work as Ctrl-C does: in order."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


if __name__ == "__main__":
    sys.exit(main())
