"""Schemas of tools: from Python annotations to JSON Schema, and from a model's arguments to Python values.

The mapping is that of ``transformers.utils.get_json_schema`` (chat templates are written for it),
plus enums::

    str, int, float, bool    string, integer, number, boolean
    list[T], list            array (items: T)
    dict[str, T], dict       object (additionalProperties: T)
    Optional[T], T | None    T, nullable: true
    Union[A, B]              {"type": [A, B]} for plain types, else anyOf
    Literal["a", "b"]        {"type": "string", "enum": ["a", "b"]}
    class Color(Enum)        the enum's values; the function gets the member
    Any                      {}
    Annotated[T, "text"]     T, described by the text

Arguments are validated strictly, except for quotes: text that the schema refuses becomes the value
of the literal in it (``"3"``, ``"true"``, ``"[1, 2]"``) if the schema takes that, and ``3.0`` for
an integer is 3. ``"null"`` and ``"None"`` are null where null is allowed and text is not (formats
without quotes write it so). Nothing else is guessed: the model reads what was wrong.
:func:`convert_arguments` is that one conversion: of the replies that agents and clients of the
endpoint get, and of the arguments that tools are called with. It asks a validator of JSON Schema at
every step, so unions, references and enums are converted as they are validated.
"""

from __future__ import annotations

import enum
import json
import logging
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import TypeAdapter

from jax_agent_rl.errors import ToolArgumentError, ToolDefinitionError
from jax_agent_rl.utils.bounded_json import parse_json

logger = logging.getLogger(__name__)
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
        return {
            "type": "object",
            **({"additionalProperties": json_schema(arguments[1])} if arguments else {}),
        }
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
    schema: Schema = {
        "type": kinds[0] if len(kinds) == 1 else kinds,
        "enum": [v for v in values if v is not None],
    }
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

    An annotation without a JSON Schema has none: its tool has an explicit schema, of plain JSON
        values.
    """
    try:
        json_schema(annotation)
    except TypeError:
        return None
    return TypeAdapter(annotation).validate_python


# --- explicit schemas -----------------------------------------------------------------------------


def unwrap_function(schema: object, where: str) -> Mapping[str, Any]:
    """Return the ``function`` of ``{type: function, function: {name, description, parameters}}``.

    ``where`` describes the schema in the message.

    Raises:
        ToolDefinitionError: it has another form.
    """
    if isinstance(schema, Mapping) and schema.get("type", "function") == "function":
        if isinstance(function := schema.get("function"), Mapping):
            return function
    raise ToolDefinitionError(
        f"{where} must be {{type: function, function: {{…}}}}, got {schema!r:.100}"
    )


def check_parameters(parameters: Mapping[str, Any], what: str) -> None:
    """Raise :class:`ToolDefinitionError`, which begins with ``what``, unless ``parameters`` is a valid JSON Schema."""
    from jsonschema import (
        Draft202012Validator,
        SchemaError,
    )  # here: importing it takes longer than the whole package

    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ToolDefinitionError(
            f"{what} are no valid JSON Schema: {error.json_path}: {error.message}"
        ) from None
    for reference in _references(parameters):
        if not _resolves(parameters, reference):
            raise ToolDefinitionError(
                f"{what} refer to {reference!r}, which is not in the schema; nothing is fetched, so"
                " write it into $defs"
            )


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list | tuple):
        for item in schema:
            yield from _references(item)


def _resolves(schema: Mapping[str, Any], reference: str) -> bool:
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    try:
        Registry().resolver_with_root(DRAFT202012.create_resource(schema)).lookup(reference)
    except Unresolvable:
        return False
    return True


# --- arguments ------------------------------------------------------------------------------------

_SHOWN_PROBLEMS = 3
_SHOWN_CHARS = 200


def check_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert and validate arguments.

    Args:
        parameters: the tool's object schema. Names it does not list are refused unless it sets
            ``additionalProperties`` or ``unevaluatedProperties``; ``nullable: true`` allows null.
        arguments: the model's arguments.

    Raises:
        ToolArgumentError: describes the first few problems to the model.
    """
    from jsonschema import (
        Draft202012Validator,
    )  # here: importing it takes longer than the whole package
    from referencing.exceptions import Unresolvable

    if not isinstance(arguments, Mapping):
        raise ToolArgumentError(
            f"arguments must be a JSON object, got {_clip(json.dumps(arguments))}"
        )
    schema = _closed(_object_schema(parameters))
    try:
        converted = _Converter(schema).convert(dict(arguments))
        errors = list(Draft202012Validator(schema).iter_errors(converted))
    except _TooComplexError as error:
        raise ToolArgumentError(str(error)) from None
    except OverflowError:  # of a whole number that no float can hold, where floats are compared
        raise ToolArgumentError("a number is larger than any float; send a smaller one") from None
    except (Unresolvable, RecursionError) as error:
        raise ToolArgumentError(
            f"the tool's schema cannot be followed: {_clip(str(error))}"
        ) from None
    if errors:
        errors.sort(key=lambda error: str(error.json_path))
        raise ToolArgumentError("; ".join(_describe(error) for error in errors[:_SHOWN_PROBLEMS]))
    return converted


