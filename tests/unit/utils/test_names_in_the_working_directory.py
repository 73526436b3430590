"""A user's folder or file that has the name of a package or of a module of Python's own stands in
nobody's way.
"""

import ast
import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from jax_agent_rl import rewards
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks.metrics import PACKAGES, check_sinks
from jax_agent_rl.rewards.workers import FunctionWorkers
from jax_agent_rl.utils.packages import import_installed, is_installed, package_folder
from jax_agent_rl.utils.plugins import load_user_module
from jax_agent_rl.utils.startup import own_environment, own_python
from tests.messages import raises
from tests.unit.rewards.test_function_workers import row

ROOT = Path(__file__).parents[3]
SHADOWED = ("random", "types", "queue", "json", "logging")
"""Modules of Python's own that everything imports."""


@pytest.fixture
def cwd(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_mere_folder_is_no_installed_package(cwd: Path):
    (cwd / "wandb_or_so" / "run-1").mkdir(parents=True)
    assert not is_installed("wandb_or_so")
    assert package_folder("wandb_or_so") is None
    with pytest.raises(ImportError, match="wandb_or_so"):
        import_installed("wandb_or_so")
    (cwd / "real_one").mkdir()
    (cwd / "real_one" / "__init__.py").touch()
    assert is_installed("real_one")
    assert package_folder("real_one") == str(cwd / "real_one")
    assert is_installed("numpy")
    assert is_installed("json")
    assert not is_installed("there_is_none")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_folder_of_a_logger_is_not_the_logger(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    """W&B makes a folder ``wandb`` in the working directory; without the package, Python imports
    that one.
    """
    package = PACKAGES[name]
    (cwd / package).mkdir()
    for known in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setattr(sys, "path", [str(cwd)])
    with raises(ConfigError, key="trainer.logger", value=name):
        check_sinks([name])


def test_no_code_asks_for_a_package_in_a_way_that_a_folder_answers():
    asking = []
    for folder in ("jax_agent_rl", "gpu_backend"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                function = getattr(node, "func", None)
                if "find_spec" in (getattr(function, "attr", ""), getattr(function, "id", "")):
                    asking.append(str(file.relative_to(ROOT)))
    allowed = {
        "jax_agent_rl/utils/packages.py",
        "jax_agent_rl/tools/verl.py",  # looks at what it finds
        "jax_agent_rl/utils/fingerprints.py",  # takes files alone
        "jax_agent_rl/tool_server/sandbox/isolation.py",  # likewise
    }
    assert set(asking) == allowed


@pytest.mark.parametrize("module", SHADOWED)
def test_a_process_of_ours_does_not_import_the_users_files_for_pythons_own(cwd: Path, module: str):
    (cwd / f"{module}.py").write_text("raise RuntimeError('the wrong one')\n")
    program = f"import {module}, jax_agent_rl; print({module}.__file__)"
    environment = {k: v for k, v in own_environment().items() if k != "PYTHONSAFEPATH"}
    process = subprocess.run(
        own_python("-c", program), env=environment, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0 and str(cwd) not in process.stdout, process.stderr


def test_every_python_that_this_package_starts_is_started_so():
    starting = set()
    for file in (ROOT / "jax_agent_rl").rglob("*.py"):
        if "sys.executable" in file.read_text():
            starting.add(str(file.relative_to(ROOT / "jax_agent_rl")))
    assert starting == {
        "agents/command/containers.py",  # in a program that runs inside a container
        "deploy/launch/__main__.py",  # from a checkout, before anything is installed
        "deploy/launch/ray_process.py",  # likewise
        "deploy/quickstart/commands.py",  # as the user of the folder does
        "tool_server/sandbox/sandbox.py",  # the interpreter of programs, in a sandbox
        "utils/startup.py",
    }


def test_reward_functions_run_beside_such_files(cwd: Path):
    for module in SHADOWED:
        (cwd / f"{module}.py").write_text("raise RuntimeError('the wrong one')\n")
    (cwd / "my_rewards.py").write_text(
        "from jax_agent_rl.rewards import register_reward\n"
        "@register_reward('beside', override=True)\n"
        "def compute_score(solution_str):\n    import random\n    return 1.0\n"
    )
    rewards.load_rewards("my_rewards.py")
    workers = FunctionWorkers("my_rewards.py", size=1)
    try:
        assert asyncio.run(rewards.score(row("beside"), workers=workers)).reward == 1.0
    finally:
        workers.close()


@pytest.mark.parametrize("name", ["calendar", "code", "types"])
def test_a_users_module_with_pythons_name_is_named_as_a_file(cwd: Path, name: str):
    (cwd / f"{name}.py").write_text("FOUND = 'mine'\n")
    with raises(ConfigError, key="tools.function_tool_path", value=f"'{name}'", fix=f"{name}.py"):
        load_user_module(name, key="tools.function_tool_path")
    assert load_user_module(f"{name}.py", key="tools.function_tool_path").FOUND == "mine"


def test_a_folder_without_a_module_is_told_as_such(cwd: Path):
    (cwd / "my_tools_folder").mkdir()
    with raises(ConfigError, key="reward.path", value="'my_tools_folder'", fix="__init__.py"):
        load_user_module("my_tools_folder", key="reward.path")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os\nx = 1\nos.no_such", ["AttributeError", "broken.py:3"]),
        (
            "open('there_is_no_such_file.json')",
            ["FileNotFoundError", "there_is_no_such_file.json", "broken.py:1"],
        ),
        ("import sys\nsys.exit(3)", ["exits", "3", "broken.py:2"]),
        ("def f(:\n", ["SyntaxError"]),
        ("import not_there.sub", ["it imports 'not_there', which is not installed"]),
    ],
)
def test_what_goes_wrong_while_a_file_is_imported_is_told_with_key_and_line(
    cwd: Path, code: str, words: list[str]
):
    (cwd / "broken.py").write_text(code)
    with pytest.raises(ConfigError) as refused:
        load_user_module("broken.py", key="reward.path")
    assert "reward.path='broken.py'" in str(refused.value)
    assert all(word in str(refused.value) for word in words)
