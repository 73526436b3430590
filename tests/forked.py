"""``jax-agent-rl`` in forks of a process that has imported everything, so that a start costs a
tenth of its time.

::

    test ── {"arguments", "log", "die_at"} ──► python -m tests.forked ── fork ──► the command,
         ◄── {"pid"}, later {"status"} ──────                        its own process group

No backend of jax exists before the fork. With ``die_at`` the command kills itself (as ``kill -9``
does) at its n-th operation on files that changes something: in the middle of a checkpoint, between
two files, before a rename.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.warm import import_everything

CHANGES = frozenset(
    {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
)
PR_SET_CHILD_SUBREAPER = 36
TICK = 1 / os.sysconf("SC_CLK_TCK")
PATIENCE = 300.0  # seconds for a command that should end by itself


class Command:
    """A running command.

    Attributes:
        pid: also of its process group.
    """

    def __init__(self, pid: int, forker: Forker) -> None:
        self.pid = pid
        self._forker = forker
        self.status: int | None = None
        self._cpu_seconds = 0.0

    @property
    def cpu_seconds(self) -> float:
        """User and system time so far. Moments of a life are drawn from it, for wall time depends
        on the machine.
        """
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            self._cpu_seconds = (int(fields[11]) + int(fields[12])) * TICK
        return self._cpu_seconds

    @property
    def ended(self) -> bool:
        """Looks for one tick of the clock that processor time is counted by."""
        return self.status is not None or self._forker.answered(within=TICK)

    def reach(self, cpu_seconds: float) -> None:
        """Returns once it has used so much time, or has ended."""
        while self.cpu_seconds < cpu_seconds and not self.ended:
            pass

    def wait(self) -> int:
        """Its exit code, negative for a signal."""
        if self.status is None:
            assert self._forker.answered(within=PATIENCE), f"process {self.pid} does not end"
            self.status = os.waitstatus_to_exitcode(self._forker.answer()["status"])
        return self.status

    def kill(self) -> int:
        """Kill it as ``kill -9`` does; return the exit code, its own if it had ended already."""
        if not self.ended:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()


class Forker:
    """Use as a context manager; one command at a time.

    Args:
        environment: more variables.
    """

    def __init__(self, **environment: str) -> None:
        self._environment = environment

    def __enter__(self) -> Forker:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ
            | {"PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": "1"}
            | self._environment,
        )
        assert self.answer() == "ready"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ):
        self._process.kill()
        self._process.communicate()

    def start(self, *arguments: str, log: Path, die_at: int | None = None) -> Command:
        """Starts ``jax-agent-rl ARGUMENTS``; what it prints is appended to ``log``."""
        order = {"arguments": arguments, "log": str(log), "die_at": die_at}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Command(self.answer()["pid"], self)

    @property
    def orphans(self) -> list[int]:
        """Processes that a command has left behind and that still live: the forker adopts them."""
        children = (
            Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        )
        return [int(pid) for pid in children if _lives(pid)]

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):  # unbuffered, so that select tells the truth
            piece = os.read(self._process.stdout.fileno(), 1)
            assert piece, "the process that forks has died"
            line += piece
        return json.loads(line)

    def answered(self, *, within: float) -> bool:
        """Whether the command has ended, waiting so many seconds for it."""
        assert self._process.stdout is not None
        return bool(select.select([self._process.stdout], [], [], within)[0])


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended while its file was read
        return False


def _serve() -> None:
    from jax_agent_rl import cli

    import_everything()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print(json.dumps("ready"), file=answers)
    while line := sys.stdin.readline():
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            answers.close()
            _run(cli.main, **order)
        print(json.dumps({"pid": pid}), file=answers)
        print(json.dumps({"status": os.waitpid(pid, 0)[1]}), file=answers)


def _run(main: Any, *, arguments: list[str], log: str, die_at: int | None) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    changes = 0

    def count(event: str, details: tuple[Any, ...]) -> None:
        nonlocal changes
        writes = (
            event == "open"
            and isinstance(details[2], int)
            and details[2] & (os.O_WRONLY | os.O_RDWR)
        )
        if writes or event in CHANGES:
            changes += 1
            if changes == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    sys.argv = ["jax-agent-rl", *arguments]
    code = 1
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:  # before the command line had begun
        code = 130
    except BaseException:
        traceback.print_exc()
    print(f"{changes} changes of the file system", flush=True)
    os._exit(code)


if __name__ == "__main__":
    _serve()
