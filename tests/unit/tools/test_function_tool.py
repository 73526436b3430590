"""``@function_tool``: schemas equal to those of transformers, calls, and what is refused."""

import asyncio
import enum
import json
import threading
from typing import Annotated, Any, Literal, Optional, Union

import numpy as np
import pytest
from pydantic import BaseModel

from jax_agent_rl.errors import ToolDefinitionError
from jax_agent_rl.tools import FunctionTool, ToolResponse, function_tool
from jax_agent_rl.tools.base import as_response
from tests.messages import raises

transformers_utils = pytest.importorskip("transformers.utils")


def every_kind(
    text: str,
    count: int,
    ratio: float,
    flag: bool,
    names: list[str],
    grid: list[list[int]],
    table: dict[str, float],
    maybe: Optional[int],  # noqa: UP045  the spelling users write
    either: Union[int, str],  # noqa: UP007
    mode: Literal["fast", "slow"],
    level: Literal[1, 2],
    anything: Any,
    modern: int | None = None,
    mixed: list[int] | str = "x",
    limit: int = 3,
) -> str:
    """
    Does all sorts of things.

    Args:
        text: Some text.
        count: A number
            that is explained on two lines.
        ratio: A ratio.
        flag: A flag.
        names: Names.
        grid: A grid.
        table: A table.
        maybe: Maybe a number.
        either: Either.
        mode: The mode.
        level: The level.
        anything: Anything.
        modern: The modern spelling.
        mixed: A union that is not of plain types.
        limit: A limit.

    Returns:
        Nothing of interest.
    """
    return ""


def test_schema_equals_the_one_transformers_derives():
    """Golden source: ``transformers.utils.get_json_schema``, which chat templates are made for."""
    ours = FunctionTool(every_kind).schema
    theirs = transformers_utils.get_json_schema(every_kind)
    theirs["function"].pop("return", None)
    assert ours == theirs


def test_parameters_without_default_are_required():
    assert "limit" not in FunctionTool(every_kind).parameters["required"]
    assert "maybe" in FunctionTool(every_kind).parameters["required"]


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


async def test_an_enum_shows_its_values_and_the_function_gets_the_member():
    seen = []

    @function_tool
    def paint(color: Color, more: list[Color], none: Color | None = None) -> str:
        seen.append((color, more, none))
        return color.name

    assert paint.parameters["properties"]["color"] == {"type": "string", "enum": ["red", "blue"]}
    result = await paint.execute("t", {"color": "red", "more": ["blue"], "none": "blue"})
    assert result == "RED"
    assert seen == [(Color.RED, [Color.BLUE], Color.BLUE)]


async def test_a_whole_number_reaches_a_float_parameter_as_float():
    @function_tool
    def half(x: float) -> str:
        return repr(x)

    assert await half.execute("t", {"x": 3}) == "3.0"


def test_annotated_text_describes_a_parameter():
    @function_tool
    def greet(name: Annotated[str, "Who."]) -> str:
        return name

    assert greet.parameters["properties"]["name"] == {"type": "string", "description": "Who."}


@pytest.mark.parametrize(
    "ending", ["Returns: its price.", "Raises: ValueError: none.", "Returns:\n    its price."]
)
def test_a_section_after_the_arguments_may_stand_on_one_line(ending):
    def price(item: str) -> str:
        return item

    price.__doc__ = f"Price of an item.\n\nArgs:\n    item: its name.\n\n{ending}"
    tool = function_tool(price)
    assert tool.description == "Price of an item."
    assert tool.parameters["properties"] == {"item": {"type": "string", "description": "its name."}}


def test_a_sentence_of_the_description_may_look_like_a_section():
    def price(item: str) -> str:
        """Price of an item.

        Note: in euros.
        """
        return item

    assert function_tool(price).description == "Price of an item.\n\nNote: in euros."


