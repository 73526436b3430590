"""The reference of every key as Markdown: ``docs/config.md``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel

from jax_agent_rl.config.keys import KeyInfo, keys_of

_HEAD = """\
# Configuration keys

Generated from the configuration's code by `jax-agent-rl config reference > docs/config.md`; do not edit it.

A key is set in the YAML file or on the command line (`rollout.group_size=16`). `jax-agent-rl config explain KEY` says
the same in a terminal, `jax-agent-rl config show FILE` prints a file with every default filled in, and the first line
of each recipe in `configs/` lets an editor complete and check keys (`# yaml-language-server: $schema=…`).

"Used only …" names what must be the case for a key to do something. Where it is not, any value but the default is
refused. Conditions on the keys of a section stand at the section. Which agents a run has is known once its rows are
read: `train` and `doctor` then check the keys of agents, other commands, which may be given other rows, do not.
"""


def reference(chapters: Sequence[tuple[str, str, type[BaseModel]]]) -> str:
    """The page.

    Args:
        chapters: title, introduction and model of each tree.
    """
    parts = [_HEAD]
    for title, introduction, model in chapters:
        parts += [f"## {title}\n", f"{introduction}\n", *_tables(keys_of(model))]
    return "\n".join(parts)


def _tables(keys: dict[str, KeyInfo]) -> Iterator[str]:
    """One table per section, in the order of the code."""
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
    """What a key does, and when."""
    condition = f" Used only {key.used_only}." if key.used_only else ""
    return _markdown(key.description + condition)


def _markdown(text: str) -> str:
    """Plain text with `literals`: outside those nothing starts a tag or ends a table's cell."""
    parts = text.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("|", "\\|") for part in parts[::2]]
    return "`".join(parts)
