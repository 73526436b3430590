"""Keys explained in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from jax_agent_rl.config.keys import KeyInfo
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.suggest import nearest


def find(name: str, keys: Mapping[str, KeyInfo]) -> list[KeyInfo]:
    """The key with this path, or every key that ends in it (``group_size``).

    Raises:
        ConfigError: there is none; it says which are near.
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
    """Prints one key, or a section with the keys in it."""
    console.print(f"[bold]{escape(key.path)}[/]", highlight=False)
    console.print(Padding(escape(key.description), (0, 2)), highlight=False)
    if not key.is_section or key.default is not None:
        facts = Table.grid(padding=(0, 2))
        facts.add_row("type", escape(key.type))
        facts.add_row("default", escape(key.default) if key.default is not None else "none, it must be set")
        console.print(Padding(facts, (0, 2)))
    for one in (*above(key, keys), key):
        if one.used_only:
            whose = "" if one is key else f"{one.path}: "
            console.print(Padding(escape(f"{whose}used only {one.used_only}"), (0, 2)), highlight=False)
    if key.is_section:
        print_section(key.path, keys, console)


def above(key: KeyInfo, keys: Mapping[str, KeyInfo]) -> list[KeyInfo]:
    """The sections a key stands in, from the top."""
    parts = key.path.split(".")
    return [keys[".".join(parts[:end])] for end in range(1, len(parts))]


def print_section(path: str, keys: Mapping[str, KeyInfo], console: Console) -> None:
    """Prints the keys that stand directly in a section; the empty path is the top."""
    table = Table("key", "default", "what it does", box=None, pad_edge=False, header_style="bold")
    for key in keys.values():
        if key.section == path:
            default = key.default or ("(section)" if key.is_section else "(required)")
            table.add_row(*map(escape, (key.path.rpartition(".")[2], default, key.description)))
    console.print(Padding(table, (1, 2)))
