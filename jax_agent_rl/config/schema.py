"""The JSON Schema by which an editor completes and checks a YAML file.

The first line of a recipe names it: ``# yaml-language-server: $schema=schema.json`` (VS Code, Neovim, JetBrains).
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jax_agent_rl.config.conditions import SCHEMA_KEY

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_BASE = {
    "type": "string",
    "description": "Another YAML file, from this one's folder; this one then says only what differs.",
}


def editor_schema(model: type[BaseModel], *, title: str) -> dict[str, Any]:
    """The schema of a YAML file that :func:`~jax_agent_rl.config.loading.read_tree` reads.

    Nothing is required in it: what is missing may stand in the file's ``base`` or on the command line.

    Args:
        model: of the whole tree.
        title: shown by editors.
    """
    schema = _without(model.model_json_schema(), {"title", "required", SCHEMA_KEY})
    schema["properties"] = {"base": _BASE} | schema["properties"]
    return {"$schema": DRAFT, "title": title} | schema


def _without(node: Any, names: set[str]) -> Any:
    """The tree of a schema without these annotations, conditions moved into descriptions; a property that has such a
    name stays.
    """
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
