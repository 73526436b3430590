"""Starts of what runs outside of this process: a cluster, an engine, a tracker, the runtime of an accelerator.

Any of them may never answer: ``ray.init`` waits for ever when memory ran out. Their libraries
block, and most have no time limit, so each start has a daemon thread of its own, which is left
behind when it is late: a thread of a pool would keep the process from ending. Starts that are
processes of ours or coroutines have their limits where they are awaited.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from jax_agent_rl.errors import ConfigError, JaxAgentRLError

T = TypeVar("T")

START_SECONDS = 180.0
"""Time limit of services that start within seconds where they work."""
ENGINE_START_SECONDS = 3600.0
"""Time limit of an engine, which may read hundreds of gigabytes first."""


async def start_service(
    start: Callable[[], T],
    *,
    name: str,
    fix: str,
    seconds: float = START_SECONDS,
    undo: Callable[[T], object] | None = None,
    ended: threading.Event | None = None,
    error: Callable[[str], JaxAgentRLError] = ConfigError,
) -> T:
    """Call ``start()`` and return what it returns, unless it takes too long.

    Args:
        start: blocks until the service is there. It runs in another thread, in a copy of the
            caller's context.
        name: what does not answer, for the message.
        fix: what to do about it, for the message.
        seconds: time limit.
        undo: ends a service that came too late, or after the caller was cancelled.
        ended: set by the caller when the service has been shut down. Give it for a service whose
            processes Linux ends with the thread that started them (``PR_SET_PDEATHSIG``, as Ray
            asks for): the thread stays until then.
        error: makes the error of a late service.

    Raises:
        JaxAgentRLError: made by ``error``: no answer in time.
        Exception: what ``start`` raised.
    """
    starting = _Start(start, undo, name, ended)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(starting.result), seconds)
    except TimeoutError:
        if starting.is_over():
            raise  # its own
        raise error(_late(name, seconds, fix)) from None
    finally:
        starting.leave()


def start_service_blocking(
    start: Callable[[], T],
    *,
    name: str,
    fix: str,
    seconds: float = START_SECONDS,
    undo: Callable[[T], object] | None = None,
    ended: threading.Event | None = None,
    error: Callable[[str], JaxAgentRLError] = ConfigError,
) -> T:
    """Do as :func:`start_service` where there is no event loop."""
    starting = _Start(start, undo, name, ended)
    try:
        return starting.result.result(seconds)
    except TimeoutError:
        if starting.is_over():
            raise
        raise error(_late(name, seconds, fix)) from None
    finally:
        starting.leave()


def _late(name: str, seconds: float, fix: str) -> str:
    return f"{name} did not answer within {seconds:g} seconds; {fix}"


class _Start(Generic[T]):
    """A call in a daemon thread, and whether anybody still waits for it."""

    def __init__(
        self,
        start: Callable[[], T],
        undo: Callable[[T], object] | None,
        name: str,
        ended: threading.Event | None,
    ) -> None:
        self._ended = ended
        self.result: Future[T] = Future()
        self.result.set_running_or_notify_cancel()  # a caller that is cancelled leaves it
        self._lock = threading.Lock()
        self._is_over = False
        self._is_left = False
        context = contextvars.copy_context()
        arguments = (context, start, undo)
        threading.Thread(
            target=self._run, args=arguments, name=f"start of {name}", daemon=True
        ).start()

    def is_over(self) -> bool:
        """Return whether the call has ended."""
        return self._is_over

    def leave(self) -> None:
        """Wait no longer."""
        with self._lock:
            self._is_left = True

    def _run(
        self,
        context: contextvars.Context,
        start: Callable[[], T],
        undo: Callable[[T], object] | None,
    ) -> None:
        value = None
        problem: BaseException | None = None
        try:
            value = context.run(start)
        except SystemExit as left:
            problem = RuntimeError(f"it tried to exit with {left.code!r}")
        except StopIteration as stopped:  # a future cannot carry it
            problem = RuntimeError(f"StopIteration: {stopped}")
        except BaseException as raised:
            problem = raised
        with self._lock:
            self._is_over = True
            is_left = self._is_left
        if problem is not None:
            self.result.set_exception(problem)
            return
        self.result.set_result(value)  # type: ignore[arg-type]
        if is_left and undo is not None:
            context.run(undo, value)  # type: ignore[arg-type]
        elif self._ended is not None:
            self._ended.wait()
