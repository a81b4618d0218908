"""Real sandboxes: what code in them can and cannot do, and that none is left, whatever ends it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollouts import CHAT, QUESTION, ScriptedControl, call, environment, scripted

from prorsa.lifecycle import events as e
from prorsa.lifecycle.events import SandboxMode
from prorsa.rollout.controller import Controller, Plan
from prorsa.rollout.episode import Episode, Launch
from prorsa.rollout.sampler import Sampler
from prorsa.rollout.sandboxes import pool as pools
from prorsa.rollout.sandboxes import process as processes
from prorsa.rollout.sandboxes.base import SandboxError
from prorsa.rollout.sandboxes.pool import ROOT_PREFIX, SandboxPool
from prorsa.rollout.sandboxes.process import LOST, RUNNER, ProcessSandbox

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """So that what a test leaves is its own, and it finds nothing of others; and nothing may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []
    assert runners() == []


def runners(parent: int | None = None) -> list[int]:
    """Sandbox processes, unreaped ones too, whose parent is `parent`, by default this process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # One that is just ending has no command line any more.
            ours = str(RUNNER) in command or not command
            if ours and int(status[1]) == (parent or os.getpid()):
                found.append(int(entry.name))
    return found


def in_sandbox(test: Callable[[ProcessSandbox], Awaitable[None]], **limits: Any) -> None:
    async def main() -> None:
        async with SandboxPool(prewarmed=0, **limits) as pool, pool.sandbox() as sandbox:
            await sandbox.start()
            await test(sandbox)

    asyncio.run(main())


def results(*codes: str, **limits: Any) -> list[str]:
    """What each piece of code returns, one after the other in one sandbox."""
    texts: list[str] = []

    async def test(sandbox: ProcessSandbox) -> None:
        texts.extend([await sandbox.run(code) for code in codes])

    in_sandbox(test, **limits)
    return texts


def test_state_lives_on_from_call_to_call() -> None:
    assert results("x = 41", "x += 1\nprint('now', x)", "x * 2", "def f(): return x", "f()") == [
        "",
        "now 42\n",
        "84\n",
        "",
        "42\n",
    ]


def test_an_error_comes_back_as_its_traceback_after_what_was_printed() -> None:
    printed, syntax, exit_ = results("print('before')\n1 / 0", "x = (", "raise SystemExit(3)")
    assert printed.startswith("before\nTraceback")
    assert 'File "<code>", line 2' in printed
    assert printed.endswith("ZeroDivisionError: division by zero\n")
    assert "runner" not in printed
    assert "SyntaxError: '(' was never closed" in syntax
    assert exit_.endswith("SystemExit: 3\n")


def test_an_endless_loop_is_stopped_and_the_sandbox_goes_on_afresh() -> None:
    first, second = results("x = 1\nwhile True: pass", "x", timeout=0.3)
    assert first == f"TimeoutError: no result within 0.3 s. {LOST}"
    assert "NameError" in second


def test_a_process_that_ends_itself_is_told_and_replaced() -> None:
    left, crashed, after = results("import os; os._exit(7)", "import ctypes; ctypes.string_at(0)", "1 + 1")
    assert left == f"The interpreter exited with code 7. {LOST}"
    assert crashed == f"The interpreter was killed by SIGSEGV. {LOST}"
    assert after == "2\n"


def test_memory_is_bounded() -> None:
    one, many, after = results("x = 'x' * 10**9", "l = []\nwhile True: l.append('x' * 10**5)", "1 + 1", memory_mb=128)
    assert one == "MemoryError\n"
    assert many == "MemoryError\nAll variables are lost.\n"
    assert after == "2\n"


def test_cpu_time_is_bounded_over_the_life_of_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "CALLS_OF_CPU", 0.1)
    assert results("while True: pass", timeout=10.0) == [f"The interpreter was killed by SIGKILL. {LOST}"]


def test_output_is_bounded() -> None:
    (text,) = results("print('y' * 10**6)\nraise ValueError('z' * 10**6)", output_chars=100)
    printed, note, failure = text.partition("[999901 more characters]")
    assert printed == "y" * 100 + "\n"
    assert note
    assert len(failure) < 200


def test_a_file_is_bounded_and_its_own_directory_is_writable() -> None:
    big, small = results(
        "open('big', 'wb').write(b'x' * (2 << 20))", "open('small', 'w').write('hi')\nopen('small').read()", file_mb=1
    )
    assert "File too large" in big
    assert small == "'hi'\n"


def test_nothing_of_the_parent_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORSA_SECRET", "hunter2")
    handle = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(handle, True)
    environment, site, files = results(
        "import os; sorted(os.environ)",
        "import sys; any('site-packages' in path for path in sys.path)",
        # Standard input, output and errors, and the wire's two ends.
        "def is_open(i):\n    try: os.fstat(i)\n    except OSError: return False\n    return True\n"
        "[i for i in range(64) if is_open(i)]",
    )
    os.close(handle)
    assert "PRORSA_SECRET" not in environment
    assert site == "False\n"
    assert files == "[0, 1, 2, 3, 4]\n"


def enforced(name: str) -> bool:
    found: list[bool] = []

    async def test(sandbox: ProcessSandbox) -> None:
        found.append(name in sandbox.enforced)

    in_sandbox(test)
    return found[0]


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import threading; threading.Thread(target=print).start()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.setsid()",
        "import os, signal; os.kill(os.getppid(), signal.SIGTERM)",
        "import socket; socket.socket()",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
    ],
)
def test_no_process_socket_signal_or_limit(code: str) -> None:
    if not enforced("calls"):
        pytest.skip("this kernel has no seccomp")
    (text,) = results(code)
    assert "not permitted" in text or "can't start new thread" in text or "not allowed" in text


def test_no_file_outside_its_directory(tmp_path: Path) -> None:
    if not enforced("files"):
        pytest.skip("this kernel has no Landlock")
    secret = Path.home() / ".prorsa-sandbox-test"
    secret.write_text("hunter2")
    try:
        for code in (
            f"open({str(secret)!r}).read()",
            f"open({str(secret)!r}, 'w')",
            f"import os; os.remove({str(secret)!r})",
            "open('../other', 'w')",
            "import os; os.listdir('/')",
            "import os; open(f'/proc/{os.getppid()}/environ').read()",
        ):
            (text,) = results(code)
            # What lies below a directory that is closed to others is not even there, and the rest is mounted read-only.
            assert any(error in text for error in ("PermissionError", "FileNotFoundError", "Read-only file system")), (
                code
            )
        assert secret.read_text() == "hunter2"
    finally:
        secret.unlink()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="the other tests run unprivileged then")
def test_all_of_it_works_without_privileges(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import asyncio
        from prorsa.rollout.sandboxes.pool import SandboxPool

        async def main():
            async with SandboxPool(prewarmed=0) as pool, pool.sandbox() as sandbox:
                await sandbox.start()
                print(await sandbox.run("1 + 1"), sorted(sandbox.enforced))

        asyncio.run(main())
    """)
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", script]
    answer = subprocess.check_output(without, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    enforced_here = [name for name in ("calls", "capabilities", "files") if enforced(name)]
    assert answer == f"2\n {enforced_here}\n"


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="the other tests run unprivileged then")
def test_files_are_bounded_where_nothing_can_be_mounted(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import asyncio
        from prorsa.rollout.sandboxes.pool import SandboxPool

        async def main():
            async with SandboxPool(prewarmed=0, timeout=30.0, files=500) as pool, pool.sandbox() as sandbox:
                await sandbox.start()
                assert "disk" not in sandbox.enforced
                print(await sandbox.run("import os, time\\nfor i in range(600): os.mkdir(f'd{i}')\\ntime.sleep(30)"))

        asyncio.run(main())
    """)
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", script]
    answer = subprocess.check_output(without, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert answer == f"The interpreter wrote more than 64 MB or 500 files and was killed. {LOST}\n"


RAW = """\
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *arguments), os.strerror(ctypes.get_errno())
information = ctypes.create_string_buffer(128)
struct.pack_into("iii", information, 0, 9, 0, -1)
"""


@pytest.fixture
def bystander() -> Iterator[int]:
    """A process of this user that has nothing to do with a sandbox."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    assert process.poll() is None
    process.communicate(b"\n")


