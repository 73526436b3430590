"""On a TPU host: a run that outlives its launcher, and can be followed, stopped and found again; here: its output.

::

    start ──► supervise (a session of its own) ──► the command
                 │ every 15 s: run folder and log to the bucket          output.log, process, status
    follow ◄─────┴──────────────────── a folder ◄──────────────────────────────────┘
    signal ──► the command

``python -m jax_agent_rl.deploy.launch.tpu.remote start|follow|signal|running|listening|with FOLDER …``. An ssh
connection may break at any time, and gcloud then runs its command again: ``start`` starts nothing while a run is under
way, and ``follow`` numbers the lines, so that :class:`Logs` can skip those it has. Its last line is the run's exit
status, as gcloud's own also reports failures of gcloud. ``with`` runs a command in the folder, with variables from its
input. The standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

LOST = 70
"""Exit status of ``follow`` if the run ended without leaving one: its host was restarted, or it was killed."""
NO_RUN = 71
"""Exit status of ``follow``, ``signal`` and ``running`` if there is no run."""

_POLL_SECONDS = 0.5
_START_POLL_SECONDS = 0.02
_SYNC_TIMEOUT = 300.0
_SELF = ("-m", "jax_agent_rl.deploy.launch.tpu.remote")


@dataclass(frozen=True)
class Files:
    """A run's folder: all output in ``log``, and the exit status in ``status`` once it has ended."""

    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "output.log"

    @property
    def process(self) -> Path:
        """The ids of supervisor and command, a line each, the second once it has started."""
        return self.folder / "process"

    @property
    def status(self) -> Path:
        return self.folder / "status"

    def ids(self) -> list[int]:
        """Return the ids of :attr:`process`; empty if nothing was started."""
        try:
            return [int(line) for line in self.process.read_text().splitlines()]
        except FileNotFoundError:
            return []

    def under_way(self) -> bool:
        """Return whether a supervisor runs."""
        ids = self.ids()
        if not ids or self.status.exists():
            return False
        try:  # not another process with the same id
            return _SELF[1].encode() in Path(f"/proc/{ids[0]}/cmdline").read_bytes()
        except OSError:
            return False


# --- supervising --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Backup:
    """Copies of a run's files in a bucket, where they outlive the host.

    Attributes:
        files: the run's files.
        bucket: ``gs://…`` of the run; None: nothing is copied.
        host: name of the log there.
        run_folder: small files of the run, on the host that writes them; None on the others.
        every: seconds between two copies, if anything has changed.
    """

    files: Files
    bucket: str | None
    host: str
    run_folder: Path | None
    every: float

    def sources(self) -> list[Path]:
        """Return what is copied; a run folder only once it exists."""
        folder = [self.run_folder] if self.run_folder and self.run_folder.is_dir() else []
        return [self.files.log, *folder] if self.bucket else []

    def restore(self, log: BinaryIO) -> None:
        """Restore the run folder as last copied; a run that was lost before that has none."""
        source = f"{self.bucket}/run"
        if self.run_folder and _storage("ls", source, log=None):
            self.run_folder.mkdir(parents=True, exist_ok=True)
            _storage("rsync", "--recursive", source, str(self.run_folder), log=log)

    def copy(self, stamp: str, log: BinaryIO) -> bool:
        """Copy everything; return False if that failed, which the next copy makes good."""
        target = f"{self.bucket}/logs/{self.host}-{stamp}.log"
        done = [
            _storage("rsync", "--recursive", str(place), f"{self.bucket}/run", log=log)
            if place.is_dir()
            else _storage("cp", str(place), target, log=log)
            for place in self.sources()
        ]
        return all(done)

    def signature(self) -> list[tuple[str, int, int]]:
        """Return a value that changes when one of these files is written."""
        found = []
        for place in self.sources():
            for file in place.rglob("*") if place.is_dir() else [place]:
                with contextlib.suppress(FileNotFoundError):  # renamed meanwhile
                    stat = file.stat()
                    found.append((str(file), stat.st_size, stat.st_mtime_ns))
        return sorted(found)


