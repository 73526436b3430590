"""System call filter of sandboxed programs, as a classic BPF program for ``bwrap --seccomp``.

It refuses calls that get memory no other limit counts (``memfd_create``, System V and POSIX queues,
keyrings, ``inotify``), that make namespaces or mounts, that inspect other processes, and large,
rarely needed parts of the kernel (``bpf``, ``io_uring``, ``perf``). Sockets are limited to Unix and
IP, which the network namespace cuts off, unlike ``AF_VSOCK``, say. Their buffers keep their size,
on which
:func:`~jax_agent_rl.tool_server.sandbox.limits.socket_memory` relies: setting it succeeds without effect.

Numbers: the kernel's ``asm/unistd_64.h`` and ``asm-generic/unistd.h``.
"""

from __future__ import annotations

import errno
import struct

# name -> (x86-64, aarch64)
_REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "inotify_init": (253, 26),
    "inotify_init1": (294, 26),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
}
_CLONE, _CLONE3, _SOCKET, _SETSOCKOPT = (56, 220), (435, 435), (41, 198), (54, 208)
_SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF = 1, 7, 8
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = (
    0x4000_0000  # the x32 calls share the audit architecture of x86-64 and have other numbers
)
_NEW_NAMESPACE = (
    0x7E02_0000  # CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
)
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
# Offsets in struct seccomp_data; of arguments, the little-endian low word.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32


MACHINES = tuple(_AUDIT_ARCH)
"""Values of ``platform.machine()`` for which there is a filter."""


def build_filter(machine: str) -> bytes:
    """Return the filter of one of :data:`MACHINES`: ``struct sock_filter`` entries, 8 bytes each."""
    column = 0 if machine == "x86_64" else 1
    code = [
        _op(_LOAD, _ARCHITECTURE),
        _op(_JUMP_EQ, _AUDIT_ARCH[machine], then=1),
        _op(_RETURN, _KILL),  # e.g. 32-bit calls, whose numbers mean something else
        _op(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_op(_JUMP_GE, _X32_BIT, otherwise=1), _refuse(errno.ENOSYS)]
    for numbers in _REFUSED.values():
        code += [_op(_JUMP_EQ, numbers[column], otherwise=1), _refuse(errno.EPERM)]
    # clone3 takes its flags by pointer, which a filter cannot read; the C library falls back to
    # clone.
    code += [_op(_JUMP_EQ, _CLONE3[column], otherwise=1), _refuse(errno.ENOSYS)]
    code += [
        _op(_JUMP_EQ, _CLONE[column], otherwise=4),
        _op(_LOAD, _FIRST_ARGUMENT),
        _op(_JUMP_SET, _NEW_NAMESPACE, otherwise=1),
        _refuse(errno.EPERM),
        _op(_RETURN, _ALLOW),
    ]
    code += [
        _op(_JUMP_EQ, _SETSOCKOPT[column], otherwise=7),
        _op(_LOAD, _SECOND_ARGUMENT),
        _op(_JUMP_EQ, _SOL_SOCKET, otherwise=4),
        _op(_LOAD, _THIRD_ARGUMENT),
        _op(_JUMP_EQ, _SO_SNDBUF, then=1),
        _op(_JUMP_EQ, _SO_RCVBUF, otherwise=1),
        _refuse(0),  # no error, and nothing done
        _op(_RETURN, _ALLOW),
    ]
    families = [
        _op(_JUMP_EQ, family, then=len(_FAMILIES) - i) for i, family in enumerate(_FAMILIES)
    ]
    code += [
        _op(_JUMP_EQ, _SOCKET[column], otherwise=len(families) + 2),
        _op(_LOAD, _FIRST_ARGUMENT),
        *families,
    ]
    code += [_refuse(errno.EAFNOSUPPORT), _op(_RETURN, _ALLOW)]
    return b"".join(code)


def _op(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Encode an instruction; ``then`` and ``otherwise`` are how many instructions a jump skips."""
    return struct.pack("<HBBI", code, then, otherwise, value)


def _refuse(error: int) -> bytes:
    return _op(_RETURN, _ERRNO | error)
