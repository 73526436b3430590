"""On a TPU host: a run that goes on without its launcher, and can be watched, stopped and found again.

::

    start ──► supervise (a session of its own) ──► the command
                 │ every 15 s: run folder and log to the bucket          output.log, process, status
    follow ◄─────┴──────────────────── a folder ◄──────────────────────────────────┘
    signal ──► the command

``python -m jax_agent_rl.deploy.launch.tpu.remote start|follow|signal|running|listening|with FOLDER …``. An ssh
connection may break at any time, and gcloud then runs its command again: ``start`` starts nothing while a run is under
way, and ``follow`` numbers the lines, so that who reads them can leave out those it has. Its last line is the run's
exit status: that of gcloud is not, which has its own for its own failures. ``with`` runs a command in the folder, with
variables from its input. The standard library only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
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


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of a run in its folder."""

    folder: Path

    @property
    def log(self) -> Path:
        """The file of all its output."""
        return self.folder / "output.log"

    @property
    def process(self) -> Path:
        """The file with the ids of supervisor and command, a line each, the second once it has started."""
        return self.folder / "process"

    @property
    def status(self) -> Path:
        """The file with the exit status, once it has ended."""
        return self.folder / "status"

    def ids(self) -> list[int]:
        """Return the ids of :attr:`process`; empty if nothing was started."""
        try:
            return [int(line) for line in self.process.read_text().splitlines()]
        except FileNotFoundError:
            return []

    def under_way(self) -> bool:
        """Whether a supervisor lives."""
        ids = self.ids()
        return bool(ids) and not self.status.exists() and _lives(ids[0])


