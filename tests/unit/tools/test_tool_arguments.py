"""Arguments: forgiving about quotes, strict about everything else."""

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_agent_rl.errors import ToolArgumentError
from jax_agent_rl.tools.schema import check_arguments


def one(kind, **more):
    return {"type": "object", "properties": {"x": {"type": kind, **more}}, "required": ["x"]}


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
            {"type": "object", "properties": {"x": {"anyOf": [{"type": "null"}, {"type": "integer"}]}}},
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
    schema = {"type": "object", "properties": {"nullable": {"type": "boolean"}}, "required": ["nullable"]}
    assert check_arguments(schema, {"nullable": True}) == {"nullable": True}


def test_extra_arguments_pass_where_the_schema_says_so():
    assert check_arguments({"type": "object", "additionalProperties": True}, {"a": 1}) == {"a": 1}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
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