def test_name_and_description_can_be_given():
    @function_tool(name="sum", description="Adds.")
    def add(a: int, b: int) -> int:
        """Ignored."""
        return a + b

    assert (add.name, add.description) == ("sum", "Adds.")
    assert add(1, 2) == 3, "a tool stays callable as the function it was"


async def test_a_sync_function_runs_in_a_thread_and_an_async_one_does_not():
    @function_tool
    def blocking() -> str:
        return str(threading.get_ident())

    @function_tool
    async def cooperative() -> str:
        await asyncio.sleep(0)
        return str(threading.get_ident())

    this_thread = str(threading.get_ident())
    assert await blocking.execute("t", {}) != this_thread
    assert await cooperative.execute("t", {}) == this_thread


def _no_annotation(x):
    return x


def _varargs(*x: int):
    return x


def _kwargs(**x: int):
    return x


def _positional_only(x: int, /):
    return x


def _unsupported(x: set[int]):
    return x


def _int_keys(x: dict[int, str]):
    return x


def _keys_alone(x: dict[str]):  # type: ignore[type-arg]
    return x


def _stale_docstring(x: int):
    """Text.

    Args:
        y: No such parameter.
    """


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (_no_annotation, {"key": "'x'", "fix": "type annotation"}),
        (_varargs, {"value": "*x: int"}),
        (_kwargs, {"value": "**x: int"}),
        (_positional_only, {"value": "x: int"}),
        (_unsupported, {"value": "set[int]", "fix": "JSON Schema"}),
        (_int_keys, {"value": "dict[int, str]"}),
        (_keys_alone, {"value": "dict[str]"}),
        (_stale_docstring, {"value": "describes ['y']"}),
    ],
)
def test_a_wrong_declaration_is_refused_with_the_place(function, named):
    with raises(ToolDefinitionError, **named) as error:
        function_tool(function)
    assert "test_function_tool.py:" in str(error.value)


@pytest.mark.parametrize("thing", [3, str.upper, object()])
def test_only_functions_are_tools(thing):
    with pytest.raises(ToolDefinitionError, match="needs a function"):
        function_tool(thing)


def test_a_name_may_stand_first():
    @function_tool("web_search")
    def search(query: str) -> str:
        """Searches."""
        return query

    assert (search.name, search.description, search("x")) == ("web_search", "Searches.", "x")
    with pytest.raises(ToolDefinitionError, match="'a' and 'b'"):
        function_tool("a", name="b")


# --- a schema of one's own ------------------------------------------------------------------------


PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string"}, "level": {"enum": ["l", "h"]}},
    "required": ["query"],
}
SCHEMA = {
    "type": "function",
    "function": {"name": "web_search", "description": "Told so.", "parameters": PARAMETERS},
}


class Level(enum.Enum):
    LOW = "l"
    HIGH = "h"


@pytest.mark.parametrize("name", [None, "web_search"])
async def test_a_given_schema_is_what_the_model_reads(name):
    @function_tool(name, schema=SCHEMA)
    async def search(query, level: Level = Level.LOW, *, hidden=0, **rest: set[int]):
        return f"{query} {level} {hidden}"

    assert search.schema == SCHEMA
    assert await search.execute("t", {"query": "x", "level": "h"}, hidden=1) == "x Level.HIGH 1"


def test_a_given_schema_may_be_a_pydantic_model_without_a_description():
    class Function(BaseModel):
        name: str
        description: str | None = None
        parameters: dict

    class Schema(BaseModel):
        type: str = "function"
        function: Function

    schema = Schema(function=Function(name="web_search", parameters=PARAMETERS))

    @function_tool(schema=schema)
    def search(query: str, level: str = "l") -> str:
        """Searches.

        Args:
            query: What for.
        """
        return query

    assert (search.name, search.description, search.parameters) == (
        "web_search",
        "Searches.",
        PARAMETERS,
    )


