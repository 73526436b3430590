"""Where a row names the folder of its task: agents read the folder, a dataset's fingerprint covers its files.

Agents import this without the libraries that read datasets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def task_folder(row: Mapping[str, Any]) -> Path | None:
    """Return the task folder that a row names, as agents of class ``CommandAgent`` read it; None if it names none."""
    extra = row.get("extra_info")
    task = extra.get("task") if isinstance(extra, Mapping) else None
    return Path(task).expanduser() if task and isinstance(task, str) else None
