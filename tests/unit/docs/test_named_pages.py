"""Pages that code, configurations and scripts send their reader to are there."""

import re
from pathlib import Path

import pytest

from tests.unit.docs.pages import ROOT

FOLDERS = (
    "jax_agent_rl",
    "gpu_backend",
    "configs",
    "examples",
    "launch",
    "benchmarks",
    "docker",
    ".github",
)
SUFFIXES = (".py", ".sh", ".yaml", ".yml", ".md", ".Dockerfile")
_PAGE = re.compile(r"\b(?:docs|third_party)/[\w./-]+\.(?:md|txt|ipynb|svg|png)\b")


def named_pages() -> dict[str, Path]:
    """Return every page that a file names, with one of the files that do."""
    readers: dict[str, Path] = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in SUFFIXES:
                for page in _PAGE.findall(file.read_text(encoding="utf-8")):
                    readers[page] = file.relative_to(ROOT)
    return readers


@pytest.mark.parametrize(("page", "reader"), named_pages().items(), ids=named_pages())
def test_a_page_that_a_file_names_is_there(page: str, reader: Path):
    assert (ROOT / page).is_file(), f"{reader} sends its reader to {page}"
