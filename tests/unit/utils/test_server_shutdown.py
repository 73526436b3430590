"""Servers end in order at the first signal and at once at the second, whatever hangs.

The bound of five seconds is that of the promise: what a test waits for is the end, and a longer
wait is a failure.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jax_agent_rl.rollout.http.client import RemoteBackend
from jax_agent_rl.rollout.protocol import GenerateRequest
from jax_agent_rl.types import PauseMode, SamplingParams
from jax_agent_rl.utils.shutdown import EXIT_CODE
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
SHUTDOWN_TIMEOUT_SECONDS = 5.0
SERVER = """
import asyncio, sys, threading
from jax_agent_rl.utils.shutdown import run_server

async def main():
    {starting}
    print("serving", flush=True)
    try:
        {serving}
    finally:
        {closing}

run_server(main(), print_line=lambda line: print(line, flush=True))
"""
FOREVER = "await asyncio.Event().wait()"
STUCK = "asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)"
HANGS = {
    "closing that never ends": ("pass", FOREVER, FOREVER),
    "closing that cannot be cancelled": ("pass", FOREVER, "threading.Event().wait()"),
    "a thread that cannot be stopped": (STUCK, FOREVER, "pass"),
    "an event loop that stands still": ("pass", "threading.Event().wait()", "pass"),
}


def start(*command: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )


def program(hang: str) -> str:
    starting, serving, closing = HANGS[hang]
    return SERVER.format(starting=starting, serving=serving, closing=closing)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("hang", HANGS)
def test_the_second_signal_ends_a_server_whatever_hangs(hang: str, first: signal.Signals):
    process = start("-c", program(hang))
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "serving\n"
        process.send_signal(first)
        assert process.stdout.readline().startswith("stopping")
        process.send_signal(signal.SIGTERM)
        process.wait(SHUTDOWN_TIMEOUT_SECONDS)
        assert process.returncode == EXIT_CODE
        assert process.stdout.readline() == "leaving at once\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_children_that_might_hang_are_ended_before_a_server_leaves_at_once():
    last = """with on_forced_exit(lambda: print('killed', flush=True)):
            print("closing", flush=True)
            await asyncio.Event().wait()"""
    text = SERVER.format(starting="pass", serving=FOREVER, closing=last)
    process = start("-c", text.replace("import run_server", "import on_forced_exit, run_server"))
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "serving\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline().startswith("stopping")
        assert process.stdout.readline() == "closing\n"
        process.send_signal(signal.SIGTERM)
        process.wait(SHUTDOWN_TIMEOUT_SECONDS)
        assert process.stdout.read() == "leaving at once\nkilled\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_first_signal_is_enough_for_a_server_that_closes():
    process = start(
        "-c", SERVER.format(starting="pass", serving=FOREVER, closing="print('closed', flush=True)")
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and said.endswith("closed\n")


async def test_a_paused_rollout_server_with_waiting_requests_ends():
    """Its engine hangs, too, so that no request of it will ever end by itself."""
    port = free_port()
    process = start("-m", "tests.chaos.engine", str(port), "1")
    assert process.stdout is not None
    try:
        remote = RemoteBackend(f"http://127.0.0.1:{port}", start_seconds=60)
        await remote.start()
        await remote.pause(PauseMode.KEEP)
        sampling = SamplingParams(max_tokens=5, seed=1)
        waiting = [
            asyncio.create_task(
                remote.generate(
                    GenerateRequest(request_id=f"r{n}", prompt_ids=(5, 6), sampling=sampling)
                )
            )
            for n in range(3)
        ]
        async with asyncio.timeout(60):
            while (health := await remote.health()).waiting + health.running < 3:
                await asyncio.sleep(0)
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGTERM)
        assert (await asyncio.to_thread(process.stdout.readline)).startswith("stopping")
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, SHUTDOWN_TIMEOUT_SECONDS)
        await asyncio.gather(*waiting, return_exceptions=True)
        await remote.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_every_command_that_serves_ends_this_way():
    """What runs a server's loop elsewhere would not hear a second signal."""
    runs = {"jax_agent_rl/cli/serve.py": 3, "tests/chaos/engine.py": 1}
    for file, count in runs.items():
        assert (ROOT / file).read_text().count(" run_server(") >= count, file
