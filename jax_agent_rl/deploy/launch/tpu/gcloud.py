"""Google Cloud: TPU slices by name (``v5e:4x4``), and the gcloud program.

A client makes calls for one slice, another one prints them; errors come with their fixes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError
from jax_agent_rl.utils.near_names import did_you_mean

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = (
    "2x2x1",
    "2x2x2",
    "2x2x4",
    "2x4x4",
    "4x4x4",
    "4x4x8",
    "4x8x8",
    "8x8x8",
    "8x8x16",
    "8x16x16",
    "16x16x16",
)
SHAPES: Mapping[str, tuple[str, ...]] = {
    "v4": _CUBIC[:-1],
    "v5e": _FLAT,
    "v5p": _CUBIC,
    "v6e": _FLAT,
}
"""Slices of Google Cloud with an accelerator type, by generation, smallest first."""
_NAME = re.compile(r"((?P<slices>\d+)\*)?(?P<generation>[a-z0-9]+):(?P<shape>\d+(x\d+){1,2})")


class Generation(NamedTuple):
    """What differs between TPU generations.

    Attributes:
        prefix: beginning of accelerator types.
        cores: cores of a chip in the number of an accelerator type; v5e and v6e count chips.
        runtime: software version of the VMs for jax, see
            https://cloud.google.com/tpu/docs/runtimes.
        gke: the node label ``cloud.google.com/gke-tpu-accelerator``.
    """

    prefix: str
    cores: int
    runtime: str
    gke: str


CALL_SECONDS = 3600.0
"""Time limit of a call; one that makes a large slice takes many minutes."""

GENERATIONS: Mapping[str, Generation] = {
    "v4": Generation("v4", 2, "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": Generation("v5litepod", 1, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": Generation("v5p", 2, "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": Generation("v6e", 1, "v2-alpha-tpuv6e", "tpu-v6e-slice"),
}


@dataclass(frozen=True)
class Topology:
    """One slice, which users write as ``v5e:4x4``."""

    generation: str
    shape: str  # the chips along each axis

    def __str__(self) -> str:
        return f"{self.generation}:{self.shape}"

    @property
    def kind(self) -> Generation:
        """The generation's properties."""
        return GENERATIONS[self.generation]

    @property
    def chips(self) -> int:
        """Chips of the slice."""
        return math.prod(map(int, self.shape.split("x")))

    @property
    def accelerator_type(self) -> str:
        """Gcloud's name, e.g. ``v5litepod-16`` or ``v5p-128``."""
        return f"{self.kind.prefix}-{self.chips * self.kind.cores}"

    @property
    def hosts(self) -> int:
        """Virtual machines: one for up to 8 chips of v5e and v6e, otherwise one for 4 chips."""
        if self.kind.cores == 1 and self.chips <= 8:
            return 1
        return max(1, self.chips // 4)

    @property
    def one_host(self) -> Topology:
        """The slice of 4 chips of the same generation."""
        for shape in SHAPES[self.generation]:
            topology = Topology(self.generation, shape)
            if topology.chips == 4:
                return topology
        raise AssertionError("every generation has a slice of 4 chips")


def parse_topology(name: str) -> Topology:
    """Parse a topology such as ``v5e:4x4``.

    Raises:
        LaunchError: the name is malformed, or Cloud TPU VMs have no such slice.
    """
    known = ", ".join(GENERATIONS)
    if name.startswith("tpu7x"):
        raise LaunchError(f"--topology {name}: TPU7x is available on GKE only; choose {known}")

    match = _NAME.fullmatch(name.strip().lower())
    if match is None:
        raise LaunchError(
            f"--topology {name!r} is not of the form GENERATION:SHAPE, as in v5e:4x4 or v5p:2x2x2"
        )

    topology = Topology(match["generation"], match["shape"])
    slices = match["slices"]
    if slices:
        raise LaunchError(
            f"--topology {name} is more than one slice: give --topology {topology} --slices"
            f" {slices}"
        )

    if topology.generation not in GENERATIONS:
        hint = did_you_mean(topology.generation, GENERATIONS)
        raise LaunchError(
            f"--topology {name}: no generation {topology.generation!r}; {hint}there are {known}"
        )

    shapes = SHAPES[topology.generation]
    if topology.shape not in shapes:
        raise LaunchError(f"--topology {name}: {topology.generation} comes as {', '.join(shapes)}")
    return topology


# --- gcloud ---------------------------------------------------------------------------------------

Call = tuple[str, ...]
"""Arguments of ``gcloud compute tpus tpu-vm``, of the general release track: no ``alpha`` component
is needed."""
_TRANSIENT = "that may pass: look at the network here, and try again"
_FIXES = {
    # The network before the login: without one, gcloud advises to log in again as well.
    (
        r"Max retries exceeded|network is unreachable|name resolution|name or service not known"
        r"|failed to establish|connection (reset|aborted|refused)|timed? ?out"
        r"|unable to find the server|quota metric|RATE_LIMIT_EXCEEDED"
    ): _TRANSIENT,
    r"has not been used in project|it is disabled|SERVICE_DISABLED": (
        "switch the TPU interface on: gcloud services enable tpu.googleapis.com"
    ),
    r"no more capacity|insufficient capacity|stockout": (
        "the zone is full: choose another --zone, or let --render sky wait and search several"
    ),
    r"quota": (
        "no quota for that many chips of that kind: ask for more (IAM & Admin > Quotas, Cloud TPU"
        " API; spot, on-demand and each generation have their own), choose a zone that has some, or"
        " a smaller --topology"
    ),
    r"property \[project\] is not": (
        "no Google Cloud project is chosen: give --project, or gcloud config set project PROJECT"
    ),
    (
        r"reauthentication|gcloud auth login|invalid_grant|UNAUTHENTICATED"
        r"|do not currently have an active account"
    ): "log in again: gcloud auth login",
    r"Permission denied on 'locations/|location \S+ (is )?not found": (
        "there is no such zone, or none for this project: gcloud compute tpus locations list shows"
        " those there are"
    ),
    r"PERMISSION_DENIED|does not have permission|\b403\b": (
        "your account needs the role roles/tpu.admin in the project"
    ),
    r"ALREADY_EXISTS|already exists": (
        "the name is taken; choose another --name, or delete that one with --delete"
    ),
    (
        r"accelerator.?type.*(not|invalid|unknown)|(unknown|invalid).*(accelerator|zone|location)"
        r"|zone.*not found"
    ): (
        "the zone does not have this kind of chip: gcloud compute tpus tpu-vm accelerator-types"
        " list --zone=ZONE lists what it has, https://cloud.google.com/tpu/docs/regions-zones which"
        " zones have what"
    ),
    r"runtime.?version|tensorflow.?version": (
        "choose another --runtime-version; the zone's are listed by gcloud compute tpus tpu-vm"
        " versions list"
    ),
}


def advise(message: str) -> str:
    """Return advice on an error of gcloud; empty if the error is unknown."""
    for pattern, fix in _FIXES.items():
        if re.search(pattern, message, re.IGNORECASE):
            return fix
    return ""


def _error(call: Call, message: str) -> LaunchError:
    """Return the error of a call that failed with this message."""
    brief = " ".join(message.split())
    if len(brief) > 600:
        brief = f"{brief[:300]} … {brief[-300:]}"
    text = f"gcloud compute tpus tpu-vm {call[0]} failed: {brief}"
    fix = advise(message)
    if fix:
        text += f"\n{fix}"

    if re.search(r"NOT_FOUND|was not found", message):
        return LaunchTargetError(text)
    if fix in ("", _TRANSIENT):
        return LaunchUnansweredError(text)
    return LaunchError(text)


class Gcloud:
    """Client of the gcloud program; threads may share it.

    Args:
        project: Google Cloud project; None: gcloud's own.
        zone: zone of the slice.
    """

    max_connections = 16  # each takes a gcloud process

    def __init__(self, *, project: str | None, zone: str) -> None:
        self._location = [f"--zone={zone}"]
        if project:
            self._location.append(f"--project={project}")
        self._running: set[subprocess.Popen[bytes]] = set()

    def argv(self, call: Call) -> list[str]:
        """Return the whole command, which never prompts."""
        return ["gcloud", "compute", "tpus", "tpu-vm", *call, *self._location, "--quiet"]

    @contextlib.contextmanager
    def _process(self, call: Call, *, stdin: int, stderr: int) -> Iterator[subprocess.Popen[bytes]]:
        """Start a call; on leaving, it has ended."""
        try:
            # A session of its own: Ctrl-C comes to the launcher alone.
            process = subprocess.Popen(
                self.argv(call),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise LaunchError(
                "gcloud is not installed: https://cloud.google.com/sdk/docs/install, then gcloud"
                " auth login"
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
            try:
                output, errors = process.communicate(timeout=CALL_SECONDS)
            except subprocess.TimeoutExpired:
                raise LaunchUnansweredError(
                    f"gcloud {call[0]} did not answer within {CALL_SECONDS:g} seconds; is the"
                    " network there?"
                ) from None
        if process.returncode:
            message = errors.decode(errors="replace") or f"exit status {process.returncode}"
            raise _error(call, message)
        return output.decode(errors="replace")

    def stream(self, call: Call, on_line: Callable[[str], None], stdin: str = "") -> int:
        """Make a call; return its exit status.

        Args:
            on_line: takes each line of its output and errors.
            stdin: its standard input.
        """
        with self._process(call, stdin=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(stdin.encode())
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

    def stream(self, call: Call, on_line: Callable[[str], None], stdin: str = "") -> int:
        print(f"+ {shlex.join(self.argv(call))}")
        if any(" follow " in word for word in call):
            on_line("end|0")
        return 0
