"""Bounded calls of user code: blocking functions in daemon threads, awaitables with a timeout.

A hanging thread of a pool is lost for good and keeps the process from exiting. So every call gets
its own daemon thread (starting one takes tens of microseconds). When the caller stops waiting, the
thread is *abandoned*: counted, left alone, and forgotten when it ends. With too many abandoned
threads, further calls are refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from jax_agent_rl.errors import JaxAgentRLError, ToolError
from jax_agent_rl.utils.loop_watch import OwnTime, at_work

T = TypeVar("T")


class DaemonThreads:
    """One daemon thread per call.

    Args:
        max_abandoned: maximum abandoned calls at the same time.
        kind: what is called (``tool``), for messages.
        error: makes the error of a refused call, and of a call that tried to exit.
    """

    def __init__(
        self,
        max_abandoned: int = 64,
        *,
        kind: str = "tool",
        error: Callable[[str], JaxAgentRLError] = ToolError,
    ):
        self._max_abandoned = max_abandoned
        self._kind = kind
        self._error = error
        self._abandoned = 0
        self._lock = threading.Lock()  # held for a counter update only

    @property
    def abandoned(self) -> int:
        """Number of calls that still run though nobody waits for them."""
        return self._abandoned

    async def run(self, function: Callable[[], Any], *, name: str) -> Any:
        """Call ``function()`` in a daemon thread, in a copy of the caller's context.

        Cancelling the caller abandons the thread.

        Raises:
            JaxAgentRLError: made by ``error``: too many abandoned calls, or the function raised
                ``SystemExit``, say.
        """
        if self._abandoned >= self._max_abandoned:
            raise self._error(
                f"{name} is unavailable: {self._abandoned} earlier {self._kind} calls never"
                f" returned; give the {self._kind}s time limits of their own"
            )
        call = _Call(function, name, self._error)
        thread = threading.Thread(
            target=call.run,
            args=(self._note_end,),
            name=f"{self._kind} {name}",
            daemon=True,
        )
        thread.start()
        try:
            return await call.result
        finally:
            with self._lock:
                if not call.ended:
                    call.abandoned = True
                    self._abandoned += 1

    def _note_end(self, call: _Call) -> None:
        with self._lock:
            call.ended = True
            if call.abandoned:
                self._abandoned -= 1


class _Call:
    """One function call in a thread, whose result returns to the event loop."""

    def __init__(
        self, function: Callable[[], Any], name: str, error: Callable[[str], JaxAgentRLError]
    ):
        self.name = name
        self.error = error
        self.ended = False
        self.abandoned = False
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self._context = contextvars.copy_context()
        self._function = function

    def run(self, on_end: Callable[[_Call], None]) -> None:
        """Call the function in this thread.

        Args:
            on_end: called with this object before the result is delivered.
        """
        value = None
        error: Exception | None = None
        try:
            value = self._context.run(self._function)
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit in a function must not end the run
            error = self.error(f"{self.name} raised {type(raised).__name__}: {raised}")

        on_end(self)
        try:
            self._loop.call_soon_threadsafe(self._deliver, value, error)
        except RuntimeError:
            return  # the loop is closed: an abandoned call came back after the run

    def _deliver(self, value: Any, error: Exception | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(value)
        elif isinstance(error, StopIteration):  # a future cannot carry it
            self.result.set_exception(RuntimeError(f"StopIteration: {error}"))
        else:
            self.result.set_exception(error)


async def in_time(
    call: Callable[[], Awaitable[T]],
    timeout: float,
    *,
    what: str,
    late: Callable[[], JaxAgentRLError],
    error: Callable[[str], JaxAgentRLError],
) -> T:
    """Call user code in its own task, which is abandoned if it ignores its cancellation.

    Code that blocks the event loop cannot be interrupted. When it returns, it has been late if its
    own steps took longer than ``timeout``.

    Args:
        call: calls a tool, a reward function, an environment.
        timeout: seconds.
        what: names the code in case it holds the event loop
            (:mod:`jax_agent_rl.utils.loop_watch`).
        late: makes the error to raise on timeout.
        error: makes the error to raise if the code cancelled itself or tried to exit, which must
            neither look like a cancellation of the caller nor end the run.
    """
    own_time = OwnTime()
    work = _without_exit(call, what, error)
    task = asyncio.ensure_future(own_time.measure(work, time.monotonic))
    try:
        finished, _ = await asyncio.wait({task}, timeout=timeout)
    finally:
        task.cancel()

    if not finished:
        raise late()
    if task.cancelled():
        raise error("cancelled itself")
    if own_time.seconds > timeout:
        raise late() from task.exception()
    return task.result()


async def _without_exit(
    call: Callable[[], Awaitable[T]], what: str, error: Callable[[str], JaxAgentRLError]
) -> T:
    try:
        with at_work(what):
            return await call()
    except SystemExit as exit_request:
        raise error(f"tried to exit with {exit_request.code!r}") from None
