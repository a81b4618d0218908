"""The inside of a sandbox: a bare interpreter that locks itself in, then runs the code that its socket brings.

Run as a script by `prorsa.rollout.sandboxes.process`; nothing imports it. Its arguments are `PARENT_PID MEMORY_MB FILE_MB
CPU_S OUTPUT_CHARS`, its standard input a socket. A frame on that, either way, is a 4-byte big-endian length and so much
UTF-8. First goes out `ready` with the names of what the kernel enforces, or `failed` with the reason; from then on a piece
of code comes in and its result goes out. At the end of the input it exits; if its parent dies, the kernel kills it.

One process, one thread: the filter refuses `clone` of any kind, `execve`, sockets, signals to others and new limits.
Imports are few and low-level because they are most of a cold start.
"""

from __future__ import annotations

import _ast
import ctypes
import io
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # which type checkers take for true; `typing` itself is a slow import
if TYPE_CHECKING:
    from typing import IO

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
EPERM, ENOSYS, SIGKILL = 1, 38, 9
PARSE_ONLY = 0x400  # `ast.PyCF_ONLY_AST`

# The architecture's number in seccomp's data, and its numbers of the calls that are refused.
SYSCALLS = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "connect": 42, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "execve": 59,
            "kill": 62, "tkill": 200, "tgkill": 234, "pidfd_send_signal": 424, "setpgid": 109, "setsid": 112,
            "shmget": 29, "semget": 64, "msgget": 68, "ptrace": 101, "process_vm_readv": 310,
            "process_vm_writev": 311, "prctl": 157, "setrlimit": 160, "mount": 165, "unshare": 272, "setns": 308,
            "execveat": 322, "io_uring_setup": 425,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "connect": 203, "socketpair": 199, "clone": 220, "execve": 221, "kill": 129, "tkill": 130,
            "tgkill": 131, "pidfd_send_signal": 424, "setpgid": 154, "setsid": 157, "shmget": 194, "semget": 190,
            "msgget": 186, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "prctl": 167,
            "setrlimit": 164, "mount": 40, "unshare": 97, "setns": 268, "execveat": 281, "io_uring_setup": 425,
        },
    ),
}  # fmt: skip
PRLIMIT = {"x86_64": 302, "aarch64": 261}
CLONE3 = 435  # the same everywhere, like Landlock's three
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_VERSION_FLAG, LANDLOCK_PATH_BENEATH = 1, 1
# Landlock's access rights: 0 execute, 1 write, 2 read file, 3 read directory, 4-12 remove and make, 13 rename across,
# 14 truncate, 15 device ioctl. Later versions of Landlock know more of them.
ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
READ_FILE, READ_DIRECTORY, WRITE_FILE = 1 << 2, 1 << 3, 1 << 1

libc = ctypes.CDLL(None, use_errno=True)


