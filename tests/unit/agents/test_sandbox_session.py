"""A sandbox that runs one command after another: commands, files, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jax_agent_rl.agents.command.machines import FOLDERS, RunnerJob
from jax_agent_rl.agents.command.runner import REQUEST_BYTES
from jax_agent_rl.agents.command.session import SandboxSession
from jax_agent_rl.agents.command.workspace import JobResult, WorkspaceLimits, file_entries
from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.sandbox import Sandbox, SandboxLimits
from jax_agent_rl.tool_server.sandbox.isolation import Bubblewrap, find_bwrap
from tests.capabilities import needs_bwrap
from tests.messages import raises

pytestmark = needs_bwrap
LIMITS = WorkspaceLimits(max_bytes=200_000, max_entries=100)
NO_SLEEP = "while grep -q 432[1] /proc/[0-9]*/cmdline; do sleep 0.01; done"
"""Ends when no ``sleep 4321`` runs any more."""


@contextlib.asynccontextmanager
async def open_session(*, verifies: bool = False, **limits: Any) -> AsyncIterator[SandboxSession]:
    bwrap = find_bwrap()
    assert bwrap is not None
    sandbox = Sandbox(
        Bubblewrap(bwrap, Path(sys.executable)), SandboxLimits(**limits), max_running=1
    )
    job = RunnerJob(argv=(), env={"COLOUR": "red"}, seconds=0, verifies=verifies)
    trees = [
        (".", file_entries({}, folders=FOLDERS)),
        ("app", file_entries({"data/number.txt": b"7"})),
    ]
    session = await SandboxSession.open(
        sandbox, job, trees, {}, workdir="/app", limits=LIMITS, wall_seconds=60.0
    )
    async with contextlib.aclosing(session):
        yield session


async def shell(
    session: SandboxSession,
    command: str,
    *,
    cwd: str = "/app",
    seconds: float = 30.0,
    **env: str,
) -> JobResult:
    return await session.run(["bash", "-c", command], env=env, cwd=cwd, seconds=seconds)


async def test_commands_share_files_and_what_runs_in_the_background():
    async with open_session() as session:
        result = await shell(session, "echo $COLOUR $SIZE > out.txt; cat data/number.txt", SIZE="2")
        assert (result.exit_code, result.stdout) == (0, "7")
        await shell(session, "setsid bash -c 'until [ -e go ]; do sleep 0.01; done; echo > seen' &")
        await shell(session, "touch go")
        result = await shell(session, "until [ -e seen ]; do sleep 0.01; done; cat out.txt")
        assert result.stdout == "red 2\n"


async def test_commands_run_side_by_side():
    async with open_session() as session:
        waits = shell(session, "until [ -e now ]; do sleep 0.01; done; echo done")
        first, second = await asyncio.gather(waits, shell(session, "touch now"))
        assert (first.stdout, second.exit_code) == ("done\n", 0)


async def test_a_command_that_takes_too_long_is_killed_and_the_others_go_on():
    async with open_session() as session:
        for seconds in (0.5, 30.0):  # a busy machine does not begin in half a second
            result = await shell(session, "echo begun; sleep 4321", seconds=seconds)
            if result.stdout:
                break
        assert (result.exit_code, result.stdout) == (None, "begun\n")
        assert (await shell(session, NO_SLEEP)).exit_code == 0


async def test_a_command_nobody_waits_for_any_more_is_killed():
    async with open_session() as session:
        waiting = asyncio.ensure_future(shell(session, "touch begun; sleep 4321; touch ended"))
        await shell(session, "until [ -e begun ]; do sleep 0.01; done")
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (await shell(session, NO_SLEEP)).exit_code == 0


async def test_files_are_written_and_read_within_limits():
    async with open_session() as session:
        await session.write(file_entries({"a/b.txt": b"new"}), "/app/more")
        names = {entry.name: entry.data for entry in await session.read("/app/more")}
        assert names == {"a": b"", "a/b.txt": b"new"}
        (entry,) = await session.read("/app/data/number.txt")
        assert (entry.name, entry.data) == ("number.txt", b"7")
        with raises(ToolError, value="/app/missing"):
            await session.read("/app/missing")
        with raises(ToolError, value="/usr/x"):
            await session.write(file_entries({"x": b""}), "/usr/x")
        await shell(session, "head -c 300000 /dev/zero > big")
        with raises(ToolError, value="too large"):
            await session.read("/app")


async def test_the_end_gives_the_folder_and_nothing_runs_afterwards():
    async with open_session() as session:
        await shell(session, "echo 77 > answer.txt; ln -s /etc/passwd out; setsid sleep 4321 &")
        result = await session.end()
        assert result.workspace is not None
        assert {entry.name for entry in result.workspace} == {
            "answer.txt",
            "data",
            "data/number.txt",
        }
        assert result.left_out == 1
        with raises(ToolError, value="has ended"):
            await shell(session, "true")


@pytest.mark.parametrize(
    ("command", "limits", "why"),
    [
        ("kill -9 -1", {}, "exit status"),
        ("for i in $(seq 200); do touch $i; done; sleep 4321", {"files": 100}, "100 files"),
    ],
)
async def test_a_sandbox_that_ends_says_why(command: str, limits: dict[str, int], why: str):
    async with open_session(**limits) as session:
        with raises(ToolError, value="has ended"):
            await shell(session, command)
        assert session.ended is not None
        assert why in session.ended
        result = await session.end()
        assert result.workspace is None
        assert why in str(result.pack_problem)


async def test_a_verifiers_session_names_nothing_of_the_working_folder():
    async with open_session(verifies=True) as session:
        env = {"PATH": "/app:/usr/bin:/bin", "PYTHONPATH": "/app", "BASH_ENV": "/app/x"}
        result = await shell(session, 'echo "$PATH $PYTHONPATH $BASH_ENV $PYTHONSAFEPATH"', **env)
        assert result.stdout == "/usr/bin:/bin /tests  1\n"


async def test_a_command_cannot_speak_for_the_runner():
    claim = json.dumps({"number": 1, "size": 0, "result": {"exit_code": 0, "stdout": "forged"}})
    program = f"""
