"""Hosts: how commands get there, which GPUs they have, and whether their drivers will do."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from jax_agent_rl.errors import LaunchError

MIN_DRIVER = 580
"""CUDA 13's driver; the pinned torch and jax are built with it (third_party/constraints-gpu.txt)."""

LIST_GPUS = ("nvidia-smi", "--query-gpu=index,uuid,name,driver_version", "--format=csv,noheader")
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*")
_GPU = re.compile(r"(?P<index>\d+), (?P<uuid>[^,]+), (?P<name>.+), (?P<driver>\d+\.[\d.]+)")
_NO_CHECKOUT = 66
_SSH_FAILED = 255
_NOT_FOUND = 127
_LOOPBACK = "127.0.0.1"
_NO_DRIVER = f"there is no nvidia-smi, so no NVIDIA driver: install driver {MIN_DRIVER} or newer, or use --device cpu"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of the launch.

    Attributes:
        name: the name given by the user, for ssh and messages; ``user@`` may precede it.
        address: address at which the other hosts reach it.
        local: the launcher runs on it.
    """

    name: str
    address: str
    local: bool


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One line of ``nvidia-smi``."""

    index: int
    uuid: str
    name: str
    driver: str


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command on a host.

    Attributes:
        name: prefix of its lines of output.
        host: where it runs.
        argv: program and arguments, as the host sees them.
        env: variables added to the host's own.
    """

    name: str
    host: Host
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def local_argv(self, root: Path) -> list[str]:
        """Return what the launcher starts on its own machine: the command itself, or ssh to its host."""
        variables = ["env", *(f"{name}={value}" for name, value in self.env.items())] if self.env else []
        argv = [*variables, *self.argv]
        if self.host.local:
            return argv
        return [*SSH, self.host.name, f"cd {shlex.quote(str(root))} || exit {_NO_CHECKOUT}; exec {shlex.join(argv)}"]


def make_hosts(names: Sequence[str], *, resolve: bool = True) -> list[Host]:
    """Return the hosts of ``--hosts``, this machine first; this machine alone if none are named.

    Args:
        names: addresses or host names.
        resolve: look addresses up; without, a name stands for its address.

    Raises:
        LaunchError: a name is malformed, twice there or unknown, or the first one is not this machine's.
    """
    if not names:
        return [Host(name="localhost", address=_LOOPBACK, local=True)]
    if bad := [name for name in names if not _HOST.fullmatch(name)]:
        raise LaunchError(f"--hosts: {bad} are not host names or IPv4 addresses")
    if len(set(names)) < len(names):
        raise LaunchError(f"--hosts names a host twice: {','.join(names)}")
    places = [name.rpartition("@")[2] for name in names]
    addresses = [_resolve(place) for place in places] if resolve else places
    if resolve and _bind(addresses[0], 0) is not None:
        raise LaunchError(
            f"--hosts: {names[0]} ({addresses[0]}) is not an address of this machine; the first host is the one the "
            "learner runs on, and gpu.sh is started there"
        )
    if len(names) == 1:
        return [Host(name=names[0], address=_LOOPBACK, local=True)]
    hosts = [
        Host(name=name, address=address, local=name is names[0]) for name, address in zip(names, addresses, strict=True)
    ]
    for host, place in zip(hosts, places, strict=True):
        # Debian gives a machine's own name the address 127.0.1.1.
        if place != host.address and ipaddress.ip_address(host.address).is_loopback:
            raise LaunchError(
                f"{host.name}: other hosts cannot reach it at the loopback address that this machine knows "
                "it by; give its address in the network instead"
            )
    return hosts


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(f"{name}: its address cannot be found ({error})") from None


def _bind(address: str, port: int) -> OSError | None:
    """Return why nothing can listen there on this machine; None if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return error
    return None


