"""``jax-agent-rl tool-server``: runs a tool server until it is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jax_agent_rl.config.tool_server import ToolServerSettings
from jax_agent_rl.tool_server.front import ToolServer
from jax_agent_rl.tool_server.worker import allow_many_descriptors
from jax_agent_rl.utils.interrupt import at_leaving


async def run(settings: ToolServerSettings, say: Callable[[str], None]) -> None:
    """Serve until cancelled.

    Args:
        settings: of the server.
        say: prints a line.
    """
    allow_many_descriptors()
    server = ToolServer(settings)
    with at_leaving(server.kill):
        async with server:
            say(f"tool server on {server.url}: {', '.join(settings.tools)} ({settings.workers} workers)")
            if settings.sandbox == "unsafe_local":
                say("sandbox=unsafe_local: what models write runs with your rights, without protection")
            await asyncio.Event().wait()
