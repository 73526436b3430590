r"""The server process: checks requests, distributes them over the workers, serves health and metrics.

::

    HttpServer's guard ──► size, JSON, schema ──► worker of the trajectory ──► answer in the request's order
                            413    400    422

``POST /get_observation`` (below) · ``POST /retrieve {queries, topk?, return_scores?}``
(Search-R1's, with the search tool) · ``GET /health`` · ``GET /metrics`` (Prometheus text).

::

    {"trajectory_ids": ["t-1", "t-2"], "actions": ["<python>print(1)</python>", ""],
     "extra_fields": [{"turns_left": 2}, {}], "finish": [false, true], "is_last_step": [false, true]}
    ──►
    {"observations": ["1\n", ""], "dones": [false, true], "valids": [true, true],
     "tools": ["python", "finish"], "errors": [null, null], "processing_time_ms": 41.7}

An observation is a string, or ``{"obs", "reward"?, "image"?, "audio"?, "metrics"?, …}`` if it holds
more than text.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.errors import WorkerDiedError
from jax_agent_rl.tool_server.plugins import FINISH, ToolReply
from jax_agent_rl.tool_server.service import CLOSED, OPENED
from jax_agent_rl.tool_server.worker import WorkerProcess, assign_worker, raise_descriptor_limit
from jax_agent_rl.tools.client import ServerAction
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.http_server import HttpServer, Refused, read_body
from jax_agent_rl.utils.process import on_forced_exit
from jax_agent_rl.utils.prometheus import CONTENT_TYPE

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


MAX_QUERY = 65_536
"""Characters of a query."""
TrajectoryId = Annotated[
    str,
    Field(min_length=1, max_length=256),
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
]


class ObservationRequest(BaseModel):
    """Body of a request; each list has one entry per trajectory id."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trajectory_ids: list[TrajectoryId] = Field(min_length=1)
    actions: list[str]
    extra_fields: list[dict[str, Any]] | None = None
    finish: list[bool] | None = None
    is_last_step: list[bool] | None = None

    @model_validator(mode="after")
    def _equal_lengths(self) -> ObservationRequest:
        expected = len(self.trajectory_ids)
        for name in ("actions", "extra_fields", "finish", "is_last_step"):
            values = getattr(self, name)
            if values is not None and len(values) != expected:
                raise ValueError(
                    f"{name} has {len(values)} entries, trajectory_ids has {expected}; they must"
                    " match"
                )
        return self

    def steps(self) -> list[ServerAction]:
        """Return one action per trajectory id, in order."""
        count = len(self.trajectory_ids)
        columns = zip(
            self.trajectory_ids,
            self.actions,
            self.extra_fields or [{}] * count,
            self.finish or [False] * count,
            self.is_last_step or [False] * count,
            strict=True,
        )
        return [
            ServerAction(
                trajectory_id=id, text=text, extra_fields=extra, finish=finish, is_last_step=last
            )
            for id, text, extra, finish, last in columns
        ]


