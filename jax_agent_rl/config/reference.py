"""Documentation of all keys: as Markdown (``docs/config.md``) and as a schema for editors.

Both are made from the JSON Schema of the models, whose types are put into words:
``{"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": null}`` is ``integer
>= 1, or null``. The first line of a recipe names its schema: ``# yaml-language-server:
$schema=schema.json`` (VS Code, Neovim, JetBrains).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jax_agent_rl.config.base import INSTALLED_FORMAT, SCHEMA_KEY
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.utils.near_names import nearest_keys

Schema = Mapping[str, Any]
_NUMBER_LIMITS = (
    ("minimum", ">="),
    ("exclusiveMinimum", ">"),
    ("maximum", "<="),
    ("exclusiveMaximum", "<"),
)
_NAMES = {"string": "text", "boolean": "true or false"}
_PAGE_HEAD = """\
# Configuration keys

Generated from the configuration's code by `jax-agent-rl config reference > docs/config.md`; do not
edit it.

A key is set in the YAML file or on the command line (`rollout.group_size=16`). `jax-agent-rl config
explain KEY` prints the same in a terminal, `jax-agent-rl config show FILE` prints a file with every
default filled in, and the first line of each recipe in `configs/` lets an editor complete and check
keys (`# yaml-language-server: $schema=…`).

"Used only …" is the condition under which a key has an effect; otherwise, any value but the default
is refused. A condition on a section applies to all of its keys. The agents of a run are known once
its rows are read: `train` and `doctor` then check the keys of agents; other commands do not, since
they may run with other rows.
"""
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_BASE_KEY_SCHEMA = {
    "type": "string",
    "description": (
        "Another YAML file, from this one's folder; this one then says only what differs."
    ),
}


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """One key of the tree, or a section of it.

    Attributes:
        path: e.g. ``rollout.group_size``.
        type: accepted values, in words; ``section`` for a section.
        default: as YAML; None: required (a section: its keys have their own defaults).
        description: what it does.
        used_only: when it is used, as the end of "used only …"; empty: always.
        is_section: whether it has keys.
    """

    path: str
    type: str
    default: str | None
    description: str
    used_only: str = ""
    is_section: bool = False

    @property
    def section(self) -> str:
        """Path of its section; empty at the root."""
        return self.path.rpartition(".")[0]

    @property
    def nullable(self) -> bool:
        """Whether null is a value of it, rather than another word for its default."""
        return self.default == "null" or self.type.endswith("null")


def list_keys(model: type[BaseModel]) -> dict[str, KeyInfo]:
    """Return every key and section of a tree by path.

    They are in the order of the code, sections before their keys.
    """
    schema = model.model_json_schema()
    return {key.path: key for key in _walk(schema, schema.get("$defs", {}), "")}


def describe_type(schema: Schema) -> str:
    """Describe what a JSON Schema allows: ``integer >= 1, or null``; ``a | b`` for a choice."""
    if schema.get("enum"):
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if "anyOf" in schema:
        return ", or ".join(map(describe_type, schema["anyOf"]))

    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        alternatives = [{**schema, "type": alternative} for alternative in kind]
        return ", or ".join(map(describe_type, alternatives))
    if kind == "array":
        return _describe_list(schema)
    if kind == "object":
        values = schema.get("additionalProperties", True)
        if values is True:
            return "mapping"
        names = schema.get("propertyNames", {}) | {"type": "string"}
        return f"mapping of {describe_type(names)} to {describe_type(values)}"
    if schema.get("format") == INSTALLED_FORMAT:
        return "a name that an installed package registers"

    limits = []
    for name, sign in _NUMBER_LIMITS:
        if name in schema:
            limits.append(f"{sign} {schema[name]:g}")
    return f"{_NAMES.get(kind, kind)} {' and '.join(limits)}".strip()


def find(name: str, keys: Mapping[str, KeyInfo]) -> list[KeyInfo]:
    """Return the key with this path, or every key that ends in it (``group_size``).

    Raises:
        ConfigError: there is none; the message suggests similar keys.
    """
    if name in keys:
        return [keys[name]]
    matches = [key for path, key in keys.items() if path.endswith(f".{name}")]
    if matches:
        return matches

    guesses = nearest_keys(name, keys)
    guess = f"did you mean {', '.join(guesses[:4])}? " if guesses else ""
    raise ConfigError(
        f"there is no key {name!r}; {guess}'jax-agent-rl config explain' lists the sections"
    )


def reference(trees: Sequence[tuple[str, str, type[BaseModel]]]) -> str:
    """Return the Markdown page; ``trees`` are (title, introduction, model)."""
    parts = [_PAGE_HEAD]
    for title, introduction, model in trees:
        parts += [f"## {title}\n", f"{introduction}\n", *_tables(list_keys(model))]
    return "\n".join(parts)


def editor_schema(model: type[BaseModel], *, title: str) -> dict[str, Any]:
    """Return the schema of a YAML file that :func:`~jax_agent_rl.config.loading.read_tree` reads.

    Nothing is required in it: missing keys may stand in the file's ``base`` or on the command line.
    """
    schema = _without(model.model_json_schema(), {"title", "required", SCHEMA_KEY})
    schema["properties"] = {"base": _BASE_KEY_SCHEMA} | schema["properties"]
    return {"$schema": DRAFT, "title": title} | schema


def _tables(keys: dict[str, KeyInfo]) -> Iterator[str]:
    """Yield one table per section, in the order of the code."""
    yield from _table("", keys)
    for key in keys.values():
        if key.is_section:
            default = " Default: null." if key.default else ""
            yield f"### `{key.path}`\n"
            yield f"{_describe(key)}{default}\n"
            yield from _table(key.path, keys)


def _table(section: str, keys: dict[str, KeyInfo]) -> Iterator[str]:
    rows = [key for key in keys.values() if key.section == section and not key.is_section]
    if not rows:
        return
    lines = ["| Key | Type | Default | What it does |", "| --- | --- | --- | --- |"]
    for key in rows:
        default = f"`{key.default}`" if key.default is not None else "required"
        lines.append(f"| `{key.path}` | {_markdown(key.type)} | {default} | {_describe(key)} |")
    yield "\n".join(lines) + "\n"


def _describe(key: KeyInfo) -> str:
    """Return what a key does, and its condition."""
    condition = f" Used only {key.used_only}." if key.used_only else ""
    return _markdown(key.description + condition)


def _markdown(text: str) -> str:
    """Escape what starts a tag or ends a table cell, except in `literals`."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):  # every other part lies between backquotes
        parts[index] = parts[index].replace("<", "&lt;").replace("|", "\\|")
    return "`".join(parts)


