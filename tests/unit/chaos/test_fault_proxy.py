"""What the proxy does to requests, seen by a plain socket and by the project's own clients."""

import asyncio
import json
from contextlib import asynccontextmanager
from random import Random

import pytest
from aiohttp import web

from jax_agent_rl.errors import EngineDiedError, JaxAgentRLError, ToolServerError
from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.http.server import RolloutServer
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import SamplingParams
from jax_agent_rl.utils.network import JsonService
from tests.chaos.proxy import Fault, FaultProxy
from tests.messages import raises
from tests.toy_backend import ToyBackend

ANSWER = {"observations": ["x" * 500]}


class First(Random):
    """Lets a fault hit every request, before the server sees it or in the middle of the answer."""

    def __init__(self, before_server: bool):
        super().__init__(0)
        self.before_server = before_server

    def random(self):
        return 0.0 if self.before_server else 0.99


@asynccontextmanager
async def service(fault=None, *, before_server=True):
    """An HTTP server behind a proxy: the proxy, and the bodies that reached the server."""
    seen = []

    async def answer(request):
        seen.append(await request.json())
        return web.json_response(ANSWER)

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    proxy = FaultProxy(runner.addresses[0][1], rng=First(before_server), piece_seconds=0.0)
    await proxy.start()
    proxy.fault = fault
    try:
        yield proxy, seen
    finally:
        await proxy.close()
        await runner.cleanup()


def client(proxy, **settings):
    return JsonService(
        **{"url": f"{proxy.url}/act", "url_key": "url", "timeout": 20.0, "timeout_key": "timeout"}
        | settings,
        error=ToolServerError,
        sleep=lambda seconds: asyncio.sleep(0),
    )


async def ask(proxy, **settings):
    service = client(proxy, **settings)
    try:
        return await service.post({"request_id": "a"}), service.retries
    finally:
        await service.close()


@pytest.mark.parametrize("fault", [None, Fault.SLOW])
async def test_without_a_fault_or_only_slowly_the_answer_is_the_servers(fault):
    async with service(fault) as (proxy, seen):
        proxy.chance = 2.0
        assert (await ask(proxy))[0] == ANSWER
        assert seen == [{"request_id": "a"}]
        assert proxy.requests == {"/act": 1}
        assert proxy.hits == ({fault: 1} if fault else {})


@pytest.mark.parametrize(
    ("fault", "before_server", "reached"),
    [
        (Fault.RESET, True, 0),
        (Fault.RESET, False, 1),
        (Fault.TRUNCATE, True, 1),
        (Fault.UNAVAILABLE, True, 0),
    ],
)
async def test_a_fault_is_an_error_and_reaches_the_server_only_where_it_says(
    fault, before_server, reached
):
    async with service(fault, before_server=before_server) as (proxy, seen):
        proxy.chance = 2.0
        with pytest.raises(ToolServerError):
            await ask(proxy)
        assert len(seen) == reached
        assert proxy.hits == {fault: 1}


@pytest.mark.parametrize("before_server", [True, False])
async def test_a_stalled_request_ends_when_the_client_leaves(before_server):
    async with service(Fault.STALL, before_server=before_server) as (proxy, seen):
        proxy.chance = 2.0
        with pytest.raises(TimeoutError):
            await ask(proxy, timeout=0.05)
        while [task for task in asyncio.all_tasks() if task.get_name().startswith("fault-proxy")]:
            await asyncio.sleep(0)


async def test_retries_of_an_unavailable_service_are_bounded():
    async with service(Fault.UNAVAILABLE) as (proxy, seen):
        proxy.chance = 2.0
        with raises(ToolServerError, value=(503, "4 times")):
            await ask(proxy, max_retries=3)
        assert proxy.requests == {"/act": 4}
        assert not seen
        proxy.fault = None
        assert await ask(proxy, max_retries=3) == (ANSWER, 0)


async def test_a_server_that_is_not_there_is_a_bad_gateway():
    proxy = FaultProxy(1, rng=Random(0))
    await proxy.start()
    with raises(ToolServerError, value=502):
        await ask(proxy)
    await proxy.close()


async def test_the_sendings_of_each_rollout_request_are_counted():
    async with service() as (proxy, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        body = json.dumps({"request_id": "async-0-0-1/2"}).encode()
        writer.write(
            b"POST /v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
            + body
        )
        await reader.read()
        writer.close()
        assert proxy.attempts == {"async-0-0-1/2": 1}


@pytest.mark.parametrize("fault", list(Fault))
async def test_in_any_network_a_rollout_server_is_well_or_gone_and_no_other_error(fault):
    """Gone means: the request goes on elsewhere. Any other error would cost the trajectory."""

    backend = ToyBackend(tick_seconds=0.0)
    server = RolloutServer(backend, heartbeat_seconds=0.1)
    await backend.start()
    await server.start()
    outcomes = set()
    for before_server in (True, False):
        proxy = FaultProxy(
            int(server.url.rpartition(":")[2]), rng=First(before_server), piece_seconds=0.0
        )
        await proxy.start()
        remote = RemoteBackend(proxy.url, silence_seconds=0.5)
        await remote.start()
        proxy.fault = fault
        proxy.chance = 2.0
        request = GenerateRequest(
            request_id="a", prompt_ids=(5, 6), sampling=SamplingParams(max_tokens=3, seed=1)
        )
        for call in (remote.generate(request), remote.abort("nobody"), remote.metrics()):
            try:
                await call
                outcomes.add("well")
            except EngineDiedError:
                outcomes.add("gone")
            except JaxAgentRLError as error:
                outcomes.add(repr(error))
        assert (await remote.health()).ok is (fault is Fault.SLOW)
        await remote.close()
        await proxy.close()
    await server.close()
    await backend.close()
    assert outcomes == {"well" if fault is Fault.SLOW else "gone"}
