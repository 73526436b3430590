"""Files that models and tasks name."""

from __future__ import annotations

from pathlib import Path

NO_PATH = (OSError, ValueError, RuntimeError)
"""What paths raise that are too long, have a NUL or half of a surrogate pair in them, or lead in a circle."""


def file_below(root: Path, name: str) -> Path | None:
    """Resolve a file name below a resolved folder, following links; None if it is no file or lies elsewhere."""
    try:
        path = (root / name).resolve()
        return path if path.is_relative_to(root) and path.is_file() else None
    except NO_PATH:
        return None
