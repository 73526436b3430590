"""A tool server with the fake tools, its client, and a service without HTTP."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry

from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.tool_server.server import ToolServer
from jax_agent_rl.tool_server.service import Telemetry, ToolService
from jax_agent_rl.tool_server.worker import make_tools
from jax_agent_rl.tools.client import ServerAction

FAKES = str(Path(__file__).parent / "unit" / "tool_server" / "fake_tools.py")


class Client:
    """A client of a running server."""

    def __init__(self, server, session):
        self.server = server
        self.session = session

    async def send(self, path="/get_observation", method="POST", **options):
        async with self.session.request(method, path, **options) as response:
            return response.status, await response.json()

    async def step(self, *actions, ids=None, **fields):
        ids = ids or [f"t{n}" for n in range(len(actions))]
        status, body = await self.send(
            json={"trajectory_ids": ids, "actions": list(actions), **fields}
        )
        assert status == 200, body
        return body

    async def metrics(self):
        """Samples by their text, e.g. ``toolserver_steps_total{outcome="ok",tool="echo"}``."""
        async with self.session.get("/metrics") as response:
            assert response.content_type == "text/plain"
            lines = (await response.text()).splitlines()
        values = {}
        for line in lines:
            if line[0] != "#":
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        return values


class serving:
    """A server with the fake tools on a port: ``async with serving("workers=2") as client``."""

    def __init__(self, *overrides, headers=None):
        defaults = [
            "tools=[echo,counter,faulty]",
            f"tool_path={FAKES}",
            "port=0",
            "limits.wall_seconds=1",
        ]
        self._settings = build_tree(ToolServerSettings, {}, [*defaults, *overrides])
        self._headers = headers

    async def __aenter__(self):
        self._server = await ToolServer(self._settings).__aenter__()
        self._session = aiohttp.ClientSession(self._server.url, headers=self._headers)
        return Client(self._server, self._session)

    async def __aexit__(self, *exception):
        await self._session.close()
        await self._server.close()


async def until_healthy(client):
    while (await client.send("/health", "GET"))[0] != 200:
        await asyncio.sleep(0.05)


def total(metrics, what):
    return sum(
        value
        for name, value in metrics.items()
        if name.startswith(f"toolserver_environments_{what}_total")
    )


@asynccontextmanager
async def agent(*overrides, **extra):
    """A function that takes an action of one trajectory and returns the reply."""
    settings = build_tree(ToolServerSettings, {}, list(overrides))
    tools = await make_tools(settings)
    service = ToolService(tools, settings, Telemetry(CollectorRegistry(), worker="0"))
    await service.start()

    async def act(action, **fields):
        return await service.step(
            ServerAction(trajectory_id="t", text=action, extra_fields=fields or extra)
        )

    try:
        yield act
    finally:
        await service.close()


def text_of(reply):
    return reply.observation["obs"] if isinstance(reply.observation, dict) else reply.observation