def state_of(pid: int) -> tuple[object, ...]:
    return os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid), os.sched_getscheduler(pid)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="system calls by their numbers there")
@pytest.mark.parametrize(
    "code",
    [
        "call(62, {pid}, 9)",
        "call(129, {pid}, 9, information)",
        "call(297, {pid}, {pid}, 9, information)",
        "call(424, call(434, {pid}, 0)[0], 9, None, 0)",
        "call(141, 0, {pid}, 19)",
        "call(203, {pid}, 8, ctypes.c_long(1))",
        "call(251, 1, {pid}, 0x6007)",
        "call(302, {pid}, 7, ctypes.create_string_buffer(16), None)",
        "call(302, 0, 7, ctypes.create_string_buffer(16), None)",
        "call(438, 3, 0, 0)",
        "call(170, b'evil', 4)",
        "call(227, 0, information)",
        "call(161, b'.')",
        "call(133, b'device', 0o20777, 0x0101)",
        "call(165, b'x', b'.', b'tmpfs', 0, None)",
        "call(321, 0, information, 64)",
        "call(323, 0)",
        "call(425, 8, information)",
        "call(0x40000000 | 62, {pid}, 9)",
    ],
)
def test_no_system_call_reaches_another_process_or_the_machine(code: str, bystander: int) -> None:
    before = state_of(bystander)
    (text,) = results(RAW + code.format(pid=bystander))
    assert text == "(-1, 'Operation not permitted')\n"
    assert state_of(bystander) == before


