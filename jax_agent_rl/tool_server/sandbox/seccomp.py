"""System call filter of sandboxed programs, as a classic BPF program for ``bwrap --seccomp``.

It refuses:

- calls that get memory which no other limit counts (``memfd_create``, System V and POSIX queues,
  keyrings, ``inotify``);
- calls that make namespaces or mounts, or that inspect other processes;
- large, rarely needed parts of the kernel (``bpf``, ``io_uring``, ``perf``).

Sockets are limited to Unix and IP, which the network namespace cuts off, unlike ``AF_VSOCK``, for
example. Their buffers keep their size, on which
:func:`~jax_agent_rl.tool_server.sandbox.limits.socket_memory` relies: setting it succeeds without
effect.

The numbers are from the kernel's ``asm/unistd_64.h`` and ``asm-generic/unistd.h``.
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
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
_SETSOCKOPT = (54, 208)

# Constants of the calls' arguments.
_SOL_SOCKET = 1
_SO_SNDBUF = 7
_SO_RCVBUF = 8
# CLONE_NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET
_NEW_NAMESPACE = 0x7E02_0000
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6

_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The x32 calls share the audit architecture of x86-64 and have other numbers.
_X32_BIT = 0x4000_0000

# Instructions of BPF.
_LOAD = 0x20
_JUMP_EQ = 0x15
_JUMP_GE = 0x35
_JUMP_SET = 0x45
_RETURN = 0x06

# What a filter returns.
_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000
_KILL = 0x8000_0000

# Offsets in struct seccomp_data; of arguments, the little-endian low word.
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
_SECOND_ARGUMENT = 24
_THIRD_ARGUMENT = 32

MACHINES = tuple(_AUDIT_ARCH)
"""Values of ``platform.machine()`` for which there is a filter."""


def build_filter(machine: str) -> bytes:
    """Return the filter of a machine as ``struct sock_filter`` entries, 8 bytes each.

    Args:
        machine: one of :data:`MACHINES`.
    """
    column = 0 if machine == "x86_64" else 1
    code = [
        _op(_LOAD, _ARCHITECTURE),
        _op(_JUMP_EQ, _AUDIT_ARCH[machine], then=1),
        _op(_RETURN, _KILL),  # 32-bit calls, for example, whose numbers mean something else
        _op(_LOAD, _NUMBER),
    ]
    if machine == "x86_64":
        code += [_op(_JUMP_GE, _X32_BIT, otherwise=1), _refuse(errno.ENOSYS)]
    for numbers in _REFUSED.values():
        code += [_op(_JUMP_EQ, numbers[column], otherwise=1), _refuse(errno.EPERM)]

    # clone3 takes its flags by pointer, which a filter cannot read; the C library falls back to
    # clone.
    code += [_op(_JUMP_EQ, _CLONE3[column], otherwise=1), _refuse(errno.ENOSYS)]

    # clone may start a process or thread, but not in a new namespace.
    code += [
        _op(_JUMP_EQ, _CLONE[column], otherwise=4),
        _op(_LOAD, _FIRST_ARGUMENT),
        _op(_JUMP_SET, _NEW_NAMESPACE, otherwise=1),
        _refuse(errno.EPERM),
        _op(_RETURN, _ALLOW),
    ]

    # setsockopt may not change the size of buffers.
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

    # socket may only make one of a permitted family: each jumps over the later ones, and over the
    # refusal.
    code += [
        _op(_JUMP_EQ, _SOCKET[column], otherwise=len(_FAMILIES) + 2),
        _op(_LOAD, _FIRST_ARGUMENT),
    ]
    for index, family in enumerate(_FAMILIES):
        code.append(_op(_JUMP_EQ, family, then=len(_FAMILIES) - index))
    code += [_refuse(errno.EAFNOSUPPORT), _op(_RETURN, _ALLOW)]
    return b"".join(code)


def _op(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Encode an instruction.

    Args:
        then, otherwise: how many instructions a jump skips if its condition holds, or does not.
    """
    return struct.pack("<HBBI", code, then, otherwise, value)


def _refuse(error: int) -> bytes:
    """Encode the refusal of a call, which then fails with the error number."""
    return _op(_RETURN, _ERRNO | error)