def supervise(files: Files, backup: Backup, command: Sequence[str], *, restore: bool) -> int:
    """Run the command to its end, its output in the log; write and return the exit status.

    Args:
        files: the run's files.
        backup: copies them.
        command: program and arguments.
        restore: restore the run folder from the bucket first.
    """
    _write(files.process, f"{os.getpid()}\n")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    failures, copied, status = 0, None, None
    with files.log.open("ab", buffering=0) as log:
        if restore:
            backup.restore(log)
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            log.write(f"cannot run {command[0]}: {error.strerror}\n".encode())
            _write(files.status, "127\n")
            return 127
        _write(files.process, f"{os.getpid()}\n{child.pid}\n")
        while status is None:
            try:
                status = child.wait(backup.every)
            except subprocess.TimeoutExpired:
                if (now := backup.signature()) != copied:
                    done = backup.copy(stamp, log)
                    failures, copied = failures + (not done), now if done else None
        if failures:
            log.write(f"{failures} copies to {backup.bucket} failed during the run\n".encode())
        backup.copy(stamp, log)
    status = status if status >= 0 else 128 - status
    _write(files.status, f"{status}\n")
    return status


def _storage(*arguments: str, log: BinaryIO | None) -> bool:
    """Call ``gcloud storage``; return False if that failed, with its message in the log."""
    command = ["gcloud", "storage", *arguments, "--quiet"]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SYNC_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        message = str(error)
    else:
        if result.returncode == 0:
            return True
        message = " ".join(result.stderr.split())[-300:]
    if log is not None:
        log.write(f"gcloud storage {arguments[0]} failed: {message}\n".encode())
    return False


def _write(file: Path, text: str) -> None:
    """Write a file atomically."""
    beside = file.with_name(f".{file.name}")
    beside.write_text(text)
    beside.replace(file)


# --- actions ------------------------------------------------------------------------------------------------------


def start(files: Files, arguments: Sequence[str], secrets: str) -> int:
    """Start a supervisor with these arguments, unless one is running; return 0 once it has begun.

    Args:
        files: the run's files.
        arguments: arguments of the supervisor.
        secrets: environment variables of the command, as JSON.
    """
    files.folder.mkdir(parents=True, exist_ok=True)
    if files.under_way():
        print("a run is under way here already", flush=True)
        return 0
    if not secrets:
        print("the connection broke before the secrets had come", flush=True)
        return NO_RUN
    for old in (files.status, files.process, files.log):
        old.unlink(missing_ok=True)
    with files.log.open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, *_SELF, "supervise", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | json.loads(secrets),
            start_new_session=True,  # it outlives the connection
        )
    while not files.ids():  # from then on ``follow`` finds it
        if supervisor.poll() is not None:
            return supervisor.returncode
        time.sleep(_START_POLL_SECONDS)
    return 0


def follow(files: Files) -> int:
    """Print the log, each line as ``NUMBER|TEXT``, until the run has ended, then ``end|STATUS``; return that status."""
    status = _print_log(files)
    print(f"end|{status}", flush=True)
    return status


def _print_log(files: Files) -> int:
    if not files.log.exists():
        print("there is no run here", flush=True)
        return NO_RUN
    number, rest = 0, b""
    with files.log.open("rb") as log:
        while True:
            over = not files.under_way()  # before the last read of the log
            *lines, rest = (rest + log.read()).split(b"\n")
            for line in [*lines, rest] if over and rest else lines:
                number += 1
                sys.stdout.buffer.write(b"%d|%s\n" % (number, line.rstrip(b"\r")))
            sys.stdout.buffer.flush()
            if over:
                return int(files.status.read_text()) if files.status.exists() else LOST
            time.sleep(_POLL_SECONDS)


def listening(files: Files, port: int) -> int:
    """Wait until something on this host listens; return 0, or :data:`NO_RUN` once the run has ended."""
    while files.under_way():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=_POLL_SECONDS):
            return 0
        time.sleep(_POLL_SECONDS)
    print("it has ended: its log says why", flush=True)
    return NO_RUN