def limit(memory_mb: int, file_mb: int, cpu_s: int) -> None:
    """Address space, file size, CPU, open files, processes; no core file."""
    for what, most in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, file_mb << 20),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, even in the middle of a loop."""
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def confine_files(home: str) -> bool:
    """Landlock: write below `home` alone; read there and in Python's own libraries. False where the kernel has none."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), LANDLOCK_VERSION_FLAG)
    if version < 1:
        return False
    every = (1 << ACCESS_BITS.get(version, 16)) - 1
    ruleset = libc.syscall(LANDLOCK_CREATE, struct.pack("Q", every), ctypes.c_size_t(8), 0)
    read = READ_FILE | READ_DIRECTORY
    grants = [(home, every & ~1)]
    libraries = {os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    libraries |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"}
    grants += [(path, read) for path in libraries]
    grants += [("/dev/null", READ_FILE | WRITE_FILE), ("/dev/zero", READ_FILE), ("/dev/urandom", READ_FILE)]
    for path, access in grants:
        if os.path.exists(path):
            handle = os.open(path, os.O_PATH)
            rule = struct.pack("=Qi", access, handle)
            if libc.syscall(LANDLOCK_ADD, ruleset, LANDLOCK_PATH_BENEATH, rule, 0):
                raise OSError(ctypes.get_errno(), f"Landlock refused a rule for {path}")
            os.close(handle)
    if libc.syscall(LANDLOCK_RESTRICT, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock refused to restrict the sandbox")
    os.close(ruleset)
    return True


def confine_calls() -> bool:
    """seccomp: refuse processes, threads, sockets, signals and new limits. False where there is no table for the CPU."""
    machine = os.uname().machine
    if machine not in SYSCALLS:
        return False
    architecture, refused = SYSCALLS[machine]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    allow, refuse = step(answer, 0x7FFF0000), step(answer, 0x00050000 | EPERM)
    # glibc falls back from clone3, whose flags a filter cannot see, to clone.
    program = [step(load, 4), step(equal, architecture, 1, 0), refuse, step(load, 0)]
    program += [step(at_least, 0x40000000, 0, 1), refuse]
    program += [step(equal, CLONE3, 0, 1), step(answer, 0x00050000 | ENOSYS)]
    for number in refused.values():
        program += [step(equal, number, 0, 1), refuse]
    # prlimit64 may read a limit (its third argument is null then), not set one.
    program += [step(equal, PRLIMIT[machine], 1, 0), allow, step(load, 32), step(equal, 0, 1, 0), refuse, allow]

    code = b"".join(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    return bool(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0) == 0)


class Output(io.TextIOBase):
    """What the code printed, up to a bound; the rest is counted and thrown away."""

    def __init__(self, most: int) -> None:
        self.most, self.kept, self.lost = most, 0, 0
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        part = text[: self.most - self.kept]
        self.parts.append(part)
        self.kept += len(part)
        self.lost += len(text) - len(part)
        return len(text)

    def text(self) -> str:
        printed = "".join(self.parts)
        return printed + f"\n[{self.lost} more characters]" if self.lost else printed


def execute(code: str, namespace: dict[str, object], most: int) -> str:
    """Run `code` as a cell: a last line that is an expression shows its value. Returns what it printed and raised."""
    output, failure = Output(most), Output(most)
    sys.stdout = sys.stderr = output
    try:
        body = compile(code, "<code>", "exec", PARSE_ONLY).body
        last = [body.pop()] if body and isinstance(body[-1], _ast.Expr) else []
        exec(compile(_ast.Module(body, []), "<code>", "exec"), namespace)
        exec(compile(_ast.Interactive(last), "<code>", "single"), namespace)
    except MemoryError:
        failure.write("MemoryError\n")
        if exhausted():
            namespace.clear()
            failure.write("All variables are lost.\n")
    except BaseException as error:
        failure.write(describe(error, code))
    return output.text() + failure.text()


def describe(error: BaseException, code: str) -> str:
    """The traceback as the code's author knows it: this file's and the library's frames are left out."""
    import linecache
    import traceback

    linecache.cache["<code>"] = (len(code), None, code.splitlines(True), "<code>")
    report = traceback.TracebackException.from_exception(error)
    report.stack = traceback.StackSummary.from_list(
        [frame for frame in report.stack if frame.filename == "<code>"][-4:]
    )
    return "".join(report.format(chain=False))


def exhausted() -> bool:
    """Whether the little memory is missing that the next piece of code needs at least."""
    try:
        bytearray(16 << 20)
    except MemoryError:
        return True
    return False


def read_frame(source: IO[bytes]) -> str:
    header = source.read(4)
    if len(header) < 4:
        os._exit(0)
    return source.read(int.from_bytes(header, "big")).decode()


def write_frame(sink: IO[bytes], text: str) -> None:
    data = text.encode("utf-8", "replace")
    sink.write(len(data).to_bytes(4, "big") + data)
    sink.flush()


def main() -> None:
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(0), "wb")
    os.dup2(1, 0)  # /dev/null: the code's own standard input is empty
    parent, memory_mb, file_mb, cpu_s, output_chars = map(int, sys.argv[1:])
    try:
        die_with(parent)
        limit(memory_mb, file_mb, cpu_s)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # or both of the following would need root
        enforced = {"files": confine_files(os.getcwd()), "calls": confine_calls()}
    except (OSError, ValueError) as error:
        write_frame(sink, f"failed {error}")
        return
    write_frame(sink, " ".join(["ready", *(name for name in enforced if enforced[name])]))
    namespace: dict[str, object] = {"__name__": "__main__"}
    while True:
        write_frame(sink, execute(read_frame(source), namespace, output_chars))


try:
    main()
finally:
    os._exit(1)  # without the interpreter's own clean-up, in which code of the sandbox could still run