async def test_a_given_schema_stands_for_annotations_that_say_no_json():
    function = {"parameters": {"type": "object", "properties": {"ids": {"type": "array"}}}}

    @function_tool("total", schema={"type": "function", "function": function})
    def add_up(ids: set[int] | list[int]) -> int:
        return sum(ids)

    assert add_up.name == "total"
    assert await add_up.execute("t", {"ids": [1, 2]}) == 3


def _takes_a_query(query: str) -> str:
    return query


def _function(**changed):
    return {"type": "function", "function": {**SCHEMA["function"], **changed}}


@pytest.mark.parametrize(
    ("name", "schema", "named"),
    [
        (None, {"name": "x"}, {"fix": "{type: function, function"}),
        (None, {"type": "function", "function": 3}, {"fix": "{type: function, function"}),
        (None, SCHEMA, {"value": "['level']"}),
        (
            "other",
            _function(parameters={"type": "object"}),
            {"value": ("'other'", "'web_search'")},
        ),
        (None, _function(parameters={"type": "string"}), {"fix": "type object"}),
        (
            None,
            _function(parameters={"type": "object", "properties": {"query": {"type": "text"}}}),
            {"value": "not valid JSON"},
        ),
    ],
)
def test_a_wrong_schema_is_refused_with_the_place(name, schema, named):
    with raises(ToolDefinitionError, **named) as error:
        function_tool(name, schema=schema)(_takes_a_query)
    assert "_takes_a_query" in str(error.value)
    assert "test_function_tool.py:" in str(error.value)


@pytest.mark.parametrize(
    ("result", "text", "reward", "metrics"),
    [
        ("hi", "hi", 0.0, {}),
        ({"a": "é"}, '{"a": "é"}', 0.0, {}),
        (ToolResponse(text="r", reward=0.5), "r", 0.5, {}),
        (("hi", 1), "hi", 1, {}),
        (({"a": 1}, 0.25, {"rows": 3}), '{"a": 1}', 0.25, {"rows": 3}),
        ((ToolResponse(text="r", reward=9.0), -1.0), "r", -1.0, {}),
        (("x",), "x", 0.0, {}),
        (("x", None, None), "x", 0.0, {}),
        ((ToolResponse(text="r", reward=0.5), None), "r", 0.5, {}),
        (("x", False), "x", 0.0, {}),
        (("x", True), "x", 1.0, {}),
        (
            ("x", np.float32(1), {"rows": np.int64(3), "hit": np.bool_(True)}),
            "x",
            1.0,
            {"rows": 3, "hit": 1},
        ),
        (ToolResponse(text="r", reward=np.float64(0.5)), "r", 0.5, {}),
        ((3, 1), "3", 1.0, {}),
        (2.5, "2.5", 0.0, {}),
        (False, "False", 0.0, {}),
        (np.float32(1.5), "1.5", 0.0, {}),
    ],
)
def test_every_documented_result_is_understood(result, text, reward, metrics):
    response = as_response(result)
    assert (response.text, response.reward, response.metrics) == (text, reward, metrics)
    assert {type(number) for number in (response.reward, *response.metrics.values())} == {float}


@pytest.mark.parametrize("result", [["Paris", 2], ["Paris", 2, {"rows": 1}], ["Paris"], []])
def test_a_list_is_a_result_and_no_pair(result):
    response = as_response(result)
    assert (json.loads(response.text), response.reward, response.metrics) == (result, 0.0, {})


@pytest.mark.parametrize(
    "result",
    [
        None,
        (),
        (None, 1),
        ("x", 1, {}, 2),
        (("x", 1), 2),
        ("x", float("nan")),
        ("x", 10**400),
        ("x", "1"),
        ("x", np.ones(2)),
        ("x", 1.0, {"a": "b"}),
        ("x", 1.0, 3),
    ],
)
def test_any_other_result_is_refused(result):
    with pytest.raises((TypeError, ValueError)):
        as_response(result)
