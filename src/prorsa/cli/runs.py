"""Commands that run trajectories on real engines, and that look at such runs: rollout, train, serve, report, verify."""

from __future__ import annotations

import argparse
import asyncio
import logging
from contextlib import suppress
from logging.handlers import RotatingFileHandler
from pathlib import Path

from prorsa import commands
from prorsa.assembly import checkpoint, new_run_dir
from prorsa.cli.common import Subparsers, console, fail, interruptible, say
from prorsa.cli.resuming import FREE, FREE_IN_TRAINING, resumed_config
from prorsa.config import Config, ConfigError, dump_config, load_config
from prorsa.gateway.logs import JsonFormatter, TextFormatter
from prorsa.gateway.serve import run_server, serve
from prorsa.report import charts
from prorsa.report.headline import headline
from prorsa.report.html import write_page, write_report
from prorsa.report.journal import explain
from prorsa.report.opening import refuse
from prorsa.report.picture import write_picture
from prorsa.report.progress import LiveProgress
from prorsa.report.rundir import TRACE, read_run

LOG = "prorsa.log"
LOG_BYTES, LOGS_KEPT = 128 << 20, 3
"""Of the log of a run, and how many such are kept beside it: `prorsa serve` writes a line a request."""


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
        resumable = name != "serve"
        sub.add_argument("config", nargs="?" if resumable else None, help="YAML file")
        sub.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the file")
        if resumable:
            sub.add_argument("--resume", metavar="RUN", help="go on with this run directory, which a run has left")
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
    run_dir = Path(parsed.resume) if getattr(parsed, "resume", None) else None
    config = configuration(parsed, run_dir)
    if parsed.dry_run:
        print(dump_config(config), end="")
        return 0
    checkpoint(config)
    if run_dir is not None:
        refuse(run_dir, "rollout" if parsed.work is commands.rollout else "train")
    if run_dir is not None and commands.is_complete(config, run_dir):
        say(f"{run_dir}: complete, {config.rollout.steps} steps are recorded")
        return 0
    run_dir = begin(config, run_dir)
    endless = parsed.work is announced_gateway
    run = run_server if endless else asyncio.run
    ended = False
    try:
        with LiveProgress(run_dir, None if endless else config.rollout.steps, console):
            run(interruptible(parsed.work(config, run_dir)))
        ended = True
    except KeyboardInterrupt:
        if not endless:
            raise
        # That is how a server ends.
        ended = True
    finally:
        # However it ended: a run that was cut off is worth a look too.
        concluded = not (run_dir / TRACE).is_file() or conclude(run_dir)
    return 0 if ended and concluded else 1


def configuration(parsed: argparse.Namespace, run_dir: Path | None) -> Config:
    """Raises `ConfigError`."""
    if run_dir is None:
        if parsed.config is None:
            raise ConfigError("config: missing; give a YAML file, or `--resume RUN`")
        return load_config(parsed.config, parsed.overrides)
    # With --resume there is no file, so what stands in its place is the first override.
    overrides = [*([] if parsed.config is None else [parsed.config]), *parsed.overrides]
    if parsed.config is not None and "=" not in parsed.config:
        raise ConfigError(f"config={parsed.config}: --resume takes the run's own configuration; leave the file out")
    return resumed_config(run_dir, overrides, FREE if parsed.work is commands.rollout else FREE_IN_TRAINING)


async def announced_gateway(config: Config, run_dir: Path) -> None:
    def announce(url: str) -> None:
        say(f"gateway {url}   (OpenAI base URL {url}/v1)")

    await serve(config, run_dir, announce)


def report(parsed: argparse.Namespace) -> int:
    say(f"{write_report(parsed.run)}")
    if parsed.svg:
        say(f"{write_picture(parsed.run, parsed.svg)}")
    return 0


def verify(parsed: argparse.Namespace) -> int:
    return asyncio.run(commands.verify(Path(parsed.run), console))


def begin(config: Config, run_dir: Path | None = None) -> Path:
    """Open the log; without a run directory, in a new one."""
    run_dir = run_dir or new_run_dir(config)
    handler = RunLog(run_dir / LOG, maxBytes=LOG_BYTES, backupCount=LOGS_KEPT)
    handler.setFormatter(JsonFormatter() if config.gateway.log == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("prorsa.report").addHandler(OnScreen(logging.WARNING))
    say(f"run directory {run_dir}")
    return run_dir


class RunLog(RotatingFileHandler):
    """What it cannot write is left out: a traceback of each line would bury the screen, and the recorder says why."""

    def handleError(self, record: logging.LogRecord) -> None: ...  # noqa: N802


class OnScreen(logging.Handler):
    """Shows what is wrong with the recording, above the live view."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the screen may be a file on the full disk
            say(record.getMessage())


def conclude(run_dir: Path) -> bool:
    """Write the report, and print the figures that head it. Where that fails it says so: how the run ended counts more."""
    try:
        drawn = charts.prepare(read_run(run_dir))
        for figure in headline(drawn.run, drawn.replayed):
            say(f"{figure.value:>13}  {figure.words}")
        say(f"report {write_page(drawn)}")
    except Exception as error:
        logging.getLogger(__name__).exception("no report")
        what = explain(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        fail(f"no report: {what}; `prorsa report {run_dir}` writes it", 1)
        return False
    return True
