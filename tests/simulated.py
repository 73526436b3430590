"""Processes with simulated devices: their number is fixed when jax starts, so such scripts run on
their own.
"""

from __future__ import annotations

import os
import subprocess

from tests.warm import python

COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_cpu_use_fusion_emitters=false"
)
"""For XLA_FLAGS. Compiling is most of what tests of small models do; so it takes a quarter of the
time."""


_WAIT_SECONDS = 90
"""How long a device waits for the others; by default a busy machine ends the process after 40
seconds."""
_DEADLOCK = "Termination timeout for"
"""What XLA says as it ends a process whose devices wait for each other."""


def environment_with(devices: int, *, flags: str = COMPILE_QUICKLY) -> dict[str, str]:
    """Variables of a process with so many devices."""
    timeouts = " ".join(
        f"--xla_cpu_collective_{name}_seconds={_WAIT_SECONDS}"
        for name in ("call_terminate_timeout", "timeout")
    )
    return os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {timeouts} {flags}",
        # XLA's threads: devices wait for each other in them; with as many as a few cores have,
        # all would be waiting.
        "NPROC": "16",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.getcwd(),
        "PYTHONUNBUFFERED": "1",
    }


def run_on_devices(
    script: str, *arguments: str, devices: int = 8, flags: str = COMPILE_QUICKLY
) -> list[str]:
    """Return the lines a script prints; its errors fail the test.

    Simulated devices deadlock once in many hundred runs: XLA:CPU runs collectives that do not
    depend on each other in any order. Such a process is run once more.
    """
    command = [*python(), "-c", script, *arguments]
    environment = environment_with(devices, flags=flags)
    for _ in range(2):
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=500
        )
        if result.returncode >= 0 or _DEADLOCK not in result.stderr:
            break
    assert result.returncode == 0, result.stdout[-1000:] + result.stderr[-3000:]
    return result.stdout.splitlines()