def test_no_signal_is_sent_by_a_file(bystander: int) -> None:
    """A descriptor can have an owner that is sent any signal when it is ready."""
    for command in (8, 10, 15, 1024, 1026):
        (text,) = results(f"import fcntl, os; fcntl.fcntl(os.pipe()[0], {command}, {bystander})")
        assert "PermissionError" in text


@pytest.mark.parametrize(
    "code",
    [
        "os.chmod({path!r}, 0o777)",
        "os.utime({path!r}, (0, 0))",
        "os.chown({path!r}, 1000, 1000)",
        "os.setxattr({path!r}, 'user.x', b'x')",
        "os.link({path!r}, 'mine')",
        "os.symlink({path!r}, 'mine'); os.chmod('mine', 0o777)",
        "os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o777)",
        "os.utime(os.open(os.__file__, os.O_RDONLY), (0, 0))",
        "os.fchmod(1, 0o600)",
    ],
)
def test_modes_owners_times_and_attributes_outside_stay(code: str) -> None:
    path = Path(tempfile.mkdtemp(dir="/var/tmp")) / "file"
    path.write_text("x")
    watched = [path, Path(os.__file__), Path("/dev/null")]
    try:
        path.parent.chmod(0o755)
        before = [(file.stat().st_mode, file.stat().st_uid, file.stat().st_mtime_ns) for file in watched]
        results(f"import os; {code.format(path=str(path))}")
        assert [(file.stat().st_mode, file.stat().st_uid, file.stat().st_mtime_ns) for file in watched] == before
        assert os.listxattr(path) == []
    finally:
        shutil.rmtree(path.parent)


@pytest.mark.parametrize(
    "code",
    [
        "import shutil; open('a', 'w').write('x'); shutil.copy2('a', 'b'); shutil.move('b', 'c'); open('c').read()",
        "import tempfile; f = tempfile.NamedTemporaryFile('w+'); f.write('x'); f.seek(0); f.read()",
        "import os; os.makedirs('a/b'); os.chmod('a', 0o700); os.utime('a'); os.rename('a/b', 'c'); 'x'",
        "import pathlib; p = pathlib.Path('p'); p.touch(); p.touch(); p.write_text('x'); p.read_text()",
        "import sqlite3; sqlite3.connect('db').execute('select ?', 'x').fetchone()[0]",
        "import zipfile; zipfile.ZipFile('z', 'w').writestr('n', 'x'); zipfile.ZipFile('z').read('n').decode()",
        "import csv, json, re, math, random, statistics, itertools, datetime, decimal, fractions, hashlib; 'x'",
        "import zoneinfo, datetime; datetime.datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo('Europe/Berlin')); 'x'",
        "import unicodedata, xml.etree.ElementTree as t; t.fromstring('<a>x</a>').text",
        "import time, signal; time.sleep(0.01); signal.signal(signal.SIGALRM, print); signal.setitimer(0, 0); 'x'",
        "import ctypes; ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)(); 'x'",
        "import os; os.cpu_count(); os.getpid(); os.uname(); os.get_terminal_size if 1 else 0; 'x'",
        "import logging, collections, functools, heapq, bisect, string, textwrap, uuid; uuid.uuid4(); 'x'",
        "import dataclasses, typing, enum, asyncio, concurrent.futures; 'x'",
    ],
)
def test_what_tools_do_in_python_works(code: str) -> None:
    assert results(code)[0].splitlines()[-1] == "'x'"


