"""Resource usage of a sandboxed process tree, read from ``/proc``, and how it is paused.

Limits of single processes do not add up: sixty-four processes of half a gigabyte each are within theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from functools import cache
from pathlib import Path

from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits, StopCause

_INTERVAL = 0.1  # seconds; a program that fills memory at 5 GB/s is half a gigabyte over its limit by then
WRITABLE = ("/tmp", "/dev/shm")
"""The folders a sandboxed program can write to."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_ENDED = (FileNotFoundError, ProcessLookupError)


async def watch(pid: int, limits: SandboxLimits) -> StopCause:
    """Poll until the processes under ``pid`` together exceed a limit, and return it."""
    while True:
        await asyncio.sleep(_INTERVAL)
        if stopped := exceeded(pid, limits):
            return stopped


def exceeded(pid: int, limits: SandboxLimits) -> StopCause | None:
    """Return the limit that the processes under ``pid`` exceed together, if any."""
    pids = tree(pid)
    memory = limits.memory_bytes - socket_memory(pids[-1])
    # Resident memory is cheap but counts shared pages repeatedly; only beyond the limit, proportional shares are read.
    if sum(map(_resident, pids)) > memory and sum(map(_proportional, pids)) > memory:
        return StopCause.MEMORY
    if _files(pids) > limits.files:
        return StopCause.FILES
    return None


def tree(pid: int) -> list[int]:
    """Return ``pid`` and its descendants, parents first."""
    pids = [pid]
    for parent in pids:  # grows during iteration
        with contextlib.suppress(*_ENDED):
            for task in os.listdir(f"/proc/{parent}/task"):
                pids += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return pids


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except _ENDED:
        return 0


def _proportional(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except _ENDED:
        return 0
    except PermissionError:  # bubblewrap's own processes
        return _resident(pid)
    return 0


def _files(pids: list[int]) -> int:
    """Count inodes in use in the sandbox's own writable folders; 0 if it has none, or not yet."""
    count = 0
    for folder in WRITABLE:
        inside = f"/proc/{pids[-1]}/root{folder}"
        with contextlib.suppress(OSError):
            if not os.path.exists(folder) or os.stat(inside).st_dev != os.stat(folder).st_dev:
                usage = os.statvfs(inside)
                count += usage.f_files - usage.f_ffree
    return count


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


_MAX_CHECKS = 500
_CHECK_SECONDS = 0.001
_DEAD, _STOPPED = "ZX", "TtZX"  # states in /proc; a dead process remains until its parent has waited for it


async def pause(pid: int, wrappers: int) -> bool:
    """Stop a program and kill everything it started.

    Args:
        pid: the process that was started.
        wrappers: number of processes from there down that are bubblewrap's, not the program's.

    Returns:
        Whether nothing runs any more; if not, the whole tree must be killed.
    """
    quiet = 0
    for _ in range(_MAX_CHECKS):
        program, others = _split(pid, wrappers)
        if program is None:
            return True
        _send(program, signal.SIGSTOP)
        running = [other for other in others if not _all_in(other, _DEAD)]
        for other in running:
            _send(other, signal.SIGKILL)
        quiet = quiet + 1 if not running and _all_in(program, _STOPPED) else 0
        if quiet == 2:
            return True
        await asyncio.sleep(0 if quiet else _CHECK_SECONDS)
    return False


def resume(pid: int, wrappers: int) -> None:
    """Continue a paused program."""
    program, _ = _split(pid, wrappers)
    if program is not None:
        _send(program, signal.SIGCONT)


def _split(pid: int, wrappers: int) -> tuple[int | None, list[int]]:
    """Return the program's first process (None if it has ended) and all others it started."""
    # The program is the oldest child of its namespace's first process, hence the first here.
    pids = tree(pid)[wrappers:]
    return (pids[0], pids[1:]) if pids else (None, [])


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _all_in(pid: int, states: str) -> bool:
    """Return whether every thread of a process is in one of the states; the first may be dead while others run."""
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            if Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0] not in states:
                return False
    except _ENDED:
        return False  # it is changing; the next check decides
    return True
