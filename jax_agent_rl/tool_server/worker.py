"""The worker processes of a tool server: the server's handle of one, and the program it runs.

::

    WorkerProcess                             python -m jax_agent_rl.tool_server.worker
      stdin   ──{"settings", "socket", "name"}──►
      stdout  ◄──{"ready"} or {"error"}──
      POST /steps, POST /retrieve, GET /health ──► Unix socket in a ──► ToolService
                                                   private folder

A hash of its id assigns a trajectory to one worker: its environments are always where its actions
go. When a worker dies, its environments are lost (the kernel ends their programs with it):
they are counted, and the next action of each trajectory fails instead of starting silently in a
fresh environment. A worker whose event loop is stuck (in a tool's parser, say) cannot be
interrupted; it is killed after ``stuck_seconds``. When stdin ends, also because the server was
killed, a worker closes its environments and exits.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import resource
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry

from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.errors import ConfigError, JaxAgentRLError, WorkerDiedError
from jax_agent_rl.tool_server.plugins import ServerTool, ToolContext
from jax_agent_rl.tool_server.plugins.base import Failure, ToolReply, failed
from jax_agent_rl.tool_server.plugins.registry import FINISH, tool_classes
from jax_agent_rl.tool_server.sandbox import SandboxLimits, open_sandbox
from jax_agent_rl.tool_server.service import Telemetry, ToolService
from jax_agent_rl.tools.client import ServerAction
from jax_agent_rl.utils.bounded_json import decode_json
from jax_agent_rl.utils.loop_watch import watch_loop
from jax_agent_rl.utils.network import IDENTITY, UnreadableAnswerError, read_answer
from jax_agent_rl.utils.startup import own_environment, own_python, quiet_logging
from jax_agent_rl.utils.timeouts import DaemonThreads

logger = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 1 << 30
MAX_ANSWER_VALUES = 16_000_000
"""Limits of a worker's answer to a batch of actions."""
_START_SECONDS = 600.0  # building a search index may take long
_STOP_SECONDS = 40.0  # longer than a worker needs to give up on environments that do not close
_PING_SECONDS = 2.0
_RETRY_SECONDS = (0.1, 1.0, 5.0)  # before the first starts after a death
_MAX_RETRY_SECONDS = 30.0  # before all others


