"""Schemas of tools: annotations to JSON Schema, and a model's arguments to Python values.

Annotations are mapped as by ``transformers.utils.get_json_schema``, for which chat templates are
written, and enums in addition::

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
:func:`convert_arguments` is the one conversion, for the replies that agents and clients of the
endpoint get and for the arguments that tools are called with. It asks a validator of JSON Schema at
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

    origin = typing.get_origin(annotation) or annotation
    arguments = typing.get_args(annotation)
    schema: Schema
    if origin is list:
        schema = {"type": "array"}
        if arguments:
            schema["items"] = json_schema(arguments[0])
        return schema
    if origin is dict:
        schema = {"type": "object"}
        if arguments:
            # Python takes a dict of one argument, or of three.
            if len(arguments) != 2 or arguments[0] is not str:
                raise TypeError(
                    f"write dict[str, ...], not {annotation!r}: JSON's keys are strings"
                )
            schema["additionalProperties"] = json_schema(arguments[1])
        return schema
    if origin is Literal:
        return _choices(arguments)
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Annotated:
        schema = json_schema(arguments[0])
        for metadata in arguments[1:]:
            if isinstance(metadata, str):
                schema["description"] = metadata
                break
        return schema
    raise TypeError(f"{annotation!r} has no JSON Schema; use {_SUPPORTED}")


def _choices(values: Iterable[Any]) -> Schema:
    """Return an ``enum`` with the type(s) of its values; None among them makes it nullable."""
    is_nullable = False
    choices = []
    for value in values:
        if value is None:
            is_nullable = True
        else:
            choices.append(value)

    unsupported = [value for value in choices if type(value) not in _PLAIN]
    if unsupported:
        raise TypeError(f"choices must be str, int, float, bool or None, got {unsupported!r}")
    kinds = list(dict.fromkeys(_PLAIN[type(value)] for value in choices))
    schema: Schema = {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": choices}
    if is_nullable:
        schema["nullable"] = True
    return schema


def _union(arguments: tuple[Any, ...]) -> Schema:
    options = [json_schema(option) for option in arguments if option is not type(None)]
    schema: Schema
    if len(options) == 1:
        schema = options[0]
    elif all(list(option) == ["type"] and isinstance(option["type"], str) for option in options):
        schema = {"type": [option["type"] for option in options]}
    else:
        schema = {"anyOf": options}
    if type(None) in arguments:
        schema["nullable"] = True
    return schema


def make_converter(annotation: Any) -> Callable[[Any], Any] | None:
    """Return the conversion of a valid JSON value to an annotation's type: enum members, floats.

    None for an annotation without a JSON Schema: its tool has an explicit schema, and takes plain
    JSON values.
    """
    try:
        json_schema(annotation)
    except TypeError:
        return None
    return TypeAdapter(annotation).validate_python


# --- explicit schemas -----------------------------------------------------------------------------


def unwrap_function(schema: object, where: str) -> Mapping[str, Any]:
    """Return the ``function`` of ``{type: function, function: {name, description, parameters}}``.

    Args:
        where: names the schema in the message.

    Raises:
        ToolDefinitionError: the schema has another form.
    """
    if isinstance(schema, Mapping) and schema.get("type", "function") == "function":
        function = schema.get("function")
        if isinstance(function, Mapping):
            return function
    raise ToolDefinitionError(
        f"{where} must be {{type: function, function: {{…}}}}, got {schema!r:.100}"
    )


def function_tool(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's format, as chat templates expect it."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def check_parameters(parameters: Mapping[str, Any], what: str) -> None:
    """Check that a tool's parameters are a valid JSON Schema.

    Args:
        what: names the parameters in messages.

    Raises:
        ToolDefinitionError: they are not, or refer to something outside the schema.
    """
    # Importing it takes longer than importing the whole package.
    from jsonschema import Draft202012Validator, SchemaError

    try:
        Draft202012Validator.check_schema(parameters)
    except SchemaError as error:
        raise ToolDefinitionError(
            f"{what} are not valid JSON Schema: {error.json_path}: {error.message}"
        ) from None
    for reference in _references(parameters):
        if not _resolves(parameters, reference):
            raise ToolDefinitionError(
                f"{what} refer to {reference!r}, which is not in the schema; nothing is fetched, so"
                " write it into $defs"
            )


def _references(schema: Any) -> Iterator[str]:
    """Yield the references in a schema and its parts."""
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

    resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
    try:
        resolver.lookup(reference)
    except Unresolvable:
        return False
    return True


# --- arguments ------------------------------------------------------------------------------------

_MAX_PROBLEMS = 3
"""Maximum problems that one message tells the model of."""
_MAX_PROBLEM_CHARS = 200


def check_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert and validate arguments.

    Args:
        parameters: the tool's object schema. Names it does not list are refused unless it sets
            ``additionalProperties`` or ``unevaluatedProperties``; ``nullable: true`` allows null.
        arguments: the model's arguments.

    Raises:
        ToolArgumentError: describes the first few problems to the model.
    """
    # Importing it takes longer than importing the whole package.
    from jsonschema import Draft202012Validator
    from referencing.exceptions import Unresolvable

    if not isinstance(arguments, Mapping):
        raise ToolArgumentError(
            f"arguments must be a JSON object, got {_clip(json.dumps(arguments))}"
        )

    schema = _refusing_unknown_names(_object_schema(parameters))
    try:
        converted = _Converter(schema).convert(dict(arguments))
        errors = list(Draft202012Validator(schema).iter_errors(converted))
    except _TooComplexError as error:
        raise ToolArgumentError(str(error)) from None
    except OverflowError:  # a whole number that no float can hold was compared with a float
        raise ToolArgumentError("a number is larger than any float; send a smaller one") from None
    except (Unresolvable, RecursionError) as error:
        raise ToolArgumentError(
            f"the tool's schema cannot be followed: {_clip(str(error))}"
        ) from None

    if errors:
        errors.sort(key=lambda error: str(error.json_path))
        problems = [_describe(error) for error in errors[:_MAX_PROBLEMS]]
        raise ToolArgumentError("; ".join(problems))
    return converted


