"""Plans for GPUs, compiled by XLA's CUDA compiler in the environment that it has for itself."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.plan.recipe import recipe

ROOT = Path(__file__).parents[4]
PYTHON = Path(os.environ.get("JAX_AGENT_RL_CUDA_VENV", ROOT / ".venv-cuda")) / "bin" / "python"
ONE_LAYOUT = ("rollout.jetstream.mesh.tensor=null", "learner.mesh.tensor=1")

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason=f"no {PYTHON}: ./launch/cuda_environment.sh makes it, with XLA's CUDA compiler",
)


def run(*command: str | Path) -> str:
    """Return what a program of that environment prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [PYTHON, *command], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def planned(folder: Path, topology: str, *overrides: str) -> dict[str, Any]:
    """Return a plan as JSON."""
    file = folder / "run" / "recipe.yaml"
    if not file.exists():
        recipe(folder / "run")
    command = ("-m", "jax_agent_rl.cli", "plan", file, "--topology", topology, "--json")
    output = run(*command, *ONE_LAYOUT, *overrides)
    return json.loads(output.splitlines()[-1])


def program(plan: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [program for program in plan["programs"] if program["name"] == name]
    return found


def test_a_run_on_two_gpus_is_compiled_and_what_it_takes_is_known(tmp_path: Path):
    plan = planned(tmp_path, "h100:2", "learner.mesh.fsdp=2", "learner.remat=full")
    assert plan["fits"] and plan["chips"] == 2
    gradient = program(plan, "policy gradient")
    assert gradient["exchanged"]["fsdp"] > 0
    assert gradient["memory"]["temporaries"] > 0
    for compiled in plan["programs"]:
        assert compiled["predicted"] >= 0.9 * max(compiled["seconds"].values())

    keeping = planned(tmp_path, "h100:2", "learner.mesh.fsdp=2", "learner.remat=none")
    kept = program(keeping, "policy gradient")
    assert kept["memory"]["temporaries"] > gradient["memory"]["temporaries"]


def test_adapters_are_trained_on_two_hosts_that_exchange_their_gradients(tmp_path: Path):
    changes = ("learner.mesh.data=2", "learner.mesh.fsdp=1", "learner.lora.rank=4")
    plan = planned(tmp_path, "2*h100:1", *changes)
    gradient = program(plan, "policy gradient")
    assert plan["meshes"]["learner"]["data"] == 2
    assert set(gradient["exchanged"]) == {"data"}
    assert "policy frozen" in gradient["memory"]


def compared(subject: str, *sizes: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of a benchmark's kernels, and of XLA's operations in their place."""
    script = "benchmarks/cuda_kernels.py"
    paths = ("--paths", "Triton kernels", "XLA's blocks", "XLA's ragged_dot")
    output = run(script, "--described", "h100", "--json", "--only", subject, *sizes, *paths)
    kernels, operations = json.loads(output.splitlines()[-1])
    assert kernels["spilled"] == 0
    assert 0 < kernels["registers"] <= 255
    assert kernels["instructions"] > 0
    assert kernels["temporaries"] < operations["temporaries"]
    return kernels, operations


@pytest.mark.parametrize("head_size", ["64", "128", "256"])
def test_the_kernels_of_attention_spill_nothing_and_take_less_memory_than_blocks(head_size: str):
    sizes = ("--length", "1024", "--heads", "8", "--kv-heads", "4", "--head-size", head_size)
    kernels, blocks = compared("attention", *sizes)
    assert kernels["kernels"] < blocks["kernels"]


@pytest.mark.parametrize("length", ["64", "1024"])
def test_the_kernels_of_experts_spill_nothing_and_multiply_no_row_with_every_matrix(length: str):
    """Few rows of each expert, as in decoding, and more than a tile."""
    sizes = ("--length", length, "--experts", "16", "--hidden-size", "1024", "--expert-size", "768")
    kernels, masked = compared("experts", *sizes)
    assert kernels["predicted"] < masked["predicted"]
