"""Commands that pages name exist, take the given options, and are given those they need."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from jax_agent_rl.cli import app
from tests.unit.docs.pages import DOCS, ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
    *sorted((ROOT / "third_party").glob("*.md")),
]


def command_lines(page: Path) -> Iterator[list[str]]:
    """What stands after ``jax-agent-rl`` in lines of shell blocks and in inline code."""
    text = page.read_text().replace("\\\n", " ")
    shell = "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.S | re.M))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    lines = re.findall(r"jax-agent-rl ([a-z][^|&>\n]*)", shell) + re.findall(
        r"`jax-agent-rl ([a-z][^`]*)`", prose
    )
    for line in lines:
        yield shlex.split(line.replace("\n", " "), comments=True)


LINES = [(page, line) for page in PAGES for line in command_lines(page)]


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """The command, or the one of a group, and its own words."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, f"there is no command {words[0]!r}"
        command = command.commands[words[0]]
        words = words[1:]
    return command, words


@pytest.mark.parametrize(
    ("page", "line"),
    LINES,
    ids=lambda value: value.stem if isinstance(value, Path) else " ".join(value),
)
def test_a_command_takes_what_it_is_given(page: Path, line: list[str]):
    command, words = resolve(line)
    options = {
        word.split("=")[0].strip("[]") for word in words if word.lstrip("[").startswith("--")
    }
    known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}
    assert options <= known
    if (
        words and "…" not in words and "--help" not in options
    ):  # a bare name in prose leaves out everything
        needed = [p for p in command.params if p.required and p.param_type_name == "option"]
        assert [p.name for p in needed if not options & set(p.opts)] == []


def test_there_are_commands_on_the_pages():
    assert len(LINES) > 60
