"""Schemas of tools: from Python annotations to JSON Schema, and from a model's arguments to Python values.

The mapping is that of ``transformers.utils.get_json_schema`` (chat templates are written for it), plus enums::

    str, int, float, bool    string, integer, number, boolean
    list[T], list            array (items: T)
    dict[str, T], dict       object (additionalProperties: T)
    Optional[T], T | None    T, nullable: true
    Union[A, B]              {"type": [A, B]} for plain types, else anyOf
    Literal["a", "b"]        {"type": "string", "enum": ["a", "b"]}
    class Color(Enum)        the enum's values; the function gets the member
    Any                      {}
    Annotated[T, "text"]     T, described by the text

Arguments are validated strictly, except for quotes: a literal in quotes where the schema requires another type
(``"3"``, ``"true"``, ``"[1, 2]"``) becomes its value, and ``3.0`` for an integer is 3. ``"null"`` and ``"None"`` are
null where null is allowed and text is not (formats without quotes write it so). Nothing else is guessed: the model
reads what was wrong.
"""

from __future__ import annotations

import enum
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import TypeAdapter

from jax_agent_rl.errors import ToolArgumentError, ToolDefinitionError

Schema = dict[str, Any]

_PLAIN: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_SUPPORTED = "str, int, float, bool, list[T], dict[str, T], Optional, Union, Literal, Enum, Any"


def json_schema(annotation: Any) -> Schema:
    """Return the JSON Schema of one annotation (already resolved, not a string).

    Raises:
        TypeError: the annotation has no JSON form.
    """
    if annotation is Any:
        return {}
    if annotation in _PLAIN:
        return {"type": _PLAIN[annotation]}
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return _choices(member.value for member in annotation)
    origin, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if origin is list:
        return {"type": "array", **({"items": json_schema(arguments[0])} if arguments else {})}
    if origin is dict:
        if arguments and arguments[0] is not str:
            raise TypeError(f"keys of a JSON object are strings, got dict[{arguments[0]!r}, ...]")
        return {"type": "object", **({"additionalProperties": json_schema(arguments[1])} if arguments else {})}
    if origin is Literal:
        return _choices(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Annotated:
        described = [extra for extra in arguments[1:] if isinstance(extra, str)]
        return json_schema(arguments[0]) | ({"description": described[0]} if described else {})
    raise TypeError(f"{annotation!r} has no JSON Schema; use {_SUPPORTED}")


def _choices(values: Iterable[Any]) -> Schema:
    """Return an ``enum`` with the type(s) of its values; None among them makes it nullable."""
    values = list(values)
    if unsupported := [v for v in values if v is not None and type(v) not in _PLAIN]:
        raise TypeError(f"choices must be str, int, float, bool or None, got {unsupported!r}")
    kinds = list(dict.fromkeys(_PLAIN[type(v)] for v in values if v is not None))
    schema: Schema = {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": [v for v in values if v is not None]}
    return schema | ({"nullable": True} if None in values else {})


def _union(arguments: tuple[Any, ...]) -> Schema:
    options = [json_schema(a) for a in arguments if a is not type(None)]
    if len(options) == 1:
        schema = options[0]
    elif all(list(option) == ["type"] and isinstance(option["type"], str) for option in options):
        schema = {"type": [option["type"] for option in options]}
    else:
        schema = {"anyOf": options}
    return schema | ({"nullable": True} if type(None) in arguments else {})


def make_converter(annotation: Any) -> Callable[[Any], Any] | None:
    """Return the conversion of a valid JSON value to an annotation's type (enum members, floats); None: no conversion.

    An annotation without a JSON Schema has none: its tool has an explicit schema, of plain JSON values.
    """
    try:
        json_schema(annotation)
    except TypeError:
        return None
    return TypeAdapter(annotation).validate_python


# --- explicit schemas -------------------------------------------------------------------------------------------------


def unwrap_function(schema: object, where: str) -> Mapping[str, Any]:
    """Return the ``function`` of ``{type: function, function: {name, description, parameters}}``.

    ``where`` describes the schema in the message.

    Raises:
        ToolDefinitionError: it has another form.
    """
    if isinstance(schema, Mapping) and schema.get("type", "function") == "function":
        if isinstance(function := schema.get("function"), Mapping):
            return function
    raise ToolDefinitionError(f"{where} must be {{type: function, function: {{…}}}}, got {schema!r:.100}")


def check_parameters(parameters: Mapping[str, Any], what: str) -> None:
    """Raise :class:`ToolDefinitionError`, which begins with ``what``, unless ``parameters`` is a valid JSON Schema."""
    from jsonschema import Draft202012Validator, SchemaError  # here: importing it takes longer than the whole package

    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ToolDefinitionError(f"{what} are no valid JSON Schema: {error.json_path}: {error.message}") from None


# --- arguments --------------------------------------------------------------------------------------------------------

_SHOWN_PROBLEMS = 3
_SHOWN_CHARS = 200


def check_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Validate and coerce arguments.

    Args:
        parameters: the tool's object schema. Names it does not list are refused unless it sets
            ``additionalProperties``; ``nullable: true`` allows null.
        arguments: the model's arguments.

    Raises:
        ToolArgumentError: describes the first few problems to the model.
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
        if value is None or value in ("null", "None") and inner.get("type") in _PYTHON_TYPES:
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


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int, float),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def _unquote(text: str, kind: str) -> Any:
    """Return the JSON value in ``text`` if it is of that kind, else ``text``."""
    try:
        value = json.loads(text.strip().lower() if kind == "boolean" else text)
    except (ValueError, RecursionError):
        return text
    return value if type(value) in _PYTHON_TYPES[kind] else text