def test_all_files_together_are_bounded() -> None:
    many, big, after = results(
        "import os\nfor i in range(10_000): os.mkdir(f'd{i}')",
        "for i in range(100): open(f'f{i}', 'wb').write(bytes(1 << 20))",
        "1 + 1",
        disk_mb=8,
        files=500,
        timeout=20.0,
    )
    assert "No space left on device" in many or "wrote more than 8 MB or 500 files" in many
    assert "No space left on device" in big or "wrote more than 8 MB or 500 files" in big
    assert after == "2\n"


DEEP = "import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')"


def test_a_deep_tree_costs_neither_its_run_nor_the_next() -> None:
    assert results(DEEP, "1 + 1", timeout=20.0)[1] == "2\n"
    assert results("1 + 1") == ["2\n"]


def test_a_hostile_tree_that_a_killed_run_left_is_removed_by_the_next(own_temporary_directory: Path) -> None:
    left = own_temporary_directory / f"{ROOT_PREFIX}left"
    left.mkdir()
    subprocess.run([sys.executable, "-c", DEEP], cwd=left, check=True)
    assert results("1 + 1") == ["2\n"]


@pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to make a directory that nobody can remove")
def test_a_directory_that_cannot_be_removed_is_told_and_costs_nobody_anything(
    own_temporary_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = own_temporary_directory / f"{ROOT_PREFIX}left"
    (left / "inner").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", left / "inner"], check=True)
    try:
        assert results("1 + 1") == ["2\n"]
        assert f"the directory {left} of a sandbox is left" in caplog.text
    finally:
        subprocess.run(["umount", left / "inner"], check=True)
    assert results("1 + 1") == ["2\n"]


def test_a_short_run_of_hostile_calls_changes_nothing_outside(own_temporary_directory: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "sandbox_attacks.py"
    done = subprocess.run(
        [sys.executable, script, "--count=60", "--seed=7"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 things outside a sandbox were changed" in done.stdout


def test_a_directory_without_permissions_is_removed_too() -> None:
    results("import os; os.makedirs('a/b'); open('a/b/c', 'w'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)")


def test_a_forged_answer_ends_the_sandbox_not_the_rollout() -> None:
    text, after = results("import os; os.write(4, b'\\xff' * 64); os.write(3, b'\\xff' * 64)", "1 + 1")
    assert text.startswith("The interpreter was killed by SIGKILL")
    assert after == "2\n"


# The pool.


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30.0):
        while not condition():  # noqa: ASYNC110 (another process gives no signal)
            await asyncio.sleep(0.01)


def test_a_prewarmed_sandbox_is_there_at_once_and_is_replaced() -> None:
    async def main() -> None:
        async with SandboxPool(prewarmed=2) as pool:
            await until(lambda: pool.ready == 2)
            async with pool.sandbox() as first, pool.sandbox() as second, pool.sandbox() as third:
                assert [s.mode for s in (first, second, third)] == [SandboxMode.PREWARMED] * 2 + [SandboxMode.COLD]
                for sandbox in (first, second, third):
                    await sandbox.start()
                    assert await sandbox.run("1 + 1") == "2\n"
            await until(lambda: pool.ready == 2 and len(runners()) == 2)

    asyncio.run(main())


def test_a_prewarmed_sandbox_that_died_is_not_handed_out() -> None:
    async def main() -> None:
        async with SandboxPool(prewarmed=1) as pool:
            await until(lambda: pool.ready == 1)
            (pid,) = runners()
            os.kill(pid, signal.SIGKILL)
            await until(lambda: pid not in runners())
            async with pool.sandbox() as sandbox:
                await sandbox.start()
                assert await sandbox.run("1 + 1") == "2\n"

    asyncio.run(main())


def test_many_at_once_all_work_and_few_start_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, most = 0, 0
    lock_in = processes.Worker.lock_in

    async def counted(worker: processes.Worker) -> None:
        nonlocal starting, most
        starting += 1
        most = max(most, starting)
        await lock_in(worker)
        starting -= 1

    monkeypatch.setattr(processes.Worker, "lock_in", counted)

    async def use(pool: SandboxPool, number: int) -> str:
        async with pool.sandbox() as sandbox:
            await sandbox.start()
            return await sandbox.run(str(number))

    async def main() -> None:
        async with SandboxPool(prewarmed=2) as pool:
            answers = await asyncio.gather(*(use(pool, number) for number in range(12)))
            assert answers == [f"{number}\n" for number in range(12)]

    asyncio.run(main())
    assert most == pools.STARTING


@pytest.mark.parametrize(
    ("interpreter", "reason"), [("/nonexistent/python", "No such file"), ("/bin/false", "exited with code 1")]
)
def test_a_sandbox_that_cannot_start_says_why(interpreter: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)

    async def main() -> None:
        async with SandboxPool(prewarmed=1) as pool, asyncio.timeout(20.0):
            # Often, for it may end before, while or after its socket is connected.
            for _ in range(30):
                async with pool.sandbox() as sandbox:
                    with pytest.raises(SandboxError, match=f"did not start: .*{reason}"):
                        await sandbox.start()

    asyncio.run(main())


def test_closing_the_pool_ends_what_runs() -> None:
    async def main() -> None:
        pool = SandboxPool(prewarmed=1, timeout=60.0)
        await pool.__aenter__()
        async with pool.sandbox() as sandbox:
            await sandbox.start()
            running = asyncio.create_task(sandbox.run("import time; time.sleep(60)"))
            await asyncio.sleep(0.05)
            await pool.close()
            assert "was killed by SIGKILL" in await running
            with pytest.raises(SandboxError, match="closed"):
                await sandbox.run("1")

    asyncio.run(main())


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.06, 0.2])
def test_a_cancellation_leaves_no_sandbox(delay: float) -> None:
    """The episode below starts in about 0.03 s, and then waits in its tool."""

    async def main() -> None:
        control = ScriptedControl(scripted(call("import time; time.sleep(60)")))
        async with SandboxPool(prewarmed=0, timeout=60.0) as pool:
            launch = Launch("t0", "g0", QUESTION, version=0, seed=0)
            task = asyncio.create_task(Episode(launch, environment(pool), control).run())
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await until(lambda: runners() == [])
        assert len(control.tracker) == 0

    asyncio.run(main())


def test_a_killed_parent_leaves_no_process_and_the_next_pool_removes_its_directories(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import asyncio
        from prorsa.rollout.sandboxes.pool import SandboxPool

        async def main():
            async with SandboxPool(prewarmed=2, timeout=60.0) as pool, pool.sandbox() as busy:
                await busy.start()
                running = asyncio.create_task(busy.run("while True: pass"))
                while pool.ready < 2:
                    await asyncio.sleep(0.01)
                print("ready", flush=True)
                await running

        asyncio.run(main())
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    children = runners(parent.pid)
    assert len(children) == 3
    parent.kill()
    parent.wait()
    parent.stdout.close()
    asyncio.run(until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children)))
    (left,) = tmp_path.glob(f"{ROOT_PREFIX}*")

    async def next_run() -> None:
        async with SandboxPool(prewarmed=0):
            assert not left.exists()

    asyncio.run(next_run())


