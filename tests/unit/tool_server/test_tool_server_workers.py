"""Workers that die or are stuck, and the cleanup when the server stops."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import aiohttp

from jax_agent_rl.tool_server.sandbox.limits import process_tree
from jax_agent_rl.tool_server.worker import assign_worker
from jax_agent_rl.utils.shutdown import EXIT_CODE
from tests.capabilities import needs_bwrap
from tests.tool_serving import FAKES, serving, total, until_healthy


async def test_a_tool_that_kills_its_worker_costs_its_trajectories():
    """Both workers hold state; one dies in the middle of an action. Only its trajectories fail."""
    async with serving("workers=2") as client:
        ids = [f"trajectory-{n}" for n in range(10)]
        victims = [name for name in ids if assign_worker(name, 2) == assign_worker("bomber", 2)]
        assert 0 < len(victims) < 10
        await client.step(*["count"] * 10, ids=ids)
        body = await client.step(
            "fault die", "echo hi", ids=["bomber", next(n for n in ids if n not in victims)]
        )
        assert body["errors"] == ["worker_died", None]
        assert body["dones"] == [True, False]
        body = await client.step(*["count"] * 10, ids=ids)
        assert body["errors"] == ["worker_died" if name in victims else None for name in ids]
        assert [
            o for o, name in zip(body["observations"], ids, strict=True) if name not in victims
        ] == ["2"] * (10 - len(victims))
        await until_healthy(client)
        body = await client.step(*["count"] * 10, ids=ids)
        assert body["observations"] == ["1" if name in victims else "3" for name in ids]
        metrics = await client.metrics()
        assert metrics["toolserver_worker_restarts_total"] == 1
        assert metrics['toolserver_environments_lost_total{tool="counter"}'] == len(victims)
        await client.step(*[""] * 10, ids=ids, finish=[True] * 10)
        metrics = await client.metrics()
        assert (
            total(metrics, "opened")
            == total(metrics, "closed") + total(metrics, "lost")
            == 10 + len(victims)
        )


async def test_a_stuck_worker_is_replaced_and_the_other_goes_on_meanwhile():
    async with serving("workers=2", "stuck_seconds=4") as client:
        other_trajectory = next(
            name
            for name in map(str, range(99))
            if assign_worker(name, 2) != assign_worker("victim", 2)
        )
        await client.step("count", ids=["victim"])
        stuck = asyncio.create_task(client.step("fault stuck", ids=["victim"]))
        while (await client.send("/health", "GET"))[0] != 503:
            assert (await client.step("echo here", ids=[other_trajectory]))["observations"] == [
                "here"
            ]
        body = await stuck
        assert (body["errors"], body["dones"]) == (["worker_died"], [True])
        await until_healthy(client)
        assert (await client.step("count", ids=["victim"]))["observations"] == ["1"]
        metrics = await client.metrics()
        assert metrics["toolserver_worker_restarts_total"] == 1
        assert total(metrics, "lost") == 1


async def test_what_a_tool_prints_holds_up_nobody():
    """More than a pipe takes, and nobody reads standard output once a worker is ready."""
    async with serving("stuck_seconds=20") as client:
        body = await client.step("fault print")
        assert body["observations"] == ["printed"]
        assert (await client.step("count"))["observations"] == ["1"]


async def test_a_worker_killed_twice_counts_each_lost_environment_once():
    async with serving() as client:
        for turn in (1, 2):
            await client.step("count", "count", ids=["a", "b"])
            os.kill(client.server.worker_pids[0], signal.SIGKILL)
            while (await client.metrics()).get("toolserver_worker_restarts_total") != turn:
                await asyncio.sleep(0.02)
            await until_healthy(client)
            assert total(await client.metrics(), "lost") == 2 * turn
            assert (await client.step("count", "", ids=["a", "b"], finish=[False, True]))[
                "errors"
            ] == [
                "worker_died",
                None,
            ]


@needs_bwrap
async def test_the_command_serves_and_leaves_nothing_when_it_is_stopped():
    argv = ["-m", "jax_agent_rl.cli", "tool-server", "tools=[stateful_python]", "port=0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.PIPE
    )
    line = (await process.stdout.readline()).decode()
    url = line.split(" on ")[1].split(": ")[0]
    assert "stateful_python" in line
    async with aiohttp.ClientSession(url) as session:
        body = {"trajectory_ids": ["a"], "actions": ["<python>20 + 1</python>"]}
        async with session.post("/get_observation", json=body) as response:
            assert "21" in (await response.json())["observations"][0]
    started = process_tree(process.pid)
    assert len(started) > 3, "front, worker, sandbox"
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    await until_gone(started)


async def started(*overrides):
    """The command with the fake tools, and its address."""
    argv = [
        "-m",
        "jax_agent_rl.cli",
        "tool-server",
        "tools=[counter,faulty]",
        f"tool_path={FAKES}",
        "port=0",
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, *overrides, stdout=asyncio.subprocess.PIPE
    )
    return process, (await process.stdout.readline()).decode().split(" on ")[1].split(": ")[0]


def post(session, action, **extra):
    body = {"trajectory_ids": ["a"], "actions": [action], "extra_fields": [extra]}
    return session.post("/get_observation", json=body)


async def test_a_stuck_worker_does_not_keep_the_command_from_stopping():
    process, url = await started("stuck_seconds=600")
    async with aiohttp.ClientSession(url) as session:
        stuck = asyncio.ensure_future(post(session, "fault stuck"))
        health = 200
        while health == 200:
            async with session.get("/health") as response:
                health = response.status
        pids = process_tree(process.pid)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(35):  # an orderly worker would have 40 seconds
            assert await process.wait() == 0
        await asyncio.gather(stuck, return_exceptions=True)
    await until_gone(pids)


async def test_a_second_signal_does_not_wait_for_environments_to_close():
    process, url = await started()
    async with aiohttp.ClientSession(url) as session:
        async with post(session, "count", reluctant=True) as response:
            assert response.status == 200
    pids = process_tree(process.pid)
    process.send_signal(signal.SIGTERM)
    assert b"stopping" in await process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(14):  # closing would take 15 seconds to be given up
        assert await process.wait() == EXIT_CODE
    await until_gone(pids)


@needs_bwrap
async def test_nothing_is_left_when_the_server_itself_is_killed():
    argv = ["-m", "jax_agent_rl.cli", "tool-server", "tools=[stateful_python]", "port=0"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.PIPE
    )
    url = (await process.stdout.readline()).decode().split(" on ")[1].split(": ")[0]
    async with aiohttp.ClientSession(url) as session:
        body = {"trajectory_ids": ["a"], "actions": ["<python>1</python>"]}
        async with session.post("/get_observation", json=body) as response:
            assert response.status == 200
    started = process_tree(process.pid)
    process.kill()
    await process.wait()
    await until_gone(started)


async def until_gone(pids):
    """Wait until the last is reaped; a test's time limit ends a wait in vain."""
    while [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        await asyncio.sleep(0.05)
