"""The code of the pages under docs/.

A fenced block with ``title="FILE"`` is that file, a Python block without a title is run beside the
files, and a YAML block without one is a part of a configuration.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
BENCHMARKS = ROOT / "benchmarks"


def import_benchmark(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Import a script of ``benchmarks/`` that writes a page, anew."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for module in (name, "common"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return importlib.import_module(name)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Return the page's blocks, in order."""
    pattern = r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$'
    for language, title, text in re.findall(pattern, page.read_text(), re.S | re.M):
        yield Block(language=language, title=title, text=text)


def write_files(page: Path, folder: Path) -> None:
    """Writes every titled block of a page as that file."""
    for block in blocks(page):
        if block.title:
            (folder / block.title).write_text(block.text)
