"""The whole server: real processes, real HTTP, workers that die."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from jax_agent_rl.errors import ConfigError
from jax_agent_rl.serving import is_loopback
from jax_agent_rl.tools.sandbox.watch import tree
from jax_agent_rl.tools.server.front import ToolServer
from jax_agent_rl.tools.server.pool import worker_of
from jax_agent_rl.tools.server.settings import load_settings
from tests.capabilities import needs_bwrap

FAKES = str(Path(__file__).with_name("fake_tools.py"))
JSON = {"Content-Type": "application/json"}


class Client:
    """A client of a running server."""

    def __init__(self, server, session):
        self.server, self.session = server, session

    async def send(self, path="/get_observation", method="POST", **options):
        async with self.session.request(method, path, **options) as response:
            return response.status, await response.json()

    async def step(self, *actions, ids=None, **fields):
        ids = ids or [f"t{n}" for n in range(len(actions))]
        status, body = await self.send(json={"trajectory_ids": ids, "actions": list(actions), **fields})
        assert status == 200, body
        return body

    async def metrics(self):
        """Samples by their text, e.g. ``toolserver_steps_total{outcome="ok",tool="echo"}``."""
        async with self.session.get("/metrics") as response:
            assert response.content_type == "text/plain"
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


class serving:
    """``async with serving("workers=2") as client``: a server with the fake tools on a free port."""

    def __init__(self, *overrides, headers=None):
        defaults = ["tools=[echo,counter,faulty]", f"tool_path={FAKES}", "port=0", "limits.wall_seconds=1"]
        self._settings = load_settings(None, [*defaults, *overrides])
        self._headers = headers

    async def __aenter__(self):
        self._server = await ToolServer(self._settings).__aenter__()
        self._session = aiohttp.ClientSession(self._server.url, headers=self._headers)
        return Client(self._server, self._session)

    async def __aexit__(self, *exception):
        await self._session.close()
        await self._server.close()


async def test_a_batch_is_answered_in_its_order_across_workers():
    async with serving("workers=3") as client:
        ids = [f"trajectory-{n}" for n in range(24)]
        assert {worker_of(name, 3) for name in ids} == {0, 1, 2}
        body = await client.step(*(f"echo {name}" for name in ids), ids=ids)
        assert body["observations"] == ids
        assert body["dones"] == [False] * 24 and body["valids"] == [True] * 24 and body["tools"] == ["echo"] * 24
        assert body["errors"] == [None] * 24 and body["processing_time_ms"] > 0


async def test_a_trajectory_stays_where_its_state_is():
    async with serving("workers=3") as client:
        ids = [f"trajectory-{n}" for n in range(12)]
        for turn in range(1, 4):
            body = await client.step(*["count"] * 12, ids=ids)
            assert body["observations"] == [str(turn)] * 12
        status, health = await client.send("/health", "GET")
        assert status == 200 and health == {
            "status": "healthy",
            "tools": ["echo", "counter", "faulty", "finish"],
            "workers": 3,
            "workers_running": 3,
            "open_environments": 12,
        }
        body = await client.step(*[""] * 12, ids=ids, finish=[True] * 12)
        assert body["dones"] == [True] * 12 and body["tools"] == ["finish"] * 12
        assert (await client.send("/health", "GET"))[1]["open_environments"] == 0


async def test_integer_ids_and_missing_optional_fields_are_fine():
    async with serving() as client:
        status, body = await client.send(json={"trajectory_ids": [7], "actions": ["echo hi"]})
        assert (status, body["observations"]) == (200, ["hi"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"trajectory_ids": ["a", "b"], "actions": ["x"]}, "actions has 1 entries, trajectory_ids has 2"),
        ({"trajectory_ids": ["a"], "actions": ["x"], "finish": []}, "finish has 0 entries, trajectory_ids has 1"),
        ({"trajectory_ids": ["a"], "actions": ["x"], "extra_fields": [{}, {}]}, "extra_fields has 2 entries"),
        ({"trajectory_ids": ["a"], "actions": ["x"], "is_last_step": [True] * 3}, "is_last_step has 3 entries"),
        ({"trajectory_ids": [], "actions": []}, "trajectory_ids"),
        ({"trajectory_ids": ["a"], "actions": [None]}, "actions.0"),
        ({"trajectory_ids": ["a"], "actions": ["x"], "extra_fields": ["no"]}, "extra_fields.0"),
        ({"trajectory_ids": [""], "actions": ["x"]}, "trajectory_ids.0"),
        ({"trajectory_ids": ["a"]}, "actions: Field required"),
        ({"trajectory_ids": ["a"], "actions": ["x"], "extra": 1}, "extra: Extra inputs are not permitted"),
        (["no"], "valid dictionary"),
        ({"trajectory_ids": ["a"] * 9, "actions": ["x"] * 9}, "9 actions are more than max_batch=8"),
    ],
)
async def test_a_wrong_schema_is_422_and_says_what_is_wrong(one_server, body, message):
    status, answer = await one_server.send(json=body)
    assert status == 422 and message in answer["detail"]


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
    before = (await one_server.metrics()).get(name, 0)
    assert (await one_server.send(data=data, headers=JSON))[0] == status
    assert (await one_server.metrics())[name] == before + 1
    assert (await one_server.step("echo still here"))["observations"] == ["still here"]


async def test_escapes_that_spell_no_character_are_replaced_in_actions_and_refused_in_ids(one_server):
    data = b'{"trajectory_ids": ["a"], "actions": ["echo \\ud800!"]}'
    status, body = await one_server.send(data=data, headers=JSON)
    assert (status, body["observations"]) == (200, ["?!"])
    status, body = await one_server.send(data=data.replace(b'"a"', b'"\\ud800"'), headers=JSON)
    assert status == 422 and "trajectory_ids.0" in body["detail"]


async def test_what_is_not_json_by_its_type_or_path_is_refused(one_server):
    assert (await one_server.send(data=b"{}", headers={"Content-Type": "text/plain"}))[0] == 415
    assert (await one_server.send("/nothing", "GET"))[0] == 404
    assert (await one_server.send("/get_observation", "GET"))[0] == 405
    assert (await one_server.send("/retrieve", json={"queries": ["x"]}))[0] == 404


async def test_another_host_name_is_refused_without_a_token(one_server):
    status, body = await one_server.send("/health", "GET", headers={"Host": "attacker.example:5000"})
    assert status == 403 and "attacker.example" in body["detail"]


@pytest.mark.parametrize("host", [b"[::", b"a b", b"", b"\xff"])
async def test_a_host_header_that_is_none_does_no_harm(one_server, host):
    reader, writer = await asyncio.open_connection("127.0.0.1", one_server.server.port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.split()[1] in (b"400", b"403")
    assert (await one_server.send("/health", "GET"))[0] == 200


@pytest.fixture
async def one_server():
    async with serving("max_batch=8", "max_request_mb=1") as client:
        yield client


async def test_with_a_token_nobody_gets_in_without_it(monkeypatch):
    monkeypatch.setenv("TOOL_TOKEN", "s3cret")
    async with serving("token_env=TOOL_TOKEN") as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            for path, method in (("/get_observation", "POST"), ("/health", "GET"), ("/metrics", "GET")):
                status, body = await client.send(path, method, headers=headers)
                assert status == 401 and "s3cret" not in json.dumps(body)
        assert (await client.send("/health", "GET", headers={"Authorization": "Bearer s3cret"}))[0] == 200


def test_an_address_others_can_reach_needs_a_token(monkeypatch):
    with pytest.raises(ConfigError, match="host='0.0.0.0' can be reached from other machines and needs a token"):
        ToolServer(load_settings(None, ["host=0.0.0.0"]))
    with pytest.raises(ConfigError, match="token_env names NOT_SET, which is not set"):
        ToolServer(load_settings(None, ["host=0.0.0.0", "token_env=NOT_SET"]))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_which_addresses_only_this_machine_reaches(host, expected):
    assert is_loopback(host) is expected


async def test_a_port_in_use_is_an_error_that_names_it():
    async with serving() as client:
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{client.server.port}"):
            async with serving(f"port={client.server.port}"):
                raise AssertionError("never reached")


async def test_a_tool_that_kills_its_worker_costs_only_its_trajectories_and_is_counted():
    """Both workers hold state; one dies in the middle of an action. Its trajectories are told, the others go on."""
    async with serving("workers=2") as client:
        ids = [f"trajectory-{n}" for n in range(10)]
        victims = [name for name in ids if worker_of(name, 2) == worker_of("bomber", 2)]
        assert 0 < len(victims) < 10
        await client.step(*["count"] * 10, ids=ids)
        body = await client.step("fault die", "echo hi", ids=["bomber", next(n for n in ids if n not in victims)])
        assert body["errors"] == ["worker_died", None] and body["dones"] == [True, False]
        body = await client.step(*["count"] * 10, ids=ids)
        assert body["errors"] == ["worker_died" if name in victims else None for name in ids]
        assert [o for o, name in zip(body["observations"], ids, strict=True) if name not in victims] == ["2"] * (
            10 - len(victims)
        )
        await until_healthy(client)
        body = await client.step(*["count"] * 10, ids=ids)
        assert body["observations"] == ["1" if name in victims else "3" for name in ids]
        metrics = await client.metrics()
        assert metrics["toolserver_worker_restarts_total"] == 1
        assert metrics['toolserver_environments_lost_total{tool="counter"}'] == len(victims)
        await client.step(*[""] * 10, ids=ids, finish=[True] * 10)
        metrics = await client.metrics()
        assert total(metrics, "opened") == total(metrics, "closed") + total(metrics, "lost") == 10 + len(victims)


async def until_healthy(client):
    while (await client.send("/health", "GET"))[0] != 200:
        await asyncio.sleep(0.05)


def total(metrics, what):
    return sum(value for name, value in metrics.items() if name.startswith(f"toolserver_environments_{what}_total"))


async def test_a_worker_killed_twice_counts_each_lost_environment_once():
    async with serving() as client:
        for turn in (1, 2):
            await client.step("count", "count", ids=["a", "b"])
            os.kill(client.server.worker_pids[0], signal.SIGKILL)
            while (await client.metrics()).get("toolserver_worker_restarts_total") != turn:
                await asyncio.sleep(0.02)
            await until_healthy(client)
            assert total(await client.metrics(), "lost") == 2 * turn
            assert (await client.step("count", "", ids=["a", "b"], finish=[False, True]))["errors"] == [
                "worker_died",
                None,
            ]


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
    with pytest.raises(ConfigError, match="there is no tool 'no_such'"):
        async with serving("tools=[no_such]"):
            raise AssertionError("never reached")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("portt=1", "portt: unknown key; did you mean port?"),
        ("tools=[search]", "tools has 'search', so search.corpus must be set"),
        ("tools=[]", "must name at least one tool"),
        ("step_seconds=1", "step_seconds=1 must be more than limits.wall_seconds=10"),
        ("sandbox=none", "'bubblewrap' or 'unsafe_local'"),
    ],
)
def test_settings_say_what_is_wrong(override, message):
    with pytest.raises(ConfigError) as caught:
        load_settings(None, [override])
    assert message in str(caught.value)


@needs_bwrap
async def test_the_command_serves_and_leaves_nothing_when_it_is_stopped():
    argv = ["-m", "jax_agent_rl.cli", "tool-server", "tools=[stateful_python]", "port=0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
    line = (await process.stdout.readline()).decode()
    url = line.split(" on ")[1].split(": ")[0]
    assert "stateful_python" in line
    async with aiohttp.ClientSession(url) as session:
        body = {"trajectory_ids": ["a"], "actions": ["<python>20 + 1</python>"]}
        async with session.post("/get_observation", json=body) as response:
            assert "21" in (await response.json())["observations"][0]["obs"]
    started = tree(process.pid)
    assert len(started) > 3, "front, worker, sandbox"
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    await until_gone(started)


@needs_bwrap
async def test_nothing_is_left_when_the_server_itself_is_killed():
    argv = ["-m", "jax_agent_rl.cli", "tool-server", "tools=[stateful_python]", "port=0"]
    process = await asyncio.create_subprocess_exec(sys.executable, *argv, stdout=asyncio.subprocess.PIPE)
    url = (await process.stdout.readline()).decode().split(" on ")[1].split(": ")[0]
    async with aiohttp.ClientSession(url) as session:
        body = {"trajectory_ids": ["a"], "actions": ["<python>1</python>"]}
        async with session.post("/get_observation", json=body) as response:
            assert response.status == 200
    started = tree(process.pid)
    process.kill()
    await process.wait()
    await until_gone(started)


async def until_gone(pids):
    """Until the last is reaped; a test's time limit ends a wait in vain."""
    while [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        await asyncio.sleep(0.05)
