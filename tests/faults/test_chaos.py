"""The command: every fault for a while, and an end before its time."""

import asyncio
import json
import signal
import sys
from pathlib import Path

from jax_agent_rl.testing.leaks import Footprint
from jax_agent_rl.utils.shutdown import EXIT_CODE
from tests.chaos.invariants import FREE_TO_LOSE


async def chaos(*options: str) -> tuple[int | None, dict, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos",
        "--json",
        *options,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    *lines, last = output.decode().splitlines()
    return process.returncode, json.loads(last), "\n".join(lines)


async def test_a_run_survives_changes_of_engines_tools_network_and_weights():
    status, report, printed = await chaos("--seconds", "20", "--seed", "1")
    assert (status, report["failures"]) == (0, []), printed
    names = ("lost", "duplicated", "inexact", "stale_served", "unbalanced_steps", "orphans")
    assert {name: report[name] for name in names} == dict.fromkeys(names, 0)
    assert report["started"] == report["trained"] + sum(report["dropped"].values())
    assert report["dropped"].keys() <= FREE_TO_LOSE
    assert report["trained"]
    assert report["steps"]
    assert report["servers_lost"]
    struck = [name for name, count in report["faults"].items() if count]
    assert "kill_engine" in struck
    assert sum(name.startswith("network") for name in struck) >= 4


async def test_a_fault_there_is_not_is_refused_before_anything_is_started():
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos",
        "--only",
        "flood",
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"there is no such fault; there are kill_engine" in errors


async def test_told_to_stop_it_takes_its_servers_with_it():
    processes = Footprint.now().processes
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos",
        "--seconds",
        "600",
        stdout=asyncio.subprocess.PIPE,
    )
    while b"trained" not in await process.stdout.readline():
        assert process.returncode is None
    servers = Footprint.now().processes.keys() - processes.keys() - {process.pid}
    assert len(servers) >= 5, "three engines, the tool server and its worker"
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == EXIT_CODE
    assert not [pid for pid in servers if Path(f"/proc/{pid}").exists()]
