"""The tools of a run: unique by name, chosen per sample.

``tools.function_tool_path`` names a Python file or module that defines some;
``tools.tool_config_path`` names a YAML file in verl's schema::

    tools:
      # A class; verl's own classes run as they are, see tools.verl.
      - class_name: my_project.tools.Gsm8kTool      # or my_tools.py:Gsm8kTool
        config: {type: native, tolerance: 0.01}     # keyword arguments of the class
        tool_schema:                                # optional if the class defines a schema
          type: function
          function: {name: …, description: …, parameters: {type: object, properties: …}}

      # A tool of an installed package, see utils.plugins.
      - class_name: weather

      # Every tool of some MCP servers, see tools.mcp. rate_limit: calls a second.
      - config: {type: mcp, timeout: 20, rate_limit: 5}
        mcp:
          mcp_servers_config_path: mcp_servers.json
          # or servers: {name: {url: …} | {command: …, args: […]}}
          tool_selected_list: [search]              # optional
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax_agent_rl.checks import is_number
from jax_agent_rl.config import ToolsConfig
from jax_agent_rl.errors import ConfigError, DataError, ToolDefinitionError
from jax_agent_rl.tools.base import BaseTool
from jax_agent_rl.tools.mcp import MCPConnection, MCPServerConfig
from jax_agent_rl.tools.schema import check_parameters, unwrap_function
from jax_agent_rl.tools.verl import VerlTool, is_verl_tool, verl_modules
from jax_agent_rl.utils.plugins import find_class, load_user_module, read_entries
from jax_agent_rl.utils.rate_limit import RateLimit

_KEY = "tools.tool_config_path"
_ENTRY_KEYS = {"class_name", "config", "tool_schema", "mcp"}
_MCP_KEYS = {"mcp_servers_config_path", "servers", "tool_selected_list"}
_MCP_CONFIG_KEYS = {"type", "timeout", "rate_limit"}
_MCP_CLASSES = "verl.tools.mcp_"
"""Beginning of the classes that verl's own MCP entries name. They only call a server, which
:mod:`~jax_agent_rl.tools.mcp` does without them."""
_MCP_TIMEOUT = 30.0


class ToolRegistry:
    """Tools by name, in the order in which they were added."""

    def __init__(self, tools: Iterable[BaseTool] = ()):
        self._tools: dict[str, BaseTool] = {}
        self._origins: dict[str, str] = {}  # where each tool was defined, for messages
        for tool in tools:
            self.add(tool, origin="ToolRegistry(...)")

    @classmethod
    def from_path(cls, path: str | None) -> ToolRegistry:
        """Load the tools of ``tools.function_tool_path`` (None: no tools); see :meth:`load`."""
        registry = cls()
        if path is not None:
            registry.load(path)
        return registry

    def add(self, tool: BaseTool, *, origin: str) -> None:
        """Add a tool that comes from ``origin``; adding the same object again changes nothing.

        Raises:
            ToolDefinitionError: another tool has the name; the message names both places.
        """
        known = self._tools.setdefault(tool.name, tool)
        if known is not tool:
            raise ToolDefinitionError(
                f"two tools are called {tool.name!r}: one in {self._origins[tool.name]}, one in"
                f" {origin}; rename one"
            )
        self._origins.setdefault(tool.name, origin)

    def load(self, path: str) -> None:
        """Add every tool object at the top level of a Python file or module.

        Imported ones are included.

        Raises:
            ConfigError: it cannot be imported.
            ToolDefinitionError: it holds no tool, or a tool is wrongly declared or has a name in
                use.
        """
        with verl_modules():
            module = load_user_module(path, key="tools.function_tool_path")
        # By identity: a module may give one tool several names.
        tools = {id(value): value for value in vars(module).values() if isinstance(value, BaseTool)}
        if not tools:
            raise ToolDefinitionError(
                f"tools.function_tool_path={path!r}: {module.__file__} defines no tool; put"
                " @function_tool above a function"
            )
        for tool in tools.values():
            self.add(tool, origin=path)

    def select(self, names: Sequence[str] | None = None) -> Mapping[str, BaseTool]:
        """Return the tools of one sample.

        Args:
            names: the row's ``extra_info.tool_selection``; None selects all.

        Raises:
            DataError: a name is unknown.
        """
        if names is None:
            return MappingProxyType(self._tools)
        unknown = [name for name in names if name not in self._tools]
        if unknown:
            raise DataError(
                f"extra_info.tool_selection names unknown tools {unknown}; there are"
                f" {list(self._tools)}"
            )
        return {name: self._tools[name] for name in names}

    def __len__(self) -> int:
        return len(self._tools)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)


def list_schemas(tools: Mapping[str, BaseTool]) -> tuple[dict[str, Any], ...]:
    """Return the tools in OpenAI's format, for the prompt."""
    return tuple(tool.schema for tool in tools.values())