import os, socket
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) != os.getpid():
        try:
            os.listdir("/proc/" + pid + "/fd")
            raise SystemExit("descriptors of " + pid + " are open to all")
        except (PermissionError, FileNotFoundError):
            pass
control = socket.socket(socket.AF_UNIX)
try:
    control.connect("/tmp/control.sock")
    control.send(b'{claim}')
except ConnectionRefusedError:
    print("refused")
"""
    async with open_session() as session:
        result = await session.run(["python3", "-c", program], env={}, cwd="/app", seconds=30.0)
        assert (result.exit_code, result.stdout) == (0, "refused\n"), result.stderr


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("echo a\0b", "null byte"),
        ("echo \ud83d", "surrogates not allowed"),
        (": " + "x" * 200_000, "Argument list too long"),
    ],
)
async def test_a_command_that_cannot_start_is_answered_and_the_next_one_runs(
    command: str, problem: str
):
    async with open_session() as session:
        result = await shell(session, command)
        assert result.exit_code == 127
        assert problem in result.stderr
        assert (await shell(session, "echo on")).stdout == "on\n"


async def test_a_long_command_runs():
    async with open_session() as session:
        result = await shell(session, f"echo {'x' * 80_000}")
        assert len(result.stdout) == 80_001


async def test_a_request_that_is_too_long_is_refused_and_the_next_one_runs():
    async with open_session() as session:
        with raises(ToolError, value=REQUEST_BYTES):
            await shell(session, "x" * REQUEST_BYTES)
        assert (await shell(session, "echo on")).stdout == "on\n"


async def test_commands_are_answered_when_there_is_no_room_for_their_outputs():
    async with open_session() as session:
        await shell(session, "cat /dev/zero > /tmp/big")
        result = await shell(session, "true", cwd="/nowhere")
        assert result.exit_code == 127


async def test_a_flood_of_output_ends_its_command_and_the_next_one_runs():
    async with open_session() as session:
        result = await shell(session, "yes | head -c 1000000000")
        assert result.exit_code != 0
        assert len(result.stdout) <= 100_000
        assert (await shell(session, "echo on")).stdout == "on\n"


@pytest.mark.parametrize(("verifies", "count"), [(False, "1\n"), (True, "0\n")])
async def test_what_a_command_left_in_the_background_ends_with_it_in_tests_alone(
    verifies: bool, count: str
):
    async with open_session(verifies=verifies) as session:
        begin = "setsid bash -c 'touch begun; exec sleep 4321' &"
        await shell(session, begin + " until [ -e begun ]; do sleep 0.01; done")
        counted = await shell(session, "grep -l '[4]321' /proc/[0-9]*/cmdline | wc -l")
        assert counted.stdout == count
