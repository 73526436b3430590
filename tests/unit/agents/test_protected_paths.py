"""Which changes of a container leave nothing that tests could prove."""

import os
import subprocess
import sys

import pytest

from jax_agent_rl.agents.command.containers import LIBRARIES, LIST_PATHS, ProtectedPaths

PATHS = ProtectedPaths(
    python="/usr/bin/python3.12",
    version=(3, 12),
    commands=frozenset({"/usr/bin", "/usr/local/bin"}),
    names=frozenset({"python3", "bash", "pytest"}),
    libraries=frozenset({"/usr/lib", "/usr/lib/python3/dist-packages", "/opt/modules"}),
    folders=frozenset({"/usr/lib", "/usr/lib/python3", "/usr/lib/python3/dist-packages"}),
    targets=frozenset({"/etc/python3.12/sitecustomize.py", "/etc/alternatives/awk", "/opt/node"}),
)


@pytest.mark.parametrize(
    "change",
    [
        "C /usr/bin/python3",
        "D /usr/bin/bash",
        "A /usr/local/bin/bash",
        "A /usr/local/bin/pyvenv.cfg",
        "A /usr/pyvenv.cfg",
        "C /usr/lib/x86_64-linux-gnu/libc.so.6",
        "A /usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libc.so.6",
        "A /usr/lib/python3/dist-packages/sitecustomize.py",
        "A /usr/lib/python3/dist-packages/x.pth",
        "C /usr/lib/python3/dist-packages/_pytest/main.py",
        "A /usr/lib/python3/dist-packages/_pytest/main.abi3.so",
        "D /usr/lib/python3/dist-packages",
        "A /opt/modules",
        "A /opt/modules/json.py",
        "A /etc/ld.so.preload",
        "C /etc/ld.so.cache",
        "A /etc/ld.so.conf.d/x.conf",
        "C /etc/ssl/openssl.cnf",
        "A /etc/python3.12/sitecustomize.py",
        "C /etc/alternatives/awk",
        "A /opt/node/module.js",
        "A /conftest.py",
        "A /pytest.ini",
    ],
)
def test_a_change_of_what_tests_run_on_is_forbidden(change):
    honest = "C /etc\nA /etc/left\nC /usr/lib/python3\n"
    assert PATHS.forbidden(honest + change + "\nA /work/a", "/work") == [change]


@pytest.mark.parametrize(
    "change",
    [
        "C /usr",
        "C /usr/lib",
        "C /usr/lib/python3/dist-packages",
        "A /usr/lib/python3/dist-packages/__pycache__",
        "A /usr/lib/python3/dist-packages/_pytest/__pycache__/main.cpython-312.pyc",
        "A /usr/local/bin/hello",
        "A /usr/library/x",
        "C /etc/hosts",
        "A /root/.bashrc",
        "A /work/conftest.py",
        "A /work/python3",
        "D /work",
        "A /tests/check.py",
        "A /var/lib/x",
        "",
    ],
)
def test_other_changes_are_what_the_tests_are_about(change):
    assert PATHS.forbidden(change, "/work") == []


def test_a_task_may_work_anywhere():
    assert PATHS.forbidden("A /conftest.py\nA /setup.cfg", "/") == []
    assert PATHS.forbidden("A /usr/lib/mine/x", "/usr/lib/mine") == []
    assert PATHS.forbidden("A /usr/lib/mine/x", "/") == ["A /usr/lib/mine/x"]


def test_a_name_with_a_line_break_hides_nothing():
    assert PATHS.forbidden("A /usr/lib/a\nA /tmp/b", "/work") == ["A /usr/lib/a"]


def test_the_probe_finds_the_interpreter_its_modules_and_commands(tmp_path):
    (tmp_path / "own" / "inside").mkdir(parents=True)
    (tmp_path / "own" / "first").symlink_to("../second")
    (tmp_path / "second").symlink_to(tmp_path / "third")
    (tmp_path / "own" / "stays").symlink_to("inside")
    env = {
        "PATH": f"{os.path.dirname(sys.executable)}:/usr/bin",
        "PYTHONPATH": f"relative:{tmp_path / 'own'}",
    }
    command = [sys.executable, "-I", "-c", LIST_PATHS, f'["{LIBRARIES[0]}"]']
    listing = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    paths = ProtectedPaths.model_validate_json(listing)
    assert paths.version == sys.version_info[:2]
    assert paths.python == sys.executable
    assert "/usr/bin" in paths.commands
    assert "ls" in paths.names
    assert {str(tmp_path / "own"), os.path.dirname(os.__file__)} <= paths.libraries
    assert {str(tmp_path / "second"), str(tmp_path / "third")} <= paths.targets
    assert str(tmp_path / "own" / "inside") not in paths.targets
    assert str(tmp_path / "own" / "inside") in paths.folders
    assert "relative" not in paths.libraries
