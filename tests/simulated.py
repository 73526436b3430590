"""Scripts on simulated devices: their number is fixed when jax starts, so they run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def run_on_devices(script: str, *arguments: str, devices: int = 8) -> list[str]:
    """The lines a script prints; its errors fail the test."""
    environment = os.environ | {
        # Compiled quickly rather than well: that is most of what such a script does.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
        "NPROC": "16",  # XLA's threads: devices wait for each other in them, and a few cores' would all be waiting
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.getcwd(),
    }
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return result.stdout.splitlines()
