"""The inside of a sandbox: a bare interpreter that locks itself in, then runs the code that its socket brings.

Run as a script by `prorsa.rollout.sandboxes.process`; nothing imports it. Its arguments are `PARENT_PID MEMORY_MB FILE_MB
CPU_S OUTPUT_CHARS HOME_MB HOME_FILES`, its input a socket. A frame, either way, is a 4-byte big-endian length and so much
UTF-8. First goes out `ready` with the names of what the kernel enforces, or `failed` with the reason; from then on a piece
of code comes in and its result goes out. At the end of the input it exits; if its parent dies, the kernel kills it.

One process, one thread: the filter knows the calls that are allowed, and whatever is not among them (processes, threads,
sockets, signals to others, owners, priorities, devices) is refused.
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

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_CAP_AMBIENT = 1, 38, 22, 24, 47
EPERM, ENOSYS, ENOTSUP, SIGKILL = 1, 38, 95, 9
PARSE_ONLY = 0x400  # `ast.PyCF_ONLY_AST`

# System calls by name, with their numbers on x86_64 and aarch64 (-1: it has none). What stands in no table is refused.
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "pwrite64": (18, 68),
    "readv": (19, 65), "writev": (20, 66), "access": (21, -1), "select": (23, -1), "sched_yield": (24, 124),
    "mremap": (25, 216), "msync": (26, 227), "madvise": (28, 233), "dup": (32, 23), "dup2": (33, -1),
    "pause": (34, -1), "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, -1), "setitimer": (38, 103),
    "getpid": (39, 172), "sendfile": (40, 71), "exit": (60, 93), "uname": (63, 160), "fsync": (74, 82),
    "fdatasync": (75, 83), "ftruncate": (77, 46), "getdents": (78, -1), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "rename": (82, -1), "mkdir": (83, -1), "rmdir": (84, -1), "creat": (85, -1), "link": (86, -1),
    "unlink": (87, -1), "symlink": (88, -1), "readlink": (89, -1), "umask": (95, 166), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getppid": (110, 173), "getpgrp": (111, -1),
    "getgroups": (115, 158), "getresuid": (118, 148), "getresgid": (120, 150), "sigaltstack": (131, 132),
    "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "statfs": (137, 43),
    "fstatfs": (138, 44), "gettid": (186, 178), "time": (201, -1), "futex": (202, 98), "getdents64": (217, 61),
    "fadvise64": (221, 223), "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "exit_group": (231, 94), "poll": (7, -1), "ppoll": (271, 73), "pselect6": (270, 72), "openat": (257, 56),
    "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38),
    "renameat2": (316, 276), "linkat": (265, 37), "symlinkat": (266, 36), "readlinkat": (267, 78),
    "faccessat": (269, 48), "faccessat2": (439, 439), "pipe": (22, -1), "pipe2": (293, 59), "dup3": (292, 24),
    "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "getrandom": (318, 278),
    "statx": (332, 291), "stat": (4, -1), "lstat": (6, -1), "open": (2, -1), "fallocate": (285, 47),
    "copy_file_range": (326, 285), "close_range": (436, 436), "getcpu": (309, 168), "restart_syscall": (219, 128),
}  # fmt: skip
# They change files by their name or descriptor, and Landlock does not look at them: only where all that can be reached
# is either the sandbox's own or mounted read-only.
OWN_FILES = {
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "utime": (132, -1), "utimes": (235, -1),
    "utimensat": (280, 88), "futimesat": (261, -1), "truncate": (76, 45),
}  # fmt: skip
# Answered as a file system without extended attributes would, which programs know how to deal with.
ATTRIBUTES = {
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "getxattr": (191, 8), "lgetxattr": (192, 9),
    "fgetxattr": (193, 10), "listxattr": (194, 11), "llistxattr": (195, 12), "flistxattr": (196, 13),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
CHECKED = {
    "fcntl": (72, 25), "ioctl": (16, 29), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "prlimit64": (302, 261), "sched_getaffinity": (204, 123), "clone3": (435, 435),
}  # fmt: skip
FCNTLS = (0, 1, 2, 3, 5, 6, 1030)  # duplicate, flags of a descriptor, read the status, record locks
SET_STATUS, ASYNC = 4, 0o20000
IOCTLS = (0x5401, 0x5413, 0x541B, 0x5450, 0x5451)  # is it a terminal, its size, bytes to read, (not) close on exec

LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT, MOUNT_SETATTR = 444, 445, 446, 442  # the same everywhere
PIVOT_ROOT = (155, 41)
LANDLOCK_VERSION_FLAG, LANDLOCK_PATH_BENEATH = 1, 1
# Landlock's access rights: 0 execute, 1 write, 2 read file, 3 read directory, 4-12 remove and make (6 character device,
# 9 socket, 11 block device), 13 rename across, 14 truncate, 15 device ioctl. Later versions of Landlock know more of them.
ACCESS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}
READ_FILE, READ_DIRECTORY, WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
NOT_AT_HOME = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 11 | 1 << 15
ALL_NETWORK, ALL_SCOPES = 3, 3  # TCP bind and connect (version 4); abstract sockets and signals (version 6)

NEW_MOUNTS, NEW_USERS, NEW_IPC, NEW_NETWORK = 0x00020000, 0x10000000, 0x08000000, 0x40000000
NOSUID, NODEV, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 0x1000, 0x4000, 1 << 18, 2
ATTR_READ_ONLY, ATTR_NOSUID, AT_RECURSIVE = 1, 2, 0x8000
FIRST_UID = 1_900_000_000
"""Plus the process id: the uid of a sandbox that root starts, which no other living one has."""
HOME = "/home"
DEVICES = {"/dev/null": READ_FILE | WRITE_FILE, "/dev/zero": READ_FILE, "/dev/urandom": READ_FILE}

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
    """Let the kernel kill this process when its parent dies, even in the middle of a loop. A change of uid undoes it."""
    libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def libraries() -> list[str]:
    """The directories that Python's own modules are read from."""
    found = {os.path.join(prefix, "lib") for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    found |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"}
    return sorted(path for path in found if os.path.isdir(path))


def checked(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), what)


