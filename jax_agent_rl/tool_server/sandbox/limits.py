"""What a program may use, and how its run ended."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax_agent_rl.config.tool_server import LimitSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Hard limits; a program cannot raise them.

    Attributes:
        wall_seconds: of one run, or of one exchange with a long-lived program.
        cpu_seconds: of each process, over its whole life.
        memory_bytes: address space of each process, and resident memory of all of them together, with what their
            sockets may hold.
        processes: processes and threads at the same time.
        disk_bytes: of each of the two writable folders, ``/tmp`` and ``/dev/shm`` (both are memory).
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
                raise ValueError(f"sandbox limit {field.name}={getattr(self, field.name)!r} must be positive")


def run_limits(settings: LimitSettings) -> SandboxLimits:
    """Return the limits of a program that runs once."""
    return SandboxLimits(
        wall_seconds=settings.wall_seconds,
        cpu_seconds=settings.cpu_seconds,
        memory_bytes=settings.memory_mb << 20,
        processes=settings.processes,
        disk_bytes=settings.disk_mb << 20,
        output_bytes=settings.output_kb << 10,
    )


def session_limits(settings: LimitSettings) -> SandboxLimits:
    """Return the limits of a program that lives as long as its trajectory."""
    return dataclasses.replace(run_limits(settings), cpu_seconds=settings.session_cpu_seconds)


class StopCause(StrEnum):
    """Why a program was ended before it ended itself."""

    WALL = "wall"
    """It ran past ``wall_seconds``."""
    CPU = "cpu"
    """It computed for more than ``cpu_seconds``."""
    MEMORY = "memory"
    """Its processes together held more than ``memory_bytes``. (A single one gets its allocation refused instead.)"""
    FILES = "files"
    """It made more than ``files`` files. (A full disk is an error the program sees instead.)"""
    OUTPUT = "output"
    """It wrote more than ``output_bytes``."""
    BACKGROUND = "background"
    """Processes it left behind at the end of an exchange started others faster than they could be ended."""

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
    """One finished run.

    Attributes:
        stdout, stderr: what was written, up to the limit; bytes that are no UTF-8 are replaced.
        exit_code: 0 is success, 128 + n ended by signal n; None when it was ended for ``stopped``.
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
