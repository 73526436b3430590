"""A worker process: carries out the actions of its trajectories, behind a Unix socket that only the front reaches.

``python -m jax_agent_rl.tool_server.worker`` reads one line of JSON from stdin, ``{"settings", "socket", "name"}``,
and answers on stdout with ``{"ready": true}`` or ``{"error": …}``. When stdin ends, also because the front was killed,
it closes every environment and exits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import resource
import sys
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry

from jax_agent_rl.config.tool_server import ToolServerSettings
from jax_agent_rl.errors import JaxAgentRLError
from jax_agent_rl.tool_server.plugin import ServerTool, ToolContext
from jax_agent_rl.tool_server.plugins import tool_classes
from jax_agent_rl.tool_server.sandbox import open_sandbox
from jax_agent_rl.tool_server.sandbox.limits import run_limits
from jax_agent_rl.tool_server.service import ToolService
from jax_agent_rl.tool_server.telemetry import Telemetry
from jax_agent_rl.tool_server.wire import ObservationStep
from jax_agent_rl.utils.threads import DaemonThreads


async def make_tools(settings: ToolServerSettings) -> list[ServerTool]:
    """Create the tools that the settings name, and a sandbox if one of them needs it.

    Raises:
        ConfigError: a tool is unknown, or there is no sandbox.
    """
    classes = tool_classes(settings)
    sandbox = None
    if any(tool.needs_sandbox for tool in classes):
        sandbox = await open_sandbox(
            settings.sandbox,
            limits=run_limits(settings.limits),
            python=settings.python_path,
            max_running=settings.max_running,
        )
    context = ToolContext(settings=settings, threads=DaemonThreads(), _sandbox=sandbox)
    return [tool(context) for tool in classes]


def make_service(settings: ToolServerSettings, tools: list[ServerTool], telemetry: Telemetry) -> ToolService:
    """Create the service of one worker, not started."""
    return ToolService(
        tools,
        telemetry,
        step_seconds=settings.step_seconds,
        max_action_chars=settings.max_action_chars,
        max_observation_chars=settings.max_observation_chars,
        max_environments=settings.max_environments,
        idle_seconds=settings.idle_seconds,
        done_if_invalid=settings.done_if_invalid,
    )


def make_app(service: ToolService, tools: list[ServerTool]) -> web.Application:
    """Create the worker's routes. Bodies come from the front, which has validated them."""

    async def steps(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        replies = await service.steps([ObservationStep(**step) for step in body])
        return web.json_response([dataclasses.asdict(reply) for reply in replies])

    async def retrieve(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        found = await searchers[0].retrieve(body["queries"], body["topk"])
        return web.json_response(found)

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"environments": service.environments.count})

    app = web.Application(client_max_size=1 << 40)
    app.add_routes([web.post("/steps", steps), web.get("/health", health)])
    searchers: list[Any] = [tool for tool in tools if hasattr(tool, "retrieve")]
    if searchers:
        app.add_routes([web.post("/retrieve", retrieve)])
    return app


async def serve(hello: dict[str, Any]) -> None:
    """Serve until stdin ends."""
    settings = ToolServerSettings.model_validate(hello["settings"])
    tools = await make_tools(settings)
    telemetry = Telemetry(CollectorRegistry(), worker=hello["name"])
    service = make_service(settings, tools, telemetry)
    await service.start()
    runner = web.AppRunner(make_app(service, tools), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.UnixSite(runner, hello["socket"], backlog=1024).start()
    _say({"ready": True})
    try:
        await _end_of_stdin()
    finally:
        await runner.cleanup()
        await service.close()


async def _end_of_stdin() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    while await reader.read(4096):
        pass


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def allow_many_descriptors() -> None:
    """Raise the soft limit of open descriptors to the hard one: each of many sessions needs a handful."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main() -> None:
    """Serve as a worker, as the module says."""
    allow_many_descriptors()
    hello = json.loads(sys.stdin.readline())
    try:
        asyncio.run(serve(hello))
    except JaxAgentRLError as error:
        _say({"error": str(error)})
        sys.exit(2)


if __name__ == "__main__":
    main()
