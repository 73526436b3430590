"""Starts of what runs outside of this process: a cluster, an engine, a tracker, an accelerator.

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
        name: of the service, for the message.
        fix: what to do if it does not answer, for the message.
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
    call = _StartCall(start, undo, name, ended)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(call.result), seconds)
    except TimeoutError:
        if call.is_over():
            raise  # start() raised it
        raise error(_late_message(name, seconds, fix)) from None
    finally:
        call.leave()


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
    call = _StartCall(start, undo, name, ended)
    try:
        return call.result.result(seconds)
    except TimeoutError:
        if call.is_over():
            raise  # start() raised it
        raise error(_late_message(name, seconds, fix)) from None
    finally:
        call.leave()


def _late_message(name: str, seconds: float, fix: str) -> str:
    return f"{name} did not answer within {seconds:g} seconds; {fix}"


class _StartCall(Generic[T]):
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
        thread = threading.Thread(
            target=self._run,
            args=(contextvars.copy_context(), start, undo),
            name=f"start of {name}",
            daemon=True,
        )
        thread.start()

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
        service = None
        failure: BaseException | None = None
        try:
            service = context.run(start)
        except SystemExit as error:
            failure = RuntimeError(f"it tried to exit with {error.code!r}")
        except StopIteration as error:  # a future cannot carry it
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:
            failure = error

        with self._lock:
            self._is_over = True
            is_left = self._is_left
        if failure is not None:
            self.result.set_exception(failure)
            return

        self.result.set_result(service)  # type: ignore[arg-type]
        if is_left and undo is not None:
            context.run(undo, service)  # type: ignore[arg-type]
        elif self._ended is not None:
            self._ended.wait()
