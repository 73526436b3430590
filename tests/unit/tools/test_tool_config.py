"""Tools from a YAML file: what is built, what is refused, and that each message names the place."""

import sys
import textwrap
from pathlib import Path

import pytest
import yaml

from jax_agent_rl.config import ToolsConfig
from jax_agent_rl.errors import ConfigError, ToolDefinitionError
from jax_agent_rl.tools.registry import open_tools
from jax_agent_rl.utils.plugins import load_user_module
from tests.messages import raises

CLASSES = textwrap.dedent("""
    from jax_agent_rl.tools import BaseTool, function_tool

    class Scale(BaseTool):
        def __init__(self, *, factor=2, **schema):
            super().__init__(**schema)
            self.factor = factor

        async def execute(self, instance_id, arguments, **execute_kwargs):
            return str(arguments["x"] * self.factor)

    class Named(BaseTool):
        def __init__(self):
            super().__init__(
                name="named", description="Has its own schema.", parameters={"type": "object"}
            )

        async def execute(self, instance_id, arguments, **execute_kwargs):
            return "ok"

    @function_tool
    def scale(x: int) -> str:
        '''Another tool of that name.'''
        return ""
    """)
SCHEMA = {
    "type": "function",
    "function": {
        "name": "scale",
        "description": "Scales.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
        },
    },
}


@pytest.fixture
def classes(tmp_path):
    path = tmp_path / "my_tools.py"
    path.write_text(CLASSES)
    return str(path)


def config_of(folder, *entries, **fields):
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": list(entries)}))
    return ToolsConfig(tool_config_path=str(path), **fields)


async def names_of(config):
    async with open_tools(config) as registry:
        return list(registry)


async def test_a_class_is_built_from_its_config_and_schema(tmp_path, classes):
    entry = {
        "class_name": f"{classes}:Scale",
        "config": {"type": "native", "factor": 5},
        "tool_schema": SCHEMA,
    }
    async with open_tools(
        config_of(tmp_path, entry, {"class_name": f"{classes}:Named"})
    ) as registry:
        tools = registry.select()
        assert tools["scale"].schema == SCHEMA
        assert await tools["scale"].execute("t", {"x": 3}) == "15"
        assert await tools["named"].execute("t", {}) == "ok"


async def test_a_class_of_a_module_is_found_by_its_dotted_name(tmp_path, classes, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    assert await names_of(config_of(tmp_path, {"class_name": "my_tools.Named"})) == ["named"]


async def test_a_function_and_a_class_of_one_name_are_both_named(tmp_path, classes):
    entry = {"class_name": f"{classes}:Scale", "tool_schema": SCHEMA}
    with pytest.raises(ToolDefinitionError) as error:
        await names_of(config_of(tmp_path, entry, function_tool_path=classes))
    assert "my_tools.py" in str(error.value)
    assert "tools.yaml (tools[0])" in str(error.value)


BAD_SCHEMA = {
    "function": {
        **SCHEMA["function"],
        "parameters": {"type": "object", "properties": {"x": {"type": "int"}}},
    }
}


@pytest.mark.parametrize(
    ("entry", "error", "message"),
    [
        ("text", ConfigError, r"tools\[0\]\) must be a mapping"),
        ({"class": "x"}, ConfigError, r"unknown keys \['class'\]"),
        ({}, ConfigError, "needs a class_name"),
        ({"class_name": "no.such.Tool"}, ConfigError, "no such module"),
        ({"class_name": "FILE:Missing"}, ToolDefinitionError, "not a subclass"),
        ({"class_name": "builtins.dict"}, ToolDefinitionError, "not a subclass"),
        ({"class_name": "FILE:Scale"}, ToolDefinitionError, "could not be built"),
        (
            {"class_name": "FILE:Scale", "config": {"fctor": 1}, "tool_schema": SCHEMA},
            ToolDefinitionError,
            "fctor",
        ),
        (
            {"class_name": "FILE:Scale", "tool_schema": {"name": "x"}},
            ToolDefinitionError,
            "tool_schema must be",
        ),
        (
            {"class_name": "FILE:Scale", "tool_schema": BAD_SCHEMA},
            ToolDefinitionError,
            "not valid JSON Schema",
        ),
        ({"class_name": "FILE:Named", "config": {"type": "remote"}}, ConfigError, "native or mcp"),
        ({"class_name": "FILE:Named", "config": {"type": "mcp"}}, ConfigError, "do not fit"),
        ({"mcp": {}}, ConfigError, "no MCP servers are named"),
        ({"mcp": {"server": {}}}, ConfigError, "mcp has unknown keys"),
        ({"mcp": {"mcp_servers_config_path": "missing.json"}}, ConfigError, "cannot be read"),
    ],
)
async def test_a_wrong_entry_is_refused_with_its_place(tmp_path, classes, entry, error, message):
    if isinstance(entry, dict) and "class_name" in entry:
        entry = {**entry, "class_name": entry["class_name"].replace("FILE", classes)}
    with pytest.raises(error, match=message):
        await names_of(config_of(tmp_path, entry))


@pytest.mark.parametrize("text", ["", "tools: 3", "tools: []", "[1]", "a: [", "\udcff"])
async def test_a_file_that_is_no_list_of_tools_is_refused(tmp_path, text):
    (tmp_path / "tools.yaml").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match="tools.tool_config_path"):
        await names_of(ToolsConfig(tool_config_path=str(tmp_path / "tools.yaml")))


async def test_a_missing_file_is_named():
    with raises(ConfigError, key="tools.tool_config_path", value="'missing.yaml'"):
        await names_of(ToolsConfig(tool_config_path="missing.yaml"))


async def test_neither_path_means_no_tools():
    assert await names_of(ToolsConfig()) == []


def test_modules_beside_a_users_file_and_in_the_working_directory_are_found(
    tmp_path: Path, monkeypatch
):
    """They are found as with ``python -m``; a console script has neither on its path."""
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "neighbour_of_tools.py").write_text("FACTOR = 3\n")
    (tmp_path / "beside" / "tools_with_neighbour.py").write_text(
        "from neighbour_of_tools import FACTOR\n"
    )
    (tmp_path / "module_in_cwd.py").write_text("FACTOR = 4\n")
    module = load_user_module("beside/tools_with_neighbour.py", key="tools.function_tool_path")
    assert module.FACTOR == 3
    assert load_user_module("module_in_cwd", key="agent.module").FACTOR == 4
