"""The calls of the kernel that a program in a cell is refused: a BPF program for `seccomp(2)`.

What a cell must not do is already impossible for want of rights, or of a thing to do it to. The filter takes away most
of what a fault in the kernel could be reached by, and names a try: the process is killed with SIGSYS ("forbidden"). A
call newer than this list answers ENOSYS, as it does on an older kernel, and libraries go another way.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000  # linux/seccomp.h; KILL: the whole process
LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, JGT, JSET; BPF_RET|K
NUMBER_AT, ARCH_AT, ARGUMENT_AT = 0, 4, 16  # struct seccomp_data, little-endian: the low halves of arguments come first
NEWEST = 462  # mseal, of Linux 6.10: what is above is not known here
AF_UNIX = 1
NEW_NAMESPACES = 0x7E020000  # every CLONE_NEW* that clone takes
X32 = 0x40000000  # a second way to call an x86-64 kernel, with other numbers

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # AUDIT_ARCH_*, the column below
KILLED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "semget": (64, 190),
    "mq_open": (240, 180), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "syslog": (103, 116), "vhangup": (153, 58),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "personality": (135, 92), "migrate_pages": (256, 238), "move_pages": (279, 239), "vmsplice": (278, 75),
    "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None), "uselib": (134, None),
}  # fmt: skip
REFUSED = {
    "execve": (59, 221), "execveat": (322, 281),  # EPERM: there is nothing to run, and `subprocess` says so
    "setrlimit": (160, 164),  # by which a program could have the kernel kill it as if it came from outside
}  # fmt: skip
PRLIMIT, NEW_LIMIT = (302, 261), 2  # refused with new limits: that argument; it is how limits are read, too
SOCKET, CLONE, CLONE3, PRCTL = (41, 198), (56, 220), (435, 435), (157, 167)
PR_SET_PDEATHSIG = 1  # by which a cell could outlive its keeper


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One `struct sock_filter`; the jumps count instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


def program(machine: str = platform.machine()) -> bytes:
    """The filter for a machine's calls, as an array of `struct sock_filter`. Raises KeyError for another kind of
    machine than those of `MACHINES`."""
    arch, column = MACHINES[machine]

    def numbers(table: Mapping[str, tuple[int, int | None]]) -> list[int]:
        return [number for row in table.values() if (number := row[column]) is not None]

    lines = [
        instruction(LOAD, ARCH_AT),
        instruction(EQUAL, arch, 1, 0),
        instruction(RETURN, KILL),
        instruction(LOAD, NUMBER_AT),
    ]
    if machine == "x86_64":
        lines += [instruction(ANY_BIT, X32, 0, 1), instruction(RETURN, KILL)]
    for number in numbers(KILLED):
        lines += [instruction(EQUAL, number, 0, 1), instruction(RETURN, KILL)]
    for number in numbers(REFUSED):
        lines += [instruction(EQUAL, number, 0, 1), instruction(RETURN, ERRNO | errno.EPERM)]
    # Its flags lie in memory, where a filter cannot look: libraries then take clone, whose flags are an argument.
    lines += [instruction(EQUAL, CLONE3[column], 0, 1), instruction(RETURN, ERRNO | errno.ENOSYS)]
    lines += [instruction(ABOVE, NEWEST, 0, 1), instruction(RETURN, ERRNO | errno.ENOSYS)]
    refused = instruction(RETURN, ERRNO | errno.EPERM)
    low = ARGUMENT_AT + 8 * NEW_LIMIT
    lines += [instruction(EQUAL, PRLIMIT[column], 0, 6), instruction(LOAD, low), instruction(EQUAL, 0, 0, 2)]
    lines += [instruction(LOAD, low + 4), instruction(EQUAL, 0, 1, 0), refused, instruction(RETURN, ALLOW)]
    for number, flaw in (
        (CLONE[column], instruction(ANY_BIT, NEW_NAMESPACES, 0, 1)),
        (SOCKET[column], instruction(EQUAL, AF_UNIX, 1, 0)),
        (PRCTL[column], instruction(EQUAL, PR_SET_PDEATHSIG, 0, 1)),
    ):
        lines += [instruction(EQUAL, number, 0, 4), instruction(LOAD, ARGUMENT_AT), flaw]
        lines += [instruction(RETURN, KILL), instruction(RETURN, ALLOW)]
    return b"".join([*lines, instruction(RETURN, ALLOW)])
