"""Daemon threads: results come back, hangs are abandoned and counted, the number is bounded."""

import asyncio
import contextvars
import sys
import threading

import pytest

from jax_agent_rl.errors import ToolError
from jax_agent_rl.utils.timeouts import DaemonThreads
from tests.messages import raises


async def test_results_exceptions_and_exits_come_back():
    threads = DaemonThreads()
    assert await threads.run(lambda: 42, name="t") == 42
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, name="t")
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(lambda: next(iter(())), name="t")
    with pytest.raises(ToolError, match="SystemExit"):
        await threads.run(lambda: sys.exit(3), name="t")
    assert threads.abandoned == 0


async def test_context_variables_are_seen():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(7)
    assert await DaemonThreads().run(variable.get, name="t") == 7


async def test_an_abandoned_call_is_counted_until_it_ends():
    threads = DaemonThreads()
    go = threading.Event()
    running = asyncio.Event()
    loop = asyncio.get_running_loop()
    ended = threading.Event()

    def hang():
        loop.call_soon_threadsafe(running.set)
        go.wait()

    def watch():
        [thread.join() for thread in threading.enumerate() if thread.name == "tool hang"]
        ended.set()

    task = asyncio.create_task(threads.run(hang, name="hang"))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threads.abandoned == 1
    go.set()
    await threads.run(watch, name="watch")
    assert ended.is_set() and threads.abandoned == 0


async def test_too_many_abandoned_calls_refuse_further_ones():
    threads = DaemonThreads(max_abandoned=2)
    go = threading.Event()
    for _ in range(2):
        task = asyncio.create_task(threads.run(go.wait, name="hang"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    with raises(ToolError, value="2 earlier tool calls"):
        await threads.run(lambda: 1, name="t")
    go.set()
