"""The tools of a run, from ``tools.function_tool_path`` and ``tools.tool_config_path`` together.

The second is a YAML file, in verl's schema::

    tools:
      - class_name: my_project.tools.Gsm8kTool          # or my_tools.py:Gsm8kTool
        config: {type: native, tolerance: 0.01}         # keyword arguments of the class
        tool_schema:                                    # optional, if the class has a schema of its own
          type: function
          function: {name: …, description: …, parameters: {type: object, properties: …}}
      - config: {type: mcp, timeout: 20}                # every tool of some MCP servers, see tools.mcp
        mcp:
          mcp_servers_config_path: mcp_servers.json     # or servers: {name: {url: …} | {command: …, args: […]}}
          tool_selected_list: [search]                  # optional
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from jax_agent_rl.config import ToolsConfig
from jax_agent_rl.errors import ConfigError, ToolDefinitionError
from jax_agent_rl.tools.base import BaseTool, check_parameters, function_of
from jax_agent_rl.tools.mcp import MCPConnection, MCPServerConfig
from jax_agent_rl.tools.registry import ToolRegistry
from jax_agent_rl.utils.plugins import load_user_module

_KEY = "tools.tool_config_path"
_ENTRY_KEYS = {"class_name", "config", "tool_schema", "mcp"}
_MCP_KEYS = {"mcp_servers_config_path", "servers", "tool_selected_list"}
_MCP_TIMEOUT = 30.0


@asynccontextmanager
async def open_tools(config: ToolsConfig) -> AsyncIterator[ToolRegistry]:
    """Open all tools of a run; connections to MCP servers are closed in the end.

    Raises:
        ConfigError: a file is missing or no YAML / JSON of the right shape, a class cannot be imported, or an MCP
            server cannot be reached.
        ToolDefinitionError: a tool is wrongly declared, or two have one name.
    """
    registry = ToolRegistry.from_path(config.function_tool_path)
    async with AsyncExitStack() as stack:
        if config.tool_config_path is not None:
            path = Path(config.tool_config_path).expanduser()
            for number, entry in enumerate(_entries(path)):
                place = f"{path} (tools[{number}])"
                if _is_mcp(entry, place):
                    await _add_servers(registry, entry, path, place, stack)
                else:
                    registry.add(_native_tool(entry, place), place=place)
        yield registry


def _entries(path: Path) -> list[Any]:
    """Read the entries of the file's ``tools``."""
    if not path.is_file():
        raise ConfigError(f"{_KEY}={str(path)!r}: no such file (relative to {Path.cwd()})")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_KEY}={str(path)!r} is not valid YAML: {error}") from None
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{_KEY}={str(path)!r} must hold a list called tools, got {content!r:.100}")
    return entries


def _is_mcp(entry: Any, place: str) -> bool:
    """Validate an entry's keys; return whether it names MCP servers."""
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{place} must be a mapping, got {entry!r:.100}")
    if unknown := sorted(entry.keys() - _ENTRY_KEYS):
        raise ConfigError(f"{place} has unknown keys {unknown}; there are {sorted(_ENTRY_KEYS)}")
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{place}: config must be a mapping, got {config!r:.100}")
    kind = config.get("type", "mcp" if "mcp" in entry else "native")
    if kind not in ("native", "mcp"):
        raise ConfigError(f"{place}: config.type={kind!r} must be native or mcp")
    if (kind == "mcp") != isinstance(entry.get("mcp"), Mapping):
        raise ConfigError(f"{place}: config.type={kind} and mcp={entry.get('mcp')!r} do not fit each other")
    return kind == "mcp"


def _native_tool(entry: Mapping[str, Any], place: str) -> BaseTool:
    cls = _class_of(entry.get("class_name"), place)
    config = {key: value for key, value in (entry.get("config") or {}).items() if key != "type"}
    schema = entry.get("tool_schema")
    schema = None if schema is None else function_of(schema, f"{place}: tool_schema")
    try:
        tool = cls.from_config(config, schema)
    except ToolDefinitionError as error:
        raise ToolDefinitionError(f"{place}: {error}") from None
    except Exception as error:
        raise ToolDefinitionError(
            f"{place}: {entry['class_name']} could not be built from config {config}"
            f"{'' if schema is None else ' and its tool_schema'}: {type(error).__name__}: {error}"
        ) from error
    check_parameters(tool.parameters, f"{place}: the parameters of {tool.name!r}")
    return tool


def _class_of(name: Any, place: str) -> type[BaseTool]:
    """Import ``package.module.Class`` or ``file.py:Class``."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{place} needs a class_name (package.module.Class or file.py:Class), got {name!r}")
    where, _, leaf = name.rpartition(":" if ".py:" in name else ".")
    module = load_user_module(where, key=f"{_KEY} class_name") if where else None
    cls = getattr(module, leaf, None)
    if not (isinstance(cls, type) and issubclass(cls, BaseTool)):
        raise ToolDefinitionError(
            f"{place}: {name!r} is no subclass of jax_agent_rl.tools.BaseTool (found {cls!r:.80})"
        )
    return cls


async def _add_servers(
    registry: ToolRegistry, entry: Mapping[str, Any], path: Path, place: str, stack: AsyncExitStack
) -> None:
    """Connect to the servers of an entry and add their tools."""
    mcp = entry["mcp"]
    if unknown := sorted(mcp.keys() - _MCP_KEYS):
        raise ConfigError(f"{place}: mcp has unknown keys {unknown}; there are {sorted(_MCP_KEYS)}")
    if unknown := sorted((entry.get("config") or {}).keys() - {"type", "timeout"}):
        raise ConfigError(f"{place}: an MCP entry's config has unknown keys {unknown}; there are type and timeout")
    timeout = float((entry.get("config") or {}).get("timeout", _MCP_TIMEOUT))
    wanted = mcp.get("tool_selected_list")
    missing = set(wanted or ())
    for name, settings in _servers(mcp, path, place).items():
        server = MCPServerConfig.from_mapping(settings, where=f"{place}, server {name!r}")
        connection = await stack.enter_async_context(MCPConnection(name, server, timeout=timeout))
        for tool in await connection.tools():
            if wanted is None or tool.name in wanted:
                check_parameters(tool.parameters, f"{place}, server {name!r}: the parameters of {tool.name!r}")
                registry.add(tool, place=f"{place}, server {name!r}")
                missing.discard(tool.name)
    if missing:
        raise ConfigError(f"{place}: tool_selected_list names {sorted(missing)}, which no server has")


def _servers(mcp: Mapping[str, Any], path: Path, place: str) -> Mapping[str, Any]:
    """Return the servers by name, from the entry itself or from a JSON file with ``mcpServers``."""
    servers = mcp.get("servers")
    if (file_name := mcp.get("mcp_servers_config_path")) is not None:
        file = Path(file_name).expanduser()
        file = file if file.is_file() else path.parent / file_name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{place}: mcp_servers_config_path={file_name!r} cannot be read: {error}") from None
        servers = content.get("mcpServers") if isinstance(content, Mapping) else None
    if not isinstance(servers, Mapping) or not servers:
        raise ConfigError(f"{place}: no MCP servers are named; give servers or mcp_servers_config_path")
    return servers
