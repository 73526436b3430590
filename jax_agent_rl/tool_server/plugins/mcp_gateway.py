"""Tools of MCP servers.

``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` goes to the server that has the tool. A
name that two servers have is written ``SERVER.NAME``. Each worker has one connection per server,
shared by its trajectories and reopened when it breaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import ConfigError, ToolError
from jax_agent_rl.tool_server.plugins import ServerTool, ToolAction, ToolObservation
from jax_agent_rl.tool_server.plugins.interpreters import failure_metrics
from jax_agent_rl.tool_server.plugins.markup import parse_tool_call
from jax_agent_rl.tools.mcp import MCPConnection, MCPServerConfig, MCPTool, result_text
from jax_agent_rl.tools.schema import convert_arguments

if TYPE_CHECKING:
    from mcp.types import CallToolResult

_CONNECT_SECONDS = 30.0


def _server(target: str | list[str]) -> MCPServerConfig:
    """Return the address of a server: a URL, or a command and its arguments."""
    if isinstance(target, str):
        return MCPServerConfig(url=target)
    return MCPServerConfig(command=target[0], args=tuple(target[1:]))


class McpTool(ServerTool[tuple[str, Mapping[str, Any]], None]):
    """Gateway to the tools of MCP servers."""

    name = "mcp"
    usage = '<tool_call>{"name": …, "arguments": {…}}</tool_call>'

    async def start(self) -> None:
        settings = self.context.settings.mcp
        self._stack = AsyncExitStack()
        self._tools: dict[str, tuple[MCPConnection, MCPTool]] = {}
        try:
            for name, target in settings.servers.items():
                connection = MCPConnection(
                    name,
                    _server(target),
                    timeout=settings.call_seconds,
                    connect_timeout=_CONNECT_SECONDS,
                )
                await self._stack.enter_async_context(connection)
                for tool in await connection.tools():
                    self._tools[f"{name}.{tool.name}"] = (connection, tool)
                    # A short name is the first server's that has it.
                    self._tools.setdefault(tool.name, (connection, tool))
        except (ConfigError, ToolError) as error:
            await self.stop()
            raise ConfigError(f"mcp.servers: {error}") from error

    async def stop(self) -> None:
        await self._stack.aclose()

    def parse_action(self, action: str) -> tuple[str, Mapping[str, Any]] | None:
        return parse_tool_call(action)

    async def act(self, action: ToolAction[tuple[str, Mapping[str, Any]], None]) -> ToolObservation:
        name, arguments = action.parsed
        if name not in self._tools:
            short_names = sorted(known for known in self._tools if "." not in known)
            raise ToolError(f"there is no tool {name[:100]!r}; available tools: {short_names}")

        connection, tool = self._tools[name]
        converted = convert_arguments(tool.parameters, arguments)
        result = await connection.call(tool.name, converted)
        return tool_observation(result)


def tool_observation(result: CallToolResult) -> ToolObservation:
    """Convert a call's result; an action whose result reports an error is still valid."""
    images = []
    audio = []
    for item in result.content:
        if item.type == "image":
            images.append(f"data:{item.mime_type};base64,{item.data}")
        elif item.type == "audio":
            audio.append(f"data:{item.mime_type};base64,{item.data}")

    text = result_text(result, omitted_kinds=("image", "audio"))
    return ToolObservation(
        text=f"\n<tool_response>\n{text}\n</tool_response>\n",
        image=images,
        audio=audio,
        metrics=failure_metrics(not result.is_error),
    )
