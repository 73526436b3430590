"""Lines of a launcher, with the time."""

from __future__ import annotations

import contextlib
import time


class TimedPrinter:
    """Prints the launcher's lines with the seconds since it began; other lines as they are."""

    def __init__(self) -> None:
        self._start_time = time.monotonic()

    def __call__(self, line: str) -> None:
        if not line.startswith("["):  # a process's line begins with its name
            elapsed = time.monotonic() - self._start_time
            line = f"[{elapsed:3.0f}s] {line}"
        with contextlib.suppress(BrokenPipeError):  # nobody reads it: still end in order
            print(line, flush=True)
