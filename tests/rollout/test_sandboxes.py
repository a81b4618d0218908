"""Real sandboxes: what code in them can and cannot do, and that none is left, whatever ends it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
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
        assert sandbox._worker is not None
        found.append(name in sandbox._worker.enforced)

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
            assert re.search("PermissionError|No such file|Read-only", text), code
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
                print(await sandbox.run("1 + 1"), sorted(sandbox._worker.enforced))

        asyncio.run(main())
    """)
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", script]
    answer = subprocess.check_output(without, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    enforced_here = [name for name in ("calls", "capabilities", "files") if enforced(name)]
    assert answer == f"2\n {enforced_here}\n"


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
            await until(lambda: not left.exists())

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


# What hostile code tries, and what stays as it was.

INFO = "import ctypes, os, struct; b = ctypes.create_string_buffer(128); struct.pack_into('iii', b, 0, 9, 0, -1)\n"
QUEUE = {"x86_64": (129, 297), "aarch64": (138, 240)}.get(os.uname().machine, (129, 297))


@contextmanager
def sentinel() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_no_other_process_is_reached_by_any_call() -> None:
    with sentinel() as other:
        pid = other.pid
        before = (os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid), os.sched_getscheduler(pid))
        texts = results(
            f"{INFO}ctypes.CDLL(None).syscall({QUEUE[0]}, {pid}, 9, b)",
            f"{INFO}ctypes.CDLL(None).syscall({QUEUE[1]}, {pid}, {pid}, 9, b)",
            f"import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, {pid})",
            "fcntl.fcntl(r, fcntl.F_SETSIG, 9)",
            "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x')",
            f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
            f"os.sched_setaffinity({pid}, [0])",
            f"os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
            f"import resource; resource.prlimit({pid}, resource.RLIMIT_NOFILE, (0, 0))",
            # A pointer whose lower half is zero is no null pointer.
            "import resource; l = ctypes.CDLL(None); l.mmap.restype = ctypes.c_void_p\n"
            "at = l.mmap(ctypes.c_void_p(1 << 32), ctypes.c_size_t(4096), 3, 0x32, -1, ctypes.c_long(0))\n"
            "if l.prlimit(0, 4, ctypes.c_void_p(at), None): raise OSError('not permitted')",
        )
        assert other.poll() is None
        assert texts[:2] == ["-1\n", "-1\n"]
        assert all("not permitted" in text or "not allowed" in text for text in texts[2:]), texts
        assert before == (
            *(os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid)),
            os.sched_getscheduler(pid),
        )


def test_no_attribute_of_a_file_outside_changes(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        Path(place).chmod(0o755)
        file = Path(place, "file")
        file.write_text("kept")
        file.chmod(0o600)
        before = file.stat()
        for code in (
            f"os.chmod({str(file)!r}, 0o777)",
            f"os.chown({str(file)!r}, 1, 1)",
            f"os.utime({str(file)!r}, (0, 0))",
            f"os.setxattr({str(file)!r}, 'user.x', b'y')",
            f"os.truncate({str(file)!r}, 0)",
            f"os.link({str(file)!r}, 'mine')",
            "os.chmod(os.__file__, 0o777)",
            "os.utime('/dev/null')",
            "os.fchmod(0, 0)",
        ):
            (text,) = results(f"import os\n{code}")
            assert "Error" in text, code
        after = file.stat()
        assert file.read_text() == "kept"
        assert (after.st_mode, after.st_uid, after.st_ctime_ns) == (before.st_mode, before.st_uid, before.st_ctime_ns)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.mknod('d', 0o020666, os.makedev(1, 7)); open('d', 'rb')",
        "import os; os.chroot('.')",
        "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
        "import socket; socket.sethostname('x')",
    ],
)
def test_root_has_no_privileges_inside(code: str) -> None:
    (text,) = results(code)
    assert "not permitted" in text


