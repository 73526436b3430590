"""A trainer that is killed in the middle of a trajectory, and what must end with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from jax_agent_rl.tool_server.sandbox.limits import process_tree

SLEEPS = "setsid sleep 4321 & sleep 4321"
"""What a program does for the shell until the trainer is killed: it sleeps, and so does what it
left.
"""


def command_line(pid: int) -> str:
    """Return a process's command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


async def assert_sleepers_end_with(trainer_program: str) -> None:
    """Kill a trainer when its program runs :data:`SLEEPS`, and wait until no process of it is left.

    Args:
        trainer_program: Python code.
    """
    root = Path(__file__).parents[1]
    trainer = subprocess.Popen([sys.executable, "-c", trainer_program], cwd=root)
    try:
        sleeping: list[int] = []
        async with asyncio.timeout(120):
            while len(sleeping) < 2:
                assert trainer.poll() is None
                await asyncio.sleep(0.1)
                tree = process_tree(trainer.pid)
                sleeping = [pid for pid in tree if command_line(pid).startswith("sleep 4321")]
    finally:
        trainer.kill()
        trainer.wait()
    async with asyncio.timeout(30):
        while any(command_line(pid).startswith("sleep 4321") for pid in sleeping):
            await asyncio.sleep(0.05)
