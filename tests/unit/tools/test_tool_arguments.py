"""Arguments: forgiving about quotes, strict about everything else."""

import json

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import ToolArgumentError, ToolDefinitionError
from jax_agent_rl.tools import function_tool
from jax_agent_rl.tools.schema import check_arguments, convert_arguments


def one(kind, **fields):
    return {"type": "object", "properties": {"x": {"type": kind, **fields}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("schema", "given_value", "value"),
    [
        (one("integer"), "3", 3),
        (one("integer"), 3.0, 3),
        (one("integer"), "3.0", 3),
        (one("number"), "2.5", 2.5),
        (one("boolean"), "True", True),
        (one("array", items={"type": "integer"}), '["1", 2]', [1, 2]),
        (one("object", additionalProperties={"type": "integer"}), {"a": "1"}, {"a": 1}),
        (one("integer", nullable=True), None, None),
        (one("integer", nullable=True), "4", 4),
        (one("integer", nullable=True), "null", None),
        (one("array", nullable=True), "None", None),
        (one("string", nullable=True), "null", "null"),
        (
            {
                "type": "object",
                "properties": {"x": {"anyOf": [{"type": "null"}, {"type": "integer"}]}},
            },
            "4",
            4,
        ),
        (one("string"), "3", "3"),
    ],
)
def test_a_quoted_literal_is_taken_for_what_it_spells(schema, given_value, value):
    checked = check_arguments(schema, {"x": given_value})["x"]
    assert checked == value and type(checked) is type(value)


@pytest.mark.parametrize(
    ("schema", "arguments", "message"),
    [
        (one("integer"), {"x": "three"}, "argument x: 'three' is not of type 'integer'"),
        (one("integer"), {"x": 3.5}, "3.5 is not of type 'integer'"),
        (one("integer"), {"x": True}, "True is not of type 'integer'"),
        (one("integer"), {"x": "true"}, "'true' is not of type 'integer'"),
        (one("integer"), {"x": None}, "None is not of type 'integer'"),
        (one("string"), {"x": 3}, "3 is not of type 'string'"),
        (one("string"), {}, "'x' is a required property"),
        (one("string"), {"x": "a", "y": 1}, "'y' was unexpected"),
        (one("string", enum=["a", "b"]), {"x": "c"}, "'c' is not one of"),
        (one("string"), [1], "must be a JSON object"),
        (one("string"), {"x": list(range(10_000))}, "…"),
    ],
)
def test_anything_else_is_an_error_the_model_can_read(schema, arguments, message):
    with pytest.raises(ToolArgumentError) as error:
        check_arguments(schema, arguments)
    assert message in str(error.value)
    assert len(str(error.value)) < 300


def test_a_property_called_nullable_is_a_property():
    schema = {
        "type": "object",
        "properties": {"nullable": {"type": "boolean"}},
        "required": ["nullable"],
    }
    assert check_arguments(schema, {"nullable": True}) == {"nullable": True}


def test_extra_arguments_pass_where_the_schema_says_so():
    assert check_arguments({"type": "object", "additionalProperties": True}, {"a": 1}) == {"a": 1}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3)
    ),
    max_leaves=8,
)
kinds = st.sampled_from(["string", "integer", "number", "boolean", "array", "object"])


@given(kinds, json_values)
def test_what_passes_is_valid_and_what_was_valid_passes(kind, value):
    """Golden source: jsonschema on the untouched value."""
    schema = one(kind)
    try:
        checked = check_arguments(schema, {"x": value})
    except ToolArgumentError:
        assert not jsonschema.Draft202012Validator(schema).is_valid({"x": value})
    else:
        assert jsonschema.Draft202012Validator(schema).is_valid(checked)


# --- schemas with parts ---------------------------------------------------------------------------

DEFS = {
    "P": {"type": "object", "properties": {"n": {"type": "integer"}}},
    "Tree": {
        "type": "object",
        "properties": {
            "v": {"type": "integer"},
            "kids": {"type": "array", "items": {"$ref": "#/$defs/Tree"}},
        },
    },
}


