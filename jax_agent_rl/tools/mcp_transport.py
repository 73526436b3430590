"""Transports of MCP servers whose messages are bounded.

The package ``mcp`` bounds only the events of a stream::

    HTTP     httpx2 client ──► answers that are not compressed; each, and each event of a stream,
                               has at most MAX_MESSAGE_BYTES
    stdio    a process ──► lines of at most MAX_MESSAGE_BYTES; a longer one ends the session
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from jax_agent_rl.utils.network import IDENTITY, UnreadableAnswerError, require_identity

if TYPE_CHECKING:
    import httpx2
    from mcp.client._transport import TransportStreams

logger = logging.getLogger(__name__)
MAX_MESSAGE_BYTES = 16 << 20
"""Limit of one message of a server: images included, no model reads more."""
MAX_MESSAGE_VALUES = 100_000
"""Limit of the values of one message: the package takes ten microseconds for each."""
_STOP_SECONDS = 2.0
"""Time for a process to end after its input ends, and again after SIGTERM."""


@asynccontextmanager
async def http_transport(
    url: str, *, headers: Mapping[str, str], timeout: float
) -> AsyncGenerator[TransportStreams, None]:
    """Connect to a streamable HTTP endpoint.

    Args:
        headers: sent with every request.
        timeout: seconds to connect and to send; calls have time limits of their own.
    """
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    client = httpx2.AsyncClient(
        headers={**headers, **IDENTITY},
        timeout=httpx2.Timeout(timeout, read=None),  # a response stream may stay open for long
        event_hooks={"response": [_bound]},
    )
    async with client:
        transport = streamable_http_client(
            url, http_client=client, max_sse_event_size=MAX_MESSAGE_BYTES
        )
        async with transport as streams:
            yield streams


async def _bound(response: httpx2.Response) -> None:
    """Bound what is read of an answer, and of each event of a stream."""
    import httpx2

    problem = None
    try:
        require_identity(response.headers)
    except UnreadableAnswerError as error:
        problem = f"the server {error}"
    content_type = response.headers.get("content-type", "").lower()
    is_stream = content_type.startswith("text/event-stream")
    inner: Any = response.stream

    class Bounded(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            if problem is not None:
                raise httpx2.StreamError(problem)
            message = _MessageSize()
            async for chunk in inner:
                if is_stream and (b"\n\n" in chunk or b"\n\r\n" in chunk):
                    message = _MessageSize()
                too_large = message.add(chunk)
                if too_large:
                    raise httpx2.StreamError(f"the server's answer {too_large}")
                yield chunk

        async def aclose(self) -> None:
            await inner.aclose()

    response.stream = Bounded()


class _MessageSize:
    """Counts what has arrived of a message."""

    def __init__(self) -> None:
        self._bytes = 0
        self._values = 0

    def add(self, data: bytes) -> str | None:
        """Add a part; return what is too much, if anything."""
        self._bytes += len(data)
        self._values += data.count(b",") + data.count(b"[") + data.count(b"{")
        if self._bytes > MAX_MESSAGE_BYTES:
            return f"has more than {MAX_MESSAGE_BYTES} bytes"
        if self._values > MAX_MESSAGE_VALUES:
            return f"has more than {MAX_MESSAGE_VALUES} values"
        return None


@asynccontextmanager
async def stdio_transport(
    command: str, args: tuple[str, ...], *, env: Mapping[str, str], cwd: str | None
) -> AsyncGenerator[TransportStreams, None]:
    """Start a program that speaks MCP on its standard input and output, and end it at the exit.

    Args:
        env: added to its environment, which otherwise has only what locates programs and homes.
        cwd: its working directory; None: this process's.

    Raises:
        OSError: it cannot be started.
    """
    import anyio
    from mcp.client.stdio import get_default_environment
    from mcp.shared.message import SessionMessage

    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        command,
        *args,
        stdin=pipe,
        stdout=pipe,
        env=get_default_environment() | dict(env),
        cwd=cwd,
        limit=MAX_MESSAGE_BYTES,
        process_group=0,
    )
    to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [
        asyncio.create_task(_read_messages(process, to_session), name=f"mcp-read-{command}"),
        asyncio.create_task(_write_messages(process, from_session), name=f"mcp-write-{command}"),
    ]
    try:
        yield from_server, to_server
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in (to_session, from_server, to_server, from_session):
            stream.close()
        await asyncio.shield(_end(process))


async def _read_messages(process: asyncio.subprocess.Process, to_session: Any) -> None:
    """Pass on the lines of a process, until it ends or writes one that is too long."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp.types import jsonrpc_message_adapter

    assert process.stdout is not None
    async with to_session:
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                logger.warning(
                    "an MCP server wrote a line of more than %d bytes: its session ends",
                    MAX_MESSAGE_BYTES,
                )
                return
            if not line:
                return
            too_large = _MessageSize().add(line)
            try:
                if too_large:
                    raise ValueError(f"a message of an MCP server {too_large}")
                message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
            except ValueError as error:
                message = error
            try:
                await to_session.send(message)
            except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                return


async def _write_messages(process: asyncio.subprocess.Process, from_session: Any) -> None:
    """Write the session's messages as lines, until the process is gone."""
    assert process.stdin is not None
    async with from_session:
        async for message in from_session:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            try:
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
            except ConnectionError:
                return


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process: close its input, then terminate, then kill its group."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        if not await _has_ended(process):
            _signal_group(process, signal.SIGTERM)
            await _has_ended(process)
    finally:  # also if the event loop ends meanwhile
        if process.returncode is None:
            _signal_group(process, signal.SIGKILL)
        # A child process that inherited the pipes may hold them open for ever; asyncio has no
        # public way to close them on this side.
        transport = getattr(process, "_transport", None)
        if transport is not None:
            transport.close()


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Wait a little for the end of a process."""
    ending = asyncio.ensure_future(process.wait())
    done, _ = await asyncio.wait({ending}, timeout=_STOP_SECONDS)
    if not done:
        ending.cancel()
    return process.returncode is not None
