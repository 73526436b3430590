"""The process clients speak to: checks requests, spreads them over the workers, serves health and metrics.

::

    request ──► host, token? ──► size, JSON, schema ──► by trajectory ──► workers ──► answer in the request's order
                 403   401        413    400    422

``POST /get_observation`` (see ``wire``) · ``POST /retrieve {queries, topk?, return_scores?}`` (Search-R1's, with the
search tool) · ``GET /health`` · ``GET /metrics`` (Prometheus text).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jax_agent_rl import leftovers
from jax_agent_rl.errors import ConfigError, WorkerDiedError
from jax_agent_rl.observe.prometheus import CONTENT_TYPE
from jax_agent_rl.serving import is_loopback, names_this_machine
from jax_agent_rl.tools.server import telemetry
from jax_agent_rl.tools.server.pool import Worker, worker_of
from jax_agent_rl.tools.server.settings import ToolServerSettings
from jax_agent_rl.tools.server.wire import ObservationRequest, Reply, encode_replies, explain

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
        token = settings.token
        if token is None and not is_loopback(settings.host):
            raise ConfigError(
                f"host={settings.host!r} can be reached from other machines and needs a token: put a secret into an "
                "environment variable and name it in token_env (or listen on 127.0.0.1)"
            )
        self._settings = settings
        self._token = None if token is None else b"Bearer " + token.encode()
        self._folder = leftovers.make_folder("tool-server-")  # mode 0700: its sockets ask for no token
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
        self._app = web.Application(client_max_size=settings.max_request_mb << 20, middlewares=[self._guard])
        self._app.add_routes(
            [
                web.post("/get_observation", self._get_observation),
                web.post("/retrieve", self._retrieve),
                web.get("/health", self._health),
                web.get("/metrics", self._serve_metrics),
            ]
        )
        self._runner: web.AppRunner | None = None
        self.port = settings.port

    @property
    def url(self) -> str:
        """Where it listens; for a wildcard address, as this machine sees it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.host, self._settings.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def worker_pids(self) -> list[int | None]:
        """Process ids of the workers."""
        return [worker.pid for worker in self._workers]

    async def start(self) -> None:
        """Starts the workers, then listens.

        Raises:
            ConfigError: a tool cannot be started, there is no sandbox, or the port is in use.
        """
        try:
            # The first alone: what it makes for all (a search index) is there for the others.
            await self._workers[0].start()
            await asyncio.gather(*(worker.start() for worker in self._workers[1:]))
            self._runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
            await self._runner.setup()
            site = web.TCPSite(self._runner, self._settings.host, self._settings.port, backlog=1024)
            try:
                await site.start()
            except OSError as error:
                raise ConfigError(f"cannot listen on {self._settings.host}:{self._settings.port}: {error}") from error
            self.port = self._runner.addresses[0][1]
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Ends requests under way, closes every environment, stops the workers."""
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        leftovers.remove_folder(self._folder)

    async def __aenter__(self) -> ToolServer:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- who may ask, and what ---------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path if request.match_info.route.resource is not None else "unknown"
        status = 499  # the client went away
        try:
            response = self._stranger(request) or await handler(request)
            status = response.status
            return response
        except web.HTTPRequestEntityTooLarge:
            status = 413
            return _refuse(status, f"the request is larger than max_request_mb={self._settings.max_request_mb}")
        except web.HTTPException as error:
            status = error.status
            return _refuse(status, f"{request.method} {request.path}: {error.reason}")
        except Exception:
            status = 500
            raise
        finally:
            self._requests.labels(path, status).inc()

    def _stranger(self, request: web.Request) -> web.Response | None:
        """A refusal, unless the client may ask."""
        if self._token is not None:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._token):
                return _refuse(401, "the token is missing or wrong: send the header 'Authorization: Bearer TOKEN'")
        elif not names_this_machine(request.host, listening_on=self._settings.host):
            return _refuse(403, f"without a token only requests to localhost are answered, not to {request.host!r}")
        return None

    async def _body(self, request: web.Request, model: type[BaseModel]) -> Any:
        """The request's body, checked.

        Raises:
            web.HTTPException: 400, 413, 415 or 422.
        """
        if request.content_type != "application/json":  # what a page of another origin cannot send unasked
            raise web.HTTPUnsupportedMediaType(reason="send Content-Type: application/json")
        try:
            return model.model_validate(json.loads((await request.read()).decode("utf-8")))
        except ValidationError as error:
            raise _Refused(422, explain(error)) from error
        except (ValueError, RecursionError) as error:
            raise _Refused(400, f"the body is not JSON in UTF-8: {str(error)[:200]}") from error

    # --- paths -------------------------------------------------------------------------------------------------

    async def _get_observation(self, request: web.Request) -> web.Response:
        began = time.perf_counter()
        try:
            body: ObservationRequest = await self._body(request, ObservationRequest)
            if len(body.actions) > self._settings.max_batch:
                raise _Refused(422, f"{len(body.actions)} actions are more than max_batch={self._settings.max_batch}")
        except _Refused as refused:
            return refused.response()
        replies = await self._steps(body)
        return web.json_response(encode_replies(replies, 1000 * (time.perf_counter() - began)))

    async def _steps(self, body: ObservationRequest) -> list[Reply]:
        """Has each worker carry out its part."""
        steps = body.steps()
        parts: dict[int, list[int]] = defaultdict(list)
        for index, step in enumerate(steps):
            parts[worker_of(step.trajectory_id, len(self._workers))].append(index)
        answers = await asyncio.gather(
            *(self._workers[number].steps([steps[i] for i in part]) for number, part in parts.items())
        )
        replies: dict[int, Reply] = {}
        for part, answer in zip(parts.values(), answers, strict=True):
            replies.update(zip(part, answer, strict=True))
        return [replies[index] for index in range(len(steps))]

    async def _retrieve(self, request: web.Request) -> web.Response:
        if "search" not in self._settings.tools:
            return _refuse(404, "tools does not name 'search'")
        try:
            body: RetrieveRequest = await self._body(request, RetrieveRequest)
        except _Refused as refused:
            return refused.response()
        worker = self._workers[worker_of(body.queries[0], len(self._workers))]
        try:
            found = await worker.retrieve(body.queries, body.topk or self._settings.search.topk)
        except WorkerDiedError as error:
            return _refuse(503, str(error))
        if not body.return_scores:
            found = [[hit["document"] for hit in hits] for hits in found]
        return web.json_response({"result": found})

    async def _health(self, request: web.Request) -> web.Response:
        counts = []
        for worker in self._workers:
            try:
                counts.append(await worker.environments())
            except WorkerDiedError:
                continue
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
        """Counts a worker's end and the environments it took along."""
        self._restarts.inc()
        for tool, count in self._open_in(worker).items():
            already = self._lost_before.get((worker, tool), 0.0)
            self._lost.labels(tool).inc(max(0.0, count - already))
            self._lost_before[worker, tool] = count
        mark_process_dead(pid, path=str(self._folder / "metrics"))

    def _open_in(self, worker: str) -> dict[str, float]:
        """Environments a worker opened and did not close, over all its processes so far, by tool."""
        open_in: dict[str, float] = defaultdict(float)
        for metric in self._of_workers().collect():
            sign = {telemetry.OPENED: 1, telemetry.CLOSED: -1}.get(metric.name, 0)
            for sample in metric.samples if sign else ():
                if sample.labels["worker"] == worker and sample.name.endswith("_total"):
                    open_in[sample.labels["tool"]] += sign * sample.value
        return open_in


class _Refused(Exception):
    """A request that is not carried out."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status

    def response(self) -> web.Response:
        """The answer."""
        return _refuse(self.status, str(self))


def _refuse(status: int, text: str) -> web.Response:
    return web.json_response({"detail": text}, status=status)