def part(schema):
    return {"type": "object", "properties": {"x": schema}, "$defs": DEFS}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": ["integer", "number"]}, "2", 2),
        ({"type": ["integer", "null"]}, "2", 2),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["string", "integer"]}, "2", "2"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "true", True),
        ({"$ref": "#/$defs/P"}, '{"n": "1"}', {"n": 1}),
        (
            {"$ref": "#/$defs/Tree"},
            '{"v": "1", "kids": [{"v": "2"}]}',
            {"v": 1, "kids": [{"v": 2}]},
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "2", "2"),
        ({"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, "true", True),
        (
            {"oneOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "object"}]},
            '["2"]',
            [2],
        ),
        ({"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]}, '{"n": 3}', {"n": 3}),
        ({"allOf": [{"type": "integer"}, {"minimum": 1}]}, "3", 3),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "boolean"}},
            '["1", "true"]',
            [1, True],
        ),
        (
            {"type": "object", "properties": {"on": {"type": "boolean"}}},
            {"on": "false"},
            {"on": False},
        ),
    ],
)
def test_unions_references_and_enums_are_converted_as_they_are_validated(schema, written, value):
    for convert in (check_arguments, convert_arguments):
        converted = convert(part(schema), {"x": written})["x"]
        assert converted == value and type(converted) is type(value)


@pytest.mark.parametrize("key", ["$ref", "allOf", "anyOf"])
def test_a_schema_that_is_a_reference_itself_names_its_arguments(key):
    definition = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema = {
        "$defs": {"A": definition},
        key: "#/$defs/A" if key == "$ref" else [{"$ref": "#/$defs/A"}],
    }
    assert check_arguments(schema, {"n": "3"}) == {"n": 3}
    with pytest.raises(ToolArgumentError, match="'m' was unexpected"):
        check_arguments(schema, {"n": "3", "m": 1})


def test_a_union_of_a_function_can_be_called():
    @function_tool
    def double(x: int | float, y: int | str | None = None) -> str:
        """Double."""
        return str(2 * x)

    assert check_arguments(double.parameters, {"x": "2"}) == {"x": 2}
    assert check_arguments(double.parameters, {"x": "2.5", "y": "3"}) == {"x": 2.5, "y": "3"}


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_number_that_no_float_holds_stays_text(number):
    assert convert_arguments(one("number"), {"x": number}) == {"x": number}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9) | st.text("ab1 ", max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xy"), inner, max_size=2)
    ),
    max_leaves=6,
)
kinds = st.sampled_from(["integer", "number", "boolean", "string", "null"]).map(
    lambda kind: {"type": kind}
)
schemas = st.recursive(
    kinds | st.just({"$ref": "#/$defs/Tree"}) | st.just({"enum": [1, "a", None]}),
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda x: {"type": "object", "properties": {"x": x}}, inner)
        | st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    ),
    max_leaves=5,
)


def as_bare_text(value):
    return value if isinstance(value, str) else json.dumps(value)


@given(schemas, values)
def test_what_a_schema_takes_is_left_as_it_is_and_its_text_means_it(schema, value):
    """The judge is jsonschema."""
    parameters = part(schema)
    if not jsonschema.Draft202012Validator(parameters).is_valid({"x": value}):
        return
    converted = convert_arguments(parameters, {"x": value})["x"]
    assert converted == value, "only 3.0 becomes 3"
    read = convert_arguments(parameters, {"x": as_bare_text(value)})["x"]
    assert jsonschema.Draft202012Validator(parameters).is_valid({"x": read})


