"""How checks run and report, and the checks of the machine.

They look at interpreter, packages, cores, memory, disk, ports and accelerators. A check that fails,
raises or hangs is a finding, and hides no other.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from jax_agent_rl.errors import ConfigError, JaxAgentRLError
from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.utils.files import cache_root
from jax_agent_rl.utils.memory import CGROUP, read_limit, usable_memory
from jax_agent_rl.utils.network import listen_on
from jax_agent_rl.utils.packages import DISTRIBUTION, install_command, is_installed
from jax_agent_rl.utils.startup import own_python


class Status(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    """The run may start; read it."""
    FAIL = "fail"
    """The run would not start, or not do what it is meant to."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of a check.

    Attributes:
        text: what was found and, unless ok, what to do.
    """

    check: str
    status: Status
    text: str


@dataclass(frozen=True)
class Reporter:
    """The findings of one check."""

    check: str
    findings: list[Finding] = field(default_factory=list)

    def ok(self, text: str) -> None:
        self.add(Status.OK, text)

    def warn(self, text: str) -> None:
        self.add(Status.WARN, text)

    def fail(self, text: str) -> None:
        self.add(Status.FAIL, text)

    def add(self, status: Status, text: str) -> None:
        self.findings.append(Finding(check=self.check, status=status, text=text))


class UnmetError(Exception):
    """A check lacks what an earlier one should have found."""


Check = Callable[[Reporter], Awaitable[None]]
"""Reports its findings; whatever it raises is reported as well."""


async def run_checks(
    checks: Iterable[tuple[str, Check]], *, timeout: float
) -> AsyncIterator[Finding]:
    """Yield the findings of named checks in their order; each may take ``timeout`` seconds."""
    for name, check in checks:
        report = Reporter(name)
        try:
            async with asyncio.timeout(timeout):
                await check(report)
        except UnmetError as error:
            report.warn(f"not checked: {error}")
        except ConfigError as error:
            for problem in error.problems:
                report.fail(problem)
        except JaxAgentRLError as error:
            report.fail(str(error))
        except TimeoutError:
            report.fail(f"no answer within {timeout:g} s")
        except Exception as error:
            # Raised by the user's code or the machine; the other checks still run.
            report.fail(f"{type(error).__name__}: {error}")
        for finding in report.findings:
            yield finding


MIN_PYTHON = (3, 11)
MIN_DISK = 2 << 30
MIN_DESCRIPTORS = 4096
MIN_PROCESSES = 1024
DEFAULT_PORTS = {5000: "tool-server", 8000: "serve", 8100: "rollout-server"}
_GOOGLE = "0x1ae0"  # PCI vendor
_PROBE = (
    "import json, jax; d = jax.devices(); "
    "print(json.dumps({'platform': d[0].platform, 'kind': d[0].device_kind, 'count': len(d)}))"
)
_PROBE_SECONDS = 90.0


async def interpreter(report: Reporter) -> None:
    """Check Python and the platform."""
    text = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < MIN_PYTHON:
        report.fail(f"{text}: Python {'.'.join(map(str, MIN_PYTHON))} or newer is needed")
    elif platform.system() != "Linux":
        report.warn(
            f"{text}: the sandbox of the tool server needs Linux; run that on another machine"
        )
    else:
        report.ok(text)


async def packages(report: Reporter) -> None:
    """Check that all requirements are met, and list the complete extras."""
    requirements = _requirements()
    if requirements is None:
        report.warn(
            f"{DISTRIBUTION} is not installed, so versions are not compared; run:"
            f" {install_command()}"
        )
        return
    problems = list(missing(requirements, extra=None))
    if problems:
        for problem in problems:
            report.fail(f"{problem}; run: {install_command()}")
        return

    complete_extras = []
    for name in metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []:
        if not list(missing(requirements, extra=name)):
            complete_extras.append(name)
    versions = [f"{name} {metadata.version(name)}" for name in (DISTRIBUTION, "jax", "flax")]
    report.ok(
        f"{', '.join(versions)}; all requirements met; complete extras:"
        f" {', '.join(complete_extras) or 'none'}"
    )
    if is_installed("jetstream"):
        report.ok("google-jetstream is installed: its Driver can run the engine")
    else:
        report.ok(
            "google-jetstream is not installed: the engine needs it only under JetStream's own"
            " Driver"
        )


def _requirements() -> list[str] | None:
    """Return the requirements of the installed distribution; None if it is not installed."""
    try:
        return metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None


def missing(requirements: Sequence[str], *, extra: str | None) -> Iterator[str]:
    """Yield the requirements that are not installed, or installed in an unsupported version.

    Args:
        requirements: requirements of the distribution.
        extra: the extra whose requirements count; None: the ones without an extra count.
    """
    for text in requirements:
        requirement = Requirement(text)
        if not _is_required(requirement, extra):
            continue
        if requirement.name == DISTRIBUTION:  # an extra made of others
            for inner in sorted(requirement.extras):
                yield from missing(requirements, extra=inner)
            continue

        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name}{requirement.specifier} is not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version} is installed, {requirement.specifier} is needed"
            continue

        for inner in sorted(requirement.extras):  # jax[cuda13] is more than jax
            yield from missing(metadata.requires(requirement.name) or [], extra=inner)


def _is_required(requirement: Requirement, extra: str | None) -> bool:
    """Return whether an extra has this requirement of its own; None: the distribution itself."""
    marker = requirement.marker
    required_always = marker is None or marker.evaluate({"extra": ""})
    if not extra:
        return required_always
    return marker is not None and marker.evaluate({"extra": extra}) and not required_always


def require_extra(report: Reporter, extra: str, setting: str) -> None:
    """Check that the packages of an extra, which a setting needs, are installed."""
    requirements = _requirements() or []
    problems = "; ".join(missing(requirements, extra=extra))
    if not any(f'extra == "{extra}"' in text for text in requirements):
        report.warn(
            f"{setting} needs the extra {extra!r}, which the installed {DISTRIBUTION} does not"
            " list; reinstall it"
        )
    elif problems:
        report.fail(f"{setting} needs the extra {extra!r} ({problems}): {install_command(extra)}")
    else:
        report.ok(f"the extra {extra!r}, for {setting}, is complete")


async def processors(report: Reporter) -> None:
    """Check the cores and memory that this process may use: of the machine, or of its container."""
    cores = usable_cores()
    noun = "core" if cores == 1 else "cores"  # a container may have half a one
    text = f"{cores:g} {noun}, {format_gib(usable_memory())} of memory"
    if cores < 2:
        report.warn(
            f"{text}: tools and engine will wait for each other; 2 cores or more are better"
        )
    else:
        report.ok(text)


def usable_cores() -> float:
    """Return the cores allowed by affinity and the container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    quota, _, period = read_limit(CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        return min(cores, int(quota) / int(period))
    return cores


async def limits(report: Reporter) -> None:
    """Check the shell's resource limits."""
    unlimited = resource.RLIM_INFINITY
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    few_files = files != unlimited and files < MIN_DESCRIPTORS
    few_processes = processes != unlimited and processes < MIN_PROCESSES
    if few_files:
        report.warn(f"at most {files} open files; many connections need more: ulimit -n {1 << 16}")
    if few_processes:
        report.warn(f"at most {processes} processes; the sandbox starts many: ulimit -u {1 << 15}")
    if not few_files and not few_processes:
        open_files = "unlimited" if files == unlimited else str(files)
        started = "unlimited" if processes == unlimited else str(processes)
        report.ok(f"open files {open_files}, processes {started}")


async def cache_disk(report: Reporter) -> None:
    """Check the folder of models and compiled programs."""
    check_disk(report, cache_root(), need=MIN_DISK, key="JAX_AGENT_RL_CACHE")


def check_disk(report: Reporter, folder: Path, *, need: int, key: str) -> None:
    """Check that a folder can be written, and has the space needed.

    Args:
        folder: need not exist yet.
        need: bytes that a run will write there.
        key: the setting that names the folder.
    """
    existing = folder.expanduser().absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        report.fail(f"{key}={folder}: {existing} cannot be written; choose another")
    elif free < need:
        report.fail(
            f"{key}={folder}: {format_gib(free)} are free, about {format_gib(need)} needed; make"
            " space, or choose another"
        )
    else:
        report.ok(f"{key}={folder}: {format_gib(free)} free")


async def ports(report: Reporter) -> None:
    """Check that the servers' default ports are free."""
    free = []
    in_use = []
    for port, name in DEFAULT_PORTS.items():
        if is_free("127.0.0.1", port):
            free.append(f"{port} ({name})")
        else:
            in_use.append(f"{port} ({name})")
    if in_use:
        report.warn(
            f"in use: {', '.join(in_use)}; fine if that is one of yours, else give another --port"
        )
    else:
        report.ok(f"free: {', '.join(free)}")


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen there."""
    try:
        listen_on(host, port).close()
    except ConfigError:
        return False
    return True


async def sandbox(report: Reporter) -> None:
    """Run a program in the sandbox, as a tool server does when it starts."""
    try:
        await open_sandbox("bubblewrap")
    except ConfigError as error:
        # A warning: not every run needs a sandbox, and the check of rewards fails where one does.
        for problem in error.problems:
            report.warn(problem)
    else:
        report.ok("bubblewrap holds: a program ran in it, behind its limits")


def format_gib(size: float) -> str:
    """Format bytes."""
    return f"{size / (1 << 30):.1f} GiB"


def format_counts(counts: Counter[str]) -> str:
    """Format the most common names with their counts."""
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(8))


# --- accelerators ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices that jax computes on.

    Attributes:
        platform: ``cpu``, ``gpu`` or ``tpu``.
        kind: the model.
    """

    platform: str
    kind: str
    count: int


FindIdle = Callable[[int], Iterable[str]]
"""Returns what to change for devices that a run would leave idle, of so many accelerators."""


async def accelerators(report: Reporter, *, need: int, find_idle: FindIdle) -> None:
    """Check the accelerators; see :func:`compare_devices`."""
    forced = os.environ.get("JAX_PLATFORMS", "")
    compare_devices(
        report,
        await find_jax_devices(),
        find_hardware(),
        need=need,
        forced=forced,
        find_idle=find_idle,
    )


def find_hardware(root: Path = Path("/")) -> set[str]:
    """Return which of ``gpu`` (NVIDIA) and ``tpu`` the machine or container has.

    It does not matter what is installed.
    """
    hardware = set()
    devices = root / "dev"
    if any(devices.glob("nvidia[0-9]*")):
        hardware.add("gpu")

    has_accelerator = any(devices.glob("accel[0-9]*")) or any((devices / "vfio").glob("[0-9]*"))
    if has_accelerator:
        for file in (root / "sys/bus/pci/devices").glob("*/vendor"):
            if file.read_text().strip() == _GOOGLE:
                hardware.add("tpu")
                break
    return hardware


async def find_jax_devices() -> Devices | str:
    """Return jax's devices, or why there are none.

    A process of its own queries them: a device held by another process makes it wait, or fail.
    """
    process = await asyncio.create_subprocess_exec(
        *own_python("-c", _PROBE), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )

    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        return (
            f"jax found no device within {_PROBE_SECONDS:g} s; does another process hold the"
            " accelerator?"
        )
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "jax.devices() failed"

    # JAX may print warnings before the answer.
    answer = out.decode().splitlines()[-1]
    return Devices(**json.loads(answer))


def compare_devices(
    report: Reporter,
    jax_devices: Devices | str,
    hardware: set[str],
    *,
    need: int,
    forced: str,
    find_idle: FindIdle,
) -> None:
    """Compare what jax sees with the hardware present.

    Args:
        jax_devices: see :func:`find_jax_devices`.
        hardware: see :func:`find_hardware`.
        need: devices that learner and engine of the configuration take in one process.
        forced: the variable JAX_PLATFORMS.
        find_idle: see :data:`FindIdle`.
    """
    if isinstance(jax_devices, str):
        report.fail(jax_devices)
        return
    count = jax_devices.count
    report.ok(f"jax computes on {count} x {jax_devices.kind} ({jax_devices.platform})")

    for kind in sorted(hardware - {jax_devices.platform}):
        if forced:
            remedy = f"unset JAX_PLATFORMS (it is {forced!r})"
        else:
            extra = "cuda13" if kind == "gpu" else "tpu"
            remedy = f"install it: pip install -U 'jax[{extra}]'"
        report.warn(f"this machine has a {kind.upper()}, which jax does not use: {remedy}")

    if count < need:
        remedy = "make the meshes smaller"
        if jax_devices.platform == "cpu":
            remedy += f", or set XLA_FLAGS=--xla_force_host_platform_device_count={need}"
        report.fail(
            f"learner.mesh and rollout.jetstream need {need} devices, there are {count}; {remedy};"
            " of a configuration for a TPU slice, jax-agent-rl plan tells more"
        )
    elif jax_devices.platform != "cpu":
        for line in find_idle(count):
            report.warn(line)
