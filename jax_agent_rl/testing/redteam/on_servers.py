"""Attacks on servers: requests that are too large, too deep, too slow, or of a browser's page."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import AsyncIterator, Mapping

from jax_agent_rl.testing.redteam.attack import NotApplicableError, Surface, attack
from jax_agent_rl.testing.redteam.targets import ServerTarget

ANSWER_SECONDS = 10.0
"""A server that lives answers a small request within this time."""

BODY_BYTES = 256 << 20
"""No request of an agent is so large."""

IDLE_CONNECTIONS = 200
DEPTH = 100_000


@contextlib.asynccontextmanager
async def _connection(
    target: ServerTarget,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a connection to a server.

    Raises:
        NotApplicableError: there is no server.
    """
    address = urllib.parse.urlsplit(target.url)
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port or 80)
    except OSError as error:
        raise NotApplicableError(f"{target.url} cannot be reached: {error}") from error
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _head(
    target: ServerTarget, headers: Mapping[str, str], *, method: str = "POST", path: str = ""
) -> bytes:
    """Return the head of a request; ``headers`` may replace the usual ones."""
    address = urllib.parse.urlsplit(target.url)
    usual = {"Host": address.netloc, "Content-Type": "application/json", "Connection": "close"}
    lines = [f"{method} {path or address.path + target.path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in {**usual, **headers}.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _status(reader: asyncio.StreamReader) -> int:
    """Return the status of an answer; 0 if the connection ends without one.

    Raises:
        TimeoutError: there is no answer within :data:`ANSWER_SECONDS`.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        try:
            line = await reader.readline()
        except (OSError, ValueError):  # ValueError: a line without end
            return 0
    words = line.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def _request(target: ServerTarget, body: bytes, headers: Mapping[str, str] = {}) -> int:
    """Send a request, and return the status of its answer; 0: none."""
    async with _connection(target) as (reader, writer):
        writer.write(_head(target, {"Content-Length": str(len(body)), **headers}) + body)
        with contextlib.suppress(OSError):
            await writer.drain()
        return await _status(reader)


async def _lives(target: ServerTarget) -> str:
    """Return "" if the server answers a small request, else what happens instead."""
    try:
        status = await _request(target, b"{}")
    except TimeoutError:
        return f"no answer to a small request within {ANSWER_SECONDS:g} seconds"
    except NotApplicableError as error:  # it has ended
        return str(error)
    if not status:
        return "no answer to a small request"
    return ""


async def require_answer(target: ServerTarget) -> None:
    """Send a small request.

    Raises:
        NotApplicableError: not even that is answered.
    """
    problem = await _lives(target)
    if problem:
        raise NotApplicableError(problem)


def _is_refusal(status: int) -> bool:
    """Return whether an answer, or its absence, refuses a request."""
    return not status or 400 <= status < 500


@attack("server-large-body", Surface.SERVER)
async def send_large_body(target: ServerTarget) -> str:
    """Send a body without end."""
    chunk = b" " * (1 << 20)
    sent = 0
    async with _connection(target) as (reader, writer):
        writer.write(_head(target, {"Content-Length": str(1 << 40)}))
        answer = asyncio.ensure_future(reader.readline())
        try:
            while sent < BODY_BYTES and not answer.done():
                writer.write(chunk)
                async with asyncio.timeout(ANSWER_SECONDS):
                    await writer.drain()
                sent += len(chunk)
        except (OSError, TimeoutError):
            pass  # it reads no more
        finally:
            answer.cancel()
    if sent >= BODY_BYTES:
        return f"{sent >> 20} MiB of a body of a terabyte were read"
    return await _lives(target)


@attack("server-deep-json", Surface.SERVER)
async def send_deep_json(target: ServerTarget) -> str:
    """Exhaust the stack of a JSON parser."""
    status = await _request(target, b"[" * DEPTH + b"]" * DEPTH)
    if not _is_refusal(status):
        return f"status {status} for {DEPTH:,} lists in each other"
    return await _lives(target)


@attack("server-no-text", Surface.SERVER)
async def send_no_text(target: ServerTarget) -> str:
    """Fail a server by bytes that are not text."""
    status = await _request(target, b'{"a": "\xff\xfe\xed\xa0\x80"}')
    if not _is_refusal(status):
        return f"status {status} for bytes that are not UTF-8"
    return await _lives(target)


@attack("server-idle-connections", Surface.SERVER)
async def hold_connections(target: ServerTarget) -> str:
    """Hold connections and send nothing."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(IDLE_CONNECTIONS):
            _, writer = await stack.enter_async_context(_connection(target))
            writer.write(b"POST ")
        return await _lives(target)


@attack("server-large-head", Surface.SERVER)
async def send_large_head(target: ServerTarget) -> str:
    """Send a head without end."""
    status = await _request(target, b"{}", {"X-Large": "x" * (4 << 20)})
    if not _is_refusal(status):
        return f"status {status} for a head of 4 MiB"
    return await _lives(target)


@attack("server-two-lengths", Surface.SERVER)
async def send_two_lengths(target: ServerTarget) -> str:
    """Hide a request behind another one."""
    hidden = _head(target, {"Content-Length": "0"}, method="GET")
    status = await _request(target, hidden, {"Transfer-Encoding": "chunked"})
    if not _is_refusal(status):
        return f"status {status} for a body with two lengths"
    return ""


@attack("server-other-host", Surface.SERVER)
async def send_other_host(target: ServerTarget) -> str:
    """Reach it from a page by a name that resolves here."""
    usual = await _request(target, b"{}")
    status = await _request(target, b"{}", {"Host": "attacker.example"})
    if status == usual and status not in (401, 403):
        return f"status {status} as for its own name"
    return ""


@attack("server-other-origin", Surface.SERVER)
async def send_other_origin(target: ServerTarget) -> str:
    """Reach it from a page of another origin."""
    usual = await _request(target, b"{}")
    headers = {"Origin": "http://attacker.example", "Content-Type": "text/plain"}
    status = await _request(target, b"{}", headers)
    if status == usual and status not in (401, 403, 415):
        return f"status {status} as for a client of its own"
    return ""


@attack("server-path-outside", Surface.SERVER)
async def read_path_outside(target: ServerTarget) -> str:
    """Read a file of the machine by its path."""
    for path in ("/../../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/%2e%2e/etc/passwd"):
        async with _connection(target) as (reader, writer):
            writer.write(_head(target, {}, method="GET", path=path))
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await reader.read(64 << 10)
        if b"root:" in answer:
            return f"GET {path} answered /etc/passwd"
    return ""