def convert_arguments(
    parameters: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call as the types that a tool's schema names.

    What does not fit is left as it is.

    Args:
        parameters: the tool's object schema, maybe of a client of the endpoint. One that cannot be
            followed changes nothing.
        arguments: as the model wrote them.
    """
    from jsonschema.exceptions import UnknownType
    from referencing.exceptions import Unresolvable

    # Nobody has checked a client's schema. Where it is wrong, the client gets the arguments as the
    # model wrote them.
    wrong_schema = (Unresolvable, UnknownType, TypeError, ValueError, AttributeError, LookupError)
    too_complex = (_TooComplexError, RecursionError, OverflowError)
    try:
        return _Converter(_object_schema(parameters)).convert(dict(arguments))
    except (*wrong_schema, *too_complex) as error:
        logger.debug(
            "arguments are left as they are, as their schema cannot be followed: %s", error
        )
        return dict(arguments)


def _describe(error: Any) -> str:
    message = _clip(error.message)
    path = ".".join(str(part) for part in error.absolute_path)
    if not path:
        return message
    return f"argument {path}: {message}"


def _clip(text: str) -> str:
    if len(text) <= _MAX_PROBLEM_CHARS:
        return text
    return text[:_MAX_PROBLEM_CHARS] + "…"


def _refusing_unknown_names(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object schema that refuses names it does not list, unless it says otherwise."""
    refusing = dict(schema)
    for key in ("additionalProperties", "unevaluatedProperties"):
        if schema.get(key) is not None:
            return refusing
    if _APPLICATORS.isdisjoint(schema):
        refusing["additionalProperties"] = False
    else:
        # Unlike additionalProperties, it sees the names in references and unions.
        refusing["unevaluatedProperties"] = False
    return refusing


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

    A schema of plain types is not moved into an ``anyOf``, as references may lead into it.
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

    type_names = plain.get("type")
    if isinstance(type_names, str):
        type_names = [type_names]
    if not isinstance(type_names, list) or not _BEYOND_TYPE.isdisjoint(plain):
        return {"anyOf": [plain, {"type": "null"}]}
    if "null" not in type_names:
        type_names = [*type_names, "null"]
    plain["type"] = type_names
    if isinstance(plain.get("enum"), list) and None not in plain["enum"]:
        plain["enum"] = [*plain["enum"], None]
    return plain


CONVERSIONS_PER_VALUE = 100
"""How often, on average, each value in the arguments of one call is compared with a schema: schemas
can branch at every level, so that it would take for ever to try all ways."""
_NULL_WORDS = ("null", "None")
_BOOLEAN_WORDS = ("true", "false")
_OF_THE_VALUE_ITSELF = ("type", "enum", "const", "required")
"""Keywords that decide what a text means, besides the schemas of its parts."""
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
"""Further keywords, by which the options of a union differ. Patterns are left out: a client chooses
them, and they can take for ever."""


class _TooComplexError(Exception):
    """Value and schema branch too often to be compared."""


class _Converter:
    """Converts values by one schema, which may refer to its parts.

    Of a union, the first option counts that takes the value as it is, else the first that takes one
    of its readings.
    """

    def __init__(self, root: Any) -> None:
        from jsonschema import Draft202012Validator
        from referencing import Registry
        from referencing.jsonschema import DRAFT202012

        self._root = root
        self._references = Registry().resolver_with_root(DRAFT202012.create_resource(root))
        self._is_valid = lambda schema, value: Draft202012Validator(schema).is_valid(value)
        self._comparisons_left = 0

    def convert(self, value: Any) -> Any:
        """Return the value, converted by the whole schema.

        Raises:
            _TooComplexError: value and schema branch too often.
            Unresolvable: the schema refers to something outside itself.
            UnknownType: it names a type that does not exist.
        """
        self._comparisons_left = CONVERSIONS_PER_VALUE * (10 + _count_values(value))
        converted, _ = self._convert(self._root, value, with_literals=True)
        return converted

    def _convert(self, schema: Any, value: Any, *, with_literals: bool) -> tuple[Any, bool]:
        """Return a value, converted by a schema, and whether it fits now.

        Args:
            with_literals: text may be read as the literal in it; else whole numbers alone are
                converted.
        """
        self._comparisons_left -= 1
        if self._comparisons_left < 0:
            raise _TooComplexError(
                "the arguments fit the tool's schema in too many ways to try; nest them less"
            )

        converted, fits = self._convert_reading(schema, value, with_literals=with_literals)
        if fits or not with_literals or not isinstance(value, str):
            return converted, fits

        # An object that lacks something is better than the text of it: a message can then name what
        # it lacks.
        first_of_type = None
        for literal in _literals(value):
            converted_literal, fits = self._convert_reading(schema, literal, with_literals=True)
            if fits:
                return converted_literal, True
            if first_of_type is None and self._has_type(schema, literal):
                first_of_type = converted_literal
        if first_of_type is not None:
            converted = first_of_type
        return converted, False

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
        own_keywords = {key: schema[key] for key in _OF_THE_VALUE_ITSELF if key in schema}
        fits = not own_keywords or self._is_valid(own_keywords, value)
        bounds = {key: schema[key] for key in _BOUNDS if key in schema}
        if bounds:
            fits = self._is_valid(bounds, value) and fits

        is_whole_float = isinstance(value, float) and value.is_integer()
        if is_whole_float and fits and own_keywords:
            # Where a half more is refused, only whole numbers are allowed.
            if not self._is_valid(own_keywords, value + 0.5):
                value = int(value)

        parts: list[Any] = list(schema.get("allOf", ()))
        if "$ref" in schema:
            parts.append(self._references.lookup(schema["$ref"]).contents)
        if "if" in schema:
            _, holds = self._convert(schema["if"], value, with_literals=False)
            branch = "then" if holds else "else"
            parts.append(schema.get(branch, True))
        if isinstance(value, dict):
            for name, part in schema.get("dependentSchemas", {}).items():
                if name in value:
                    parts.append(part)
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
        passes = [False]
        if with_literals:
            passes.append(True)
        for reads_literals in passes:
            for option in options:
                converted, fits = self._convert(option, value, with_literals=reads_literals)
                if fits:
                    return converted, True
        return value, False

    def _convert_object(
        self, schema: Mapping[str, Any], value: dict[str, Any], *, with_literals: bool
    ) -> tuple[dict[str, Any], bool]:
        properties = schema.get("properties", {})
        additional = schema.get("additionalProperties", True)
        converted = {}
        fits = True
        for name, item in value.items():
            item_schema = properties[name] if name in properties else additional
            converted[name], item_fits = self._convert(
                item_schema, item, with_literals=with_literals
            )
            fits = fits and item_fits
        return converted, fits

    def _convert_list(
        self, schema: Mapping[str, Any], value: list[Any], *, with_literals: bool
    ) -> tuple[list[Any], bool]:
        prefix = schema.get("prefixItems", ())
        following = schema.get("items", True)
        converted = []
        fits = True
        for index, item in enumerate(value):
            item_schema = prefix[index] if index < len(prefix) else following
            converted_item, item_fits = self._convert(
                item_schema, item, with_literals=with_literals
            )
            converted.append(converted_item)
            fits = fits and item_fits
        return converted, fits


def _count_values(value: Any) -> int:
    """Return how many values there are in a value, itself included.

    Text, which may be read as a literal, counts as many as it has characters.
    """
    if isinstance(value, str):
        return 1 + len(value)
    if isinstance(value, Mapping):
        return 1 + sum(map(_count_values, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_count_values, value))
    return 1


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
