"""The episodes of ``test_openenv.py`` with the package ``openenv`` itself.

Its dependencies do not fit this project's. ``OPENENV_PYTHON`` names a Python of an environment that
has it: ``pip install openenv==0.10.*``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from jax_agent_rl.chat.reply import Reply
from jax_agent_rl.environments import get_environment
from jax_agent_rl.errors import EnvironmentFailedError
from tests.messages import raises
from tests.ports import free_port
from tests.unit.environments.test_openenv import EPISODES

PROGRAM = Path(__file__).parents[2] / "openenv_server.py"
START_SECONDS = 180.0


def python_with_openenv() -> str:
    """A Python that has the package; skips the test if there is none."""
    python = os.environ.get("OPENENV_PYTHON", sys.executable)
    has_it = subprocess.run([python, "-c", "import openenv"], capture_output=True).returncode == 0
    if not has_it:
        pytest.skip("openenv is not installed; OPENENV_PYTHON may name a Python that has it")
    return python


def is_listening(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5.0)
    except httpx.TransportError:
        return False
    return True


@contextmanager
def serving(name: str) -> Iterator[str]:
    """A server of one environment, in a process of its own."""
    port = free_port()
    process = subprocess.Popen([python_with_openenv(), str(PROGRAM), name, str(port)])
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_SECONDS
    try:
        while not is_listening(url):
            assert time.monotonic() < deadline, "the server did not start"
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"the server ended with {process.wait(timeout=0.2)}")
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("name", EPISODES)
async def test_openenv_itself_is_played_alike(name: str):
    with serving(name) as url:
        await EPISODES[name](url)


async def test_a_full_server_and_one_that_breaks_are_told():
    with serving("write") as url:
        environments = [get_environment("openenv")() for _ in range(3)]
        for environment in environments[:2]:
            await environment.reset(url=url)
        with raises(EnvironmentFailedError, key="CAPACITY_REACHED", fix="max_instances"):
            await environments[2].reset(url=url)
        with raises(EnvironmentFailedError, value="the environment broke"):
            await environments[0].step(Reply("crash"))
        for environment in environments:
            await environment.close()
