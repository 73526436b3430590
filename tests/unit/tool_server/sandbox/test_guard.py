"""What the guard says of a start that failed, nobody else can say."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from jax_agent_rl.tool_server.sandbox import SandboxLimits, SandboxProcess, open_sandbox
from jax_agent_rl.tool_server.sandbox.isolation import Bubblewrap
from tests.capabilities import needs_bwrap

pytestmark = needs_bwrap


@pytest.fixture(params=["as_started", "user_namespace"])
async def run(request, monkeypatch):
    if request.param == "user_namespace":
        monkeypatch.setattr(
            "jax_agent_rl.tool_server.sandbox.isolation.maps_every_user", lambda: False
        )
    sandbox = await open_sandbox()

    async def run(source):
        return await sandbox.run([sandbox.python, "main.py"], files={"main.py": source.encode()})

    return run


@pytest.mark.parametrize("words", ["bwrap: no", "sandbox guard: no"])
@pytest.mark.parametrize("code", [1, 125])
async def test_a_program_cannot_pass_for_a_sandbox_that_failed(run, words, code):
    """Whose fault it is decides whether a trajectory is scored or lost."""
    result = await run(f"import os, sys\nprint({words!r}, file=sys.stderr)\nos._exit({code})")
    assert (result.stderr, result.exit_code) == (words + "\n", code)


async def test_the_guards_socket_is_out_of_reach(run):
    source = """
import ctypes, os, stat
open_fds = [fd for fd in range(3, 200) if os.path.exists(f"/proc/self/fd/{fd}")]
print([fd for fd in open_fds if stat.S_ISSOCK(os.stat(fd).st_mode)])
c = ctypes.CDLL(None, use_errno=True)
print({c.syscall(438, c.syscall(434, 1, 0), fd, 0) for fd in range(50)}, ctypes.get_errno())
"""
    assert (await run(source)).stdout == "[]\n{-1} 1\n"  # pidfd_getfd: EPERM


async def test_a_program_killed_before_it_started_is_no_failure_of_the_sandbox(tmp_path):
    slow = tmp_path / "bwrap"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    process = await SandboxProcess.start(
        Bubblewrap(slow, Path(sys.executable)), ["true"], SandboxLimits(), {}
    )
    running = asyncio.ensure_future(process.finish())
    process.kill()
    assert (await running).exit_code == -signal.SIGKILL
