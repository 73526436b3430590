"""Starts that never answer: the error names what and for how long, nothing waits for them, and late
ones are undone.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import signal
import subprocess
import sys
import threading

import pytest

from jax_agent_rl.errors import BackendError, ConfigError
from jax_agent_rl.utils.services import start_service, start_service_blocking
from tests.messages import assert_message, raises

NEVER = {"name": "Ray", "fix": "free memory", "seconds": 0.01}
SOON = {"name": "Ray", "fix": "free memory"}


async def awaited(start, **options):
    return await start_service(start, **options)


async def blocking(start, **options):
    return start_service_blocking(start, **options)


BOTH = pytest.mark.parametrize("call", [awaited, blocking])


@BOTH
async def test_a_service_that_never_answers_is_named_with_the_time_and_the_fix(call):
    with raises(ConfigError, key="Ray", value="0.01 seconds", fix="free memory"):
        await call(threading.Event().wait, **NEVER)
    with pytest.raises(BackendError, match="Ray did not"):
        await call(threading.Event().wait, error=BackendError, **NEVER)


@BOTH
async def test_what_it_returns_or_raises_is_the_callers(call):
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(3)
    assert await call(variable.get, **SOON) == 3

    for problem in (ValueError("no cluster"), TimeoutError("its own"), StopIteration("odd")):

        def fail(problem=problem):
            raise problem

        with pytest.raises((type(problem), RuntimeError)) as caught:
            await call(fail, **SOON)
        assert str(problem) in str(caught.value)
    with pytest.raises(RuntimeError, match="exit with 3"):
        await call(lambda: sys.exit(3), **SOON)


@BOTH
async def test_what_comes_too_late_is_ended(call):
    go = threading.Event()
    ended = threading.Event()
    closed = []

    def start():
        go.wait()
        return "cluster"

    def undo(value):
        closed.append(value)
        ended.set()

    with pytest.raises(ConfigError):
        await call(start, undo=undo, **NEVER)
    go.set()
    assert ended.wait(60) and closed == ["cluster"]
    assert await call(lambda: "another", undo=undo, **SOON) == "another"
    assert closed == ["cluster"]


async def test_what_nobody_waits_for_any_more_is_ended():
    starting = threading.Event()
    go = threading.Event()
    ended = threading.Event()

    def start():
        starting.set()
        go.wait()

    task = asyncio.create_task(start_service(start, undo=lambda value: ended.set(), **SOON))
    while not starting.is_set():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go.set()
    assert await asyncio.to_thread(ended.wait, 60)


@BOTH
async def test_processes_live_as_long_as_their_service(call):
    ended = threading.Event()

    def start():
        libc = ctypes.CDLL(None)
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        return subprocess.Popen(sleep, preexec_fn=lambda: libc.prctl(1, signal.SIGKILL))

    threads = set(threading.enumerate())
    process = await call(start, ended=ended, **SOON)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        (thread,) = (
            t for t in set(threading.enumerate()) - threads if t.name.startswith("start of")
        )
        ended.set()
        thread.join(60)
        assert not thread.is_alive()
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


def test_a_start_that_hangs_keeps_no_process_from_ending():
    program = (
        "import threading\n"
        "from jax_agent_rl.utils.services import start_service_blocking\n"
        "start_service_blocking(threading.Event().wait, name='Ray', fix='free memory',"
        " seconds=0.01)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert_message(ended.stderr, key="Ray", value="0.01 seconds")