class WorkerProcess:
    """One worker process, as seen by the server.

    Args:
        number: index of the worker.
        folder: private folder for the worker's socket and metrics.
        on_death: called with the process id after each unexpected end.
    """

    def __init__(
        self,
        settings: ToolServerSettings,
        number: int,
        folder: Path,
        on_death: Callable[[int], None],
    ):
        self.name = str(number)
        self._settings = settings
        self._socket = folder / f"worker-{number}.sock"
        self._metrics = folder / "metrics"
        self._on_death = on_death
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._keeper: asyncio.Task[None] | None = None
        # Trajectories that have an environment in the process, and trajectories whose environment
        # died with a process, which is not reported to them yet.
        self._open: set[str] = set()
        self._lost: set[str] = set()

    @property
    def pid(self) -> int | None:
        """Process id."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process, and restart it whenever it ends.

        Raises:
            ConfigError: the worker rejects the settings.
        """
        process = await self._launch()
        self._keeper = asyncio.create_task(self._keep(process))

    async def stop(self) -> None:
        """Let the process close its environments and end; kill it if it is stuck."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

        # A stuck worker would not notice that its stdin ends.
        try:
            await self.count_environments()
        except WorkerDiedError:
            self.kill()
        await self._disconnect()

        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            logger.error(
                "worker %s did not stop within %g s and is killed", self.name, _STOP_SECONDS
            )
            process.kill()
            await process.wait()

    def kill(self) -> None:
        """Kill the process without closing its environments."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def steps(self, steps: Sequence[ServerAction]) -> list[ToolReply]:
        """Execute actions; replies, not exceptions, report a dead worker."""
        replies: dict[int, ToolReply] = {}
        sent_indices: list[int] = []
        for index, step in enumerate(steps):
            if step.trajectory_id in self._lost:
                self._lost.discard(step.trajectory_id)
                replies[index] = _worker_died(step)
            else:
                sent_indices.append(index)

        try:
            answers = []
            if sent_indices:
                body = [asdict(steps[index]) for index in sent_indices]
                answers = await self._request("POST", "/steps", json=body)
            for index, answer in zip(sent_indices, answers, strict=True):
                replies[index] = ToolReply(**answer)
        except WorkerDiedError:
            for index in sent_indices:
                replies[index] = _worker_died(steps[index])
                # This reply tells the trajectory; its next action need not.
                self._lost.discard(steps[index].trajectory_id)

        for index, step in enumerate(steps):
            if replies[index].open:
                self._open.add(step.trajectory_id)
            else:
                self._open.discard(step.trajectory_id)
        return [replies[index] for index in range(len(steps))]

    async def retrieve(self, queries: list[str], topk: int) -> list[list[dict[str, Any]]]:
        """Search the corpus.

        Raises:
            WorkerDiedError: the worker is gone.
        """
        return await self._request("POST", "/retrieve", json={"queries": queries, "topk": topk})

    async def count_environments(self, *, timeout: float = _PING_SECONDS) -> int:
        """Count open environments.

        Args:
            timeout: seconds.

        Raises:
            WorkerDiedError: there was no answer within ``timeout``.
        """
        try:
            async with asyncio.timeout(timeout):
                health = await self._request("GET", "/health")
                return health["environments"]
        except TimeoutError:
            raise WorkerDiedError(
                f"worker {self.name} did not answer within {timeout:g} s"
            ) from None

    async def _request(self, method: str, path: str, **options: Any) -> Any:
        if self._session is None:
            raise WorkerDiedError(f"worker {self.name} is not running")
        try:
            async with self._session.request(method, f"http://worker{path}", **options) as response:
                response.raise_for_status()
                content = await read_answer(
                    response.headers, response.content.iter_any(), MAX_ANSWER_BYTES
                )
            return decode_json(
                content, max_values=MAX_ANSWER_VALUES, non_finite=True, lone_surrogates=True
            )
        except (aiohttp.ClientError, OSError, UnreadableAnswerError, ValueError) as error:
            raise WorkerDiedError(f"worker {self.name} did not answer: {error!r}") from error

    async def _keep(self, process: asyncio.subprocess.Process) -> None:
        """Restart the process whenever it ends."""
        while True:
            watchdog = asyncio.create_task(self._kill_when_stuck(process))
            try:
                code = await process.wait()
            finally:
                watchdog.cancel()
            logger.error("tool worker %s ended with code %s; starting another", self.name, code)
            await self._disconnect()
            self._lost |= self._open
            self._open.clear()
            self._on_death(process.pid)

            pauses = itertools.chain(_RETRY_SECONDS, itertools.repeat(_MAX_RETRY_SECONDS))
            for pause in pauses:
                await asyncio.sleep(pause)
                try:
                    process = await self._launch()
                    break
                except (JaxAgentRLError, OSError) as error:
                    logger.error("tool worker %s could not be started: %s", self.name, error)

    async def _kill_when_stuck(self, process: asyncio.subprocess.Process) -> None:
        seconds = self._settings.stuck_seconds
        try:
            while True:
                await asyncio.sleep(seconds / 4)
                await self.count_environments(timeout=seconds)
        except WorkerDiedError as error:
            if process.returncode is None:
                logger.error("%s and is killed; an action is stuck in it", error)
                process.kill()

    async def _launch(self) -> asyncio.subprocess.Process:
        """Start the process; connect to it once it is ready."""
        self._socket.unlink(missing_ok=True)  # of a process that died
        process = await asyncio.create_subprocess_exec(
            *own_python("-m", "jax_agent_rl.tool_server.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**own_environment(), "PROMETHEUS_MULTIPROC_DIR": str(self._metrics)},
            # Ctrl-C reaches only the server, which decides, even while a worker still imports.
            process_group=0,
        )
        self._process = process
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._send_settings(process)
        except BaseException as error:
            if process.returncode is None:
                process.kill()
                await process.wait()
            if isinstance(error, TimeoutError):
                raise WorkerDiedError(
                    f"it was not ready within {_START_SECONDS:g} seconds, and was killed; its"
                    " messages are above"
                ) from None
            raise

        # The session has no timeout: a worker limits every action, and a dead one breaks the
        # connection.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path=str(self._socket), limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=IDENTITY,
            auto_decompress=False,
        )
        return process

    async def _send_settings(self, process: asyncio.subprocess.Process) -> None:
        """Send the settings and wait until the worker is ready."""
        assert process.stdin is not None and process.stdout is not None
        settings = self._settings.model_dump(mode="json")
        hello = {"settings": settings, "socket": str(self._socket), "name": self.name}
        process.stdin.write(json.dumps(hello).encode() + b"\n")
        try:
            answer = json.loads(await process.stdout.readline())
        except ValueError:
            code = await process.wait()
            raise WorkerDiedError(
                f"it ended with code {code} before it was ready; its messages are above"
            ) from None
        if "error" in answer:
            raise ConfigError(answer["error"].removeprefix("configuration error:\n  - "))

    async def _disconnect(self) -> None:
        session = self._session
        self._session = None  # from here on, requests are refused
        if session is not None:
            await session.close()