def convert_arguments(
    parameters: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call as the types that a tool's schema names; what does not fit is left as it is.

    Args:
        parameters: the tool's object schema, maybe of a client of the endpoint. One that cannot be
            followed changes nothing.
        arguments: as the model wrote them.
    """
    from jsonschema.exceptions import UnknownType
    from referencing.exceptions import Unresolvable

    # Nobody has checked the schema: whoever wrote it then reads the arguments as the model wrote
    # them.
    wrong_schema = (Unresolvable, UnknownType, TypeError, ValueError, AttributeError, LookupError)
    unfit = (*wrong_schema, _TooComplexError, RecursionError, OverflowError)
    try:
        return _Converter(_object_schema(parameters)).convert(dict(arguments))
    except unfit as error:
        logger.debug(
            "arguments are left as they are, as their schema cannot be followed: %s", error
        )
        return dict(arguments)


def _describe(error: Any) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    return (f"argument {where}: " if where else "") + _clip(error.message)


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object schema that refuses names it does not list, unless it says otherwise."""
    if (
        schema.get("additionalProperties") is not None
        or schema.get("unevaluatedProperties") is not None
    ):
        return dict(schema)
    if _APPLICATORS.isdisjoint(schema):
        return {**schema, "additionalProperties": False}
    return {
        **schema,
        "unevaluatedProperties": False,
    }  # which sees the names in references and unions


_APPLICATORS = frozenset(
    {
        "$dynamicRef",
        "$ref",
        "allOf",
        "anyOf",
        "dependentSchemas",
        "else",
        "if",
        "oneOf",
        "patternProperties",
        "then",
    }
)
_BEYOND_TYPE = frozenset(
    {"$dynamicRef", "$ref", "allOf", "anyOf", "const", "else", "if", "not", "oneOf", "then"}
)
_SUBSCHEMAS = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
)
_SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SUBSCHEMA_MAPPINGS = (
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
)


def _object_schema(parameters: Any) -> Any:
    """Return the schema of arguments for a validator; arguments are an object, never null."""
    if isinstance(parameters, Mapping):
        parameters = {key: value for key, value in parameters.items() if key != "nullable"}
    return _nullable_to_null(parameters)


def _nullable_to_null(schema: Any) -> Any:
    """Convert OpenAPI's ``nullable`` (in prompts) to JSON Schema's null (for validators).

    A schema of plain types stays where it is, as references may lead into it.
    """
    if not isinstance(schema, Mapping):
        return schema
    plain = {key: value for key, value in schema.items() if key != "nullable"}
    for key in _SUBSCHEMAS:
        if key in plain:
            plain[key] = _nullable_to_null(plain[key])
    for key in _SUBSCHEMA_LISTS:
        if isinstance(plain.get(key), list):
            plain[key] = [_nullable_to_null(option) for option in plain[key]]
    for key in _SUBSCHEMA_MAPPINGS:
        if isinstance(plain.get(key), Mapping):
            plain[key] = {name: _nullable_to_null(value) for name, value in plain[key].items()}
    if schema.get("nullable") is not True:
        return plain
    types = plain.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not _BEYOND_TYPE.isdisjoint(plain):
        return {"anyOf": [plain, {"type": "null"}]}
    plain["type"] = [*types, *({"null"} - set(types))]
    if isinstance(plain.get("enum"), list) and None not in plain["enum"]:
        plain["enum"] = [*plain["enum"], None]
    return plain


CONVERSIONS_PER_VALUE = 100
"""How often, on average, each value in the arguments of one call is compared with a schema: schemas
can branch at every level, so that it would take for ever to try all ways."""
_NULL_WORDS = ("null", "None")
_BOOLEAN_WORDS = ("true", "false")
_OF_THE_VALUE_ITSELF = ("type", "enum", "const", "required")
"""Keywords that decide what a text means, besides the schemas of what is in it."""
_BOUNDS = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
)
"""Further ones, by which the options of a union differ. Patterns are left out: whoever asks chooses
them, and they can take for ever."""


class _TooComplexError(Exception):
    """Value and schema branch too often to be compared."""


