"""The ToolClient: paced, parallel, in order; and its settings, also from the environment."""

import asyncio

import pytest
from starlette.responses import JSONResponse, Response

from jax_agent_rl.config import ToolClientConfig, build
from jax_agent_rl.errors import ConfigError, ToolServerError
from jax_agent_rl.tools.client import Action
from jax_agent_rl.tools.tool_client import Pace, ToolClient, bare_result
from tests.http_service import ToolServer
from tests.ports import free_port

MINIMAL = {"run_dir": "runs/x", "model": {"path": "m"}, "data": {"train": "t.jsonl"}}
QUICK = {"request_interval": 0, "retry_delay": 0}


async def test_results_of_a_batch_stand_where_their_calls_do():
    """The server answers in the opposite order of arrival."""
    async with ToolServer() as server:
        arrived, everybody = [], asyncio.Event()

        async def backwards(payload):
            arrived.append(payload["actions"][0])
            if len(arrived) == 4:
                everybody.set()
            await everybody.wait()
            return JSONResponse({"observations": [payload["actions"][0]], "dones": [False], "valids": [True]})

        server.respond = backwards
        client = ToolClient(ToolClientConfig(server_url=server.url, max_workers=4, **QUICK))
        results = await client.execute_batch({"a": "1", "b": "2", "c": "3", "d": "4"})
        await client.close()
    assert [r.text for r in results] == [f"<python>{i}</python>" for i in "1234"]
    assert sorted(p["trajectory_ids"][0] for p in server.requests) == ["a", "b", "c", "d"]


async def test_one_failed_call_of_a_batch_leaves_the_others_their_results():
    async with ToolServer(lambda action: 42 if "bad" in action else "fine") as server:
        client = ToolClient(ToolClientConfig(server_url=server.url, **QUICK))
        good, bad = await client.execute_batch(["good", "bad"])
        await client.close()
    assert good.text == "fine" and isinstance(bad, ToolServerError)


async def test_max_workers_bounds_the_requests_at_the_same_time():
    running, most = 0, 0
    async with ToolServer() as server:

        async def count(payload):
            nonlocal running, most
            running += 1
            most = max(most, running)
            for _ in range(20):
                await asyncio.sleep(0)
            running -= 1
            return JSONResponse({"observations": [""], "dones": [False], "valids": [True]})

        server.respond = count
        client = ToolClient(ToolClientConfig(server_url=server.url, max_workers=2, **QUICK))
        await client.execute_batch([str(i) for i in range(9)])
        await client.close()
    assert most <= 2 and len(server.requests) == 9


async def test_request_interval_keeps_starts_apart():
    now, starts = 0.0, []

    async def sleep(seconds):
        nonlocal now
        now += seconds

    pace = Pace(max_workers=10, interval=0.5, clock=lambda: now, sleep=sleep)
    for _ in range(3):
        async with pace:
            starts.append(now)
    now = 10.0
    async with pace:
        starts.append(now)
    assert starts == [0.0, 0.5, 1.0, 10.0]


async def test_a_cancelled_wait_gives_its_place_back():
    async def for_ever(seconds):
        await asyncio.Event().wait()

    pace = Pace(max_workers=1, interval=5.0, clock=lambda: 0.0, sleep=for_ever)
    async with pace:
        pass

    async def wait():
        async with pace:
            raise AssertionError("it is not its turn")

    task = asyncio.create_task(wait())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(pace._workers.acquire(), timeout=5)


async def test_max_retries_repeats_what_failed():
    async with ToolServer() as server:
        failures = [Response(status_code=500), Response(status_code=503)]

        async def fail_twice(payload):
            return failures.pop() if failures else JSONResponse({"observations": ["ok"], "dones": [0], "valids": [1]})

        server.respond = fail_twice
        client = ToolClient(ToolClientConfig(server_url=server.url, max_retries=2, **QUICK))
        assert (await client.execute(Action(trajectory_id="t"))).text == "ok"
        failures += [Response(status_code=500)] * 3
        with pytest.raises(ToolServerError, match="HTTP 500"):
            await client.execute(Action(trajectory_id="t"))
        await client.close()


async def test_an_unreachable_server_is_named_with_the_key_to_change():
    client = ToolClient(ToolClientConfig(server_url=f"http://127.0.0.1:{free_port()}", max_retries=0))
    with pytest.raises(ToolServerError, match=r"http://127.* cannot be reached.*tool_config\.server_url"):
        await client.execute(Action(trajectory_id="t"))


def test_a_client_without_a_url_says_where_to_set_it():
    with pytest.raises(ConfigError, match=r"tool_config\.server_url \(or TOOL_SERVER_URL\)"):
        ToolClient(ToolClientConfig())


@pytest.mark.parametrize(
    ("text", "bare"),
    [("\n<result>\n a\n b\n</result>\n", " a\n b"), ("plain\n", "plain\n"), ("<result>x", "<result>x"), ("", "")],
)
def test_the_servers_tags_are_taken_off(text, bare):
    assert bare_result(text) == bare


def test_the_defaults_are_the_documented_ones():
    c = ToolClientConfig()
    assert (c.enabled, c.max_tool_turns, c.max_retries, c.retry_delay, c.timeout) == (False, 3, 3, 1.0, 30.0)
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
    with pytest.raises(ConfigError, match="tool_config.max_tool_turns='many'"):
        build(MINIMAL)
