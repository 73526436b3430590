"""What the sockets of a sandbox may hold in the kernel, which no limit of a process and no proportional share counts.

Queued data of a Unix or UDP socket are bounded by its send buffer, at the sender, and its receive buffer, which the
system call filter keeps at the default; so counting sockets is enough, also of those in flight from process to process.
TCP's buffers grow by themselves; what is queued in them can be read.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_BUFFERS = ("rmem_default", "wmem_default")
_OVERHEAD = 2  # bytes of memory for one of payload, about


def socket_memory(pid: int) -> int:
    """Return the bytes that sockets of a process's network namespace may hold; 0 if it is this process's own."""
    try:
        if os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return 0
        counts = _counts(Path(f"/proc/{pid}/net/sockstat").read_text())
        held = counts["sockets"] * _default_buffers()
        if counts["TCP"] or counts["TCP6"]:
            held += _OVERHEAD * sum(_queued(Path(f"/proc/{pid}/net/{table}")) for table in ("tcp", "tcp6"))
    except (OSError, KeyError):
        return 0
    return held


def _counts(sockstat: str) -> dict[str, int]:
    """Count sockets in use by protocol, and ``sockets``, all of them."""
    counts = {"TCP6": 0}
    for line in sockstat.splitlines():
        protocol, _, numbers = line.partition(": ")
        name, _, rest = numbers.partition(" ")
        if name in ("used", "inuse"):
            counts[protocol] = int(rest.split()[0])
    return counts


def _queued(table: Path) -> int:
    queues = (line.split()[4].split(":") for line in table.read_text().splitlines()[1:])
    return sum(int(queue, 16) for pair in queues for queue in pair)


@cache
def _default_buffers() -> int:
    return sum(int(Path(f"/proc/sys/net/core/{name}").read_text()) for name in _BUFFERS)