@asynccontextmanager
async def open_tools(config: ToolsConfig) -> AsyncIterator[ToolRegistry]:
    """Open all tools of a run; tools and connections to MCP servers are closed at the end.

    Raises:
        ConfigError: a file is missing or malformed, a class cannot be imported, or an MCP server
            cannot be reached.
        ToolDefinitionError: a tool is wrongly declared, or two have one name.
    """
    registry = ToolRegistry.from_path(config.function_tool_path)
    async with AsyncExitStack() as stack:
        if config.tool_config_path is not None:
            path = Path(config.tool_config_path).expanduser()
            for number, entry in enumerate(read_entries(path, key=_KEY, name="tools")):
                origin = f"{path} (tools[{number}])"
                if _is_mcp(entry, origin):
                    await _add_servers(registry, entry, path, origin, stack)
                else:
                    registry.add(_native_tool(entry, origin), origin=origin)
        for tool in registry.select().values():
            stack.push_async_callback(tool.close)
        yield registry


def _is_mcp(entry: Any, origin: str) -> bool:
    """Validate an entry's keys; return whether it names MCP servers."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{origin} must be a mapping, got {entry!r:.100}")
    unknown = sorted(entry.keys() - _ENTRY_KEYS)
    if unknown:
        raise ConfigError(f"{origin} has unknown keys {unknown}; there are {sorted(_ENTRY_KEYS)}")
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{origin}: config must be a mapping, got {config!r:.100}")

    default_kind = "mcp" if "mcp" in entry else "native"
    kind = config.get("type", default_kind)
    if kind not in ("native", "mcp"):
        raise ConfigError(f"{origin}: config.type={kind!r} must be native or mcp")
    if (kind == "mcp") != isinstance(entry.get("mcp"), Mapping):
        raise ConfigError(
            f"{origin}: config.type={kind} and mcp={entry.get('mcp')!r} do not fit each other"
        )
    return kind == "mcp"


def _native_tool(entry: Mapping[str, Any], origin: str) -> BaseTool:
    """Build the tool of an entry that names a class, or a tool of an installed package."""
    cls = _import_tool(entry.get("class_name"), origin)
    config = entry.get("config") or {}
    schema = entry.get("tool_schema")
    if isinstance(cls, BaseTool):
        if config.keys() - {"type"} or schema is not None:
            raise ToolDefinitionError(
                f"{origin}: {entry['class_name']} is complete; remove config and tool_schema"
            )
        return cls

    function = None
    if schema is not None:
        function = unwrap_function(schema, f"{origin}: tool_schema")
    try:
        if issubclass(cls, BaseTool):
            arguments = dict(config)
            arguments.pop("type", None)
            tool = cls.from_config(arguments, function)
        else:
            tool = VerlTool.make(cls, config, schema)
    except ToolDefinitionError as error:
        raise ToolDefinitionError(f"{origin}: {error}") from None
    except Exception as error:
        source = f"config {config}"
        if schema is not None:
            source += " and its tool_schema"
        raise ToolDefinitionError(
            f"{origin}: {entry['class_name']} could not be built from {source}:"
            f" {type(error).__name__}: {error}"
        ) from error
    check_parameters(tool.parameters, f"{origin}: the parameters of {tool.name!r}")
    return tool


def _import_tool(name: Any, origin: str) -> type | BaseTool:
    """Import ``package.module.Class``, ``file.py:Class`` or the tool of an installed package."""
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{origin} needs a class_name (package.module.Class or file.py:Class), got {name!r}"
        )
    with verl_modules():
        cls = find_class(name, "tools", where=origin)
    if isinstance(cls, BaseTool):
        return cls
    is_tool_class = isinstance(cls, type) and (issubclass(cls, BaseTool) or is_verl_tool(cls))
    if not is_tool_class:
        raise ToolDefinitionError(
            f"{origin}: {name!r} is not a subclass of jax_agent_rl.tools.BaseTool or of verl's"
            f" (found {cls!r:.80})"
        )
    return cls


async def _add_servers(
    registry: ToolRegistry, entry: Mapping[str, Any], path: Path, origin: str, stack: AsyncExitStack
) -> None:
    """Connect to the servers of an entry and add their tools."""
    mcp = entry["mcp"]
    unknown = sorted(mcp.keys() - _MCP_KEYS)
    if unknown:
        raise ConfigError(
            f"{origin}: mcp has unknown keys {unknown}; there are {sorted(_MCP_KEYS)}"
        )
    config = entry.get("config") or {}
    unknown = sorted(config.keys() - _MCP_CONFIG_KEYS)
    if unknown:
        raise ConfigError(
            f"{origin}: an MCP entry's config has unknown keys {unknown}; there are"
            f" {sorted(_MCP_CONFIG_KEYS)}"
        )
    if not str(entry.get("class_name") or _MCP_CLASSES).startswith(_MCP_CLASSES):
        raise ConfigError(
            f"{origin}: class_name={entry['class_name']!r} has no effect on an MCP entry, whose"
            " servers are called directly; remove it, or write the tool as a class of its own"
            " (config.type: native)"
        )
    timeout = _positive(config, "timeout", origin) or _MCP_TIMEOUT
    calls_per_second = _positive(config, "rate_limit", origin)
    rate = None
    if calls_per_second is not None:
        rate = RateLimit(calls_per_second)  # one limit for all servers of the entry

    selected = mcp.get("tool_selected_list")
    missing = set(selected or ())
    for name, settings in _read_servers(mcp, path, origin).items():
        server_origin = f"{origin}, server {name!r}"
        server = MCPServerConfig.from_mapping(settings, where=server_origin)
        connection = await stack.enter_async_context(
            MCPConnection(name, server, timeout=timeout, rate=rate)
        )
        for tool in await connection.tools():
            if selected is not None and tool.name not in selected:
                continue
            check_parameters(tool.parameters, f"{server_origin}: the parameters of {tool.name!r}")
            registry.add(tool, origin=server_origin)
            missing.discard(tool.name)
    if missing:
        raise ConfigError(
            f"{origin}: tool_selected_list names {sorted(missing)}, which no server has"
        )


def _positive(config: Mapping[str, Any], key: str, origin: str) -> float | None:
    """Return a number of an entry's config; None without one."""
    value = config.get(key)
    if value is None:
        return None
    if not is_number(value) or value <= 0:
        raise ConfigError(f"{origin}: config.{key}={value!r} must be a positive number")
    return float(value)


def _read_servers(mcp: Mapping[str, Any], path: Path, origin: str) -> Mapping[str, Any]:
    """Return the servers by name, from the entry itself or from a JSON file with ``mcpServers``."""
    servers = mcp.get("servers")
    file_name = mcp.get("mcp_servers_config_path")
    if file_name is not None:
        file = Path(file_name).expanduser()
        # A relative path is also one from the folder of the YAML file.
        if not file.is_file():
            file = path.parent / file_name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{origin}: mcp_servers_config_path={file_name!r} cannot be read: {error}"
            ) from None
        servers = content.get("mcpServers") if isinstance(content, Mapping) else None

    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError(
            f"{origin}: no MCP servers are named; give servers or mcp_servers_config_path"
        )
    return servers
