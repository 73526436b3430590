"""Every name of ours that the pages for newcomers from other projects give exists, and their
examples load.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from jax_agent_rl.config import Config, build, load
from jax_agent_rl.config.loading import read_tree, valid_keys
from tests.unit.docs.pages import DOCS, blocks

KEYS = set(valid_keys(Config))
PAGES = {page.stem: page for page in sorted((DOCS / "moving").glob("*.md"))}
LINES = [
    line for page in [DOCS / "moving.md", *PAGES.values()] for line in page.read_text().splitlines()
]
ROWS = [line.split("|")[2] for line in LINES if line.startswith("| `")]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([\w.]+\.\w+)`", row)})


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("jax_agent_rl.")])
def test_a_key_exists(name: str):
    assert name in KEYS or any(key.startswith(name + ".") for key in KEYS)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("jax_agent_rl.")])
def test_a_class_or_function_exists(name: str):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


def default_of(path: str) -> object:
    node: type[BaseModel] = Config
    *sections, leaf = path.split(".")
    for name in sections:
        node = node.model_fields[name].annotation  # type: ignore[assignment]
    return node.model_fields[leaf].get_default(call_default_factory=True)


DEFAULTS = [
    re.fullmatch(r"\| `([\w.]+)` \| [^|]+ \| `([^`]+)` \| [^|]+ \|", line)
    for line in LINES
    if line.count("|") == 5 and line.startswith("| `")
]


@pytest.mark.parametrize("row", DEFAULTS, ids=lambda row: row and row[1])
def test_a_default_that_differs_is_the_one_here(row: re.Match[str] | None):
    assert row is not None
    assert yaml.safe_load(row[2]) == default_of(row[1])


def test_the_page_names_enough_to_be_read():
    assert len(NAMES) > 80
    assert len(DEFAULTS) > 15


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield from (
            leaves(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]
        )


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_the_example_loads_and_has_the_values_of_its_table(page: Path, tmp_path: Path):
    table_text = page.read_text().split("\n## A script, line by line\n")[1]
    values = {}
    for line in table_text.splitlines():
        if line.startswith("| "):
            cell = line.split(" | ")[1]
            for _, key, value in re.findall(r"(`+)([a-z_0-9.]+)=(.+?)(?<!`)\1(?!`)", cell):
                values[key] = value
    (block,) = [block for block in blocks(page) if block.language == "yaml" and block.title]
    file = tmp_path / block.title
    file.write_text(block.text)
    assert set(leaves(read_tree(file))) == set(values)  # every line of the YAML is a row's
    assert load(file) == build({}, [f"{key}={text}" for key, text in values.items()])


def test_there_is_a_page_for_each_project():
    assert set(PAGES) == {"verl", "trl", "verl_tool", "agentfly", "tunix"}
