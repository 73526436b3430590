"""Engines that join and leave a running run, on command of ``jax-agent-rl engines``.

::

    jax-agent-rl engines ──► RUN/engines.json ──► MembershipServer ──► ServerPool: join, leave
                             address, token       in the run's process, on loopback:
                             (mode 0600)          GET /v1/engines
                                                  POST /v1/engines/add, /v1/engines/remove

An engine that joins receives the served weights before its first request; the requests of one that
leaves move on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Annotated, Any

import aiohttp
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from jax_agent_rl.errors import BackendError, ConfigError, JaxAgentRLError, WeightUpdateError
from jax_agent_rl.rollout.pool import BackendFactory, ServerPool
from jax_agent_rl.utils.bounded_json import decode_json, read_json_object
from jax_agent_rl.utils.files import replacing
from jax_agent_rl.utils.http_server import HttpServer, Refused, read_body
from jax_agent_rl.utils.network import IDENTITY, UnreadableAnswerError, read_answer

logger = logging.getLogger(__name__)

ADDRESS_FILE = "engines.json"
"""File of the run folder with the address and the token, while the run lasts."""

COMMAND_SECONDS = 3600.0
"""Limit of a command: an engine that joins loads and compiles."""
MAX_ANSWER_BYTES = 1 << 20
_ATTEMPTS = 3
"""Joins of one engine: files of weights may be replaced while it reads them."""

OpenEngine = Callable[[str | None], AbstractAsyncContextManager[tuple[str, BackendFactory]]]
"""Makes an engine's name and factory from its URL (None: an engine that the run places). Its
devices are reserved within the context.

Raises ConfigError where the run cannot use such an engine.
"""


class MembershipServer:
    """Lets engines join and leave a pool over HTTP, from :meth:`start` to :meth:`close`.

    Args:
        pool: the started servers of the run.
        folder: the run folder, which gets :data:`ADDRESS_FILE`.
        reservations: gets what engines that joined hold; its owner closes it after the pool.
    """

    def __init__(
        self,
        pool: ServerPool,
        folder: Path,
        *,
        open_engine: OpenEngine,
        reservations: AsyncExitStack,
    ) -> None:
        self._pool = pool
        self._file = folder / ADDRESS_FILE
        self._open_engine = open_engine
        self._run_reservations = reservations
        # What each engine that joined holds, by its name.
        self._engine_reservations: dict[str, AsyncExitStack] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._token = secrets.token_hex(32)
        self.http = HttpServer(
            [
                web.get("/v1/engines", self._list),
                web.post("/v1/engines/add", self._add),
                web.post("/v1/engines/remove", self._remove),
            ],
            refuse=lambda request, status, message: web.json_response(
                {"error": message}, status=status
            ),
            token=self._token,
            token_key=ADDRESS_FILE,
            max_body_bytes=1 << 16,
            body_key="64 KiB",
        )

    async def start(self) -> None:
        """Serve, and write the address for :func:`command_run`."""
        await self.http.start()
        content = {"url": self.http.url, "token": self._token, "host": socket.gethostname()}
        # The file of a run that was killed may be there.
        with replacing(self._file, permissions=0o600) as stream:
            stream.write(json.dumps(content).encode())

    async def close(self) -> None:
        """Stop serving.

        Joins that are under way are undone; leaving engines leave without finishing their requests.
        """
        self._file.unlink(missing_ok=True)
        await self.http.close()
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)

    async def _list(self, request: web.Request) -> web.Response:
        engines = []
        for server in self._pool.servers:
            engines.append(
                {
                    "name": server.name,
                    "policy_version": server.backend.policy_version,
                    "requests": len(server.running),
                }
            )
        return web.json_response({"policy_version": self._pool.policy_version, "engines": engines})

    async def _add(self, request: web.Request) -> web.Response:
        body = await read_body(request, AddRequest)
        # What is reserved for the engine is given back, whatever keeps it from joining.
        reservation = AsyncExitStack()
        try:
            name, make = await reservation.enter_async_context(self._open_engine(body.url))
            await self._join(name, make)
        except (JaxAgentRLError, ValueError, TimeoutError) as error:
            await reservation.aclose()
            raise Refused(409, str(error) or "the engine did not start in time") from error
        except BaseException:
            await reservation.aclose()
            raise

        self._engine_reservations[name] = reservation
        self._run_reservations.push_async_callback(reservation.aclose)
        logger.warning(
            "server %s joined, with weights of version %s", name, self._pool.policy_version
        )
        return await self._list(request)

    async def _join(self, name: str, make: BackendFactory) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._pool.join(name, make)
            except WeightUpdateError:
                if attempt == _ATTEMPTS:
                    raise

    async def _remove(self, request: web.Request) -> web.Response:
        body = await read_body(request, RemoveRequest)
        name = body.name
        leaving = {name, *self._leaving}
        staying = [server.name for server in self._pool.servers if server.name not in leaving]
        if not staying:
            raise Refused(409, f"without {name!r} no engine would be left; add another one first")
        if name in self._leaving:
            raise Refused(409, f"{name!r} is leaving already")

        # A client that disconnects must not leave the engine half removed.
        task = asyncio.create_task(self._leave(name, body.drain), name=f"{name} leaves")
        self._leaving[name] = task
        try:
            await asyncio.shield(task)
        except KeyError:
            raise Refused(
                404, f"there is no engine {name!r}; there are {', '.join(staying)}"
            ) from None
        return await self._list(request)

    async def _leave(self, name: str, drain: bool) -> None:
        try:
            await self._pool.leave(name, drain=drain)
            logger.warning("server %s left", name)
            reservation = self._engine_reservations.pop(name, None)
            if reservation is not None:
                await reservation.aclose()
        finally:
            del self._leaving[name]


class AddRequest(BaseModel):
    """Which engine joins: one at an address, or None for one that the run places."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: Annotated[str, Field(max_length=2048)] | None