def send(files: Files, number: int) -> int:
    """Signal the command's process group; return 0, or :data:`NO_RUN`. With SIGKILL, wait for the run's end."""
    ids = files.ids()
    if not files.under_way() or len(ids) < 2:
        return NO_RUN
    try:
        os.killpg(ids[1], number)
    except ProcessLookupError:
        return NO_RUN
    while number == signal.SIGKILL and files.under_way():
        time.sleep(_START_POLL_SECONDS)
    return 0


def run_with(secrets: str, command: Sequence[str], folder: Path) -> int:
    """Run a command in a folder, with environment variables given as JSON; return its exit status."""
    if not secrets:
        print("the connection broke before the variables had come", flush=True)
        return NO_RUN
    environment = os.environ | json.loads(secrets)
    return subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, cwd=folder).returncode


def main(argv: Sequence[str]) -> int:
    """Run the command line; see the module."""
    parser = argparse.ArgumentParser(prog="remote")
    parser.add_argument("action", choices=["start", "supervise", "follow", "signal", "running", "listening", "with"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bucket")
    parser.add_argument("--host", default="host-0")
    parser.add_argument("--run-folder", type=Path)
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--port", type=int)
    parser.add_argument("--secrets", action="store_true", help="a line of JSON from standard input: more variables")
    parser.add_argument("--signal", choices=["INT", "TERM", "KILL"], default="INT")
    place = list(argv).index("--") if "--" in argv else len(argv)
    own, command = argv[:place], argv[place + 1 :]
    arguments = parser.parse_args(own)
    files = Files(arguments.folder.absolute())
    match arguments.action:
        case "follow":
            return follow(files)
        case "running":
            return 0 if files.under_way() else NO_RUN
        case "listening":
            return listening(files, arguments.port)
        case "signal":
            return send(files, getattr(signal, f"SIG{arguments.signal}"))
    if not command:
        parser.error(f"{arguments.action} needs a command behind --")
    if arguments.action == "supervise":
        backup = Backup(
            files=files,
            bucket=arguments.bucket,
            host=arguments.host,
            run_folder=arguments.run_folder,
            every=arguments.every,
        )
        return supervise(files, backup, command, restore=arguments.restore)
    secrets = sys.stdin.readline() if arguments.secrets else "{}"
    if arguments.action == "with":
        return run_with(secrets, command, arguments.folder)
    return start(files, [*own[1:], "--", *command], secrets)


# --- on the launcher's machine ------------------------------------------------------------------------------------


class Logs:
    """Folder with a log per host; every line of a run is printed and logged once.

    Args:
        folder: created if missing; a new run appends to existing files, a run that is found again replaces them.
        print_line: prints a line.
    """

    def __init__(self, folder: Path, *, print_line: Callable[[str], None]) -> None:
        self.folder, self.print_line = folder, print_line
        self._seen: dict[str, int] = {}
        self._found = False

    def expect_run(self, *, found: bool) -> None:
        """Expect a run whose lines are numbered from 1: a new one, or one ``found`` that may be partly in the files."""
        self._seen.clear()
        self._found = found

    def reader(self, host: str) -> Reader:
        """Return a reader of one connection's lines."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Reader(self, host)

    def take(self, host: str, number: int, text: str) -> None:
        """Print and log a line of a host's run, unless an earlier connection delivered it."""
        if number <= self._seen.get(host, 0):
            return
        mode = "w" if self._found and host not in self._seen else "a"
        self._seen[host] = number
        with (self.folder / f"{host}.log").open(mode, encoding="utf-8") as log:
            log.write(text + "\n")
        self.print_line(f"[{host}] {text}")


class Reader:
    """Reader of one connection to a host: lines of ``follow``, and others of gcloud itself.

    Attributes:
        received: the connection delivered lines of the run.
        status: the run's exit status, once received; without it, the connection broke.
    """

    def __init__(self, logs: Logs, host: str) -> None:
        self._logs, self._host = logs, host
        self.received = False
        self.status: int | None = None

    def __call__(self, line: str) -> None:
        if match := re.fullmatch(r"\[[^\]]*\] (\d+)\|(.*)", line, re.DOTALL):
            self.received = True
            self._logs.take(self._host, int(match[1]), match[2])
        elif match := re.fullmatch(r"\[[^\]]*\] end\|(\d+)", line):
            self.status = int(match[1])
        else:
            self._logs.print_line(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
