"""The gcloud program: a client that makes calls for one slice, one that prints them, and errors with their fixes."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator

from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError

Call = tuple[str, ...]
"""Arguments of ``gcloud compute tpus tpu-vm``, of the general release track: no ``alpha`` component is needed."""
_TRANSIENT = "that may pass: look at the network here, and try again"
_FIXES = {
    # Before the next: without a network gcloud advises to log in again, too.
    r"Max retries exceeded|network is unreachable|name resolution|name or service not known|failed to establish|"
    r"connection (reset|aborted|refused)|timed? ?out|unable to find the server|quota metric|RATE_LIMIT_EXCEEDED": (
        _TRANSIENT
    ),
    r"has not been used in project|it is disabled|SERVICE_DISABLED": (
        "switch the TPU interface on: gcloud services enable tpu.googleapis.com"
    ),
    r"no more capacity|insufficient capacity|stockout": (
        "the zone is full: choose another --zone, or let --render sky wait and search several"
    ),
    r"quota": "no quota for that many chips of that kind: ask for more (IAM & Admin > Quotas, Cloud TPU API; spot, "
    "on-demand and each generation have their own), choose a zone that has some, or a smaller --topology",
    r"property \[project\] is not": (
        "no Google Cloud project is chosen: give --project, or gcloud config set project PROJECT"
    ),
    r"reauthentication|gcloud auth login|invalid_grant|UNAUTHENTICATED|do not currently have an active account": (
        "log in again: gcloud auth login"
    ),
    r"Permission denied on 'locations/|location \S+ (is )?not found": (
        "there is no such zone, or none for this project: gcloud compute tpus locations list shows those there are"
    ),
    r"PERMISSION_DENIED|does not have permission|\b403\b": "your account needs the role roles/tpu.admin in the project",
    r"ALREADY_EXISTS|already exists": "the name is taken; choose another --name, or delete that one with --delete",
    r"accelerator.?type.*(not|invalid|unknown)|(unknown|invalid).*(accelerator|zone|location)|zone.*not found": (
        "the zone does not have this kind of chip: gcloud compute tpus tpu-vm accelerator-types list --zone=ZONE lists "
        "what it has, https://cloud.google.com/tpu/docs/regions-zones which zones have what"
    ),
    r"runtime.?version|tensorflow.?version": (
        "choose another --runtime-version; the zone's are listed by gcloud compute tpus tpu-vm versions list"
    ),
}


def advise(message: str) -> str:
    """Return advice on an error of gcloud; empty if the error is unknown."""
    return next((fix for pattern, fix in _FIXES.items() if re.search(pattern, message, re.IGNORECASE)), "")


def _error(call: Call, message: str) -> LaunchError:
    brief = " ".join(message.split())
    brief = brief if len(brief) <= 600 else f"{brief[:300]} … {brief[-300:]}"
    fix = advise(message)
    text = f"gcloud compute tpus tpu-vm {call[0]} failed: {brief}" + (f"\n{fix}" if fix else "")
    if re.search(r"NOT_FOUND|was not found", message):
        return LaunchTargetError(text)
    return LaunchUnansweredError(text) if fix in ("", _TRANSIENT) else LaunchError(text)


class Gcloud:
    """Client of the gcloud program; threads may share it.

    Args:
        project: Google Cloud project; None: gcloud's own.
        zone: zone of the slice.
    """

    max_connections = 16  # each takes a gcloud process

    def __init__(self, *, project: str | None, zone: str) -> None:
        self._where = (f"--zone={zone}", *((f"--project={project}",) if project else ()))
        self._running: set[subprocess.Popen[bytes]] = set()

    def argv(self, call: Call) -> list[str]:
        """Return the whole command, which never prompts."""
        return ["gcloud", "compute", "tpus", "tpu-vm", *call, *self._where, "--quiet"]

    @contextlib.contextmanager
    def _process(self, call: Call, *, stdin: int, stderr: int) -> Iterator[subprocess.Popen[bytes]]:
        """Start a call; on leaving, it has ended."""
        pipe, argv = subprocess.PIPE, self.argv(call)
        try:
            # A session of its own: Ctrl-C comes to the launcher alone.
            process = subprocess.Popen(argv, stdin=stdin, stdout=pipe, stderr=stderr, start_new_session=True)
        except FileNotFoundError:
            raise LaunchError(
                "gcloud is not installed: https://cloud.google.com/sdk/docs/install, then gcloud auth login"
            ) from None
        self._running.add(process)
        with process:
            try:
                yield process
                process.wait()
            except BaseException:
                _terminate(process)
                raise
            finally:
                self._running.discard(process)

    def read(self, call: Call) -> str:
        """Make a call and return its standard output.

        Raises:
            LaunchTargetError: the resource does not exist.
            LaunchUnansweredError: the service could not be reached, or could not answer.
            LaunchError: it was refused; the message ends with the fix.
        """
        with self._process(call, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            output, errors = process.communicate()
        if process.returncode:
            raise _error(call, errors.decode(errors="replace") or f"exit status {process.returncode}")
        return output.decode(errors="replace")

    def stream(self, call: Call, on_line: Callable[[str], None], given: str = "") -> int:
        """Make a call; return its exit status.

        Args:
            call: what to call.
            on_line: takes each line of its output and errors.
            given: its standard input.
        """
        with self._process(call, stdin=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(given.encode())
            for line in process.stdout:
                on_line(line.decode(errors="replace").rstrip("\r\n"))
        return process.returncode

    def stop(self) -> None:
        """End the calls under way."""
        for process in list(self._running):
            _terminate(process)


def _terminate(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


class DryRun(Gcloud):
    """Prints the calls of an undisturbed launch that begins without a slice, and makes none."""

    max_connections = 1  # in order
    _created = False

    def read(self, call: Call) -> str:
        print(f"+ {shlex.join(self.argv(call))}")
        if "describe" in call and not self._created:
            raise LaunchTargetError("NOT_FOUND")
        self._created = True
        return '{"state": "READY"}'

    def stream(self, call: Call, on_line: Callable[[str], None], given: str = "") -> int:
        print(f"+ {shlex.join(self.argv(call))}")
        if any(" follow " in word for word in call):
            on_line("end|0")
        return 0
