"""``launch/lib.sh``: the project's own environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.messages import assert_message

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("leftover", "is_made"), [("nothing", True), ("a Python without pip", True), ("all", False)]
)
def test_an_environment_that_was_interrupted_is_made_again(
    leftover: str, is_made: bool, tmp_path: Path
):
    if leftover != "nothing":
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    if leftover == "all":
        (tmp_path / "pip.py").touch()
    variables = {
        "JAX_AGENT_RL_VENV": str(tmp_path),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path),
    }
    script = "source launch/lib.sh; DRY_RUN=1; make_environment dev"
    result = subprocess.run(
        ["bash", "-ec", script],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (f"-m venv {tmp_path}" in result.stdout) == is_made, result.stdout


def test_too_little_disk_ends_before_anything_is_installed(tmp_path: Path):
    df = tmp_path / "df"
    df.write_text("#!/bin/sh\necho header; echo /dev/disk 9000000 7000000 1900000 79% /\n")
    df.chmod(0o755)
    venv = tmp_path / "no such folder" / "venv"
    variables = {
        "JAX_AGENT_RL_VENV": str(venv),
        "PYTHON": sys.executable,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    result = subprocess.run(
        ["bash", "-ec", "source launch/lib.sh; make_environment"],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1 and not venv.parent.exists()
    assert_message(result.stderr, key=venv, value=("2 GB", "1 GB"))


def test_a_python_that_packages_have_no_builds_for_is_refused():
    script = "source launch/lib.sh; NEWEST_PYTHON=3.10; find_python"
    result = subprocess.run(
        ["bash", "-ec", script],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert_message(result.stderr, key="Python", value=("3.11", "3.10"))
    assert sys.executable in result.stderr


def executable(file: Path, program: str) -> None:
    file.write_text(f"#!/bin/bash\n{program}\n")
    file.chmod(0o755)


NO_PYTHON = (
    "source launch/lib.sh; unset PYTHON; NEWEST_PYTHON=3.10; ROOT={root};"
    " PATH={root}:$PATH; find_python"
)
FETCHES = 'echo "$@" >>{root}/asked; if [ "$2" = find ]; then echo /fetched/python; fi'


def test_where_no_python_is_usable_uv_fetches_one(tmp_path: Path):
    executable(tmp_path / "uv", FETCHES.format(root=tmp_path))
    script = NO_PYTHON.format(root=tmp_path)
    result = subprocess.run(
        ["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout == "/fetched/python\n"
    assert (tmp_path / "asked").read_text() == "python install --quiet 3.12\npython find 3.12\n"


def test_where_nothing_can_be_fetched_the_message_says_what_to_set(tmp_path: Path):
    executable(tmp_path / "uv", "exit 1")
    result = subprocess.run(
        ["bash", "-ec", NO_PYTHON.format(root=tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert "set PYTHON=/path/to/python" in result.stderr
