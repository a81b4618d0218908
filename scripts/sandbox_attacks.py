"""Hostile tool calls by the thousand: do they change anything outside their sandbox?

    python scripts/sandbox_attacks.py [--count 1000] [--seed 0]

Each call is drawn from a small grammar: system calls by number with arguments that could do harm (process ids, paths and
descriptors from outside among them), and tricks of Python. Outside stand a process, whose life, niceness, affinity and
scheduler are compared before and after, and a directory, of whose files the content, mode, owner, times and attributes are.
The controller is this process. `--count 0` prints what the sandboxes of this machine are confined by.

Exit status 1 where anything outside has changed, where a sandbox or a directory is left, or where a good call beside the bad
ones got a wrong result.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

# The sandbox beside this script is the one that is attacked, whichever is installed.
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from prorsa.rollout.sandboxes.pool import SandboxPool
from prorsa.rollout.sandboxes.process import RUNNER

NEEDED = {"calls", "capabilities", "files"}
"""Without these the attacks would reach the machine that this runs on; they are not made then."""
SYSTEM_CALLS = 462
"""One more than the highest number on both architectures."""
GOOD = "sum(range(101))"
SIDE_BY_SIDE = 4


class Targets:
    """Whom and what to attack. Unknown ones are found by the code itself: its parent, and well-known paths."""

    def __init__(self, pids: tuple[int, ...] = (), paths: tuple[str, ...] = ()) -> None:
        self.pids = [*map(str, pids), "os.getppid()"]
        self.paths = [
            *map(repr, paths),
            "'/etc/passwd'",
            "'/tmp'",
            "'..'",
            "os.__file__",
            "'/proc/1/mem'",
            "'/dev/null'",
        ]


def attack(draw: random.Random, targets: Targets | None = None) -> str:
    """One piece of hostile code."""
    aims = targets or Targets()
    return draw.choice([system_calls, known_calls, python_calls, python_calls, fillers, saboteurs])(draw, aims)


def system_calls(draw: random.Random, aims: Targets) -> str:
    """Some system calls by number, with any arguments."""
    calls = [f"call({draw.randrange(SYSTEM_CALLS)}, {arguments(draw, aims)})" for _ in range(draw.randint(1, 12))]
    return CALLER + "\n".join(calls)


def arguments(draw: random.Random, aims: Targets) -> str:
    def one() -> str:
        return draw.choice(
            [
                lambda: draw.choice(aims.pids),
                lambda: f"path({draw.choice(aims.paths)})",
                lambda: "buffer",
                lambda: str(draw.choice([0, 1, 2, 3, 4, -1, -100, 5, 9, 15, 19, 0o777, 4096, 2**31, 2**63 - 1])),
                lambda: str(draw.getrandbits(draw.choice([3, 8, 16, 32]))),
            ]
        )()

    return ", ".join(one() for _ in range(6))


def known_calls(draw: random.Random, aims: Targets) -> str:
    """System calls that signal, own, adjust or read other processes and files, with arguments that would work."""
    pid, path = draw.choice(aims.pids), draw.choice(aims.paths)
    x86 = [
        f"call(62, {pid}, 9)",  # kill
        f"call(200, {pid}, 9)",  # tkill
        f"call(234, {pid}, {pid}, 9)",  # tgkill
        f"call(129, {pid}, 9, signal_of(9))",  # rt_sigqueueinfo
        f"call(297, {pid}, {pid}, 9, signal_of(9))",  # rt_tgsigqueueinfo
        f"call(424, call(434, {pid}, 0), 9, 0, 0)",  # pidfd_open, pidfd_send_signal
        f"call(141, 0, {pid}, 19)",  # setpriority
        f"call(203, {pid}, 8, mask)",  # sched_setaffinity
        f"call(144, {pid}, 0, buffer)",  # sched_setscheduler
        f"call(251, 1, {pid}, 0)",  # ioprio_set
        f"call(302, {pid}, 1, limit, 0)",  # prlimit64
        f"call(101, 16, {pid}, 0, 0)",  # ptrace
        f"call(310, {pid}, vector, 1, vector, 1, 0)",  # process_vm_readv
        f"call(312, {pid}, {pid}, 0, 0, 0)",  # kcmp
        f"call(438, call(434, {pid}, 0), 0, 0)",  # pidfd_getfd
        f"call(90, path({path}), 0o777)",  # chmod
        f"call(268, -100, path({path}), 0o777)",  # fchmodat
        f"call(452, -100, path({path}), 0o777, 0)",  # fchmodat2
        f"call(91, call(2, path({path}), 0), 0o777)",  # fchmod of what can be read
        f"call(92, path({path}), 1000, 1000)",  # chown
        f"call(260, -100, path({path}), 1000, 1000, 0)",  # fchownat
        f"call(132, path({path}), 0)",  # utime
        f"call(280, -100, path({path}), 0, 0)",  # utimensat
        f"call(280, call(2, path({path}), 0), 0, 0, 0)",  # utimensat of a descriptor
        f"call(188, path({path}), path('user.x'), buffer, 4, 0)",  # setxattr
        f"call(76, path({path}), 0)",  # truncate
        f"call(87, path({path}))",  # unlink
        f"call(82, path({path}), path('mine'))",  # rename
        f"call(165, path('none'), path({path}), path('tmpfs'), 0, 0)",  # mount
        "call(155, path('.'), path('.'))",  # pivot_root
        "call(161, path('.'))",  # chroot
        "call(133, path('device'), 0o60777, 0x0800)",  # mknod of a block device
        "call(133, path('device'), 0o20777, 0x0101)",  # mknod of a character device
        "call(227, 0, buffer)",  # clock_settime
        "call(170, path('evil'), 4)",  # sethostname
        "call(169, 0xfee1dead, 672274793, 0, 0)",  # reboot, which does nothing with this magic but on
        "call(321, 0, buffer, 64)",  # bpf
        "call(298, buffer, 0, -1, -1, 0)",  # perf_event_open
        "call(323, 0)",  # userfaultfd
        "call(425, 8, buffer)",  # io_uring_setup
        "call(248, path('user'), path('x'), buffer, 4, -3)",  # add_key
        "call(272, 0x10000000)",  # unshare
        "call(319, path('x'), 0)",  # memfd_create
        "call(304, 0, buffer, 0)",  # open_by_handle_at
        "call(157, 15, path('prorsa'), 0, 0, 0)",  # prctl
        "call(56, 17, 0, 0, 0, 0)",  # clone
        "call(57)",  # fork
        "call(105, 0)",  # setuid
        "call(126, buffer, buffer)",  # capset
        "call(41, 2, 1, 0)",  # socket
        "call(240, path('/q'), 0o102, 0o666, 0)",  # mq_open
        "call(29, 7, 4096, 0o1666)",  # shmget
    ]
    return CALLER + "\n".join(draw.choice(x86) for _ in range(draw.randint(1, 8)))


def python_calls(draw: random.Random, aims: Targets) -> str:
    pid, path = draw.choice(aims.pids), draw.choice(aims.paths)
    tricks = [
        f"os.kill({pid}, signal.SIGKILL)",
        f"os.killpg({pid}, signal.SIGTERM)",
        f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        f"os.sched_setaffinity({pid}, [0])",
        f"os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
        f"resource.prlimit({pid}, resource.RLIMIT_NOFILE, (1, 1))",
        f"os.chmod({path}, 0o777)",
        f"os.chown({path}, 1000, 1000)",
        f"os.utime({path}, (0, 0))",
        f"os.setxattr({path}, 'user.x', b'x')",
        f"os.truncate({path}, 0)",
        f"open({path}, 'a').write('x')",
        f"shutil.rmtree({path})",
        f"os.rename({path}, 'mine')",
        f"os.link({path}, 'mine')",
        f"os.symlink({path}, 'link'); os.chmod('link', 0o777); open('link', 'w').write('x')",
        f"handle = os.open({path}, os.O_RDONLY); os.fchmod(handle, 0o777); os.utime(handle, (0, 0))",
        f"handle = os.open({path}, os.O_RDONLY); fcntl.flock(handle, fcntl.LOCK_EX)",
        f"r, w = os.pipe(); fcntl.fcntl(r, 8, {pid}); fcntl.fcntl(r, 10, 9); fcntl.fcntl(r, 4, 0o20000); os.write(w, b'x')",
        "fcntl.fcntl(os.open('.', 0), 1026, 0x8000001f)",
        f"fcntl.ioctl(os.open({path}, os.O_RDONLY), 0x40086602, b'\\x10' + bytes(7))",
        "fcntl.ioctl(os.open('.', os.O_RDONLY), 0x40086602, b'\\x10' + bytes(7))",
        f"mmap.mmap(os.open({path}, os.O_RDONLY), 16, prot=mmap.PROT_READ | mmap.PROT_WRITE)[0:1] = b'x'",
        "os.fchmod(0, 0); os.fchmod(1, 0); os.fchmod(3, 0)",
        "[os.fork() for _ in range(10)]",
        "subprocess.Popen(['sh', '-c', 'touch /tmp/evil'])",
        "[threading.Thread(target=print).start() for _ in range(10)]",
        "multiprocessing.Process(target=print).start()",
        "socket.create_connection(('127.0.0.1', 1))",
        "os.listdir('/proc'), open('/proc/self/mem', 'wb')",
        "os.mknod('d', 0o60777, os.makedev(8, 0)); open('d', 'rb').read(1)",
        "os.chroot('.'); os.setuid(0); os.unshare(0)",
        "ctypes.CDLL(None).system(b'touch /tmp/evil')",
        "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.1)",
        "gc.get_objects()[:3]; [o.clear() for o in gc.get_objects() if isinstance(o, dict)]",
    ]
    lines = [
        f"try: {trick}\nexcept BaseException as error: print(type(error).__name__)" for trick in sample(draw, tricks)
    ]
    return IMPORTS + "\n".join(lines)


def fillers(draw: random.Random, aims: Targets) -> str:
    """Too much of everything."""
    return "import os\n" + draw.choice(
        [
            "for i in range(1500): os.mkdir('d'); os.chdir('d')",
            "for i in range(100000): os.mkdir(f'd{i}')",
            "for i in range(100000): open(f'f{i}', 'wb').write(bytes(1 << 20))",
            "for i in range(10000): os.makedirs('a/' * 20 + str(i))",
            "os.mkdir('x'); os.chmod('x', 0); os.chmod('.', 0)",
            "for i in range(5000): os.symlink('x' * 4000, f's{i}')",
            "open('sparse', 'wb').truncate(1 << 60)",
            "x = bytearray(1 << 34)",
            "l = []\nwhile True: l.append(bytes(1 << 20))",
            "while True: print('x' * 1000000)",
            "print(10 ** 10 ** 8)",
            "[os.pipe() for _ in range(1000)]",
            "while True: pass",
            "import time; time.sleep(1e6)",
            "def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()",
        ]
    )


def saboteurs(draw: random.Random, aims: Targets) -> str:
    """Against the wire and the interpreter that serves it."""
    return "import os, sys, ctypes, signal\n" + draw.choice(
        [
            "[os.close(i) for i in range(20)]",
            "os.dup2(1, 3); os.dup2(1, 4)",
            "os.write(4, b'\\xff' * 4096)",
            "os.write(4, (5).to_bytes(4, 'big') + b'hello')",
            "os.write(4, (2**31).to_bytes(4, 'big'))",
            "os.write(4, (4).to_bytes(4, 'big') + b'\\xff\\xfe\\xfd\\xfc')",
            "while True: os.write(4, b'\\0')",
            "while True: os.write(4, (1).to_bytes(4, 'big') + b'x')",
            "os.write(4, (400).to_bytes(4, 'big') + b'trickle')\nimport time\nwhile True: time.sleep(0.1); os.write(4, b'.')",
            "os._exit(0)",
            "os.abort()",
            "ctypes.string_at(0)",
            "sys.exit(3)",
            "raise SystemExit",
            "raise KeyboardInterrupt",
            "signal.raise_signal(signal.SIGKILL)",
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(1)",
            "class X:\n    def __del__(self):\n        while True: pass\nx = X(); del x",
            "class X:\n    def __del__(self): X()\nX()",
            "__builtins__.clear() if isinstance(__builtins__, dict) else vars(__builtins__).clear()",
            "sys.modules.clear()",
            "import __main__; vars(__main__).clear()",
            "sys.stdout = None; print('x')",
            "sys.settrace(lambda *a: (_ for _ in ()).throw(OSError)); f = lambda: 1; f()",
            "ctypes.memset(id(None), 0, 64)",
        ]
    )


def sample(draw: random.Random, tricks: list[str]) -> list[str]:
    return draw.sample(tricks, draw.randint(1, 6))


IMPORTS = """\
import ctypes, fcntl, gc, mmap, os, resource, shutil, signal, time
try: import multiprocessing, socket, subprocess, threading
except BaseException: pass
"""
CALLER = """\
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
buffer = ctypes.create_string_buffer(4096)
mask = ctypes.create_string_buffer(b'\\x01' + bytes(7), 8)
limit = ctypes.create_string_buffer(bytes(16), 16)
vector = ctypes.create_string_buffer(struct.pack('QQ', ctypes.addressof(buffer), 64), 16)
def path(name):
    return ctypes.c_char_p(os.fsencode(name))
