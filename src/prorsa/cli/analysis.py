"""`prorsa analyze` and `prorsa trace`: recorded trajectories, described and brought into the trace format."""

from __future__ import annotations

import argparse

from prorsa.cli.common import Subparsers, console
from prorsa.report.analysis import analyse, write_json, write_page
from prorsa.simulation.workloads.replay import convert_file


def add(subparsers: Subparsers) -> None:
    text = "describe what a rollout asks of its engines: tokens over time, turns, tools, where the time goes"
    sub = subparsers.add_parser("analyze", help=text, description=text)
    sub.add_argument("run", metavar="RUN|TRACE", help="run directory, or a lifecycle trace alone")
    sub.add_argument("--step-windows", type=positive, default=10.0, metavar="SECONDS", help="default 10")
    sub.add_argument("--json", metavar="PATH", help="write every number (docs/analysis.md says what each is)")
    sub.add_argument("--out", metavar="PATH", help="write a page with charts (HTML)")
    sub.set_defaults(command=analyze)
    text = "convert recorded trajectories of other projects (JSON lines) into a trace, for analyze, plan and simulate"
    sub = subparsers.add_parser("trace", help=text, description=text)
    sub.add_argument("source", metavar="FILE", help="JSON lines, gzipped or not, with the fields of docs/analysis.md")
    sub.add_argument("target", metavar="TRACE", help="a new file")
    sub.set_defaults(command=trace)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def analyze(parsed: argparse.Namespace) -> int:
    analysis = analyse(parsed.run, parsed.step_windows)
    console.print(analysis)
    for path, write in ((parsed.json, write_json), (parsed.out, write_page)):
        if path is not None:
            console.print(f"{write(analysis, path)}", soft_wrap=True)
    return 0


def trace(parsed: argparse.Namespace) -> int:
    console.print(f"{convert_file(parsed.source, parsed.target)} events in {parsed.target}", soft_wrap=True)
    return 0
