"""The wheel, installed where nothing else is, does the main job in an empty folder."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheel import ROOT, build_wheel

CORE_LOCK = ROOT / "third_party" / "locks" / "core.txt"

needs_uv = pytest.mark.skipif(
    importlib.util.find_spec("uv") is None, reason="uv installs the wheel"
)


def run(*command: str | Path, folder: Path, seconds: float) -> str:
    """Return what a command prints, without the variables that lead to this repository."""
    ours = (
        "PYTHON",
        "XLA_",
        "JAX_",
        "TPU_",
    )  # JAX sets the last one, to a libtpu that the wheel's environment has not
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@needs_uv
@pytest.mark.timeout(3000)  # beside other work, compilation alone takes minutes
def test_the_installed_wheel_trains_the_quickstart_in_an_empty_folder(tmp_path: Path):
    wheel = build_wheel(tmp_path)
    venv = tmp_path / "venv"
    uv = [sys.executable, "-m", "uv"]
    run(*uv, "venv", "--python", sys.executable, venv, folder=tmp_path, seconds=120)
    run(
        *(
            *uv,
            "pip",
            "install",
            "--python",
            venv / "bin" / "python",
            "--constraints",
            CORE_LOCK,
            wheel,
        ),
        folder=tmp_path,
        seconds=600,
    )

    empty = tmp_path / "empty"
    empty.mkdir()
    command = venv / "bin" / "jax-agent-rl"
    version = run(command, "--version", folder=empty, seconds=60)
    output = run(
        command,
        "quickstart",
        "trainer.steps=2",
        "trainer.checkpoint_every=2",
        "data.eval_limit=8",
        "rollout.prompts_per_step=2",
        folder=empty,
        seconds=1800,
    )

    assert wheel.name.startswith(f"jax_agent_rl-{version.split()[1]}-")
    (report,) = empty.glob("runs/*/report.html")
    assert (report.parent / "checkpoints" / "2").is_dir()
    assert str(report.relative_to(empty)) in output