def require_free_port(host: str, address: str, port: int, *, option: str) -> None:
    """Raise :class:`LaunchError` if the port is taken on this machine, or the address is not this machine's."""
    if error := _bind(address, port):
        raise LaunchError(
            f"{host}: cannot listen on {address}:{port}: {error.strerror}; choose other ports with {option}"
        )


def check_command(host: Host, device: str) -> Command:
    """Return the command that checks a host; on CUDA it lists the GPUs."""
    return Command(name=host.name, host=host, argv=LIST_GPUS if device == "cuda" else ("true",))


def inspect(hosts: Sequence[Host], device: str, root: Path) -> dict[Host, list[Gpu]]:
    """Return the GPUs of every host; hosts are queried concurrently.

    Args:
        hosts: hosts of the launch.
        device: ``cuda`` or ``cpu``.
        root: the project's folder, on every host.

    Raises:
        LaunchError: some hosts cannot be used; lists the problem of each.
    """
    found: dict[Host, list[Gpu]] = {}
    problems = []
    with ThreadPoolExecutor(len(hosts)) as pool:
        answers = [pool.submit(_inspect, host, device, root) for host in hosts]
    for host, answer in zip(hosts, answers, strict=True):
        try:
            found[host] = answer.result()
        except LaunchError as error:
            problems.append(str(error))
    if problems:
        raise LaunchError("\n".join(problems))
    return found


def _inspect(host: Host, device: str, root: Path) -> list[Gpu]:
    argv = check_command(host, device).local_argv(root)
    try:
        result = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        missing = _NO_DRIVER if argv[0] == "nvidia-smi" else f"{argv[0]} is not installed"
        raise LaunchError(f"{host.name}: {missing}") from None
    output = " ".join((result.stderr or result.stdout).split())
    if not host.local and result.returncode == _SSH_FAILED:
        raise LaunchError(f"{host.name}: ssh failed: {output}; it must let you in without a password (ssh {host.name})")
    if not host.local and result.returncode == _NO_CHECKOUT:
        raise LaunchError(f"{host.name}: there is no {root}; this folder must be at the same path on every host")
    if device != "cuda":
        return []
    if result.returncode == _NOT_FOUND:
        raise LaunchError(f"{host.name}: {_NO_DRIVER}")
    if result.returncode or "No devices were found" in result.stdout:
        raise LaunchError(f"{host.name}: nvidia-smi finds no usable GPU: {output}")
    return usable_gpus(host, result.stdout, os.environ.get("CUDA_VISIBLE_DEVICES") if host.local else None)


def usable_gpus(host: Host, listing: str, visible: str | None = None) -> list[Gpu]:
    """Parse the GPUs in the output of :data:`LIST_GPUS`.

    Args:
        host: for messages.
        listing: output of the command.
        visible: ``CUDA_VISIBLE_DEVICES`` (indices or UUIDs), if set; other GPUs are not used.

    Raises:
        LaunchError: there is none, or the driver is too old.
    """
    gpus = []
    for line in filter(None, map(str.strip, listing.splitlines())):
        if (match := _GPU.fullmatch(line)) is None:
            raise LaunchError(f"{host.name}: nvidia-smi is not understood: {line!r}")
        gpus.append(Gpu(**{**match.groupdict(), "index": int(match["index"])}))
    if gpus and int(gpus[0].driver.partition(".")[0]) < MIN_DRIVER:
        raise LaunchError(
            f"{host.name}: NVIDIA driver {gpus[0].driver} is too old; torch and jax for CUDA 13 need "
            f"{MIN_DRIVER} or newer"
        )
    if visible is not None:
        allowed = {entry.strip() for entry in visible.split(",")}
        gpus = [gpu for gpu in gpus if {str(gpu.index), gpu.uuid} & allowed]
    if not gpus:
        raise LaunchError(
            f"{host.name}: no GPU is left: CUDA_VISIBLE_DEVICES={visible!r}"
            if visible is not None
            else f"{host.name}: nvidia-smi lists no GPU; use --device cpu to run without"
        )
    return gpus
