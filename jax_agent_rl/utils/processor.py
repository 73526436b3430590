"""The name of this machine's processor."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return the CPU's name."""
    file = Path("/proc/cpuinfo")
    if file.is_file():
        for line in file.read_text().splitlines():
            if line.startswith("model name"):
                _, _, name = line.partition(":")
                return name.strip()
    return platform.processor() or platform.machine()