class RemoveRequest(BaseModel):
    """Which engine leaves, and whether it finishes its requests."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(max_length=2048)]
    drain: bool


class _Engine(BaseModel):
    name: str
    policy_version: int
    requests: int


class _Engines(BaseModel):
    """Answer to every command."""

    policy_version: int
    engines: list[_Engine]


async def command_run(
    folder: Path, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send a command to a running run and return its answer.

    Args:
        folder: the run's folder.
        path: ``engines``, ``engines/add`` or ``engines/remove``.
        body: the body to post; None sends a GET.

    Raises:
        ConfigError: no run listens there.
        BackendError: the run refuses, or ended meanwhile.
    """
    file = folder / ADDRESS_FILE
    try:
        address = read_json_object(file)
        url = str(address["url"])
        token = str(address["token"])
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no run trains in {folder}: {file.name} is missing there") from None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error!r}): it is of another run, or damaged; start the run"
            " again"
        ) from None

    method = "GET"
    options: dict[str, Any] = {"allow_redirects": False}
    if body is not None:
        method = "POST"
        options["json"] = body
    headers = {"Authorization": f"Bearer {token}", **IDENTITY}
    timeout = aiohttp.ClientTimeout(total=COMMAND_SECONDS, sock_connect=10.0)
    try:
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, auto_decompress=False
        ) as session:
            async with session.request(method, f"{url}/v1/{path}", **options) as response:
                content = await read_answer(
                    response.headers, response.content.iter_any(), MAX_ANSWER_BYTES
                )
        answer = decode_json(content)
        if response.status != 200:
            raise BackendError(str(answer["error"]))
        return _Engines.model_validate(answer).model_dump()
    except TimeoutError:
        raise BackendError(
            f"the run in {folder} did not answer within {COMMAND_SECONDS:g} seconds"
        ) from None
    except (UnreadableAnswerError, ValueError, KeyError, TypeError) as error:
        raise BackendError(f"what answers for the run in {folder} is not a run: {error}") from None
    except aiohttp.ClientConnectorError as error:
        raise ConfigError(
            f"the run in {folder} does not answer ({error}): it was killed, or it runs on another"
            f" machine than {socket.gethostname()}: run this on {address['host']}"
        ) from error
    except aiohttp.ClientError as error:
        raise BackendError(f"the run in {folder} ended before it answered: {error}") from error
