"""Hostile tool calls by the thousand: none may change a canary tree, another process, or the controller.

python benchmarks/sandbox_attacks.py --seed 1 --count 1000

Each case is made from the seed by a small grammar: any system call by number with plausible arguments, and tricks that
Python code knows. After each case a sentinel process must live with the same niceness, CPUs and scheduler, and the
canary files must have the same content, owner, mode, times and attributes. It exits 1 and prints the case if not.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

# The sandbox of this checkout is attacked, whichever is installed.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from prorsa.cli.doctor import ESSENTIAL
from prorsa.rollout.sandboxes.pool import ROOT_PREFIX, SandboxPool

AT_ONCE = 4
SIGNALS = (0, 1, 9, 15, 19)
TRICKS = (
    "import os\nfor i in range({n}): os.mkdir('d'); os.chdir('d')",
    "import os\nfor i in range({n}00): os.mkdir(f'd{{i}}')",
    "for i in range({n}): open(f'f{{i}}', 'wb').write(b'x' * (1 << 20))",
    "import os\nfor fd in range(64):\n    try: os.write(fd, {junk})\n    except OSError: pass",
    "import os\nfor fd in range(64):\n    try: os.close(fd)\n    except OSError: pass",
    "import os\nfor fd in (3, 4): os.dup2(0, fd)",
    "import os\nwhile True: os.fork()",
    "import os\nos._exit({small})",
    "import sys\nsys.exit({junk})",
    "import threading\nfor i in range(99): threading.Thread(target=print).start()",
    "class D:\n    def __del__(self): D(); [].append(D())\nD()",
    "import gc, os\nfor o in gc.get_objects():\n    try: o.clear()\n    except Exception: pass",
    "x = bytearray({n} << 20)\ny = [x] * 10 ** 9",
    "import mmap\nm = [mmap.mmap(-1, 1 << 20) for _ in range(9999)]",
    "import ctypes\nctypes.memset({n}, 0, 4096)",
    "import signal, os\n[signal.signal(s, signal.SIG_IGN) for s in (1, 2, 3, 15)]\nos.kill({pid}, {signal})",
    "import signal\nsignal.pidfd_send_signal(__import__('os').pidfd_open({pid}), {signal})",
    "import os\nos.chmod({path}, 0o777)",
    "import os\nos.chown({path}, {small}, {small})",
    "import os\nos.utime({path}, ({small}, {small}))",
    "import os\nos.setxattr({path}, 'user.x', b'y')",
    "import os\nopen({path}, 'a').write('gone')",
    "import os\nos.truncate({path}, 0)",
    "import os\nos.remove({path})",
    "import os\nos.rename({path}, 'mine')",
    "import os\nos.link({path}, 'mine')\nos.chmod('mine', 0o777)",
    "import os\nos.symlink({path}, 'mine')\nopen('mine', 'w')",
    "import os\nos.chdir('/' + '../' * 40)\nopen('..' + {path}, 'w')",
    "import os\nos.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "import os\nos.sched_setaffinity({pid}, [0])",
    "import os\nos.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
    "import resource\nresource.prlimit({pid}, resource.RLIMIT_NOFILE, (0, 0))",
    "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, {own}, {pid})\nfcntl.fcntl(r, 10, {signal})\n"
    "fcntl.fcntl(r, 4, 0o20000)\nos.write(w, b'x')",
    "import fcntl, os\nfcntl.ioctl(os.open('.', 0), 0x40086602, b'\\x30' + bytes(7))",
    "import fcntl\nfcntl.ioctl({small}, {code}, {junk})",
    "import os\nos.mknod('dev', 0o020666, os.makedev(1, 7))\nopen('dev', 'rb').read(1)",
    "import os\nos.mkfifo('f')\nopen('f')",
    "import os\nos.chroot('.')",
    "import socket\nsocket.socket(socket.AF_UNIX).connect({path})",
    "import os\nos.mkdir('a')\nos.chmod('a', 0)\nos.chmod('.', 0)",
    "import os\nos.write(4, {frame} + {junk})\nos.read(3, 1)",
    "import os\nos.write(3, {frame} + {junk})\nwhile True: os.write(3, b'\\xff')",
    "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "import os, ctypes\nctypes.CDLL(None).abort()",
    "print('\\ud800\\x1b[2J' * {n})",
)


@dataclass(frozen=True)
class Targets:
    pids: tuple[int, ...]
    paths: tuple[str, ...]


def cases(seed: int, targets: Targets) -> Iterator[str]:
    rng = random.Random(seed)
    while True:
        yield system_calls(rng, targets) if rng.random() < 0.6 else trick(rng, targets)


def trick(rng: random.Random, targets: Targets) -> str:
    return rng.choice(TRICKS).format(
        n=rng.choice((3, 100, 1500)),
        small=rng.randrange(256),
        junk=rng.randbytes(rng.choice((0, 1, 64, 5000))),
        frame=rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\x05ready", b"\0\0\0\0", b"\0\0\1\0")),
        code=rng.choice((0x5412, 0x5452, 0x8901, 0x40086602, 0x541D)),
        own=rng.choice((8, 15)),
        pid=rng.choice(targets.pids),
        signal=rng.choice(SIGNALS),
        path=repr(rng.choice(targets.paths)),
    )


def system_calls(rng: random.Random, targets: Targets) -> str:
    """Some calls in a row, by number; buffers hold a path, a signal's information or noise."""
    lines = [
        "import ctypes, os, struct",
        "call = ctypes.CDLL(None).syscall",
        f"path = ctypes.create_string_buffer({rng.choice(targets.paths)!r}.encode())",
        "info = ctypes.create_string_buffer(4096); struct.pack_into('iii', info, 0, 9, 0, -1)",
        f"noise = ctypes.create_string_buffer({rng.randbytes(64)!r}, 4096)",
        "here = os.open('.', os.O_RDONLY); file = os.open('f', os.O_RDWR | os.O_CREAT)",
    ]
    for _ in range(rng.randint(1, 6)):
        arguments = ", ".join(
            f"ctypes.c_long({one})" if one.lstrip("-").isdigit() else one for one in some(rng, targets)
        )
        lines.append(f"call({rng.randrange(470)}, {arguments})")
    return "\n".join(lines)