def enter_namespaces(machine: str) -> None:
    """Mounts and IPC of its own; the network too where no filter refuses sockets. Raises `OSError`."""
    kinds = NEW_MOUNTS | NEW_IPC | (0 if machine in ARCHITECTURES else NEW_NETWORK)
    if libc.unshare(kinds) == 0:
        return
    uid, gid = os.geteuid(), os.getegid()
    checked(libc.unshare(kinds | NEW_USERS), "namespaces")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    checked(
        libc.mount(*texts, ctypes.c_ulong(flags), options.encode() if options is not None else None),
        f"mount of {target}",
    )


def set_mount(path: str, add: int, remove: int, flags: int) -> None:
    attributes = struct.pack("QQQQ", add, remove, 0, 0)
    result = libc.syscall(MOUNT_SETATTR, -100, path.encode(), flags, attributes, ctypes.c_size_t(len(attributes)))
    checked(result, f"attributes of {path}")


def confine_mounts(root: str, machine: str, home_mb: int, home_files: int) -> bool:
    """A file tree of its own: Python's libraries read-only, and a home of bounded size in memory. Nothing else is there.

    It ends with the process. False where the kernel, or the container that this runs in, has no such mounts.
    """
    before = os.open(".", os.O_PATH)
    try:
        enter_namespaces(machine)
        mount("none", "/", None, RECURSIVE | PRIVATE)
        mount("sandbox", root, "tmpfs", NOSUID, "size=64k,nr_inodes=128,mode=0755")
        for path in libraries():
            os.makedirs(root + path, exist_ok=True)
            mount(path, root + path, None, BIND | RECURSIVE)
        os.mkdir(root + "/dev")
        for path in DEVICES:
            os.close(os.open(root + path, os.O_CREAT))
            mount(path, root + path, None, BIND)
        os.makedirs(root + HOME, exist_ok=True)
        set_mount(root, ATTR_READ_ONLY | ATTR_NOSUID, 0, AT_RECURSIVE)
        # In bytes, not blocks: a kernel counts pages.
        options = f"size={home_mb << 20},nr_inodes={home_files + 1},mode=0700"
        mount("home", root + HOME, "tmpfs", NOSUID | NODEV, options)
        os.chdir(root)
        checked(libc.syscall(PIVOT_ROOT[ARCHITECTURES[machine][0]], b".", b"."), "root")
        checked(libc.umount2(b".", DETACH), "the old root")
        os.chdir(HOME)
    except (OSError, KeyError):
        os.fchdir(before)
        return False
    finally:
        os.close(before)
    return True


def become(uid: int) -> None:
    os.chown(".", uid, uid)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def may_become(uid: int) -> bool:
    """Whether this user namespace knows `uid`, and this process may chown, kill, setgid and setuid."""
    with open("/proc/self/uid_map") as file:
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, file)]
    return capabilities() & 0xE1 == 0xE1 and any(first <= uid < first + count for first, count in ranges)


def capabilities() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff"))


def within_reach(path: str) -> bool:
    """Whether others than root get that far."""
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


