"""Calls of gcloud, in one place, and the meaning of its errors.

The functions that return tuples say what to call; :class:`Gcloud` alone calls it. Flags are those of the general
release track: no ``alpha`` component is needed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_agent_rl.deploy.launch.hosts import Command, Host
from jax_agent_rl.deploy.launch.tpu.topology import Topology
from jax_agent_rl.errors import LaunchError, LaunchTargetError, LaunchUnansweredError

_HERE = Host(name="localhost", address="127.0.0.1", local=True)
_TPUS = ("compute", "tpus")


@dataclass(frozen=True, kw_only=True)
class SliceRequest:
    """The slices a user asked for.

    Attributes:
        name: of the slice, or of the queued resource that holds all of them.
        topology: of each slice.
        slices: how many; more than one come as one queued resource.
        spot: cheaper, and taken back at any time.
        queued: wait in the queue until there is capacity.
        valid_until: how long to wait there, as gcloud's durations (``6h``); None: for ever.
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


def create(request: SliceRequest) -> tuple[str, ...]:
    """Return the call that requests the slices, or puts a queued resource into the queue."""
    kind = f"--accelerator-type={request.topology.accelerator_type}"
    spot = ("--spot",) if request.spot else ()
    if not request.by_queue:
        return (*_TPUS, "tpu-vm", "create", request.name, kind, f"--version={request.runtime}", *spot)
    named = (
        (f"--node-id={request.name}",)
        if request.slices == 1
        else (f"--node-count={request.slices}", f"--node-prefix={request.name}")
    )
    limit = (f"--valid-until-duration={request.valid_until}",) if request.valid_until else ()
    version = f"--runtime-version={request.runtime}"
    return (*_TPUS, "queued-resources", "create", request.name, kind, version, *named, *spot, *limit)


def delete(request: SliceRequest) -> tuple[str, ...]:
    """Return the call that deletes the slices and ends their cost."""
    return delete_queued(request.name) if request.by_queue else delete_node(request.name)


def delete_queued(name: str) -> tuple[str, ...]:
    """Return the call that deletes a queued resource with all its slices."""
    return (*_TPUS, "queued-resources", "delete", name, "--force")


def delete_node(name: str) -> tuple[str, ...]:
    """Return the call that deletes one slice."""
    return (*_TPUS, "tpu-vm", "delete", name)


def describe(request: SliceRequest) -> tuple[str, ...]:
    """Return the calls that show the state of the slice, or of the queued resource."""
    if request.by_queue:
        return (*_TPUS, "queued-resources", "describe", request.name, "--format=json")
    return describe_node(request.name)


def describe_node(node: str) -> tuple[str, ...]:
    """Return the call for state and hosts of one slice."""
    return (*_TPUS, "tpu-vm", "describe", node, "--format=json")


def list_queued() -> tuple[str, ...]:
    """Return the call that lists the zone's queued resources."""
    return (*_TPUS, "queued-resources", "list", "--format=json")


def list_nodes() -> tuple[str, ...]:
    """Return the call that lists the zone's slices."""
    return (*_TPUS, "tpu-vm", "list", "--format=json")


def look(request: SliceRequest) -> list[tuple[str, ...]]:
    """Return the calls of one poll: for an active queued resource, also the state of each of its slices."""
    nodes = [describe_node(node) for node in request.nodes] if request.by_queue else []
    return [describe(request), *nodes]


def accelerator_types() -> tuple[str, ...]:
    """Return the call that lists the zone's accelerator types."""
    return (*_TPUS, "tpu-vm", "accelerator-types", "list", "--format=json")


def ssh(node: str, worker: int, command: str) -> tuple[str, ...]:
    """Return the call that runs a shell command on one host (``--worker=all`` mixes lines and needs ssh-agent)."""
    return (*_TPUS, "tpu-vm", "ssh", node, f"--worker={worker}", f"--command={command}")


def scp(node: str, worker: int, source: str, target: str) -> tuple[str, ...]:
    """Return the call that copies a file to one host's home folder."""
    return (*_TPUS, "tpu-vm", "scp", source, f"{node}:{target}", f"--worker={worker}")


_PASSES = "that may pass: look at the network here, and try again"

_ACCOUNT = ("auth", "list", "--filter=status:ACTIVE", "--format=value(account)")
_PROJECT = ("config", "get-value", "project")

_FIXES: tuple[tuple[str, str], ...] = (
    (  # before the next: without a network gcloud advises to log in again, too
        r"Max retries exceeded|network is unreachable|name resolution|name or service not known|failed to establish|"
        r"connection (reset|aborted|refused)|timed? ?out|unable to find the server|quota metric|RATE_LIMIT_EXCEEDED",
        _PASSES,
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
        "the name is taken; choose another --name, or take that one away with --delete",
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


def fix_of(message: str) -> str:
    """Return advice on an error of gcloud's; empty if it is not one of the known ones."""
    return next((fix for pattern, fix in _FIXES if re.search(pattern, message, re.IGNORECASE)), "")


def _error(arguments: Sequence[str], message: str) -> LaunchError:
    brief = " ".join(message.split())
    brief = brief if len(brief) <= 600 else f"{brief[:300]} … {brief[-300:]}"
    words = " ".join(word for word in arguments[:4] if not word.startswith("-"))
    fix = fix_of(message)
    text = f"gcloud {words} failed: {brief}" + (f"\n{fix}" if fix else "")
    if re.search(r"NOT_FOUND|was not found", message):
        return LaunchTargetError(text)
    return LaunchUnansweredError(text) if fix in ("", _PASSES) else LaunchError(text)


class Gcloud:
    """Client of the gcloud program.

    Args:
        project: None: the one gcloud is set to.
        zone: of everything here.
    """

    def __init__(self, *, project: str | None, zone: str) -> None:
        self._project = project
        self._where = (f"--zone={zone}", *((f"--project={project}",) if project else ()))

    def argv(self, arguments: Sequence[str]) -> list[str]:
        """Return the whole command, which never prompts."""
        return ["gcloud", *arguments, *(self._where if arguments[0] == "compute" else ()), "--quiet"]

    def command(self, name: str, arguments: Sequence[str]) -> Command:
        """Return a command whose output is printed line by line under a name."""
        return Command(name=name, host=_HERE, argv=tuple(self.argv(arguments)))

    async def read(self, arguments: Sequence[str]) -> str:
        """Run a call and return its standard output.

        Raises:
            LaunchTargetError: the resource is not there.
            LaunchUnansweredError: gcloud could not ask, or the service could not answer.
            LaunchError: it was refused; the message ends with the fix.
        """
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self.argv(arguments),
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
            raise _error(arguments, errors.decode(errors="replace") or f"exit status {process.returncode}")
        return output.decode(errors="replace")

    async def read_json(self, arguments: Sequence[str]) -> Any:
        """Run a call and return its standard output, parsed as JSON."""
        text = await self.read(arguments)
        try:
            return json.loads(text)
        except ValueError:
            raise LaunchError(f"gcloud {' '.join(arguments[:4])}: not JSON: {text[:200]!r}") from None

    def login(self) -> list[tuple[str, ...]]:
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
