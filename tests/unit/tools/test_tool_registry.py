"""Where tools come from, and what is refused."""

import pytest

from jax_agent_rl.errors import ConfigError, DataError, ToolDefinitionError
from jax_agent_rl.tools import BaseTool, ToolRegistry
from jax_agent_rl.tools.registry import list_schemas
from tests.messages import raises

ADD = '''
from jax_agent_rl.tools import function_tool

@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)
'''


def write(folder, text, name="tools.py"):
    path = folder / name
    path.write_text(text)
    return str(path)


def test_tools_load_from_a_file_and_from_a_module(tmp_path):
    registry = ToolRegistry.from_path(write(tmp_path, ADD))
    registry.load("jax_agent_rl.tools.calculator")
    assert list(registry) == ["add", "calculator"]
    assert [s["function"]["name"] for s in list_schemas(registry.select())] == ["add", "calculator"]


def test_no_path_means_no_tools():
    assert len(ToolRegistry.from_path(None)) == 0


def test_imported_tools_count_and_the_same_tool_twice_is_fine(tmp_path):
    source = "from jax_agent_rl.tools.calculator import calculator" + ADD
    registry = ToolRegistry.from_path(write(tmp_path, source))
    registry.load("jax_agent_rl.tools.calculator")
    assert list(registry) == ["calculator", "add"]


def test_a_name_used_twice_names_both_places(tmp_path):
    first = write(tmp_path, ADD, "first.py")
    second = write(tmp_path, ADD, "second.py")
    registry = ToolRegistry.from_path(first)
    with pytest.raises(ToolDefinitionError) as error:
        registry.load(second)
    assert first in str(error.value) and second in str(error.value)


def test_a_sample_selects_its_tools(tmp_path):
    registry = ToolRegistry.from_path(write(tmp_path, ADD))
    registry.load("jax_agent_rl.tools.calculator")
    assert list(registry.select(["calculator"])) == ["calculator"]
    assert list(registry.select([])) == []
    with pytest.raises(DataError, match=r"\['sub'\]"):
        registry.select(["sub"])


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("x = 1", ToolDefinitionError, "defines no tool"),
        (
            "import no_such_package_here",
            ConfigError,
            "imports 'no_such_package_here', which is not installed",
        ),
        ("1 / 0", ConfigError, "raised ZeroDivisionError"),
        ("def f(:", ConfigError, "SyntaxError"),
        (ADD.replace("a: int", "a"), ToolDefinitionError, "no type annotation"),
    ],
)
def test_a_bad_file_is_refused_with_its_reason(tmp_path, text, error, message):
    with pytest.raises(error, match=message):
        ToolRegistry.from_path(write(tmp_path, text))


@pytest.mark.parametrize("path", ["missing.py", "no.such.module", "jax_agent_rl.no_such_module"])
def test_a_missing_file_or_module_is_refused(path):
    with raises(ConfigError, key="tools.function_tool_path", value="no such"):
        ToolRegistry.from_path(path)


class Echo(BaseTool):
    async def execute(self, instance_id, arguments, **execute_kwargs):
        return str(arguments)


@pytest.mark.parametrize(
    ("name", "schema", "message"), [("", "object", "no name"), ("x", "string", "type object")]
)
def test_a_tool_needs_a_name_and_an_object_schema(name, schema, message):
    with pytest.raises(ToolDefinitionError, match=message):
        Echo(name=name, description="", parameters={"type": schema})
