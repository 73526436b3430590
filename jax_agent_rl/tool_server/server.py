r"""The server process: checks requests and distributes them over the workers.

::

    HttpServer's guard ──► size, JSON, schema ──► worker of the ──► answer in the
                            413    400    422      trajectory       request's order

Routes: ``POST /get_observation`` (below), ``POST /retrieve {queries, topk?, return_scores?}``
(Search-R1's, with the search tool), ``GET /health`` and ``GET /metrics`` (Prometheus text).

A request to ``/get_observation`` and its answer::

    {"trajectory_ids": ["t-1", "t-2"], "actions": ["<python>print(1)</python>", ""],
     "extra_fields": [{"turns_left": 2}, {}], "finish": [false, true],
     "is_last_step": [false, true]}
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
from jax_agent_rl.tool_server.plugins.base import ToolReply
from jax_agent_rl.tool_server.plugins.registry import FINISH
from jax_agent_rl.tool_server.service import CLOSED, OPENED
from jax_agent_rl.tool_server.worker import WorkerProcess, assign_worker, raise_descriptor_limit
from jax_agent_rl.tools.client import ServerAction
from jax_agent_rl.utils.files import make_temp_folder, remove_temp_folder
from jax_agent_rl.utils.http_server import HttpServer, Refused, read_body
from jax_agent_rl.utils.prometheus import CONTENT_TYPE
from jax_agent_rl.utils.shutdown import on_forced_exit
from jax_agent_rl.utils.text import counted

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_QUERY = 65_536
"""Limit of a query, in characters."""


def _integer_to_text(value: Any) -> Any:
    """Convert an integer trajectory id to text: clients may simply number their trajectories."""
    if type(value) is int:  # a bool is not an id
        return str(value)
    return value


TrajectoryId = Annotated[
    str,
    Field(min_length=1, max_length=256),
    BeforeValidator(_integer_to_text),
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
        steps = []
        for index, trajectory_id in enumerate(self.trajectory_ids):
            step = ServerAction(
                trajectory_id=trajectory_id,
                text=self.actions[index],
                extra_fields=self.extra_fields[index] if self.extra_fields else {},
                finish=self.finish[index] if self.finish else False,
                is_last_step=self.is_last_step[index] if self.is_last_step else False,
            )
            steps.append(step)
        return steps


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
        self.http = HttpServer(
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
            middlewares=[self._count],
        )
        self._folder = make_temp_folder("tool-server-")  # mode 0700: its sockets require no token
        self._metrics_folder = self._folder / "metrics"
        self._metrics_folder.mkdir()
        self._workers = []
        for number in range(settings.workers):
            worker = WorkerProcess(settings, number, self._folder, self._worker_died)
            self._workers.append(worker)

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
        return self.http.url

    @property
    def port(self) -> int:
        """The listening port."""
        return self.http.port

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
            # The first worker starts alone: it builds what the others only load, a search index.
            await self._workers[0].start()
            await asyncio.gather(*(worker.start() for worker in self._workers[1:]))
            await self.http.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End running requests, close every environment and stop the workers."""
        await self.http.close()
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
        start_time = time.perf_counter()
        body = await read_body(request, ObservationRequest, is_batch=True)
        if len(body.actions) > self._settings.max_batch:
            raise Refused(
                422,
                f"{len(body.actions)} actions are more than max_batch={self._settings.max_batch}",
            )
        replies = await self._execute(body.steps())
        answer = {
            "observations": [reply.observation for reply in replies],
            "dones": [reply.done for reply in replies],
            "valids": [reply.valid for reply in replies],
            "tools": [reply.tool for reply in replies],
            "errors": [reply.error for reply in replies],
            "processing_time_ms": round(1000 * (time.perf_counter() - start_time), 3),
        }
        return web.json_response(answer)

    async def _execute(self, steps: list[ServerAction]) -> list[ToolReply]:
        """Send each action to its trajectory's worker; return the replies in the actions' order."""
        indices_by_worker: dict[int, list[int]] = defaultdict(list)
        for index, step in enumerate(steps):
            number = assign_worker(step.trajectory_id, len(self._workers))
            indices_by_worker[number].append(index)

        requests = []
        for number, indices in indices_by_worker.items():
            batch = [steps[index] for index in indices]
            requests.append(self._workers[number].steps(batch))
        answers = await asyncio.gather(*requests)

        replies: dict[int, ToolReply] = {}
        for indices, answer in zip(indices_by_worker.values(), answers, strict=True):
            replies.update(zip(indices, answer, strict=True))
        return [replies[index] for index in range(len(steps))]

    async def _retrieve(self, request: web.Request) -> web.Response:
        if "search" not in self._settings.tools:
            return _refuse(404, "tools does not name 'search'")
        body = await read_body(request, RetrieveRequest, is_batch=True)
        worker = self._workers[assign_worker(body.queries[0], len(self._workers))]
        topk = body.topk or self._settings.search.topk
        try:
            hits_by_query = await worker.retrieve(body.queries, topk)
        except WorkerDiedError as error:
            return _refuse(503, str(error))

        if body.return_scores:
            return web.json_response({"result": hits_by_query})
        documents = []
        for hits in hits_by_query:
            documents.append([hit["document"] for hit in hits])
        return web.json_response({"result": documents})

    async def _health(self, request: web.Request) -> web.Response:
        answers = await asyncio.gather(
            *(worker.count_environments() for worker in self._workers), return_exceptions=True
        )
        counts = [count for count in answers if isinstance(count, int)]
        healthy = len(counts) == len(self._workers)
        tool_names = [name for name in self._settings.tools if name != FINISH]
        body = {
            "status": "healthy" if healthy else "degraded",
            "tools": [*tool_names, FINISH],
            "workers": len(self._workers),
            "workers_running": len(counts),
            "open_environments": sum(counts),
        }
        return web.json_response(body, status=200 if healthy else 503)

    # --- metrics ----------------------------------------------------------------------------------

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        worker_metrics = CollectorRegistry()
        MultiProcessCollector(worker_metrics, path=str(self._metrics_folder))
        text = generate_latest(self._metrics) + generate_latest(worker_metrics)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = "unknown"  # arbitrary paths would each become a label
        if request.match_info.route.resource is not None:
            path = request.path
        status = 499  # what remains if the client disconnects
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
                for sample in metric.samples:
                    if metric.name == OPENED:
                        lost[sample.labels["tool"]] += sample.value
                    elif metric.name == CLOSED:
                        lost[sample.labels["tool"]] -= sample.value
            for tool, count in lost.items():
                self._lost.labels(tool).inc(count)

            # Another process may get the same pid, and would continue this file's counts.
            file.rename(file.with_stem(f"{file.stem}-{next(self._deaths)}"))
        mark_process_dead(pid, path=str(self._metrics_folder))


def _refuse(status: int, text: str) -> web.Response:
    return web.json_response({"detail": text}, status=status)


async def run(settings: ToolServerSettings, print_line: Callable[[str], None]) -> None:
    """Serve until cancelled; ``print_line`` prints the address."""
    raise_descriptor_limit()
    server = ToolServer(settings)
    with on_forced_exit(server.kill):
        async with server:
            tools = ", ".join(settings.tools)
            workers = counted(settings.workers, "worker")
            print_line(f"tool server on {server.url}: {tools} ({workers})")
            if settings.sandbox == "unsafe_local":
                print_line(
                    "sandbox=unsafe_local: model-written programs run with your rights, unprotected"
                )
            await asyncio.Event().wait()
