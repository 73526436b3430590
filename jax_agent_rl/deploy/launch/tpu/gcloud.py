"""Slices by name (``v5e:4x4``), and the calls of gcloud for them, in one place, with the meaning of its errors.

The functions that return tuples say what to call; :class:`Gcloud` alone calls it. Flags are those of the general
release track: no ``alpha`` component is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.deploy.launch.hosts import Command, Host
from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError
from jax_agent_rl.utils.text import did_you_mean

Call = tuple[str, ...]
"""Arguments of gcloud."""

# --- topologies -----------------------------------------------------------------------------------------------------

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBIC = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16"),
)
SHAPES: Mapping[str, tuple[str, ...]] = {"v4": _CUBIC[:-1], "v5e": _FLAT, "v5p": _CUBIC, "v6e": _FLAT}
"""Slices of Google Cloud with an accelerator type, by generation, smallest first."""
_CHIPS_PER_HOST = 4
_LARGEST_SINGLE_HOST = 8
_SEVERAL = re.compile(r"(?P<slices>\d+)\*(?P<name>.+)")
_NAME = re.compile(r"(?P<generation>[a-z0-9]+):(?P<shape>\d+(x\d+){1,2})")


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Differences between TPU generations.

    Attributes:
        prefix: prefix of accelerator types, as in ``v5litepod-16``.
        cores: cores per chip in the number of an accelerator type; v5e and v6e count chips.
        runtime: software version of the VMs for jax (https://cloud.google.com/tpu/docs/runtimes).
        shapes: shapes with an accelerator type; gcloud takes no other for these generations.
        gke: the node label ``cloud.google.com/gke-tpu-accelerator``.
    """

    prefix: str
    cores: int
    runtime: str
    shapes: tuple[str, ...]
    gke: str

    @property
    def one_host(self) -> str:
        """The shape of 4 chips, which are one host."""
        return "2x2" if "2x2" in self.shapes else "2x2x1"


def _generation(name: str, prefix: str, cores: int, runtime: str, gke: str) -> Generation:
    return Generation(prefix=prefix, cores=cores, runtime=runtime, shapes=SHAPES[name], gke=gke)


