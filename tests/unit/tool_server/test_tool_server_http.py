"""The whole server: real processes, real HTTP."""

import asyncio
import json

import pytest
import pytest_asyncio

from jax_agent_rl.config.commands import ToolServerSettings
from jax_agent_rl.config.loading import build_tree
from jax_agent_rl.errors import ConfigError
from jax_agent_rl.tool_server.server import ToolServer
from jax_agent_rl.tool_server.worker import assign_worker
from jax_agent_rl.utils.network import is_loopback
from tests.messages import raises
from tests.tool_serving import serving

JSON = {"Content-Type": "application/json"}

shares_a_server = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_server():
    """A server for tests that leave it as it was; starting one takes seconds."""
    async with serving("max_batch=8", "max_request_mb=1") as client:
        yield client


async def test_a_batch_is_answered_in_its_order_across_workers():
    async with serving("workers=3") as client:
        ids = [f"trajectory-{n}" for n in range(24)]
        assert {assign_worker(name, 3) for name in ids} == {0, 1, 2}
        body = await client.step(*(f"echo {name}" for name in ids), ids=ids)
        assert body["observations"] == ids
        assert body["dones"] == [False] * 24
        assert body["valids"] == [True] * 24
        assert body["tools"] == ["echo"] * 24
        assert body["errors"] == [None] * 24
        assert body["processing_time_ms"] > 0


async def test_a_trajectory_stays_where_its_state_is():
    async with serving("workers=3") as client:
        ids = [f"trajectory-{n}" for n in range(12)]
        for turn in range(1, 4):
            body = await client.step(*["count"] * 12, ids=ids)
            assert body["observations"] == [str(turn)] * 12
        status, health = await client.send("/health", "GET")
        assert status == 200
        assert health == {
            "status": "healthy",
            "tools": ["echo", "counter", "faulty", "finish"],
            "workers": 3,
            "workers_running": 3,
            "open_environments": 12,
        }
        body = await client.step(*[""] * 12, ids=ids, finish=[True] * 12)
        assert body["dones"] == [True] * 12
        assert body["tools"] == ["finish"] * 12
        assert (await client.send("/health", "GET"))[1]["open_environments"] == 0


async def test_integer_ids_and_missing_optional_fields_are_fine():
    async with serving() as client:
        status, body = await client.send(json={"trajectory_ids": [7], "actions": ["echo hi"]})
        assert (status, body["observations"]) == (200, ["hi"])


def nested(levels):
    """``{"a": [[…]]}``, a container for each level."""
    value = []
    for _ in range(levels - 2):
        value = [value]
    return {"a": value}


@shares_a_server
async def test_no_depth_is_a_failure_of_the_server(one_server):
    for levels in range(500, 1001, 50):
        fields = json.dumps(nested(400)).replace("[]", "[" * (levels - 399) + "]" * (levels - 399))
        data = f'{{"trajectory_ids": ["a"], "actions": ["x"], "extra_fields": [{fields}]}}'
        status, answer = await one_server.send(data=data, headers=JSON)
        assert status == 400
        assert "more than 100 levels deep" in answer["detail"]


@shares_a_server
async def test_fields_as_deep_as_allowed_reach_the_tool(one_server):
    body = await one_server.step("echo hi", extra_fields=[nested(98)])
    assert body["observations"] == ["hi"]


@shares_a_server
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"trajectory_ids": ["a", "b"], "actions": ["x"]},
            "actions has 1 entries, trajectory_ids has 2",
        ),
        (
            {"trajectory_ids": ["a"], "actions": ["x"], "finish": []},
            "finish has 0 entries, trajectory_ids has 1",
        ),
        (
            {"trajectory_ids": ["a"], "actions": ["x"], "extra_fields": [{}, {}]},
            "extra_fields has 2 entries",
        ),
        (
            {"trajectory_ids": ["a"], "actions": ["x"], "is_last_step": [True] * 3},
            "is_last_step has 3 entries",
        ),
        ({"trajectory_ids": [], "actions": []}, "trajectory_ids"),
        ({"trajectory_ids": ["a"], "actions": [None]}, "actions.0"),
        ({"trajectory_ids": ["a"], "actions": ["x"], "extra_fields": ["no"]}, "extra_fields.0"),
        ({"trajectory_ids": [""], "actions": ["x"]}, "trajectory_ids.0"),
        ({"trajectory_ids": ["a"]}, "actions: required, not set"),
        ({"trajectory_ids": ["a"], "actions": ["x"], "extra": 1}, "extra: unknown key"),
        (["no"], "must be a mapping"),
        (
            {"trajectory_ids": ["a"] * 9, "actions": ["x"] * 9},
            "9 actions are more than max_batch=8",
        ),
    ],
)
async def test_a_wrong_schema_is_422_and_says_what_is_wrong(one_server, body, message):
    status, answer = await one_server.send(json=body)
    assert status == 422 and message in answer["detail"]


