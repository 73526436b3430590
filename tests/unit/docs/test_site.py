"""The site builds, every link leads somewhere, every page is in the navigation, and nothing comes
from elsewhere.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.unit.docs.pages import DOCS, ROOT

REFERENCE = DOCS / "reference"
DESCRIBED = set()
for page in REFERENCE.glob("*.md"):
    DESCRIBED |= set(re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M))
MODULES = (
    "errors",
    "types",
    "learner.advantages",
    "rollout.protocol",
)  # whose own text stands on a page
PUBLIC_PACKAGES = ("agents", "environments", "rewards", "tools", "testing.conformance")


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of ``folder`` strictly."""
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def copy_sources(folder: Path) -> None:
    """Copy what the site is made of: a build writes beside it."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(DOCS, folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "jax_agent_rl").symlink_to(ROOT / "jax_agent_rl")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical", reason="needs the extra docs")
    pytest.importorskip("mkdocstrings_handlers.python", reason="needs the extra docs")
    folder = tmp_path_factory.mktemp("site")
    copy_sources(folder)
    result = build(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "griffe:" not in result.stdout + result.stderr, (
        "a docstring describes what its function does not have"
    )
    return folder / "site"


def test_every_page_and_the_picture_are_there(site: Path):
    pages = {file.relative_to(DOCS).with_suffix("") for file in DOCS.rglob("*.md")}
    built = {file.parent.relative_to(site) for file in site.rglob("index.html")}
    assert {page.parent if page.name == "index" else page for page in pages} <= built
    assert "data_flow.svg" in (site / "concepts" / "index.html").read_text()


def test_pages_load_nothing_from_elsewhere(site: Path):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe)[^>]+src="([^"]+)"', page.read_text())
        loaded += re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="([^"]+)"', page.read_text())
        assert not [address for address in loaded if "//" in address], page


def test_pictures_and_files_that_pages_show_are_there(site: Path):
    for page in site.rglob("index.html"):
        named = re.findall(
            r'<(?:a|img|link|script)[^>]+(?:href|src)="([^"#?:]+)"', page.read_text()
        )
        missing = [name for name in named if not (page.parent / unquote(name)).exists()]
        assert not missing, page


def test_every_page_is_in_the_navigation_once_and_home_comes_first():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n# ")[0]
    named = re.findall(r"([\w/]+\.md)$", navigation, re.M)
    assert sorted(named) == sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))
    assert navigation.splitlines()[0] == "  - Home: index.md"
    first_steps = [
        "installation.md",
        "first_run.md",
        "concepts.md",
        "write/tool.md",
        "training.md",
        "config.md",
    ]
    positions = [named.index(page) for page in first_steps]
    assert positions == sorted(positions)


@pytest.mark.parametrize("package", PUBLIC_PACKAGES)
def test_the_reference_describes_every_name_of_a_public_package(package: str):
    # A function may have the name of its module: jax_agent_rl.tools.function_tool.function_tool.
    described = {
        name.rpartition(".")[2] for name in DESCRIBED if name.startswith(f"jax_agent_rl.{package}.")
    }
    assert set(importlib.import_module(f"jax_agent_rl.{package}").__all__) <= described


def test_what_the_reference_describes_is_no_module_by_mistake():
    modules = {name for name in DESCRIBED if is_module(name)}
    assert modules == {f"jax_agent_rl.{name}" for name in MODULES}


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_the_reference_links_names_in_docstrings_and_shows_no_markup(site: Path):
    types = (site / "reference" / "types" / "index.html").read_text()
    assert re.search(r'<a [^>]*href="[^"]*#jax_agent_rl\.types\.Trajectory\.from_turns"', types)
    for page in (site / "reference").rglob("index.html"):
        assert not re.findall(r":(?:class|func|meth|mod|attr|data):|<p>:+</p>", page.read_text()), (
            page
        )


@pytest.mark.parametrize("link", ["[a](nowhere.md)", "[a](concepts.md#no-such-heading)"])
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, link: str):
    pytest.importorskip("zensical", reason="needs the extra docs")
    (tmp_path / "docs").mkdir()
    configuration = (ROOT / "mkdocs.yml").read_text()
    without_navigation = re.sub(r"^nav:\n(?:  .*\n)+", "", configuration, flags=re.M)
    without_reference = re.sub(
        r"^  - mkdocstrings:\n(?:   .*\n)+", "", without_navigation, flags=re.M
    )
    (tmp_path / "mkdocs.yml").write_text(without_reference)
    (tmp_path / "docs" / "concepts.md").write_text("# Concepts\n")
    (tmp_path / "docs" / "index.md").write_text(f"# Home\n\n{link}\n")
    assert build(tmp_path).returncode != 0
