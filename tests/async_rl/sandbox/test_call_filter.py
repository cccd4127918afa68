"""The filter of calls, run here as the kernel would run it."""

from __future__ import annotations

import errno
import struct

import pytest

from async_rl.sandbox import seccomp

ALLOWED = {
    "x86_64": {"read": 0, "mmap": 9, "socketpair": 53, "getpid": 39, "futex": 202, "kill": 62},
    "aarch64": {"read": 63, "mmap": 222, "socketpair": 199, "getpid": 172, "futex": 98, "kill": 129},
}
FORK = 0x01200011  # what fork asks clone for
THREAD = 0x003D0F00


def answer(machine: str, number: int, argument: int = 0, arch: int | None = None, more: tuple[int, ...] = ()) -> int:
    arguments = (argument, *more, *[0] * 5)[:6]
    data = struct.pack("<iIQ6Q", number, seccomp.MACHINES[machine][0] if arch is None else arch, 0, *arguments)
    lines, place, value = list(struct.iter_unpack("<HBBI", seccomp.program(machine))), 0, 0
    while True:
        code, if_true, if_false, constant = lines[place]
        place += 1
        if code == seccomp.LOAD:
            (value,) = struct.unpack_from("<I", data, constant)
        elif code == seccomp.RETURN:
            return constant
        else:
            equal, above, common = value == constant, value > constant, value & constant
            holds = {seccomp.EQUAL: equal, seccomp.ABOVE: above, seccomp.ANY_BIT: common}[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_each_call_gets_its_answer(machine: str) -> None:
    column = seccomp.MACHINES[machine][1]
    for name, row in seccomp.KILLED.items():
        if row[column] is not None:
            assert answer(machine, row[column]) == seccomp.KILL, name
    for row in seccomp.REFUSED.values():
        assert answer(machine, row[column]) == seccomp.ERRNO | errno.EPERM
    for name, number in ALLOWED[machine].items():
        assert answer(machine, number) == seccomp.ALLOW, name
    assert answer(machine, seccomp.CLONE3[column]) == seccomp.ERRNO | errno.ENOSYS
    assert answer(machine, seccomp.NEWEST) == seccomp.ALLOW
    assert answer(machine, seccomp.NEWEST + 1) == seccomp.ERRNO | errno.ENOSYS


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_processes_and_threads_are_allowed_and_namespaces_are_not(machine: str) -> None:
    clone = seccomp.CLONE[seccomp.MACHINES[machine][1]]
    assert answer(machine, clone, FORK) == answer(machine, clone, THREAD) == seccomp.ALLOW
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(machine, clone, FORK | bit) == seccomp.KILL


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_sockets_are_of_this_machine_alone(machine: str) -> None:
    call = seccomp.SOCKET[seccomp.MACHINES[machine][1]]
    assert answer(machine, call, 1) == seccomp.ALLOW
    for family in (0, 2, 10, 16, 17, 40):
        assert answer(machine, call, family) == seccomp.KILL


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_a_cell_cannot_choose_to_outlive_its_keeper(machine: str) -> None:
    call = seccomp.PRCTL[seccomp.MACHINES[machine][1]]
    assert answer(machine, call, 1) == seccomp.KILL
    assert answer(machine, call, 15) == seccomp.ALLOW


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_limits_can_be_read_and_not_changed(machine: str) -> None:
    call = seccomp.PRLIMIT[seccomp.MACHINES[machine][1]]
    assert answer(machine, call, 1) == seccomp.ALLOW
    for address in (1, 1 << 32, 0x7F0000001000):
        assert answer(machine, call, 1, more=(0, address)) == seccomp.ERRNO | errno.EPERM


def test_another_kind_of_calls_is_no_way_around() -> None:
    assert answer("x86_64", 0, arch=0x40000003) == seccomp.KILL
    assert answer("x86_64", seccomp.X32) == seccomp.KILL
    with pytest.raises(KeyError):
        seccomp.program("riscv64")
