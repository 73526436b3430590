"""Ports for tests that run side by side.

A port that is free now may be another test's in a moment, so it is claimed: no process of tests on
this machine is given it again before the one that asked has ended. They lie below those that the
system gives to outgoing connections.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

_CLAIMS = Path(tempfile.gettempdir()) / f"jax-agent-rl-test-ports-{os.getuid()}"
_claimed = contextlib.ExitStack()  # of files whose locks end with this process


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    """Whether nobody listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A port of loopback that nobody listens on, for this test only."""
    return free_ports(1)


def free_ports(count: int, *, first: int = 21000, last: int = 30000) -> int:
    """The first of so many neighbouring ports that nobody listens on, for this test only."""
    _CLAIMS.mkdir(mode=0o700, exist_ok=True)
    for port in range(first, last, count):
        with contextlib.ExitStack() as locks:
            if all(_claim(port + i, locks) and is_free(port + i) for i in range(count)):
                _claimed.enter_context(locks.pop_all())
                return port
    raise AssertionError(f"no {count} neighbouring ports are free from {first} to {last}")


def _claim(port: int, locks: contextlib.ExitStack) -> bool:
    """Whether no other test has it; the lock is a file's, so that it ends with a process that is
    killed, too.
    """
    lock = locks.enter_context((_CLAIMS / str(port)).open("ab"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