def test_files_and_bytes_are_bounded_together() -> None:
    many, big = results(
        "import os\nfor i in range(1000): os.mkdir(str(i))",
        "for i in range(1000): open(f'0/{i}' , 'wb')",
        home_files=100,
    )
    assert "No space left" in many
    assert "No space left" in big
    (full,) = results("for i in range(9): open(str(i), 'wb').write(b'x' * (1 << 20))", home_mb=4)
    assert "No space left" in full


def without_mounts(code: str, tmp_path: Path, **limits: int) -> str:
    """What the code returns where the kernel gives no mounts, as in most containers; the log too."""
    script = textwrap.dedent("""
        import asyncio, json, logging, sys
        from prorsa.rollout.sandboxes.pool import SandboxPool

        async def main(code, limits):
            logging.basicConfig(stream=sys.stdout)
            async with SandboxPool(prewarmed=0, **limits) as pool, pool.sandbox() as sandbox:
                await sandbox.start()
                assert "mounts" not in sandbox._worker.enforced
                print(await sandbox.run(code))

        asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
    """)
    without = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-c", script]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    return subprocess.check_output([*without, code, json.dumps(limits)], text=True, env=environment, timeout=60)


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"), reason="only root can take its mounts away"
)


@needs_root
@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')",
        "import os\nfor i in range(3000): os.mkdir(str(i))",
        "import os\nos.symlink('/etc', 'l'); os.mkdir('a'); open('a/b', 'w'); os.link('a/b', 'c')",
        "import os\nos.mkdir('.prorsa-removal-1-0'); open('-rf', 'w'); open('\\udcff\\n', 'w')",
    ],
)
def test_without_mounts_whatever_is_left_is_removed(code: str, tmp_path: Path) -> None:
    assert "is left" not in without_mounts(code, tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_root
def test_without_mounts_a_sandbox_over_its_bound_is_ended(tmp_path: Path) -> None:
    text = without_mounts(
        "import os, time\nfor i in range(200): os.mkdir(str(i))\ntime.sleep(4)", tmp_path, home_files=99
    )
    assert "more than its bound" in text
    assert "was killed by SIGKILL" in text


@needs_root
def test_without_mounts_modes_and_times_stay_out_of_reach(tmp_path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        assert "not permitted" in without_mounts(f"import os; os.chmod({file.name!r}, 0o777)", tmp_path)
        assert os.fstat(file.fileno()).st_mode & 0o777 == 0o600


def deep(top: Path) -> None:
    """Far beyond the length of a path and the depth of a stack."""
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("a-name-of-some-length", dir_fd=here)
        deeper = os.open("a-name-of-some-length", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)


def test_what_cannot_be_counted_is_not_within_bounds(tmp_path: Path) -> None:
    top = tmp_path / "top"
    deep(top)
    assert not processes.within(top, processes.Limits(home_files=10**6))
    processes.remove_tree(top)
    top.mkdir()
    (top / "file").write_bytes(b"x" * (1 << 20))
    assert processes.within(top, processes.Limits(home_files=1, home_mb=2))
    assert not processes.within(top, processes.Limits(home_files=0, home_mb=2))
    assert not processes.within(top, processes.Limits(home_files=1, home_mb=0))
    processes.remove_tree(top)


def test_what_earlier_runs_left_neither_fails_nor_delays_the_next(tmp_path: Path) -> None:
    left = tmp_path / f"{ROOT_PREFIX}left"
    deep(left)
    (tmp_path / f"{ROOT_PREFIX}file").write_text("no directory")

    async def main() -> None:
        async with SandboxPool(prewarmed=0) as pool, pool.sandbox() as sandbox:
            await sandbox.start()
            assert await sandbox.run("1 + 1") == "2\n"
            await until(lambda: not left.exists())

    asyncio.run(main())
    (tmp_path / f"{ROOT_PREFIX}file").unlink()


def test_deep_trees_modes_and_flags_do_not_stop_a_removal(tmp_path: Path) -> None:
    top = tmp_path / "top"
    deep(top)
    (top / "held").mkdir()
    (top / "held" / "file").write_text("x")
    if os.geteuid() == 0 and shutil.which("chattr"):
        subprocess.run(["chattr", "+i", top / "held" / "file"], check=False)
        subprocess.run(["chattr", "+a", top / "held"], check=False)
    (top / "shut").mkdir(mode=0)
    processes.remove_tree(top)
    assert not top.exists()


def test_one_that_cannot_be_removed_costs_nobody_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def main() -> None:
        async with SandboxPool(prewarmed=0) as pool:
            async with pool.sandbox() as stuck:
                await stuck.start()
                worker = stuck._worker
                assert worker is not None
                (worker.home / "file").write_text("put there from outside")
            await worker.ended.wait()
            async with pool.sandbox() as other:
                await other.start()
                assert await other.run("1 + 1") == "2\n"

    monkeypatch.setattr(processes, "REMOVAL", Path("/nonexistent/removal.py"))
    asyncio.run(main())
    assert "a sandbox's directory is left" in caplog.text
    assert "left for the next run" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def next_run() -> None:
        async with SandboxPool(prewarmed=0):
            await until(lambda: len(list(tmp_path.iterdir())) == 1)

    asyncio.run(next_run())


@pytest.mark.parametrize(
    "code",
    [
        "import math, json, re, itertools, statistics, random, decimal, fractions, hashlib as h; h.sha256(b'').hexdigest()",
        "import datetime as d, zoneinfo as z; d.datetime(2024, 7, 1, tzinfo=z.ZoneInfo('Asia/Tokyo')).utcoffset().seconds",
        "import sqlite3; sqlite3.connect(':memory:').execute('select 6 * 7').fetchone()",
        "import sqlite3; c = sqlite3.connect('db'); c.execute('create table t (x)'); c.commit(); c.execute('select 1')",
        "import tempfile; f = tempfile.NamedTemporaryFile('w+', dir='.'); f.write('x'); f.seek(0); f.read()",
        "import shutil; open('a', 'w').write('hi'); shutil.copy2('a', 'b'); open('b').read()",
        "import os; os.makedirs('x/y'); os.rename('x/y', 'z'); sorted(os.listdir('.'))",
        "import time; time.sleep(0.01); time.time() > 0",
        "import csv, io, collections, functools, dataclasses, typing, heapq, bisect, string, uuid; uuid.uuid4().version",
        "import pathlib; pathlib.Path('p').write_text('x'); pathlib.Path('p').stat().st_size",
        "import asyncio.events, urllib.parse, xml.etree.ElementTree as t; t.fromstring('<a>1</a>').text",
        "import zipfile; zipfile.ZipFile('z.zip', 'w').writestr('n', 'x'); zipfile.ZipFile('z.zip').namelist()",
    ],
)
def test_ordinary_code_works(code: str) -> None:
    (text,) = results(code)
    assert text
    assert "Traceback" not in text


def test_a_seeded_run_of_hostile_calls_changes_nothing_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import sandbox_attacks

    assert sandbox_attacks.attack(seed=11, count=60) == ([], 60)


@needs_root
def test_the_doctor_tells_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    from prorsa.cli import main

    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert re.search("signal another process +refused", told)
    command = [sys.executable, "-m", "prorsa.cli", "doctor"]
    less = subprocess.run(["setpriv", "--bounding-set=-all", *command], capture_output=True, text=True, check=True)
    assert re.search("!! +mounts +missing", less.stdout)
    assert "does not fully confine" in less.stderr


@needs_root
def test_as_root_a_sandbox_has_a_uid_of_its_own() -> None:
    async def main() -> None:
        async with SandboxPool(prewarmed=0) as pool, pool.sandbox() as one, pool.sandbox() as two:
            uids = []
            for sandbox in (one, two):
                await sandbox.start()
                uids.append(int(await sandbox.run("import os; os.getuid()")))
                assert ("user" in sandbox.enforced) == (uids[-1] != 0)
            assert uids[0] != uids[1] or uids == [0, 0]

    asyncio.run(main())