def test_pools_do_not_take_each_others_directories() -> None:
    async def main() -> None:
        async with SandboxPool(prewarmed=0) as one, SandboxPool(prewarmed=0), one.sandbox() as sandbox:
            await sandbox.start()
            assert await sandbox.run("open('x', 'w').write('kept')") == "4\n"
            async with SandboxPool(prewarmed=0):
                assert await sandbox.run("open('x').read()") == "'kept'\n"

    asyncio.run(main())


def test_a_whole_rollout_in_real_sandboxes() -> None:
    async def main() -> None:
        control = ScriptedControl(scripted(call("x = 37 * 48"), call("print(x)"), "The answer is 1776."))
        async with (
            SandboxPool(prewarmed=2) as pool,
            Controller(control, environment(pool), Sampler([QUESTION], 4, seed=0), Plan(groups=2)) as controller,
        ):
            await until(lambda: pool.ready == 2)
            for _ in range(2):
                groups = await controller.batch()
                assert [record.reward for group in groups for record in group.records] == [1.0] * 8
        modes = {event.mode for event in control.of(e.SandboxStarting)}  # type: ignore[attr-defined]
        assert modes == {SandboxMode.PREWARMED, SandboxMode.COLD}
        assert {"1776" in CHAT.decode(request.input_ids) for request in control.requests if request.turn == 2} == {True}

    asyncio.run(main())
