"""An HTTP server inside the running event loop, where the engine's client lives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.serving import is_loopback

SHUTDOWN_SECONDS = 5


class _Server(uvicorn.Server):
    """Signals belong to the run, which closes this server."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class LoopServer:
    """Serves an application until closed.

    Args:
        app: the ASGI application.
        host: an address to listen on.
        port: 0 takes a free one.
        api_key: whether strangers are kept out; without it only loopback is served.

    Raises:
        ConfigError: the address is not loopback and there is no key, or it cannot be used.
    """

    def __init__(self, app: Starlette, *, host: str = "127.0.0.1", port: int = 0, api_key: str | None = None) -> None:
        if api_key is None and not is_loopback(host):
            raise ConfigError(f"host={host} can be reached by others: set a token (--token-env), or use 127.0.0.1")
        self._socket = _listen(host, port)
        self.host, self.port = host, self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=SHUTDOWN_SECONDS
            )
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The root address, without a path."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        """Begins to serve in the running loop; the socket takes connections already, so none is refused."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]), name="openai-endpoint")

    async def close(self) -> None:
        """Lets running requests end for a moment, then ends them. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
            self._task = None
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener
