"""Processes with simulated devices: their number is fixed when jax starts, so such scripts run on their own."""

from __future__ import annotations

import os
import subprocess

from tests.warm import python

COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false"
)
"""For XLA_FLAGS. Compiling is most of what tests of small models do; so it takes a quarter of the time."""


_PATIENTLY = "--xla_cpu_collective_call_terminate_timeout_seconds=400 --xla_cpu_collective_timeout_seconds=400"
"""Else a device for which a busy machine has no time ends the process after 40 seconds."""


def environment_with(devices: int, *, flags: str = COMPILE_QUICKLY) -> dict[str, str]:
    """Variables of a process with so many devices."""
    return os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {_PATIENTLY} {flags}",
        "NPROC": "16",  # XLA's threads: devices wait for each other in them, and a few cores' would all be waiting
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.getcwd(),
        "PYTHONUNBUFFERED": "1",
    }


def run_on_devices(script: str, *arguments: str, devices: int = 8) -> list[str]:
    """The lines a script prints; its errors fail the test."""
    command = [*python(), "-c", script, *arguments]
    result = subprocess.run(command, env=environment_with(devices), capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return result.stdout.splitlines()
