"""The system call filter, run instruction by instruction for both architectures."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnimodel.isolation import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSED = 0x00050000 | errno.EPERM
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(architecture: str, number: int, first: int = 0, second: int = 0, *, internet: bool = True, arch: int = 0):
    """What the kernel would decide, by its rules for these few instructions."""
    seen = struct.pack("<IIQQQ", number, arch or ARCHITECTURES[architecture], 0, first, second)
    accumulator, place = 0, 0
    lines = seccomp.program(architecture, internet=internet)
    while True:
        code, yes, no, operand = lines[place]
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("<I", seen, operand)
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}
            place += yes if holds[code] else no


@pytest.mark.parametrize(("architecture", "column"), [("x86_64", 0), ("aarch64", 1)])
class TestFilter:
    @pytest.mark.parametrize("name", sorted(seccomp.DENIED))
    def test_refuses(self, architecture: str, column: int, name: str) -> None:
        number = seccomp.DENIED[name][column]
        if number is not None:
            assert verdict(architecture, number) == REFUSED

    @pytest.mark.parametrize("name", ["read", "mmap", "execve", "futex"])
    def test_allows_what_every_program_needs(self, architecture: str, column: int, name: str) -> None:
        numbers = {"read": (0, 63), "mmap": (9, 222), "execve": (59, 221), "futex": (202, 98)}
        assert verdict(architecture, numbers[name][column]) == ALLOW

    def test_a_thread_may_be_made_and_a_namespace_may_not(self, architecture: str, column: int) -> None:
        clone = (56, 220)[column]
        assert verdict(architecture, clone, 0x3D0F00) == ALLOW  # what pthread_create asks for
        for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
            assert verdict(architecture, clone, 0x11 | flag) == REFUSED
        assert verdict(architecture, 435) & 0xFFFF == errno.ENOSYS

    def test_socket_families(self, architecture: str, column: int) -> None:
        for call in ((41, 198)[column], (53, 199)[column]):
            for internet in (False, True):
                allowed = {
                    family for family in range(64) if verdict(architecture, call, family, internet=internet) == ALLOW
                }
                assert allowed == ({1, 16, 2, 10} if internet else {1, 16})

    def test_no_typing_into_a_terminal(self, architecture: str, column: int) -> None:
        ioctl = (16, 29)[column]
        assert verdict(architecture, ioctl, 0, 0x5412) == REFUSED
        assert verdict(architecture, ioctl, 0, 0x541C) == REFUSED
        assert verdict(architecture, ioctl, 0, 0x5401) == ALLOW

    def test_calls_of_another_architecture_end_the_process(self, architecture: str, column: int) -> None:
        assert verdict(architecture, 0, arch=0x40000003) == KILL


def test_the_x32_names_of_calls_are_refused() -> None:
    assert verdict("x86_64", 0x40000000 | 520) == REFUSED


@given(st.integers(0, 500), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_every_call_gets_a_verdict(number: int, first: int, second: int) -> None:
    for architecture in ARCHITECTURES:
        assert verdict(architecture, number, first, second) & 0xFFFF0000 in {ALLOW, KILL, 0x00050000}
