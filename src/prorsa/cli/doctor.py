"""`prorsa doctor`: what this machine can do for a run, tried rather than assumed."""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import shutil
import tempfile
from pathlib import Path

from prorsa.cli.common import Subparsers
from prorsa.rollout.sandboxes.pool import NEEDED, PARTS, SandboxPool

TRIES = {
    "read a file of the user": "open({path!r}).read()",
    "change the mode of one": "os.chmod({path!r}, 0o777)",
    "write a file outside": "open({path!r}, 'w')",
    "signal another process": "os.kill({pid}, 0)",
    "start a process": "os.fork()",
    "use the network": "import socket; socket.socket()",
}
"""What a sandbox must not do, and the code that tries it."""


def add(subparsers: Subparsers) -> None:
    text = "what confines the sandboxes of this machine, its open files and its disk"
    sub = subparsers.add_parser(
        "doctor", help=text, description=f"Find out {text}. Exit status 1: code of tools is not confined."
    )
    sub.add_argument("--run-dir", default="runs", metavar="DIR", help="where runs are recorded (default: runs)")
    sub.set_defaults(command=doctor)


def doctor(parsed: argparse.Namespace) -> int:
    enforced, done = asyncio.run(_sandbox())
    print("Code of tools runs in a sandbox that is confined by")
    for part, (what, without) in PARTS.items():
        print(f"  yes  {what}" if part in enforced else f"  no   {what}: its code can {without}")
    for what in done:
        print(f"  NO   it could {what}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    print(f"Open files of a process: {soft}, at most {hard}")
    directory = next(
        path for path in (Path(parsed.run_dir).absolute(), *Path(parsed.run_dir).absolute().parents) if path.exists()
    )
    print(f"Disk of {parsed.run_dir}: {shutil.disk_usage(directory).free / 1e9:.1f} GB free")
    return 0 if enforced.issuperset(NEEDED) and not done else 1


async def _sandbox() -> tuple[frozenset[str], list[str]]:
    """What confines a sandbox, and which of `TRIES` worked all the same."""
    done: list[str] = []
    with tempfile.NamedTemporaryFile() as file:
        async with SandboxPool(prewarmed=0) as pool, pool.sandbox() as sandbox:
            await sandbox.start()
            for what, code in TRIES.items():
                text = await sandbox.run(f"import os\n{code.format(path=file.name, pid=os.getpid())}\nprint('done')")
                if "done" in text:
                    done.append(what)
            return sandbox.enforced, done
