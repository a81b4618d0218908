"""`prorsa doctor`: what this machine isolates and has room for, found by trying it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from prorsa.cli.common import Subparsers, say
from prorsa.rollout.sandboxes.pool import CONSEQUENCES, SandboxPool

ESSENTIAL = {"files", "calls", "capabilities"}
"""Without these a tool call reaches the user's files or processes: `prorsa doctor` exits 1."""
FEW_FILES, LITTLE_DISK = 4096, 1 << 30

ATTEMPTS = {
    "read the user's files": "open({file!r}).read()",
    "write to the user's files": "open({file!r}, 'a')",
    "change their mode": "os.chmod({file!r}, 0o777)",
    "signal another process": "os.kill({pid}, 0)",
    "signal it by a queue": "if ctypes.CDLL(None).sigqueue({pid}, 0, None): raise OSError",
    "slow another process down": "os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "start a process": "os.fork()",
    "open a socket": "import socket; socket.socket()",
    "make a device": "os.mknod('device', 0o020666, os.makedev(1, 7))",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
}
"""What hostile code in a sandbox would do; each has to raise an `OSError`."""


def add(subparsers: Subparsers) -> None:
    text = "say what sandboxes isolate here, and the limits of open files and disk; exits 1 where a tool call can reach out"
    sub = subparsers.add_parser("doctor", help="say what this machine isolates and has room for", description=text)
    sub.add_argument("run_dir", nargs="?", default=".", help="where runs are written (default: here)")
    sub.set_defaults(command=doctor)


def doctor(parsed: argparse.Namespace) -> int:
    logging.getLogger("prorsa").addHandler(logging.NullHandler())  # what is missing is said below
    enforced, outcomes = asyncio.run(_tried())
    say(f"kernel {platform.release()}, {platform.machine()}, uid {os.geteuid()}")
    for part, consequence in CONSEQUENCES.items():
        _line(part in enforced, part, "enforced" if part in enforced else f"missing: tool calls can {consequence}")
    if os.geteuid() == 0:
        _line("user" in enforced, "user", "a uid of its own" if "user" in enforced else "sandboxes run as root")
    for name, refused in outcomes.items():
        _line(refused, name, "refused" if refused else "POSSIBLE inside a sandbox")
    _limits(Path(parsed.run_dir))
    return int(not (enforced >= ESSENTIAL and all(outcomes.values())))


async def _tried() -> tuple[frozenset[str], dict[str, bool]]:
    """The parts that the kernel enforces, and for each attempt whether it was refused."""
    outcomes = {}
    target = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    try:
        with tempfile.NamedTemporaryFile(dir=Path.home()) as file:
            async with SandboxPool(prewarmed=0) as pool:
                for name, code in ATTEMPTS.items():
                    async with pool.sandbox() as sandbox:
                        await sandbox.start()
                        text = await sandbox.run(_judged(code.format(file=file.name, pid=target.pid)))
                        outcomes[name] = text == "refused\n"
                        enforced = sandbox.enforced
    finally:
        target.kill()
        target.communicate()
    return enforced, outcomes


def _judged(code: str) -> str:
    return f"import ctypes, os\ntry:\n    {code}\nexcept (OSError, ValueError):\n    print('refused')"


def _limits(run_dir: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _line(soft >= FEW_FILES, "open files", f"{soft}, at most {hard} (`ulimit -n`)")
    while not run_dir.exists():
        run_dir = run_dir.parent
    free = shutil.disk_usage(run_dir).free
    _line(free >= LITTLE_DISK, "free disk", f"{free / 2**30:.1f} GiB for {run_dir.absolute()}")


def _line(good: bool, name: str, words: str) -> None:
    say(f"{'ok' if good else '!!':>4}  {name:<26} {words}")
