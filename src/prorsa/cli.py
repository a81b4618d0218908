"""The commands. Each checks its arguments, does its work through `prorsa.commands`, and turns errors into one message.

Exit status: 0 done, 1 the run failed, 2 the arguments or the configuration cannot be used, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from rich.console import Console

from prorsa import commands
from prorsa.assembly import checkpoint, new_run_dir
from prorsa.cluster.turns import TurnFailed
from prorsa.config import Config, ConfigError, apply_override, dump_config, load_config
from prorsa.engines.protocol import EngineError
from prorsa.engines.sglang import SGLangEngine
from prorsa.gateway.logs import JsonFormatter
from prorsa.gateway.serve import serve
from prorsa.report import charts
from prorsa.report import comparison as comparison_report
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
from prorsa.simulation.experiments import plan as planning
from prorsa.simulation.experiments import reproduce as reproduction
from prorsa.simulation.experiments.compare import compare
from prorsa.simulation.experiments.grid import ExperimentFailed, Grid
from prorsa.simulation.experiments.settings import FULL, QUICK, scenario_path, shipped_scenarios
from prorsa.simulation.experiments.terminal import GridProgress, advice_view, findings_tables
from prorsa.simulation.measure import Limits
from prorsa.simulation.scenario import load_scenario

LOG = "prorsa.log"
console = Console()
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = build_parser().parse_args(arguments)
    try:
        status: int = parsed.command(parsed)
    except (ConfigError, FileNotFoundError) as error:
        return fail(error, 2)
    except (EngineError, RolloutFailed, SandboxError, TurnFailed, commands.CommandFailed, ExperimentFailed) as error:
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
    add_analyze(subparsers)
    text = "generate every turn of a rollout again on one engine without flips and compare the tokens"
    sub = subparsers.add_parser("verify", help=text, description=text)
    sub.add_argument("run", help="directory of a finished `prorsa rollout`")
    sub.set_defaults(command=verify)
    add_profile(subparsers)
    add_simulate(subparsers)
    add_plan(subparsers)
    add_reproduce(subparsers)
    return parser


def add_profile(subparsers: Subparsers) -> None:
    text = "measure running engines, or the embedded ones of a configuration, and write a profile to simulate them with"
    sub = subparsers.add_parser("profile", help=text, description=text)
    sub.add_argument(
        "endpoints",
        nargs="*",
        metavar="URL[,PORT]",
        help="a mixed engine, or a prefill engine with its bootstrap port (default 8998) and a decode engine, or all three",
    )
    sub.add_argument("--config", metavar="FILE", help="start the embedded engines of this configuration instead")
    sub.add_argument("--out", required=True, metavar="PROFILE.yaml", help="the grid goes beside it")
    sub.add_argument("--max-context", type=int, metavar="TOKENS", help="longest prompt and output to measure")
    sub.add_argument("--chunk", type=int, default=4096, help="tokens that the engine prefills in a step (default 4096)")
    sub.add_argument("--max-running", type=int, default=32, help="requests that it decodes at once (default 32)")
    sub.add_argument("--rounds", type=int, default=5, help="each point is the median of so many (default 5)")
    sub.add_argument("--weights", metavar="PATH", help="checkpoint whose loading is timed (default: the one served)")
    sub.add_argument("--gpu", default="unnamed", help="what the engine runs on, for the profile's reader")
    sub.add_argument("--gpus", type=int, default=1, help="GPUs of an engine (default 1)")
    sub.add_argument("--kv-bytes", type=int, help="KV cache of a token (default: read off the checkpoint)")
    sub.set_defaults(command=profile)


def add_simulate(subparsers: Subparsers) -> None:
    text = "roll out a scenario on a virtual cluster of measured GPUs, under several policies side by side"
    shipped = ", ".join(shipped_scenarios())
    sub = subparsers.add_parser("simulate", help=text, description=text, epilog=f"Shipped scenarios: {shipped}")
    sub.add_argument("scenario", help="name of a shipped scenario, or a YAML file")
    sub.add_argument("overrides", nargs="*", metavar="section.key=value", help="replace values of the scenario")
    sub.add_argument("--policy", action="append", default=[], metavar="NAME", help="of the scenario's; default: all")
    sub.add_argument("--json", metavar="PATH", help="write every number (docs/analysis.md says what each is)")
    sub.add_argument("--out", default="report.html", metavar="PATH", help="the page with charts (default report.html)")
    sub.add_argument("--record", metavar="DIR", help="also write a run directory for each policy, as a rollout does")
    sub.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    sub.add_argument("--dry-run", action="store_true", help="print the resolved scenario and stop")
    sub.set_defaults(command=simulate)


def add_plan(subparsers: Subparsers) -> None:
    text = "simulate ways to run a rollout, and say whether to split prefill from decode, how, and what it would gain"
    sub = subparsers.add_parser("plan", help=text, description=text)
    source = sub.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="RUN|TRACE", help="recorded trajectories: a run directory or a trace")
    source.add_argument("--workload", choices=("math", "coding-agent", "general-agent"), help="a model of a task")
    sub.add_argument(
        "--profile", action="append", required=True, metavar="NAME|FILE", help="of the model; may be repeated"
    )
    sub.add_argument(
        "--decode-profile", action="append", default=[], metavar="NAME|FILE", help="for decode instances only"
    )
    sub.add_argument("--gpus", type=int, required=True, help="GPUs of the cluster")
    sub.add_argument("--concurrency", type=int, default=512, help="trajectories that live at once (default 512)")
    sub.add_argument("--group-size", type=int, help="default 8 for math, else 32")
    sub.add_argument(
        "--staleness", type=int, default=0, help="weights versions to fall behind; 0 is synchronous (default)"
    )
    sub.add_argument("--seeds", type=int, default=4, help="runs of each of the last few ways (default 4)")
    sub.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    sub.add_argument("--json", metavar="PATH", help="write every number")
    sub.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="of the sections `workload` and `rollout`"
    )
    sub.set_defaults(command=make_plan)


def add_reproduce(subparsers: Subparsers) -> None:
    text = "run the paper's evaluation in simulation and write a page with its values beside ours"
    sub = subparsers.add_parser("reproduce", help=text, description=text)
    sub.add_argument("--quick", action="store_true", help="smaller and fewer runs, the same figures; minutes")
    sub.add_argument("--only", nargs="+", default=[], metavar="FIGURE", help="print these figures and write no page")
    sub.add_argument("--out", metavar="DIR", help="where the page goes (default docs; runs/reproduction with --quick)")
    sub.add_argument("--keep", default="runs/reproduction", metavar="DIR", help="finished runs; it goes on from them")
    sub.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    sub.set_defaults(command=reproduce)


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
        with LiveProgress(run_dir, None if parsed.work is announced_gateway else config.rollout.steps, console):
            asyncio.run(interruptible(parsed.work(config, run_dir)))
    except KeyboardInterrupt:
        if parsed.work is not announced_gateway:
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


def profile(parsed: argparse.Namespace) -> int:
    if bool(parsed.endpoints) == bool(parsed.config):
        raise ConfigError("profile: give the addresses of running engines, or --config FILE; one of the two")
    out = Path(parsed.out)
    if out.suffix != ".yaml" or not out.parent.is_dir():
        raise ConfigError(f"--out={out}: give a path that ends in .yaml, in a directory that exists")
    for name in ("max_context", "chunk", "max_running", "rounds", "gpus", "kv_bytes"):
        if getattr(parsed, name) is not None and getattr(parsed, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={getattr(parsed, name)}: write a number of 1 or more")
    told = commands.Description(parsed.gpu, parsed.gpus, parsed.kv_bytes, parsed.weights)
    if parsed.config:
        config = load_config(parsed.config)
        work = commands.profile_embedded(config, parsed.rounds, told, out, console)
    else:
        if parsed.max_context is None:
            raise ConfigError("--max-context: missing; say how long a prompt and its output may become, in tokens")
        limits = Limits(parsed.max_context, parsed.chunk, parsed.max_running, parsed.rounds)
        engines = [endpoint(text) for text in parsed.endpoints]
        work = commands.profile(engines, limits, told, out, console)
    asyncio.run(interruptible(work))
    return 0


def simulate(parsed: argparse.Namespace) -> int:
    scenario = load_scenario(scenario_path(parsed.scenario), parsed.overrides)
    if parsed.dry_run:
        print(dump_config(scenario), end="")
        return 0
    with GridProgress(console) as progress:
        comparison = compare(scenario, parsed.policy, parsed.workers, progress, parsed.record)
    console.print(comparison)
    if parsed.json:
        console.print(f"{comparison_report.write_json(comparison, parsed.json)}", soft_wrap=True)
    console.print(f"report {comparison_report.write_page(comparison, parsed.out)}", soft_wrap=True)
    return 0


def make_plan(parsed: argparse.Namespace) -> int:
    told: dict[str, Any] = {"workload": {"name": parsed.workload or "trace", "path": parsed.trace}, "rollout": {}}
    for override in parsed.overrides:
        apply_override(told, override)
    if set(told) - {"workload", "rollout"}:
        raise ConfigError(f"{' '.join(parsed.overrides)}: only workload.* and rollout.* can be replaced in a plan")
    request = planning.request(
        told["workload"],
        told["rollout"],
        parsed.gpus,
        parsed.profile,
        parsed.decode_profile,
        concurrency=parsed.concurrency,
        group_size=parsed.group_size,
        staleness=parsed.staleness,
        seeds=parsed.seeds,
    )
    if parsed.workers < 1:
        raise ConfigError(f"--workers={parsed.workers}: write a number of 1 or more")
    with GridProgress(console) as progress, reproduction.pool(parsed.workers) as executor:
        advice = planning.plan(request, Grid(executor, progress=progress))
    for shown in advice_view(request, advice):
        console.print(shown, highlight=False)
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(planning.exact(request, advice), indent=2) + "\n", encoding="utf-8")
    return 0


def reproduce(parsed: argparse.Namespace) -> int:
    if parsed.workers < 1:
        raise ConfigError(f"--workers={parsed.workers}: write a number of 1 or more")
    figures, budget = reproduction.figures_named(parsed.only), QUICK if parsed.quick else FULL
    with GridProgress(console) as progress:
        found = reproduction.reproduce(figures, budget, Path(parsed.keep), progress, parsed.workers)
    for table in findings_tables(found):
        console.print(table)
    if not parsed.only:
        directory = Path(parsed.out or ("runs/reproduction" if parsed.quick else "docs"))
        console.print(f"page {reproduction.write_page(found, budget, directory)}", soft_wrap=True)
    return 0


def endpoint(text: str) -> SGLangEngine:
    """An engine by `URL` or `URL,BOOTSTRAP_PORT`. Raises `ConfigError`."""
    url, _, port = text.partition(",")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname is None or not (port or "8998").isdigit():
        raise ConfigError(f"endpoint {text!r}: write it as http://HOST:PORT, with ,BOOTSTRAP_PORT behind for prefill")
    return SGLangEngine(url, url, parts.hostname, int(port or "8998"))


def begin(config: Config) -> Path:
    run_dir = new_run_dir(config)
    handler = logging.FileHandler(run_dir / LOG)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if config.gateway.log == "json" else plain)
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
