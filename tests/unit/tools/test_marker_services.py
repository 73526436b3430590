"""The ToolClient's rate limit, retries and settings, which may come from the environment."""

import asyncio

import pytest
from starlette.responses import JSONResponse, Response

from jax_agent_rl.config import ToolClientConfig, build
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.tools.client import ServerAction
from jax_agent_rl.tools.marker_services import ToolClient, bare_result
from jax_agent_rl.tools.request_limiter import RequestLimiter
from tests.http_service import ToolServer
from tests.messages import raises
from tests.ports import free_port

MINIMAL = {"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
QUICK = {"request_interval": 0, "retry_delay": 0}


async def test_max_workers_bounds_the_requests_at_the_same_time():
    running = 0
    peak = 0
    async with ToolServer() as server:

        async def count(payload):
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            for _ in range(20):
                await asyncio.sleep(0)
            running -= 1
            return JSONResponse({"observations": [""], "dones": [False], "valids": [True]})

        server.respond = count
        client = ToolClient(ToolClientConfig(server_url=server.url, max_workers=2, **QUICK))
        await asyncio.gather(
            *(client.execute(ServerAction(trajectory_id=str(i))) for i in range(9))
        )
        await client.close()
    assert peak <= 2 and len(server.requests) == 9


async def test_request_interval_separates_starts():
    now = 0.0
    starts = []

    async def sleep(seconds):
        nonlocal now
        now += seconds

    pace = RequestLimiter(max_workers=10, interval=0.5, clock=lambda: now, sleep=sleep)
    for _ in range(3):
        async with pace.slot():
            starts.append(now)
    now = 10.0
    async with pace.slot():
        starts.append(now)
    assert starts == [0.0, 0.5, 1.0, 10.0]


@pytest.mark.parametrize(
    ("seconds", "interval", "warned"), [(0.01, 0.1, 1), (0.3, 0.1, 0), (0.01, 0.0, 0)]
)
async def test_an_interval_that_bounds_the_rollout_is_warned_about_once(
    caplog, seconds, interval, warned
):
    """Four trajectories call a tool that takes so long; the clock moves only while they wait."""
    now = 0.0

    async def sleep(pause):
        nonlocal now
        until = now + pause
        while now < until:
            await asyncio.sleep(0)
            now += 0.001

    pace = RequestLimiter(max_workers=10, interval=interval, clock=lambda: now, sleep=sleep)

    async def trajectory():
        for _ in range(20):
            async with pace.slot():
                await sleep(seconds)

    await asyncio.gather(*(trajectory() for _ in range(4)))
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == warned
    assert all("tool_config.request_interval=0.1 is the bottleneck" in text for text in warnings)
    assert all(
        "no more than 10 start in a second. Set tool_config.request_interval=0" in text
        for text in warnings
    )


async def test_a_cancelled_wait_gives_its_place_back():
    may_start = asyncio.Event()

    async def sleep(seconds):
        await may_start.wait()

    pace = RequestLimiter(max_workers=1, interval=5.0, clock=lambda: 0.0, sleep=sleep)
    async with pace.slot():
        pass

    async def wait():
        async with pace.slot():
            raise AssertionError("it is not its turn")

    task = asyncio.create_task(wait())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_start.set()
    async with asyncio.timeout(5), pace.slot():
        pass


async def test_max_retries_repeats_what_failed():
    async with ToolServer() as server:
        failures = [Response(status_code=500), Response(status_code=503)]

        async def fail_twice(payload):
            return (
                failures.pop()
                if failures
                else JSONResponse({"observations": ["ok"], "dones": [0], "valids": [1]})
            )

        server.respond = fail_twice
        client = ToolClient(ToolClientConfig(server_url=server.url, max_retries=2, **QUICK))
        assert (await client.execute(ServerAction(trajectory_id="t"))).text == "ok"
        failures += [Response(status_code=500)] * 3
        with pytest.raises(ToolServerError, match="HTTP 500"):
            await client.execute(ServerAction(trajectory_id="t"))
        await client.close()


async def test_max_retries_repeats_what_timed_out():
    never = asyncio.Event()
    hang = [True]

    async def hang_once(payload):
        if hang:
            hang.pop()
            await never.wait()
        return JSONResponse({"observations": ["ok"], "dones": [0], "valids": [1]})

    async with ToolServer() as server:
        server.respond = hang_once
        client = ToolClient(ToolClientConfig(server_url=server.url, timeout=0.5, **QUICK))
        assert (await client.execute(ServerAction(trajectory_id="t"))).text == "ok"
        assert not hang
        await client.close()
        never.set()


async def test_an_unreachable_server_is_named_with_the_key_to_change():
    client = ToolClient(
        ToolClientConfig(server_url=f"http://127.0.0.1:{free_port()}", max_retries=0)
    )
    with pytest.raises(
        ToolServerError, match=r"http://127.* cannot be reached.*tool_config\.server_url"
    ):
        await client.execute(ServerAction(trajectory_id="t"))


def test_a_client_without_a_url_says_where_to_set_it():
    with raises(ConfigError, key="tool_config.server_url", fix="TOOL_SERVER_URL"):
        ToolClient(ToolClientConfig())


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("\n<result>\n a\n b\n</result>\n", " a\n b"),
        ("plain\n", "plain\n"),
        ("<result>x", "<result>x"),
        ("", ""),
    ],
)
def test_the_servers_tags_are_taken_off(text, bare):
    assert bare_result(text) == bare


def test_the_defaults_are_the_documented_ones():
    c = ToolClientConfig()
    assert (c.enabled, c.max_tool_turns, c.max_retries, c.retry_delay, c.timeout) == (
        False,
        3,
        3,
        1.0,
        30.0,
    )
    assert (c.max_workers, c.request_interval) == (10, 0.1)


def test_the_environment_fills_in_what_the_configuration_leaves_out(monkeypatch):
    monkeypatch.setenv("ENABLE_TOOLS", "true")
    monkeypatch.setenv("TOOL_SERVER_URL", "http://env:1")
    monkeypatch.setenv("MAX_TOOL_TURNS", "7")
    c = build(MINIMAL).tool_config
    assert (c.enabled, c.server_url, c.max_tool_turns) == (True, "http://env:1", 7)
    c = build(MINIMAL, ["tool_config.enabled=false", "tool_config.max_tool_turns=1"]).tool_config
    assert (c.enabled, c.server_url, c.max_tool_turns) == (False, "http://env:1", 1)
    monkeypatch.setenv("MAX_TOOL_TURNS", "many")
    with raises(ConfigError, key="tool_config.max_tool_turns", value="'many'"):
        build(MINIMAL)
