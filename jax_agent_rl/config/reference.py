"""Documentation of all keys: in a terminal, as Markdown (``docs/config.md``), and as a JSON Schema for editors.

The first line of a recipe names the schema: ``# yaml-language-server: $schema=schema.json`` (VS Code, Neovim,
JetBrains).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from jax_agent_rl.config.conditions import SCHEMA_KEY
from jax_agent_rl.config.keys import KeyInfo, keys_of
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.text import nearest

_HEAD = """\
# Configuration keys

Generated from the configuration's code by `jax-agent-rl config reference > docs/config.md`; do not edit it.

A key is set in the YAML file or on the command line (`rollout.group_size=16`). `jax-agent-rl config explain KEY` says
the same in a terminal, `jax-agent-rl config show FILE` prints a file with every default filled in, and the first line
of each recipe in `configs/` lets an editor complete and check keys (`# yaml-language-server: $schema=…`).

"Used only …" names the condition under which a key has an effect. Elsewhere any value but the default is refused.
Conditions on all keys of a section stand at the section. The agents of a run are known once its rows are read: `train`
and `doctor` then check the keys of agents; other commands do not, since they may be given other rows.
"""
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_BASE = {
    "type": "string",
    "description": "Another YAML file, from this one's folder; this one then says only what differs.",
}


def find(name: str, keys: Mapping[str, KeyInfo]) -> list[KeyInfo]:
    """Return the key with this path, or every key that ends in it (``group_size``).

    Raises:
        ConfigError: there is none; the message suggests similar keys.
    """
    if name in keys:
        return [keys[name]]
    if ends := [key for path, key in keys.items() if path.endswith(f".{name}")]:
        return ends
    leaves = {path.rpartition(".")[2] for path in keys}
    near = nearest(name.rpartition(".")[2], leaves)
    guesses = [path for leaf in near for path in keys if path.rpartition(".")[2] == leaf] or nearest(name, keys)
    guess = f"did you mean {', '.join(guesses[:4])}? " if guesses else ""
    raise ConfigError(f"there is no key {name!r}; {guess}'jax-agent-rl config explain' lists the sections")


def explain(key: KeyInfo, keys: Mapping[str, KeyInfo], console: Console) -> None:
    """Print one key, or a section with its keys."""
    console.print(f"[bold]{escape(key.path)}[/]", highlight=False)
    console.print(Padding(escape(key.description), (0, 2)), highlight=False)
    if not key.is_section or key.default is not None:
        facts = Table.grid(padding=(0, 2))
        facts.add_row("type", escape(key.type))
        facts.add_row("default", escape(key.default) if key.default is not None else "none, it must be set")
        console.print(Padding(facts, (0, 2)))
    parts = key.path.split(".")
    for one in (keys[".".join(parts[:end])] for end in range(1, len(parts) + 1)):
        if one.used_only:
            whose = "" if one is key else f"{one.path}: "
            console.print(Padding(escape(f"{whose}used only {one.used_only}"), (0, 2)), highlight=False)
    if key.is_section:
        print_section(key.path, keys, console)


def print_section(path: str, keys: Mapping[str, KeyInfo], console: Console) -> None:
    """Print the keys directly in a section; the empty path is the root."""
    table = Table("key", "default", "what it does", box=None, pad_edge=False, header_style="bold")
    for key in keys.values():
        if key.section == path:
            default = key.default or ("(section)" if key.is_section else "(required)")
            table.add_row(*map(escape, (key.path.rpartition(".")[2], default, key.description)))
    console.print(Padding(table, (1, 2)))


def reference(chapters: Sequence[tuple[str, str, type[BaseModel]]]) -> str:
    """Return the Markdown page; ``chapters`` are the title, introduction and model of each tree."""
    parts = [_HEAD]
    for title, introduction, model in chapters:
        parts += [f"## {title}\n", f"{introduction}\n", *_tables(keys_of(model))]
    return "\n".join(parts)


def editor_schema(model: type[BaseModel], *, title: str) -> dict[str, Any]:
    """Return the schema of a YAML file that :func:`~jax_agent_rl.config.loading.read_tree` reads.

    Nothing is required in it: missing keys may stand in the file's ``base`` or on the command line.
    """
    schema = _without(model.model_json_schema(), {"title", "required", SCHEMA_KEY})
    schema["properties"] = {"base": _BASE} | schema["properties"]
    return {"$schema": DRAFT, "title": title} | schema


def _tables(keys: dict[str, KeyInfo]) -> Iterator[str]:
    """Yield one table per section, in the order of the code."""
    yield from _table("", keys)
    for key in keys.values():
        if key.is_section:
            yield f"### `{key.path}`\n"
            yield f"{_described(key)}{' Default: null.' if key.default else ''}\n"
            yield from _table(key.path, keys)


def _table(section: str, keys: dict[str, KeyInfo]) -> Iterator[str]:
    rows = [key for key in keys.values() if key.section == section and not key.is_section]
    if not rows:
        return
    lines = ["| Key | Type | Default | What it does |", "| --- | --- | --- | --- |"]
    for key in rows:
        default = f"`{key.default}`" if key.default is not None else "required"
        lines.append(f"| `{key.path}` | {_markdown(key.type)} | {default} | {_described(key)} |")
    yield "\n".join(lines) + "\n"


def _described(key: KeyInfo) -> str:
    """Return what a key does, and its condition."""
    condition = f" Used only {key.used_only}." if key.used_only else ""
    return _markdown(key.description + condition)


def _markdown(text: str) -> str:
    """Escape what starts a tag or ends a table cell, except in `literals`."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("|", "\\|") for part in parts[::2]]
    return "`".join(parts)


def _without(node: Any, names: set[str]) -> Any:
    """Return a schema without these annotations, conditions moved into descriptions; properties of that name stay."""
    if isinstance(node, list):
        return [_without(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    if condition := node.get(SCHEMA_KEY):
        node = {**node, "description": f"{node.get('description', '')} Used only {condition}.".lstrip()}
    return {
        key: {name: _without(field, names) for name, field in value.items()}
        if key in ("properties", "$defs")
        else _without(value, names)
        for key, value in node.items()
        if key not in names
    }
