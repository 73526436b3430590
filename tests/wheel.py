"""Builds the project's wheel, as it is handed out."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("jax_agent_rl", "gpu_backend")
_OTHER_FOLDERS = (
    "tests",
    "examples",
    "benchmarks",
    "launch",
    "docs",
    "docker",
    "third_party",
    "configs",
)
_FILES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CITATION.cff",
    "SECURITY.md",
)


def build_wheel(folder: Path) -> Path:
    """Return the wheel, built below ``folder`` from the source archive, as installers build it.

    The archive is made from a copy of the repository: a build writes beside what it builds.
    """
    source = folder / "source"
    source.mkdir()
    for name in (*PACKAGES, *_OTHER_FOLDERS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, source)

    archive = _build("sdist", source, folder / "archive")
    unpacked = folder / "unpacked"
    shutil.unpack_archive(archive, unpacked, filter="data")
    (project,) = unpacked.iterdir()
    return _build("wheel", project, folder / "wheel")


def _build(kind: str, source: Path, folder: Path) -> Path:
    """Return what setuptools builds of a project: a ``wheel``, or a source archive (``sdist``)."""
    folder.mkdir()
    program = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(folder)!r}))"
    subprocess.run(
        [sys.executable, "-c", program], cwd=source, check=True, capture_output=True, timeout=300
    )
    (built,) = folder.iterdir()
    return built
