"""Checks of the machine: interpreter, packages, cores, memory, disk, limits, ports."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from jax_agent_rl.deploy.doctor.findings import Finding, Reporter
from jax_agent_rl.utils.files import cache_root

DISTRIBUTION = "jax_agent_rl"
MIN_PYTHON = (3, 11)
MIN_DISK = 2 << 30
MIN_DESCRIPTORS = 4096
MIN_PROCESSES = 1024
DEFAULT_PORTS = {5000: "tool-server", 8000: "serve", 8100: "rollout-server"}
_CGROUP = Path("/sys/fs/cgroup")


async def interpreter(report: Reporter) -> Iterable[Finding]:
    """Check Python and the platform."""
    version = ".".join(map(str, sys.version_info[:3]))
    text = f"Python {version} on {platform.system()} {platform.machine()}"
    if sys.version_info < MIN_PYTHON:
        return [report.fail(f"{text}: Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed")]
    if platform.system() != "Linux":
        return [report.warn(f"{text}: the sandbox of the tool server needs Linux; run that on another machine")]
    return [report.ok(text)]


async def packages(report: Reporter) -> Iterable[Finding]:
    """Check that all requirements are met, and list the complete extras."""
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return [report.warn(f"{DISTRIBUTION} is not installed, so versions are not compared; run: pip install -e .")]
    wrong = list(missing(requirements, extra=None))
    if wrong:
        return [report.fail(f"{problem}; run: pip install --upgrade {DISTRIBUTION}") for problem in wrong]
    names = metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    complete = [name for name in names if not list(missing(requirements, extra=name))]
    jax, flax = metadata.version("jax"), metadata.version("flax")
    return [
        report.ok(
            f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}, jax {jax}, flax {flax}; all requirements met; complete "
            f"extras: {', '.join(complete) or 'none'}"
        )
    ]


def missing(requirements: Sequence[str], *, extra: str | None) -> Iterator[str]:
    """Yield what is not installed, or installed in an unsupported version.

    Args:
        requirements: as a distribution's metadata has them.
        extra: those of this extra alone; None: those without one.
    """
    for text in requirements:
        requirement = Requirement(text)
        always, asked = (_applies(requirement, of) for of in ("", extra or ""))
        if not asked or (extra and always):
            continue
        if requirement.name == DISTRIBUTION:  # an extra made of others
            for inner in sorted(requirement.extras):
                yield from missing(requirements, extra=inner)
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name}{requirement.specifier} is not installed"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} {found} is installed, {requirement.specifier} is needed"


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def require_extra(report: Reporter, extra: str, why: str) -> Finding:
    """Check that the packages of an extra are installed.

    Args:
        report: makes the finding.
        extra: name of the extra.
        why: the setting that needs it.
    """
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        requirements = []
    if not any(f'extra == "{extra}"' in text for text in requirements):
        return report.warn(
            f"{why} needs the extra {extra!r}, which the installed {DISTRIBUTION} does not list; reinstall it"
        )
    wrong = list(missing(requirements, extra=extra))
    if wrong:
        return report.fail(
            f"{why} needs the extra {extra!r} ({'; '.join(wrong)}): pip install '{DISTRIBUTION}[{extra}]'"
        )
    return report.ok(f"the extra {extra!r}, for {why}, is complete")


async def processors(report: Reporter) -> Iterable[Finding]:
    """Check the cores and memory that this process may use: of the machine, or of its container."""
    cores, memory = usable_cores(), usable_memory()
    text = f"{cores:g} cores, {gib(memory)} of memory"
    if cores < 2:
        return [report.warn(f"{text}: tools and engine will wait for each other; 2 cores or more are better")]
    return [report.ok(text)]


def usable_cores() -> float:
    """Return the cores allowed by affinity and the container's quota."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores


def usable_memory() -> int:
    """Return the bytes of memory of the machine, or of its container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(_CGROUP / "memory.max")
    return min(memory, int(limit)) if limit.isdigit() else memory


def disk(report: Reporter, folder: Path, *, need: int, key: str) -> Finding:
    """Check that a folder can be written, and has the space needed.

    Args:
        report: makes the finding.
        folder: need not exist yet.
        need: bytes a run will write there.
        key: the setting that names it.
    """
    place = folder.expanduser().absolute()
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        return report.fail(f"{key}={folder}: {place} cannot be written; choose another")
    free = shutil.disk_usage(place).free
    if free < need:
        return report.fail(
            f"{key}={folder}: {gib(free)} are free, about {gib(need)} needed; make space, or choose another"
        )
    return report.ok(f"{key}={folder}: {gib(free)} free")


async def cache_disk(report: Reporter) -> Iterable[Finding]:
    """Check the folder of models and compiled programs."""
    return [disk(report, cache_root(), need=MIN_DISK, key="JAX_AGENT_RL_CACHE")]


async def limits(report: Reporter) -> Iterable[Finding]:
    """Check the shell's resource limits."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    findings = []
    if files != resource.RLIM_INFINITY and files < MIN_DESCRIPTORS:
        findings.append(report.warn(f"at most {files} open files; many connections need more: ulimit -n {1 << 16}"))
    if processes != resource.RLIM_INFINITY and processes < MIN_PROCESSES:
        findings.append(report.warn(f"at most {processes} processes; the sandbox starts many: ulimit -u {1 << 15}"))
    return findings or [report.ok(f"open files {_limit(files)}, processes {_limit(processes)}")]


async def ports(report: Reporter) -> Iterable[Finding]:
    """Check that the servers' default ports are free."""
    taken = [f"{port} ({name})" for port, name in DEFAULT_PORTS.items() if not is_free("127.0.0.1", port)]
    if taken:
        return [report.warn(f"in use: {', '.join(taken)}; fine if that is one of yours, else give another --port")]
    return [report.ok(f"free: {', '.join(f'{port} ({name})' for port, name in DEFAULT_PORTS.items())}")]


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a closed one may linger
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def gib(size: float) -> str:
    """Format bytes."""
    return f"{size / (1 << 30):.1f} GiB"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