class _Converter:
    """Converts values by one schema, which may refer to its parts.

    Of a union, the first option counts that takes the value as it is, else the first that takes one
    of its readings.

    Args:
        root: the schema.
    """

    def __init__(self, root: Any) -> None:
        from jsonschema import Draft202012Validator
        from referencing import Registry
        from referencing.jsonschema import DRAFT202012

        self._root = root
        self._references = Registry().resolver_with_root(DRAFT202012.create_resource(root))
        self._is_valid = lambda schema, value: Draft202012Validator(schema).is_valid(value)
        self._left = 0  # comparisons

    def convert(self, value: Any) -> Any:
        """Return the value by the whole schema.

        Raises:
            _TooComplexError: they branch too often.
            Unresolvable: the schema refers to something outside itself.
            UnknownType: it names a type that there is not.
        """
        self._left = CONVERSIONS_PER_VALUE * (10 + _count(value))
        return self._convert(self._root, value, with_literals=True)[0]

    def _convert(self, schema: Any, value: Any, *, with_literals: bool) -> tuple[Any, bool]:
        """Return a value by a schema, and whether it fits now.

        Args:
            schema: the schema.
            value: any JSON.
            with_literals: text may be read as the literal in it; else whole numbers alone are
                converted.
        """
        self._left -= 1
        if self._left < 0:
            raise _TooComplexError(
                "the arguments fit the tool's schema in too many ways to try; nest them less"
            )
        as_it_is, fits = self._convert_reading(schema, value, with_literals=with_literals)
        if fits or not with_literals or not isinstance(value, str):
            return as_it_is, fits
        of_the_type = None
        for literal in _literals(value):
            converted, fits = self._convert_reading(schema, literal, with_literals=True)
            if fits:
                return converted, True
            if of_the_type is None and self._has_type(schema, literal):
                of_the_type = converted
        # An object that lacks something is better than the text of it: a message can then name what
        # it lacks.
        return (as_it_is if of_the_type is None else of_the_type), False

    def _has_type(self, schema: Any, value: Any) -> bool:
        """Return whether a value is of the type that a schema names itself."""
        return (
            isinstance(schema, Mapping)
            and "type" in schema
            and self._is_valid({"type": schema["type"]}, value)
        )

    def _convert_reading(self, schema: Any, value: Any, *, with_literals: bool) -> tuple[Any, bool]:
        """Return one reading of a value by a schema and its parts, and whether it fits."""
        if not isinstance(schema, Mapping):
            return value, schema is not False
        itself = {key: schema[key] for key in _OF_THE_VALUE_ITSELF if key in schema}
        fits = not itself or self._is_valid(itself, value)
        bounds = {key: schema[key] for key in _BOUNDS if key in schema}
        if bounds:
            fits = self._is_valid(bounds, value) and fits
        if isinstance(value, float) and value.is_integer() and fits and itself:
            if not self._is_valid(itself, value + 0.5):
                value = int(value)  # only whole numbers are allowed
        parts: list[Any] = list(schema.get("allOf", ()))
        if "$ref" in schema:
            parts.append(self._references.lookup(schema["$ref"]).contents)
        if "if" in schema:
            _, holds = self._convert(schema["if"], value, with_literals=False)
            parts.append(schema.get("then" if holds else "else", True))
        if isinstance(value, dict):
            parts += [
                part for name, part in schema.get("dependentSchemas", {}).items() if name in value
            ]
        for part in parts:
            value, part_fits = self._convert(part, value, with_literals=with_literals)
            fits = fits and part_fits
        if isinstance(value, dict):
            value, parts_fit = self._convert_object(schema, value, with_literals=with_literals)
            fits = fits and parts_fit
        elif isinstance(value, list):
            value, parts_fit = self._convert_list(schema, value, with_literals=with_literals)
            fits = fits and parts_fit
        for key in ("anyOf", "oneOf"):
            if key in schema:
                value, option_fits = self._convert_by_union(
                    schema[key], value, with_literals=with_literals
                )
                fits = fits and option_fits
        return value, fits

    def _convert_by_union(
        self, options: Sequence[Any], value: Any, *, with_literals: bool
    ) -> tuple[Any, bool]:
        for literally in dict.fromkeys((False, with_literals)):
            for option in options:
                converted, fits = self._convert(option, value, with_literals=literally)
                if fits:
                    return converted, True
        return value, False

    def _convert_object(
        self, schema: Mapping[str, Any], value: dict[str, Any], *, with_literals: bool
    ) -> tuple[dict[str, Any], bool]:
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", True)
        converted = {}
        fits = True
        for name, item in value.items():
            part = properties[name] if name in properties else others
            converted[name], part_fits = self._convert(part, item, with_literals=with_literals)
            fits = fits and part_fits
        return converted, fits

    def _convert_list(
        self, schema: Mapping[str, Any], value: list[Any], *, with_literals: bool
    ) -> tuple[list[Any], bool]:
        first = schema.get("prefixItems", ())
        others = schema.get("items", True)
        converted = []
        fits = True
        for number, item in enumerate(value):
            part = first[number] if number < len(first) else others
            new_item, part_fits = self._convert(part, item, with_literals=with_literals)
            converted.append(new_item)
            fits = fits and part_fits
        return converted, fits


def _count(value: Any) -> int:
    """Return how many values there are in a value, itself included; text may hold as many as it has characters."""
    if isinstance(value, str):
        return 1 + len(value)
    items = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    )
    return 1 + sum(map(_count, items))


def _literals(text: str) -> Iterator[Any]:
    """Yield what the literal in a text may mean."""
    text = text.strip()
    if text in _NULL_WORDS:
        yield None
    if text.lower() in _BOOLEAN_WORDS:
        yield text.lower() == "true"
    try:
        yield parse_json(text)
    except ValueError:
        return
