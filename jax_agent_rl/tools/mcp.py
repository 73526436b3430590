"""Tools of MCP servers (Model Context Protocol), by the ``mcp`` package.

It speaks with them over stdio or streamable HTTP::

    MCPConnection ── one task owns the session: connects, waits, closes
        │            (the package requires one task for all three)
        ▲ call(name, arguments): any number concurrently, each with a timeout
        │   the session is lost ──► the call fails with a message for the model;
        │                           the next call reconnects
    MCPTool … MCPTool       one per tool of the server, shared by all trajectories
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from jax_agent_rl.errors import ConfigError, ToolError, ToolTimeoutError
from jax_agent_rl.tools.base import BaseTool, ToolResponse, ToolResult
from jax_agent_rl.tools.mcp_transport import http_transport, stdio_transport
from jax_agent_rl.utils.media import read_images
from jax_agent_rl.utils.packages import install_command
from jax_agent_rl.utils.rate_limit import RateLimit

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult

logger = logging.getLogger(__name__)
MAX_TOOLS = 1000
"""Limit of the tools of one server."""


@dataclass(frozen=True, kw_only=True)
class MCPServerConfig:
    """How to reach a server: ``url``, or ``command`` to start it.

    Attributes:
        url: a streamable HTTP endpoint.
        headers: HTTP headers to send, e.g. ``Authorization``.
        command: the program that speaks MCP on its standard input and output.
        env: added to its environment, which otherwise has only what locates programs and homes.
        cwd: its working directory; None: this process's.
    """

    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None

    @classmethod
    def from_mapping(cls, settings: Any, *, where: str) -> MCPServerConfig:
        """Build from an entry of ``mcpServers``; verl's ``auth_token`` becomes a bearer header.

        Raises:
            ConfigError: unknown keys, or not exactly one of ``url`` and ``command``.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{where} must be a mapping, got {settings!r:.100}")
        known = {"url", "headers", "command", "args", "env", "cwd", "auth_token"}
        unknown = sorted(settings.keys() - known)
        if unknown:
            raise ConfigError(f"{where} has unknown keys {unknown}; there are {sorted(known)}")
        if (settings.get("url") is None) == (settings.get("command") is None):
            raise ConfigError(f"{where} needs either url or command")

        fields = dict(settings)
        fields["args"] = tuple(map(str, settings.get("args") or ()))
        token = fields.pop("auth_token", None)
        if token:
            fields["headers"] = {**settings.get("headers", {}), "Authorization": f"Bearer {token}"}
        return cls(**fields)

    def __str__(self) -> str:
        return self.url or " ".join([self.command or "", *self.args])


