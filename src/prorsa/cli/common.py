"""What the commands share: the terminal, errors as one message, and an end in order."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeAlias

from rich.console import Console
from rich.text import Text

from prorsa.config import ConfigError
from prorsa.report.legible import legible


class PlainConsole(Console):
    """Whatever is printed as a string is text: no markup, no names of emoji, nothing that the terminal obeys."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(legible(text, lines=True), **options | {"markup": False, "emoji": False})


console = PlainConsole()
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def fail(error: object, status: int) -> int:
    print(f"prorsa: {legible(str(error), lines=True)}", file=sys.stderr)
    return status


def messages(group: ExceptionGroup[Exception]) -> str:
    """What failed, a line each, and what ended the run if that was something else."""
    ended = [group.__context__] if isinstance(group.__context__, Exception) else []
    return "\n".join(f"{type(error).__name__}: {error}" for error in [*ended, *group.exceptions])


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(legible(message))


def say(words: str) -> None:
    """One line, however long: names in it can be copied."""
    console.print(legible(words), highlight=False, soft_wrap=True)


def check_workers(count: int) -> None:
    """Raises `ConfigError`."""
    if count < 1:
        raise ConfigError(f"--workers={count}: write a number of 1 or more")


async def interruptible(work: Coroutine[Any, Any, None]) -> None:
    """SIGTERM ends the work as Ctrl-C does: in order."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
