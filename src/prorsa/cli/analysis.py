"""`prorsa analyze` and `prorsa trace`: recorded trajectories, described and brought into the trace format."""

from __future__ import annotations

import argparse

from prorsa.cli.common import Subparsers, console, say
from prorsa.report.analysis import analyse, write_json, write_page
from prorsa.simulation.workloads.recordings import CHARACTERS, FORMATS, convert_files


def add(subparsers: Subparsers) -> None:
    text = "describe what a rollout asks of its engines: tokens over time, turns, tools, where the time goes"
    sub = subparsers.add_parser("analyze", help=text, description=text)
    sub.add_argument("run", metavar="RUN|TRACE", help="run directory, or a lifecycle trace alone")
    sub.add_argument("--step-windows", type=positive, default=10.0, metavar="SECONDS", help="default 10")
    sub.add_argument("--json", metavar="PATH", help="write every number (docs/analysis.md says what each is)")
    sub.add_argument("--out", metavar="PATH", help="write a page with charts (HTML)")
    sub.set_defaults(command=analyze)
    text = "convert recorded trajectories of other projects into a trace, for analyze, plan and simulate"
    formats = "\n".join(f"  {one.name:<15} {one.words}" for one in FORMATS.values())
    sub = subparsers.add_parser(
        "trace",
        help=text,
        description=text,
        epilog=f"Formats (docs/recordings.md says what of each is exact and what is guessed):\n{formats}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sub.add_argument("sources", nargs="+", metavar="FILE", help="recordings, compressed or not")
    sub.add_argument("target", metavar="TRACE", help="a new file")
    sub.add_argument("--format", metavar="NAME", help="of the files; default: recognised by what is in them")
    sub.add_argument(
        "--characters",
        type=positive,
        default=CHARACTERS,
        metavar="N",
        help=f"a token, of text whose tokens nobody counted (default {CHARACTERS:g})",
    )
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
            say(f"{write(analysis, path)}")
    return 0


def trace(parsed: argparse.Namespace) -> int:
    done = convert_files(parsed.sources, parsed.target, parsed.format, parsed.characters)
    left_out = f"; {done.empty} recordings without a turn are left out" if done.empty else ""
    say(
        f"{done.events} events in {parsed.target}: {done.trajectories} trajectories, "
        f"read as {', '.join(done.formats)}{left_out}"
    )
    return 0
