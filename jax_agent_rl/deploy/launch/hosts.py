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

OLDEST_DRIVER = 580
"""Of CUDA 13, which the pinned torch and jax are built with (third_party/constraints-gpu.txt)."""

LIST_GPUS = ("nvidia-smi", "--query-gpu=index,uuid,name,driver_version", "--format=csv,noheader")
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9.-]*")
_GPU = re.compile(r"(?P<index>\d+), (?P<uuid>[^,]+), (?P<name>.+), (?P<driver>\d+\.[\d.]+)")
_NO_CHECKOUT = 66
_SSH_FAILED = 255
_NOT_FOUND = 127
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of the launch.

    Attributes:
        name: as the user gave it, for ssh and for messages; ``user@`` may precede it.
        address: where the other hosts reach it.
        local: it is the machine the launcher runs on.
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
        name: what its lines of output begin with.
        argv: program and arguments, as the host sees them.
        env: variables it runs with, besides the host's own.
    """

    name: str
    host: Host
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    def local_argv(self, root: Path) -> list[str]:
        """Return what the launcher starts on its own machine: the command itself, or ssh to its host."""
        if self.host.local:
            return [*self._variables(), *self.argv]
        there = (
            f"cd {shlex.quote(str(root))} || exit {_NO_CHECKOUT}; exec {shlex.join([*self._variables(), *self.argv])}"
        )
        return [*SSH, self.host.name, there]

    def _variables(self) -> list[str]:
        return ["env", *(f"{name}={value}" for name, value in self.env.items())] if self.env else []


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
    addresses = [_address(name.rpartition("@")[2]) if resolve else name.rpartition("@")[2] for name in names]
    if resolve and not _is_mine(addresses[0]):
        raise LaunchError(
            f"--hosts: {names[0]} ({addresses[0]}) is not an address of this machine; the first host is the one the "
            "learner runs on, and gpu.sh is started there"
        )
    if len(names) == 1:
        return [Host(name=names[0], address=_LOOPBACK, local=True)]
    if loopback := [name for name, address in zip(names, addresses, strict=True) if _misleads(name, address)]:
        raise LaunchError(
            f"{loopback[0]}: other hosts cannot reach it at the loopback address that this machine knows "
            "it by; give its address in the network instead"
        )
    pairs = zip(names, addresses, strict=True)
    return [Host(name=name, address=address, local=i == 0) for i, (name, address) in enumerate(pairs)]


def _address(name: str) -> str:
    try:
        address = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise LaunchError(f"{name}: its address cannot be found ({error})") from None
    return str(address)


def _misleads(name: str, address: str) -> bool:
    """Return whether a name resolves to loopback: Debian gives a machine's own name the address 127.0.1.1."""
    return name.rpartition("@")[2] != address and ipaddress.ip_address(address).is_loopback


def _is_mine(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def require_free_port(host: str, address: str, port: int, *, option: str) -> None:
    """Raise :class:`LaunchError` if the port is taken on this machine, or the address is not this machine's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise LaunchError(
                f"{host}: cannot listen on {address}:{port}: {error.strerror}; choose other ports with {option}"
            ) from None


def check_command(host: Host, device: str) -> Command:
    """Return the command that tells whether a host can take part; on CUDA it lists the GPUs."""
    return Command(name=host.name, host=host, argv=LIST_GPUS if device == "cuda" else ("true",))


def inspect(hosts: Sequence[Host], device: str, root: Path) -> dict[Host, list[Gpu]]:
    """Return the GPUs of every host; hosts are queried concurrently.

    Raises:
        LaunchError: with what is wrong on each host that cannot be used.
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
        raise LaunchError(f"{host.name}: {_missing(argv[0])}") from None
    said = " ".join((result.stderr or result.stdout).split())
    if not host.local and result.returncode == _SSH_FAILED:
        raise LaunchError(f"{host.name}: ssh failed: {said}; it must let you in without a password (ssh {host.name})")
    if not host.local and result.returncode == _NO_CHECKOUT:
        raise LaunchError(f"{host.name}: there is no {root}; this folder must be at the same path on every host")
    if device != "cuda":
        return []
    if result.returncode == _NOT_FOUND:
        raise LaunchError(f"{host.name}: {_missing('nvidia-smi')}")
    if result.returncode or "No devices were found" in result.stdout:
        raise LaunchError(f"{host.name}: nvidia-smi finds no usable GPU: {said}")
    return usable_gpus(host, result.stdout, os.environ.get("CUDA_VISIBLE_DEVICES") if host.local else None)


def _missing(program: str) -> str:
    if program != "nvidia-smi":
        return f"{program} is not installed"
    return f"there is no nvidia-smi, so no NVIDIA driver: install driver {OLDEST_DRIVER} or newer, or use --device cpu"


def usable_gpus(host: Host, listing: str, visible: str | None = None) -> list[Gpu]:
    """Parse the GPUs in the output of :data:`LIST_GPUS`.

    Args:
        host: for messages.
        listing: output of the command.
        visible: ``CUDA_VISIBLE_DEVICES`` (indices or UUIDs), if it is set: other GPUs are left alone.

    Raises:
        LaunchError: there is none, or the driver is too old.
    """
    gpus = [_parse(host, line) for line in listing.splitlines() if line.strip()]
    if gpus and int(gpus[0].driver.partition(".")[0]) < OLDEST_DRIVER:
        raise LaunchError(
            f"{host.name}: NVIDIA driver {gpus[0].driver} is too old; torch and jax for CUDA 13 need "
            f"{OLDEST_DRIVER} or newer"
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


def _parse(host: Host, line: str) -> Gpu:
    match = _GPU.fullmatch(line.strip())
    if match is None:
        raise LaunchError(f"{host.name}: nvidia-smi is not understood: {line.strip()!r}")
    return Gpu(index=int(match["index"]), uuid=match["uuid"], name=match["name"], driver=match["driver"])
