"""What the project depends on: its licence is listed, its tested version is pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
THIRD_PARTY = ROOT / "third_party"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal(name: str) -> str:
    """As indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    return normal(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])


def pinned(file: str) -> set[str]:
    """Names a constraints file pins, with those of the files it includes."""
    names: set[str] = set()
    for line in (THIRD_PARTY / file).read_text().splitlines():
        if line.startswith("-c "):
            names |= pinned(line.removeprefix("-c ").strip())
        elif line and not line.startswith("#"):
            assert "==" in line, f"{file}: {line} pins no version"
            names.add(name_of(line))
    return names


def direct(*extras: str) -> set[str]:
    """What the package itself and these of its extras name."""
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    return {name_of(line) for line in wanted} - {"jax-agent-rl"}


def test_every_direct_dependency_has_its_licence_listed():
    rows = [line.split("|")[1] for line in (THIRD_PARTY / "licences.md").read_text().splitlines() if "|" in line]
    listed = {normal(word) for row in rows for word in re.findall(r"[\w.-]+", row)}
    dependencies = direct(*PROJECT["optional-dependencies"]) | pinned("no-deps.txt") | pinned("test-no-deps.txt")
    assert dependencies - listed == set()


def test_the_environments_that_scripts_make_install_pinned_versions_of_all_they_ask_for():
    development = set(PROJECT["optional-dependencies"]) - {"gpu", "tpu", "verifiers", "vllm-cpu"}
    assert direct(*development) - pinned("constraints-cpu.txt") == set()
    assert direct("gpu") - pinned("constraints-gpu.txt") == set()
    assert direct("tpu") - pinned("constraints-tpu.txt") == set()
    assert direct("vllm-cpu") - pinned("constraints-vllm-cpu.txt") == set()


def test_a_version_stands_in_one_constraints_file_once():
    for file in THIRD_PARTY.glob("constraints-*.txt"):
        lines = [line for line in file.read_text().splitlines() if "==" in line and not line.startswith("#")]
        names = [name_of(line) for line in lines if ";" not in line]
        assert len(names) == len(set(names)), file.name


def test_every_extra_is_explained_where_installing_is():
    page = (ROOT / "docs" / "index.md").read_text()
    rows = [line.split("|")[1:] for line in page.splitlines() if line.startswith("| `")]
    named = {word for row in rows for cell in row for word in re.findall(r"`([\w-]+)`", cell)}
    assert set(PROJECT["optional-dependencies"]) - named == set()
