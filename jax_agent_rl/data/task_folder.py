"""The folder of a row's task: agents read it, and a dataset's fingerprint covers its files.

Agents import this without the libraries that read datasets.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def task_folder(row: Mapping[str, Any]) -> Path | None:
    """Return the task folder that a row names for a ``CommandAgent``; None if it names none."""
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, Mapping):
        return None
    task = extra_info.get("task")
    if not isinstance(task, str) or not task:
        return None
    return Path(task).expanduser()