def drop_privileges() -> bool:
    """Without any capability, also in those it could get back."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    libc.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0)
    return bool(libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)) == 0)


def confine_files() -> bool:
    """Landlock: write below the working directory alone; read there and in the libraries. False where there is none."""
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), LANDLOCK_VERSION_FLAG)
    if version < 1:
        return False
    every = (1 << ACCESS_BITS.get(version, 16)) - 1
    attributes = struct.pack("Q", every)
    attributes += struct.pack("Q", ALL_NETWORK) if version >= 4 else b""
    attributes += struct.pack("Q", ALL_SCOPES) if version >= 6 else b""
    ruleset = libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock made no rules")
    grants = [(".", every & ~NOT_AT_HOME)]
    grants += [(path, READ_FILE | READ_DIRECTORY) for path in libraries()]
    grants += [(path, access) for path, access in DEVICES.items() if os.path.exists(path)]
    for path, access in grants:
        handle = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", access, handle)
        checked(libc.syscall(LANDLOCK_ADD, ruleset, LANDLOCK_PATH_BENEATH, rule, 0), f"Landlock's rule for {path}")
        os.close(handle)
    checked(libc.syscall(LANDLOCK_RESTRICT, ruleset, 0), "Landlock's restriction")
    os.close(ruleset)
    return True


def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """An instruction of a filter."""
    return struct.pack("HBBI", code, if_true, if_false, value)


LOAD, EQUAL, ANY_BIT, ANSWER = 0x20, 0x15, 0x45, 0x06
ALLOW = step(ANSWER, 0x7FFF0000)


def refuse(error: int) -> bytes:
    return step(ANSWER, 0x00050000 | error)


def argument(index: int, high: bool = False) -> bytes:
    """Load one half of an argument."""
    return step(LOAD, 16 + 8 * index + 4 * high)


def one_of(values: tuple[int, ...]) -> list[bytes]:
    return [part for value in values for part in (step(EQUAL, value, 0, 1), ALLOW)]


def without(bit: int) -> list[bytes]:
    return [step(ANY_BIT, bit, 1, 0), ALLOW]


def confine_calls(machine: str, own_files: bool) -> bool:
    """seccomp: the listed system calls and no other. False where there is no table for the CPU."""
    if machine not in ARCHITECTURES:
        return False
    column, architecture = ARCHITECTURES[machine]
    me = os.getpid()
    program = [step(LOAD, 4), step(EQUAL, architecture, 1, 0), refuse(EPERM), step(LOAD, 0)]
    allowed = [*ALLOWED.values(), *(OWN_FILES.values() if own_files else ())]
    program += one_of(tuple(numbers[column] for numbers in allowed if numbers[column] >= 0))
    for numbers in ATTRIBUTES.values():
        program += [step(EQUAL, numbers[column], 0, 1), refuse(ENOTSUP)]
    to_itself = [argument(0), *one_of((me,))]
    limits = [argument(0), step(EQUAL, 0, 1, 0), step(EQUAL, me, 0, 5)]  # and then its third argument is null
    limits += [argument(2), step(EQUAL, 0, 0, 3), argument(2, high=True), *one_of((0,))]
    # What may go on: `abort`, reading one's own limits, everything about descriptors that tells nobody of events.
    checks = {
        "fcntl": [argument(1), *one_of(FCNTLS), step(EQUAL, SET_STATUS, 0, 3), argument(2), *without(ASYNC)],
        "ioctl": [argument(1), *one_of(IOCTLS)],
        "kill": to_itself,
        "tkill": to_itself,
        "tgkill": to_itself,
        "prlimit64": limits,
        "sched_getaffinity": [argument(0), *one_of((0, me))],
        "clone3": [refuse(ENOSYS)],  # glibc goes on to clone, which is refused
    }
    for name, check in checks.items():
        program += [step(EQUAL, CHECKED[name][column], 0, len(check) + 1), *check, refuse(EPERM)]
    program.append(refuse(EPERM))

    code = b"".join(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    return bool(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0) == 0)


def reopen_standard() -> None:
    """Standard input, output and errors by mounts of its own: through the old ones it could change times and modes."""
    null = os.open("/dev/null", os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    os.close(null)


def confine(parent: int, home_mb: int, home_files: int) -> list[str]:
    """Take every right away that this kernel lets it. Returns the names of what is enforced."""
    machine, home, uid = os.uname().machine, os.getcwd(), FIRST_UID + os.getpid()
    os.umask(0o022)
    may = os.geteuid() == 0 and may_become(uid)  # for which /proc has to be there
    enforced = {"mounts": confine_mounts(home, machine, home_mb, home_files)}
    if enforced["mounts"]:
        home = HOME
        reopen_standard()
    # What others than root do not reach by the names it has here is of no use to another uid.
    enforced["user"] = may and within_reach(os.__file__) and within_reach(home)
    if enforced["user"]:
        become(uid)
    enforced["capabilities"] = drop_privileges()
    die_with(parent)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # or both of the following would need root
    enforced["files"] = confine_files()
    enforced["calls"] = confine_calls(machine, enforced["mounts"])
    return [name for name in enforced if enforced[name]]


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
    parent, memory_mb, file_mb, cpu_s, output_chars, home_mb, home_files = map(int, sys.argv[1:])
    try:
        die_with(parent)
        limit(memory_mb, file_mb, cpu_s)
        enforced = confine(parent, home_mb, home_files)
    except (OSError, ValueError) as error:
        write_frame(sink, f"failed {error}")
        return
    write_frame(sink, " ".join(["ready", *enforced]))
    namespace: dict[str, object] = {"__name__": "__main__"}
    while True:
        write_frame(sink, execute(read_frame(source), namespace, output_chars))


try:
    main()
finally:
    os._exit(1)  # without the interpreter's own clean-up, in which code of the sandbox could still run
