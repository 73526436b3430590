"""Tools of MCP servers: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` goes to the server that has it.

One connection per server and worker, shared by its trajectories, and made again when it breaks. A name that two servers
have is written ``SERVER.NAME``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from mcp import Client, MCPError, StdioServerParameters
from mcp.types import CONNECTION_CLOSED, AudioContent, CallToolResult, ImageContent, TextContent

from jax_agent_rl.errors import ConfigError, ToolError
from jax_agent_rl.tools.server.plugin import Action, Observation, ServerTool
from jax_agent_rl.tools.server.plugins.markup import tool_call

logger = logging.getLogger(__name__)
_CONNECT_SECONDS = 30.0


class Connection:
    """One MCP server. A task of its own holds the connection, as the library wants it opened and closed in one."""

    def __init__(self, name: str, target: str | list[str]):
        self.name = name
        self._target = target
        self._client: Client | None = None
        self._holder: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def client(self) -> Client:
        """The connected client.

        Raises:
            ToolError: the server does not answer.
        """
        async with self._connecting:
            if self._client is None or self._holder is None or self._holder.done():
                ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
                self._holder = asyncio.create_task(self._hold(ready))
                try:
                    async with asyncio.timeout(_CONNECT_SECONDS):
                        self._client = await ready
                except (TimeoutError, OSError, MCPError, ExceptionGroup, RuntimeError) as error:
                    await self.drop()
                    raise ToolError(f"MCP server {self.name!r} ({self._target}) does not answer: {error!r}") from error
            return self._client

    async def drop(self) -> None:
        """Ends the connection; the next call makes another."""
        holder, self._holder, self._client = self._holder, None, None
        if holder is not None:
            holder.cancel()
            await asyncio.gather(holder, return_exceptions=True)

    async def _hold(self, ready: asyncio.Future[Client]) -> None:
        try:
            async with Client(_server(self._target)) as client:
                ready.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if ready.done():
                logger.warning("the connection to MCP server %s broke: %r", self.name, error)
            else:
                ready.set_exception(error)


def _server(target: str | list[str]) -> str | StdioServerParameters:
    return target if isinstance(target, str) else StdioServerParameters(command=target[0], args=target[1:])


class McpTool(ServerTool[tuple[str, Mapping[str, Any]], None]):
    """See the module."""

    name = "mcp"
    usage = '<tool_call>{"name": …, "arguments": {…}}</tool_call>'

    async def start(self) -> None:
        servers = self.context.settings.mcp.servers
        self._connections = [Connection(name, target) for name, target in servers.items()]
        self._tools: dict[str, tuple[Connection, str]] = {}
        for connection in self._connections:
            try:
                listed = await (await connection.client()).list_tools()
            except ToolError as error:
                await self.stop()
                raise ConfigError(f"mcp.servers: {error}") from error
            for tool in listed.tools:
                self._tools[f"{connection.name}.{tool.name}"] = connection, tool.name
                self._tools.setdefault(tool.name, (connection, tool.name))

    async def stop(self) -> None:
        for connection in self._connections:
            await connection.drop()

    def parse_action(self, action: str) -> tuple[str, Mapping[str, Any]] | None:
        return tool_call(action)

    async def act(self, action: Action[tuple[str, Mapping[str, Any]], None]) -> Observation:
        name, arguments = action.parsed
        if name not in self._tools:
            known = sorted(known for known in self._tools if "." not in known)
            raise ToolError(f"there is no tool {name[:100]!r}; available tools: {known}")
        connection, tool = self._tools[name]
        seconds = self.context.settings.mcp.call_seconds
        client = await connection.client()
        try:
            async with asyncio.timeout(seconds):
                result = await client.call_tool(tool, dict(arguments))
        except TimeoutError:
            raise ToolError(f"{name} did not answer within {seconds:g} seconds") from None
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                await connection.drop()
            raise ToolError(f"{name}: {error}") from error
        except Exception as error:  # whatever the transport raises
            await connection.drop()
            raise ToolError(f"{name}: the connection broke ({type(error).__name__}); try again") from error
        return _observation(result)


def _observation(result: CallToolResult) -> Observation:
    """The contents a model can be shown. A result that says it is an error stays a valid action."""
    texts, images, audio = [], [], []
    for item in result.content:
        match item:
            case TextContent():
                texts.append(item.text)
            case ImageContent():
                images.append(f"data:{item.mime_type};base64,{item.data}")
            case AudioContent():
                audio.append(f"data:{item.mime_type};base64,{item.data}")
    text = "\n".join(texts)
    return Observation(
        text=f"\n<tool_response>\n{text}\n</tool_response>\n",
        image=images,
        audio=audio,
        metrics={"failed": float(bool(result.is_error))},
    )
