"""The walls of a cell, each one function: namespaces, a root of its own, rights, limits, calls.

All of it is done by the keeper (`async_rl.sandbox.warden`) and by the cell's first process, before anything untrusted
runs there. Each raises OSError with the step's name in its `filename`, so that a machine without it can say so.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import os
import resource
import signal
import struct
import sys
import sysconfig

from async_rl.sandbox import seccomp
from async_rl.sandbox.limits import Limits

INSIDE = 1000  # user and group that a program sees itself as
NAMESPACES = (
    ("mount", 0x00020000), ("cgroup", 0x02000000), ("hostname", 0x04000000), ("IPC", 0x08000000),
    ("process", 0x20000000), ("network", 0x40000000),
)  # fmt: skip
CLONE_NEWUSER = 0x10000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_MOUNT_SETATTR, AT_RECURSIVE = 442, 0x8000  # the same number everywhere
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
SECCOMP_MODE_FILTER = 2
CAPABILITY_VERSION_3 = 0x20080522
CAPABILITIES = 64  # more than there are: those beyond the last answer EINVAL
STAGE = "/sys"  # a folder that every Linux has, that nothing here needs, to build the new root on
DEVICES = ("null", "zero", "full", "random", "urandom")
PRIVATE = "/tmp"  # where a program may write, and starts
INODES = 4096
ROOT_OPTIONS = "size=256k,nr_inodes=512,mode=755"
MOST_FILES = 1 << 20

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, step: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), step)


def prctl(option: int, step: str, *arguments: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    check(libc.prctl(option, *values), step)


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), options.encode()
    )
    check(result, f"mounting {source} on {target}")


def die_with_parent() -> None:
    """To be called again after every change of user: it is forgotten then. Who calls it makes sure afterwards that
    the parent is still there."""
    prctl(PR_SET_PDEATHSIG, "prctl(PR_SET_PDEATHSIG)", signal.SIGKILL)


def first_to_go() -> None:
    """When memory runs out on this machine, the kernel ends a cell before anything that works."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def new_user_namespace() -> None:
    check(libc.unshare(CLONE_NEWUSER), "a user namespace")


def new_namespaces() -> None:
    for name, flag in NAMESPACES:
        check(libc.unshare(flag), f"a {name} namespace")


def write_identity(pid: str, user: int, group: int, may_set_groups: bool) -> None:
    """Who `INSIDE` is outside, for the user namespace of process `pid` ("self", or a number)."""
    maps = [("uid_map", f"{INSIDE} {user} 1"), ("gid_map", f"{INSIDE} {group} 1")]
    if not may_set_groups:
        maps.insert(0, ("setgroups", "deny"))
    for name, text in maps:
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def spare_user(pid: int, extents: str) -> int | None:
    """A user id that nobody has, another for each process `pid` that lives: from the end of the ids of this namespace
    (`extents` is /proc/self/uid_map). None where there are no others."""
    first, _, count = (int(word) for word in extents.splitlines()[-1].split())
    if count < 2:
        return None
    if count > 1 << 31:
        return (1 << 30) + pid
    return first + count - 2 - pid % (count // 2)


def shared_library_folders() -> list[str]:
    """Where the libraries lie that this interpreter has loaded: those of its modules lie there, too."""
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "/" in line}
    return sorted({os.path.dirname(path) for path in paths if ".so" in os.path.basename(path)})