GENERATIONS: Mapping[str, Generation] = {
    "v4": _generation("v4", "v4", 2, "tpu-ubuntu2204-base", "tpu-v4-podslice"),
    "v5e": _generation("v5e", "v5litepod", 1, "v2-alpha-tpuv5-lite", "tpu-v5-lite-podslice"),
    "v5p": _generation("v5p", "v5p", 2, "v2-alpha-tpuv5", "tpu-v5p-slice"),
    "v6e": _generation("v6e", "v6e", 1, "v2-alpha-tpuv6e", "tpu-v6e-slice"),
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One slice: a generation (see :data:`GENERATIONS`) and the chips along each axis, as in ``4x4``."""

    generation: str
    shape: str

    @property
    def name(self) -> str:
        """The name as the user writes it."""
        return f"{self.generation}:{self.shape}"

    @property
    def kind(self) -> Generation:
        """The generation's properties."""
        return GENERATIONS[self.generation]

    @property
    def chips(self) -> int:
        """Chips of one slice."""
        return math.prod(map(int, self.shape.split("x")))

    @property
    def accelerator_type(self) -> str:
        """Gcloud's name, e.g. ``v5litepod-16`` or ``v5p-128``."""
        return f"{self.kind.prefix}-{self.chips * self.kind.cores}"

    @property
    def hosts(self) -> int:
        """Virtual machines of one slice: one for up to 8 chips of v5e and v6e, otherwise one for 4 chips."""
        single = self.kind.cores == 1 and self.chips <= _LARGEST_SINGLE_HOST
        return 1 if single else max(1, self.chips // _CHIPS_PER_HOST)

    @property
    def chips_per_host(self) -> int:
        """Chips that each virtual machine holds."""
        return self.chips // self.hosts


def parse_topology(name: str) -> Topology:
    """Parse a topology such as ``v5e:4x4``.

    Raises:
        LaunchError: the name is malformed, or Cloud TPU VMs have no such slice.
    """
    if name.startswith("tpu7x"):
        raise LaunchError(f"--topology {name}: TPU7x is available on GKE only; choose {', '.join(GENERATIONS)}")
    if several := _SEVERAL.fullmatch(name.strip()):
        raise LaunchError(
            f"--topology {name} is more than one slice: give --topology {several['name']} --slices {several['slices']}"
        )
    match = _NAME.fullmatch(name.strip().lower())
    if match is None:
        raise LaunchError(f"--topology {name!r} is not of the form GENERATION:SHAPE, as in v5e:4x4 or v5p:2x2x2")
    generation, shape = match["generation"], match["shape"]
    if generation not in GENERATIONS:
        hint = did_you_mean(generation, GENERATIONS)
        raise LaunchError(f"--topology {name}: no generation {generation!r}; {hint}there are {', '.join(GENERATIONS)}")
    shapes = GENERATIONS[generation].shapes
    if shape not in shapes:
        raise LaunchError(f"--topology {name}: {generation} comes as {', '.join(shapes)}")
    return Topology(generation=generation, shape=shape)


@dataclass(frozen=True, kw_only=True)
class SliceRequest:
    """The slices a user asked for.

    Attributes:
        name: name of the slice, or of the queued resource that holds all of them.
        topology: topology of each slice.
        slices: their number; more than one come as one queued resource.
        spot: cheaper, and may be preempted at any time.
        queued: wait in the queue until there is capacity.
        valid_until: limit of that wait as a duration of gcloud (``6h``), if any.
        runtime: software version of the VMs.
    """

    name: str
    topology: Topology
    slices: int
    spot: bool
    queued: bool
    valid_until: str | None
    runtime: str

    @property
    def by_queue(self) -> bool:
        """Whether a queued resource holds the slices."""
        return self.queued or self.slices > 1

    @property
    def nodes(self) -> tuple[str, ...]:
        """Gcloud's names of the slices; those of a queued resource are numbered."""
        return (self.name,) if self.slices == 1 else tuple(f"{self.name}-{i}" for i in range(self.slices))

    def __str__(self) -> str:
        tier = "spot" if self.spot else "on demand"
        count = f"{self.slices} slices" if self.slices > 1 else "one slice"
        queue = ", queued" if self.by_queue else ""
        return f"{count} of {self.topology.name} ({self.topology.accelerator_type}, {tier}{queue})"


# --- calls --------------------------------------------------------------------------------------------------------

_HERE = Host(name="localhost", address="127.0.0.1", local=True)
_VM = ("compute", "tpus", "tpu-vm")
_QUEUED = ("compute", "tpus", "queued-resources")
_JSON = "--format=json"
LIST_QUEUED: Call = (*_QUEUED, "list", _JSON)
LIST_NODES: Call = (*_VM, "list", _JSON)
LIST_ACCELERATOR_TYPES: Call = (*_VM, "accelerator-types", "list", _JSON)


def create(request: SliceRequest) -> Call:
    """Return the call that requests the slices, or puts a queued resource into the queue."""
    kind = f"--accelerator-type={request.topology.accelerator_type}"
    spot = ("--spot",) if request.spot else ()
    if not request.by_queue:
        return (*_VM, "create", request.name, kind, f"--version={request.runtime}", *spot)
    several = (f"--node-count={request.slices}", f"--node-prefix={request.name}")
    named = (f"--node-id={request.name}",) if request.slices == 1 else several
    limit = (f"--valid-until-duration={request.valid_until}",) if request.valid_until else ()
    return (*_QUEUED, "create", request.name, kind, f"--runtime-version={request.runtime}", *named, *spot, *limit)


def delete(request: SliceRequest) -> Call:
    """Return the call that deletes the slices and ends their cost."""
    return delete_queued(request.name) if request.by_queue else delete_node(request.name)


def delete_queued(name: str) -> Call:
    """Return the call that deletes a queued resource with all its slices."""
    return (*_QUEUED, "delete", name, "--force")


def delete_node(name: str) -> Call:
    """Return the call that deletes one slice."""
    return (*_VM, "delete", name)


def poll(request: SliceRequest) -> list[Call]:
    """Return the calls of one poll: for a queued resource, its state, and then that of each of its slices."""
    nodes: list[Call] = [(*_VM, "describe", node, _JSON) for node in request.nodes]
    return [(*_QUEUED, "describe", request.name, _JSON), *nodes] if request.by_queue else nodes


def ssh(node: str, worker: int, command: str) -> Call:
    """Return the call that runs a shell command on one host (``--worker=all`` mixes lines and needs ssh-agent)."""
    return (*_VM, "ssh", node, f"--worker={worker}", f"--command={command}")


def scp(node: str, worker: int, source: str, target: str) -> Call:
    """Return the call that copies a file to one host's home folder."""
    return (*_VM, "scp", source, f"{node}:{target}", f"--worker={worker}")


# --- errors -------------------------------------------------------------------------------------------------------

_TRANSIENT = "that may pass: look at the network here, and try again"

_ACCOUNT = ("auth", "list", "--filter=status:ACTIVE", "--format=value(account)")
_PROJECT = ("config", "get-value", "project")

_FIXES: tuple[tuple[str, str], ...] = (
    (  # before the next: without a network gcloud advises to log in again, too
        r"Max retries exceeded|network is unreachable|name resolution|name or service not known|failed to establish|"
        r"connection (reset|aborted|refused)|timed? ?out|unable to find the server|quota metric|RATE_LIMIT_EXCEEDED",
        _TRANSIENT,
    ),
    (
        r"has not been used in project|it is disabled|SERVICE_DISABLED",
        "switch the TPU interface on: gcloud services enable tpu.googleapis.com",
    ),
    (
        r"no more capacity|insufficient capacity|stockout",
        "the zone is full: add --queued to wait for a place, or choose another --zone",
    ),
    (
        r"quota",
        "no quota for that many chips of that kind: ask for more (IAM & Admin > Quotas, Cloud TPU API; spot, on-demand "
        "and each generation have their own), choose a zone that has some, or a smaller --topology",
    ),
    (
        r"reauthentication|gcloud auth login|invalid_grant|UNAUTHENTICATED|do not currently have an active account",
        "log in again: gcloud auth login",
    ),
    (
        r"Permission denied on 'locations/|location \S+ (is )?not found",
        "there is no such zone, or none for this project: gcloud compute tpus locations list shows those there are",
    ),
    (
        r"PERMISSION_DENIED|does not have permission|\b403\b",
        "your account needs the role roles/tpu.admin in the project",
    ),
    (
        r"ALREADY_EXISTS|already exists",
        "the name is taken; choose another --name, or delete that one with --delete",
    ),
    (
        r"accelerator.?type.*(not|invalid|unknown)|(unknown|invalid).*(accelerator|zone|location)|zone.*not found",
        "the zone does not have this kind of chip: https://cloud.google.com/tpu/docs/regions-zones lists those that do",
    ),
    (
        r"runtime.?version|tensorflow.?version",
        "choose another --runtime-version; the zone's are listed by gcloud compute tpus tpu-vm versions list",
    ),
)


def advise(message: str) -> str:
    """Return advice on an error of gcloud; empty if the error is unknown."""
    return next((fix for pattern, fix in _FIXES if re.search(pattern, message, re.IGNORECASE)), "")


def _error(call: Sequence[str], message: str) -> LaunchError:
    brief = " ".join(message.split())
    brief = brief if len(brief) <= 600 else f"{brief[:300]} … {brief[-300:]}"
    words = " ".join(word for word in call[:4] if not word.startswith("-"))
    fix = advise(message)
    text = f"gcloud {words} failed: {brief}" + (f"\n{fix}" if fix else "")
    if re.search(r"NOT_FOUND|was not found", message):
        return LaunchTargetError(text)
    return LaunchUnansweredError(text) if fix in ("", _TRANSIENT) else LaunchError(text)


class Gcloud:
    """Client of the gcloud program.

    Args:
        project: Google Cloud project; None: gcloud's own.
        zone: zone of all slices.
    """

    def __init__(self, *, project: str | None, zone: str) -> None:
        self._project = project
        self._where = (f"--zone={zone}", *((f"--project={project}",) if project else ()))

    def argv(self, call: Sequence[str]) -> list[str]:
        """Return the whole command, which never prompts."""
        return ["gcloud", *call, *(self._where if call[0] == "compute" else ()), "--quiet"]

    def command(self, name: str, call: Sequence[str]) -> Command:
        """Return a command whose output is printed line by line under a name."""
        return Command(name=name, host=_HERE, argv=tuple(self.argv(call)))

    async def read(self, call: Sequence[str]) -> str:
        """Run a call and return its standard output.

        Raises:
            LaunchTargetError: the resource does not exist.
            LaunchUnansweredError: the service could not be reached, or could not answer.
            LaunchError: it was refused; the message ends with the fix.
        """
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self.argv(call),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,  # Ctrl-C comes to the launcher alone
            )
        except FileNotFoundError:
            raise LaunchError(
                "gcloud is not installed: https://cloud.google.com/sdk/docs/install, then gcloud auth login"
            ) from None
        try:
            output, errors = await process.communicate()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            raise
        if process.returncode:
            raise _error(call, errors.decode(errors="replace") or f"exit status {process.returncode}")
        return output.decode(errors="replace")

    async def read_json(self, call: Sequence[str]) -> Any:
        """Run a call and return its standard output, parsed as JSON."""
        text = await self.read(call)
        try:
            return json.loads(text)
        except ValueError:
            raise LaunchError(f"gcloud {' '.join(call[:4])}: not JSON: {text[:200]!r}") from None

    def login(self) -> list[Call]:
        """Return the calls that :meth:`require_login` makes."""
        return [_ACCOUNT] if self._project else [_ACCOUNT, _PROJECT]

    async def require_login(self) -> None:
        """Raise :class:`LaunchError` if gcloud is missing, nobody is logged in, or no project is chosen."""
        missing = {
            _ACCOUNT: "nobody is logged in to gcloud: gcloud auth login",
            _PROJECT: "no Google Cloud project is chosen: give --project, or gcloud config set project PROJECT",
        }
        for question in self.login():
            if not (await self.read(question)).strip():
                raise LaunchError(missing[question])
