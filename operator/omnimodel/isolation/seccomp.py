"""A list of system calls that a model's process never needs and an attacker does: refused with EPERM."""

from __future__ import annotations

import ctypes
import errno
import struct

from omnimodel.isolation.syscalls import machine, syscall

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NR_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER = 1
_RETURN_ALLOW, _RETURN_ERRNO, _RETURN_KILL = 0x7FFF0000, 0x00050000, 0x80000000
_X32_BIT = 0x40000000

# name -> (x86_64, aarch64); None where the architecture has no such call.
# Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "uselib": (134, None),
    "modify_ldt": (154, None),
    "pivot_root": (155, 41),
    "adjtimex": (159, 171),
    "chroot": (161, 51),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "lookup_dcookie": (212, 18),
    "clock_settime": (227, 112),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "migrate_pages": (256, 238),
    "unshare": (272, 97),
    "move_pages": (279, 239),
    "vhangup": (153, 58),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "clock_adjtime": (305, 266),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)  # its flags lie in memory: ENOSYS makes the C library use clone
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_IOCTL = (16, 29)
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET and TIME
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data, little-endian low words


def program(architecture: str, *, internet: bool) -> list[tuple[int, int, int, int]]:
    """The filter as BPF instructions (code, jump if true, jump if false, operand).

    Args:
        architecture: `x86_64` or `aarch64`.
        internet: sockets of the internet families may be made; other families but UNIX and netlink never.
    """
    column = 0 if architecture == "x86_64" else 1
    refuse = (_RETURN, 0, 0, _RETURN_ERRNO | errno.EPERM)
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[architecture]),
        (_RETURN, 0, 0, _RETURN_KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if architecture == "x86_64":
        code += [(_JUMP_AT_LEAST, 0, 1, _X32_BIT), refuse]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            code += [(_JUMP_EQUAL, 0, 1, number), refuse]
    code += [(_JUMP_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _RETURN_ERRNO | errno.ENOSYS)]
    code += [
        (_JUMP_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST),
        (_JUMP_BITS, 0, 1, _NEW_NAMESPACES),
        refuse,
        (_LOAD, 0, 0, _NUMBER),
    ]
    code += [
        (_JUMP_EQUAL, 0, 4, _IOCTL[column]),
        (_LOAD, 0, 0, _SECOND),
        (_JUMP_EQUAL, 1, 0, _TIOCSTI),
        (_JUMP_EQUAL, 0, 1, _TIOCLINUX),
        refuse,
        (_LOAD, 0, 0, _NUMBER),
    ]
    families = [AF_UNIX, AF_NETLINK, *([AF_INET, AF_INET6] if internet else [])]
    for call in (_SOCKET, _SOCKETPAIR):
        tests = [(_JUMP_EQUAL, len(families) - index, 0, family) for index, family in enumerate(families)]
        body = [(_LOAD, 0, 0, _FIRST), *tests, (_RETURN, 0, 0, _RETURN_ERRNO | errno.EAFNOSUPPORT)]
        code += [(_JUMP_EQUAL, 0, len(body), call[column]), *body, (_LOAD, 0, 0, _NUMBER)]
    code.append((_RETURN, 0, 0, _RETURN_ALLOW))
    return code


def install(*, internet: bool) -> None:
    """Put the filter on this thread for good; no_new_privs must be set.

    Raises:
        OSError: the kernel has no seccomp filters, or this architecture is unknown.
    """
    architecture = machine()
    if architecture not in _AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no filter for {architecture}")
    instructions = b"".join(struct.pack("HBBI", *line) for line in program(architecture, internet=internet))
    text = ctypes.create_string_buffer(instructions, len(instructions))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(text)))
    syscall(_NR_SECCOMP[architecture], _SECCOMP_SET_MODE_FILTER, 0, header)
