"""The hosts' output: every line once, on the screen under the host's name and in a file per host."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_NUMBERED = re.compile(r"\[[^\]]*\] (?P<number>\d+)\|(?P<text>.*)", re.DOTALL)
_END = re.compile(r"\[[^\]]*\] end\|(?P<status>\d+)")


class Logs:
    """A folder with a file per host.

    Args:
        folder: made if missing; files of an earlier run are written on, those of a run that is found again anew.
        print_line: takes a line for the screen.
    """

    def __init__(self, folder: Path, *, print_line: Callable[[str], None]) -> None:
        self.folder = folder
        self._print_line = print_line
        self._seen: dict[str, int] = {}
        self._found = False

    def new_run(self) -> None:
        """Expect the hosts' next run, whose lines are numbered from 1 again."""
        self._seen.clear()
        self._found = False

    def found_run(self) -> None:
        """Expect a run of another launcher, all of whose lines come; the files may have some already."""
        self._seen.clear()
        self._found = True

    def reader(self, host: str) -> Reader:
        """Return a reader of one connection's lines."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Reader(self, host)

    def take(self, host: str, number: int, text: str) -> None:
        """Print and log a line of a host's run, unless an earlier connection brought it."""
        if number <= self._seen.get(host, 0):
            return
        mode = "w" if self._found and host not in self._seen else "a"
        self._seen[host] = number
        with (self.folder / f"{host}.log").open(mode, encoding="utf-8") as log:
            log.write(text + "\n")
        self._print_line(f"[{host}] {text}")

    def show(self, line: str) -> None:
        """Print a line that is gcloud's, not the run's."""
        self._print_line(line)


class Reader:
    """Reader of one connection to a host: lines of ``remote.follow``, and others of gcloud itself.

    Attributes:
        received: the run's log has come through it.
        status: the run's exit status, once that has come; without it, the connection broke.
    """

    def __init__(self, logs: Logs, host: str) -> None:
        self._logs, self._host = logs, host
        self.received = False
        self.status: int | None = None

    def __call__(self, line: str) -> None:
        if match := _NUMBERED.fullmatch(line):
            self.received = True
            self._logs.take(self._host, int(match["number"]), match["text"])
        elif match := _END.fullmatch(line):
            self.status = int(match["status"])
        else:
            self._logs.show(line)
