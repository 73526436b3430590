"""Every key of a configuration tree with its type in words, its default and its description, from its JSON Schema.

For example::

{"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": null}   ->   integer >= 1, or null
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from jax_agent_rl.config.conditions import SCHEMA_KEY

Schema = Mapping[str, Any]
_NUMBER_LIMITS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))
_NAMES = {"string": "text", "boolean": "true or false"}


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


def keys_of(model: type[BaseModel]) -> dict[str, KeyInfo]:
    """Return every key and section of a tree by path, in the order of the code, sections before their keys."""
    schema = model.model_json_schema()
    return {key.path: key for key in _walk(schema, schema.get("$defs", {}), "")}


def in_words(schema: Schema) -> str:
    """Describe what a JSON Schema allows: ``integer >= 1, or null``; ``a | b`` for a choice."""
    choices = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if choices:
        return " | ".join(map(str, choices))
    if "anyOf" in schema:
        return ", or ".join(in_words(option) for option in schema["anyOf"])
    kind = schema.get("type", "anything")
    if isinstance(kind, list):
        return ", or ".join(in_words({**schema, "type": one}) for one in kind)
    if kind == "array":
        return _list_in_words(schema)
    if kind == "object" and "additionalProperties" not in schema:
        return "mapping"
    if kind == "object":
        names = in_words(schema.get("propertyNames", {}) | {"type": "string"})
        return f"mapping of {names} to {in_words(schema['additionalProperties'])}"
    limits = [f"{sign} {schema[name]:g}" for name, sign in _NUMBER_LIMITS if name in schema]
    return f"{_NAMES.get(kind, kind)} {' and '.join(limits)}".strip()


def _list_in_words(schema: Schema) -> str:
    if "prefixItems" in schema:
        return f"[{', '.join(map(in_words, schema['prefixItems']))}]"
    if "items" not in schema:
        return "list"
    least = f", at least {schema['minItems']}" if "minItems" in schema else ""
    return f"list of {in_words(schema['items'])}{least}"


def _walk(schema: Schema, definitions: Mapping[str, Schema], prefix: str) -> Iterator[KeyInfo]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        path = f"{prefix}{name}"
        inner, optional = _section_of(field, definitions)
        if inner is None:
            default = None if name in required else json.dumps(field.get("default", {}))  # only mappings have a factory
            yield KeyInfo(
                path=path,
                type=in_words(field),
                default=default,
                description=field.get("description", ""),
                used_only=field.get(SCHEMA_KEY, ""),
            )
            continue
        yield KeyInfo(
            path=path,
            type="section, or null" if optional else "section",
            default="null" if optional else None,
            description=_one_paragraph(field.get("description") or inner.get("description", "")),
            used_only=field.get(SCHEMA_KEY, ""),
            is_section=True,
        )
        yield from _walk(inner, definitions, path + ".")


def _section_of(field: Schema, definitions: Mapping[str, Schema]) -> tuple[Schema | None, bool]:
    """Return the section a field holds, if any, and whether it may be null."""
    options = field.get("anyOf", [field])
    named = [option["$ref"] for option in options if "$ref" in option]
    if not named:
        return None, False
    return definitions[named[0].rpartition("/")[2]], len(options) > 1


def _one_paragraph(text: str) -> str:
    """Join the lines of a docstring, its literals in single backquotes."""
    return " ".join(text.split()).replace("``", "`")