def some(rng: random.Random, targets: Targets) -> list[str]:
    pid = str(rng.choice(targets.pids))
    choices = [
        pid,
        pid,
        pid,
        str(rng.choice(SIGNALS)),
        "path",
        "path",
        "info",
        "noise",
        "here",
        "file",
        "0",
        "1",
        "-100",
    ]
    return rng.choices([*choices, str(0o777), str(rng.getrandbits(31)), str(1 << rng.randrange(31))], k=6)


def look(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else sorted(map(str, path.iterdir()))
    kept = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_ctime_ns, status.st_nlink)
    return str(path), kept, content, os.listxattr(path)


def state(canary: Path, pids: tuple[int, ...]) -> list[object]:
    """What no case may change."""
    files: list[object] = [look(path) for path in (canary, *sorted(canary.rglob("*")))]
    for pid in pids:
        run_state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        files.append((pid, run_state in "TtZX", os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid)))
        files += [os.sched_getscheduler(pid), Path(f"/proc/{pid}/limits").read_text()]
    return files


def attack(seed: int, count: int) -> tuple[list[str], int]:
    """The cases after which something outside differed, and how many ended in a text."""
    with tempfile.TemporaryDirectory(prefix="canary-") as name:
        canary = Path(name)
        canary.chmod(0o755)
        (canary / "file").write_text("kept")
        (canary / "secret").write_text("hunter2")
        (canary / "secret").chmod(0o600)
        (canary / "tree").mkdir()
        sentinel = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        try:
            return asyncio.run(attack_on(canary, (sentinel.pid, os.getpid()), seed, count))
        finally:
            sentinel.kill()
            sentinel.communicate()


async def attack_on(canary: Path, pids: tuple[int, ...], seed: int, count: int) -> tuple[list[str], int]:
    paths = tuple(str(canary / name) for name in ("", "file", "secret", "tree"))
    made = cases(seed, Targets(pids, paths))
    before = state(canary, pids)
    answered = 0
    async with SandboxPool(prewarmed=4, timeout=1.0, memory_mb=128) as pool:
        await refuse_unconfined(pool)
        while answered < count:
            codes = [next(made) for _ in range(min(AT_ONCE, count - answered))]
            await asyncio.gather(*(one(pool, code) for code in codes))
            answered += len(codes)
            if state(canary, pids) != before:
                return codes, answered
    return [], answered


async def refuse_unconfined(pool: SandboxPool) -> None:
    """Where sandboxes are not confined the attacks would reach this machine: none is made. Raises `SystemExit`."""
    async with pool.sandbox() as sandbox:
        await sandbox.start()
        if missing := ESSENTIAL - sandbox.enforced:
            raise SystemExit(f"no attack is made: sandboxes are not confined by {', '.join(sorted(missing))} here")


async def one(pool: SandboxPool, code: str) -> str:
    async with pool.sandbox() as sandbox:
        await sandbox.start()
        return await sandbox.run(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1000)
    parsed = parser.parse_args()
    logging.basicConfig()
    began = perf_counter()
    guilty, answered = attack(parsed.seed, parsed.count)
    left = [*Path(tempfile.gettempdir()).glob(f"{ROOT_PREFIX}*")]
    print(f"uid {os.geteuid()}: {answered} of {parsed.count} cases ended in a text, {perf_counter() - began:.0f} s")
    print(f"directories left: {len(left)}")
    for code in guilty:
        print(f"--- among these, one reached out\n{code}")
    return bool(guilty or answered < parsed.count or left)


if __name__ == "__main__":
    sys.exit(main())
