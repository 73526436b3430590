"""The way from a sandbox to the endpoint: a Unix socket of the host that can be bound into it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from jax_agent_rl.agents.command.runner import Relay


class UnixRelay:
    """A Unix socket that forwards to a port on loopback.

    Unlike the port, it can be bound into a sandbox. Each program has its own, so that its
    connections are bounded and end with it.
    """

    def __init__(self, port: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="jax-agent-rl-")
        self._relay = Relay(lambda: asyncio.open_connection("127.0.0.1", port))
        self._server: asyncio.Server | None = None
        self.path = Path(self._folder.name) / "endpoint.sock"

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._relay.serve, self.path)
        # A sandboxed program is another user; the folder keeps out everyone else.
        self.path.chmod(0o666)

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            self._relay.abort()
            await self._server.wait_closed()
        self._folder.cleanup()
