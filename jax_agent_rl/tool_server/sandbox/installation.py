"""Where a program in bubblewrap finds the Python installation: below ``/opt``, so that no path of the host is shown.

::

    the environment's lib, include, share ──► /opt/environment      its bin: links to the interpreter, nothing else
    the installation it was made from     ──► /opt/python           below /usr it stays where it is

Scripts of the environment are left out: they begin with a path of the host. ``python -m`` runs their modules.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
