"""What the commands share: the terminal, errors as one message, and an end in order."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeAlias

from rich.console import Console

from prorsa.config import ConfigError

console = Console()
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def fail(error: object, status: int) -> int:
    print(f"prorsa: {error}", file=sys.stderr)
    return status


def messages(group: ExceptionGroup[Exception]) -> str:
    """What failed, a line each, and what ended the run if that was something else."""
    ended = [group.__context__] if isinstance(group.__context__, Exception) else []
    return "\n".join(f"{type(error).__name__}: {error}" for error in [*ended, *group.exceptions])


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