def signal_of(number):
    filled = ctypes.create_string_buffer(128)
    struct.pack_into('iii', filled, 0, number, 0, -1)
    return filled
def call(number, *arguments):
    wide = [ctypes.c_long(a) if isinstance(a, int) and abs(a) < 2**63 else a for a in arguments]
    return libc.syscall(ctypes.c_long(number), *wide)
"""


# What must not change.


def state_of_files(root: Path) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        found = path.stat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        attributes = tuple(os.listxattr(path))
        state[str(path)] = (
            found.st_mode,
            found.st_uid,
            found.st_gid,
            found.st_mtime_ns,
            found.st_ctime_ns,
            content,
            attributes,
        )
    return state


def state_of_process(pid: int) -> tuple[Any, ...]:
    """Alive, and whatever else of it could have been changed."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    limits = Path(f"/proc/{pid}/limits").read_text()
    affinity = frozenset(os.sched_getaffinity(pid))
    return stat[0] in "SRD", os.getpriority(os.PRIO_PROCESS, pid), affinity, os.sched_getscheduler(pid), limits


def sandboxes_left() -> int:
    """Processes of sandboxes whose parent is this process."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                count += parent == os.getpid() and str(RUNNER) in (entry / "cmdline").read_text()
            except OSError:
                continue  # it has ended meanwhile
    return count


async def attack_all(pool: SandboxPool, codes: list[str], ends: Counter[str], faults: list[str]) -> None:
    waiting = iter(codes)

    async def one_after_the_other() -> None:
        for code in waiting:
            async with pool.sandbox() as bad, pool.sandbox() as good:
                text = await bad.run(code)
                ends[
                    text.partition(":")[0]
                    if text.startswith("TimeoutError")
                    else "killed"
                    if "restarted" in text
                    else "text"
                ] += 1
                if (result := await good.run(GOOD)) != "5050\n":
                    faults.append(f"a good call beside a bad one gave {result!r}; the bad one was\n{code}")
                if (result := await bad.run(GOOD)) != "5050\n" and "restarted" not in result and "Error" not in result:
                    ends["answers that the attacked sandbox itself made up"] += 1

    await asyncio.gather(*(one_after_the_other() for _ in range(SIDE_BY_SIDE)))


def run(count: int, seed: int) -> int:
    draw, ends, faults = random.Random(seed), Counter[str](), list[str]()
    sentinel = subprocess.Popen(
        [sys.executable, "-c", "import time; print(flush=True); time.sleep(1e6)"], stdout=subprocess.PIPE
    )
    assert sentinel.stdout is not None
    sentinel.stdout.readline()
    with tempfile.TemporaryDirectory(prefix="prorsa-attacked-") as name:
        root = Path(name)
        root.chmod(0o755)
        for number in range(4):
            (root / f"file-{number}").write_text("secret")
            (root / f"file-{number}").chmod(0o644)
        paths = tuple(str(path) for path in [root, *root.iterdir()])
        aims = Targets((sentinel.pid,), paths)

        async def main() -> None:
            started = time.monotonic()
            async with SandboxPool(prewarmed=2, timeout=1.0) as pool:
                async with pool.sandbox() as first:
                    await first.start()
                    print(f"confined by: {', '.join(sorted(first.enforced))}")
                    if not first.enforced >= NEEDED:
                        raise SystemExit(f"no attack is made: this machine does not confine {NEEDED - first.enforced}")
                before = state_of_files(root), state_of_process(sentinel.pid), state_of_process(os.getpid())
                await attack_all(pool, [attack(draw, aims) for _ in range(count)], ends, faults)
                after = state_of_files(root), state_of_process(sentinel.pid), state_of_process(os.getpid())
            for what, then, now in zip(("files", "another process", "the controller"), before, after, strict=True):
                if then != now:
                    faults.append(f"{what} changed: {then} -> {now}")
            print(f"{count} hostile calls in {time.monotonic() - started:.0f} s: {dict(ends)}")

        try:
            asyncio.run(main())
        finally:
            sentinel.send_signal(signal.SIGKILL)
            sentinel.wait()
            sentinel.stdout.close()
    if left := sandboxes_left():
        faults.append(f"{left} sandboxes are left")
    for fault in faults:
        print(f"WRONG: {fault}")
    print(f"{len(faults)} things outside a sandbox were changed")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    sys.exit(run(asked.count, asked.seed))