@given(schemas, values)
def test_converting_again_changes_nothing(schema, value):
    once = convert_arguments(part(schema), {"x": value})
    assert convert_arguments(part(schema), once) == once


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://example.com/schema"},
        {"$ref": "#/nowhere"},
        {"type": "object", "properties": {"x": {"$ref": "#/properties/x"}}},
        {"properties": 3},
        {"type": "object", "properties": {"x": {"type": "no such type"}}},
        {"anyOf": 3},
    ],
)
def test_a_clients_schema_that_cannot_be_followed_changes_nothing(schema):
    assert convert_arguments(schema, {"x": "1"}) == {"x": "1"}


def test_a_schema_that_branches_at_every_level_takes_bounded_work():
    option = {"type": "array", "items": {"$ref": "#/$defs/J"}}
    nested = {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/J"}, {"type": "object", "required": ["q"]}]},
    }
    schema = {**one("array"), "$defs": {"J": {"anyOf": [option, nested, {"type": "integer"}]}}}
    schema["properties"]["x"] = {"$ref": "#/$defs/J"}
    value = "s"
    for _ in range(40):  # two to the power of 40 ways, were they all tried
        value = [value]
    assert convert_arguments(schema, {"x": value}) == {"x": value}
    with pytest.raises(ToolArgumentError, match="too many ways"):
        check_arguments(schema, {"x": value})


def test_a_tool_whose_schema_refers_to_what_is_not_there_is_refused():
    with pytest.raises(ToolDefinitionError, match="#/nowhere"):
        function_tool(
            schema={
                "type": "function",
                "function": {"name": "f", "parameters": part({"$ref": "#/nowhere"})},
            }
        )(lambda x: x)


OBJECT = {"type": "object"}
BEYOND_PROPERTIES = {
    "a reference into what may be null": (
        OBJECT
        | {
            "properties": {
                "tree": {"type": "array", "items": {"type": "integer"}, "nullable": True},
                "x": {"$ref": "#/properties/tree/items"},
            }
        },
        {"x": "3"},
        {"x": 3},
    ),
    "arguments that may be null": (
        OBJECT
        | {
            "nullable": True,
            "$defs": {"n": {"type": "integer"}},
            "properties": {"x": {"$ref": "#/$defs/n"}},
        },
        {"x": "3"},
        {"x": 3},
    ),
    "a condition": (
        OBJECT
        | {
            "properties": {"kind": {"type": "string"}},
            "if": {"properties": {"kind": {"const": "n"}}},
            "then": {"properties": {"x": {"type": "integer"}}},
        },
        {"kind": "n", "x": "3"},
        {"kind": "n", "x": 3},
    ),
    "a dependent schema": (
        OBJECT
        | {
            "properties": {"kind": {"type": "string"}},
            "dependentSchemas": {"kind": {"properties": {"x": {"type": "integer"}}}},
        },
        {"kind": "n", "x": "3"},
        {"kind": "n", "x": 3},
    ),
    "options that differ in their bounds": (
        OBJECT
        | {
            "properties": {
                "x": {"oneOf": [{"type": "string", "minLength": 5}, {"type": "integer"}]}
            }
        },
        {"x": "3"},
        {"x": 3},
    ),
}


@pytest.mark.parametrize("name", BEYOND_PROPERTIES)
def test_arguments_are_converted_wherever_the_schema_names_their_type(name):
    schema, written, wanted = BEYOND_PROPERTIES[name]
    assert convert_arguments(schema, written) == wanted
    assert check_arguments(schema, written) == wanted


def test_a_number_that_no_float_can_hold_is_an_error_of_the_call():
    schema = {"type": "object", "properties": {"x": {"type": "number", "multipleOf": 0.01}}}
    with pytest.raises(ToolArgumentError):
        check_arguments(schema, {"x": 10**400})


@pytest.mark.parametrize(
    "part", [{"prefixItems": {"a": 1}}, {"items": [1]}, {"properties": ["x"]}, {"anyOf": 5}]
)
def test_a_schema_that_is_none_leaves_arguments_as_they_are(part):
    schema = {"type": "object", "properties": {"x": {"type": "array", **part}}}
    assert convert_arguments(schema, {"x": ["1"]}) == {"x": ["1"]}