def _lives(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"jax_agent_rl.deploy.launch.tpu.remote" in command  # not another process that has got the number


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Copies of a run's files in a bucket, where they outlive the host.

    Attributes:
        bucket: ``gs://…`` of the run; None: nothing goes anywhere.
        host: names the log there.
        run_folder: small files of the run, on the host that writes them; None on the others.
        restore: bring that folder from the bucket first.
        every: seconds between two times, if anything has changed.
    """

    bucket: str | None
    host: str
    run_folder: str | None
    restore: bool
    every: float

    def due(self, files: Files) -> list[Path]:
        """Copy files there; a run folder only once it exists."""
        folder = [Path(self.run_folder)] if self.run_folder and Path(self.run_folder).is_dir() else []
        return [files.log, *folder] if self.bucket else []


def supervise(files: Files, keeping: Keeping, command: Sequence[str]) -> int:
    """Run the command to its end, its output in the log; write and return the exit status."""
    _write(files.process, f"{os.getpid()}\n")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    with files.log.open("ab", buffering=0) as log:
        failures, kept = 0, None
        if keeping.restore:
            _restore(keeping, log)
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            log.write(f"cannot run {command[0]}: {error.strerror}\n".encode())
            return _conclude(files, 127)
        _write(files.process, f"{os.getpid()}\n{child.pid}\n")
        while True:
            try:
                status = child.wait(keeping.every)
            except subprocess.TimeoutExpired:
                now = _signature(keeping.due(files))
                if now == kept:
                    continue
                done = _keep(keeping, files, stamp, log)
                failures, kept = failures + (not done), now if done else None
            else:
                break
        if failures:
            log.write(f"{failures} copies to {keeping.bucket} failed during the run\n".encode())
    with files.log.open("ab", buffering=0) as log:
        _keep(keeping, files, stamp, log)
    return _conclude(files, status if status >= 0 else 128 - status)


def _restore(keeping: Keeping, log: BinaryIO) -> None:
    """Restore the run folder as it was last kept; a run that was lost before that has none."""
    source = f"{keeping.bucket}/run"
    if keeping.run_folder and _storage("ls", source, log=None):
        Path(keeping.run_folder).mkdir(parents=True, exist_ok=True)
        _storage("rsync", "--recursive", source, keeping.run_folder, log=log)


def _keep(keeping: Keeping, files: Files, stamp: str, log: BinaryIO) -> bool:
    """Copy what a bucket should have; return False if that failed, which the next copy makes good."""
    target = f"{keeping.bucket}/logs/{keeping.host}-{stamp}.log"
    done = [
        _storage("rsync", "--recursive", str(place), f"{keeping.bucket}/run", log=log)
        if place.is_dir()
        else _storage("cp", str(place), target, log=log)
        for place in keeping.due(files)
    ]
    return all(done)


def _signature(places: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return a value that changes when one of these files is written."""
    found = []
    for place in places:
        for file in place.rglob("*") if place.is_dir() else [place]:
            with contextlib.suppress(FileNotFoundError):  # renamed in this very moment
                stat = file.stat()
                found.append((str(file), stat.st_size, stat.st_mtime_ns))
    return sorted(found)


def _storage(*arguments: str, log: BinaryIO | None) -> bool:
    """Call ``gcloud storage``; return False if that failed, with its words in the log."""
    command = ["gcloud", "storage", *arguments, "--quiet"]
    try:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SYNC_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    else:
        if result.returncode == 0:
            return True
        said = " ".join(result.stderr.split())[-300:]
    if log is not None:
        log.write(f"gcloud storage {arguments[0]} failed: {said}\n".encode())
    return False


def _conclude(files: Files, status: int) -> int:
    _write(files.status, f"{status}\n")
    return status


def _write(file: Path, text: str) -> None:
    """Write a file atomically."""
    beside = file.with_name(f".{file.name}")
    beside.write_text(text)
    beside.replace(file)


def start(files: Files, arguments: Sequence[str], secrets: str) -> int:
    """Start a supervisor with these arguments, unless one is running; return 0 once it has begun.

    Args:
        files: of the run.
        arguments: of the supervisor.
        secrets: environment variables of what it runs, as JSON.
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
    status = _show(files)
    print(f"end|{status}", flush=True)
    return status


def _show(files: Files) -> int:
    if not files.log.exists():
        print("there is no run here", flush=True)
        return NO_RUN
    number, rest = 0, b""
    with files.log.open("rb") as log:
        while True:
            over = not files.under_way()  # before the last look at the log
            *lines, rest = (rest + log.read()).split(b"\n")
            if over and rest:
                lines.append(rest)
            for line in lines:
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
    """Signal the command and all it has started; return 0, or :data:`NO_RUN`.

    SIGKILL is for making room: then it returns when the run has ended, its log kept.
    """
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
    parser.add_argument("--run-folder")
    parser.add_argument("--restore", action="store_true")
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--port", type=int)
    parser.add_argument("--secrets", action="store_true", help="a line of JSON from standard input: more variables")
    parser.add_argument("--signal", choices=["INT", "TERM", "KILL"], default="INT")
    place = list(argv).index("--") if "--" in argv else len(argv)
    own, command = list(argv[:place]), list(argv[place + 1 :])
    arguments = parser.parse_args(own)
    files = Files(folder=arguments.folder.absolute())
    if arguments.action == "follow":
        return follow(files)
    if arguments.action == "running":
        return 0 if files.under_way() else NO_RUN
    if arguments.action == "listening":
        return listening(files, arguments.port)
    if arguments.action == "signal":
        return send(files, getattr(signal, f"SIG{arguments.signal}"))
    if not command:
        parser.error(f"{arguments.action} needs a command behind --")
    if arguments.action in ("start", "with"):
        secrets = sys.stdin.readline() if arguments.secrets else "{}"
        if arguments.action == "with":
            return run_with(secrets, command, arguments.folder)
        return start(files, [*own[1:], "--", *command], secrets)
    keeping = Keeping(
        bucket=arguments.bucket,
        host=arguments.host,
        run_folder=arguments.run_folder,
        restore=arguments.restore,
        every=arguments.every,
    )
    return supervise(files, keeping, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
