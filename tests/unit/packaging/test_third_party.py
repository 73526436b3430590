"""What the project depends on: its licence is listed, its tested version is pinned."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
THIRD_PARTY = ROOT / "third_party"
LOCKS = sorted(file.stem for file in (THIRD_PARTY / "locks").glob("*.txt"))
LINUX = {"sys_platform": "linux", "platform_machine": "x86_64"}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
INSTALLATION = (ROOT / "docs" / "installation.md").read_text()


def normal(name: str) -> str:
    """Return the name as indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    return normal(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])


def pinned(file: str) -> set[str]:
    """Names that a file pins."""
    names = set()
    for line in (THIRD_PARTY / file).read_text().splitlines():
        if line and not line.startswith(("#", " ")):
            assert "==" in line, f"{file}: {line} pins no version"
            names.add(name_of(line))
    return names


def direct(*extras: str) -> set[str]:
    """What the package itself and these of its extras name."""
    wanted = [
        *PROJECT["dependencies"],
        *(line for extra in extras for line in PROJECT["optional-dependencies"][extra]),
    ]
    return {name_of(line) for line in wanted} - {"jax-agent-rl"}


def test_every_direct_dependency_has_its_licence_listed():
    rows = [
        line.split("|")[1]
        for line in (THIRD_PARTY / "licences.md").read_text().splitlines()
        if "|" in line
    ]
    listed = {normal(word) for row in rows for word in re.findall(r"[\w.-]+", row)}
    dependencies = (
        direct(*PROJECT["optional-dependencies"])
        | pinned("no-deps.txt")
        | pinned("test-no-deps.txt")
    )
    assert dependencies - listed == set()


def extras_of(lock: str) -> list[str]:
    """The extras that ``launch/lock.sh`` locks together."""
    (words,) = re.findall(
        rf"^lock {lock}\b(.*)$", (ROOT / "launch" / "lock.sh").read_text(), re.MULTILINE
    )
    return words.split()


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_pins_all_that_its_extras_ask_for(lock: str):
    assert direct(*extras_of(lock)) - pinned(f"locks/{lock}.txt") == set()


def test_every_extra_is_in_a_lock():
    named = {extra for lock in LOCKS for extra in extras_of(lock)}
    nested = {
        extra
        for line in PROJECT["optional-dependencies"]["dev"]
        for extra in re.findall(r"[\w-]+", line)
    }
    assert set(PROJECT["optional-dependencies"]) - named - nested == set()


@pytest.mark.parametrize("lock", LOCKS)
def test_what_is_locked_has_the_hashes_of_its_files_and_no_address(lock: str):
    text = (THIRD_PARTY / "locks" / f"{lock}.txt").read_text()
    assert "://" not in text and "index-url" not in text
    for entry in re.split(r"\n(?=\S)", text.strip()):
        assert re.match(r"[\w.-]+(\[[\w,-]+\])?==\S+", entry), entry[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry[:80]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("lock", LOCKS)
def test_locked_versions_are_those_that_the_project_asks_for(lock: str, python: str):
    """No index is needed; ``launch/lock.sh --check`` also finds what packages ask of each other."""
    environment = {"python_version": python, "python_full_version": f"{python}.9", **LINUX}
    versions = {}
    for line in (THIRD_PARTY / "locks" / f"{lock}.txt").read_text().splitlines():
        if line and not line.startswith(("#", " ")):
            requirement = Requirement(line.rstrip("\\ "))
            if requirement.marker is None or requirement.marker.evaluate(environment):
                versions[normal(requirement.name)] = requirement.specifier
    wanted = [*PROJECT["dependencies"]]
    for extra in extras_of(lock):
        wanted += PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        if normal(requirement.name) == "jax-agent-rl":
            continue
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        (pin,) = versions[normal(requirement.name)]
        assert requirement.specifier.contains(pin.version, prereleases=True), (requirement, pin)


def test_every_extra_is_explained_where_installing_is():
    section = INSTALLATION.partition("## Extras")[2].partition("Some extras exclude each other")[0]
    named = set()
    for row in rows_of(section):
        named.update(re.findall(r"`([\w-]+)`", " ".join(row)))
    assert set(PROJECT["optional-dependencies"]) - named == set()


def test_conflicting_extras_are_named_where_installing_is_explained():
    section = INSTALLATION.partition("Some extras exclude each other")[2].partition("\n## ")[0]
    named = set()
    for row in rows_of(section):
        named.update(re.findall(r"`([\w-]+)`", " ".join(row[:2])))
    assert named == {
        item["extra"] for group in PYPROJECT["tool"]["uv"]["conflicts"] for item in group
    }


def rows_of(markdown: str) -> list[list[str]]:
    """Return the cells of the rows that begin with code."""
    return [line.split("|")[1:] for line in markdown.splitlines() if line.startswith("| `")]
