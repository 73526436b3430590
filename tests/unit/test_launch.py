"""The launch scripts: valid shell, and --dry-run prints what would run without running it."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("script", ["launch/lib.sh", "launch/local.sh", "launch/test.sh", ".ci/run"])
def test_scripts_are_valid_shell(script: str):
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def dry_run(script: str, tmp_path: Path, *arguments: str) -> list[str]:
    import os

    environment = os.environ | {"JAX_AGENT_RL_VENV": str(tmp_path / "venv")}
    command = [ROOT / "launch" / script, "--dry-run", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert not (tmp_path / "venv").exists()
    return [line.removeprefix("+ ") for line in result.stdout.splitlines() if line.startswith("+ ")]


def test_local_brings_model_and_data_and_passes_overrides_on(tmp_path: Path):
    commands = dry_run("local.sh", tmp_path, "seed=3", "--resume")
    tails = [command.partition("jax-agent-rl ")[2] for command in commands if "jax-agent-rl " in command]
    assert tails == [
        "fetch-model",
        "prepare calculator --out data/calculator",
        "train configs/quickstart.yaml seed=3 --resume",
    ]
    pip = f"{tmp_path}/venv/bin/python -m pip install "
    assert any(command.startswith(pip) and "--no-deps -r" in command for command in commands)
    assert any(command.startswith(pip) and f"-e {ROOT}" in command for command in commands)
    assert not any("torch" in command for command in commands)


def test_test_runs_lint_import_rules_and_pytest_with_its_arguments(tmp_path: Path):
    commands = dry_run("test.sh", tmp_path, "-k", "config")
    assert any("[dev,environments,math]" in command for command in commands)
    last = [command.split("/")[-1] for command in commands[-2:]]
    assert last == ["lint-imports", "python -m pytest --durations=10 -k config"]
