"""What is handed out: the wheel's content, and the extras that messages and pages promise."""

from __future__ import annotations

import re
import tomllib
import zipfile
from email import message_from_bytes

import pytest

from tests.wheel import PACKAGES, ROOT, build_wheel

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("build")))


def test_it_holds_the_packages_and_recipes_and_nothing_else(
    wheel: zipfile.ZipFile,
):
    files = {
        str(file.relative_to(ROOT))
        for name in PACKAGES
        for file in (ROOT / name).rglob("*")
        if file.is_file()
    }
    expected = {file for file in files if "__pycache__" not in file}
    configs = ROOT / "configs"
    expected |= {
        f"jax_agent_rl/recipes/{file.relative_to(configs)}" for file in configs.rglob("*.yaml")
    }
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == expected


def test_it_is_marked_as_typed_and_carries_its_licence(wheel: zipfile.ZipFile):
    names = wheel.namelist()
    assert "jax_agent_rl/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_its_command_and_extras_are_those_of_pyproject(wheel: zipfile.ZipFile):
    (folder,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = message_from_bytes(wheel.read(f"{folder}/METADATA"))
    assert set(metadata.get_all("Provides-Extra") or ()) == set(EXTRAS)
    assert (
        "jax-agent-rl = jax_agent_rl.cli:main" in wheel.read(f"{folder}/entry_points.txt").decode()
    )


def test_every_extra_that_a_message_page_or_script_names_exists():
    texts = [
        file
        for folder in (*PACKAGES, "docs", "examples", "launch", "third_party", "docker")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".md", ".sh", ".ipynb", ".Dockerfile"}
    ]
    for pattern, minimum in (
        (r"jax_agent_rl\[([a-z,-]+)\]", 10),
        (r"install_command\([\"']([a-z-]+)[\"']\)", 15),
    ):
        named = {
            (extra, str(file.relative_to(ROOT)))
            for file in [*texts, ROOT / "README.md"]
            for extras in re.findall(pattern, file.read_text())
            for extra in extras.split(",")
        }
        assert len(named) > minimum  # the pattern still finds them
        assert {(extra, file) for extra, file in named if extra not in EXTRAS} == set()
