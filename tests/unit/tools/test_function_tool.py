"""``@function_tool``: schemas equal to those of transformers, calls, and what is refused."""

import asyncio
import enum
import threading
from typing import Annotated, Any, Literal, Optional, Union

import pytest

from jax_agent_rl.errors import ToolDefinitionError
from jax_agent_rl.tools import FunctionTool, ToolResponse, function_tool
from jax_agent_rl.tools.base import as_response

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
    """Golden source: ``transformers.utils.get_json_schema``, which chat templates are written for."""
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

    here = str(threading.get_ident())
    assert await blocking.execute("t", {}) != here
    assert await cooperative.execute("t", {}) == here


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


def _stale_docstring(x: int):
    """Text.

    Args:
        y: No such parameter.
    """


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_no_annotation, "'x' has no type annotation"),
        (_varargs, r"\*x: int"),
        (_kwargs, r"\*\*x: int"),
        (_positional_only, "x: int"),
        (_unsupported, r"set\[int\] has no JSON Schema"),
        (_int_keys, "keys of a JSON object are strings"),
        (_stale_docstring, r"describes \['y'\]"),
    ],
)
def test_a_wrong_declaration_is_refused_with_the_place(function, message):
    with pytest.raises(ToolDefinitionError, match=message) as error:
        function_tool(function)
    assert "test_function_tool.py:" in str(error.value)


def test_only_functions_are_tools():
    with pytest.raises(ToolDefinitionError, match="got 'add'; give a name as name="):
        function_tool("add")  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("result", "text", "reward", "metrics"),
    [
        ("hi", "hi", 0.0, {}),
        ({"a": "é"}, '{"a": "é"}', 0.0, {}),
        (ToolResponse(text="r", reward=0.5), "r", 0.5, {}),
        (("hi", 1), "hi", 1, {}),
        (({"a": 1}, 0.25, {"rows": 3}), '{"a": 1}', 0.25, {"rows": 3}),
        ((ToolResponse(text="r", reward=9.0), -1.0), "r", -1.0, {}),
    ],
)
def test_every_documented_result_is_understood(result, text, reward, metrics):
    response = as_response(result)
    assert (response.text, response.reward, response.metrics) == (text, reward, metrics)


@pytest.mark.parametrize("result", [None, 3, ("x",), ("x", float("nan")), ("x", "1"), ("x", 1.0, {"a": "b"})])
def test_any_other_result_is_refused(result):
    with pytest.raises((TypeError, ValueError)):
        as_response(result)
