"""The code as it stands in the working tree, in one file for the hosts."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from jax_agent_rl.errors import LaunchError

LARGE = 50_000_000
"""Bytes of a file that hardly is code."""


def pack(root: Path, target: Path, *, extra: dict[str, bytes]) -> list[str]:
    """Write what git tracks, and what it neither tracks nor ignores, to a ``.tar.gz``.

    Args:
        root: a git checkout.
        target: the file to write.
        extra: more files, by name.

    Returns:
        files of more than :data:`LARGE` bytes in it: models and data, perhaps, that go to every host.

    Raises:
        LaunchError: ``root`` is no git checkout.
    """
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        result = subprocess.run(listing, capture_output=True, text=True)
    except FileNotFoundError:
        raise LaunchError("git is not installed; it tells which files go to the hosts") from None
    if result.returncode:
        raise LaunchError(
            f"{root} is no git checkout, so nothing tells which files go to the hosts: git init there, and let "
            f".gitignore name what stays here ({result.stderr.strip()})"
        )
    large = []
    with tarfile.open(target, "w:gz", compresslevel=3) as archive:
        for name in sorted(filter(None, result.stdout.split("\0"))):
            file = root / name
            if file.is_file() or file.is_symlink():  # not one that was deleted, but is tracked still
                archive.add(file, arcname=name, recursive=False)
                large += [name] if file.lstat().st_size > LARGE else []
        for name, content in extra.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return large