class MCPConnection:
    """Session with one server, reopened when it is lost. An async context manager.

    Args:
        name: name of the server, for messages.
        timeout: time limit of a call, in seconds.
        connect_timeout: time limit of connecting, in seconds; None: ``timeout``.
        rate: how often calls start; None: as they come.

    Raises:
        ConfigError: entering: the package ``mcp`` is not installed, or the server cannot be
            reached.
    """

    def __init__(
        self,
        name: str,
        server: MCPServerConfig,
        *,
        timeout: float,
        connect_timeout: float | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        self.name = name
        self.rate = rate
        self._server = server
        self._timeout = timeout
        self._connect_timeout = connect_timeout or timeout
        self._opening = asyncio.Lock()
        self._client: Client | None = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def __aenter__(self) -> MCPConnection:
        try:
            await self._connected()
        except ImportError:
            raise ConfigError(f"MCP tools need the package mcp: {install_command('mcp')}") from None
        except ToolError as error:
            raise ConfigError(f"{error}; correct its entry, or start the server") from None
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ):
        await self._close()

    async def tools(self) -> list[MCPTool]:
        """List all tools the server offers.

        Raises:
            ConfigError: there are too many, or it does not list them in time.
        """
        client = await self._connected()
        tools: list[MCPTool] = []
        cursor = None

        try:
            async with asyncio.timeout(self._connect_timeout):
                while True:
                    page = await client.list_tools(cursor=cursor)
                    for tool in page.tools:
                        tools.append(
                            MCPTool(self, tool.name, tool.description or "", tool.input_schema)
                        )
                    # A server may name another page for ever.
                    if len(tools) > MAX_TOOLS:
                        raise ConfigError(
                            f"the MCP server {self.name} lists more than {MAX_TOOLS} tools"
                        )
                    cursor = page.next_cursor
                    if not cursor:
                        return tools
        except TimeoutError:
            raise ConfigError(
                f"the MCP server {self.name} did not list its tools within"
                f" {self._connect_timeout:g} seconds"
            ) from None

    async def call(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult:
        """Run one call.

        Raises:
            ToolTimeoutError: no answer in time.
            ToolError: the server is gone, or refuses the call.
        """
        from mcp import MCPError

        client = await self._connected()
        try:
            async with asyncio.timeout(self._timeout):
                return await client.call_tool(name, dict(arguments))
        except TimeoutError:
            raise ToolTimeoutError(
                f"{name}: the server {self.name} did not answer within {self._timeout:g} seconds"
            ) from None
        except MCPError as error:
            if _is_lost(error):
                self._forget(client)
            raise ToolError(f"{name}: the server {self.name} failed: {error}") from None
        except (OSError, RuntimeError) as error:  # the transport's own failures
            self._forget(client)
            raise ToolError(
                f"{name}: the server {self.name} is gone ({type(error).__name__}: {error})"
            ) from None

    async def _connected(self) -> Client:
        """Return the session, connecting if there is none; one task at a time connects."""
        async with self._opening:
            if self._client is None or self._owner is None or self._owner.done():
                await self._close()
                self._client = await self._open()
            return self._client

    async def _open(self) -> Client:
        self._stop = asyncio.Event()
        client_future: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(
            self._own(client_future, self._stop), name=f"mcp-{self.name}"
        )
        try:
            async with asyncio.timeout(self._connect_timeout):
                return await asyncio.shield(client_future)
        except ImportError:
            raise
        except asyncio.CancelledError:  # of the call that wanted the session
            self._owner.cancel()
            raise
        except TimeoutError:
            self._owner.cancel()
            raise ToolError(
                f"the MCP server {self.name} ({self._server}) did not answer within"
                f" {self._connect_timeout:g} seconds"
            ) from None
        except Exception as error:
            cause = _innermost(error)
            raise ToolError(
                f"the MCP server {self.name} ({self._server}) cannot be reached:"
                f" {type(cause).__name__}: {cause}"
            ) from None

    async def _own(self, client_future: asyncio.Future[Client], stop: asyncio.Event) -> None:
        """Own one session, from connecting to closing, in one task."""
        try:
            async with self._make_client() as client:
                client_future.set_result(client)
                await stop.wait()
        except BaseException as error:
            if not client_future.done():
                failure: Exception = RuntimeError("connecting was cancelled")
                if isinstance(error, Exception):
                    failure = error
                client_future.set_exception(failure)
                # Mark it as retrieved, even if nothing awaits it any more.
                client_future.exception()
            elif isinstance(error, Exception):
                logger.warning(
                    "the session with the MCP server %s ended: %s", self.name, _innermost(error)
                )
            if not isinstance(error, Exception):
                raise

    def _make_client(self) -> Client:
        from mcp import Client

        server = self._server
        if server.command is not None:
            return Client(
                stdio_transport(server.command, server.args, env=server.env, cwd=server.cwd)
            )
        assert server.url is not None
        return Client(http_transport(server.url, headers=server.headers, timeout=self._timeout))

    def _forget(self, client: Client) -> None:
        """Drop a lost session; the next call reconnects."""
        if self._client is client:
            self._client = None
            self._stop.set()

    async def _close(self) -> None:
        """End the owner task; cancel it if it does not end by itself."""
        owner = self._owner
        self._owner = None
        self._client = None
        if owner is None:
            return

        self._stop.set()
        await asyncio.wait({owner}, timeout=self._timeout)
        if not owner.done():
            owner.cancel()
            await asyncio.wait({owner}, timeout=1.0)


class MCPTool(BaseTool):
    """One tool of a server; name, description and parameters are as the server declares them.

    Any state is the server's; trajectories share the session.
    """

    stateful = False  # not per trajectory: repeated calls would affect all trajectories

    def __init__(
        self, connection: MCPConnection, name: str, description: str, parameters: Mapping[str, Any]
    ) -> None:
        super().__init__(name=name, description=description, parameters=parameters)
        self.connection = connection
        self._waiting: Counter[str] = Counter()  # calls of a trajectory that have not started

    async def execute(
        self, instance_id: str, arguments: Mapping[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        if execute_kwargs:
            raise TypeError(
                f"MCP tool {self.name!r} takes no execute_kwargs, got {sorted(execute_kwargs)}"
            )
        if self.connection.rate is not None:
            self._waiting[instance_id] += 1
            try:
                await self.connection.rate.wait()
            finally:
                self._waiting[instance_id] -= 1
        return as_tool_response(await self.connection.call(self.name, arguments))

    def waits_for(self, instance_id: str) -> str | None:
        rate = self.connection.rate
        if rate is None or not self._waiting[instance_id]:
            return None
        return (
            f"config.rate_limit={rate.per_second:g} calls a second let it wait; raise it or"
            " agent.tool_timeout"
        )

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        await super().release(instance_id, **release_kwargs)
        self._waiting.pop(instance_id, None)


def as_tool_response(result: CallToolResult) -> ToolResponse:
    """Convert a call's result to text and images.

    The text has the text of embedded resources, and names links. Other content (audio, binary
    files) is only mentioned by kind.

    Raises:
        ToolError: the server reports an error, or an image cannot be decoded.
    """
    images = [block.data for block in result.content if block.type == "image"]
    text = result_text(result, omitted_kinds=("image",))
    if result.is_error:
        raise ToolError(text or "the tool failed without saying why")
    try:
        return ToolResponse(text=text, image=read_images(images))
    except ValueError as error:
        raise ToolError(f"the server sent an image that cannot be read: {error}") from None


def result_text(result: CallToolResult, *, omitted_kinds: Collection[str]) -> str:
    """Return what a call's result says.

    Args:
        omitted_kinds: kinds of content that are not mentioned, as the caller passes them on.
    """
    texts: list[str] = []
    for block in result.content:
        match block.type:
            case "text":
                texts.append(block.text)
            case "resource":
                texts.append(_resource_text(block.resource))
            case "resource_link":
                link = f"resource {block.name} at {block.uri}"
                if block.description:
                    link += f": {block.description}"
                texts.append(f"[{link}]")
            case kind if kind not in omitted_kinds:
                texts.append(f"[{kind} content, which is not shown]")

    if not result.content and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(texts)


def _resource_text(resource: Any) -> str:
    # Of the two kinds of contents, one has a text and the other a blob.
    text = getattr(resource, "text", None)
    if isinstance(text, str):
        return text
    kind = resource.mime_type or "binary"
    return f"[resource {resource.uri} of type {kind}, which is not shown]"


def _innermost(error: BaseException) -> BaseException:
    """Return the first cause inside exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_lost(error: Any) -> bool:
    """Return whether the connection itself is closed, not merely one request refused."""
    from mcp.types import CONNECTION_CLOSED

    return error.error.code == CONNECTION_CLOSED
