"""The process clients speak to: checks requests, spreads them over the workers, serves health and metrics.

::

    HttpServer's guard ──► size, JSON, schema ──► by trajectory ──► workers ──► answer in the request's order
                            413    400    422

``POST /get_observation`` (see ``wire``) · ``POST /retrieve {queries, topk?, return_scores?}`` (Search-R1's, with the
search tool) · ``GET /health`` · ``GET /metrics`` (Prometheus text).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jax_agent_rl.config.tool_server import ToolServerSettings
from jax_agent_rl.errors import WorkerDiedError
from jax_agent_rl.tool_server import telemetry
from jax_agent_rl.tool_server.pool import Worker, worker_of
from jax_agent_rl.tool_server.wire import ObservationRequest, ToolReply, encode_replies, explain
from jax_agent_rl.tool_server.worker import allow_many_descriptors
from jax_agent_rl.utils import tempdirs
from jax_agent_rl.utils.http_server import HttpServer, Refused, read_json
from jax_agent_rl.utils.interrupt import on_forced_exit
from jax_agent_rl.utils.prometheus import CONTENT_TYPE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RetrieveRequest(BaseModel):
    """The body of ``POST /retrieve``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queries: list[str] = Field(min_length=1, max_length=1024)
    topk: int | None = Field(default=None, ge=1, le=1000)
    return_scores: bool = False


