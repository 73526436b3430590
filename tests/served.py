"""A backend behind a rollout server of this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer


@contextlib.asynccontextmanager
async def behind_server(
    backend: Any,
    *,
    kind: type[RemoteBackend] = RemoteBackend,
    client: dict[str, Any] | None = None,
    **server: Any,
) -> AsyncIterator[tuple[RolloutServer, Any]]:
    """Start a backend, its server and a client of ``kind``, with these settings; end all three."""
    await backend.start()
    http = RolloutServer(backend, **server)
    await http.start()
    remote = kind(http.url, **client or {})
    try:
        await remote.start()
        yield http, remote
    finally:
        await remote.close()
        await http.close()
        await backend.close()