def _without(node: Any, names: set[str]) -> Any:
    """Return a schema without these annotations.

    Properties that happen to have one of the names stay. Conditions are moved into descriptions,
    and each description is one line, however it is wrapped in the source.
    """
    if isinstance(node, list):
        return [_without(item, names) for item in node]
    if not isinstance(node, dict):
        return node

    result = {}
    for key, value in node.items():
        if key in names:
            continue
        if key in ("properties", "$defs"):  # maps names of the configuration, not annotations
            result[key] = {name: _without(field, names) for name, field in value.items()}
        else:
            result[key] = _without(value, names)

    description = result.get("description", "")
    condition = node.get(SCHEMA_KEY)
    if condition:
        description += f" Used only {condition}."
    if description:
        result["description"] = " ".join(description.split())
    return result


def _describe_list(schema: Schema) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(map(describe_type, schema['prefixItems']))}]"
    if "items" not in schema:
        return "list"
    minimum = f", at least {schema['minItems']}" if "minItems" in schema else ""
    return f"list of {describe_type(schema['items'])}{minimum}"


def _walk(schema: Schema, definitions: Mapping[str, Schema], prefix: str) -> Iterator[KeyInfo]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        path = f"{prefix}{name}"
        section, is_optional = _find_section(field, definitions)
        if section is None:
            default = None
            if name not in required:
                default = json.dumps(field.get("default", {}))  # only mappings have a factory
            yield KeyInfo(
                path=path,
                type=describe_type(field),
                default=default,
                description=field.get("description", ""),
                used_only=field.get(SCHEMA_KEY, ""),
            )
        else:
            docstring = field.get("description", "") or section.get("description", "")
            yield KeyInfo(
                path=path,
                type="section, or null" if is_optional else "section",
                default="null" if is_optional else None,
                description=" ".join(docstring.split()).replace("``", "`"),
                used_only=field.get(SCHEMA_KEY, ""),
                is_section=True,
            )
            yield from _walk(section, definitions, f"{path}.")


def _find_section(field: Schema, definitions: Mapping[str, Schema]) -> tuple[Schema | None, bool]:
    """Return the section a field holds, if any, and whether it may be null."""
    options = field.get("anyOf", [field])
    references = [option["$ref"] for option in options if "$ref" in option]
    if not references:
        return None, False
    name = references[0].rpartition("/")[2]
    return definitions[name], len(options) > 1
