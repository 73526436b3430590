"""Lines of a launcher on the screen."""

from __future__ import annotations

import contextlib
import time


class Clock:
    """Prints lines of the launcher's own with the seconds since it began; lines of processes as they are."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    def __call__(self, line: str) -> None:
        own = "" if line.startswith("[") else f"[{time.monotonic() - self._begin:3.0f}s] "
        with contextlib.suppress(BrokenPipeError):  # nobody reads on: end in order all the same
            print(own + line, flush=True)
