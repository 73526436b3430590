"""Runs tests of a program outside the process that runs the program, so that it cannot decide what they find.

::

    tests.py ──► tests_side ──request: name, call, attribute──► program_side ──► main.py
       │             ▲                                              │
    verdict          └────────── plain data, or an exception ◄──────┘
    (exit code)

Both sides are programs in sandboxes of their own that share nothing but two pipes. The program's process holds neither
the tests nor what they expect, and nothing it does to itself reaches the process that compares.
"""

from __future__ import annotations

import asyncio
import os
from functools import cache
from pathlib import Path

from jax_agent_rl.tool_server.sandbox.isolation import Isolation
from jax_agent_rl.tool_server.sandbox.limits import SandboxLimits, SandboxResult
from jax_agent_rl.tool_server.sandbox.process import SandboxProcess


async def run_tests(isolation: Isolation, program: str, tests: str, limits: SandboxLimits) -> SandboxResult:
    """Run tests of a program.

    Args:
        isolation: how either side is kept apart.
        program: Python source.
        tests: Python source that uses the names the program defines.
        limits: of either side.

    Returns:
        what both wrote, the program first. It is ``ok`` if the tests ran to their end without an exception.

    Raises:
        ToolError: the sandbox itself failed.
    """
    requests_in, requests_out = os.pipe()
    replies_in, replies_out = os.pipe()
    try:
        files = {"main.py": program.encode("utf-8", "replace")}
        ends = (requests_in, replies_out)
        serving = await _start(isolation, "program_side.py", files, limits, ends)
        try:
            files = {"tests.py": tests.encode("utf-8", "replace")}
            testing = await _start(isolation, "tests_side.py", files, limits, (replies_in, requests_out))
        except BaseException:
            await serving.close()
            raise
    finally:
        for fd in (requests_in, requests_out, replies_in, replies_out):
            os.close(fd)
    running = asyncio.ensure_future(serving.finish())
    try:
        verdict = await testing.finish()
    finally:
        serving.kill()
        await asyncio.wait([running])
    served = running.result()
    stopped = served.stopped or verdict.stopped
    return SandboxResult(
        stdout=served.stdout + verdict.stdout,
        stderr=served.stderr + verdict.stderr,
        exit_code=verdict.exit_code if stopped is None else None,
        stopped=stopped,
        seconds=verdict.seconds,
    )


async def _start(
    isolation: Isolation, name: str, files: dict[str, bytes], limits: SandboxLimits, pipe_ends: tuple[int, int]
) -> SandboxProcess:
    argv = [str(isolation.python), name, *map(str, pipe_ends)]
    return await SandboxProcess.start(isolation, argv, limits, files | _sources(name), pass_fds=pipe_ends)


@cache
def _sources(name: str) -> dict[str, bytes]:
    folder = Path(__file__).parent
    return {file: (folder / file).read_bytes() for file in (name, "remote_calls.py")}