class RetrieveRequest(BaseModel):
    """Body of ``POST /retrieve``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queries: list[Annotated[str, Field(max_length=MAX_QUERY)]] = Field(
        min_length=1, max_length=1024
    )
    topk: int | None = Field(default=None, ge=1, le=1000)
    return_scores: bool = False


class ToolServer:
    """A tool server; use ``async with``, or :meth:`start` and :meth:`close`.

    Raises:
        ConfigError: the address is reachable from other machines, without a token.
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
            refuse=lambda request, status, text: _refuse(status, text),
            host=settings.host,
            port=settings.port,
            token=settings.token,
            token_key="token_env",
            max_body_bytes=settings.max_request_mb << 20,
            body_key=f"max_request_mb={settings.max_request_mb}",
            around=[self._count],
        )
        self._folder = make_temp_folder("tool-server-")  # mode 0700: its sockets require no token
        self._metrics_folder = self._folder / "metrics"
        self._metrics_folder.mkdir()
        self._workers = [
            WorkerProcess(settings, n, self._folder, self._worker_died)
            for n in range(settings.workers)
        ]
        self._metrics = CollectorRegistry()
        self._requests = Counter(
            "toolserver_requests", "Requests.", ["path", "status"], registry=self._metrics
        )
        self._restarts = Counter(
            "toolserver_worker_restarts", "Workers that died.", registry=self._metrics
        )
        self._lost = Counter(
            "toolserver_environments_lost",
            "Environments lost with their worker.",
            ["tool"],
            registry=self._metrics,
        )
        self._deaths = itertools.count()

    @property
    def url(self) -> str:
        """URL of the server; for a wildcard address, as seen from this machine."""
        return self._http.url

    @property
    def port(self) -> int:
        """The listening port."""
        return self._http.port

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
            # The first one alone: what it builds for all (a search index), the others only load.
            await self._workers[0].start()
            await asyncio.gather(*(worker.start() for worker in self._workers[1:]))
            await self._http.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End running requests, close every environment and stop the workers."""
        await self._http.close()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        remove_temp_folder(self._folder)

    def kill(self) -> None:
        """Kill the workers, so that :meth:`close` has nothing to wait for."""
        for worker in self._workers:
            worker.kill()

    async def __aenter__(self) -> ToolServer:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    # --- routes -----------------------------------------------------------------------------------

    async def _get_observation(self, request: web.Request) -> web.Response:
        began = time.perf_counter()
        body = await read_body(request, ObservationRequest, is_batch=True)
        if len(body.actions) > self._settings.max_batch:
            raise Refused(
                422,
                f"{len(body.actions)} actions are more than max_batch={self._settings.max_batch}",
            )
        steps = body.steps()
        batches: dict[int, list[int]] = defaultdict(list)
        for index, step in enumerate(steps):
            batches[assign_worker(step.trajectory_id, len(self._workers))].append(index)
        answers = await asyncio.gather(
            *(
                self._workers[worker].steps([steps[i] for i in batch])
                for worker, batch in batches.items()
            )
        )
        replies: dict[int, ToolReply] = {}
        for batch, answer in zip(batches.values(), answers, strict=True):
            replies.update(zip(batch, answer, strict=True))
        in_order = [replies[index] for index in range(len(steps))]
        body = {
            "observations": [reply.observation for reply in in_order],
            "dones": [reply.done for reply in in_order],
            "valids": [reply.valid for reply in in_order],
            "tools": [reply.tool for reply in in_order],
            "errors": [reply.error for reply in in_order],
            "processing_time_ms": round(1000 * (time.perf_counter() - began), 3),
        }
        return web.json_response(body)

    async def _retrieve(self, request: web.Request) -> web.Response:
        if "search" not in self._settings.tools:
            return _refuse(404, "tools does not name 'search'")
        body = await read_body(request, RetrieveRequest, is_batch=True)
        worker = self._workers[assign_worker(body.queries[0], len(self._workers))]
        try:
            found = await worker.retrieve(body.queries, body.topk or self._settings.search.topk)
        except WorkerDiedError as error:
            return _refuse(503, str(error))
        if not body.return_scores:
            found = [[hit["document"] for hit in hits] for hits in found]
        return web.json_response({"result": found})

    async def _health(self, request: web.Request) -> web.Response:
        answers = await asyncio.gather(
            *(worker.count_environments() for worker in self._workers), return_exceptions=True
        )
        counts = [count for count in answers if isinstance(count, int)]
        healthy = len(counts) == len(self._workers)
        body = {
            "status": "healthy" if healthy else "degraded",
            "tools": [*(name for name in self._settings.tools if name != FINISH), FINISH],
            "workers": len(self._workers),
            "workers_running": len(counts),
            "open_environments": sum(counts),
        }
        return web.json_response(body, status=200 if healthy else 503)

    # --- metrics ----------------------------------------------------------------------------------

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        workers = CollectorRegistry()
        MultiProcessCollector(workers, path=str(self._metrics_folder))
        text = generate_latest(self._metrics) + generate_latest(workers)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path if request.match_info.route.resource is not None else "unknown"
        status = 499  # the client disconnected
        try:
            response = await handler(request)
            status = response.status
            return response
        except Exception:
            status = 500
            raise
        finally:
            self._requests.labels(path, status).inc()

    def _worker_died(self, pid: int) -> None:
        """Count a worker's end and the environments that it opened and did not close."""
        self._restarts.inc()
        file = self._metrics_folder / f"counter_{pid}.db"
        if file.exists():
            lost: dict[str, float] = defaultdict(float)
            for metric in MultiProcessCollector.merge([str(file)]):
                sign = {OPENED: 1, CLOSED: -1}.get(metric.name, 0)
                for sample in metric.samples if sign else ():
                    lost[sample.labels["tool"]] += sign * sample.value
            for tool, count in lost.items():
                self._lost.labels(tool).inc(count)
            file.rename(
                file.with_stem(f"{file.stem}-{next(self._deaths)}")
            )  # another process may get the same pid
        mark_process_dead(pid, path=str(self._metrics_folder))


def _refuse(status: int, text: str) -> web.Response:
    return web.json_response({"detail": text}, status=status)


async def run(settings: ToolServerSettings, print_line: Callable[[str], None]) -> None:
    """Serve until cancelled; ``print_line`` prints the address."""
    raise_descriptor_limit()
    server = ToolServer(settings)
    with on_forced_exit(server.kill):
        async with server:
            print_line(
                f"tool server on {server.url}: {', '.join(settings.tools)} ({settings.workers}"
                " workers)"
            )
            if settings.sandbox == "unsafe_local":
                print_line(
                    "sandbox=unsafe_local: model-written programs run with your rights, unprotected"
                )
            await asyncio.Event().wait()
