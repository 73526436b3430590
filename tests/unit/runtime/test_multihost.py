"""Several processes over loopback train as one does, and restore each other's checkpoints."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jax_agent_rl.config import MultihostConfig
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.runtime.multihost import decode_groups, encode_groups, initialize
from jax_agent_rl.types import DropReason
from tests.trajectories import call, group_of, random_groups, trajectory


def run(folder: Path, name: str, *, processes: int, devices: int, mesh: dict, steps: int, restore: bool = False):
    """Runs the job on ``processes`` x ``devices`` and returns what process 0 printed, and the parameters."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    job = {"mesh": mesh, "steps": steps, "restore": restore, "out": str(folder / f"{name}.npz")}
    job |= {"checkpoints": str(folder / "checkpoints")}
    started = []
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.getcwd(),
        "JAX_PLATFORMS": "cpu",
    }
    for number in range(processes):
        several = {"coordinator": f"127.0.0.1:{port}", "num_processes": processes, "process_id": number}
        own = job | {"multihost": several if processes > 1 else {}}
        command = [sys.executable, "-m", "tests.unit.runtime.multihost_worker", json.dumps(own)]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        outputs = [process.communicate(timeout=280) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [p.returncode for p in started] == [0] * processes, "\n".join(err[-3000:] for _, err in outputs)
    with np.load(folder / f"{name}.npz") as arrays:
        return json.loads(outputs[0][0].splitlines()[-1]), [arrays[key] for key in arrays.files]


def test_two_and_four_processes_train_and_restore_as_one_does(tmp_path: Path):
    alone, expected = run(tmp_path / "a", "one", processes=1, devices=1, mesh={}, steps=2)
    two, first = run(tmp_path / "b", "two", processes=2, devices=2, mesh={"data": 2, "expert": 2}, steps=2)
    assert two == pytest.approx(alone, rel=1e-4)
    for a, b in zip(first, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    # Two steps were saved on two processes; the third is made from there on one and on four.
    one, after_one = run(tmp_path / "b", "one", processes=1, devices=1, mesh={}, steps=3, restore=True)
    assert one["begin"] == 2
