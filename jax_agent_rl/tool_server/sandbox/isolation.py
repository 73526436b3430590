"""How a program is started: in bubblewrap, or (asked for by name) without protection.

An isolation turns *what to run* into *what to execute*; starting, limiting and ending it is the same for both.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits

Files = Mapping[str, bytes | Path]
"""Name in the program's working folder -> contents, or a file or folder of this machine. All are read-only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Command to execute.

    Attributes:
        argv: the command.
        env: its whole environment.
        cwd: its working folder on this machine.
        fds: descriptors it inherits; the caller closes its own copies once it runs.
        wrappers: processes between the caller and the program that are not the program's.
        clean_up: to call when it has ended.
        out_of_memory: whether the kernel ended a part of it for want of memory; to call before.
    """

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    fds: tuple[int, ...] = ()
    wrappers: int = 0
    clean_up: Callable[[], None] = lambda: None
    out_of_memory: Callable[[], bool] = lambda: False


class Isolation(ABC):
    """Makes launches. ``python`` is the interpreter that programs find as ``python3``."""

    python: Path

    @abstractmethod
    def launch(self, argv: Sequence[str], limits: SandboxLimits, files: Files, *, lifeline: int) -> Launch:
        """Return what to execute in order to run a program.

        Args:
            argv: the program and its arguments.
            limits: that hold for it.
            files: in its working folder.
            lifeline: a socket the guard inherits; once its other end is shut, the program is not started any more.
        """


class UnsafeLocal(Isolation):
    """No protection: the program has the rights of this process. Only limits and a clean environment.

    Args:
        python: interpreter for Python programs.
    """

    def __init__(self, python: Path):
        self.python = python

    def launch(self, argv: Sequence[str], limits: SandboxLimits, files: Files, *, lifeline: int) -> Launch:
        folder = tempfile.mkdtemp(prefix="unsafe-local-")
        for name, source in files.items():
            if isinstance(source, bytes):
                (Path(folder) / name).write_bytes(source)
            else:
                (Path(folder) / name).symlink_to(source)
        env = program_environment(self.python, home=folder)
        # Not the process limit: it counts every process of this user.
        command = guarded(argv, dataclasses.replace(limits, processes=1 << 20), uid=None, lifeline=lifeline)
        return Launch(
            argv=[str(self.python), "-I", "-S", "-c", *command],
            env=env,
            cwd=folder,
            clean_up=lambda: shutil.rmtree(folder, ignore_errors=True),
        )


def guarded(argv: Sequence[str], limits: SandboxLimits, *, uid: int | None, lifeline: int) -> list[str]:
    """Return arguments of ``python -c`` that run ``argv`` behind the guard, as ``uid`` (None: the current user)."""
    options = {"limits": dataclasses.asdict(limits), "uid": uid, "lifeline": lifeline}
    return [_guard_source(), json.dumps(options), *argv]


@cache
def _guard_source() -> str:
    return Path(__file__).with_name("guard.py").read_text()


def program_environment(python: Path, *, home: str) -> dict[str, str]:
    """Return a program's whole environment."""
    return {
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OPENBLAS_NUM_THREADS": "1",  # else importing numpy starts a thread for each core
        "OMP_NUM_THREADS": "1",
    }


def memory_file(data: bytes) -> int:
    """Return a descriptor from which ``data`` can be read."""
    fd = os.memfd_create("sandbox")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


def this_python() -> Path:
    """Return the running interpreter, as found in its environment's ``bin``."""
    return Path(sys.executable)
