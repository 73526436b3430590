"""Accelerators: those jax uses, and those the machine has."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jax_agent_rl.deploy.doctor.findings import Finding, Reporter

_PROBE = (
    "import json, jax; d = jax.devices(); "
    "print(json.dumps({'platform': d[0].platform, 'kind': d[0].device_kind, 'count': len(d)}))"
)
_GOOGLE = "0x1ae0"  # PCI vendor
PATIENCE_SECONDS = 90.0


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Devices that jax computes on: platform (``cpu``, ``gpu`` or ``tpu``), model and count."""

    platform: str
    kind: str
    count: int


def hardware(root: Path = Path("/")) -> set[str]:
    """Return which of ``gpu`` (NVIDIA) and ``tpu`` this machine or container has, whatever is installed.

    Args:
        root: of the file system that is looked at.
    """
    found = set()
    if any((root / "dev").glob("nvidia[0-9]*")):
        found.add("gpu")
    vendors = (file.read_text().strip() for file in (root / "sys/bus/pci/devices").glob("*/vendor"))
    reachable = any((root / "dev").glob("accel[0-9]*")) or any((root / "dev/vfio").glob("[0-9]*"))
    if reachable and _GOOGLE in vendors:
        found.add("tpu")
    return found


async def jax_devices() -> Devices | str:
    """Query jax in a process of its own: a device that another process holds makes it wait, or fail.

    Returns:
        the devices, or why there are none.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROBE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        return f"jax found no device within {PATIENCE_SECONDS:g} s; does another process hold the accelerator?"
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        return (err.decode(errors="replace").strip().splitlines() or ["jax.devices() failed"])[-1]
    return Devices(**json.loads(out.decode().splitlines()[-1]))


def judge(report: Reporter, seen: Devices | str, present: set[str], *, need: int, forced: str) -> Iterable[Finding]:
    """Compare what jax sees with the hardware present.

    Args:
        report: makes the findings.
        seen: of :func:`jax_devices`.
        present: of :func:`hardware`.
        need: devices that learner and engine of the configuration take in this process.
        forced: the variable JAX_PLATFORMS.
    """
    if isinstance(seen, str):
        yield report.fail(seen)
        return
    yield report.ok(f"jax computes on {seen.count} x {seen.kind} ({seen.platform})")
    for kind in sorted(present - {seen.platform}):
        extra = "cuda13" if kind == "gpu" else "tpu"
        remedy = f"unset JAX_PLATFORMS (it is {forced!r})" if forced else f"install it: pip install -U 'jax[{extra}]'"
        yield report.warn(f"this machine has a {kind.upper()}, which jax does not use: {remedy}")
    if seen.count < need:
        yield report.fail(
            f"learner.mesh and rollout.jetstream need {need} devices, there are {seen.count}; make the meshes smaller"
            + (f", or set XLA_FLAGS=--xla_force_host_platform_device_count={need}" if seen.platform == "cpu" else "")
        )


async def check(report: Reporter, *, need: int = 1) -> Iterable[Finding]:
    """Check the accelerators; see :func:`judge`."""
    return list(judge(report, await jax_devices(), hardware(), need=need, forced=os.environ.get("JAX_PLATFORMS", "")))
