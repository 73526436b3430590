"""A faulty network: a proxy before one HTTP server that corrupts or replaces its answers.

::

    client ──► head, body ──► fault? ──no──► server ──► answer ──► client
                                │
                                ├─ reset        RST, before the server sees the request, or in the
                                │               middle of the answer
                                ├─ unavailable  HTTP 503 with a page of HTML, as gateways send
                                ├─ truncate     the first half of the answer, then an orderly end
                                ├─ slow         the answer in small pieces
                                └─ stall        nothing, for as long as the client waits

Each connection has one request. An unreachable server gives HTTP 502. Requests are forwarded as
HTTP/1.0, so that answers are not chunked and half of one looks complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
from collections import Counter
from enum import StrEnum
from random import Random

_MAX_HEAD = 1 << 16
_PIECE = 64


class Fault(StrEnum):
    """Faults of a request; see the module."""

    RESET = "reset"
    UNAVAILABLE = "unavailable"
    TRUNCATE = "truncate"
    SLOW = "slow"
    STALL = "stall"


class FaultProxy:
    """Proxy between two ports of the loopback interface.

    Args:
        upstream: the server's port.
        rng: decides which requests a fault hits, and where.
        piece_seconds: time between two pieces of a slow answer.

    Attributes:
        port: port on which it listens, after :meth:`start`.
        fault: the active fault, if any.
        chance: probability that the fault hits a request.
        busy: whether a fault is in progress here; other faults then leave it alone.
        hits: number of requests hit, by fault.
        requests: number of requests received, by path.
        attempts: number of times each rollout request (by id) or tool call (by trajectory and step)
            was sent.
    """

    def __init__(self, upstream: int, *, rng: Random, piece_seconds: float = 0.02) -> None:
        self.port = 0
        self.fault: Fault | None = None
        self.chance = 1.0
        self.busy = False
        self.hits: Counter[Fault] = Counter()
        self.requests: Counter[str] = Counter()
        self.attempts: Counter[str] = Counter()
        self._upstream = upstream
        self._rng = rng
        self._piece_seconds = piece_seconds
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_MAX_HEAD)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connection(reader, writer), name="fault-proxy")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one request, until it is answered or the client disconnects."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = 0
            match = re.search(rb"\r\ncontent-length: *(\d+)", head, re.I)
            if match is not None:
                length = int(match[1])
            body = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            writer.close()
            return

        path = head.split(b" ", 2)[1].decode()
        self.requests[path] += 1
        identity = _identity(path, body)
        if identity:
            self.attempts[identity] += 1

        answer = asyncio.create_task(self._answer(head, body, writer), name="fault-proxy-answer")
        disconnect = asyncio.create_task(reader.read(1), name="fault-proxy-client")
        try:
            await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()
            disconnect.cancel()
            # Not after a wait, which could be cancelled: the server waits for open connections.
            writer.close()
            await asyncio.gather(answer, disconnect, return_exceptions=True)

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        fault = None
        if self.fault and self._rng.random() < self.chance:
            fault = self.fault
            self.hits[fault] += 1
        before_server_acts = self._rng.random() < 0.5

        if fault is Fault.UNAVAILABLE:
            await _send_error(writer, 503, "Service Unavailable")
            return
        if fault is Fault.RESET and before_server_acts:
            _reset(writer)
            return
        if fault is Fault.STALL and before_server_acts:
            await asyncio.Event().wait()

        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            await _send_error(writer, 502, "Bad Gateway")
            return
        try:
            to_server.write(_as_http_1_0(head) + body)
            await self._pass_on(from_server, writer, fault)
        except ConnectionError:  # the server died, or the client has left
            _reset(writer)
        finally:
            to_server.close()

    async def _pass_on(
        self, answer: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None
    ) -> None:
        match fault:
            case None:
                while data := await answer.read(1 << 16):
                    await _send(writer, data)
            case Fault.SLOW:
                while data := await answer.read(_PIECE):
                    await _send(writer, data)
                    await asyncio.sleep(self._piece_seconds)
            case Fault.TRUNCATE:
                whole_answer = await answer.read()
                head, _, body = whole_answer.partition(b"\r\n\r\n")
                head = _without(b"content-length", head)
                await _send(writer, head + b"\r\n\r\n" + body[: len(body) // 2])
            case Fault.RESET:
                await _send(writer, await answer.read(_PIECE))
                _reset(writer)
            case _:
                await answer.read()
                await asyncio.Event().wait()


def _identity(path: str, body: bytes) -> str | None:
    """Return what a request shares with its repetitions; None where these do not matter."""
    if path == "/v1/generate":
        return json.loads(body)["request_id"]
    if path == "/get_observation":
        call = json.loads(body)
        trajectory_id = call["trajectory_ids"][0]
        if call["finish"][0]:
            return f"{trajectory_id}/close"
        step = call["extra_fields"][0]["current_step"]
        return f"{trajectory_id}/{step}"
    return None


def _as_http_1_0(head: bytes) -> bytes:
    """Return the head of a request as HTTP/1.0 with a connection of its own."""
    request_line, _, headers = head.partition(b"\r\n")
    headers = _without(b"connection", headers.removesuffix(b"\r\n\r\n"))
    request_line = request_line.replace(b"HTTP/1.1", b"HTTP/1.0")
    return request_line + b"\r\n" + headers + b"\r\nConnection: close\r\n\r\n"


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()


async def _send_error(writer: asyncio.StreamWriter, status: int, reason: str) -> None:
    page = f"<html><body><h1>{status} {reason}</h1></body></html>".encode()
    head = (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/html\r\nContent-Length: {len(page)}\r\n"
    )
    await _send(writer, head.encode() + b"Connection: close\r\n\r\n" + page)


def _reset(writer: asyncio.StreamWriter) -> None:
    """End the connection with RST, as a crashed host or a firewall does, not with a FIN."""
    with contextlib.suppress(OSError):  # the client may have left already
        linger_for_0_seconds = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger_for_0_seconds
        )
    writer.transport.abort()


def _without(name: bytes, head: bytes) -> bytes:
    """Return the lines of a head without the header of this name."""
    lines = []
    for line in head.split(b"\r\n"):
        if not line.lower().startswith(name + b":"):
            lines.append(line)
    return b"\r\n".join(lines)
