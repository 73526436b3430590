"""Tools of the tool server as one trajectory's agent uses them: through the service."""

from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from jax_agent_rl.config.tool_server import load_settings
from jax_agent_rl.tool_server.service import Telemetry, ToolService
from jax_agent_rl.tool_server.worker import make_tools
from jax_agent_rl.tools.client import ServerAction


@asynccontextmanager
async def agent(*overrides, **extra):
    """A function that takes an action of one trajectory and returns the reply."""
    settings = load_settings(None, ["limits.wall_seconds=3", *overrides])
    tools = await make_tools(settings)
    service = ToolService(tools, settings, Telemetry(CollectorRegistry(), worker="0"))
    await service.start()

    async def act(action, **fields):
        return await service.step(ServerAction(trajectory_id="t", text=action, extra_fields=fields or extra))

    try:
        yield act
    finally:
        await service.close()


def text_of(reply):
    return reply.observation["obs"] if isinstance(reply.observation, dict) else reply.observation
