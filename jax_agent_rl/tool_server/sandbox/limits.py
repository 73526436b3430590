"""What a program may use, what its processes use together, and cgroups that enforce limits.

Limits of single processes do not add up: sixty-four processes of half a gigabyte each are within
theirs. So the usage of the whole tree is read from ``/proc``.

A cgroup (version 2) per program counts everything that the program occupies, also inside the
kernel: pages, files in memory, sockets, pipes, page tables, file locks. Where this process cannot
make cgroups, limits of single processes and the number of sockets must suffice.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_agent_rl.config.commands import LimitSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Hard limits; a program cannot raise them.

    Attributes:
        wall_seconds: duration of one run, or of one exchange with a long-lived program.
        cpu_seconds: computing time of each process, over its whole life.
        memory_bytes: address space of each process, and resident memory of all processes together,
            including what their sockets may hold.
        processes: processes and threads at the same time.
        disk_bytes: size of each of the two writable folders, ``/tmp`` and ``/dev/shm`` (both are
            memory).
        files: files, folders and links in the two folders together.
        open_files: open descriptors of each process.
        output_bytes: stdout and stderr together, of one run or exchange.
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 10
    memory_bytes: int = 1 << 30
    processes: int = 64
    disk_bytes: int = 64 << 20
    files: int = 4096
    open_files: int = 128
    output_bytes: int = 256 << 10

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"sandbox limit {field.name}={value!r} must be positive")

    @classmethod
    def from_settings(cls, settings: LimitSettings, *, session: bool = False) -> SandboxLimits:
        """Return the limits that the settings define.

        Args:
            session: whether the program lives as long as its trajectory, instead of running once.
        """
        return cls(
            wall_seconds=settings.wall_seconds,
            cpu_seconds=settings.session_cpu_seconds if session else settings.cpu_seconds,
            memory_bytes=settings.memory_mb << 20,
            processes=settings.processes,
            disk_bytes=settings.disk_mb << 20,
            output_bytes=settings.output_kb << 10,
        )


class StopCause(StrEnum):
    """Limit or failure that ended a program before it ended itself."""

    WALL = "wall"
    """It ran longer than ``wall_seconds``."""
    CPU = "cpu"
    """It computed for longer than ``cpu_seconds``."""
    MEMORY = "memory"
    """Its processes together held more than ``memory_bytes``. (A single process gets its allocation
    refused instead.)"""
    FILES = "files"
    """It created more than ``files`` files. (A full disk is an error that the program sees
    instead.)"""
    OUTPUT = "output"
    """It wrote more than ``output_bytes``."""
    BACKGROUND = "background"
    """Processes that it left behind at the end of an exchange started others faster than they could
    be killed."""

    def describe(self, limits: SandboxLimits) -> str:
        """Describe the cause to the model."""
        match self:
            case StopCause.WALL:
                return f"ended: it ran for more than {limits.wall_seconds:g} seconds"
            case StopCause.CPU:
                return f"ended: it computed for more than {limits.cpu_seconds} seconds"
            case StopCause.MEMORY:
                return f"ended: it used more than {limits.memory_bytes >> 20} MiB of memory"
            case StopCause.FILES:
                return f"ended: it made more than {limits.files} files"
            case StopCause.OUTPUT:
                return f"ended: it wrote more than {limits.output_bytes} bytes"
            case StopCause.BACKGROUND:
                return "ended: the processes it left in the background kept starting others"


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxResult:
    """Result of a finished run.

    Attributes:
        stdout, stderr: output up to the limit; invalid UTF-8 is replaced.
        exit_code: 0 for success, 128 + n if signal n killed it; None if ``stopped``.
        stopped: the limit that ended it; None if it ended by itself.
        seconds: duration from start to end.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    stopped: StopCause | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the program ended by itself, with success."""
        return self.exit_code == 0


# --- cgroups --------------------------------------------------------------------------------------

_SETUP_BYTES = 16 << 20  # used by bubblewrap, and by the program's start
_SETUP_PROCESSES = 4
# Moves a shell into the cgroup that is its first argument; it becomes the program.
ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class Cgroups:
    """Factory of cgroups below a parent whose children have a memory controller."""

    def __init__(self, parent: Path):
        self._parent = parent
        self._ended: list[Path] = []  # cgroups to remove

    def work(self) -> bool:
        """Return whether a process can be put into a new cgroup here."""
        try:
            controllers = (self._parent / "cgroup.subtree_control").read_text().split()
            if "memory" not in controllers:
                return False
            group = self.make(SandboxLimits())
        except OSError:
            return False

        try:
            command = enter_cgroup(group, ["true"])
            result = subprocess.run(command, capture_output=True, timeout=60)
            return result.returncode == 0
        finally:
            self.remove(group)

    def make(self, limits: SandboxLimits) -> Path:
        """Return a new cgroup with a program's limits.

        Raises:
            OSError: it cannot be made, or does not accept the limits.
        """
        self._remove_ended()
        group = self._parent / f"jax-agent-rl-{secrets.token_hex(8)}"
        group.mkdir()

        values = {
            # Both writable folders are memory.
            "memory.max": limits.memory_bytes + 2 * limits.disk_bytes + _SETUP_BYTES,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": limits.processes + _SETUP_PROCESSES,
        }
        try:
            for name, value in values.items():
                # Controllers of swap and of processes are not available everywhere.
                if name == "memory.max" or (group / name).exists():
                    (group / name).write_text(str(value))
        except OSError:
            self.remove(group)
            raise
        return group

    def remove(self, group: Path) -> None:
        """Remove a cgroup.

        If its last processes are still ending, it is removed when the next one is made.
        """
        self._ended.append(group)
        self._remove_ended()

    def _remove_ended(self) -> None:
        for group in list(self._ended):
            with contextlib.suppress(OSError):
                group.rmdir()
            if not group.exists():
                self._ended.remove(group)


def enter_cgroup(group: Path, command: Sequence[str]) -> list[str]:
    """Return the command that runs ``command`` in a cgroup."""
    return ["/bin/sh", "-c", ENTER, str(group), *command]


def ran_out_of_memory(group: Path) -> bool:
    """Return whether the kernel killed a process of the cgroup because it was full."""
    try:
        lines = (group / "memory.events").read_text().splitlines()
    except OSError:
        return False
    events = dict(line.split() for line in lines)
    return int(events.get("oom_kill", 0)) > 0


def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups | None:
    """Return where this process may make cgroups that limit memory; None if nowhere.

    It is this process's cgroup, or else the nearest one above it.

    Args:
        proc: the folder that describes this process.
    """
    mount = _cgroup_mount(proc)
    path = _cgroup_path(proc)
    if mount is None or path is None:
        return None

    group = mount / path
    for parent in [group, *group.parents]:
        if not parent.is_relative_to(mount):
            break
        cgroups = Cgroups(parent)
        if cgroups.work():
            return cgroups
    return None


def _cgroup_mount(proc: Path) -> Path | None:
    """Return the folder where version 2 is mounted."""
    for line in (proc / "mountinfo").read_text().splitlines():
        mount, _, file_system = line.partition(" - ")
        if file_system.startswith("cgroup2 "):
            return Path(mount.split()[4])
    return None


def _cgroup_path(proc: Path) -> str | None:
    """Return the process's cgroup of version 2, relative to the mount."""
    for line in (proc / "cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:].strip("/")
    return None


# --- usage of a process tree ----------------------------------------------------------------------

# A program that fills memory at 5 GB/s is half a gigabyte over its limit by then.
_INTERVAL_SECONDS = 0.1
WRITABLE = ("/tmp", "/dev/shm")
"""The folders that a sandboxed program can write to."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
ENDED = (FileNotFoundError, ProcessLookupError)
"""Errors of reading about a process that has just ended."""


async def watch(pid: int, limits: SandboxLimits) -> StopCause:
    """Poll until the processes under ``pid`` together exceed a limit, and return it."""
    while True:
        await asyncio.sleep(_INTERVAL_SECONDS)
        stopped = exceeded(pid, limits)
        if stopped is not None:
            return stopped


def exceeded(pid: int, limits: SandboxLimits) -> StopCause | None:
    """Return the limit that the processes under ``pid`` exceed together, if any."""
    pids = process_tree(pid)
    memory_bytes = limits.memory_bytes - socket_memory(pids[-1])
    # Resident memory is cheap to read but counts shared pages repeatedly; only beyond the limit,
    # proportional shares are read.
    if sum(_resident(pid) for pid in pids) > memory_bytes:
        if sum(_proportional(pid) for pid in pids) > memory_bytes:
            return StopCause.MEMORY
    if _files(pids) > limits.files:
        return StopCause.FILES
    return None


def process_tree(pid: int) -> list[int]:
    """Return ``pid`` and its descendants, parents first."""
    pids = [pid]
    for parent in pids:  # grows during iteration
        with contextlib.suppress(*ENDED):
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                pids += [int(child) for child in children]
    return pids


def _resident(pid: int) -> int:
    """Return a process's bytes of resident memory, shared pages included."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except ENDED:
        return 0


def _proportional(pid: int) -> int:
    """Return a process's bytes of resident memory, with its share of each shared page."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except ENDED:
        return 0
    except PermissionError:  # bubblewrap's own processes
        return _resident(pid)
    return 0


def _files(pids: list[int]) -> int:
    """Count inodes in use in the sandbox's writable folders; 0 if it has none, or not yet."""
    count = 0
    for folder in WRITABLE:
        inside = f"/proc/{pids[-1]}/root{folder}"
        with contextlib.suppress(OSError):
            # On the same device as here, the folder is this machine's.
            if not os.path.exists(folder) or os.stat(inside).st_dev != os.stat(folder).st_dev:
                usage = os.statvfs(inside)
                count += usage.f_files - usage.f_ffree
    return count


_BUFFERS = ("rmem_default", "wmem_default")
_QUEUE_OVERHEAD = 2  # bytes of memory for one byte of payload, about


def socket_memory(pid: int) -> int:
    """Return the bytes that sockets of a process's network namespace may hold.

    0 if the calling process is in the same one.
    """
    try:
        if os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat("/proc/self/ns/net").st_ino:
            return 0
        counts = _counts(Path(f"/proc/{pid}/net/sockstat").read_text())
        held_bytes = counts["sockets"] * _default_buffers()
        if counts["TCP"] or counts["TCP6"]:
            queued_bytes = _queued(Path(f"/proc/{pid}/net/tcp"))
            queued_bytes += _queued(Path(f"/proc/{pid}/net/tcp6"))
            held_bytes += _QUEUE_OVERHEAD * queued_bytes
    except (OSError, KeyError):
        return 0
    return held_bytes


def _counts(sockstat: str) -> dict[str, int]:
    """Count sockets in use by protocol, and ``sockets``, all of them."""
    counts = {"TCP6": 0}
    for line in sockstat.splitlines():
        protocol, _, numbers = line.partition(": ")
        name, _, values = numbers.partition(" ")
        if name in ("used", "inuse"):
            counts[protocol] = int(values.split()[0])
    return counts


def _queued(connections: Path) -> int:
    """Return the bytes in the send and receive queues of all connections of a kernel's list."""
    queued_bytes = 0
    for line in connections.read_text().splitlines()[1:]:  # the first line is the heading
        for queue in line.split()[4].split(":"):
            queued_bytes += int(queue, 16)
    return queued_bytes


@cache
def _default_buffers() -> int:
    """Return the bytes of a socket's two buffers."""
    return sum(int(Path(f"/proc/sys/net/core/{name}").read_text()) for name in _BUFFERS)