class ToolServer:
    """A tool server; ``async with`` it, or :meth:`start` and :meth:`close`.

    Args:
        settings: all there is to set.

    Raises:
        ConfigError: an address that others can reach, without a token.
    """

    def __init__(self, settings: ToolServerSettings):
        self._settings = settings
        self._http = HttpServer(
            [
                web.post("/get_observation", self._get_observation),
                web.post("/retrieve", self._retrieve),
                web.get("/health", self._health),
                web.get("/metrics", self._serve_metrics),
            ],
            refuse=_refuse,
            host=settings.host,
            port=settings.port,
            token=settings.token,
            token_key="token_env",
            max_body_bytes=settings.max_request_mb << 20,
            body_key=f"max_request_mb={settings.max_request_mb}",
            around=[self._count],
        )
        self._folder = tempdirs.make_folder("tool-server-")  # mode 0700: its sockets ask for no token
        (self._folder / "metrics").mkdir()
        self._workers = [Worker(settings, n, self._folder, self._died) for n in range(settings.workers)]
        self._metrics = CollectorRegistry()
        self._requests = Counter("toolserver_requests", "Requests.", ["path", "status"], registry=self._metrics)
        self._restarts = Counter("toolserver_worker_restarts", "Workers that died.", registry=self._metrics)
        self._lost = Counter(
            "toolserver_environments_lost",
            "Environments that died with their worker.",
            ["tool"],
            registry=self._metrics,
        )
        self._lost_before: dict[tuple[str, str], float] = {}  # by worker and tool, in its processes so far

    @property
    def url(self) -> str:
        """The server's URL; for a wildcard address, as this machine sees it."""
        return self._http.url

    @property
    def port(self) -> int:
        """The listening port."""
        return self._http.port

    @property
    def app(self) -> web.Application:
        """The application with its routes."""
        return self._http.app

    @property
    def worker_pids(self) -> list[int | None]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    async def start(self) -> None:
        """Start the workers, then listen.

        Raises:
            ConfigError: a tool cannot be started, there is no sandbox, or the port is in use.
        """
        try:
            # The first alone: what it makes for all (a search index) is there for the others.
            await self._workers[0].start()
            await asyncio.gather(*(worker.start() for worker in self._workers[1:]))
            await self._http.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End requests under way, close every environment and stop the workers."""
        await self._http.close()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        tempdirs.remove_folder(self._folder)

    def kill(self) -> None:
        """Kill the workers, so that :meth:`close` has nothing to wait for."""
        for worker in self._workers:
            worker.kill()

    async def __aenter__(self) -> ToolServer:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- requests ----------------------------------------------------------------------------------------------

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path if request.match_info.route.resource is not None else "unknown"
        status = 499  # the client went away
        try:
            response = await handler(request)
            status = response.status
            return response
        except Exception:
            status = 500
            raise
        finally:
            self._requests.labels(path, status).inc()

    async def _body(self, request: web.Request, model: type[BaseModel]) -> Any:
        """Return the validated request body.

        Raises:
            Refused, web.HTTPException: 400, 413 or 422.
        """
        try:
            return model.model_validate(await read_json(request, lone_surrogates=True))
        except ValidationError as error:
            raise Refused(422, explain(error)) from error

    # --- paths -------------------------------------------------------------------------------------------------

    async def _get_observation(self, request: web.Request) -> web.Response:
        began = time.perf_counter()
        body: ObservationRequest = await self._body(request, ObservationRequest)
        if len(body.actions) > self._settings.max_batch:
            raise Refused(422, f"{len(body.actions)} actions are more than max_batch={self._settings.max_batch}")
        replies = await self._steps(body)
        return web.json_response(encode_replies(replies, 1000 * (time.perf_counter() - began)))

    async def _steps(self, body: ObservationRequest) -> list[ToolReply]:
        """Distribute the steps over the workers, and collect replies in order."""
        steps = body.steps()
        parts: dict[int, list[int]] = defaultdict(list)
        for index, step in enumerate(steps):
            parts[worker_of(step.trajectory_id, len(self._workers))].append(index)
        answers = await asyncio.gather(
            *(self._workers[number].steps([steps[i] for i in part]) for number, part in parts.items())
        )
        replies: dict[int, ToolReply] = {}
        for part, answer in zip(parts.values(), answers, strict=True):
            replies.update(zip(part, answer, strict=True))
        return [replies[index] for index in range(len(steps))]

    async def _retrieve(self, request: web.Request) -> web.Response:
        if "search" not in self._settings.tools:
            return _refuse(404, "tools does not name 'search'")
        body: RetrieveRequest = await self._body(request, RetrieveRequest)
        worker = self._workers[worker_of(body.queries[0], len(self._workers))]
        try:
            found = await worker.retrieve(body.queries, body.topk or self._settings.search.topk)
        except WorkerDiedError as error:
            return _refuse(503, str(error))
        if not body.return_scores:
            found = [[hit["document"] for hit in hits] for hits in found]
        return web.json_response({"result": found})

    async def _health(self, request: web.Request) -> web.Response:
        asked = await asyncio.gather(*(worker.environments() for worker in self._workers), return_exceptions=True)
        counts = [count for count in asked if isinstance(count, int)]
        healthy = len(counts) == len(self._workers)
        body = {
            "status": "healthy" if healthy else "degraded",
            "tools": [*(name for name in self._settings.tools if name != "finish"), "finish"],
            "workers": len(self._workers),
            "workers_running": len(counts),
            "open_environments": sum(counts),
        }
        return web.json_response(body, status=200 if healthy else 503)

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        text = generate_latest(self._metrics) + generate_latest(self._of_workers())
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    # --- metrics -----------------------------------------------------------------------------------------------

    def _of_workers(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self._folder / "metrics"))
        return registry

    def _died(self, worker: str, pid: int) -> None:
        """Count a worker's end and the environments lost with it."""
        self._restarts.inc()
        for tool, count in self._open_in(worker).items():
            already = self._lost_before.get((worker, tool), 0.0)
            self._lost.labels(tool).inc(max(0.0, count - already))
            self._lost_before[worker, tool] = count
        mark_process_dead(pid, path=str(self._folder / "metrics"))

    def _open_in(self, worker: str) -> dict[str, float]:
        """Return the environments that a worker's processes so far opened and did not close, by tool."""
        open_in: dict[str, float] = defaultdict(float)
        for metric in self._of_workers().collect():
            sign = {telemetry.OPENED: 1, telemetry.CLOSED: -1}.get(metric.name, 0)
            for sample in metric.samples if sign else ():
                if sample.labels["worker"] == worker and sample.name.endswith("_total"):
                    open_in[sample.labels["tool"]] += sign * sample.value
        return open_in


def _refuse(status: int, text: str) -> web.Response:
    return web.json_response({"detail": text}, status=status)


async def run(settings: ToolServerSettings, say: Callable[[str], None]) -> None:
    """Serve until cancelled.

    Args:
        settings: of the server.
        say: prints a line.
    """
    allow_many_descriptors()
    server = ToolServer(settings)
    with on_forced_exit(server.kill):
        async with server:
            say(f"tool server on {server.url}: {', '.join(settings.tools)} ({settings.workers} workers)")
            if settings.sandbox == "unsafe_local":
                say("sandbox=unsafe_local: what models write runs with your rights, without protection")
            await asyncio.Event().wait()
