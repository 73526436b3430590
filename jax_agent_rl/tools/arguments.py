"""Validation of the arguments a model wrote against a tool's schema, forgiving about quotes only.

A literal in quotes where the schema wants another type (``"3"``, ``"true"``, ``"[1, 2]"``) is taken for what it
spells, and ``3.0`` for an integer is 3. ``"null"`` and ``"None"`` are null where null is allowed and text is not
(formats without quotes write it so). Nothing else is guessed: the model reads what was wrong instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jax_agent_rl.errors import ToolArgumentError

_SHOWN_PROBLEMS = 3
_SHOWN_CHARS = 200


def check_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Validate and coerce arguments.

    Args:
        parameters: the tool's object schema. Names it does not list are refused unless it sets
            ``additionalProperties``; ``nullable: true`` allows null.
        arguments: what the model wrote.

    Raises:
        ToolArgumentError: with the first few problems, in words for the model.
    """
    from jsonschema import Draft202012Validator  # here: importing it takes longer than the whole package

    if not isinstance(arguments, Mapping):
        raise ToolArgumentError(f"arguments must be a JSON object, got {_clip(json.dumps(arguments))}")
    schema = _nullable_to_null({"additionalProperties": False, **parameters})
    coerced = _coerce(schema, dict(arguments))
    errors = sorted(Draft202012Validator(schema).iter_errors(coerced), key=lambda error: str(error.json_path))
    if errors:
        raise ToolArgumentError("; ".join(_describe(error) for error in errors[:_SHOWN_PROBLEMS]))
    return coerced


def _describe(error: Any) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    return (f"argument {where}: " if where else "") + _clip(error.message)


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


_SUBSCHEMA = ("items", "additionalProperties")
_SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf")


def _nullable_to_null(schema: Any) -> Any:
    """Convert OpenAPI's ``nullable`` (in prompts) to JSON Schema's ``anyOf … null`` (for validators)."""
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: value for key, value in schema.items() if key != "nullable"}
    for key in _SUBSCHEMA:
        if key in plain:
            plain[key] = _nullable_to_null(plain[key])
    for key in _SUBSCHEMA_LISTS:
        if key in plain:
            plain[key] = [_nullable_to_null(option) for option in plain[key]]
    if "properties" in plain:
        plain["properties"] = {name: _nullable_to_null(value) for name, value in plain["properties"].items()}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


def _coerce(schema: Any, value: Any) -> Any:
    """Coerce values wherever the schema names exactly one non-string type."""
    if not isinstance(schema, Mapping):
        return value
    if len(options := schema.get("anyOf", ())) == 2 and {"type": "null"} in options:
        inner = options[0] if options[1] == {"type": "null"} else options[1]
        if value is None or value in ("null", "None") and inner.get("type") in _SPELLED:
            return None
        return _coerce(inner, value)
    kind = schema.get("type")
    if isinstance(value, str) and kind in ("integer", "number", "boolean", "array", "object"):
        value = _unquote(value, kind)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "array" and isinstance(value, list):
        return [_coerce(schema.get("items"), item) for item in value]
    if kind == "object" and isinstance(value, dict):
        known, other = schema.get("properties", {}), schema.get("additionalProperties")
        return {key: _coerce(known.get(key, other), item) for key, item in value.items()}
    return value


_SPELLED: dict[str, tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def _unquote(text: str, kind: str) -> Any:
    """Parse the JSON value that ``text`` spells if it is of that kind, else return ``text``."""
    try:
        value = json.loads(text.strip().lower() if kind == "boolean" else text)
    except (ValueError, RecursionError):
        return text
    return value if type(value) in _SPELLED[kind] else text
