"""Serves a started backend over HTTP.

::

    HttpServer's guard ──► protocol? instance? ──► handler ──► backend
                             426       409            │
                                                      ├─ every 5 s an empty line while there is no
                                                      │  answer
                                                      └─ connection lost: the handler is cancelled,
                                                         its slot is free

``GET /v1/handshake, /v1/health, /v1/metrics``, ``GET /metrics`` (Prometheus text); ``POST
/v1/generate`` and one path per method of the protocol; ``PUT /v1/uploads/{upload}/{file}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from jax_agent_rl.errors import BackendError, JaxAgentRLError, PromptTooLongError, WeightUpdateError
from jax_agent_rl.rollout.engine_metrics import engine_families
from jax_agent_rl.rollout.http import requests, wire
from jax_agent_rl.rollout.http.weight_files import SharedDir, Uploads
from jax_agent_rl.rollout.http.wire import decode_request
from jax_agent_rl.rollout.protocol import (
    MESH,
    PULL,
    TAKING_WEIGHTS,
    Health,
    RolloutBackend,
    WeightUpdate,
)
from jax_agent_rl.types import PauseMode
from jax_agent_rl.utils.http_server import HttpServer, Refused, counted, read_body, read_json
from jax_agent_rl.utils.prometheus import CONTENT_TYPE, RequestCounts, exposition_text
from jax_agent_rl.utils.pull_tickets import PullTicket
from jax_agent_rl.utils.weight_transfer import LogprobProbe

logger = logging.getLogger(__name__)
Message = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_METRICS = "/metrics"


class RolloutServer:
    """One backend at one address.

    Args:
        backend: started; the server does not close it.
        host: address to listen on. Anything but loopback needs a token.
        port: 0 picks a free one.
        token: bearer token that clients must send; None: none is needed.
        weight_dir: ``rollout.weight_dir``: weights are only read below it, see :class:`SharedDir`.
        max_request_bytes: limit of a JSON body.
        upload_folder: where uploads go, see :class:`Uploads`.
        heartbeat_seconds: time between two empty lines of an answer that is not ready.

    Raises:
        ConfigError: other machines can reach the address, and there is no token.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        weight_dir: str | None = None,
        max_request_bytes: int = 64 << 20,
        upload_folder: Path | None = None,
        heartbeat_seconds: float = wire.HEARTBEAT_SECONDS,
    ) -> None:
        self._backend = backend
        self._instance = secrets.token_hex(8)
        self.heartbeat_seconds = heartbeat_seconds
        self._requests = RequestCounts()
        self._updating = 0
        self._weights = ""  # fingerprint of the last whole update
        self._shared = SharedDir(weight_dir)
        self.http = HttpServer(
            self._routes(),
            refuse=lambda request, status, message: _refuse(status, BackendError(message)),
            host=host,
            port=port,
            token=token,
            token_key="rollout.token_env",
            max_body_bytes=max_request_bytes,
            body_key=f"max_request_bytes={max_request_bytes}",
            middlewares=[counted(self._requests)],
        )
        self._uploads = Uploads(folder=upload_folder)
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Its URL; for a wildcard address, the one on this machine."""
        return self.http.url

    @property
    def app(self) -> web.Application:
        """The aiohttp application with its routes."""
        return self.http.app

    async def start(self) -> None:
        """Start to listen.

        Raises:
            ConfigError: the port is in use, or the address is not this machine's.
        """
        try:
            await self.http.start()
        except BaseException:
            await self.close()
            raise
        self._sweeping = asyncio.create_task(self._uploads.sweep(), name="expired-uploads")

    async def close(self) -> None:
        """End running requests and stop listening; the backend keeps running."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        await self.http.close()
        self._uploads.close()

    def _routes(self) -> list[web.RouteDef]:
        backend = self._backend
        calls: dict[str, tuple[type[BaseModel], Callable[[Any], Awaitable[Any]]]] = {
            "score": (requests.ScoreRequest, self._score),
            "abort": (requests.AbortRequest, lambda body: backend.abort(body.request_id)),
            "pause": (requests.PauseRequest, lambda body: backend.pause(PauseMode(body.mode))),
            "resume": (requests.NoArguments, lambda body: backend.resume()),
            "needed_files": (requests.NeededFilesRequest, self._needed_files),
            "reset_prefix_cache": (requests.NoArguments, lambda body: backend.reset_prefix_cache()),
            "sleep": (requests.NoArguments, lambda body: backend.sleep()),
            "wake": (requests.NoArguments, lambda body: backend.wake()),
        }
        handlers: list[tuple[str, str, Handler]] = [
            ("GET", "handshake", self._handshake),
            ("GET", "health", self._report(self._health)),
            ("GET", "metrics", self._report(backend.metrics)),
            ("POST", "generate", self._generate),
            ("POST", "update_weights", self._serve_update),
            ("PUT", "uploads/{upload}/{name}", self._receive),
        ]
        for name, (schema, call) in calls.items():
            handlers.append(("POST", name, self._call(schema, call)))

        # Prometheus sends none of the protocol's headers.
        routes = [web.get(_METRICS, self._serve_metrics)]
        for method, path, handler in handlers:
            routes.append(web.route(method, f"/v1/{path}", self._in_protocol(handler)))
        return routes

    def _in_protocol(self, handler: Handler) -> Handler:
        """Wrap a handler to refuse clients of another protocol version or server instance."""

        async def checked(request: web.Request) -> web.StreamResponse:
            version = request.headers.get(wire.PROTOCOL_HEADER)
            if version != str(wire.PROTOCOL_VERSION):
                raise Refused(
                    426,
                    f"the rollout server speaks protocol {wire.PROTOCOL_VERSION}, the client"
                    f" {version}; install one version",
                )
            if request.headers.get(wire.INSTANCE_HEADER, self._instance) != self._instance:
                raise Refused(409, "the rollout server was restarted")
            return await handler(request)

        return checked

    # --- answers ----------------------------------------------------------------------------------

    async def _handshake(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "protocol": wire.PROTOCOL_VERSION,
                "instance": self._instance,
                "capabilities": wire.encode_capabilities(
                    self._backend.capabilities, has_folder=self._shared.is_configured
                ),
                "policy_version": self._backend.policy_version,
                "weights": self._weights,
            }
        )

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        backend = self._backend
        engine = engine_families(
            await backend.metrics(), await self._health(), backend.capabilities, engine="0"
        )
        body = exposition_text([*engine, *self._requests.families()])
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def _health(self) -> Health:
        """Return the backend's health.

        While it takes weights, it may not answer, so assume that it is ok.
        """
        if self._updating:
            return Health(
                ok=True, detail=TAKING_WEIGHTS, policy_version=self._backend.policy_version
            )
        return await self._backend.health()

    def _report(self, read: Callable[[], Awaitable[Any]]) -> Handler:
        """Return a handler that answers with the fields of what ``read`` returns."""

        async def handler(request: web.Request) -> web.Response:
            try:
                return web.json_response(asdict(await read()))
            except JaxAgentRLError as error:
                return _refuse(503, error)

        return handler

    def _call(self, schema: type[BaseModel], call: Callable[[Any], Awaitable[Any]]) -> Handler:
        """Return a handler that answers with one line, after as many heartbeats as it takes."""

        async def handler(request: web.Request) -> web.StreamResponse:
            body = await read_body(request, schema)

            async def lines() -> AsyncGenerator[Message, None]:
                yield {"result": await call(body), "policy_version": self._backend.policy_version}

            return await self._send(request, lines())

        return handler

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Answer ``/v1/generate``: one line with the output, or a line for each chunk."""
        body = await read_json(request)
        if not isinstance(body, dict):
            raise Refused(422, "the body is not a JSON object")
        chunked = body.pop("chunks", False)
        if not isinstance(chunked, bool):
            raise Refused(422, "chunks: must be true or false")
        try:
            if body.get("multi_modal"):  # images take time to decode
                generation = await asyncio.to_thread(decode_request, body)
            else:
                generation = decode_request(body)
        except BackendError as error:
            raise Refused(422, str(error)) from None

        async def lines() -> AsyncGenerator[Message, None]:
            if not chunked:
                output = await self._backend.generate(generation)
                yield {"final": wire.encode_output(output)}
                return
            stream = self._backend.stream(generation)
            async with contextlib.aclosing(stream) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield wire.encode_chunk(chunk)

        return await self._send(request, lines())

    async def _score(self, body: requests.ScoreRequest) -> Message:
        max_model_len = self._backend.capabilities.max_model_len
        if len(body.token_ids) > max_model_len:
            raise PromptTooLongError(
                f"{len(body.token_ids)} ids are more than this engine's {max_model_len}"
            )
        scores = await self._backend.score(body.token_ids, start=body.start, top_k=body.top_k)
        return asdict(scores)

    async def _send(
        self, request: web.Request, lines: AsyncGenerator[Message, None]
    ) -> web.StreamResponse:
        """Write lines as they come, heartbeats in between, and an error as the last line."""
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        next_line: asyncio.Future | None = None
        try:
            while True:
                next_line = asyncio.ensure_future(anext(lines))
                while True:
                    await asyncio.wait({next_line}, timeout=self.heartbeat_seconds)
                    if next_line.done():
                        break
                    await response.write(b"\n")
                await response.write(wire.line(next_line.result()))
        except StopAsyncIteration:
            pass
        except (asyncio.CancelledError, ConnectionError):  # the client is gone
            raise
        except Exception as error:
            if not isinstance(error, (JaxAgentRLError, NotImplementedError, ValueError, KeyError)):
                logger.exception("%s failed", request.path)
            await response.write(wire.line({"error": wire.encode_error(error)}))
        finally:
            if next_line is not None and not next_line.done():
                next_line.cancel()
                await asyncio.gather(next_line, return_exceptions=True)
            await lines.aclose()
        await response.write_eof()
        return response

    # --- weights ----------------------------------------------------------------------------------

    async def _receive(self, request: web.Request) -> web.Response:
        """Store one file of an upload."""
        upload = request.match_info["upload"]
        name = request.match_info["name"]
        digest = request.headers.get(wire.DIGEST_HEADER, "")
        try:
            is_taken = await self._uploads.receive(upload, name, digest, request.content.iter_any())
        except WeightUpdateError as error:
            return _refuse(422, error)
        except TimeoutError as error:
            return _refuse(408, WeightUpdateError(f"{name}: {error}"))
        except OSError as error:
            return _refuse(507, WeightUpdateError(f"{name} cannot be stored: {error}"))
        if not is_taken:
            return _refuse(412, WeightUpdateError(f"{name} does not make the file; send all of it"))
        return web.json_response({})

    async def _needed_files(self, body: requests.NeededFilesRequest) -> str:
        """Return what a client has to upload before an update."""
        if body.files and await self._shared.sees({file.path: file.size for file in body.files}):
            return wire.NO_FILES
        if self._uploads.holds(body.bases):
            return wire.DELTAS
        return wire.WHOLE_FILES

    async def _serve_update(self, request: web.Request) -> web.StreamResponse:
        """Answer ``/v1/update_weights``."""
        update_weights = functools.partial(self._update_weights, connection=request.transport)
        return await self._call(requests.UpdateRequest, update_weights)(request)

    async def _update_weights(
        self, body: requests.UpdateRequest, *, connection: asyncio.Transport | None
    ) -> None:
        """Let the backend take weights from where the request says they are.

        Args:
            connection: of the request; weights are pulled from the machine at its other end, and
                from nowhere else.
        """
        self._updating += 1
        try:
            payload: Any = None
            if body.kind == PULL:
                payload = _pull_ticket(body, connection)
            elif body.folder is not None:
                payload = await self._shared.address(body.folder)
            elif body.upload:
                payload = self._uploads.files(body.upload)
            elif body.kind != MESH:
                payload = await self._shared.files(body.paths)
            probe = None
            if body.probe is not None:
                probe = LogprobProbe.from_json(body.probe.model_dump())

            update = WeightUpdate(
                version=body.version,
                kind=body.kind,
                payload=payload,
                partial=body.partial,
                digests=body.digests,
                probe=probe,
            )
            await self._backend.update_weights(update)

            self._weights = update.fingerprint
            if body.upload and body.keep:
                self._uploads.keep(body.upload, body.digests)
        finally:
            self._updating -= 1
            if body.upload:
                self._uploads.drop(body.upload)


def _pull_ticket(body: requests.UpdateRequest, connection: asyncio.Transport | None) -> PullTicket:
    """Return the ticket of a request, for a pull between both ends of its connection.

    Raises:
        WeightUpdateError: it has none.
        ConnectionResetError: the client is gone.
    """
    if body.ticket is None:
        raise WeightUpdateError(f"an update of kind={PULL!r} needs a ticket")
    if connection is None:
        raise ConnectionResetError("the client has closed its connection")
    addresses = []
    for end in ("peername", "sockname"):
        host = connection.get_extra_info(end)[0]
        # A server that listens on :: as well sees the others' addresses as such.
        addresses.append(host.removeprefix("::ffff:"))
    host, interface = addresses
    return wire.decode_ticket(body.ticket.model_dump(), host=host, interface=interface)


def _refuse(status: int, error: Exception) -> web.Response:
    return web.json_response({"error": wire.encode_error(error)}, status=status)
