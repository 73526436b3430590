"""A sandbox that runs one command after another: what a command may do to the next ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from jax_agent_rl.agents.command.machines import FOLDERS, RunnerJob
from jax_agent_rl.agents.command.runner import REQUEST_BYTES
from jax_agent_rl.agents.command.session import SandboxSession
from jax_agent_rl.agents.command.workspace import JobResult, WorkspaceLimits, file_entries
from jax_agent_rl.errors import ToolError
from jax_agent_rl.tool_server.sandbox import SandboxLimits, open_sandbox
from tests.capabilities import needs_bwrap
from tests.messages import raises

pytestmark = needs_bwrap
LIMITS = WorkspaceLimits(max_bytes=1 << 20, max_entries=100)


@asynccontextmanager
async def opened(*, verifies: bool = False) -> AsyncIterator[SandboxSession]:
    sandbox = await open_sandbox(
        limits=SandboxLimits(disk_bytes=8 << 20, processes=64, output_bytes=LIMITS.result_bytes)
    )
    session = await SandboxSession.open(
        sandbox,
        RunnerJob(argv=(), env={}, seconds=0, verifies=verifies),
        [(".", file_entries({}, folders=FOLDERS))],
        {},
        workdir="/work",
        limits=LIMITS,
        wall_seconds=300,
    )
    async with aclosing(session):
        yield session


async def shell(session: SandboxSession, command: str, *, cwd: str = "/work") -> JobResult:
    return await session.run(["bash", "-c", command], env={}, cwd=cwd, seconds=20)


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
    async with opened() as session:
        result = await shell(session, command)
        assert result.exit_code == 127
        assert problem in result.stderr
        assert (await shell(session, "echo on")).stdout == "on\n"


async def test_a_long_command_runs():
    async with opened() as session:
        result = await shell(session, f"echo {'x' * 80_000}")
        assert len(result.stdout) == 80_001


async def test_a_request_that_is_too_long_is_refused_and_the_next_one_runs():
    async with opened() as session:
        with raises(ToolError, value=REQUEST_BYTES):
            await shell(session, "x" * REQUEST_BYTES)
        assert (await shell(session, "echo on")).stdout == "on\n"


async def test_commands_are_answered_when_there_is_no_room_for_their_outputs():
    async with opened() as session:
        await shell(session, "cat /dev/zero > /tmp/big")
        result = await shell(session, "true", cwd="/nowhere")
        assert result.exit_code == 127


@pytest.mark.parametrize(("verifies", "count"), [(False, "1\n"), (True, "0\n")])
async def test_what_a_command_left_in_the_background_ends_with_it_in_tests_alone(
    verifies: bool, count: str
):
    async with opened(verifies=verifies) as session:
        await shell(session, "setsid sleep 4321 &")
        counted = await shell(session, "grep -lx sleep /proc/[0-9]*/comm | wc -l")
        assert counted.stdout == count
