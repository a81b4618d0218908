"""Commands about virtual clusters: profile, simulate, plan, reproduce."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prorsa import commands
from prorsa.cli.common import Subparsers, check_workers, console, interruptible, say
from prorsa.config import ConfigError, apply_override, dump_config, load_config
from prorsa.engines.sglang import SGLangEngine
from prorsa.report import comparison as comparison_report
from prorsa.simulation.experiments import plan as planning
from prorsa.simulation.experiments import policies as policy_study
from prorsa.simulation.experiments import policies_page
from prorsa.simulation.experiments import reproduce as reproduction
from prorsa.simulation.experiments.compare import compare
from prorsa.simulation.experiments.grid import Grid
from prorsa.simulation.experiments.settings import FULL, QUICK, Lab, scenario_path, shipped_scenarios
from prorsa.simulation.experiments.terminal import (
    GridProgress,
    advice_view,
    findings_tables,
    jobs_view,
    plain_table,
)
from prorsa.simulation.faults import load_faults
from prorsa.simulation.measure import Limits
from prorsa.simulation.scenario import load_scenario


def add(subparsers: Subparsers) -> None:
    for command in (add_profile, add_simulate, add_plan, add_reproduce):
        command(subparsers)


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
    sub.add_argument(
        "--faults",
        metavar="FILE",
        help="also let the faults of a schedule happen, beside a run without; `every-kind` is shipped",
    )
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
    sub.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="FIGURE",
        help="print these figures and write no page; with --policies: settings, as MODEL/TASK/STALENESS with * for any",
    )
    sub.add_argument(
        "--policies",
        nargs="+",
        default=[],
        metavar="NAME",
        help="instead: policies beside each other in the same settings; all writes a page, with verdicts",
    )
    sub.add_argument(
        "--dry-run", action="store_true", help="of --policies: print the runs and what they take, and stop"
    )
    sub.add_argument("--out", metavar="DIR", help="where the page goes (default docs; runs/reproduction with --quick)")
    sub.add_argument("--keep", default="runs/reproduction", metavar="DIR", help="finished runs; it goes on from them")
    sub.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    sub.set_defaults(command=reproduce)


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


def endpoint(text: str) -> SGLangEngine:
    """An engine by `URL` or `URL,BOOTSTRAP_PORT`. Raises `ConfigError`."""
    url, _, port = text.partition(",")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.hostname is None or not (port or "8998").isdigit():
        raise ConfigError(f"endpoint {text!r}: write it as http://HOST:PORT, with ,BOOTSTRAP_PORT behind for prefill")
    return SGLangEngine(url, url, parts.hostname, int(port or "8998"))


def simulate(parsed: argparse.Namespace) -> int:
    scenario = load_scenario(scenario_path(parsed.scenario), parsed.overrides)
    faults = None if parsed.faults is None else load_faults(parsed.faults)
    if parsed.dry_run:
        print(dump_config(scenario), end="")
        return 0
    check_workers(parsed.workers)
    with GridProgress(console) as progress:
        comparison = compare(scenario, parsed.policy, parsed.workers, progress, parsed.record, faults)
    console.print(comparison)
    if parsed.json:
        say(f"{comparison_report.write_json(comparison, parsed.json)}")
    say(f"report {comparison_report.write_page(comparison, parsed.out)}")
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
    check_workers(parsed.workers)
    with GridProgress(console) as progress, reproduction.pool(parsed.workers) as executor:
        advice = planning.plan(request, Grid(executor, progress=progress))
    for shown in advice_view(request, advice):
        console.print(shown, highlight=False)
    if parsed.json:
        Path(parsed.json).write_text(json.dumps(planning.exact(request, advice), indent=2) + "\n", encoding="utf-8")
    return 0


def reproduce(parsed: argparse.Namespace) -> int:
    check_workers(parsed.workers)
    if parsed.policies:
        return reproduce_policies(parsed)
    if parsed.dry_run:
        raise ConfigError("--dry-run: only the runs of --policies can be told before they run; name some policies")
    figures, budget = reproduction.figures_named(parsed.only), QUICK if parsed.quick else FULL
    with GridProgress(console) as progress:
        found = reproduction.reproduce(figures, budget, Path(parsed.keep), progress, parsed.workers)
    for table in findings_tables(found):
        console.print(table)
    if not parsed.only:
        say(f"page {reproduction.write_page(found, budget, _directory(parsed))}")
    return 0


def reproduce_policies(parsed: argparse.Namespace) -> int:
    policies = policy_study.policies_named(parsed.policies)
    effort = (policy_study.QUICK_EFFORT if parsed.quick else policy_study.FULL_EFFORT).limited(parsed.only)
    if parsed.dry_run:
        for line in jobs_view(policy_study.rehearsed(effort, policies)):
            console.print(line, highlight=False, soft_wrap=True)
        return 0
    with GridProgress(console) as progress, reproduction.pool(parsed.workers) as executor:
        study = policy_study.Study(effort, Lab(effort.budget, Grid(executor, Path(parsed.keep), progress)), policies)
        study.run()
    if policies == set(policy_study.POLICIES):
        say(f"page {policies_page.write(study, _directory(parsed))}")
    else:
        console.print(plain_table(policies_page.times_table(study, policies)))
    return 0


def _directory(parsed: argparse.Namespace) -> Path:
    """Where the page goes."""
    return Path(parsed.out or ("runs/reproduction" if parsed.quick else "docs"))
