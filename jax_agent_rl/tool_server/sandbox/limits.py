"""What a program may use, what its processes use together, and the cgroup that enforces limits where there is one.

Limits of single processes do not add up: sixty-four processes of half a gigabyte each are within
theirs. So the usage of the whole tree is read from ``/proc``.

A cgroup (version 2) per program counts everything it occupies, also inside the kernel: pages, files
in memory, sockets, pipes, page tables, file locks. Without one, limits of single processes and the
number of sockets must suffice.
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
        wall_seconds: of one run, or of one exchange with a long-lived program.
        cpu_seconds: of each process, over its whole life.
        memory_bytes: address space of each process, and resident memory of all of them together,
            including what their sockets may hold.
        processes: processes and threads at the same time.
        disk_bytes: of each of the two writable folders, ``/tmp`` and ``/dev/shm`` (both are
            memory).
        files: files, folders and links in the two together.
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
            if not getattr(self, field.name) > 0:
                raise ValueError(
                    f"sandbox limit {field.name}={getattr(self, field.name)!r} must be positive"
                )

    @classmethod
    def from_settings(cls, settings: LimitSettings, *, session: bool = False) -> SandboxLimits:
        """Return the limits of a program that runs once, or of a ``session`` that lives as long as its trajectory."""
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
    """Its processes together held more than ``memory_bytes``. (A single one gets its allocation
    refused instead.)"""
    FILES = "files"
    """It created more than ``files`` files. (A full disk is an error the program sees instead.)"""
    OUTPUT = "output"
    """It wrote more than ``output_bytes``."""
    BACKGROUND = "background"
    """Processes it left behind at the end of an exchange started others faster than they could be
    killed."""

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
        exit_code: 0 is success, 128 + n killed by signal n; None if ``stopped``.
        stopped: the limit that ended it.
        seconds: from start to end.
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

_OWN_BYTES = 16 << 20  # of bubblewrap, and of the program's start
_OWN_PROCESSES = 4
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class Cgroups:
    """Factory of cgroups below a parent whose children have a memory controller."""

    def __init__(self, parent: Path):
        self._parent = parent
        self._ended: list[Path] = []

    def work(self) -> bool:
        """Return whether a process can be put into a new cgroup here."""
        try:
            if "memory" not in (self._parent / "cgroup.subtree_control").read_text().split():
                return False
            group = self.make(SandboxLimits())
        except OSError:
            return False
        try:
            return (
                subprocess.run(
                    enter_cgroup(group, ["true"]), capture_output=True, timeout=60
                ).returncode
                == 0
            )
        finally:
            self.remove(group)

    def make(self, limits: SandboxLimits) -> Path:
        """Return a new cgroup with a program's limits; raise OSError."""
        self._remove_ended()
        group = self._parent / f"jax-agent-rl-{secrets.token_hex(8)}"
        group.mkdir()
        values = {
            "memory.max": limits.memory_bytes + 2 * limits.disk_bytes + _OWN_BYTES,
            "memory.swap.max": 0,
            "memory.oom.group": 1,
            "pids.max": limits.processes + _OWN_PROCESSES,
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
        """Remove a cgroup now or, if its last processes are still ending, when the next one is made."""
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
    return ["/bin/sh", "-c", _ENTER, str(group), *command]


def ran_out_of_memory(group: Path) -> bool:
    """Return whether the kernel killed a process of the cgroup because it was full."""
    try:
        events = dict(line.split() for line in (group / "memory.events").read_text().splitlines())
    except OSError:
        return False
    return int(events.get("oom_kill", 0)) > 0


def find_cgroups(proc: Path = Path("/proc/self")) -> Cgroups | None:
    """Return where this process may make cgroups that limit memory: the nearest of its own cgroup and those above."""
    mounts = (line.partition(" - ") for line in (proc / "mountinfo").read_text().splitlines())
    mount = next(
        (Path(at.split()[4]) for at, _, what in mounts if what.startswith("cgroup2 ")), None
    )
    own = next(
        (line[3:] for line in (proc / "cgroup").read_text().splitlines() if line.startswith("0::")),
        None,
    )
    if mount is None or own is None:
        return None
    place = mount / own.strip("/")
    candidates = (
        Cgroups(parent) for parent in [place, *place.parents] if parent.is_relative_to(mount)
    )
    return next((cgroups for cgroups in candidates if cgroups.work()), None)


# --- usage of a process tree ----------------------------------------------------------------------

_INTERVAL = (
    0.1  # seconds; a program that fills memory at 5 GB/s is half a gigabyte over its limit by then
)
WRITABLE = ("/tmp", "/dev/shm")
"""The folders a sandboxed program can write to."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
ENDED = (FileNotFoundError, ProcessLookupError)
"""Errors of reading about a process that has just ended."""


async def watch(pid: int, limits: SandboxLimits) -> StopCause:
    """Poll until the processes under ``pid`` together exceed a limit, and return it."""
    while True:
        await asyncio.sleep(_INTERVAL)
        if stopped := exceeded(pid, limits):
            return stopped


def exceeded(pid: int, limits: SandboxLimits) -> StopCause | None:
    """Return the limit that the processes under ``pid`` exceed together, if any."""
    pids = process_tree(pid)
    memory = limits.memory_bytes - socket_memory(pids[-1])
    # Resident memory is cheap but counts shared pages repeatedly; only beyond the limit,
    # proportional shares are read.
    if sum(map(_resident, pids)) > memory and sum(map(_proportional, pids)) > memory:
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
                pids += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return pids


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except ENDED:
        return 0


def _proportional(pid: int) -> int:
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
            held += _OVERHEAD * sum(
                _queued(Path(f"/proc/{pid}/net/{table}")) for table in ("tcp", "tcp6")
            )
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
