"""What the embedded processes share: they say where they listen in one line of JSON on stdout, and end at SIGTERM or
when their stdin pipe reaches EOF, so that a parent that dies in any way leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys


def announce(**facts: int) -> None:
    """Tell the parent that this process is ready."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def watch_for_stop() -> asyncio.Event:
    """An event that is set when the process has to end."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    mode = os.fstat(sys.stdin.fileno()).st_mode
    # A terminal or /dev/null says nothing about a parent.
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        loop.add_reader(sys.stdin.fileno(), _read_stdin, loop, stop)
    return stop


def _read_stdin(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop.set()