def _worker_died(step: ServerAction) -> ToolReply:
    if step.finish:
        return ToolReply(observation="", done=True, valid=True, tool=FINISH, error=None, open=False)
    return failed(
        Failure.WORKER, "Error: the process that held this trajectory's tools ended", done=True
    )


def assign_worker(trajectory_id: str, workers: int) -> int:
    """Return the index of the worker that owns a trajectory."""
    return zlib.crc32(trajectory_id.encode("utf-8", "surrogatepass")) % workers


# --- in the worker process ------------------------------------------------------------------------


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
            limits=SandboxLimits.from_settings(settings.limits),
            python=settings.python_path,
            max_running=settings.max_running,
        )
    context = ToolContext(settings=settings, threads=DaemonThreads(), _sandbox=sandbox)
    return [tool(context) for tool in classes]


def make_app(service: ToolService, tools: Sequence[ServerTool]) -> web.Application:
    """Create the worker's routes; request bodies come from the server, which has validated them."""

    async def steps(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        replies = await service.steps([ServerAction(**step) for step in body])
        return web.json_response([asdict(reply) for reply in replies])

    async def retrieve(request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        search_tool: Any = next(tool for tool in tools if tool.name == "search")
        return web.json_response(await search_tool.retrieve(body["queries"], body["topk"]))

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"environments": service.environments.count})

    app = web.Application(client_max_size=1 << 40)
    app.add_routes(
        [web.post("/steps", steps), web.post("/retrieve", retrieve), web.get("/health", health)]
    )
    return app


async def serve(hello: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
    """Serve until stdin ends; ``answer`` sends one message to the server."""
    settings = ToolServerSettings.model_validate(hello["settings"])
    tools = await make_tools(settings)
    service = ToolService(tools, settings, Telemetry(CollectorRegistry(), worker=hello["name"]))
    await service.start()

    runner = web.AppRunner(
        make_app(service, tools), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    await web.UnixSite(runner, hello["socket"], backlog=1024).start()
    answer({"ready": True})

    try:
        stdin = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin.buffer)

        # The server closes standard input when it ends, however it ends.
        with watch_loop(service.failures.report):
            await stdin.read()
    finally:
        await runner.cleanup()
        await service.close()


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one: each session needs several."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = hard_limit
    if hard_limit == resource.RLIM_INFINITY:
        limit = 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard_limit))


def main() -> None:
    """Run a worker until stdin ends."""
    quiet_logging()
    raise_descriptor_limit()

    # What tools print goes to standard error: nobody reads standard output once the worker is
    # ready.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    hello = json.loads(sys.stdin.readline())
    try:
        asyncio.run(serve(hello, answer))
    except JaxAgentRLError as error:
        answer({"error": str(error)})
        sys.exit(2)


if __name__ == "__main__":
    main()
