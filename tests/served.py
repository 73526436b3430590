"""A backend behind a rollout server of this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer


@dataclass(frozen=True)
class Upload:
    """A file that a client sent to a server."""

    name: str
    size: int


def note_uploads(server: RolloutServer) -> list[Upload]:
    """Return a list to which a server that has not started yet adds its uploads."""
    uploads: list[Upload] = []

    @web.middleware
    async def note(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.method == "PUT":
            name = request.path.rpartition("/")[2]
            uploads.append(Upload(name, request.content_length or 0))
        return await handler(request)

    server.app.middlewares.append(note)
    return uploads


@contextlib.asynccontextmanager
async def behind_server(
    backend: Any, *, client: dict[str, Any] | None = None, **server: Any
) -> AsyncIterator[tuple[RolloutServer, RemoteBackend]]:
    """Start a backend, its server and a client, with these settings; end all three."""
    await backend.start()
    http = RolloutServer(backend, **server)
    await http.start()
    remote = RemoteBackend(http.url, **client or {})
    try:
        await remote.start()
        yield http, remote
    finally:
        await remote.close()
        await http.close()
        await backend.close()
