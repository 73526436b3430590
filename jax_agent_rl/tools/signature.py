"""Python annotations to JSON Schema, and JSON values back to what the annotation says.

The mapping is the one of ``transformers.utils.get_json_schema`` (chat templates are written for it), plus enums::

    str, int, float, bool    string, integer, number, boolean
    list[T], list            array (items: T)
    dict[str, T], dict       object (additionalProperties: T)
    Optional[T], T | None    T, nullable: true
    Union[A, B]              {"type": [A, B]} for plain types, else anyOf
    Literal["a", "b"]        {"type": "string", "enum": ["a", "b"]}
    class Color(Enum)        the enum's values; the function gets the member
    Any                      {}
    Annotated[T, "text"]     T, described by the text
"""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, Union

Schema = dict[str, Any]

_PLAIN: dict[type, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_SUPPORTED = "str, int, float, bool, list[T], dict[str, T], Optional, Union, Literal, Enum, Any"


def schema_of(annotation: Any) -> Schema:
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
        return {"type": "array", **({"items": schema_of(arguments[0])} if arguments else {})}
    if origin is dict:
        return _object(arguments)
    if origin is Literal:
        return _choices(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Annotated:
        described = [extra for extra in arguments[1:] if isinstance(extra, str)]
        return schema_of(arguments[0]) | ({"description": described[0]} if described else {})
    raise TypeError(f"{annotation!r} has no JSON Schema; use {_SUPPORTED}")


def _object(arguments: tuple[Any, ...]) -> Schema:
    if not arguments:
        return {"type": "object"}
    if arguments[0] is not str:
        raise TypeError(f"keys of a JSON object are strings, got dict[{arguments[0]!r}, ...]")
    return {"type": "object", "additionalProperties": schema_of(arguments[1])}


def _choices(values: Iterable[Any]) -> Schema:
    """Return an ``enum`` with the type(s) of its values; None among them makes it nullable."""
    values = list(values)
    strangers = [v for v in values if v is not None and type(v) not in _PLAIN]
    if strangers:
        raise TypeError(f"choices must be str, int, float, bool or None, got {strangers!r}")
    kinds = list(dict.fromkeys(_PLAIN[type(v)] for v in values if v is not None))
    schema: Schema = {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": [v for v in values if v is not None]}
    return schema | ({"nullable": True} if None in values else {})


def _union(arguments: tuple[Any, ...]) -> Schema:
    options = [schema_of(a) for a in arguments if a is not type(None)]
    if len(options) == 1:
        schema = options[0]
    elif all(list(option) == ["type"] and isinstance(option["type"], str) for option in options):
        schema = {"type": [option["type"] for option in options]}
    else:
        schema = {"anyOf": options}
    return schema | ({"nullable": True} if type(None) in arguments else {})


def converter_of(annotation: Any) -> Callable[[Any], Any] | None:
    """Return a function from a valid JSON value to what ``annotation`` says, or None if they are the same.

    Only enums (values to members) and floats (JSON writes ``3`` for ``3.0``) differ.
    """
    if annotation is float:
        return lambda value: float(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return converter_of(arguments[0])
    if origin is list and (item := converter_of(arguments[0])):
        return lambda value: [item(v) for v in value]
    if origin is dict and (item := converter_of(arguments[1])):
        return lambda value: {k: item(v) for k, v in value.items()}
    if origin in (Union, types.UnionType):
        return _union_converter([a for a in arguments if a is not type(None)])
    return None


def _union_converter(options: list[Any]) -> Callable[[Any], Any] | None:
    """Return a converter by the first option whose schema the value has."""
    try:
        converters = [(schema_of(option), converter_of(option)) for option in options]
    except TypeError:  # the tool has a schema of its own, because its annotations say no JSON
        return None
    if not any(convert for _, convert in converters):
        return None

    def convert_union(value: Any) -> Any:
        for schema, convert in converters:
            if value is not None and _fits(schema, value):
                return convert(value) if convert else value
        return value

    return convert_union


def _fits(schema: Mapping[str, Any], value: Any) -> bool:
    from jsonschema import Draft202012Validator  # here: it takes long to import, and most tools need no union

    return Draft202012Validator(schema).is_valid(value)
