"""The settings of a task's tests end pytest's search for some: pytest itself says which file it
found.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from jax_agent_rl.agents.command import machines

OWN = {
    "none": {},
    "tox.ini without its section": {"tox.ini": b"[tox]\nenvlist = py\n"},
    "setup.cfg without its section": {"setup.cfg": b"[metadata]\nname = x\n"},
    "pyproject.toml without its section": {
        "pyproject.toml": b"[project]\nname = 'x'\nversion = '1'\n"
    },
    "pytest.ini": {"pytest.ini": b"[pytest]\naddopts = -q\n"},
    "tox.ini": {"tox.ini": b"[pytest]\naddopts = -q\n"},
    "setup.cfg": {"setup.cfg": b"[tool:pytest]\naddopts = -q\n"},
    "pyproject.toml": {"pyproject.toml": b"[tool.pytest.ini_options]\naddopts = '-q'\n"},
}


@pytest.mark.parametrize("name", OWN)
def test_settings_that_a_program_left_above_the_tests_are_not_found(name: str, tmp_path: Path):
    check = {"test_check.py": b"def test_it():\n    assert False\n"}
    folder = tmp_path / "tests"
    folder.mkdir()
    for file, content in machines.with_settings({**check, **OWN[name]}).items():
        (folder / file).write_bytes(content)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --collect-only\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "1 failed" in result.stdout, result.stdout
