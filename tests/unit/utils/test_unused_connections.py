"""Servers close unused connections: a client that was busy meanwhile loses no request by it."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jax_agent_rl.environments.server_session import ServerSession
from jax_agent_rl.errors import ToolServerError
from jax_agent_rl.rollout.http.connection import ServerConnection
from jax_agent_rl.utils.network import UNUSED_SECONDS, JsonService


class Handler(BaseHTTPRequestHandler):
    """Answers requests, and closes a connection as soon as no client may keep it any more."""

    protocol_version = "HTTP/1.1"
    timeout = UNUSED_SECONDS

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


async def by_json_service(url: str, between: Callable[[], None]) -> None:
    service = JsonService(
        url=url, url_key="url", timeout=10.0, timeout_key="timeout", error=ToolServerError
    )
    try:
        await twice(lambda: service.post({}), between)
    finally:
        await service.close()


async def by_server_connection(url: str, between: Callable[[], None]) -> None:
    async def check(response: object) -> None:
        pass

    connection = ServerConnection(url, kind="server", headers={}, silence_seconds=10, check=check)
    connection.open()
    try:
        await twice(lambda: connection.post("/", b"{}"), between)
    finally:
        await connection.close()


async def by_environment_session(url: str, between: Callable[[], None]) -> None:
    session = ServerSession(url, environment="shop")
    session.open()
    try:
        await twice(lambda: session.request_object("POST", "/", {}), between)
    finally:
        await session.close()


async def twice(send: Callable[[], Awaitable[object]], between: Callable[[], None]) -> None:
    await send()
    between()
    await send()


@pytest.mark.parametrize("client", [by_json_service, by_server_connection, by_environment_session])
def test_a_request_after_a_pause_has_a_connection_of_its_own(client, url: str):
    # The event loop stands still, so that it does not see that the server closes the connection.
    asyncio.run(client(url, lambda: time.sleep(UNUSED_SECONDS + 0.2)))
