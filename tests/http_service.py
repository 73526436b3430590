"""A real HTTP server for tests, in the test's own event loop, and a tool server that answers as
told.

::

    async with serve(app) as url: ...
    async with ToolServer() as server: agent.tool_server_url = server.url
"""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Payload = dict[str, Any]


@asynccontextmanager
async def serve(app: Any) -> AsyncIterator[str]:
    """Serves an ASGI app on a free port; connections queue up from the start, so nobody has to wait
    for it.
    """
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(512)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        listening.close()


@asynccontextmanager
async def serve_apart(app: Any) -> AsyncIterator[str]:
    """Serves an ASGI app as :func:`serve` does, in an event loop of its own: for clients that block
    the loop in which they are used.
    """
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(512)
        server = uvicorn.Server(
            uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        )
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await asyncio.to_thread(thread.join)


class ToolServer:
    """An async context manager.

    Args:
        answer: what to say to one action: an observation, or (observation, done, valid); default
            repeats the action.

    Attributes:
        requests: every payload of actions, in order; those that close environments are not among
            them.
        closed: how often each trajectory's environment was closed.
        respond: replaces the whole answer when set: from the payload to a response.
        health: status of ``GET /health``.
    """

    def __init__(self, answer: Callable[[str], Any] = lambda action: f" ran {action!r}"):
        self.requests: list[Payload] = []
        self.closed: Counter[str] = Counter()
        self.respond: Callable[[Payload], Awaitable[Response]] | None = None
        self.health = 200
        self.headers: list[dict[str, str]] = []
        self._answer = answer
        routes = [
            Route("/get_observation", self._observe, methods=["POST"]),
            Route("/health", self._health),
        ]
        self._app = Starlette(routes=routes)

    async def __aenter__(self) -> ToolServer:
        self._serving = serve(self._app)
        self.url = await self._serving.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._serving.__aexit__(*error)

    @property
    def actions(self) -> list[str]:
        return [action for payload in self.requests for action in payload["actions"]]

    async def _observe(self, request: Request) -> Response:
        payload = await request.json()
        self.headers.append(dict(request.headers))
        if all(payload["finish"]):
            self.closed.update(payload["trajectory_ids"])
            count = len(payload["actions"])
            return JSONResponse(
                {"observations": [""] * count, "dones": [True] * count, "valids": [True] * count}
            )
        self.requests.append(payload)
        if self.respond:
            return await self.respond(payload)
        answers = [self._answer(action) for action in payload["actions"]]
        triples = [
            answer if isinstance(answer, tuple) else (answer, False, True) for answer in answers
        ]
        observations, dones, valids = (list(column) for column in zip(*triples, strict=True))
        return JSONResponse({"observations": observations, "dones": dones, "valids": valids})

    async def _health(self, request: Request) -> Response:
        return Response(status_code=self.health)


def data_url(size: tuple[int, int], colour: str = "red") -> str:
    """A ``data:`` URL of a PNG file of one colour."""
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, format="PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
