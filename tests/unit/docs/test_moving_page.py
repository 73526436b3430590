"""Every name of ours that docs/moving.md gives for another project's exists."""

from __future__ import annotations

import importlib
import re

import pytest
import yaml
from pydantic import BaseModel

from jax_agent_rl.config import Config
from jax_agent_rl.config.loading import valid_keys
from tests.unit.docs.pages import DOCS

KEYS = set(valid_keys(Config))
ROWS = [line.split("|")[2] for line in (DOCS / "moving.md").read_text().splitlines() if line.startswith("| `")]
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
    for line in (DOCS / "moving.md").read_text().splitlines()
    if line.count("|") == 5 and line.startswith("| `")
]


@pytest.mark.parametrize("row", DEFAULTS, ids=lambda row: row and row[1])
def test_a_default_that_differs_is_the_one_here(row: re.Match[str] | None):
    assert row is not None and yaml.safe_load(row[2]) == default_of(row[1])


def test_the_page_names_enough_to_be_read():
    assert len(NAMES) > 80 and len(DEFAULTS) > 15
