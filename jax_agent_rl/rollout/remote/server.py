"""Serves a started backend over HTTP.

::

    connection ──► token? protocol? instance? ──► handler ──► backend
                        401   426        409         │
                                                     ├─ every 5 s an empty line while there is no answer
                                                     └─ connection lost: the handler is cancelled, its slot is free

``GET /v1/handshake, /v1/health, /v1/metrics``, ``GET /metrics`` (Prometheus text); ``POST /v1/generate`` and one path
per method of the protocol; ``PUT /v1/uploads/{upload}/{file}``. A custom header on every request (but ``/metrics``)
keeps web pages in a local browser out.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from jax_agent_rl.errors import BackendError, ConfigError, JaxAgentRLError, WeightUpdateError
from jax_agent_rl.observe.prometheus import CONTENT_TYPE, RequestCounts, engine_families, text_of
from jax_agent_rl.rollout.protocol import RolloutBackend, WeightUpdate
from jax_agent_rl.rollout.remote import pictures, wire
from jax_agent_rl.rollout.remote.uploads import Uploads
from jax_agent_rl.serving import is_loopback, names_this_machine
from jax_agent_rl.types import PauseMode

logger = logging.getLogger(__name__)
Body = dict[str, Any]
_METRICS = "/metrics"
_KEEP_ALIVE_SECONDS = 600.0  # longer than the client's, so that it is never the server who closes an idle connection


class RolloutServer:
    """One backend behind one address.

    Args:
        backend: started; the server does not close it.
        host: address to listen on. Anything but loopback needs a token.
        port: 0 takes a free one.
        token: that clients must send; None for none.
        max_request_bytes: of a JSON body.
        max_upload_bytes: of one set of weights.
        upload_folder: see :class:`Uploads`.
        heartbeat_seconds: see :data:`wire.HEARTBEAT_SECONDS`.

    Raises:
        ConfigError: an address that others can reach, without a token.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        max_request_bytes: int = 64 << 20,
        max_upload_bytes: int = 1 << 40,
        upload_folder: Path | None = None,
        heartbeat_seconds: float = wire.HEARTBEAT_SECONDS,
    ) -> None:
        if not token and not is_loopback(host):
            raise ConfigError(
                f"a rollout server on {host} can be reached from other machines and needs a token: put a secret into "
                "an environment variable and name it in rollout.token_env (or listen on 127.0.0.1)"
            )
        self._backend = backend
        self._host, self._port = host, port
        self._token = token.encode() if token else None
        self._instance = secrets.token_hex(8)
        self._heartbeat = heartbeat_seconds
        self._requests = RequestCounts()
        self._uploads = Uploads(max_bytes=max_upload_bytes, folder=upload_folder)
        self._app = web.Application(client_max_size=max_request_bytes, middlewares=[self._count, self._guard])
        self._add_routes()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Where it listens; for a wildcard address, as this machine sees it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Listens.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        self._runner = web.AppRunner(
            self._app,
            handler_cancellation=True,
            keepalive_timeout=_KEEP_ALIVE_SECONDS,
            shutdown_timeout=1.0,
            access_log=None,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self.close()
            raise ConfigError(f"cannot listen on {self._host}:{self._port}: {error}") from error
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Ends running requests and stops listening; the backend goes on."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._uploads.close()

    def _add_routes(self) -> None:
        router, backend = self._app.router, self._backend
        router.add_get(_METRICS, self._serve_metrics)
        router.add_get("/v1/handshake", self._handshake)
        router.add_get("/v1/health", self._plain(backend.health))
        router.add_get("/v1/metrics", self._plain(backend.metrics))
        router.add_post("/v1/generate", self._generate)
        router.add_put("/v1/uploads/{upload}/{name}", self._receive)
        calls: dict[str, Callable[[Body], Awaitable[Any]]] = {
            "abort": lambda body: backend.abort(str(body["request_id"])),
            "pause": lambda body: backend.pause(PauseMode(body["mode"])),
            "resume": lambda body: backend.resume(),
            "update_weights": self._update_weights,
            "sees_files": self._sees_files,
            "reset_prefix_cache": lambda body: backend.reset_prefix_cache(),
            "sleep": lambda body: backend.sleep(),
            "wake": lambda body: backend.wake(),
        }
        for name, call in calls.items():
            router.add_post(f"/v1/{name}", self._call(call))

    # --- who may ask ------------------------------------------------------------------------------------------

    @web.middleware
    async def _count(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        resource = request.match_info.route.resource
        with self._requests.request(resource.canonical if resource else "unknown") as status:
            response = await handler(request)
            status.append(response.status)
            return response

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        if self._token is not None:
            given = request.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                return _refuse(401, BackendError("the rollout server does not accept the token"))
        if request.path == _METRICS:  # Prometheus sends no headers of ours
            if self._token is None and not names_this_machine(request.host, listening_on=self._host):
                return _refuse(403, BackendError(f"without a token only localhost is answered, not {request.host!r}"))
            return await handler(request)
        spoken = request.headers.get(wire.PROTOCOL_HEADER)
        if spoken != str(wire.PROTOCOL_VERSION):
            text = (
                f"the rollout server speaks protocol {wire.PROTOCOL_VERSION}, the client {spoken}; install one version"
            )
            return _refuse(426, BackendError(text))
        if request.headers.get(wire.INSTANCE_HEADER, self._instance) != self._instance:
            return _refuse(409, BackendError("the rollout server was restarted"))
        try:
            return await handler(request)
        except web.HTTPException as error:  # no such path, too large a body, …
            return _refuse(error.status, BackendError(f"{request.method} {request.path}: {error.reason}"))

    # --- answers ----------------------------------------------------------------------------------------------

    async def _handshake(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "protocol": wire.PROTOCOL_VERSION,
                "instance": self._instance,
                "capabilities": wire.encode_capabilities(self._backend.capabilities),
                "policy_version": self._backend.policy_version,
            }
        )

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        backend = self._backend
        engine = engine_families(await backend.metrics(), await backend.health(), backend.capabilities, engine="0")
        body = text_of([*engine, *self._requests.families()])
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    def _plain(self, read: Callable[[], Awaitable[Any]]) -> Callable:
        async def handler(request: web.Request) -> web.Response:
            try:
                return web.json_response(asdict(await read()))
            except JaxAgentRLError as error:
                return _refuse(503, error)

        return handler

    def _call(self, call: Callable[[Body], Awaitable[Any]]) -> Callable:
        """A handler that answers with one line, after as many empty ones as it takes."""

        async def handler(request: web.Request) -> web.StreamResponse:
            body = await _body(request)

            async def lines() -> AsyncGenerator[Body, None]:
                yield {"result": await call(body), "policy_version": self._backend.policy_version}

            return await self._send(request, lines())

        return handler

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        chunked = body.pop("chunks", False)

        async def lines() -> AsyncGenerator[Body, None]:
            if body.get("multi_modal"):  # pictures take time to unpack
                wanted = await asyncio.to_thread(pictures.decode_request, body)
            else:
                wanted = wire.decode_request(body)
            if not chunked:
                yield {"final": wire.encode_output(await self._backend.generate(wanted))}
                return
            async with contextlib.aclosing(self._backend.stream(wanted)) as stream:  # type: ignore[type-var]
                async for chunk in stream:
                    yield wire.encode_chunk(chunk)

        return await self._send(request, lines())

    async def _send(self, request: web.Request, lines: AsyncGenerator[Body, None]) -> web.StreamResponse:
        """Writes lines as they come, heartbeats in between, and an error as the last line."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        upcoming: asyncio.Future | None = None
        try:
            while True:
                upcoming = asyncio.ensure_future(anext(lines))
                while not (await asyncio.wait({upcoming}, timeout=self._heartbeat))[0]:
                    await response.write(b"\n")
                await response.write(wire.line(upcoming.result()))
        except StopAsyncIteration:
            pass
        except (asyncio.CancelledError, ConnectionError):  # the client is gone, nobody reads on
            raise
        except Exception as error:
            if not isinstance(error, (JaxAgentRLError, NotImplementedError, ValueError, KeyError)):
                logger.exception("%s failed", request.path)
            await response.write(wire.line({"error": wire.encode_error(error)}))
        finally:
            if upcoming is not None and not upcoming.done():
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
            await lines.aclose()
        await response.write_eof()
        return response

    # --- weights ----------------------------------------------------------------------------------------------

    async def _receive(self, request: web.Request) -> web.Response:
        where = request.match_info
        digest = request.headers.get(wire.DIGEST_HEADER, "")
        try:
            size = await self._uploads.receive(where["upload"], where["name"], digest, request.content.iter_any())
        except WeightUpdateError as error:
            return _refuse(422, error)
        except OSError as error:
            return _refuse(507, WeightUpdateError(f"{where['name']} cannot be stored: {error}"))
        return web.json_response({"size": size})

    async def _update_weights(self, body: Body) -> None:
        upload = body.get("upload")
        try:
            payload: str | list[str] | None = None
            if "folder" in body:
                payload = str(body["folder"])
            elif body["kind"] != "mesh":
                payload = self._uploads.files(upload) if upload else [str(path) for path in body["paths"]]
            await self._backend.update_weights(
                WeightUpdate(
                    version=int(body["version"]),
                    kind=str(body["kind"]),
                    payload=payload,
                    partial=bool(body.get("partial", False)),
                    digests={str(name): str(found) for name, found in body.get("digests", {}).items()},
                )
            )
        finally:
            if upload:
                self._uploads.drop(upload)

    async def _sees_files(self, body: Body) -> bool:
        """Whether files of these paths and sizes are on this machine, too."""

        def look() -> bool:
            return all(Path(f["path"]).is_file() and Path(f["path"]).stat().st_size == f["size"] for f in body["files"])

        return await asyncio.to_thread(look)


async def _body(request: web.Request) -> Body:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(reason="the body is not a JSON object")
    return body


def _refuse(status: int, error: Exception) -> web.Response:
    return web.json_response({"error": wire.encode_error(error)}, status=status)