def readable_folders() -> tuple[list[str], list[str]]:
    """What of the machine a program may read: the interpreter's own modules and libraries. And which folders within
    them it may not: other packages."""
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not those of a virtual environment
    wanted = {*(sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")), *shared_library_folders()}
    folders: list[str] = []
    for folder in sorted(os.path.realpath(each) for each in wanted):
        if os.path.isdir(folder) and not any(f"{folder}/".startswith(f"{kept}/") for kept in folders):
            folders.append(folder)
    hidden = {
        place
        for folder in (*folders, *map(os.path.realpath, wanted))
        for name in ("site-packages", "dist-packages")
        for place in (f"{folder}/{name}", *glob.glob(f"{glob.escape(folder)}/python*/{name}"))
        if os.path.isdir(place)
    }
    return folders, sorted(hidden)


def new_root(disk_mb: int, folders: list[str], hidden: list[str], of_root: bool) -> None:
    """A root with nothing but those folders and a few devices, read-only, and an empty place to write in memory.

    The folders are opened by who we were, as the way to them may be nobody else's (/root); what is made is made by
    `INSIDE`, as others have no place in this user namespace."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    sources = {name: os.open(name, os.O_PATH) for name in (*folders, *(f"/dev/{device}" for device in DEVICES))}
    be_inside(of_root)
    mount("tmpfs", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, ROOT_OPTIONS)
    os.mkdir(f"{STAGE}/dev")
    for name, file in sources.items():
        if name in folders:
            os.makedirs(STAGE + name)
        else:
            os.close(os.open(STAGE + name, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/proc/self/fd/{file}", STAGE + name, None, MS_BIND | MS_REC)
        os.close(file)
    for folder in hidden:
        mount("tmpfs", STAGE + folder, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,nr_inodes=2,mode=755")
    os.mkdir(STAGE + PRIVATE)
    os.chdir(STAGE)
    check(libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    check(libc.umount2(b".", MNT_DETACH), "letting go of the old root")
    os.chdir("/")
    read_only = struct.pack("<QQQQ", MS_RDONLY | MS_NOSUID, 0, 0, 0)  # struct mount_attr; both bits are MOUNT_ATTR_*'s
    result = libc.syscall(SYS_MOUNT_SETATTR, -100, b"/", AT_RECURSIVE, read_only, len(read_only))
    check(result, "making the root read-only (mount_setattr, Linux 5.12)")
    mount(
        "tmpfs", PRIVATE, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC,
        f"size={disk_mb}m,nr_inodes={INODES},mode=700,uid={INSIDE},gid={INSIDE}",
    )  # fmt: skip


def be_inside(of_root: bool) -> None:
    """From the user who came into this user namespace to `INSIDE`, with the namespace's rights for the time being."""
    if of_root:
        os.setgroups([])
        os.setresgid(INSIDE, INSIDE, INSIDE)
        os.setresuid(INSIDE, INSIDE, INSIDE)


def drop_rights() -> None:
    """Every right, and the means to come by any, for good."""
    for capability in range(CAPABILITIES):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    prctl(PR_CAP_AMBIENT, "clearing ambient capabilities", PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("<Ii", CAPABILITY_VERSION_3, 0)
    check(libc.capset(header, bytes(24)), "dropping capabilities")
    prctl(PR_SET_NO_NEW_PRIVS, "prctl(PR_SET_NO_NEW_PRIVS)", 1)
    prctl(PR_SET_DUMPABLE, "prctl(PR_SET_DUMPABLE)", 0)


def set_limits(limits: Limits) -> None:
    memory, disk = limits.memory_mb << 20, limits.disk_mb << 20
    # Two limits: SIGXCPU at the first says why the program ended; one that ignores it is killed at the second.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.killed_at_cpu_s))
    for what, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NOFILE, limits.files),
        (resource.RLIMIT_NPROC, limits.processes + 1),  # the keeper is of the same user
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 64),
        (resource.RLIMIT_RTPRIO, 0),
        (resource.RLIMIT_NICE, 0),
    ):
        resource.setrlimit(what, (value, value))


def refuse_calls() -> None:
    """For this process and all that it starts. Raises OSError, and KeyError for a machine without a list of calls."""
    lines = seccomp.program()
    memory = ctypes.create_string_buffer(lines, len(lines))
    header = struct.pack("HxxxxxxP", len(lines) // 8, ctypes.addressof(memory))
    check(
        libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.c_char_p(header), 0, 0),
        "a filter of calls (seccomp)",
    )


def keep_files(files: list[int]) -> None:
    """These become 0, 1, 2, …; all others are closed."""
    clear = [fcntl.fcntl(file, fcntl.F_DUPFD, len(files)) for file in files]
    for number, file in enumerate(clear):
        os.dup2(file, number)
    os.closerange(len(files), MOST_FILES)


def default_signals() -> None:
    """As a program finds them that was started in no particular way."""
    for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
