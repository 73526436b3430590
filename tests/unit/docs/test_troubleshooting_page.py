"""docs/troubleshooting.md quotes what the program says, and names keys and reasons that exist."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_agent_rl.config import Config
from jax_agent_rl.config.loading import valid_keys
from jax_agent_rl.types import DropReason, FinishReason
from tests.unit.docs.pages import DOCS, ROOT

PAGE = (DOCS / "troubleshooting.md").read_text()
ROWS = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ")]
SAID = sorted(
    {quoted for row in ROWS for quoted in re.findall(r"`([^`]*)`", row[1]) if " " in quoted}
)
KEYS = set(valid_keys(Config))
SECTIONS = {key.partition(".")[0] for key in KEYS}


def texts(file: Path) -> Iterator[str]:
    """Every string of a module; what is filled in shows as an ellipsis."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%\S", "…", node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
            )


@functools.cache
def everything() -> str:
    """Every string of the package, a line each."""
    lines: list[str] = []
    for folder in ("jax_agent_rl", "gpu_backend"):
        for file in (ROOT / folder).rglob("*.py"):
            lines += texts(file)
    return "\n".join(lines)


@pytest.mark.parametrize("quoted", SAID)
def test_the_program_says_it(quoted: str):
    parts = [part.strip() for part in quoted.split("…") if part.strip()]
    assert re.search(".{0,400}?".join(map(re.escape, parts)), everything(), re.S), quoted


def test_its_keys_exist():
    named = set(re.findall(r"`(\w+\.[\w.]+)(?:=[^`]*)?`", PAGE))
    named = {name for name in named if name.partition(".")[0] in SECTIONS}
    assert len(named) > 30
    for name in sorted(named):
        is_section = any(key.startswith(f"{name}.") for key in KEYS)
        assert name in KEYS or is_section, name


def test_its_reasons_exist():
    reasons = {*map(str, DropReason), *map(str, FinishReason)}
    named = set(re.findall(r"`([a-z]+_(?:error|timeout|drift|variance|edited|length))`", PAGE))
    assert len(named) > 5
    assert named <= reasons


def test_it_quotes_enough_to_find_a_symptom():
    assert len(SAID) > 20
