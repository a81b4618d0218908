"""The commands. Each checks its arguments, does its work in a room of its own, and turns errors into one message.

Exit status: 0 done, 1 the run failed or could not be recorded, 2 the arguments or the configuration cannot be used,
130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from prorsa import commands
from prorsa.cli import analysis, doctor, engines, runs, simulation
from prorsa.cli.common import Parser, fail, messages
from prorsa.cluster.turns import TurnFailed
from prorsa.config import ConfigError
from prorsa.engines.protocol import EngineError
from prorsa.report.characterise import BadEvents
from prorsa.report.journal import PASSING, RecordingFailed, explain
from prorsa.report.opening import CannotContinue
from prorsa.rollout.controller import RolloutFailed
from prorsa.rollout.sandboxes.base import SandboxError
from prorsa.simulation.experiments.grid import ExperimentFailed

FAILURES = (
    EngineError,
    RecordingFailed,
    RolloutFailed,
    SandboxError,
    TurnFailed,
    commands.CommandFailed,
    ExperimentFailed,
)
"""The work itself failed."""


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character gets an escape.
            stream.reconfigure(errors="backslashreplace")
    parsed = parse(arguments)
    try:
        status: int = parsed.command(parsed)
    except (ConfigError, BadEvents, CannotContinue) as error:
        return fail(error, 2)
    except OSError as error:
        return fail(explain(error), 1 if error.errno in PASSING else 2)
    except FAILURES as error:
        return fail(error, 1)
    except ExceptionGroup as group:
        return fail(messages(group), 1)
    except KeyboardInterrupt:
        return 130
    return status


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """`key=value` overrides may stand anywhere, between and behind options too."""
    parser = build_parser()
    parsed, rest = parser.parse_known_args(arguments)
    strange = [argument for argument in rest if argument.startswith("-") or "=" not in argument]
    if strange or (rest and "overrides" not in parsed):
        parser.error(f"unrecognized arguments: {' '.join(strange or rest)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="prorsa", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for group in (runs, engines, analysis, simulation, doctor):
        group.add(subparsers)
    return parser
