"""The one HTTP server: who is let in at every route of every service, and what a connection or a
body may cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import httpx
import pytest
from aiohttp import web

from jax_agent_rl.agents import OpenAIAgentLoop
from jax_agent_rl.agents.endpoint.app import Endpoint
from jax_agent_rl.agents.endpoint.sessions import Session, SessionStore
from jax_agent_rl.agents.recorder import ChatRecorder
from jax_agent_rl.config import EndpointConfig
from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.observe.sinks.metrics import TrainerMetrics, trainer_server
from jax_agent_rl.rollout.http import wire
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.tool_server.server import ToolServer
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.bounded_json import MAX_NESTING
from jax_agent_rl.utils.http_server import HttpServer, read_json
from tests.agent_testbed import AgentHarness
from tests.messages import raises
from tests.toy_backend import ToyBackend

JSON = {"Content-Type": "application/json"}
TYPES = {"POST": JSON, "PUT": {"Content-Type": "application/octet-stream"}}
PROTOCOL = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL_VERSION)}
TOKEN = {"Authorization": "Bearer s3cret"}


@contextlib.asynccontextmanager
async def rollout(token: str | None) -> AsyncIterator[HttpServer]:
    server = RolloutServer(ToyBackend(), token=token)
    yield server.http
    await server.close()


@contextlib.asynccontextmanager
async def endpoint(token: str | None) -> AsyncIterator[HttpServer]:
    def opened(*_):
        raise AssertionError("a session was opened")

    store = SessionStore(max_sessions=4, ttl=60, create=opened)
    yield Endpoint(
        store, model="policy", limits=EndpointConfig(), api_key=token, stateless=opened
    ).server


@contextlib.asynccontextmanager
async def tools(token: str | None) -> AsyncIterator[HttpServer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TOOL_TOKEN", token or "")
        settings = build_tree(
            ToolServerSettings,
            {},
            ["port=0", "tools=[python]", *(["token_env=TOOL_TOKEN"] if token else [])],
        )
        server = ToolServer(settings)
        yield server.http
        await server.close()


@contextlib.asynccontextmanager
async def metrics(token: str | None) -> AsyncIterator[HttpServer]:
    yield trainer_server(TrainerMetrics(), 0)


SERVICES = [rollout, endpoint, tools, metrics]


def routes(server: HttpServer) -> list[tuple[str, str]]:
    """Every route it has, and paths that it does not have."""
    paths = []
    for route in server.app.router.routes():
        assert route.resource is not None
        path = route.resource.canonical.replace("{session_id}", "s").replace("{upload}", "0" * 16)
        path = path.replace("{name}", "w.safetensors").replace("{model}", "m")
        paths.append((route.method, path))
    assert not any("{" in path for _, path in paths)
    return [*paths, ("GET", "/nothing"), ("POST", "/"), ("DELETE", "/metrics")]


@contextlib.asynccontextmanager
async def client_of(server: HttpServer):
    await server.start()
    try:
        async with aiohttp.ClientSession(server.url) as session:
            yield session
    finally:
        await server.close()


STRANGERS = {
    "another name (DNS rebinding)": {"Host": "evil.example:80"},
    "no name": {"Host": ""},
    "another origin (CSRF)": {"Origin": "https://evil.example"},
    "an origin without a name": {"Origin": "null"},
    "another port's page": {"Origin": "http://127.0.0.1:3"},
    "another site's link": {"Sec-Fetch-Site": "cross-site"},
    "another port's link": {"Sec-Fetch-Site": "same-site"},
}


@pytest.mark.parametrize("service", SERVICES)
async def test_a_page_in_a_local_browser_reaches_no_route(service: Callable):
    async with service(None) as server:
        async with client_of(server) as client:
            for method, path in routes(server):
                for who, headers in STRANGERS.items():
                    sent = {**TYPES.get(method, {}), **PROTOCOL, **headers}
                    async with client.request(method, path, headers=sent) as answer:
                        assert answer.status == 403, (method, path, who)
                        assert answer.headers["Connection"] == "close"
                if method in TYPES:
                    for kind in (
                        "text/plain",
                        "application/x-www-form-urlencoded",
                        "multipart/form-data",
                    ):
                        sent = {**PROTOCOL, "Content-Type": kind}
                        async with client.request(method, path, data=b"{}", headers=sent) as answer:
                            assert answer.status == 415, (method, path, kind)


@pytest.mark.parametrize("service", [rollout, endpoint, tools])
async def test_with_a_token_no_route_is_for_strangers(service: Callable):
    async with service("s3cret") as server:
        async with client_of(server) as client:
            for method, path in routes(server):
                if path in server.open_paths:
                    continue
                for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "s3cret"}):
                    sent = {**TYPES.get(method, {}), **PROTOCOL, **headers}
                    async with client.request(method, path, headers=sent) as answer:
                        assert answer.status == 401, (method, path, headers)
            sent = {
                **TOKEN,
                "Host": "rollout-0.example:80",
            }  # a name in a network, which a page does not have with it
            async with client.get("/nothing", headers=sent) as answer:
                assert answer.status == 404


@pytest.mark.parametrize("service", [rollout, endpoint, tools])
async def test_a_token_in_the_address_opens_no_route_but_googles(service: Callable):
    async with service("s3cret") as server, client_of(server) as client:
        for method, path in routes(server):
            if path in server.open_paths or path.startswith("/v1beta/") or ":" in path:
                continue
            sent = {**TYPES.get(method, {}), **PROTOCOL}
            address = f"{path}?key=s3cret"
            async with client.request(method, address, headers=sent) as answer:
                assert answer.status == 401, (method, path)


async def test_a_key_header_that_is_empty_hides_no_bearer_token():
    async with rollout("s3cret") as server, client_of(server) as client:
        for header in ("X-Api-Key", "X-Goog-Api-Key"):
            sent = {**PROTOCOL, **TOKEN, header: ""}
            async with client.get("/nothing", headers=sent) as answer:
                assert answer.status == 404


async def test_a_health_probe_of_the_endpoint_needs_no_key_and_learns_nothing():
    async with endpoint("s3cret") as server:
        async with client_of(server) as client, client.get("/health") as answer:
            assert (answer.status, await answer.json()) == (200, {"ok": True})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:80", "127.9.9.9"])
async def test_this_machine_has_many_names(host: str):
    async with metrics(None) as server:
        same = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        async with client_of(server) as client, client.get("/metrics", headers=same) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("service", [rollout, endpoint, tools])
@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 500, 950, 100_000])
async def test_json_nested_too_deep_is_a_bad_request_at_every_route(service: Callable, depth: int):
    bodies = [b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth]
    async with service(None) as server:
        async with client_of(server) as client:
            for method, path in routes(server):
                if method != "POST" or path in ("/", "/retrieve"):
                    continue
                for body in bodies:
                    async with client.post(path, data=body, headers=JSON | PROTOCOL) as answer:
                        text = await answer.text()
                        assert (answer.status, "nested more than" in text) == (400, True), (
                            path,
                            text,
                        )


# --- connections and bodies -----------------------------------------------------------------------


async def echo(request: web.Request) -> web.Response:
    return web.json_response(await read_json(request, seconds=0.2))


@contextlib.asynccontextmanager
async def echoing(*routes: web.RouteDef, **options):
    server = HttpServer(
        [web.post("/", echo), *routes],
        refuse=lambda request, status, message: web.Response(status=status, text=message),
        token_key="token_env",
        max_body_bytes=1000,
        body_key="max_body=1000",
        **options,
    )
    async with client_of(server) as client:
        yield server, client


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"], ids=["nothing", "half a head"]
)
async def test_a_connection_that_never_asks_is_closed(sent: bytes):
    async with echoing(head_seconds=0.05) as (server, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        async with client.post("/", json=[1]) as answer:
            assert await answer.json() == [1]


async def test_a_head_in_pieces_is_heard_and_its_connection_stays():
    async with echoing(head_seconds=5.0) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        request = (
            b"POST / HTTP/1.1\r\n"
            b"Host: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: 1\r\n"
            b"\r\n"
            b"7"
        )
        for _ in range(2):
            for byte in request:
                writer.write(bytes([byte]))
                await writer.drain()
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(1) == b"7"
        writer.close()


async def test_a_client_that_leaves_while_it_is_written_to_is_no_error(
    caplog: pytest.LogCaptureFixture,
):
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        assert request.transport is not None
        request.transport.abort()
        await response.write(b"nobody reads this")
        raise AssertionError("the client was still there")

    async with echoing(web.get("/", answer)) as (_, client):
        with pytest.raises(aiohttp.ClientError):
            async with client.get("/") as response:
                await response.read()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00 no HTTP\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["no HTTP", "a large head", "two lengths"],
)
async def test_what_is_not_http_is_refused_and_fills_no_log(
    caplog: pytest.LogCaptureFixture, sent: bytes
):
    async with echoing() as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        async with asyncio.timeout(20):
            assert (await reader.readline()).startswith(b"HTTP/1.0 400")
        writer.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_connections_over_the_limit_are_closed_and_their_places_come_back():
    async with echoing(max_connections=2, head_seconds=60.0) as (server, client):
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        reader, third = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        for _, writer in [*held, (reader, third)]:
            writer.close()
        async with asyncio.timeout(20):
            while True:
                try:
                    async with client.post("/", json=[1]) as answer:
                        assert answer.status == 200
                        break
                except aiohttp.ClientError:  # its places are not free yet
                    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"x" * 2000, 413, "larger than max_body=1000"),
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON in UTF-8"),
        (rb'"\ud800"', 400, "half of a surrogate pair"),
        (rb'{"\udfff": 1}', 400, "half of a surrogate pair"),
        (rb'"\ud83d\ude00 \\ud800"', 200, ""),
        (b"[" * MAX_NESTING + b"]" * MAX_NESTING, 200, ""),
    ],
)
async def test_a_body_is_json_that_can_be_worked_with(body: bytes, status: int, message: str):
    async with echoing() as (_, client), client.post("/", data=body, headers=JSON) as answer:
        assert answer.status == status
        assert message in await answer.text()


async def test_a_body_that_does_not_come_is_given_up():
    async with echoing() as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(
            b"POST / HTTP/1.1\r\n"
            b"Host: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: 9\r\n"
            b"\r\n"
            b"7"
        )
        async with asyncio.timeout(20):
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()


def test_an_address_others_can_reach_needs_a_token():
    with raises(ConfigError, key="host", value="'0.0.0.0'", fix="--token-env"):
        Endpoint(
            SessionStore(max_sessions=1, ttl=1), model="m", limits=EndpointConfig(), host="0.0.0.0"
        )


async def test_keys_of_sessions_give_access_in_place_of_a_token():
    """Under whatever name the server is reached: pages do not know the keys."""
    harness = AgentHarness(OpenAIAgentLoop, [])
    recorder = ChatRecorder(harness.context, session_id="t")
    store = SessionStore(max_sessions=2, ttl=60)
    for name in ("a", "b"):
        sampling = SamplingParams(max_tokens=1)
        store.add(
            Session(session_id=name, recorder=recorder, sampling=sampling, api_key=f"key-{name}")
        )
    server = Endpoint(
        store, model="m", limits=EndpointConfig(), host="0.0.0.0", session_keys=True
    ).server
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.2:{server.port}") as client:

            async def status(path: str, **headers: str) -> int:
                headers["Host"] = "trainer.example"
                return (await client.get(path, headers=headers)).status_code

            key = {"Authorization": "Bearer key-a"}
            assert await status("/v1/models", **key) == 200
            assert await status("/v1/models", Authorization="Bearer key-c") == 401
            assert await status("/v1/models") == 401
            assert await status("/sessions/b", **key) == 401
            assert await status("/health") == 200
            store.end("a")
            assert await status("/v1/models", **key) == 401
    finally:
        await server.close()


def test_no_module_listens_by_other_means():
    """A server that is added has to come through here, or be named with its reason."""
    exceptions = {
        "gpu_backend/broadcast.py": (
            "torch.distributed's store, in the cluster's own network, for one transfer"
        ),
        "jax_agent_rl/agents/command/runner.py": "runs inside the sandbox, on its own loopback",
        "jax_agent_rl/models/offered.py": (
            "JAX's transfer servers, in the cluster's own network: whoever holds the run's token"
            " gets the number of a single pull"
        ),
        "jax_agent_rl/testing/redteam/on_sandboxes.py": "answers nobody; no sandbox may reach it",
        "jax_agent_rl/tool_server/worker.py": "a Unix socket in a private folder of the server's",
    }
    root = Path(__file__).parents[3]
    words = (
        "start_server(",
        "create_server(",
        "TCPSite(",
        "SockSite(",
        "UnixSite(",
        "uvicorn",
        "HTTPServer(",
        "run_app(",
    )
    listening = set()
    for folder in ("jax_agent_rl", "gpu_backend"):
        for file in (root / folder).rglob("*.py"):
            text = file.read_text()
            if any(word in text for word in words):
                listening.add(str(file.relative_to(root)))
    assert listening - {
        "jax_agent_rl/utils/http_server.py",
        "jax_agent_rl/utils/network.py",
    } == set(exceptions)