@shares_a_server
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b'{"trajectory_ids": ["\xff"], "actions": ["\xfe"]}', 400),
        (b"not json", 400),
        (b"", 400),
        (b"[" * 200_000, 400),
        (b'{"a": ' + b"9" * 10_000 + b"}", 400),
        (b"x" * (3 << 20), 413),
    ],
    ids=["invalid utf-8", "no json", "nothing", "deep nesting", "a huge number", "too large"],
)
async def test_a_body_that_cannot_be_read_is_refused_and_counted(one_server, data, status):
    name = f'toolserver_requests_total{{path="/get_observation",status="{status}"}}'
    count = (await one_server.metrics()).get(name, 0)
    assert (await one_server.send(data=data, headers=JSON))[0] == status
    assert (await one_server.metrics())[name] == count + 1
    assert (await one_server.step("echo still here"))["observations"] == ["still here"]


@shares_a_server
async def test_escapes_of_no_character_are_replaced_or_refused(
    one_server,
):
    data = b'{"trajectory_ids": ["a"], "actions": ["echo \\ud800!"]}'
    status, body = await one_server.send(data=data, headers=JSON)
    assert (status, body["observations"]) == (200, ["?!"])
    status, body = await one_server.send(data=data.replace(b'"a"', b'"\\ud800"'), headers=JSON)
    assert status == 422 and "trajectory_ids.0" in body["detail"]


@shares_a_server
async def test_what_is_not_json_by_its_type_or_path_is_refused(one_server):
    assert (await one_server.send(data=b"{}", headers={"Content-Type": "text/plain"}))[0] == 415
    assert (await one_server.send("/nothing", "GET"))[0] == 404
    assert (await one_server.send("/get_observation", "GET"))[0] == 405
    assert (await one_server.send("/retrieve", json={"queries": ["x"]}))[0] == 404


@shares_a_server
async def test_another_host_name_is_refused_without_a_token(one_server):
    status, body = await one_server.send(
        "/health", "GET", headers={"Host": "attacker.example:5000"}
    )
    assert status == 403 and "attacker.example" in body["detail"]


@shares_a_server
@pytest.mark.parametrize("host", [b"[::", b"a b", b"", b"\xff"])
async def test_an_invalid_host_header_is_refused(one_server, host):
    reader, writer = await asyncio.open_connection("127.0.0.1", one_server.server.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.split()[1] in (b"400", b"403")
    assert (await one_server.send("/health", "GET"))[0] == 200


async def test_with_a_token_nobody_gets_in_without_it(monkeypatch):
    monkeypatch.setenv("TOOL_TOKEN", "s3cret")
    async with serving("token_env=TOOL_TOKEN") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path, method in (
                ("/get_observation", "POST"),
                ("/health", "GET"),
                ("/metrics", "GET"),
            ):
                status, body = await client.send(path, method, headers=headers)
                assert status == 401
                assert "s3cret" not in json.dumps(body)
        assert (await client.send("/health", "GET", headers={"Authorization": "Bearer s3cret"}))[
            0
        ] == 200


def test_an_address_others_can_reach_needs_a_token(monkeypatch):
    with raises(ConfigError, key="host", value="'0.0.0.0'", fix="token"):
        ToolServer(build_tree(ToolServerSettings, {}, ["host=0.0.0.0"]))
    with raises(ConfigError, key="token_env", value="NOT_SET"):
        ToolServer(build_tree(ToolServerSettings, {}, ["host=0.0.0.0", "token_env=NOT_SET"]))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_which_addresses_only_this_machine_reaches(host, expected):
    assert is_loopback(host) is expected


async def test_a_port_in_use_is_an_error_that_names_it():
    async with serving() as client:
        with raises(ConfigError, value=f"127.0.0.1:{client.server.port}"):
            async with serving(f"port={client.server.port}"):
                raise AssertionError("never reached")


async def test_a_client_that_hangs_up_aborts_its_action():
    async with serving() as client:
        await client.step("count", ids=["a"])
        slow = asyncio.create_task(client.step("count slowly", ids=["a"]))
        running = 'toolserver_steps_running{worker="0"}'
        while (await client.metrics())[running] != 1:
            await asyncio.sleep(0.02)
        slow.cancel()
        while (await client.metrics())[running] != 0:
            await asyncio.sleep(0.02)
        closed = 'toolserver_environments_closed_total{reason="abort",tool="counter",worker="0"}'
        assert (await client.metrics())[closed] == 1


async def test_a_setting_that_cannot_be_is_the_workers_message():
    with raises(ConfigError, value="'no_such'"):
        async with serving("tools=[no_such]"):
            raise AssertionError("never reached")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("portt=1", "portt: unknown key; did you mean port?"),
        ("tools=[search]", "tools has 'search', so search.corpus must be set"),
        ("tools=[]", "must name at least one tool"),
        ("step_seconds=1", "step_seconds=1 must be more than limits.wall_seconds=10"),
        ("sandbox=none", "bubblewrap | unsafe_local"),
    ],
)
def test_settings_say_what_is_wrong(override, message):
    with pytest.raises(ConfigError) as caught:
        build_tree(ToolServerSettings, {}, [override])
    assert message in str(caught.value)
