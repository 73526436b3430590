"""What the hosts say: every line once, on the screen under the host's name and in a file of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_NUMBERED = re.compile(r"\[[^\]]*\] (?P<number>\d+)\|(?P<text>.*)", re.DOTALL)


class Logs:
    """A folder with a file per host.

    Args:
        folder: made if missing; files of an earlier run are written on.
        say: takes a line for the screen.
    """

    def __init__(self, folder: Path, *, say: Callable[[str], None]) -> None:
        self.folder = folder
        self._say = say
        self._seen: dict[str, int] = {}

    def new_run(self) -> None:
        """The lines of the hosts' next run are numbered from 1 again."""
        self._seen.clear()

    def reader(self, host: str) -> Callable[[str], None]:
        """Takes the lines of a connection to a host: those of ``remote.follow``, and others from gcloud itself."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{host}.log"

        def read(line: str) -> None:
            match = _NUMBERED.fullmatch(line)
            if match is None:
                self._say(line)
                return
            number = int(match["number"])
            if number <= self._seen.get(host, 0):  # the connection is a new one
                return
            self._seen[host] = number
            with file.open("a", encoding="utf-8") as log:
                log.write(match["text"] + "\n")
            self._say(f"[{host}] {match['text']}")

        return read
